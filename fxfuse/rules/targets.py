"""Losses with targets that are one number at the class of each row and another elsewhere: labels smoothed by hand."""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import ops
from ..algebra import Entries, Logits, LogProbs
from ..compat import same
from ..ops.contract import acc_dtype
from ..readers import Coefficients, Index, Reader, Statistics, weigh, with_offset
from ..replay import Emit, Handle
from . import Call


def are_targets_of(call: Call, input: Any, target: Any) -> bool:
    """Whether ``target`` has an entry for each of ``input``, and the classes come last."""
    sizes, last = call.example(target).shape, input.class_dim == len(input.shape) - 1
    return last and len(sizes) == len(input.shape) and all(map(same, sizes, input.shape))


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
    positive = min(targets[:2]) >= 0.0
    if not isinstance(input, LogProbs) or not positive or reduction not in ("mean", "sum", "batchmean"):
        call.keep("unknown_reader", f"{call.name} with targets of classes")
    off, on = (number * math.log(number) if number else 0.0 for number in targets[:2])
    return _loss(call, input, target, targets, reduction, on + (input.vocab - 1) * off)


def _loss(call: Call, input: Any, target: Any, targets: Entries, reduction: str, entropy: float) -> Reader:
    """``entropy - sum_j q_j log_prob_j`` of each row, or all of these reduced.

    With q_j = off + (on - off) [j = y] the sum is ``off (sum_j z_j - V lse) + (on - off) log_prob_y``.
    """
    if not are_targets_of(call, input, target):
        call.keep("unknown_reader", f"{call.name} with targets of classes")
    acc, dims = acc_dtype(input.head.dtype), len(input.shape)
    off, gap = targets.off * input.factor, (targets.on - targets.off) * input.factor

    def make(emit: Emit) -> Handle:
        flat = emit(torch.reshape, targets.classes_of_rows(emit, dims), (-1, 1))
        return emit(ops.check_index, flat, input.vocab, None)

    def coefficients(emit: Emit, index: Handle) -> Coefficients:
        each = emit(torch.ones_like, emit(torch.squeeze, index, 1), dtype=acc)
        if reduction == "mean":
            per_entry = input.vocab if isinstance(input, LogProbs) else 1
            each = emit(torch.div, each, emit(torch.mul, emit(torch.sum, each), per_entry))
        elif reduction == "batchmean":
            each = emit(torch.div, each, emit(torch.Tensor.size, input.hidden_states(emit), 0))
        log_prob = emit(torch.unsqueeze, emit(torch.mul, each, -gap), 1)
        offset = emit(torch.sum, emit(torch.mul, each, entropy)) if entropy else None
        if off == 0.0:
            return Coefficients(None, log_prob, None, offset)
        return Coefficients(emit(torch.mul, each, off * input.vocab), log_prob, emit(torch.mul, each, -off), offset)

    def finish(emit: Emit, stats: Statistics, index: Handle | None) -> Handle:
        c = coefficients(emit, index)
        terms = weigh(emit, c, stats)
        if reduction == "none":
            column = emit(torch.select, input.hidden_states(emit), input.class_dim, 0)
            return emit(torch.Tensor.reshape_as, terms, column)
        return with_offset(emit, emit(torch.sum, terms), c)

    return Reader(
        input,
        call.name if reduction == "mean" else f"{call.name}(reduction={reduction})",
        finish,
        Index(make, (targets.classes, "targets")),
        coefficients=None if reduction == "none" else coefficients,
        want_class_sum=off != 0.0,
        operands=(targets.classes,),
    )
