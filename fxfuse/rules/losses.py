"""Losses with class-index targets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from .. import ops
from ..algebra import ClassTensor, Logits, LogProbs, Mixture, Probs
from ..compat import same
from ..ops.contract import AUTOCAST_DTYPES, acc_dtype
from ..readers import Coefficients, Index, Reader, Statistics, weigh, with_offset
from ..replay import Emit, Handle
from . import Call, rule
from .statistics import of_terms
from .targets import cross_entropy_with, kl_div_with
from .two_heads import compared


@rule(F.cross_entropy, like=F.cross_entropy, reads="loss", tracked=("input", "target"))
def cross_entropy(
    call: Call,
    input: Any,
    target: Any,
    weight: Any = None,
    ignore_index: Any = -100,
    reduction: Any = "mean",
    label_smoothing: Any = 0.0,
) -> Reader:
    if not isinstance(input, Logits) and not (isinstance(input, LogProbs) and input.factor == 1.0):
        call.keep("unknown_reader", "cross_entropy of something other than logits")
    targets = call.targets_in(target)
    if targets is not None:
        return cross_entropy_with(call, input, target, targets, weight, reduction, label_smoothing)
    if isinstance(target, Probs) and weight is None and label_smoothing == 0.0:
        return _with_teacher(call, input, target, False, reduction, classes_at=0 if len(input.shape) == 1 else 1)
    return _class_index_loss(call, input, target, weight, ignore_index, reduction, label_smoothing)


@rule(F.nll_loss, like=F.nll_loss, reads="loss")
def nll_loss(
    call: Call, input: Any, target: Any, weight: Any = None, ignore_index: Any = -100, reduction: Any = "mean"
) -> Reader:
    if not isinstance(input, LogProbs):
        call.keep("unknown_reader", "nll_loss of values that are not log-probabilities")
    return _class_index_loss(call, input, target, weight, ignore_index, reduction, 0.0)


@rule(F.kl_div, like=F.kl_div, reads="loss", derives=True, tracked=("input", "target"))
def kl_div(call: Call, input: Any, target: Any, reduction: Any = "mean", log_target: Any = False) -> Any:
    targets = call.targets_in(target)
    if targets is not None and not log_target:
        return kl_div_with(call, input, target, targets, reduction)
    if not isinstance(input, (LogProbs, Mixture)):
        call.keep("unknown_reader", "kl_div of something other than log-probabilities")
    if not isinstance(target, LogProbs if log_target else Probs):
        call.keep("unknown_reader", "kl_div with targets that are neither a head's nor known from how they are made")
    if reduction == "none":
        return compared(call, input, target, divergence=True)
    return _with_teacher(call, input, target, True, reduction, classes_at=None)


def _with_teacher(
    call: Call, input: ClassTensor, target: ClassTensor, divergence: bool, reduction: Any, classes_at: int | None
) -> Reader:
    """A loss between two distributions, the target being the teacher's."""
    if reduction not in ("none", "mean", "sum", "batchmean"):
        call.keep("unsupported_argument", f"{call.name} has reduction={reduction!r}")
    if classes_at is not None and input.class_dim != classes_at:
        call.keep("class_dim")
    source = replace(compared(call, input, target, divergence), trail=input.trail)

    def finish(emit: Emit, stats: Statistics, _: Handle | None) -> Handle:
        if not divergence:
            if reduction != "none":
                return emit(torch.mean if reduction == "mean" else torch.sum, stats.cross_entropy)
            return emit(torch.Tensor.reshape_as, stats.cross_entropy, source.column(emit))
        of_row = of_terms(emit, stats, source)
        if reduction == "mean":
            return emit(torch.div, emit(torch.mean, of_row), input.vocab)
        total = emit(torch.sum, of_row)
        if reduction == "sum":
            return total
        if input.class_dim == 0:
            return emit(torch.div, total, input.vocab)
        return emit(torch.div, total, emit(torch.Tensor.size, source.hidden_states(emit), 0))

    return Reader(source, _spelled(call.name, -100, reduction, 0.0, None), finish)


def _class_index_loss(
    call: Call, input: ClassTensor, target: Any, weight: Any, ignore_index: Any, reduction: Any, label_smoothing: Any
) -> Reader:
    dims = len(input.shape)
    if input.class_dim != (0 if dims == 1 else 1):
        call.keep("class_dim")
    labels = call.example(target)
    if labels.dtype.is_floating_point:
        call.keep("probability_targets")
    if labels.dtype != torch.int64:
        call.keep("dtype", f"{call.name} has targets of {labels.dtype}")
    if weight is not None:
        like = call.example(weight)
        if like.dim() != 1 or not same(like.shape[0], input.vocab):
            call.keep("shape", f"{call.name} has a class weight of shape {tuple(like.shape)}")
        if like.requires_grad:
            call.keep("unsupported_argument", f"{call.name} has a class weight that requires a gradient")
        # They may differ under autocast alone, which converts both.
        converted = call.autocast and AUTOCAST_DTYPES.issuperset((input.dtype, like.dtype))
        if like.dtype != input.dtype and not converted:
            call.keep("dtype", f"{call.name} has logits of {input.dtype} and a class weight of {like.dtype}")
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        call.keep("unsupported_argument", f"{call.name} has an ignore_index that is not a number")
    if not isinstance(label_smoothing, (int, float)) or not 0.0 <= label_smoothing <= 1.0:
        call.keep("unsupported_argument", f"{call.name} has label_smoothing={label_smoothing}")
    if reduction not in ("none", "mean", "sum"):
        call.keep("unsupported_argument", f"{call.name} has reduction={reduction!r}")

    acc = acc_dtype(input.head.dtype)
    # Of a single row without a batch that is ignored PyTorch's mean is NaN on a CPU and 0 on CUDA
    # (https://github.com/pytorch/pytorch/pull/64572).
    zero = dims == 1 and labels.device.type == "cuda" and label_smoothing == 0
    formula = _ClassIndexLoss(input.vocab, weight, float(label_smoothing), reduction, input.factor, acc, zero)

    def make(emit: Emit) -> Handle:
        # The class axis is axis 1 of the logits and absent from the target: rows flatten in the same order.
        clean = emit(ops.check_index, emit(torch.reshape, target, (-1,)), input.vocab, ignore_index)
        return emit(torch.unsqueeze, clean, 1)

    def finish(emit: Emit, stats: Statistics, index: Handle | None) -> Handle:
        c = formula.coefficients(emit, index)
        terms = weigh(emit, c, stats)
        if reduction == "none":
            return emit(torch.Tensor.reshape_as, terms, target)
        return with_offset(emit, emit(torch.sum, terms), c)

    return Reader(
        input,
        _spelled(call.name, ignore_index, reduction, label_smoothing, weight),
        finish,
        Index(make, (target, "target", ignore_index)),
        coefficients=None if reduction == "none" else formula.coefficients,
        want_log_prob_sum=label_smoothing > 0,
        class_weight=weight if label_smoothing > 0 else None,
        skip_unindexed=True,
        operands=(target,) if weight is None else (target, weight),
    )


class _ClassIndexLoss:
    """``torch.nn.CrossEntropyLoss`` with class indices, as a linear function of the row statistics.

    With m_i = [row i is not ignored], u_i = m_i * weight[y_i], epsilon the label smoothing and
    n = sum_i u_i for ``mean``, else 1, the definition in PyTorch's documentation is

        loss = -1/n sum_i ( (1 - epsilon) u_i log_prob_i,y_i + epsilon/V m_i sum_j weight_j log_prob_ij )

    ``factor`` multiplies the log-probabilities, where there is no label smoothing. With ``zero_if_ignored`` the mean of
    no rows is 0, not NaN.
    """

    def __init__(
        self,
        vocab: int,
        weight: Handle | None,
        label_smoothing: float,
        reduction: str,
        factor: float,
        acc: torch.dtype,
        zero_if_ignored: bool,
    ) -> None:
        self.vocab, self.weight, self.label_smoothing = vocab, weight, label_smoothing
        self.reduction, self.factor, self.acc = reduction, factor, acc
        self.zero_if_ignored = zero_if_ignored

    def coefficients(self, emit: Emit, index: Handle) -> Coefficients:
        row = emit(torch.squeeze, index, 1)
        wanted = emit(torch.ge, row, 0)
        own: Handle | None = None
        count: Handle | None = None
        offset: Handle | None = None
        if self.weight is not None:
            weight = emit(torch.Tensor.to, self.weight, self.acc)
            own = emit(torch.index_select, weight, 0, emit(torch.clamp, row, 0))

        def of_wanted(c: Handle) -> Handle:
            # The weight of an ignored row is another class's, perhaps infinite; and there may be no row to divide by.
            return emit(torch.where, wanted, c, 0.0)

        def alike(factor: float) -> Handle:
            """``factor`` m_i / n."""
            if count is None:
                return emit(torch.mul, emit(torch.Tensor.to, wanted, self.acc), factor)
            return of_wanted(emit(torch.mul, emit(torch.reciprocal, count), factor))

        if self.reduction == "mean":
            count = emit(torch.sum, wanted, dtype=self.acc) if own is None else emit(torch.sum, of_wanted(own))
            if not self.zero_if_ignored:
                # 0 / 0: with every row ignored the mean is NaN, and its gradients are zero.
                offset = emit(torch.div, emit(torch.zeros_like, count), count)
        epsilon = self.label_smoothing
        factor = (epsilon - 1.0) * self.factor
        if own is None:
            log_prob = alike(factor)
        else:
            log_prob = of_wanted(emit(torch.mul, own if count is None else emit(torch.div, own, count), factor))
        log_prob_sum = alike(-epsilon / self.vocab) if epsilon > 0 else None
        return Coefficients(emit(torch.unsqueeze, log_prob, 1), log_prob_sum, offset)


def _spelled(name: str, ignore_index: int, reduction: str, label_smoothing: float, weight: Any) -> str:
    """The call with the options that differ from the defaults."""
    options = [
        text
        for differs, text in (
            (weight is not None, "weight"),
            (ignore_index != -100, f"ignore_index={ignore_index}"),
            (reduction != "mean", f"reduction={reduction}"),
            (label_smoothing != 0, f"label_smoothing={label_smoothing:g}"),
        )
        if differs
    ]
    return f"{name}({', '.join(options)})" if options else name
