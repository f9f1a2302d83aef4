"""What a value derived from a projection to the vocabulary *is*.

A value is described by how it is made from the operands of its projection (its **head**): which rows of it, in
which shape, scaled by what, normalised or not. Descriptions are immutable; a rule turns one into the next. They
hold *handles* for tensors, which are FX nodes under the graph driver and tensors under the run-time driver; the
algebra never looks inside a handle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .reasons import Reason
from .transform import Transform

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


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to everything in a nest of tuples, lists and slices."""
    if isinstance(value, slice):
        return slice(*(map_leaves(function, part) for part in (value.start, value.stop, value.step)))
    if isinstance(value, (tuple, list)):
        return type(value)(map_leaves(function, item) for item in value)
    return function(value)


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

    def map(self, function: Callable[[Handle], Handle]) -> RowOp:
        return replace(self, args=map_leaves(function, self.args))

    def with_heads(self, of: Callable[[Head], Head]) -> RowOp:
        return self

    def heads(self) -> Iterable[Head]:
        return ()


@dataclass(frozen=True)
class Join(RowOp):
    """``cat`` or ``stack`` of the rows of several values: ``args`` are those values, then the dimension."""

    def replay(self, emit: Emit, hidden_states: Handle, hidden: int) -> Handle:
        parts, dim = self.args
        return emit(self.function, [part.hidden_states(emit) for part in parts], dim)

    def hidden_after(self, hidden: int) -> int:
        parts, _ = self.args
        return parts[0].hidden

    def key(self) -> Any:
        parts, dim = self.args
        return self.function, tuple((part.head, part.row_key(whole=True)) for part in parts), dim

    def map(self, function: Callable[[Handle], Handle]) -> Join:
        parts, dim = self.args
        return replace(self, args=(tuple(part.map(function) for part in parts), dim))

    def with_heads(self, of: Callable[[Head], Head]) -> Join:
        parts, dim = self.args
        return replace(self, args=(tuple(part.with_heads(of) for part in parts), dim))

    def heads(self) -> Iterable[Head]:
        parts, _ = self.args
        return (head for part in parts for head in part.heads())


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

    def key(self) -> Any:
        return self.name, key_of(self.args)

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
    shift = wide if factor == 1.0 else emit(torch.mul, wide, factor)
    return weight, shift if bias is None else emit(torch.add, bias, shift)


def _assign(emit: Emit, weight: Handle, bias: Handle, classes: Any, value: float) -> tuple[Handle, Handle]:
    """``value`` in the classes that an index or a slice names."""
    example = emit.example(weight)
    everything = emit(torch.arange, example.shape[0], device=example.device)
    none = emit(torch.zeros_like, everything, dtype=torch.bool)
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


def _floor(emit: Emit, weight: Handle, bias: Handle, scale: float) -> tuple[Handle, Handle]:
    """Logits of -inf become so low that their probability is zero all the same, unless there are no others."""
    bias = emit(torch.Tensor.to, bias, _wide(emit, weight))
    infinity = math.copysign(math.inf, -scale)
    some = emit(torch.any, emit(torch.ne, bias, infinity))
    masked = emit(torch.logical_and, emit(torch.eq, bias, infinity), some)
    return weight, emit(torch.masked_fill, bias, masked, LOW / scale)


def _wide(emit: Emit, weight: Handle) -> torch.dtype:
    """What a bias is kept in: a mask or a constant for each class may not fit 16 bits."""
    return torch.float64 if emit.example(weight).dtype == torch.float64 else torch.float32


LOW = -1e30

CLASS_FUNCTIONS: dict[str, Callable[..., tuple[Handle, Handle | None]]] = {
    "take": _take,
    "scale": _scale,
    "scale_bias": _scale_bias,
    "shift": _shift,
    "fill": _fill,
    "assign": _assign,
    "extend": _extend,
    "floor": _floor,
}


@dataclass(frozen=True, eq=False)
class Head:
    """A projection ``input @ weight.T + bias`` to a vocabulary. Equal only to itself: one program may make two alike.

    Attributes:
        input: hidden states ``[*rows, D]``.
        weight: ``[V, D]``, or ``[D, V]`` where ``weight_transposed``.
        bias: ``[V]`` or None.
        dtype: of the logits; operands of another dtype (ambient autocast) are converted to it.
        axis, order: where ``input`` has D instead of last, counted from the end; and how its axes, with V in D's place,
            are permuted to be those of the logits, if they are.
        cut_off: whether no gradient reaches the operands, although they may require one: an example of what was made
            under no_grad does not know, for it may be one of its arguments.
    """

    input: Handle
    weight: Handle
    bias: Handle | None
    weight_transposed: bool
    hidden: int
    vocab: int
    dtype: torch.dtype
    cut_off: bool = False
    axis: int = -1
    order: tuple[int, ...] | None = None

    def shares_classes_with(self, other: Head) -> bool:
        """Whether it is the same projection, perhaps of other hidden states."""
        same = self.weight is other.weight and self.bias is other.bias
        return same and (self.weight_transposed, self.dtype) == (other.weight_transposed, other.dtype)


@dataclass(frozen=True)
class ClassTensor:
    """A tensor with one entry a class: a function of the logits of some rows of a head.

    Attributes:
        row_ops: what was done to the rows since the projection.
        shape: its shape in the program; ``shape[class_dim]`` is the number of classes.
        class_ops: what was done to the classes since the projection.
        scale, transform, row_shifts: the logits are ``transform(scale * (input @ weight.T + bias)) + row_shifts``.
        factor: what it is multiplied by in the end; 1 for logits.
        dtype: its dtype in the program.
        requires_grad: False where a ``detach`` or ``no_grad`` cut it off from its operands.
        trail: the functions it went through, for the report.
    """

    head: Head
    shape: Sequence[Any]
    class_dim: int
    dtype: torch.dtype
    requires_grad: bool
    row_ops: tuple[RowOp, ...] = ()
    class_ops: tuple[ClassOp, ...] = ()
    scale: float = 1.0
    transform: Transform = ()
    row_shifts: tuple[RowShift, ...] = ()
    factor: float = 1.0
    trail: tuple[str, ...] = ()

    @property
    def vocab(self) -> int:
        """The number of classes."""
        return next((op.count for op in reversed(self.class_ops) if op.count is not None), self.head.vocab)

    @property
    def hidden(self) -> int:
        """The size of the hidden states after the row operations."""
        hidden = self.head.hidden
        for op in self.row_ops:
            hidden = op.hidden_after(hidden)
        return hidden

    @property
    def since_extension(self) -> tuple[ClassOp, ...]:
        """The class operations after the last that made the bias a part of the weight; all, if there is none."""
        ops: tuple[ClassOp, ...] = ()
        for op in self.class_ops:
            ops = () if op.name == "extend" else (*ops, op)
        return ops

    @property
    def has_bias(self) -> bool:
        """Whether a bias is added to the product."""
        ops = self.since_extension
        return any(op.shifts for op in ops) or (self.head.bias is not None and len(ops) == len(self.class_ops))

    def hidden_states(self, emit: Emit, count: int | None = None) -> Handle:
        """The hidden states with the row operations replayed, or the first ``count`` of these, D in V's place."""
        handle, hidden = self.head.input, self.head.hidden
        for op in self.row_ops[:count]:
            handle, hidden = op.replay(emit, handle, hidden), op.hidden_after(hidden)
        return handle

    def row_shift(self, emit: Emit) -> Handle | None:
        """What is added to all logits of a row in the end, ``[*rows, 1]``."""
        total = None
        for shift in self.row_shifts:
            column = shift.column(emit, self.hidden_states(emit, shift.since), self.row_ops[shift.since :])
            total = column if total is None else emit(torch.add, total, column)
        return total

    def rows(self, emit: Emit) -> Handle:
        """Something with as many rows, in the same shape, that takes little memory."""
        handle = emit(torch.narrow, self.head.input, self.head.axis, 0, 1)
        for op in self.row_ops:
            handle = op.on_column(emit, handle)
        return handle

    def classes(self, emit: Emit) -> tuple[Handle, Handle | None]:
        """The weight ``[V, D]`` and the bias ``[V]`` with the class operations replayed."""
        weight, bias = self.head.weight, self.head.bias
        if self.head.weight_transposed:
            weight = emit(torch.t, weight)
        for op in self.class_ops:
            weight, bias = op.replay(emit, weight, bias)
        return weight, bias

    def handles(self) -> tuple[Handle, ...]:
        """The arguments of the row and class operations: symbolic sizes and tensors among them, and numbers."""
        found: list[Handle] = []

        def see(handle: Handle) -> Handle:
            found.append(handle)
            return handle

        self.map(see)
        return tuple(found)

    def map(self: C, function: Callable[[Handle], Handle]) -> C:
        """The same with ``function`` of every argument of its row and class operations in its place."""
        rows, classes = tuple(op.map(function) for op in self.row_ops), tuple(op.map(function) for op in self.class_ops)
        shifts = tuple(replace(shift, handle=function(shift.handle)) for shift in self.row_shifts)
        return replace(self, row_ops=rows, class_ops=classes, row_shifts=shifts)

    def with_heads(self: C, of: Callable[[Head], Head]) -> C:
        """The same of other heads: what ``of`` makes of each that it is of, and of those of the parts of a join."""
        return replace(self, head=of(self.head), row_ops=tuple(op.with_heads(of) for op in self.row_ops))

    def heads(self) -> dict[Head, bool]:
        """Those that it is of, its own first, and whether gradients flow to each."""
        joined = (head for op in self.row_ops for head in op.heads())
        return dict.fromkeys((self.head, *joined), self.requires_grad)

    def row_key(self, whole: bool = False) -> tuple[Any, ...]:
        """Equal for tensors whose flattened rows are the same rows in the same order; ``whole``: in the same shape."""
        last = max((i for i, op in enumerate(self.row_ops) if whole or not op.keeps_order), default=-1)
        # What comes before an operation that moves rows decides which rows it moves.
        return tuple(op.key() for op in self.row_ops[: last + 1])

    def logits_key(self) -> tuple[Any, ...]:
        """Equal for tensors that are made of equal rows by equal logits."""
        shifts = tuple(shift.key() for shift in self.row_shifts)
        return tuple(op.key() for op in self.class_ops), self.scale, self.transform, shifts

    def has_logits_of(self, other: ClassTensor) -> bool:
        """Whether both are made of the same logits, entry by entry."""
        same_rows = self.head is other.head and self.row_key(whole=True) == other.row_key(whole=True)
        return same_rows and self.logits_key() == other.logits_key() and self.class_dim == other.class_dim


class Logits(ClassTensor):
    """Unnormalised."""


class LogProbs(ClassTensor):
    """``log_softmax`` of such logits along the class axis, times a number."""


class ShiftedLogProbs(ClassTensor):
    """Log-probabilities plus the logarithm of ``factor``, which is positive."""


class Probs(ClassTensor):
    """``softmax`` of such logits along the class axis, times a number."""


class ClampedLogProbs(ClassTensor):
    """Log-probabilities with the least number of their dtype for -inf, times a number."""


class Exponentials(ClassTensor):
    """``exp`` of such logits, times a number."""


class WeighedLogits(ClassTensor):
    """Logits times their own probabilities, times a number."""


class WeighedLogProbs(ClassTensor):
    """Log-probabilities times the probabilities, times a number."""


@dataclass(frozen=True)
class OneOfEach(ClassTensor):
    """Logits or log-probabilities times a one-hot tensor, times a number.

    Attributes:
        of: which of the two.
        hot: the class of each row: the shape had no class axis when it was made, but ``axis`` was to be that.
        axis, since: of the classes, and how many row operations had been done, when it was made.
    """

    of: type[ClassTensor] = Logits
    hot: Handle = None
    axis: int = 0
    since: int = 0

    def index(self, emit: Emit) -> Handle:
        """The class of each row, in the shape of the tensor but with one class."""
        handle = emit(torch.unsqueeze, self.hot, self.axis)
        for op in self.row_ops[self.since :]:
            handle = op.on_column(emit, handle)
        return handle


@dataclass(frozen=True)
class OfTwoHeads(ClassTensor):
    """What is made, entry by entry, of the distribution q of such logits and the distribution p of a teacher's.

    Attributes:
        teacher: the logits of the other distribution, in the same shape.
        student_requires_grad: of these logits alone; ``requires_grad`` is False where either was cut off since.
    """

    teacher: ClassTensor | None = None
    student_requires_grad: bool = False

    def sides(self) -> tuple[ClassTensor, ClassTensor]:
        """The student's logits and the teacher's, by themselves."""
        assert self.teacher is not None
        fields = {f: getattr(self, f) for f in ClassTensor.__dataclass_fields__} | {"factor": 1.0}
        student = Logits(**fields | {"requires_grad": self.requires_grad and self.student_requires_grad})
        return student, replace(self.teacher, requires_grad=self.requires_grad and self.teacher.requires_grad)

    def map(self: T, function: Callable[[Handle], Handle]) -> T:
        assert self.teacher is not None
        return replace(super().map(function), teacher=self.teacher.map(function))

    def with_heads(self: T, of: Callable[[Head], Head]) -> T:
        assert self.teacher is not None
        return replace(super().with_heads(of), teacher=self.teacher.with_heads(of))

    def heads(self) -> dict[Head, bool]:
        student, teacher = self.sides()
        return {**student.heads(), **teacher.heads()}

    def logits_key(self) -> tuple[Any, ...]:
        one, other = self.sides()
        of_teacher = other.head, other.row_key(whole=True), other.logits_key()
        return super().logits_key(), one.requires_grad, of_teacher, other.requires_grad


@dataclass(frozen=True)
class Mixture(OfTwoHeads):
    """A weighted sum of both distributions, or its logarithm.

    Attributes:
        weights: of q and of p.
        log: whether it is the logarithm.
    """

    weights: tuple[float, float] = (1.0, 1.0)
    log: bool = True


@dataclass(frozen=True)
class Comparison(OfTwoHeads):
    """What is added up to compare both with a mixture m of them, times a number.

    Attributes:
        share: of p in m, which is q itself for 0.
        terms: how often ``p (log p - log m)``, as ``kl_div`` has it, ``-p log m`` and ``q (log q - log m)`` are in it.
    """

    share: float = 0.0
    terms: tuple[float, float, float] = (1.0, 0.0, 0.0)

    def logits_key(self) -> tuple[Any, ...]:
        return *super().logits_key(), self.share


C = TypeVar("C", bound=ClassTensor)
T = TypeVar("T", bound=OfTwoHeads)


def derive(value: C, name: str, *ops: RowOp, **changes: Any) -> C:
    """``value`` after the function ``name``: with more row operations and other attributes changed."""
    if isinstance(value, OfTwoHeads):  # what is done to the rows is done to both
        both = {field: change for field, change in changes.items() if field in ("shape", "class_dim")}
        assert value.teacher is not None
        changes["teacher"] = derive(value.teacher, name, *ops, **both)
    return replace(value, row_ops=value.row_ops + ops, trail=(*value.trail, name), **changes)


def of_classes(value: C, name: str, *ops: ClassOp, **changes: Any) -> C:
    """The same with more class operations."""
    return derive(value, name, class_ops=value.class_ops + ops, **changes)


def become(kind: type[C], value: ClassTensor, name: str, **changes: Any) -> C:
    """What is of another ``kind`` and made of the same logits: their ``log_softmax``, say."""
    fields = {f: getattr(value, f) for f in ClassTensor.__dataclass_fields__}
    return kind(**{**fields, "trail": (*value.trail, name), **changes})


# --- readers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coefficients:
    """A loss that is linear in the row statistics, with coefficients that depend on labels alone.

    Per row: ``lse * c.lse + sum_k log_prob_k * c.log_prob_k + class_sum * c.class_sum``, in the accumulation
    dtype; ``lse [N]``, ``log_prob [N, K]``, ``class_sum [N]``, None for zero. ``offset`` is a 0-d tensor to add to
    the sum over rows.
    """

    lse: Handle | None
    log_prob: Handle
    class_sum: Handle | None
    offset: Handle | None = None


@dataclass(frozen=True)
class Statistics:
    """The row statistics as handles; those that nobody asked for may be None. See ``ops.contract``.

    ``lse [N]``, ``picked`` and ``log_prob [N, K]``, ``class_sum``, ``entropy``, ``top`` and ``argmax [N]``; ``kl``,
    ``cross_entropy`` and ``student_kl [N]`` with a teacher's distribution, see ``ops.divergence``.
    """

    lse: Handle = None
    picked: Handle = None
    log_prob: Handle = None
    class_sum: Handle = None
    entropy: Handle = None
    top: Handle = None
    argmax: Handle = None
    kl: Handle = None
    cross_entropy: Handle = None
    student_kl: Handle = None


@dataclass(frozen=True)
class Index:
    """Which class to pick in each row: ``make`` emits the validated ``[N, K]``. Equal ``key``, same index."""

    make: Callable[[Emit], Handle]
    key: tuple[Any, ...]


@dataclass(frozen=True)
class Reader:
    """A function of the logits through row statistics alone.

    Attributes:
        source: the logits or log-probabilities that are read.
        name: of the function, with the options that differ from its defaults.
        normalises: whether it returns what makes log-probabilities of its source, if they are logits, by subtraction,
            or probabilities, if they are exponentials, by division, and nothing else.
        index: the classes that are picked, or None.
        finish: from the statistics of the rows (and the validated index) to what eager returns, but for its dtype.
        coefficients: for a scalar reader that is linear in the statistics: from the validated index to the
            coefficients. Its gradients can then be computed in the forward pass.
        want_class_sum, class_weight: whether ``class_sum`` is read, and with which weights ``[V]``.
        want_entropy, want_top: whether ``entropy`` is read; ``top`` or ``argmax``.
        chosen: of ``torch.topk``: ``k``, ``largest`` and ``sorted``; the classes that are picked are those.
        entries: of one that returns entries of its source as they are, at the index, the chosen or the best: how these
            are made of the statistics, ``[N, K]`` or ``[N]``.
        skip_unindexed: rows without an index do not matter.
        operands: every tensor that is read besides the logits.
    """

    source: ClassTensor
    name: str
    finish: Callable[[Emit, Statistics, Handle | None], Handle]
    index: Index | None = None
    coefficients: Callable[[Emit, Handle], Coefficients] | None = None
    want_class_sum: bool = False
    class_weight: Handle | None = None
    want_entropy: bool = False
    want_top: bool = False
    chosen: tuple[int, bool, bool] | None = None
    entries: Callable[[Emit, Statistics], Handle] | None = None
    skip_unindexed: bool = False
    operands: tuple[Handle, ...] = ()
    normalises: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether it shares no computation with others."""
        return isinstance(self, (Whole, Beside))

    def is_normaliser_of(self, value: ClassTensor) -> bool:
        """Whether it is of ``value`` that this returns what normalises it."""
        mine = self.source
        same_kind = self.normalises and type(mine) is type(value) and mine.factor == value.factor
        return same_kind and mine.has_logits_of(value) and mine.requires_grad == value.requires_grad

    @property
    def pattern(self) -> str:
        return " → ".join((*self.source.trail, self.name))


@dataclass(frozen=True)
class Beside(Reader):
    """Something else that a function of logits returns, which is made of their shape and of other tensors."""


@dataclass(frozen=True)
class Whole(Reader):
    """Probabilities or log-probabilities of which every entry is needed: ``source`` in full.

    ``reason`` says for what.
    """

    reason: Reason | None = None


def weigh(emit: Emit, c: Coefficients, s: Statistics) -> Handle:
    """The terms of a linear loss, ``[N]``. A zero coefficient silences a statistic that is not finite."""

    def term(coefficient: Handle, statistic: Handle) -> Handle:
        product = emit(torch.mul, coefficient, statistic)
        return emit(torch.where, emit(torch.eq, coefficient, 0), 0.0, product)

    terms = emit(torch.sum, term(c.log_prob, s.log_prob), 1)
    if c.lse is not None:
        terms = emit(torch.add, terms, term(c.lse, s.lse))
    if c.class_sum is not None:
        terms = emit(torch.add, terms, term(c.class_sum, s.class_sum))
    return terms


def with_offset(emit: Emit, loss: Handle, c: Coefficients) -> Handle:
    """The loss from the sum of its terms over the rows."""
    return loss if c.offset is None else emit(torch.add, loss, c.offset)
