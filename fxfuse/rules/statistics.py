"""Functions that are row statistics as they stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import ops
from ..algebra import (
    ClassTensor,
    Comparison,
    Exponentials,
    Logits,
    LogProbs,
    Probs,
    Targeted,
    WeighedLogits,
    WeighedLogProbs,
    constant,
)
from ..compat import same
from ..readers import Index, Reader, Statistics
from ..replay import Emit, Handle
from . import Call, rule
from .casts import converted
from .two_heads import mixed_by_logsumexp


@rule(torch.logsumexp, torch.special.logsumexp, "logsumexp", reads="loss", takes_parts=True)
def logsumexp(call: Call, input: Any, dim: Any, keepdim: Any = False) -> Reader | ClassTensor:
    if isinstance(input, tuple):
        return mixed_by_logsumexp(call, input, dim, keepdim)
    if not isinstance(input, Logits):
        call.keep("unknown_reader", "logsumexp of log-probabilities")
    along_classes(call, input, dim)
    return Reader(input, call.name, _one_a_row(input, keepdim, lambda emit, stats: stats.lse), normalises=True)


@rule(torch.sum, "sum", reads="scores")
def sum(call: Call, input: Any, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Reader:
    return _total(call, input, dim, keepdim, mean=False)


@rule(torch.mean, "mean", reads="scores")
def mean(call: Call, input: Any, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Reader:
    return _total(call, input, dim, keepdim, mean=True)


def _total(call: Call, input: Any, dim: Any, keepdim: Any, mean: bool) -> Reader:
    """The sum or the mean over the vocabulary; without a dimension, over all rows too."""
    share = 1.0 / input.vocab if mean else 1.0
    if dim is not None:
        along_classes(call, input, dim)
    elif keepdim:
        call.keep("unknown_reader", f"{call.name} of all logits with keepdim=True")
    converted(call, input, call.out.dtype)
    index, targets = None, input.targets if isinstance(input, Targeted) else constant(1.0)
    if isinstance(input, Comparison):
        kind: type[ClassTensor] = Comparison
    elif isinstance(input, Targeted):
        index, kind = _classes_of(input), input.of
    elif type(input) in _TOTALS:
        kind = type(input)
    else:
        call.keep("unknown_reader", f"{call.name} of probabilities")

    def total(emit: Emit, stats: Statistics) -> Handle:
        if isinstance(input, Comparison):
            of_row = of_terms(emit, stats, input)
        elif index is not None:
            own = emit(torch.select, stats.picked if kind is Logits else stats.log_prob, 1, 0)
            own = emit(torch.exp, own) if kind is Probs else own
            of_row = times(emit, own, targets.on - targets.off)
            if targets.off != 0.0:
                others = times(emit, _TOTALS[kind](emit, stats), targets.off)
                of_row = emit(torch.add, of_row, others)
        else:
            of_row = _TOTALS[kind](emit, stats)
        return times(emit, of_row, share * input.factor)

    def of_all(emit: Emit, stats: Statistics, _: Handle | None) -> Handle:
        return emit(torch.mean if mean else torch.sum, total(emit, stats))

    return Reader(
        input,
        call.name,
        of_all if dim is None else _one_a_row(input, keepdim, total),
        index,
        want_class_sum=kind is Logits and targets.off != 0.0,
        want_log_prob_sum=kind is LogProbs and targets.off != 0.0,
        want_expectation=kind is WeighedLogits,
        want_entropy=kind is WeighedLogProbs,
        operands=() if index is None else (targets.classes,),
        normalises=kind is Exponentials and dim is not None and not mean,
    )


def _classes_of(input: Targeted) -> Index:
    def make(emit: Emit) -> Handle:
        flat = emit(torch.reshape, input.index(emit), (-1, 1))
        return emit(ops.check_index, flat, input.vocab, None)

    return Index(make, (input.targets.classes, "one-hot", input.axis, input.row_key()[input.since :]))


# The sum over the vocabulary of each kind, from the statistics.
_TOTALS: dict[type[ClassTensor], Callable[[Emit, Statistics], Handle]] = {
    Logits: lambda emit, s: s.class_sum,
    Exponentials: lambda emit, s: emit(torch.exp, s.lse),
    LogProbs: lambda emit, s: s.log_prob_sum,
    WeighedLogits: lambda emit, s: s.expectation,
    WeighedLogProbs: lambda emit, s: emit(torch.neg, s.entropy),
}


def most(call: Call, input: Any, dim: Any, keepdim: Any) -> tuple[Reader, Reader]:
    """The largest entry of each row, and its class."""
    along_classes(call, input, dim)
    top = _top(call, input)
    values = Reader(input, call.name, _one_a_row(input, keepdim, top), want_top=True, entries=top)
    return values, _classes_of_most(call, input, keepdim)


def _most_of_all(call: Call, input: Any) -> Reader:
    """The largest entry of all."""
    if input.requires_grad and call.grad:
        call.keep("unknown_reader", f"{call.name} of all logits, with a gradient,")
    if any(same(size, 0) for size in input.shape):  # which raises
        call.keep("shape", f"{call.name} is of no logits")
    top = _top(call, input)
    return Reader(input, call.name, lambda emit, stats, _: emit(torch.amax, top(emit, stats)), want_top=True)


def _top(call: Call, input: Any) -> Callable[[Emit, Statistics], Handle]:
    """How to make the largest entry of each row of ``input`` from the statistics."""
    if input.factor < 0 or type(input) not in (Logits, LogProbs, Probs, Exponentials):
        call.keep("unknown_reader", f"{call.name} of something other than logits")

    def top(emit: Emit, stats: Statistics) -> Handle:
        if isinstance(input, Logits):
            return stats.top
        if isinstance(input, Exponentials):
            return times(emit, emit(torch.exp, stats.top), input.factor)
        log_prob = emit(torch.sub, emit(torch.sub, stats.top, stats.lse), stats.residual)
        return times(emit, emit(torch.exp, log_prob) if isinstance(input, Probs) else log_prob, input.factor)

    return top


def _classes_of_most(call: Call, input: Any, keepdim: Any) -> Reader:
    return Reader(input, call.name, _one_a_row(input, keepdim, lambda emit, stats: stats.argmax), want_top=True)


@rule(torch.argmax, "argmax", reads="scores")
def argmax(call: Call, input: Any, dim: Any = None, keepdim: Any = False) -> Reader:
    of_one_row = dim is None and len(input.shape) == 1
    return most(call, input, 0 if of_one_row else dim, keepdim)[1]


@rule(torch.max, "max", reads="scores", like=lambda input, dim=None, keepdim=False: None)
def largest(call: Call, input: Any, dim: Any = None, keepdim: Any = False) -> Reader | tuple[Reader, Reader]:
    if dim is not None and not isinstance(dim, int):
        call.keep("unknown_reader", f"{call.name} with another tensor")
    return _most_of_all(call, input) if dim is None else most(call, input, dim, keepdim)


@rule(torch.amax, "amax", reads="scores")
def amax(call: Call, input: Any, dim: Any = (), keepdim: Any = False) -> Reader:
    if input.requires_grad and call.grad:
        call.keep("unknown_reader", "amax, whose gradient is shared among equals,")
    whole = dim in ((), None, []) and not keepdim
    return _most_of_all(call, input) if whole else most(call, input, dim, keepdim)[0]


def of_terms(emit: Emit, stats: Statistics, compared: Comparison) -> Handle:
    """What the terms of a comparison add up to in each row, ``[N]``."""
    found = (stats.kl, stats.cross_entropy, stats.student_kl)
    total = None
    for handle, term in zip(found, compared.terms, strict=True):
        if term != 0.0:
            part = times(emit, handle, term)
            total = part if total is None else emit(torch.add, total, part)
    return times(emit, stats.kl, 0.0) if total is None else total


def times(emit: Emit, handle: Handle, factor: float) -> Handle:
    return handle if factor == 1.0 else emit(torch.mul, handle, factor)


def _one_a_row(
    source: ClassTensor, keepdim: bool, number: Callable[[Emit, Statistics], Handle]
) -> Callable[[Emit, Statistics, Handle | None], Handle]:
    """How a reader that gives one number a row finishes, in the shape that reducing the class axis leaves."""

    def finish(emit: Emit, stats: Statistics, index: Handle | None) -> Handle:
        return emit(torch.Tensor.reshape_as, number(emit, stats), source.column(emit, keepdim))

    return finish


def along_classes(call: Call, input: Any, dim: Any) -> None:
    """Refuse unless ``dim`` is the class axis, alone."""
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    dims = max(len(input.shape), 1)
    if not isinstance(dim, int) or not -dims <= dim < dims or dim % dims != input.class_dim:
        call.keep("class_dim")
