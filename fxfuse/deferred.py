"""The run-time driver: logits that left a compiled graph, computed when something reads them, and only then.

A ``DeferredLogits`` is to autograd and to every PyTorch function the tensor that eager returns. Two things are
different underneath:

- ``__torch_function__`` looks a function up in the rule table. What a rule makes of logits is deferred again; what it
  reads of them is computed by a fused op from the operands, and its gradients go to the operands directly.
- ``__torch_dispatch__``, where everything else ends up, puts the values in. They are built once and kept.

Tensors that share memory in eager do so here: as soon as something could see the difference (a view that has no
rule, a write, a NumPy array), the values of all of them are views of one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

from . import compat, errors
from .algebra import ClassTensor, Logits, Reader
from .eager import EMIT, dense, pull_back
from .operands import Operands
from .passes import compute
from .report.records import Site, journal
from .report.source import caller
from .rules import TABLE, Call, Keep, cut_off


@dataclass(eq=False)
class Origin:
    """What all tensors share that come from one output of one call.

    Attributes:
        site: the head, for the report.
        operands: of the projection.
        memory: the option ``fxfuse.memory``.
        hooked: a hook waits for the gradient of one of them, so that all gradients must pass through it.
        bypassed: a fused op has read one of them, and its gradients do not pass through any.
    """

    site: Site
    operands: Operands
    memory: int
    hooked: bool = False
    bypassed: bool = False


@dataclass(eq=False)
class _Memory:
    """What tensors share that have one memory in eager: the one that owns it, and whether theirs must be one too."""

    owner: _State
    one: bool = False


@dataclass(eq=False)
class _State:
    """What a ``DeferredLogits`` knows besides what every tensor does.

    Attributes:
        meta: a tensor without data of the same shape, strides and dtype.
        thunk: the operator, and its arguments, that makes it of others (states in their place); None for an output.
        is_view: whether that operator returns a view.
        described: what it is, where rules can tell.
        values: all of it, once they were needed.
        node, requires_grad: what autograd knew of it when it was described.
    """

    origin: Origin
    meta: Tensor
    thunk: tuple[Any, ...] | None = None
    is_view: bool = False
    described: ClassTensor | None = None
    values: Tensor | None = None
    node: Any = None
    requires_grad: bool = False
    memory: _Memory = field(init=False)

    def __post_init__(self) -> None:
        parent = next(self.parents(), None) if self.is_view else None
        self.memory = _Memory(self) if parent is None else parent.memory

    def parents(self) -> Iterator[_State]:
        return (part for part in tree_iter(self.thunk) if isinstance(part, _State))

    def read(self) -> Tensor:
        """The values, perhaps in memory of their own."""
        if self.memory.one:
            return self._viewed()
        if self.values is None:
            self.values = self._build()
            if self.thunk is None:
                self.origin.operands.are_read()
            elif not self.is_view:
                self.thunk = ()  # done, and what it was made of may go
        return self.values

    def share(self) -> Tensor:
        """The values in the memory that every view of it has."""
        if not self.memory.one:
            self.memory.owner.read()
            self.memory.one = True
        return self._viewed()

    def _viewed(self) -> Tensor:
        if self is self.memory.owner:
            assert self.values is not None
            return self.values
        assert self.thunk is not None
        function, args, kwargs = tree_map_only(_State, _State._viewed, self.thunk)
        return function(*args, **kwargs)

    def is_built(self) -> bool:
        """Whether the values can be had without a product."""
        if self.values is not None or self.memory.one:
            return True
        return self.thunk is not None and all(p.is_built() and not p.memory.one for p in self.parents())

    def _build(self) -> Tensor:
        whole = all(parent.meta.numel() == self.meta.numel() for parent in self.parents())
        if self.described is not None and not self.is_built() and not (self._parents_wait() and whole):
            return self._project()
        if not self._parents_wait():
            raise AssertionError("an intermediate of deferred logits is read after they were written to")
        # As eager does it. A part of the rows alone is projected alone.
        function, args, kwargs = tree_map_only(_State, _State.read, self.thunk)
        return function(*args, **kwargs)

    def _parents_wait(self) -> bool:
        """Whether what it is made of is still what it was."""
        return self.thunk is not None and not any(parent.memory.one for parent in self.parents())

    def _project(self) -> Tensor:
        assert self.described is not None
        operands = self.origin.operands
        operands.check()
        with torch.no_grad():
            values = dense(replace(self.described, head=operands.head))
        journal.note("read", self.origin.site, caller(), values.nbytes)
        return _laid_out(values, self.meta)


def _laid_out(values: Tensor, like: Tensor) -> Tensor:
    """``values`` with their axes in memory in the order of those of ``like``."""
    order = sorted(range(like.dim()), key=lambda axis: (-like.stride()[axis], axis))
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return values.permute(order).contiguous().permute(inverse)


# --- the tensor -----------------------------------------------------------------------------------------------


class _Mode(threading.local):
    """``deferring``: operators are not run. ``wrote``: one of them writes to what an earlier one returned."""

    deferring = False
    wrote = False


_mode = _Mode()


class DeferredLogits(Tensor):
    """Logits that are computed when they are read. Made by the backend; see the module."""

    _deferred: _State

    @staticmethod
    def __new__(cls, state: _State, device: torch.device) -> DeferredLogits:
        meta = state.meta
        made = Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype,
            device=device,
        )  # fmt: skip
        made._deferred = state
        return made

    @classmethod
    @torch._dynamo.disable
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _KNOWN.issuperset(types):
            args, kwargs = tree_map_only(DeferredLogits, _plain, (args, kwargs))
            return func(*args, **kwargs)
        if func in _DATA:
            args, kwargs = tree_map_only(DeferredLogits, _DATA[func], (args, kwargs))
        elif func in _NEEDS_PATH:
            _needs_path(func, args, kwargs)
        elif (found := _look_up(func, args)) is not None:
            entry, function, args = found
            result = _apply(entry, function, func, args, kwargs)
            if result is not NotImplemented:
                return result
            args = (args[0],) if function is getattr else args
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    @torch._dynamo.disable
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _mode.deferring or func in _ALWAYS_DEFERRED:
            return _defer(func, args, kwargs)
        if func in _OF_SHAPES:
            return func(_meta(args[0]), *args[1:], **{**kwargs, "device": kwargs.get("device") or args[0].device})
        written, aliased = _touches(func, args, kwargs)
        values = _State.share if aliased else _State.read
        plain_args, plain_kwargs = tree_map_only(DeferredLogits, lambda t: values(t._deferred), (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        return written if written is not None and isinstance(out, Tensor) else out

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return repr(_plain(self))


_KNOWN = {Tensor, torch.nn.Parameter, torch.nn.Buffer, DeferredLogits}
_OF_SHAPES = {
    getattr(torch.ops.aten, name).default
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
}
_ALWAYS_DEFERRED = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _touches(func: Any, args: Any, kwargs: Any) -> tuple[DeferredLogits | None, bool]:
    """The deferred tensor that an operator writes to, if any; and whether it writes to or returns a view of one."""
    written, aliased = None, False
    for i, argument in enumerate(func._schema.arguments):
        given = args[i] if i < len(args) else kwargs.get(argument.name)
        if argument.alias_info is None:
            continue
        for one in given if isinstance(given, (tuple, list)) else (given,):
            if isinstance(one, DeferredLogits):
                aliased = True
                if argument.alias_info.is_write:
                    written = one
    return written, aliased


def _defer(func: Any, args: Any, kwargs: Any) -> Any:
    """What ``func`` returns, computed when it is read."""
    written, _ = _touches(func, args, kwargs)
    if written is not None:
        if written._deferred.described is not None:
            raise _NotDeferred
        _mode.wrote = True
        return written
    first = next(t for t in tree_iter((args, kwargs)) if isinstance(t, DeferredLogits))
    if kwargs.get("device") not in (None, first.device):
        raise _NotDeferred
    out = func(*tree_map(_meta, args), **tree_map(_meta, kwargs))
    is_view = any(result.alias_info is not None for result in func._schema.returns)
    thunk = tree_map(lambda t: t._deferred if isinstance(t, DeferredLogits) else t, (func, args, kwargs))

    def wrap(meta: Tensor) -> DeferredLogits:
        return DeferredLogits(_State(first._deferred.origin, meta, thunk, is_view), first.device)

    return tree_map_only(Tensor, wrap, out)


class _NotDeferred(Exception):
    """An operator that cannot wait."""


def _meta(value: Any) -> Any:
    if isinstance(value, DeferredLogits):
        return value._deferred.meta
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


# --- functions that need more than values ---------------------------------------------------------------------


class _Plain(torch.autograd.Function):
    """The values as an ordinary tensor."""

    @staticmethod
    def forward(ctx: Any, deferred: DeferredLogits, values: Tensor) -> Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


def _plain(deferred: DeferredLogits) -> Tensor:
    """An ordinary tensor in the same memory, through which gradients flow to ``deferred``."""
    with torch._C.DisableTorchFunctionSubclass():
        return _Plain.apply(deferred, deferred._deferred.share())


def _copied(deferred: DeferredLogits) -> Tensor:
    """Like ``_plain``, for what only looks at the values."""
    with torch._C.DisableTorchFunctionSubclass():
        return _Plain.apply(deferred, deferred._deferred.read())


_DATA: dict[Any, Callable[[DeferredLogits], Tensor]] = {
    **{getattr(Tensor, name): _copied for name in ("tolist", "__format__", "__reduce_ex__", "__deepcopy__")},
    **{
        getattr(Tensor, name): _plain
        for name in (
            *("numpy", "__array__", "data_ptr", "storage", "untyped_storage", "_typed_storage", "__dlpack__"),
            *("__dlpack_device__", "share_memory_", "is_shared", "pin_memory"),
        )
    },
    **{getattr(Tensor, name).__get__: _plain for name in ("data", "__cuda_array_interface__")},
}

_NEEDS_PATH = (
    *(Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook),
    *(torch.autograd.grad, torch.autograd.backward),
)


def _needs_path(func: Any, args: Any, kwargs: Any) -> None:
    """Before a function that wants the gradient of deferred logits themselves: refuse if some have gone past them."""
    if func in (torch.autograd.grad, torch.autograd.backward):
        wanted = kwargs.get("inputs", args[1] if func is torch.autograd.grad and len(args) > 1 else ())
    else:
        wanted = args[:1]
    for tensor in tree_iter(wanted):
        if isinstance(tensor, DeferredLogits):
            origin = tensor._deferred.origin
            if origin.bypassed:
                raise errors.gradient_went_past(func.__name__)
            origin.hooked = True


# --- rules ----------------------------------------------------------------------------------------------------


def _look_up(func: Any, args: Any) -> tuple[Any, Any, Any] | None:
    """The rule of ``func``, the function that it is the rule of, and the arguments of that."""
    name = _ATTRIBUTES.get(func)
    if name is not None:
        func, args = getattr, (args[0], name)
    entry = TABLE.get(func)
    return None if entry is None else (entry, func, args)


_ATTRIBUTES = {getattr(Tensor, name).__get__: name for name in ("T", "mT")}


def _apply(entry: Any, function: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """What the rule makes of the call, or NotImplemented."""
    deferred = [t for t in tree_iter((args, kwargs)) if isinstance(t, DeferredLogits)]
    if not all(_is_described(t) for t in deferred):
        return NotImplemented
    first, origin = deferred[0], deferred[0]._deferred.origin
    call_args = args[:1] if function is getattr else args
    try:
        out, wrote = _deferring(func, call_args, kwargs)
        call = Call(function.__name__, out, EMIT.example)
        outcome = cut_off(call, entry(call, *tree_map_only(DeferredLogits, _description, (args, kwargs))))
        if isinstance(outcome, Reader):
            return _read(origin, call, outcome)
    except (Keep, _NotDeferred):
        return NotImplemented
    except errors.StaleLogitsError:
        if all(t._deferred.is_built() for t in deferred):
            return NotImplemented
        raise
    except Exception:
        return NotImplemented  # a wrong call, of which eager shall say what is wrong
    if wrote:
        return NotImplemented
    if out is not first:
        _describe(out, outcome)
    return out


def _deferring(func: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
    """What ``func`` returns, deferred; and whether that cannot be read, because it was written to on the way."""
    before = _mode.deferring, _mode.wrote
    _mode.deferring, _mode.wrote = True, False
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs), _mode.wrote
    finally:
        _mode.deferring, _mode.wrote = before


def _is_described(tensor: DeferredLogits) -> bool:
    """Whether the description holds: nothing was written, and gradients may go to the operands directly."""
    state = tensor._deferred
    if state.described is None or state.memory.one or state.origin.hooked:
        return False
    if compat.forward_ad_active() or compat.transform_active():
        return False
    with torch._C.DisableTorchFunctionSubclass():
        same = tensor.requires_grad == state.requires_grad and tensor.grad_fn is state.node
        return same and (tensor.is_inference() or tensor._version == 0)


def _description(tensor: DeferredLogits) -> ClassTensor:
    described = tensor._deferred.described
    assert described is not None
    return replace(described, head=tensor._deferred.origin.operands.head)


def _describe(tensor: DeferredLogits, described: ClassTensor) -> None:
    state = tensor._deferred
    with torch._C.DisableTorchFunctionSubclass():
        state.described, state.node, state.requires_grad = described, tensor.grad_fn, tensor.requires_grad


def _read(origin: Origin, call: Call, reader: Reader) -> Tensor:
    """What ``reader`` returns, by a fused op."""
    head = reader.source.head
    for operand in reader.operands:
        if not compat.is_plain(operand) or operand.device != head.input.device:
            call.keep("subclass")
    if reader.source.requires_grad and origin.operands.copied:
        call.keep("operand_mutated", "an optimizer's step")  # as in eager, the backward must complain
    origin.operands.check()
    origin.bypassed |= reader.source.requires_grad
    _, (result,) = compute(EMIT, head, (reader,), in_checkpoint=False, memory=origin.memory)
    # In memory of its own: the backward may need what it was made of.
    return result.to(call.out.dtype, copy=True, memory_format=torch.contiguous_format)


# --- making them ----------------------------------------------------------------------------------------------


class _Projection(torch.autograd.Function):
    """From the operands to the deferred logits; gradients that reach these flow on as through a linear."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, value: Logits, origin: Origin
    ) -> DeferredLogits:
        ctx.save_for_backward(input, weight, bias)
        ctx.value = replace(value, head=replace(value.head, input=None, weight=None, bias=None))
        ctx.set_materialize_grads(False)
        meta = torch.empty(tuple(value.shape), dtype=value.dtype, device="meta")
        return DeferredLogits(_State(origin, meta), input.device)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Any, ...]:
        if g is None:
            return (None,) * 5
        input, weight, bias = ctx.saved_tensors
        head = replace(ctx.value.head, input=input, weight=weight, bias=bias)
        grads = pull_back(replace(ctx.value, head=head), g)
        return *(g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)), None, None


def defer(value: Logits, site: Site, least: int, memory: int) -> Tensor:
    """The logits that ``value`` describes, whose operands are tensors; computed when they are read.

    Args:
        value: logits without row operations, the class axis last.
        site: of the head, for the report.
        least: logits of fewer bytes are computed at once.
        memory: the option ``fxfuse.memory``.
    """
    head = value.head
    with torch.set_grad_enabled(torch.is_grad_enabled() and value.requires_grad):
        small = math.prod(value.shape) * value.dtype.itemsize < max(least, 1)
        if small or compat.transform_active() or compat.forward_ad_active():
            return dense(value)
        origin = Origin(site, Operands(head, lambda size: journal.note("copied", site, caller(), size)), memory)
        made = _Projection.apply(head.input, head.weight, head.bias, value, origin)
    _describe(made, replace(value, requires_grad=made.requires_grad))
    return made
