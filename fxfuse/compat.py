"""What is private of PyTorch and fxfuse needs all the same, for each supported version (2.11 to 2.13)."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, maybe_current_level
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import CompileContext
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

# Makes of a function one that Dynamo does not trace; Dynamo is imported when that is called, and not before.
without_dynamo = _disable_dynamo
# A context in which no dispatch mode sees what is called.
disable_dispatch_modes = _disable_current_modes


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for certain, without adding a guard."""
    return bool(a == b) if isinstance(a, int) and isinstance(b, int) else bool(statically_known_true(a == b))


def is_less(a: Any, b: Any) -> bool:
    """Whether a size is less than another for certain, without adding a guard."""
    return bool(statically_known_true(a < b))


def hint(size: Any) -> int:
    """The size that a symbolic size had when the graph was captured (1 where it has none)."""
    if isinstance(size, int):
        return size
    value = getattr(size.node, "hint", None)
    return 1 if value is None else int(value)


def is_known(size: Any) -> bool:
    """Whether a size has a hint; that of what a mask selects has none."""
    return isinstance(size, int) or getattr(size.node, "hint", None) is not None


def value_now(number: torch.SymFloat) -> float | None:
    """What a number of the program was when the graph was captured; None for what the graph computes."""
    value = getattr(number.node, "hint", None)
    return None if value is None else float(value)


def is_guarded(number: torch.SymFloat) -> bool:
    """Whether a number stays what it was anyway, as a function that cannot take others makes it."""
    return not number.node.expr.free_symbols


def guard(number: torch.SymFloat) -> None:
    """Let the graph be captured again where a number is another one."""
    float(number)


def numbers_have_changed() -> bool:
    """Whether what Dynamo captures has as inputs those numbers only that have changed since an earlier capture."""
    from torch._dynamo import config

    return bool(config.assume_static_by_default)


def is_autocast_enabled(device: str) -> bool:
    """Whether autocast is enabled for a kind of device; for one that has none, PyTorch's own question raises.

    Dynamo traces the callers, and PyTorch 2.11's does not know whether a device has one.
    """
    has_one = torch.compiler.is_dynamo_compiling() or torch.amp.is_autocast_available(device)
    return has_one and torch.is_autocast_enabled(device)


def is_plain(example: Any) -> bool:
    """Whether an example value stands for an ordinary strided tensor: no subclass, wrapper or exotic layout."""
    plain = type(example) in (FakeTensor, Tensor, torch.nn.Parameter)
    return plain and example.layout == torch.strided and not example.is_quantized


no_torch_function = torch._C.DisableTorchFunctionSubclass  # of subclasses; those of modes stay
no_torch_function_or_mode = torch._C.DisableTorchFunction  # such as that of a default device


class _OfFunctional:
    """Functions of ``torch.nn.functional`` that are written in C; those in Python may have others beneath."""

    linear = torch._C._nn.linear
    scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention
    logsigmoid = torch._C._nn.log_sigmoid


# Where functions are looked up by name; the module of those that are written in Python, and what has the others.
HOMES: dict[Any, tuple[types.ModuleType, Any]] = {
    torch.Tensor: (torch._tensor, torch._C.TensorBase),
    torch.nn.functional: (torch.nn.functional, _OfFunctional),
    torch.functional: (torch.functional, None),
    torch.autograd: (torch.autograd, None),
    torch: (torch.functional, torch._C._VariableFunctions),
}


@functools.cache
def consists_of_others(op: OpOverload) -> bool:
    """Whether an operator does nothing but call others, so that autograd knows of these alone."""
    has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, op.name())
    return has_kernel("CompositeImplicitAutograd") and not has_kernel("ADInplaceOrView")


def taken_apart(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Call the others, in ``__torch_dispatch__``, as if from outside.

    ``OpOverload.decompose`` prefers what is written in Python, by which ``dropout`` returns a copy where it returns its
    argument.
    """
    with torch.overrides.enable_reentrant_dispatch():
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


# What a fake tensor raises where it is asked for a value, or for a size that depends on one.
NO_VALUE = (DataDependentOutputException, DynamicOutputShapeException)


@contextlib.contextmanager
def fake_parameters_convert() -> Iterator[None]:
    """Let ``nn.Module.to`` and the like convert fake parameters: PyTorch swaps these, but refuses where it has noted
    them in a weak dictionary of its own, as it has all of them.
    """
    with mock.patch.object(torch.utils, "weakref", types.SimpleNamespace(getweakrefs=lambda _: [])):
        yield


def is_fake(tensor: Any) -> bool:
    """Whether a compiled graph returned a tensor without data, as it does when asked for shapes."""
    return isinstance(tensor, FakeTensor)


def is_functional_wrapper(example: Any) -> bool:
    """Whether an example value lives inside a ``torch.func`` transform."""
    return isinstance(example, Tensor) and is_functorch_wrapped_tensor(example)


def forward_ad_active() -> bool:
    """Whether forward-mode differentiation is under way (``torch.autograd.forward_ad.dual_level``)."""
    return torch.autograd.forward_ad._current_level >= 0


def untraceable(why: str) -> Exception:
    """What makes Dynamo break the graph where it is raised, or say so under ``fullgraph=True``."""
    from torch._dynamo.exc import Unsupported

    return Unsupported(why)


def hooks_on_saved() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The hooks that pack and unpack what autograd saves, if there are any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def saving_is_watched() -> bool:
    """Whether hooks see what autograd saves: those of a checkpoint, say, under which a program must repeat itself."""
    return hooks_on_saved() is not None


@contextlib.contextmanager
def counting_saved() -> Iterator[list[None]]:
    """Count in a list what autograd would save of results that are thrown away if it saves anything."""
    saved: list[None] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda _: saved.append(None), lambda _: _):
        yield saved


def in_checkpoint() -> bool:
    """Whether a function runs that the backward of a non-reentrant checkpoint will run again, or does."""
    hooks = hooks_on_saved()
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def current_stream(device: torch.device) -> Callable[[], torch.cuda.Stream]:
    """What makes an object of the stream that is current now: doing so takes the host as long as a launch."""
    stream_id, device_index, device_type = torch._C._cuda_getCurrentStream(device.index)
    return functools.partial(torch.cuda.Stream, stream_id=stream_id, device_index=device_index, device_type=device_type)


def is_traced() -> bool:
    """Whether ``make_fx`` (as of ``torch.func.linearize``) or ``torch.jit.trace`` writes down what operators do."""
    return torch._C._get_tracing_state() is not None or get_proxy_mode() is not None


@contextlib.contextmanager
def tracers_set_aside() -> Iterator[None]:
    """Let nothing be written down meanwhile. Not for use inside of an operator, where ``torch.jit``'s tracer is off."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        with disable_dispatch_modes():
            yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


@contextlib.contextmanager
def modes_set_aside() -> Iterator[None]:
    """Let no mode of the program's, and no transform of ``torch.func``, see or change what is computed meanwhile.

    It was computed before them in eager.
    """
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    if not modes and maybe_current_level() is None:
        yield
        return
    with no_torch_function_or_mode(), disable_dispatch_modes(), temporarily_clear_interpreter_stack():
        yield


def functions_looked_up() -> contextlib.AbstractContextManager[None]:
    """Let functions be looked up in subclasses of ``Tensor`` again, where they are not."""
    return torch._C._EnableTorchFunction()


def has_node(example: Tensor) -> bool | None:
    """Whether gradients flow through an example value; None for a view under no_grad of what was written to later."""
    try:
        return example.grad_fn is not None
    except RuntimeError:
        return None


def dispatch_is_past_python() -> bool:
    """Whether no ``__torch_dispatch__`` is asked here: as where ``torch.tensor`` makes numbers of what is in a list."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python))


def transform_active() -> bool:
    """Whether a ``torch.func`` transform is under way around the caller."""
    return maybe_current_level() is not None


def grad_mode(enabled: bool) -> contextlib.AbstractContextManager[Any]:
    """``torch.set_grad_enabled``, which takes a microsecond where it changes nothing, and that is nearly always."""
    return _UNCHANGED if torch.is_grad_enabled() is enabled else torch.set_grad_enabled(enabled)


_UNCHANGED = contextlib.nullcontext()


def make_code(gm: Any) -> None:
    """Make the code of a graph that was changed, at once: else every call asks whether it has been made."""
    _LazyGraphModule.force_recompile(gm)


def put_placeholders_first(graph: Graph) -> None:
    """Where FX wants them. PyTorch 2.11 has some of sizes behind their first use, if there are several hooks."""
    placeholders = graph.find_nodes(op="placeholder")
    for before, node in itertools.pairwise(placeholders):
        if before.next is not node:
            before.append(node)


def keep_from_precompiled(gm: GraphModule) -> None:
    """Let ``torch._dynamo.config.caching_precompile`` store nothing of a graph.

    It stores what AOTAutograd made of it, by a number that Dynamo left here, and puts that into the place of what the
    backend returned: logits that leave the graph would be hidden states in the next process.
    """
    if hasattr(gm, "_backend_id"):
        del gm._backend_id


def is_whole_graph(gm: Any) -> bool:
    """Whether what a graph is given comes from the user's program, and not from another part of a graph that was split.

    Only the graphs that Dynamo captured know why they end; ``DDPOptimizer`` gives a reason of its own to its parts.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and all(frame.name != "DDPOptimizer" for frame in reason.user_stack)


def end_of_graph(gm: Any) -> tuple[bool, str, list[tuple[str, int, str]]] | None:
    """Whether a captured graph ends at a graph break, Dynamo's reason, and the frames, innermost last.

    A frame is a file, a line and a function. None for a part of a graph that was split.
    """
    if not is_whole_graph(gm):
        return None
    reason = gm.compile_subgraph_reason
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in reason.user_stack]
    return reason.graph_break, reason.reason, frames


def captured_frame() -> tuple[types.CodeType, Any] | None:
    """The code that Dynamo is capturing a graph of, and its ``self``, if any; None for a graph from elsewhere.

    The code of a function that goes on after a graph break is one that Dynamo made, called ``RESUMED`` and so on. Where
    Dynamo captures a function of its own that calls the compiled one, as it does with modules and methods of torch's,
    with partials and with objects, it is the code of that.
    """
    root = _root()
    if root is None:
        return None
    wrapped = _wrapped(root)
    return (root.f_code, root.f_locals.get("self")) if wrapped is None else wrapped[:2]


def _root() -> Any:
    """What Dynamo knows of the frame that it is capturing a graph of, if it is."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output.root_tx
    except AttributeError:
        return None


def _wrapped(root: Any) -> tuple[types.CodeType, Any, dict[str, str]] | None:
    """The code that a function of Dynamo's own, ``inner(*args, **kwargs)``, calls as ``fn``; its ``self``; and the name
    of this and of what a partial gives it, by Dynamo's expression for each. None if ``root`` is no such function.
    """
    from torch._dynamo import external_utils

    place = "L['fn']"
    fn: Any = root.f_locals.get("fn")
    if fn is None or root.f_code.co_filename != external_utils.__file__:
        return None
    args: tuple[Any, ...] = ()
    names: dict[str, str] = {}
    if isinstance(fn, functools.partial):  # which holds no other
        args, names = fn.args, {f"{place}.keywords[{name!r}]": name for name in fn.keywords}
        fn, place = fn.func, f"{place}.func"
    owner = None
    if inspect.ismethod(fn):
        fn, owner, place = fn.__func__, fn.__self__, f"{place}.__self__"
    elif not inspect.isfunction(fn):
        fn, owner = type(fn).forward if isinstance(fn, torch.nn.Module) else type(fn).__call__, fn
    code = getattr(fn, "__code__", root.f_code)
    given = code.co_varnames[owner is not None :]
    names |= {f"L['fn'].args[{i}]": name for i, (name, _) in enumerate(zip(given, args, strict=False))}
    return code, owner, names if owner is None else {place: "self", **names}


COMPILED = "_orig_mod"  # the name of a module in what torch.compile makes of it


def modules_in_modules() -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Every module that is alive in another: that one, the name, the module."""
    for one in gc.get_objects():
        if issubclass(type(one), torch.nn.Module):  # a proxy may claim any class
            children = vars(one).get("_modules", {})  # it may be half made
            yield from ((one, name, child) for name, child in [*children.items()] if child is not None)


RESUMED = "torch_dynamo_resume_in_"  # what the name of such code starts with; then the function, "_at_" and the line


def compile_id() -> str:
    """Dynamo's name for what is being compiled, ``"0/1"``: the second compilation of the first function; or empty."""
    current = CompileContext.current_compile_id()
    return "" if current is None else str(current)


def recompile_reason() -> str:
    """Why the function that is being captured is compiled again, in Dynamo's words; empty if it is not."""
    from torch._dynamo.utils import get_metrics_context

    # It gives single metrics out only at the end.
    return str(get_metrics_context()._metrics.get("recompile_reason") or "")


def forbid_data_access(wrapper: Tensor) -> None:
    """Make C++ raise where it would read the memory of a wrapper, which has none, at address zero."""
    torch._C._set_throw_on_mutable_data_ptr(wrapper)


def send_as_plain(kind: type[Tensor], alone: Callable[[Any], Tensor], connected: Callable[[Any], Tensor]) -> None:
    """Let other processes be sent ordinary tensors in the place of those of ``kind``.

    The picklers of ``torch.multiprocessing`` and of RPC look for the very type of a tensor. The first refuses what is
    no leaf, which it is shown by ``alone``; the second shows distributed autograd what is sent, which gives gradients
    to what ``connected`` is connected to.
    """
    ForkingPickler.register(kind, lambda tensor: reduce_tensor(alone(tensor)))
    if torch.distributed.rpc.is_available():
        from torch.distributed.rpc.internal import _internal_rpc_pickler as rpc

        rpc._register_reducer(kind, lambda tensor: rpc._tensor_reducer(connected(tensor)))


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply``, where no transform of ``torch.func`` is active: it does not look for what is left of one."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def schemas(target: Any) -> list[Any] | None:
    """The schemas of an operator, or None for anything else."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name)._schema for name in target.overloads()]
    return [target._schema] if isinstance(target, torch._ops.OpOverload) else None


@functools.cache
def operator_tags(name: str) -> frozenset[torch.Tag] | None:
    """The tags that any overload of PyTorch's operator of that name has, or None if there is no such operator."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, OpOverloadPacket):
        return None
    return frozenset(tag for overload in packet.overloads() for tag in getattr(packet, overload).tags)


def qualified_name(target: Any) -> str | None:
    """``"fxfuse.linear_loss"`` for an overload of an operator, or None for anything else."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    return target._schema.name.replace("::", ".")


def is_higher_order(target: Any) -> bool:
    """Whether a call target is an operator that runs a graph of its own."""
    return isinstance(target, torch._ops.HigherOrderOperator)


class Versions:
    """How often example values of a graph, or what they are views of, were written to while it was captured."""

    def __init__(self, graph: Graph) -> None:
        # Dynamo makes the example of an input that is no view by an assignment of its storage, which counts as a write,
        # where that is the storage of an input before it or where it begins within it.
        self._begun_at_one: set[Tensor] = set()  # by identity, as tensors are hashed
        owners: dict[int | None, Tensor] = {}
        for example in _inputs_in_order(graph):
            root = viewed(example)
            if owners.setdefault(storage(root), root) is not root or hint(root.storage_offset()):
                self._begun_at_one.add(root)

    def of(self, example: Tensor) -> int:
        """Of one of them."""
        return 0 if example.is_inference() else example._version - (viewed(example) in self._begun_at_one)


def _inputs_in_order(graph: Graph) -> list[Tensor]:
    """The example values of the tensors that Dynamo came upon, also of those that the graph has no use for."""
    examples = (node.meta.get("example_value") for node in graph.find_nodes(op="placeholder"))
    mode = next((example.fake_mode for example in examples if is_fake(example)), None)
    tracked = getattr(getattr(mode, "shape_env", None), "tracked_fakes", None) or ()
    return [one.fake for one in tracked if is_fake(one.fake)]


def viewed(tensor: Tensor) -> Tensor:
    """The tensor that another is a view of, or itself."""
    base = tensor._base
    return tensor if base is None else base


def dynamo_source(node: Any) -> str:
    """The Python expression that a placeholder came from, ``"L['self']._modules['lm_head']"``; or empty."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return in_captured_frame(str(name() if callable(name) else name))  # a method up to torch 2.11, a property later


def in_captured_frame(source: str) -> str:
    """One of Dynamo's expressions as it is in ``captured_frame``."""
    root = _root()
    wrapped = None if root is None else _wrapped(root)
    for expression, name in wrapped[2].items() if wrapped else ():
        source = source.replace(expression, f"L[{name!r}]")
    return source


def given_value(node: Any) -> Any:
    """The tensor of the program that a graph was captured with as a placeholder; None where it is not known."""
    return getattr(getattr(node, "meta", {}).get("grapharg"), "example", None)


def undisabled(run: Callable[..., Any]) -> Callable[..., Any]:
    """What ``torch._dynamo.disable`` made ``run`` of, for a caller that it disables too; else ``run``.

    It wraps what it was given once itself; in a function of ours it would be wrapped twice.
    """
    disabled = getattr(run, "_torchdynamo_disable", False)
    return getattr(run, "_torchdynamo_orig_callable", run) if disabled else run


def uncompiled(fn: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What was compiled into ``fn``, and the options it was compiled with as far as they can be found."""
    inner = getattr(fn, "_torchdynamo_orig_callable", getattr(fn, COMPILED, None))
    if inner is None:
        return fn, {}
    backend = getattr(getattr(fn, "dynamo_ctx", None), "callback", None)
    if backend is None and getattr(fn, "__closure__", None):
        backend = inspect.getclosurevars(fn).nonlocals.get("callback")
    while backend is not None and not hasattr(backend, "kwargs"):
        backend = getattr(backend, "_torchdynamo_orig_backend", None)
    return inner, dict(getattr(backend, "kwargs", {}).get("options") or {})


def version(tensor: Tensor) -> int | None:
    """How often a tensor was written to, as far as autograd knows; None for an inference tensor: it does not know."""
    return None if tensor.is_inference() else tensor._version


def storage(example: Tensor) -> int | None:
    """An identity that all views of one storage share, None for tensors without one."""
    try:
        return example.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def memory_of(value: Any) -> tuple[int, int]:
    """Where the storage of a tensor begins and ends; nothing for one without memory, and for what is no tensor."""
    try:
        storage = value.untyped_storage() if isinstance(value, Tensor) and not is_fake(value) else None
        return (0, 0) if storage is None else (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
    except (NotImplementedError, RuntimeError):
        return 0, 0


@contextlib.contextmanager
def fake_mode_of(example: Any) -> Iterator[None]:
    """Run in the fake mode that an example value belongs to, so that results belong to it too.

    What autograd saves of them must not reach the hooks of a checkpoint around the call that is being compiled, which
    would count it.
    """
    mode = getattr(example, "fake_mode", None)
    seen: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        seen = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with seen, mode if mode is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def cache_key(tag: str) -> Iterator[None]:
    """Add ``tag`` to the key of every compilation cache."""
    from torch.compiler import config

    with config.patch(cache_key_tag=f"{config.cache_key_tag}{tag}"):  # type: ignore[attr-defined]
        yield


@contextlib.contextmanager
def recomputed(wanted: bool) -> Iterator[None]:
    """Let AOTAutograd's partitioner recompute what a product of the backward reads, if that takes no product itself."""
    from torch._functorch import config

    with config.patch(ban_recompute_materialized_backward=False) if wanted else contextlib.nullcontext():
        yield


def change_early_in_inductor(inner: Callable[..., Any], change: Callable[[Graph], None], tag: str) -> bool:
    """Let ``inner``, if it is Inductor, ``change`` each graph of AOTAutograd before anything else does.

    One of a forward and its backward is whole then.

    Returns:
        whether it will; not where the program has set a pass for that moment.
    """
    if not isinstance(inner, torch._TorchCompileInductorWrapper):
        return False
    from torch._inductor import config

    if config.joint_custom_pre_pass is not None or "joint_custom_pre_pass" in inner.config:
        return False

    inner.config["joint_custom_pre_pass"] = _graph_pass(change, tag)
    return True


def _graph_pass(change: Callable[[Graph], None], tag: str) -> Any:
    """``change`` for Inductor, which has ``tag`` in the key of its cache."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Change(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            change(graph)

        def uuid(self) -> str:
            return tag

    return Change()


def is_joint(graph: Graph) -> bool:
    """Whether a graph of AOTAutograd has a backward, whose inputs are tangents."""
    return any(map(is_tangent, graph.find_nodes(op="placeholder")))


def is_tangent(node: Node) -> bool:
    from torch._functorch._aot_autograd.utils import _is_tangent

    return bool(_is_tangent(node))


def is_in_backward(node: Node) -> bool:
    """Whether a node of a joint graph computes with values, not only with sizes, and is from a formula of autograd."""
    name = getattr(node.target, "_opname", "")
    if name.endswith("_like") or name.startswith("new_"):
        return False
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def is_view(node: Node) -> bool:
    return bool(getattr(node.target, "is_view", False))


def has_own_strides(node: Node) -> bool:
    """Whether a view is of the memory that a tensor is in, not of the tensor."""
    return getattr(node.target, "_opname", "") == "as_strided"


def is_mutable(node: Node) -> bool:
    """Whether an operator writes to an argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable


def may_be_made_again(node: Node) -> bool:
    """Whether the partitioner may compute a node of a joint graph in the backward once more."""
    return bool(_kinds_of_ops().is_recomputable(node))


@functools.cache
def _kinds_of_ops() -> Any:
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list()


def must_be_saved(node: Node) -> None:
    """Let the partitioner not compute a node of a joint graph once more."""
    node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE


def is_nested(gm: GraphModule) -> bool:
    """Whether there are graphs in a graph, which PyTorch compiles on their own."""
    return any(isinstance(module, GraphModule) for module in gm.children())


def checkpointed_parts(gm: GraphModule) -> dict[Node, GraphModule]:
    """The calls in a graph of parts that are checkpointed, each with that part."""
    named = {
        node: getattr(gm, str(node.args[0].target), None)
        for node in gm.graph.nodes
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "tag_activation_checkpoint"
    }
    return {node: body for node, body in named.items() if isinstance(body, GraphModule)}


def change_in_inductor(
    inner: Callable[..., Any], change: Callable[[Graph, set[Node]], None], nested: bool, tag: str
) -> None:
    """Let ``inner``, if it is Inductor, ``change`` each graph that AOTAutograd is done with; see also ``_writable``.

    Of ``nested`` graphs it is not known which inputs may be written to. Backwards are compiled when they are first
    called, when ``cache_key`` is over: ``tag``, and what makes inputs writable, are in the key of Inductor's cache for
    all. A program that has set a pass for that moment keeps its own.
    """
    if not isinstance(inner, torch._TorchCompileInductorWrapper):
        return
    from torch._functorch.config import donated_buffer
    from torch._inductor import config

    def changed(graph: Graph) -> None:
        change(graph, set() if nested else _writable(graph))

    if config.post_grad_custom_post_pass is None:
        inner.config.setdefault("post_grad_custom_post_pass", _graph_pass(changed, f"{tag}, {donated_buffer=}"))


def _writable(graph: Graph) -> set[Node]:
    """Inputs that Inductor may write to: AOTAutograd saved them for this backward alone, and runs it but once.

    Empty for graphs without a backward; where CUDA graphs are wanted, as Inductor makes none of what writes to an
    input; and where PyTorch looks for the smallest program that fails: what it knows of inputs is another graph's then.
    """
    from torch._dynamo.config import repro_after
    from torch._inductor import config
    from torch._inductor.utils import get_donated_idxs

    inputs = list(graph.find_nodes(op="placeholder"))
    if config.triton.cudagraphs or repro_after or not is_joint(graph):
        return set()
    return {inputs[at] for at in get_donated_idxs() or ()}


def inner_backend(name: str, mode: str | None, options: dict[str, Any]) -> Callable[..., Any]:
    """What ``torch.compile(backend=name, mode=mode, options=options)`` would call."""
    if name == "inductor":
        return torch._TorchCompileInductorWrapper(mode, options, None)
    return torch._TorchCompileWrapper(name, mode, options, None)


def inductor_options() -> set[str]:
    """Every key that Inductor accepts in ``options``."""
    from torch._inductor import config

    return set(config.get_config_copy())


def is_captured_anew(error: BaseException) -> bool:
    """Whether an error is how a compilation ends that Dynamo begins anew."""
    from torch._dynamo.exc import RestartAnalysis

    return isinstance(error, RestartAnalysis)


def as_raised(error: Exception) -> Exception:
    """``error`` in a form that Dynamo raises as it is, not wrapped in ``BackendCompilerFailed``."""
    from torch._dynamo.exc import ShortenTraceback

    kind = type(error)
    unwrapped = type(kind.__name__, (ShortenTraceback, kind), {"__module__": kind.__module__})
    return unwrapped(*error.args, first_useful_frame=None)


def backend_of(name: str) -> Callable[..., Any]:
    """The registered backend of this name."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)


def backends() -> list[str]:
    """The names of every registered backend, debugging ones included."""
    from torch._dynamo.backends.registry import list_backends

    return list_backends(exclude_tags=None)


def counters() -> Any:
    """What Dynamo counts, by name: a ``Counter`` for each."""
    from torch._dynamo.utils import counters

    return counters


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Write a JSON artifact into the structured trace (TORCH_TRACE), if there is one."""
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=payload)


def around_compilations(start: Callable[[], None], end: Callable[[], None]) -> None:
    """Have ``start`` and ``end`` called around everything that Dynamo compiles from now on, in this process."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(lambda _: start())
    callback_handler.register_end_callback(lambda _: end())
