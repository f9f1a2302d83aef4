"""What reads logits through row statistics alone, and how its results are made of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .algebra import ClassTensor
from .reasons import Reason
from .replay import Emit, Handle


@dataclass(frozen=True)
class Coefficients:
    """A loss that is linear in log-probabilities, with coefficients that depend on labels alone.

    Per row: ``sum_k log_prob_k * c.log_prob_k + log_prob_sum * c.log_prob_sum``, in the accumulation dtype;
    ``log_prob [N, K]``, ``log_prob_sum [N]`` or None for zero. ``offset`` is a 0-d tensor to add to the sum over rows.
    """

    log_prob: Handle
    log_prob_sum: Handle | None
    offset: Handle | None = None


@dataclass(frozen=True)
class Statistics:
    """The row statistics as handles; those that nobody asked for may be None. See ``ops.contract``.

    ``picked`` and ``log_prob [N, K]``, ``argmax`` and the others ``[N]``; ``kl``, ``cross_entropy`` and ``student_kl
    [N]`` with a teacher's distribution, see ``ops.divergence``.
    """

    lse: Handle = None
    picked: Handle = None
    log_prob: Handle = None
    class_sum: Handle = None
    log_prob_sum: Handle = None
    residual: Handle = None
    expectation: Handle = None
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
        want_class_sum, want_log_prob_sum, class_weight: whether these are read, and with which weights ``[V]``.
        want_expectation, want_entropy, want_top: whether these are read; ``top`` or ``argmax``.
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
    want_log_prob_sum: bool = False
    class_weight: Handle | None = None
    want_expectation: bool = False
    want_entropy: bool = False
    want_top: bool = False
    chosen: tuple[int, bool, bool] | None = None
    entries: Callable[[Emit, Statistics], Handle] | None = None
    skip_unindexed: bool = False
    operands: tuple[Handle, ...] = ()
    normalises: bool = False

    @property
    def sums_classes(self) -> bool:
        """Whether it reads a sum over all classes, weighted or not."""
        return self.want_class_sum or self.want_log_prob_sum

    @property
    def is_alone(self) -> bool:
        """Whether it shares no computation with others."""
        return isinstance(self, (Whole, Beside))

    def is_normaliser_of(self, value: ClassTensor, result: torch.Tensor) -> bool:
        """Whether it is of ``value`` that this returns what normalises it, and of the ``result`` the same gradients."""
        mine = self.source
        same_kind = self.normalises and type(mine) is type(value) and mine.factor == value.factor
        same_grad = mine.requires_grad == value.requires_grad or not result.requires_grad
        return same_kind and mine.has_logits_of(value) and same_grad

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
    if c.log_prob_sum is not None:
        terms = emit(torch.add, terms, term(c.log_prob_sum, s.log_prob_sum))
    return terms


def with_offset(emit: Emit, loss: Handle, c: Coefficients) -> Handle:
    """The loss from the sum of its terms over the rows."""
    return loss if c.offset is None else emit(torch.add, loss, c.offset)
