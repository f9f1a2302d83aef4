"""What a value derived from a projection to the vocabulary *is*.

A value is described by how it is made from the operands of its projection (its **head**): which rows of it, in
which shape, scaled by what, normalised or not. Descriptions are immutable; a rule turns one into the next. They
hold *handles* for tensors, which are FX nodes under the graph driver and tensors under the run-time driver; the
algebra never looks inside a handle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class RowOp:
    """A function that moves or selects rows and leaves the class axis whole.

    It does to hidden states ``[*rows, D]`` what it did to logits ``[*rows, V]``, so it never has to touch logits.
    ``keeps_order`` says that the rows, flattened, are the same in the same order after it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    keeps_order: bool = False

    def replay(self, emit: Emit, hidden_states: Handle, hidden: int) -> Handle:
        def fill(arg: Any) -> Any:
            if isinstance(arg, (tuple, list)):
                return type(arg)(fill(a) for a in arg)
            return hidden if arg is HIDDEN else arg

        return emit(self.function, hidden_states, *fill(self.args))


@dataclass(frozen=True, eq=False)
class Head:
    """A projection ``input @ weight.T + bias`` to a vocabulary. Equal only to itself: one program may make two alike.

    Attributes:
        input: hidden states ``[*rows, D]``.
        weight: ``[V, D]``, or ``[D, V]`` where ``weight_transposed``.
        bias: ``[V]`` or None.
        dtype: of the logits; operands of another dtype (ambient autocast) are converted to it.
    """

    input: Handle
    weight: Handle
    bias: Handle | None
    weight_transposed: bool
    hidden: int
    vocab: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ClassTensor:
    """A tensor with one entry a class: logits of some rows of a head, times a number, transformed.

    Attributes:
        row_ops: what was done to the rows since the projection.
        shape: its shape in the program; ``shape[class_dim]`` is V.
        scale, transform: the logits are ``transform(scale * (input @ weight.T + bias))``.
        factor: what log-probabilities are multiplied by; 1 for logits.
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
    scale: float = 1.0
    transform: Transform = ()
    factor: float = 1.0
    trail: tuple[str, ...] = ()

    def hidden_states(self, emit: Emit) -> Handle:
        """The hidden states with the row operations replayed, D in V's place."""
        handle = self.head.input
        for op in self.row_ops:
            handle = op.replay(emit, handle, self.head.hidden)
        return handle

    def sizes(self) -> tuple[Handle, ...]:
        """The arguments of the row operations, symbolic sizes among them."""

        def flat(value: Any) -> Iterator[Handle]:
            if isinstance(value, slice):
                value = (value.start, value.stop, value.step)
            if isinstance(value, (tuple, list)):
                for item in value:
                    yield from flat(item)
            else:
                yield value

        return tuple(flat([op.args for op in self.row_ops]))

    def row_key(self) -> tuple[Any, ...]:
        """Equal for tensors whose flattened rows are the same rows in the same order."""
        last = max((i for i, op in enumerate(self.row_ops) if not op.keeps_order), default=-1)
        # What comes before an operation that moves rows decides which rows it moves.
        return tuple((op.function, repr(op.args)) for op in self.row_ops[: last + 1])


class Logits(ClassTensor):
    """Unnormalised."""


class LogProbs(ClassTensor):
    """``log_softmax`` of such logits along the class axis, times a number."""


C = TypeVar("C", bound=ClassTensor)


def derive(value: C, name: str, *ops: RowOp, **changes: Any) -> C:
    """``value`` after the function ``name``: with more row operations and other attributes changed."""
    return replace(value, row_ops=value.row_ops + ops, trail=(*value.trail, name), **changes)


def as_log_probs(value: Logits, name: str, dtype: torch.dtype) -> LogProbs:
    """``log_softmax`` of ``value``."""
    fields = {f: getattr(value, f) for f in value.__dataclass_fields__}
    return LogProbs(**{**fields, "dtype": dtype, "trail": (*value.trail, name)})


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
    """The row statistics as handles: ``lse [N]``, ``picked`` and ``log_prob [N, K]``, ``class_sum [N]``."""

    lse: Handle
    picked: Handle
    log_prob: Handle
    class_sum: Handle


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
        index: the classes that are picked, or None.
        finish: from the statistics of the rows (and the validated index) to what eager returns, but for its dtype.
        coefficients: for a scalar reader that is linear in the statistics: from the validated index to the
            coefficients. Its gradients can then be computed in the forward pass.
        want_class_sum, class_weight: whether ``class_sum`` is read, and with which weights ``[V]``.
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
    skip_unindexed: bool = False
    operands: tuple[Handle, ...] = ()

    @property
    def pattern(self) -> str:
        return " → ".join((*self.source.trail, self.name))


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
