"""Tensors whose values are computed when something reads them: what PyTorch's operators do to these.

A ``LazyTensor`` is to autograd the tensor that it stands for. Below autograd, in ``__torch_dispatch__``, its values are
put in (``lazy``), or what an operator returns of it waits as well.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from . import compat, errors, trees
from .lazy import State
from .origin import Origin
from .originals import original_or_itself
from .places import have_one_memory
from .report.source import is_inside, is_of_mode


class _Mode(threading.local):
    """What operators on deferred tensors do other than to read them, in one call.

    ``call``: the frame that made it; None if there is none. A signal handler or a finaliser may run in the midst of it,
    and reads what it reads.
    ``becoming``: a copy from one deferred tensor to another makes the one what the other is. Else operators are not
    run, and what they return is deferred.
    ``shapes``: moreover, nothing that they return will be read, so that they may write to it.
    """

    call: types.FrameType | None = None
    becoming = False
    shapes = False

    def is_on(self) -> bool:
        """Whether the running operator is of that call."""
        if self.call is None:
            return False
        by_others, frame = False, sys._getframe(2)
        while frame is not self.call:
            by_others = not _is_called_for(frame) and (by_others or not is_inside(frame))
            if frame.f_back is None:
                return False
            frame = frame.f_back
        return not by_others


_mode = _Mode()


def is_by_others(error: BaseException) -> bool:
    """Whether code of the program's raised it, which ran in the midst of PyTorch's or fxfuse's: a signal handler's."""
    traceback = error.__traceback__
    while traceback is not None and not _is_called_for(traceback.tb_frame):
        if not is_inside(traceback.tb_frame):
            return True
        traceback = traceback.tb_next
    return False


def _is_called_for(frame: types.FrameType) -> bool:
    """Whether it is the program's, and sees a call on its way: a frame of a mode, or of a hook on what is saved."""
    return is_of_mode(frame) or frame.f_code is _pack_outside.__code__


class LazyTensor(Tensor):
    """A tensor of the shape, strides, dtype and device that its ``State`` says, which has its values."""

    _deferred: State

    @staticmethod
    def __new__(cls, state: State, device: torch.device) -> LazyTensor:
        meta = state.meta
        made = Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype,
            device=device,
        )  # fmt: skip
        compat.forbid_data_access(made)
        made._deferred = state
        return made

    @classmethod
    @torch._dynamo.disable
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        func = _AS_VIEW.get(func, func)
        if func is _aten.detach_.default and (torch.is_inference_mode_enabled() or args[0].is_inference()):
            return args[0]  # which it does nothing to
        if compat.consists_of_others(func):
            # Of inference tensors, or under their mode, it comes here whole, past what knows of views: taken apart, as
            # everywhere else.
            return compat.taken_apart(func, *args, **kwargs)
        in_call = _mode.is_on()
        if in_call and _mode.becoming:
            args[1]._deferred.meta = args[0]._deferred.meta  # which lies where it did
            args[0]._deferred = args[1]._deferred
            return args[0]
        if in_call or func in _ALWAYS_DEFERRED:
            return _defer(func, args, kwargs, in_call and _mode.shapes)
        if func in _OF_SHAPES or _is_to_meta(func, kwargs):
            return func(_meta(args[0]), *args[1:], **{**kwargs, "device": kwargs.get("device") or args[0].device})
        if torch.Tag.inplace_view in func.tags:
            raise errors.deferred_cannot(func._schema.name.partition("::")[2], head_of(args))
        written, aliased = _touches(func, args, kwargs)
        if aliased and written is None and any(map(_begins_within, trees.leaves((args, kwargs)))):
            with contextlib.suppress(NotDeferred):
                return _defer(func, args, kwargs, False)
        if aliased and written is not None and _resizes(func, args, kwargs):
            raise errors.deferred_cannot("out= of a result of another shape", head_of((args, kwargs)))
        values = _shared if aliased else _read
        plain_args, plain_kwargs = trees.map_only(LazyTensor, values, (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        return written if isinstance(written, LazyTensor) and isinstance(out, Tensor) else out

    def __tensor_flatten__(self) -> Any:
        """What PyTorch's tracers ask for before they look into a subclass: refused, so that they do not try."""
        raise errors.not_traceable()

    @staticmethod
    def __tensor_unflatten__(*_: Any) -> Any:
        raise errors.not_traceable()

    def plain(self) -> Tensor:
        """An ordinary tensor with the values, in the same memory, through which gradients flow back here.

        Raises:
            StaleLogitsError: an operand has changed since.
        """
        with compat.no_torch_function():
            return _Plain.apply(self, self._deferred.share())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with compat.no_torch_function():
            values = self._deferred.read()  # which may raise, and say why
            try:
                return repr(plain_of(self, lambda _: values))
            except RuntimeError:  # a view that autograd no longer knows the node of, which PyTorch prints all the same
                return f"{repr(values.detach())[:-1]}, grad_fn=<Invalid>)"


_aten = torch.ops.aten
_COPY = original_or_itself(Tensor.copy_)
# To autograd what these return is no view; it lies in the same memory all the same.
_AS_VIEW = {
    _aten.unsafe_split.Tensor: _aten.split.Tensor,
    _aten.unsafe_split_with_sizes.default: _aten.split_with_sizes.default,
    _aten._unsafe_view.default: _aten.view.default,
}
_ALWAYS_DEFERRED = {_aten.detach.default, _aten.alias.default}
_OF_SHAPES = {
    getattr(_aten, name).default
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
}


def _is_to_meta(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether it copies to where there are no values, as pipelines do to tell the next stage of shapes."""
    device = kwargs.get("device")
    return func is _aten._to_copy.default and device is not None and device.type == "meta"


def _read(tensor: LazyTensor) -> Tensor:
    return tensor._deferred.read()


def _shared(tensor: LazyTensor) -> Tensor:
    """The values in the memory that they share, an inference tensor if ``tensor`` is one, as its views are to be."""
    values = tensor._deferred.share()
    if not tensor.is_inference():
        return values
    with torch.inference_mode():
        storage = values.untyped_storage()
        return values.new_empty(0).set_(storage, values.storage_offset(), values.shape, values.stride())


def _touches(func: Any, args: Any, kwargs: Any) -> tuple[Tensor | None, bool]:
    """A tensor that an operator writes to, if any; and whether it writes to or returns a view of a deferred one."""
    written, aliased = None, False
    for i, name, is_written in _aliased_arguments(func):
        given = args[i] if i < len(args) else kwargs.get(name)
        for one in trees.leaves(given):
            if isinstance(one, Tensor):
                aliased |= isinstance(one, LazyTensor)
                if is_written:
                    written = one
    return written, aliased


@functools.lru_cache(maxsize=1024)
def _aliased_arguments(func: Any) -> tuple[tuple[int, str, bool], ...]:
    """The arguments that an operator may write to, or return views of: which, by position and name; whether it writes.

    Asking its schema takes longer than most else that is asked here.
    """
    # The schemas of ``torch.distributed``'s collectives do not say what they write to: any of their tensors.
    unsaid = func.namespace == "c10d"
    arguments = ((i, argument.name, argument.alias_info) for i, argument in enumerate(func._schema.arguments))
    return tuple((i, name, unsaid or alias.is_write) for i, name, alias in arguments if unsaid or alias is not None)


@functools.lru_cache(maxsize=1024)
def _returns_view(func: Any) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns)


def _resizes(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether what is given as ``out=`` has another shape than the result, and would get that one."""
    names = [argument.name for argument in func._schema.arguments if argument.is_out]
    if not names:
        return False
    new_args, new_kwargs = trees.map_only(Tensor, lambda tensor: _look(tensor).tensor(), (args, kwargs))
    try:
        func(*new_args, **new_kwargs)
    except Exception:
        return False  # a wrong call, as eager shall say; or what an operator of the program's own says of shapes
    given, made = (trees.leaves([some[name] for name in names]) for some in (kwargs, new_kwargs))
    return [out.shape for out in given] != [out.shape for out in made]


def _begins_within(tensor: Any) -> bool:
    """Whether a deferred tensor is, to autograd, no view of one with which its memory begins (but detached, say).

    Autograd would take views of ordinary views of it from the wrong place of its gradient: by their offset in memory.
    Of views that are of the subclass themselves it knows how they are made.
    """
    if not isinstance(tensor, LazyTensor) or tensor.is_inference():  # which have no gradient
        return False
    root = compat.viewed(tensor)
    return isinstance(root, LazyTensor) and root._deferred.meta.storage_offset() != 0


class NotDeferred(Exception):
    """An operator that cannot wait."""


def _defer(func: Any, args: Any, kwargs: Any, shapes: bool) -> Any:
    """What ``func`` returns, computed when it is read; ``shapes`` as in the mode."""
    deferred = [t for t in trees.leaves((args, kwargs)) if isinstance(t, LazyTensor)]
    first, origins = deferred[0], origins_of(deferred)
    written, _ = _touches(func, args, kwargs)
    if shapes and isinstance(written, LazyTensor) and written._deferred.described is None:
        return written
    if written is not None or kwargs.get("device") not in (None, first.device):
        raise NotDeferred
    is_view = _returns_view(func)
    try:
        out = (_on_meta if is_view else _remembered_on_meta)(func, args, kwargs)
    except Exception as error:
        if is_by_others(error):
            raise
        raise NotDeferred from error  # a shape that depends on values, or a wrong call, as eager shall say
    if is_view and isinstance(out, Tensor) and not have_one_memory(out, first._deferred.meta):
        raise NotDeferred  # a view at times only
    if not is_view and any(tensor._deferred.memory.one for tensor in deferred):
        raise NotDeferred  # what it is made of may be written to

    # A view is what it is a view of, whatever the mode; but eager lets the program write to what was detached.
    inference = torch.is_inference_mode_enabled()
    if is_view:
        inference = first.is_inference() and (inference or func is not _aten.detach.default)

    def wrap(state: State) -> LazyTensor:
        if inference == torch.is_inference_mode_enabled():
            return type(first)(state, first.device)
        with torch.inference_mode(inference):
            return type(first)(state, first.device)

    if shapes:
        return trees.map_only(Tensor, lambda meta: wrap(State(first._deferred.origin, meta)), out)
    parents = tuple(tensor._deferred for tensor in deferred)
    thunk = trees.mapped(lambda t: t._deferred if isinstance(t, LazyTensor) else t, (func, args, kwargs))

    def made(meta: Tensor, thunk: tuple[Any, ...]) -> LazyTensor:
        return wrap(State(origins[0], meta, thunk, parents, is_view, others=origins[1:]))

    if isinstance(out, (tuple, list)):
        parts = enumerate(out)
        return type(out)(made(m, _part_of(i, *thunk)) if isinstance(m, Tensor) else m for i, m in parts)
    return made(out, thunk) if isinstance(out, Tensor) else out


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*trees.mapped(_meta, args), **trees.mapped(_meta, kwargs))


def _remembered_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """The same, of what returns no view: new tensors, which look as they did after an equal call.

    To find that out takes PyTorch up to a millisecond, as it does so in Python.
    """
    try:
        looks = _results(func, torch.get_default_dtype(), _look(args), _look(tuple(kwargs.items())))
    except TypeError:  # what cannot be hashed, or a wrong call
        return _on_meta(func, args, kwargs)
    return trees.map_only(_Look, _Look.tensor, looks)


@dataclass(frozen=True)
class _Look:
    """All of a tensor that another's shape, strides and dtype may depend on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


def _look(value: Any) -> Any:
    """What stands for an argument, equal for arguments that results cannot tell apart."""
    if isinstance(value, Tensor):
        return _Look(tuple(value.shape), value.stride(), value.dtype)
    # By their types, as 1, 1.0 and True are equal.
    return type(value), tuple(map(_look, value)) if isinstance(value, (tuple, list)) else value


def _argument(look: Any) -> Any:
    """An argument that ``look`` may stand for."""
    if isinstance(look, _Look):
        return look.tensor()
    kind, value = look
    return kind(map(_argument, value)) if issubclass(kind, (tuple, list)) else value


@functools.lru_cache(maxsize=1024)
def _results(func: Any, default_dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    return trees.map_only(Tensor, _look, func(*_argument(args), **dict(_argument(kwargs))))


def _part_of(i: int, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The thunk of one of the tensors that ``func`` returns; a row by itself, of which there may be thousands."""
    if func is _aten.unbind.int:
        tensor, dim = args if len(args) == 2 else (*args, kwargs.get("dim", 0))
        return _aten.select.int, (tensor, dim, i), {}
    return _part, (i, func, args, kwargs), {}


def _part(i: int, func: Any, args: Any, kwargs: Any) -> Any:
    """One of the tensors that ``func`` returns."""
    return func(*args, **kwargs)[i]


def origins_of(tensors: Iterable[LazyTensor]) -> tuple[Origin, ...]:
    return tuple(dict.fromkeys(origin for tensor in tensors for origin in tensor._deferred.origins))


def _meta(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return value._deferred.meta
    return _look(value).tensor() if isinstance(value, Tensor) else value


def become(tensor: LazyTensor, other: LazyTensor) -> None:
    """Let one be what the other is, to autograd a copy from it; nothing is written."""
    run_deferred(_COPY, (tensor, other), {}, becoming=True)


def shape_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Tensors without data of the shapes and dtypes of what ``func`` returns of lazy tensors.

    Raises:
        NotDeferred: it depends on values, or it is a wrong call, of which eager shall say what is wrong.
    """
    try:
        with torch.no_grad():
            out = run_deferred(func, args, kwargs, shapes=True)
    except NotDeferred:
        raise
    except Exception as error:
        if is_by_others(error):
            raise
        raise NotDeferred from error
    return trees.map_only(LazyTensor, _meta, out)


def run_deferred(func: Any, args: Any, kwargs: Any, becoming: bool = False, shapes: bool = False) -> Any:
    """What ``func`` returns of lazy tensors, which waits; ``becoming`` and ``shapes`` as in the mode.

    Raises:
        NotDeferred: an operator cannot wait.
    """
    before = _mode.call, _mode.becoming, _mode.shapes
    _mode.call, _mode.becoming, _mode.shapes = sys._getframe(), becoming, shapes
    try:
        with compat.no_torch_function():
            return func(*args, **kwargs)
    finally:
        _mode.call, _mode.becoming, _mode.shapes = before


def hooks_as_called_outside(given: Sequence[Tensor] | None = None) -> contextlib.AbstractContextManager[None]:
    """Let hooks on what autograd saves use any function: here they are called where none is looked up for these.

    Those of a checkpoint do nothing to what they see, and are known by who they are.

    With ``given``, lazy tensors that are not among these, which a node saves of its own result, are detached for them:
    what a hook keeps of such leads to the node and back until a backward comes there, and none may, as it goes past.
    """
    hooks = compat.hooks_on_saved()
    if hooks is None or compat.in_checkpoint():
        return contextlib.nullcontext()
    pack, unpack = hooks
    return torch.autograd.graph.saved_tensors_hooks(functools.partial(_pack_outside, pack, given), unpack)


def _pack_outside(pack: Callable[[Tensor], Any], given: Sequence[Tensor] | None, tensor: Tensor) -> Any:
    with compat.functions_looked_up():
        if given is not None and isinstance(tensor, LazyTensor) and all(tensor is not one for one in given):
            tensor = tensor.detach()
        return pack(tensor)


class _Plain(torch.autograd.Function):
    """The values as an ordinary tensor."""

    @staticmethod
    def forward(ctx: Any, deferred: LazyTensor, values: Tensor) -> Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


def plain_of(deferred: LazyTensor, values: Callable[[State], Tensor] = State.share) -> Tensor:
    """An ordinary tensor, in the same memory if nothing else is said; a leaf if ``deferred`` is one."""
    with compat.no_torch_function():
        found = values(deferred._deferred)
        if deferred.is_leaf:
            return found.detach().requires_grad_(deferred.requires_grad)
        with torch.set_grad_enabled(not torch.is_inference_mode_enabled()):
            return _Plain.apply(deferred, found)


def connected_to(deferred: LazyTensor) -> Tensor:
    """An ordinary tensor whose gradient is that of ``deferred``, also of a leaf, and where no graphs are made."""
    with torch.set_grad_enabled(not torch.is_inference_mode_enabled()):
        return deferred.plain()


def is_leaf(tensor: Tensor) -> bool:
    with compat.no_torch_function():
        return tensor.is_leaf


def head_of(args: Any) -> str:
    """``file.py:line`` of the projection whose logits are among ``args``."""
    return next(t._deferred.origin.head for t in trees.leaves(args) if isinstance(t, LazyTensor))
