"""What a value derived from a projection to the vocabulary *is*.

A value is described by how it is made from the operands of its projection (its **head**): which rows of it, in
which shape, scaled by what, normalised or not. Descriptions are immutable; a rule turns one into the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any, NamedTuple, TypeVar

import torch

from .replay import ClassOp, Emit, Handle, RowOp, RowShift
from .transform import Transform

Copied = TypeVar("Copied")


def quickly_replace(made_of: Copied, **fields: Any) -> Copied:
    """``dataclasses.replace`` in a quarter of its time, for what is made each time logits wait: of a class without
    ``__post_init__``, and of fields that there are.
    """
    made = object.__new__(type(made_of))
    made.__dict__.update(made_of.__dict__, **fields)
    return made


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
        filled: ``[V]`` bool, or None: classes whose logits are the bias alone, so that no gradient of theirs comes to
            the hidden states, not even one that is NaN.
        wide_bias: whether the bias keeps its precision, as the program added it to logits (or a part of it).
        unsupported: what of its call fxfuse does not support, if anything.
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
    filled: Handle | None = None
    wide_bias: bool = False
    unsupported: str = ""

    def of(self, **operands: Handle | None) -> Head:
        """The same with other operands."""
        return quickly_replace(self, **operands)

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
    def is_extended(self) -> bool:
        """Whether there is such an operation."""
        return len(self.since_extension) != len(self.class_ops)

    @property
    def adds_to_classes(self) -> bool:
        """Whether the program added something to the logits of a class, which keeps its precision."""
        return any(op.shifts for op in self.since_extension) or (self.head.wide_bias and not self.is_extended)

    @property
    def has_bias(self) -> bool:
        """Whether a bias is added to the product."""
        return self.adds_to_classes or (self.head.bias is not None and not self.is_extended)

    @property
    def classes_last(self) -> bool:
        """Whether the class axis is the last."""
        return self.class_dim == len(self.shape) - 1

    def to_last(self, emit: Emit, handle: Handle) -> Handle:
        """A tensor with an axis where this has its classes, that axis moved to the end."""
        return handle if self.classes_last else emit(torch.movedim, handle, self.class_dim, -1)

    def from_last(self, emit: Emit, handle: Handle) -> Handle:
        """The opposite of ``to_last``."""
        return handle if self.classes_last else emit(torch.movedim, handle, -1, self.class_dim)

    def hidden_states(self, emit: Emit, count: int | None = None) -> Handle:
        """The hidden states with the row operations replayed, or the first ``count`` of these, D in V's place."""
        handle, hidden = self.head.input, self.head.hidden
        for op in self.row_ops[:count]:
            handle, hidden = op.replay(emit, handle, hidden), op.hidden_after(hidden)
        return handle

    def column(self, emit: Emit, keepdim: bool = False) -> Handle:
        """One number of each row's hidden state: in the shape that reducing the classes leaves, symbolic or not."""
        rows = self.hidden_states(emit)
        if keepdim:
            return emit(torch.narrow, rows, self.class_dim, 0, 1)
        return emit(torch.select, rows, self.class_dim, 0)

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

    @property
    def is_filled(self) -> bool:
        """Whether numbers were put in the place of the logits of some classes."""
        return self.head.filled is not None or any(op.fills for op in self.class_ops)

    @property
    def extends_filled(self) -> bool:
        """Whether these numbers became a part of the weight."""
        before = self.class_ops[: len(self.class_ops) - len(self.since_extension)]
        return self.is_extended and (self.head.filled is not None or any(op.fills for op in before))

    def filled(self, emit: Emit) -> Handle | None:
        """``filled`` of the head that has the ``classes``; None if there are none, or not as a bias."""
        if not self.is_filled or self.extends_filled:
            return None
        weight = emit(torch.t, self.head.weight) if self.head.weight_transposed else self.head.weight
        mark = emit(torch.ones_like, emit(getitem, weight, (slice(None), slice(0, 1))))
        if self.head.filled is not None:
            mark = emit(torch.masked_fill, mark, emit(torch.unsqueeze, self.head.filled, 1), 0)
        for op in self.class_ops:
            if op.fills or op.selects:
                mark, _ = op.replay(emit, mark, None)
        return emit(torch.eq, emit(torch.squeeze, mark, 1), 0)

    def handles(self, shifted: bool = True) -> tuple[Handle, ...]:
        """The arguments of the row and class operations: symbolic sizes and tensors among them, and numbers.

        ``shifted`` as for ``logits_key``.
        """
        of_rows = (handle for row_op in self.row_ops for handle in row_op.handles)
        of_classes = (handle for class_op in self.class_ops for handle in class_op.handles)
        return (*of_rows, *of_classes, *(shift.handle for shift in self.row_shifts if shifted))

    def map(self: C, function: Callable[[Handle], Handle], since: Iterable[ClassTensor] = ()) -> C:
        """The same with ``function`` of every argument of its row and class operations in its place.

        Operations that one of ``since`` has stay as they are.
        """
        known = {id(op) for part in since for op in (*part.row_ops, *part.class_ops)}
        rows = tuple(op if id(op) in known else op.map(function) for op in self.row_ops)
        classes = tuple(op if id(op) in known else op.map(function) for op in self.class_ops)
        shifts = tuple(replace(shift, handle=function(shift.handle)) for shift in self.row_shifts)
        return quickly_replace(self, row_ops=rows, class_ops=classes, row_shifts=shifts)

    def with_heads(self: C, of: Callable[[Head], Head]) -> C:
        """The same of other heads: what ``of`` makes of each that it is of, and of those of the parts of a join."""
        return quickly_replace(self, head=of(self.head), row_ops=tuple(op.with_heads(of) for op in self.row_ops))

    def heads(self) -> dict[Head, bool]:
        """Those that it is of, its own first, and whether gradients flow to each."""
        joined = (head for op in self.row_ops for head in op.heads())
        return dict.fromkeys((self.head, *joined), self.requires_grad)

    def joins(self) -> int:
        """How many joins of rows it is made of, those in others included."""
        return sum(op.joins() for op in self.row_ops)

    def row_key(self, whole: bool = False) -> tuple[Any, ...]:
        """Equal for tensors whose flattened rows are the same rows in the same order; ``whole``: in the same shape."""
        last = max((i for i, op in enumerate(self.row_ops) if whole or not op.keeps_order), default=-1)
        # What comes before an operation that moves rows decides which rows it moves.
        return tuple(op.key() for op in self.row_ops[: last + 1])

    def logits_key(self, shifted: bool = True) -> tuple[Any, ...]:
        """Equal for tensors that are made of equal rows by equal logits.

        Not ``shifted``: but for what is added to all logits of a row, where that can be added to their statistics.
        """
        shifts = tuple(shift.key() for shift in self.row_shifts) if shifted else ()
        return tuple(op.key() for op in self.class_ops), self.scale, self.transform, shifts

    def whole_key(self) -> tuple[Any, ...]:
        """Equal for tensors that are made of the same logits, entry by entry."""
        return self.head, self.row_key(whole=True), self.logits_key(), self.class_dim

    def has_logits_of(self, other: ClassTensor) -> bool:
        """Whether both are made of the same logits, entry by entry."""
        return self.head is other.head and self.whole_key() == other.whole_key()


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


class Infinite(ClassTensor):
    """Whether such logits are infinite."""


class Entries(NamedTuple):
    """``off`` everywhere, but ``on`` at one class of each row, the classes being along the last axis.

    ``classes`` is the handle of these, int64 ``[*rows]`` or ``[*rows, 1]``; None if there are none.
    """

    off: float
    on: float
    classes: Handle = None

    def classes_of_rows(self, emit: Emit, dims: int) -> Handle:
        """The handle of the classes of a tensor of ``dims`` dimensions, ``[*rows, 1]``."""
        has_axis = emit.example(self.classes).dim() == dims
        return self.classes if has_axis else emit(torch.unsqueeze, self.classes, -1)


def constant(number: float) -> Entries:
    """The entries of a tensor that holds one number."""
    return Entries(number, number)


@dataclass(frozen=True)
class Targeted(ClassTensor):
    """Logits, log-probabilities or probabilities times targets, which are one number at the class of each row and
    another elsewhere (0 beside probabilities), times a number.

    Attributes:
        of: which of these.
        targets: their entries. Their last axis was that of the classes, ``axis``, when the product was made.
        axis, since: of the classes, and how many row operations had been done, then.
    """

    of: type[ClassTensor] = Logits
    targets: Entries = Entries(0.0, 0.0)  # noqa: RUF009 (immutable)
    axis: int = 0
    since: int = 0

    def index(self, emit: Emit) -> Handle:
        """The class of each row, in the shape of the tensor but with one class."""
        handle = self.targets.classes_of_rows(emit, self.axis + 1)
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

    def map(self: T, function: Callable[[Handle], Handle], since: Iterable[ClassTensor] = ()) -> T:
        assert self.teacher is not None
        teachers = (part.teacher for part in since if isinstance(part, OfTwoHeads) and part.teacher is not None)
        teacher = self.teacher.map(function, (*since, *teachers))
        return replace(super().map(function, since), teacher=teacher)

    def handles(self, shifted: bool = True) -> tuple[Handle, ...]:
        assert self.teacher is not None  # shifts of rows cannot be added to the statistics of two heads
        return (*super().handles(), *self.teacher.handles())

    def with_heads(self: T, of: Callable[[Head], Head]) -> T:
        assert self.teacher is not None
        return replace(super().with_heads(of), teacher=self.teacher.with_heads(of))

    def heads(self) -> dict[Head, bool]:
        found: dict[Head, bool] = {}
        for side in self.sides():
            for head, trained in side.heads().items():  # of one head both may be
                found[head] = found.get(head, False) or trained
        return found

    def logits_key(self, shifted: bool = True) -> tuple[Any, ...]:
        one, other = self.sides()
        of_teacher = other.head, other.row_key(whole=True), other.logits_key()
        return super().logits_key(), one.requires_grad, of_teacher, other.requires_grad


class InfiniteOfEither(OfTwoHeads):
    """Whether the logits of either are infinite."""


@dataclass(frozen=True)
class Mixture(OfTwoHeads):
    """A weighted sum of both distributions, or its logarithm.

    Attributes:
        weights: of q and of p.
        log: whether it is the logarithm.
    """

    weights: tuple[float, float] = (1.0, 1.0)
    log: bool = True

    def turned(self) -> Mixture:
        """The same with the student and the teacher in each other's place."""
        student, teacher = self.sides()
        fields = {f: getattr(self, f) for f in ("shape", "class_dim", "dtype", "requires_grad", "factor", "trail")}
        fields = {f: getattr(teacher, f) for f in ClassTensor.__dataclass_fields__} | fields
        fields |= {"teacher": student, "student_requires_grad": teacher.requires_grad}
        return Mixture(**fields, weights=self.weights[::-1], log=self.log)


@dataclass(frozen=True)
class LogRatio(OfTwoHeads):
    """Log-probabilities of the one less those of the other, or of either less those of a mixture, times a number.

    Attributes:
        weights: of q and of p in that mixture, if it is one.
        of_student: whether it is of q, then.
    """

    weights: tuple[float, float] | None = None
    of_student: bool = True


@dataclass(frozen=True)
class Comparison(OfTwoHeads):
    """What is added up to compare both with a mixture m of them, times a number.

    Attributes:
        share: of p in m, which is q itself for 0.
        terms: how often ``p (log p - log m)``, as ``kl_div`` has it, ``-p log m`` and ``q (log q - log m)`` are in it.
        finite: whether it is 0 where the logits of either are infinite.
    """

    share: float = 0.0
    terms: tuple[float, float, float] = (1.0, 0.0, 0.0)
    finite: bool = False

    def is_of_teacher_alone(self) -> bool:
        """Whether its terms add up to ``p log p``, times a number, whatever the mixture is."""
        of_kl, of_cross_entropy, of_student = self.terms
        return of_kl == -of_cross_entropy and of_student == 0.0

    def logits_key(self, shifted: bool = True) -> tuple[Any, ...]:
        return *super().logits_key(), self.share, self.finite


C = TypeVar("C", bound=ClassTensor)
T = TypeVar("T", bound=OfTwoHeads)


def derive(value: C, name: str, *ops: RowOp, **changes: Any) -> C:
    """``value`` after the function ``name``: with more row operations and other attributes changed."""
    if isinstance(value, OfTwoHeads):  # what is done to the rows is done to both
        both = {field: change for field, change in changes.items() if field in ("shape", "class_dim")}
        assert value.teacher is not None
        changes["teacher"] = derive(value.teacher, name, *ops, **both)
    return quickly_replace(value, row_ops=value.row_ops + ops, trail=(*value.trail, name), **changes)


def of_classes(value: C, name: str, *ops: ClassOp, **changes: Any) -> C:
    """The same with more class operations."""
    return derive(value, name, class_ops=value.class_ops + ops, **changes)


def become(kind: type[C], value: ClassTensor, name: str, **changes: Any) -> C:
    """What is of another ``kind`` and made of the same logits: their ``log_softmax``, say."""
    fields = {f: getattr(value, f) for f in ClassTensor.__dataclass_fields__}
    return kind(**{**fields, "trail": (*value.trail, name), **changes})
