"""Losses with targets that are one number at the class of each row and another elsewhere: labels smoothed by hand."""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import ops
from ..algebra import ClassTensor, Entries, Logits, LogProbs, Probs
from ..compat import same
from ..ops.contract import acc_dtype
from ..readers import Coefficients, Index, Reader, Statistics, weigh, with_offset
from ..replay import Emit, Handle
from ..transform import MASKED
from . import Call


def are_targets_of(call: Call, input: Any, target: Any) -> bool:
    """Whether ``target`` has an entry for each of ``input``, and the classes come last."""
    sizes = call.example(target).shape
    return input.classes_last and len(sizes) == len(input.shape) and all(map(same, sizes, input.shape))


def can_weigh(input: ClassTensor, targets: Entries) -> bool:
    """Whether sums weighed by such targets come out as in eager, also with what masks leave of the classes.

    There eager multiplies -inf by the target, which may be 0, and numbers near the end of float32, which a sum over the
    classes would pass.
    """
    numbers = [op.args[1] for op in input.class_ops if op.name in ("fill", "assign")]
    numbers += [step.number for step in input.transform if step.name == MASKED]
    infinite = any(map(math.isinf, numbers)) or any(op.name == "shift" for op in input.class_ops)
    huge = any(_HUGE < abs(number) < math.inf for number in numbers)
    known = all(map(math.isfinite, targets[:2]))
    if isinstance(input, Probs):  # of which none is infinite, or more than 1
        return known
    return known and not huge and (not infinite or targets.on > targets.off > 0.0)


_HUGE = 1e30


def cross_entropy_with(
    call: Call, input: Any, target: Any, targets: Entries, weight: Any, reduction: Any, label_smoothing: Any
) -> Reader:
    """``-sum_j q_j log_prob_j`` of each row, with q the targets, smoothed further by ``label_smoothing``."""
    plain = weight is None and isinstance(label_smoothing, (int, float)) and 0.0 <= label_smoothing <= 1.0
    if not isinstance(input, Logits) or not plain or len(input.shape) > 2 or reduction not in ("none", "mean", "sum"):
        call.keep("probability_targets")
    share = label_smoothing / input.vocab
    off, on = (number * (1.0 - label_smoothing) + share for number in targets[:2])
    return _loss(call, input, target, targets._replace(off=off, on=on), reduction, 0.0)


def kl_div_with(call: Call, input: Any, target: Any, targets: Entries, reduction: Any) -> Reader:
    """``sum_j q_j (log q_j - log_prob_j)`` of each row, with q the targets and 0 log 0 = 0."""
    if not isinstance(input, LogProbs):
        call.keep("unknown_reader", f"{call.name} of something other than log-probabilities")
    if not min(targets[:2]) >= 0.0 or reduction not in ("mean", "sum", "batchmean"):
        call.keep("unknown_reader", f"{call.name} with negative targets, or of every entry,")
    off, on = (number * math.log(number) if number else 0.0 for number in targets[:2])
    return _loss(call, input, target, targets, reduction, on + (input.vocab - 1) * off)


def _loss(call: Call, input: Any, target: Any, targets: Entries, reduction: str, entropy: float) -> Reader:
    """``entropy - sum_j q_j log_prob_j`` of each row, or all of these reduced.

    With q_j = off + (on - off) [j = y] the sum is ``off sum_j log_prob_j + (on - off) log_prob_y``.
    """
    if not are_targets_of(call, input, target) or not can_weigh(input, targets):
        call.keep("unknown_reader", f"{call.name} with such targets")
    acc, dims = acc_dtype(input.head.dtype), len(input.shape)
    off, gap = targets.off * input.factor, (targets.on - targets.off) * input.factor

    def make(emit: Emit) -> Handle:
        flat = emit(torch.reshape, targets.classes_of_rows(emit, dims), (-1, 1))
        return emit(ops.check_index, flat, input.vocab, None)

    def coefficients(emit: Emit, index: Handle) -> Coefficients:
        each, offset = emit(torch.ones_like, emit(torch.squeeze, index, 1), dtype=acc), None
        if reduction in ("mean", "batchmean"):
            count = emit(torch.sum, each)
            if reduction == "mean":
                count = emit(torch.mul, count, input.vocab) if isinstance(input, LogProbs) else count
            elif input.class_dim == 0:
                count = emit(torch.full_like, count, float(input.vocab))
            else:
                count = emit(
                    torch.mul, emit(torch.ones_like, count), emit(torch.Tensor.size, input.hidden_states(emit), 0)
                )
            # 0 / 0: of no rows the mean is NaN.
            each, offset = emit(torch.div, each, count), emit(torch.div, emit(torch.zeros_like, count), count)
        log_prob = emit(torch.unsqueeze, emit(torch.mul, each, -gap), 1)
        if entropy:
            more = emit(torch.sum, emit(torch.mul, each, entropy))
            offset = more if offset is None else emit(torch.add, offset, more)
        if off == 0.0:
            return Coefficients(log_prob, None, offset)
        return Coefficients(log_prob, emit(torch.mul, each, -off), offset)

    def finish(emit: Emit, stats: Statistics, index: Handle | None) -> Handle:
        c = coefficients(emit, index)
        terms = weigh(emit, c, stats)
        if reduction == "none":
            return emit(torch.Tensor.reshape_as, terms, input.column(emit))
        return with_offset(emit, emit(torch.sum, terms), c)

    return Reader(
        input,
        call.name if reduction == "mean" else f"{call.name}(reduction={reduction})",
        finish,
        Index(make, (targets.classes, "targets")),
        coefficients=None if reduction == "none" else coefficients,
        want_log_prob_sum=off != 0.0,
        operands=(targets.classes,),
    )
