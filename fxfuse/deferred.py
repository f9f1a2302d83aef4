"""The run-time driver: logits that left a compiled graph, computed when something reads them, and only then.

A ``DeferredLogits`` is to autograd and to every PyTorch function the tensor that eager returns. Two things are
different underneath:

- ``__torch_function__`` looks a function up in the rule table. What a rule makes of logits is deferred again; what it
  reads of them is computed by a fused op from the operands, and its gradients go to the operands directly.
- ``__torch_dispatch__``, where everything else ends up, puts the values in (``lazy_tensor``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import getattr_static
from typing import Any, TypeVar

import torch
import torch._dynamo
from torch import Tensor

from . import compat, errors, hooks, trees
from .algebra import ClassTensor, Entries, OfTwoHeads, constant
from .eager import EMIT
from .indices import has_fitting_mask, is_mask, rows_and_class, without_masks
from .lazy import Described, parts_of, used_on
from .lazy_tensor import (
    LazyTensor,
    NotDeferred,
    become,
    connected_to,
    head_of,
    hooks_as_called_outside,
    is_by_others,
    is_leaf,
    origins_of,
    plain_of,
    run_deferred,
    shape_of,
)
from .lists import list_of, write_one_by_one, writes_to_list
from .mutation import is_inplace_name
from .origin import locked, working
from .originals import original, original_or_itself
from .readers import Reader
from .reading import heads_for, read
from .report.chain import Applied
from .report.records import journal
from .report.source import caller
from .rules import IN_PLACE, TABLE, Call, Keep, Rule, outcomes_of
from .rules.transforms import listed_classes

_T = TypeVar("_T", bound=Tensor)


class DeferredLogits(LazyTensor):
    """Logits ``[..., V]`` that are computed when they are read, in what a compiled function returns.

    A tensor of eager's shape, strides, dtype, device and gradient. The losses and statistics that fxfuse has rules for
    are computed from it without its values, in the accumulation dtype and with gradients that go to the hidden states
    and the weight directly; anything else computes the values, once. ``fxfuse.reads()`` says where that happened.

    Raises:
        StaleLogitsError: from a read, after the hidden states, the weight or the bias have been changed by anything
            but the step of an optimizer.
        FxfuseError: from a hook, ``retain_grad`` or ``autograd.grad`` for a gradient that has gone past it; from a
            change of its shape or memory in place (``unsqueeze_``, ``resize_``, ``set_``, ``.data =``, ``out=`` of a
            result of another shape).
        Unsupported: from Dynamo, where another function that is compiled with ``fullgraph=True`` uses it.
    """

    # Node, requires_grad and version that the description was made for. In the state they would be a cycle through C++.
    _known_to_autograd: tuple[Any, bool, int | None]

    @torch._dynamo.disable
    def as_subclass(self, cls: type[_T]) -> _T:
        """The values as a tensor of another subclass, through which gradients flow back here."""
        return self.plain().as_subclass(cls)

    @classmethod
    @torch._dynamo.disable
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        func = original(func)
        if not _KNOWN.issuperset(types):
            return _beside_another_subclass(func, args, kwargs)
        if compat.is_traced():  # which would write down how they are computed
            with compat.tracers_set_aside():
                trees.map_only(DeferredLogits, lambda tensor: tensor._deferred.share(), (args, kwargs))
        if func in _DATA:
            with compat.modes_set_aside():  # in eager, too, it is what it was outside
                args = tuple(_DATA[func](arg) if isinstance(arg, DeferredLogits) else arg for arg in args)
            if func is _DEEPCOPY:
                # Copies are remembered by the identity of what was copied, which must not be anything else's meanwhile.
                args[1].setdefault(id(args[1]), []).append(args[0])
        elif writes_to_list(func):
            if any(isinstance(tensor, DeferredLogits) for tensor in list_of(*args, **kwargs)):
                return write_one_by_one(func, *args, **kwargs)
            # Of ordinary tensors that are written to PyTorch loses the version, where another list has a subclass.
            args, kwargs = trees.map_only(DeferredLogits, DeferredLogits.plain, (args, kwargs))
            return func(*args, **kwargs)
        elif func in _NUMBERS and compat.dispatch_is_past_python():
            args = tuple(map(_looked_at, args))
        elif func is _NEW_TENSOR:
            args, kwargs = trees.map_only(DeferredLogits, _looked_at, (args, kwargs))
        elif func in _REFUSED:
            raise errors.deferred_cannot(_REFUSED[func], head_of(args))
        elif func is _ITER and args[0].dim():
            return iter(args[0].unbind(0))
        elif func is _GETITEM and isinstance(args[0], DeferredLogits) and has_fitting_mask(_shape(args[0]), args[1]):
            return args[0][without_masks(args[1])]
        elif func is _GETITEM and isinstance(args[0], DeferredLogits) and (apart := _rows_apart(*args)) is not None:
            rows, of_class = apart
            return args[0][rows][of_class]
        elif func is _REGISTER_HOOK and hooks.is_signal(args[1]):
            for origin in args[0]._deferred.origins:
                origin.signals.append(args[1])
        elif func is _REGISTER_HOOK and hooks.is_factor(args[1]) and args[0]._deferred.thunk is None:
            args[0]._deferred.origin.factors.append(args[1])
        elif func in _OF_GRADIENTS:
            _gradient_is_wanted(func, args, kwargs)
        elif func is _SETITEM and (masked := _as_mask(*args)) and _become(_method("masked_fill_"), masked, {}):
            return None
        elif func in IN_PLACE and _become(func, args, kwargs):
            return args[0]
        elif (found := _look_up(func, args)) is not None:
            result = _apply(*found, func, args, kwargs)
            if result is not NotImplemented:
                return result
        with compat.no_torch_function():
            if not compat.saving_is_watched():
                return func(*args, **kwargs)
            with hooks_as_called_outside():
                return func(*args, **kwargs)


_KNOWN = {Tensor, torch.nn.Parameter, torch.nn.Buffer, DeferredLogits}
compat.send_as_plain(DeferredLogits, plain_of, connected_to)


# --- functions that need more than values ---------------------------------------------------------------------


def _looked_at(deferred: DeferredLogits) -> Tensor:
    return deferred._deferred.read().detach()


def _in_memory(deferred: DeferredLogits) -> Tensor:
    return deferred._deferred.share().detach()


def _method(name: str) -> Any:
    return original_or_itself(getattr(Tensor, name))


_DEEPCOPY, _ITER, _REGISTER_HOOK = _method("__deepcopy__"), _method("__iter__"), _method("register_hook")
_NUMBERS = {_method(f"__{name}__") for name in ("float", "int", "bool", "complex", "index")}
_NEW_TENSOR, _CLONE = _method("new_tensor"), _method("clone")
_GETITEM, _SETITEM = _method("__getitem__"), _method("__setitem__")
_GRAD, _BACKWARD = original_or_itself(torch.autograd.grad), original_or_itself(torch.autograd.backward)

_DATA: dict[Any, Callable[[DeferredLogits], Tensor]] = {
    **{_method(name): _looked_at for name in ("tolist", "__format__")},
    **{
        _method(name): _in_memory
        for name in (
            *("data_ptr", "const_data_ptr", "storage", "untyped_storage", "_typed_storage", "__dlpack_device__"),
            "is_shared",
        )
        if hasattr(Tensor, name)  # ``const_data_ptr``: from 2.12 on
    },
    **{
        _method(name): plain_of
        for name in (
            *("numpy", "__array__", "__dlpack__", "share_memory_", "pin_memory", "__reduce_ex__", "__deepcopy__"),
            *("apply_", "map_"),
        )
    },
    getattr(Tensor, "data").__get__: _in_memory,  # noqa: B009
    getattr(Tensor, "__cuda_array_interface__").__get__: plain_of,  # noqa: B009
}
_REFUSED = {
    Tensor.data.__set__: "the assignment to .data",  # type: ignore[attr-defined]
    _method("set_"): "set_",
    _method("resize_"): "resize_",
}
_GRAD_FN = getattr(Tensor, "grad_fn").__get__  # noqa: B009 (to mypy it is a node)
_OF_GRADIENTS = {
    *(_REGISTER_HOOK, _method("retain_grad"), _method("register_post_accumulate_grad_hook")),
    *(_GRAD, _BACKWARD, _GRAD_FN),
}


def _gradient_is_wanted(func: Any, args: Any, kwargs: Any) -> None:
    """From now on gradients pass through the tensor that ``func`` is about; refuse if some have gone past it."""
    if func == _GRAD_FN and hooks.node_is_only_asked_for():
        return
    wanted = args[:1]
    if func in (_GRAD, _BACKWARD):
        wanted = kwargs.get("inputs", args[1] if func is _GRAD and len(args) > 1 else ())
    for tensor in trees.leaves(wanted):
        # Nothing but what reads a leaf itself has a gradient for it.
        if isinstance(tensor, DeferredLogits) and tensor._deferred.described is not None and not is_leaf(tensor):
            for origin in tensor._deferred.origins:
                if origin.bypassed and func != _GRAD_FN:
                    raise errors.gradient_went_past(func.__name__, origin.head)
                origin.hooked = True


def _beside_another_subclass(func: Any, args: Any, kwargs: Any) -> Any:
    """``func`` of deferred logits and tensors of a subclass that fxfuse does not know, whose turn is next."""
    if not _writes_to_logits(func, args, kwargs):
        args, kwargs = trees.map_only(DeferredLogits, DeferredLogits.plain, (args, kwargs))
        return func(*args, **kwargs)
    # A write to an ordinary tensor in their place would not be seen by autograd.
    others = {type(t) for t in trees.leaves((args, kwargs)) if isinstance(t, Tensor)} - _KNOWN
    if not others or not all(map(_is_another_name_for_tensor, others)):
        return NotImplemented
    args, kwargs = trees.map_only(tuple(others), lambda tensor: tensor.as_subclass(Tensor), (args, kwargs))
    return func(*args, **kwargs)


def _writes_to_logits(func: Any, args: Any, kwargs: Any) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name == "__set__" or is_inplace_name(name)
    written = (args[:1] if in_place else (), kwargs.get("out"))
    return any(isinstance(t, DeferredLogits) for t in trees.leaves(written))


def _is_another_name_for_tensor(kind: type[Tensor]) -> bool:
    """Whether functions of tensors of a subclass are PyTorch's own."""
    names = "__torch_function__", "__torch_dispatch__"
    return all(getattr_static(kind, name) is getattr_static(Tensor, name) for name in names)


# --- rules ----------------------------------------------------------------------------------------------------


def _as_mask(logits: Any, index: Any, value: Any) -> tuple[Any, ...] | None:
    """The arguments of ``masked_fill_`` that do the same, if something is assigned to some classes of every row."""
    described = _description(logits) if isinstance(logits, DeferredLogits) and _is_described(logits) else None
    if not isinstance(described, ClassTensor) or not isinstance(described.vocab, int):
        return None
    classes = listed_classes(index, described.class_dim, described.shape, lambda entry: entry)
    if classes is None:
        return None
    mask = torch.zeros(described.vocab, dtype=torch.bool, device=logits.device)
    mask[classes] = True
    if isinstance(value, (int, float)):  # which an assignment makes infinite, or refuses, otherwise than masked_fill
        value = _as_assigned(value, logits.dtype, 0)
    elif isinstance(value, Tensor) and value.dtype != logits.dtype and not isinstance(classes, slice):
        if not is_mask(classes) or _entries(value) is None:
            return None
        value = _as_assigned(value, logits.dtype, torch.ones(1, dtype=torch.bool, device="cpu"))
    return logits, mask.view([-1 if i == described.class_dim else 1 for i in range(logits.dim())]), value


def _as_assigned(number: float | Tensor, dtype: torch.dtype, at: int | Tensor) -> float:
    """A number as a tensor holds it that it is assigned to, ``at`` such an index.

    Raises:
        RuntimeError, ValueError: what an assignment raises for a number that is too large.
    """
    with compat.no_torch_function(), compat.disable_dispatch_modes():
        one = torch.zeros(1, dtype=dtype, device="cpu")
        one[at] = number
        return one.item()


def _rows_apart(logits: DeferredLogits, index: Any) -> tuple[Any, Any] | None:
    """The two indices that ``rows_and_class`` makes of one, if the last axis of the logits is that of their classes.

    A tensor without a class axis cannot be described, but the rows can, and these alone are computed.
    """
    # First, as under a transform of ``torch.func`` no index may be asked for its value.
    described = _description(logits) if _is_described(logits) else None
    if not isinstance(described, ClassTensor) or not described.classes_last:
        return None
    return rows_and_class(len(_shape(logits)), described.vocab, index)


def _look_up(func: Any, args: Any) -> tuple[Rule, str, Any] | None:
    """The rule of ``func``, its name, and the arguments as the rule wants them."""
    attribute = _ATTRIBUTES.get(func)
    if attribute is not None:
        return TABLE[getattr], attribute, (args[0], attribute)
    entry = TABLE.get(func)
    return None if entry is None else (entry, func.__name__, args)


_ATTRIBUTES = {getattr(Tensor, name).__get__: name for name in ("T", "mT")}


def _apply(entry: Rule, name: str, rule_args: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """What the rule makes of the call, or NotImplemented where values are needed."""
    deferred = [t for t in trees.leaves((args, kwargs)) if isinstance(t, DeferredLogits)]
    # Whatever is derived of them is so before another thread writes to them, or after.
    with locked(origin for t in deferred for origin in t._deferred.origins):
        return _apply_locked(entry, name, rule_args, func, args, kwargs, deferred)


def _apply_locked(
    entry: Rule, name: str, rule_args: Any, func: Any, args: Any, kwargs: Any, deferred: list[DeferredLogits]
) -> Any:
    if not all(map(_is_described, deferred)):
        return NotImplemented
    origins = origins_of(deferred)
    if len(origins) > 1 and any(origin.factors for origin in origins):  # which are for the gradient of one
        return NotImplemented
    stacked = any(isinstance(_description(t), tuple) for t in deferred)
    if stacked and not entry.takes_parts:
        return NotImplemented
    said = name if rule_args is args else "getattr"  # of an attribute
    calls = (*deferred[0]._deferred.calls, Applied.of(func, said, rule_args, kwargs, deferred[0]))
    try:
        if entry.derives or stacked:
            repeated = compat.in_checkpoint()
            with compat.counting_saved() if repeated else hooks_as_called_outside(deferred) as saved:
                out = run_deferred(func, args, kwargs)
            if repeated and saved:  # it must be the same that is saved again, whatever has values by then
                return NotImplemented
        else:
            out = shape_of(func, args, kwargs)
        with compat.no_torch_function():
            call = Call(
                name,
                out,
                EMIT.example,
                reader_of=deferred[0]._deferred.origin.reader_of,
                entries_of=_entries,
                grad=torch.is_grad_enabled(),
                autocast=compat.is_autocast_enabled(deferred[0].device.type),
            )
            result = entry(call, *trees.map_only(DeferredLogits, _description, (rule_args, kwargs)))
            readers = result if isinstance(result, tuple) else (result,)
            if entry.derives and isinstance(result, Reader) and _is_view_of(out, deferred[0]):
                out._deferred.calls = calls
                return out  # of one class; what is written to it is written to all of them
            # What unbinds no rows makes nothing, of which nothing is to be computed.
            derives = not readers or any(isinstance(outcome, ClassTensor) for outcome in readers)
            # What is derived of one is as good as that one; else a gradient to one of them could be lost.
            if not (derives and len(deferred) == 1) and not all(map(_claims_what_it_is, deferred)):
                call.keep("unknown_reader")
            if derives:
                given = tuple(part for t in deferred for part in parts_of(_description(t)))
                freeze = _Freeze(given)
                described: dict[DeferredLogits, list[ClassTensor]] = {}
                for outcome, made in outcomes_of(call, result, given):
                    if isinstance(outcome, ClassTensor) and made is not deferred[0]:
                        if len(outcome.heads()) > 1 and not isinstance(outcome, OfTwoHeads):
                            call.keep("unknown_reader", f"{name} of logits of several calls")
                        outcome = outcome.map(freeze, since=given)
                        described.setdefault(made, []).append(outcome)
                for made, parts in described.items():
                    is_stack = isinstance(result, tuple) and made is out
                    describe(made, tuple(parts) if is_stack else parts[0])
                    made._deferred.calls = calls
                return out
        if any(r.entries for r in readers) and any(t._deferred.is_read_in_part() for t in deferred):
            call.keep("unknown_reader")  # of the same rounding as what was read before
        if compat.in_checkpoint():
            call.keep("unknown_reader", "a checkpointed function")  # as above
        with working(origin for t in deferred for origin in t._deferred.origins) as here:
            heads = heads_for([t._deferred for t in deferred], call, readers)
            results = [used_on(here, result) for result in read(call, readers, heads)]
    except (Keep, NotDeferred):
        return NotImplemented
    except errors.StaleLogitsError as error:
        # It may be of those that have values, perhaps as one of several that another is made of; if not, computing the
        # others raises.
        if any(t._deferred.is_built() or t._deferred.others for t in deferred) and not is_by_others(error):
            return NotImplemented
        raise
    for origin, _ in heads.values():
        before = origin.way.chain if origin.way else "…"
        journal.note_fused(origin.site, origin.weight, origin.head, caller(), before, calls)
    return type(out)(results) if isinstance(out, tuple) else results[0]


def _is_view_of(out: Any, deferred: DeferredLogits) -> bool:
    return isinstance(out, DeferredLogits) and out._deferred.memory is deferred._deferred.memory


def _is_described(tensor: DeferredLogits) -> bool:
    """Whether the description holds: nothing was written, and gradients may go to the operands directly."""
    state = tensor._deferred
    if state.described is None or state.memory.one or any(origin.waits_for_gradients() for origin in state.origins):
        return False
    if compat.forward_ad_active() or compat.transform_active():
        return False
    with compat.no_torch_function():
        return _to_autograd(tensor) == tensor._known_to_autograd


def _claims_what_it_is(tensor: DeferredLogits) -> bool:
    """Whether gradients flow through it where it says so: not through a view made under no_grad (``rules.cut_off``)."""
    with compat.no_torch_function():
        claims = tensor.requires_grad and torch.is_grad_enabled()
    return not claims or any(part.requires_grad for part in parts_of(_description(tensor)))


def _shape(tensor: DeferredLogits) -> torch.Size:
    return tensor._deferred.meta.shape  # which no function is looked up for


def _description(tensor: DeferredLogits) -> Described:
    described = tensor._deferred.described
    assert described is not None
    return described


def describe(tensor: DeferredLogits, described: Described) -> None:
    state = tensor._deferred
    with compat.no_torch_function():
        tensor._known_to_autograd = _to_autograd(tensor)
        if state.thunk is not None:
            state.thunk = trees.map_only(Tensor, lambda t: _frozen(t.detach()), state.thunk)
    state.described = described


def _to_autograd(tensor: DeferredLogits) -> tuple[Any, bool, int | None]:
    return tensor.grad_fn, tensor.requires_grad, compat.version(tensor)


def _become(func: Any, args: Any, kwargs: Any) -> bool:
    """Do what ``func`` writes to deferred logits without writing, if a rule says what they become.

    They must be all that has their memory, so that nothing else changes with them.
    """
    logits = args[0] if args else None
    if not isinstance(logits, DeferredLogits) or not _is_described(logits):
        return False
    state = logits._deferred
    with compat.no_torch_function():
        leaf = logits.is_leaf and logits.requires_grad
        alone = state.memory.holders() == 1 and not state.is_view and state.values is None
        # Under no_grad the values would change and the gradients would not.
        modes = torch.is_grad_enabled() or not logits.requires_grad
        # Eager refuses to write to inference tensors elsewhere.
        modes &= torch.is_inference_mode_enabled() or not logits.is_inference()
    if leaf or not alone or not modes:
        return False
    name = func.__name__
    function = _method(f"__{name[3:]}" if name.startswith("__i") else name[:-1])
    entry = TABLE.get(function)
    args = (_before_the_write(logits), *args[1:])
    result = NotImplemented if entry is None else _apply(entry, name, args, function, args, kwargs)
    if not isinstance(result, DeferredLogits) or result.dtype != logits.dtype or result.shape != logits.shape:
        return False
    become(logits, result)
    described = result._deferred.described
    assert described is not None
    describe(logits, described)
    return True


def _before_the_write(logits: DeferredLogits) -> DeferredLogits:
    """The same, for the gradient of a write that needs what was written to; writes to ``logits`` do not change it."""
    copy: DeferredLogits = run_deferred(_CLONE, (logits,), {})
    copy._deferred = logits._deferred
    with compat.no_torch_function():
        copy._known_to_autograd = _to_autograd(copy)
    return copy


def _entries(argument: Any) -> Entries | None:
    """The number in a 0-d tensor. On a GPU that waits for what makes it, as a look at the operands does."""
    known = type(argument) is Tensor and argument.dim() == 0 and not argument.requires_grad
    if not known or argument.is_complex() or (argument.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return constant(float(argument)) if argument.is_cpu or argument.is_cuda else None


class _Freeze:
    """``_frozen``, but for tensors among ``given``, which are: one is to stay one, as equal logits show by that."""

    def __init__(self, given: tuple[ClassTensor, ...]) -> None:
        self.given = given

    @functools.cached_property
    def _known(self) -> set[int]:
        return {id(handle) for part in self.given for handle in part.handles()}

    def __call__(self, argument: Any) -> Any:
        return _frozen(argument) if isinstance(argument, Tensor) and id(argument) not in self._known else argument


def _frozen(argument: Tensor) -> Tensor:
    """A tensor as it is now, whatever the program writes to it before the logits are computed.

    They may be computed with gradients on, where autograd refuses what was made under inference_mode.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return _frozen(argument)
    if 0 not in argument.stride():
        return argument.clone()
    compact = argument[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in argument.stride())]
    return compact.clone().expand_as(argument)  # not all of what it is expanded to
