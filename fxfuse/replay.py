"""What is done to the rows and the classes of logits, so that it can be done to their operands instead.

*Handles* stand for tensors: FX nodes under the graph driver, tensors under the run-time driver. Nothing here looks
inside of one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from .algebra import Head

Handle = Any


class Emit(Protocol):
    """How a driver runs a torch function on handles: now, or by adding a node to a graph."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Handle: ...

    def example(self, handle: Handle) -> Tensor:
        """A tensor with the handle's shape and dtype."""
        ...


class _HiddenSize:
    """In the arguments of a ``RowOp``: the size of the class axis, D when replayed on hidden states."""

    def __repr__(self) -> str:
        return "HIDDEN"


HIDDEN = _HiddenSize()


def key_of(value: Any) -> Any:
    """Something hashable that is equal for equal arguments; a tensor is equal to itself alone."""
    if isinstance(value, (tuple, list)):
        return tuple(key_of(item) for item in value)
    if isinstance(value, slice):
        return ("slice", key_of((value.start, value.stop, value.step)))
    if isinstance(value, Tensor):
        return ("tensor", id(value))
    return (type(value), value)


_BRANCHES = (slice, tuple, list)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to everything in a nest of tuples, lists and slices."""
    if isinstance(value, slice):
        return slice(*map_leaves(function, (value.start, value.stop, value.step)))
    if isinstance(value, (tuple, list)):
        return type(value)([map_leaves(function, v) if isinstance(v, _BRANCHES) else function(v) for v in value])
    return function(value)


def leaves(value: Any) -> tuple[Any, ...]:
    """Everything in such a nest."""
    found: list[Any] = []

    def see(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(see, value)
    return tuple(found)


@dataclass(frozen=True)
class RowOp:
    """A function that moves, selects or scales rows and leaves the class axis whole.

    It does to hidden states ``[*rows, D]`` what it did to logits ``[*rows, V]``, so it never has to touch logits.
    ``keeps_order`` says that the rows, flattened, are the same in the same order after it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    keeps_order: bool = False

    def replay(self, emit: Emit, hidden_states: Handle, hidden: int) -> Handle:
        args = map_leaves(lambda arg: hidden if arg is HIDDEN else arg, self.args)
        return emit(self.function, hidden_states, *args)

    def on_column(self, emit: Emit, column: Handle) -> Handle:
        """The same of a tensor with one number for each row, ``[*rows, 1]``."""
        return self.replay(emit, column, 1)

    def hidden_after(self, hidden: int) -> int:
        """The size of the class axis of what ``replay`` returns."""
        return hidden

    def key(self) -> Any:
        return self.function, key_of(self.args)

    @functools.cached_property
    def handles(self) -> tuple[Handle, ...]:
        """Its arguments, and numbers."""
        return leaves(self.args)

    def map(self, function: Callable[[Handle], Handle]) -> RowOp:
        return replace(self, args=map_leaves(function, self.args))

    def with_heads(self, of: Callable[[Head], Head]) -> RowOp:
        return self

    def heads(self) -> Iterable[Head]:
        return ()

    def joins(self) -> int:
        """How many joins it is and has in it."""
        return 0


@dataclass(frozen=True)
class Join(RowOp):
    """``cat`` or ``stack`` of the rows of several values: ``args`` are those values, then the dimension."""

    def replay(self, emit: Emit, hidden_states: Handle, hidden: int) -> Handle:
        parts, dim = self.args
        return emit(self.function, [part.hidden_states(emit) for part in parts], dim)

    def on_column(self, emit: Emit, column: Handle) -> Handle:
        """Of the columns of all parts, of which ``column`` is that of the first: a join is the first operation."""
        parts, dim = self.args
        return emit(self.function, [part.rows(emit) for part in parts], dim)

    def hidden_after(self, hidden: int) -> int:
        parts, _ = self.args
        return parts[0].hidden

    def key(self) -> Any:
        parts, dim = self.args
        return self.function, tuple((part.head, part.row_key(whole=True)) for part in parts), dim

    @functools.cached_property
    def handles(self) -> tuple[Handle, ...]:
        parts, dim = self.args
        return (*(handle for part in parts for handle in part.handles()), dim)

    def map(self, function: Callable[[Handle], Handle]) -> Join:
        parts, dim = self.args
        return replace(self, args=(tuple(part.map(function) for part in parts), dim))

    def with_heads(self, of: Callable[[Head], Head]) -> Join:
        parts, dim = self.args
        return replace(self, args=(tuple(part.with_heads(of) for part in parts), dim))

    def heads(self) -> Iterable[Head]:
        parts, _ = self.args
        return (head for part in parts for head in part.heads())

    def joins(self) -> int:
        parts, _ = self.args
        return 1 + sum(part.joins() for part in parts)


@dataclass(frozen=True)
class RowsAt(RowOp):
    """``gather`` along an axis of the rows, of whole rows.

    ``args`` are that axis, the index, which is the same for all classes, the class axis, and whether the index counts
    on from the start where it passes the end.
    """

    def replay(self, emit: Emit, hidden_states: Handle, hidden: int) -> Handle:
        dim, index, axis, wraps = self.args
        sizes = [hidden if i == axis else -1 for i in range(emit.example(index).dim())]
        index = emit(torch.narrow, index, axis, 0, 1)
        if wraps:
            index = emit(torch.remainder, index, emit(torch.Tensor.size, hidden_states, dim))
        return emit(torch.gather, hidden_states, dim, emit(torch.Tensor.expand, index, sizes))


@dataclass(frozen=True)
class ByColumn(RowOp):
    """``function`` by a tensor that was expanded to all classes: ``args`` are that, and their axis, from the end.

    All of its gradient would arrive at one class, so it must have none.
    """

    def replay(self, emit: Emit, hidden_states: Handle, hidden: int) -> Handle:
        other, axis = self.args
        return emit(self.function, hidden_states, emit(torch.narrow, other, axis, 0, 1))


def with_column(hidden: int) -> int:
    """The size of rows of ``hidden`` numbers with a column more: a multiple of 8, which kernels of products want."""
    return (hidden // 8 + 1) * 8


@dataclass(frozen=True)
class Extension(RowOp):
    """A column of ones beside the hidden states, and zeros: ``args`` is the class axis, counted from the end.

    With the bias as a column of the weight (the class operation "extend"), what is done to rows is done to the bias
    too: ``(x @ w.T + b) / t`` is the product of ``(x, 1) / t`` and ``(w, b)``. It costs a copy of the weight, which
    the backward needs as well.
    """

    def replay(self, emit: Emit, hidden_states: Handle, hidden: int) -> Handle:
        behind = (0, 0) * (-1 - self.args[0])
        ones = emit(F.pad, hidden_states, (*behind, 0, 1), value=1.0)
        more = with_column(hidden) - hidden - 1
        return emit(F.pad, ones, (*behind, 0, more)) if more else ones

    def on_column(self, emit: Emit, column: Handle) -> Handle:
        return column

    def hidden_after(self, hidden: int) -> int:
        return with_column(hidden)


@dataclass(frozen=True)
class RowShift:
    """A number for each row, which is added to all logits of it: ``factor`` times ``handle``.

    Attributes:
        axis, since: of the classes, and how many row operations had been done, when it was added.
    """

    handle: Handle
    factor: float
    axis: int
    since: int

    def column(self, emit: Emit, hidden_states: Handle, later: Sequence[RowOp]) -> Handle:
        """``[*rows, 1]`` from the hidden states that it was added to, and the row operations since."""
        like = emit(torch.narrow, hidden_states, self.axis, 0, 1)
        handle = emit(torch.Tensor.expand_as, self.handle, like)
        handle = handle if self.factor == 1.0 else emit(torch.mul, handle, self.factor)
        for op in later:
            handle = op.on_column(emit, handle)
        return handle

    def key(self) -> Any:
        return key_of((self.handle, self.factor, self.axis, self.since))


@dataclass(frozen=True)
class ClassOp:
    """A function that selects, scales or shifts classes and leaves rows whole.

    It is done to the weight ``[V, D]`` and the bias ``[V]``: a key of ``CLASS_FUNCTIONS`` with its arguments.
    ``count`` is the number of classes after it, where it changes that; ``shifts`` says that a bias comes of it.
    """

    name: str
    args: tuple[Any, ...]
    count: int | None = None
    shifts: bool = False

    def replay(self, emit: Emit, weight: Handle, bias: Handle | None) -> tuple[Handle, Handle | None]:
        return CLASS_FUNCTIONS[self.name](emit, weight, bias, *self.args)

    @property
    def copies_weight(self) -> bool:
        """Whether it makes another weight, and not a view."""
        return self.name in COPYING

    @property
    def fills(self) -> bool:
        """Whether it makes some logits numbers, whatever the hidden states are."""
        return self.name in ("fill", "assign")

    @property
    def selects(self) -> bool:
        return self.name in ("take", "select")

    def key(self) -> Any:
        return self.name, key_of(self.args)

    @functools.cached_property
    def handles(self) -> tuple[Handle, ...]:
        return leaves(self.args)

    def map(self, function: Callable[[Handle], Handle]) -> ClassOp:
        return replace(self, args=map_leaves(function, self.args))


def _take(emit: Emit, weight: Handle, bias: Handle, classes: Any) -> tuple[Handle, Handle]:
    return emit(getitem, weight, classes), None if bias is None else emit(getitem, bias, classes)


def _vector(emit: Emit, classes: Handle) -> Handle:
    """``[V]`` from what broadcasts along the rows."""
    return classes if emit.example(classes).dim() == 1 else emit(torch.reshape, classes, (-1,))


def _scale(emit: Emit, weight: Handle, bias: Handle, function: Any, factor: Handle) -> tuple[Handle, Handle]:
    """``function`` (``mul`` or ``div``) by a number for each class."""
    factor = _vector(emit, factor)
    scaled = emit(function, weight, emit(torch.unsqueeze, factor, 1))
    return scaled, None if bias is None else emit(function, bias, factor)


def _scale_bias(emit: Emit, weight: Handle, bias: Handle, function: Any, factor: Handle) -> tuple[Handle, Handle]:
    """``function`` by a 0-d tensor, which the hidden states are scaled by too."""
    return weight, None if bias is None else emit(function, bias, factor)


def _shift(emit: Emit, weight: Handle, bias: Handle, shift: Handle, factor: float) -> tuple[Handle, Handle]:
    """Plus ``factor`` times a number for each class."""
    wide = emit(torch.Tensor.to, _vector(emit, shift), _wide(emit, weight))
    shift = wide if factor == 1.0 else _multiplied(emit, wide, factor)
    return weight, shift if bias is None else emit(torch.add, bias, shift)


def _multiplied(emit: Emit, wide: Handle, factor: float) -> Handle:
    """``factor`` times what will be divided by it again: finite where it is, as the least number of a dtype."""
    most = torch.finfo(emit.example(wide).dtype).max * min(1.0, abs(factor)) * (1 - 1e-6)
    product = emit(torch.mul, wide, factor)
    return emit(torch.where, emit(torch.isinf, wide), product, emit(torch.clamp, product, -most, most))


def _assign(emit: Emit, weight: Handle, bias: Handle, classes: Any, value: float) -> tuple[Handle, Handle]:
    """``value`` in the classes that an index or a slice names."""
    example = emit.example(weight)
    everything = emit(torch.arange, example.shape[0], device=example.device)
    none = emit(torch.zeros_like, everything, dtype=torch.bool)
    if not isinstance(classes, (list, slice)):
        classes = emit(torch.reshape, classes, (-1,))  # a tensor of one number, as an index, would be read
    mask = emit(torch.index_fill, none, 0, emit(getitem, everything, classes), True)
    return _fill(emit, weight, bias, mask, value, elsewhere=False)


def _fill(
    emit: Emit, weight: Handle, bias: Handle, mask: Handle, value: float, elsewhere: bool
) -> tuple[Handle, Handle]:
    """``value`` in the classes of ``mask``, or ``elsewhere`` than there, whatever the hidden states are."""
    mask = _vector(emit, mask)
    if elsewhere:
        mask = emit(torch.logical_not, mask)
    column = emit(torch.unsqueeze, mask, 1)
    if bias is None:
        bias = emit(torch.zeros_like, mask, dtype=_wide(emit, weight))
    bias = emit(torch.Tensor.to, bias, _wide(emit, weight))
    return emit(torch.masked_fill, weight, column, 0.0), emit(torch.masked_fill, bias, mask, value)


def _extend(emit: Emit, weight: Handle, bias: Handle) -> tuple[Handle, None]:
    """The bias as a column of the weight, and zeros; see ``Extension``."""
    vocab, hidden = emit.example(weight).shape
    zeros = emit(torch.Tensor.new_zeros, weight, (vocab, with_column(hidden) - hidden - 1))
    return emit(torch.cat, [weight, emit(torch.unsqueeze, bias, 1), zeros], 1), None


def _detach(emit: Emit, weight: Handle, bias: Handle) -> tuple[Handle, Handle]:
    return emit(torch.detach, weight), None if bias is None else emit(torch.detach, bias)


def _floor(emit: Emit, weight: Handle, bias: Handle, scale: float) -> tuple[Handle, Handle]:
    """Logits of -inf become so low that their probability is zero all the same, unless there are no others."""
    bias = emit(torch.Tensor.to, bias, _wide(emit, weight))
    scaled = emit(torch.mul, bias, scale)  # which makes finite ones infinite, too
    some = emit(torch.any, emit(torch.ne, scaled, -math.inf))
    masked = emit(torch.logical_and, emit(torch.eq, scaled, -math.inf), some)
    return weight, emit(torch.masked_fill, bias, masked, max(min(LOW / scale, -_LOWEST), _LOWEST))


def _wide(emit: Emit, weight: Handle) -> torch.dtype:
    """What a bias is kept in: a mask or a constant for each class may not fit 16 bits."""
    return torch.float64 if emit.example(weight).dtype == torch.float64 else torch.float32


LOW = -1e30
_LOWEST = -1e38  # that float32 has

CLASS_FUNCTIONS: dict[str, Callable[..., tuple[Handle, Handle | None]]] = {
    "take": _take,
    "select": _take,
    "scale": _scale,
    "scale_bias": _scale_bias,
    "shift": _shift,
    "fill": _fill,
    "assign": _assign,
    "extend": _extend,
    "floor": _floor,
    "detach": _detach,
}
COPYING = frozenset(("select", "scale", "fill", "assign", "extend"))
