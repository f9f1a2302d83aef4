"""Running what the algebra describes on tensors, at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import transform
from .algebra import (
    ClampedLogProbs,
    ClassTensor,
    Comparison,
    Exponentials,
    Infinite,
    InfiniteOfEither,
    Logits,
    LogProbs,
    LogRatio,
    Mixture,
    OfTwoHeads,
    Probs,
    ShiftedLogProbs,
    WeighedLogits,
    WeighedLogProbs,
)
from .ops.contract import acc_dtype
from .ops.products import product
from .originals import original_or_itself
from .replay import Emit


class EagerEmit(Emit):
    """Runs functions as they come."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def example(self, handle: Any) -> Tensor:
        return handle


EMIT = EagerEmit()
_linear = original_or_itself(F.linear)


def dense(value: ClassTensor) -> Tensor:
    """What ``value`` describes, in full: of its shape and dtype, differentiable with regard to the head's operands.

    The product is in the dtype of the logits, as eager's; everything between it and ``value`` in the accumulation
    dtype.
    """
    if isinstance(value, OfTwoHeads):
        z = _of_two(value) * value.factor
    else:
        z = _logits(value)
        if not isinstance(value, Logits):
            z = _FROM_LOGITS[type(value)](z, value.factor)
    return value.from_last(EMIT, z.to(value.dtype))


def _logits(value: ClassTensor) -> Tensor:
    """The logits that ``value`` is made of, the class axis last; in the accumulation dtype where they are not all."""
    head, acc = value.head, acc_dtype(value.head.dtype)
    rows = value.to_last(EMIT, value.hidden_states(EMIT))
    with torch.autocast(rows.device.type, enabled=False):
        weight, bias = value.classes(EMIT)
        rows, weight = rows.to(head.dtype), weight.to(head.dtype)
        if bias is not None and value.adds_to_classes:
            z = _linear(rows, weight).to(acc) + bias.to(acc)
        else:
            z = _linear(rows, weight, None if bias is None else bias.to(head.dtype))
        z = _filled(value.filled(EMIT), bias, z)
        if value.scale != 1.0 or value.transform or not isinstance(value, Logits):
            z = transform.apply(value.transform, z.to(acc) * value.scale)
        shift = value.row_shift(EMIT)
        if shift is not None:
            z = z.to(acc) + value.to_last(EMIT, shift).to(acc)
    return z


def _filled(classes: Tensor | None, bias: Tensor | None, z: Tensor) -> Tensor:
    """``z`` with the bias alone in these classes, whatever the hidden states are."""
    if classes is None:
        return z
    assert bias is not None
    return torch.where(classes, bias.to(z.dtype), z)


def _of_two(value: OfTwoHeads) -> Tensor:
    """The same of two heads, but for the factor, the class axis last."""
    z, y = map(_logits, value.sides())
    if isinstance(value, InfiniteOfEither):
        return z.isinf() | y.isinf()
    log_q, log_p = z.log_softmax(-1), y.log_softmax(-1)
    if isinstance(value, Mixture):
        log_m = _mixed(log_q, log_p, *value.weights)
        return log_m if value.log else log_m.exp()
    if isinstance(value, LogRatio):
        if value.weights is None:
            return log_q - log_p
        return (log_q if value.of_student else log_p) - _mixed(log_q, log_p, *value.weights)
    assert isinstance(value, Comparison)
    log_m = _mixed(log_q, log_p, 1.0 - value.share, value.share)
    p, q = log_p.exp(), log_q.exp()
    parts = (p, log_p - log_m), (p, -log_m), (q, log_q - log_m)
    # A probability of 0 makes its term 0, whatever the other is there.
    terms = [
        term * (weight * above).masked_fill(weight == 0, 0.0)
        for term, (weight, above) in zip(value.terms, parts, strict=True)
        if term != 0.0
    ]
    total = functools.reduce(torch.add, terms, torch.zeros_like(p))
    return total.masked_fill(z.isinf() | y.isinf(), 0.0) if value.finite else total


def _mixed(log_q: Tensor, log_p: Tensor, of_q: float, of_p: float) -> Tensor:
    if of_p == 0.0:
        return log_q
    return torch.logaddexp(log_q + math.log(of_q), log_p + math.log(of_p))


# Of the logits and the factor.
_FROM_LOGITS: dict[type[ClassTensor], Callable[[Tensor, float], Tensor]] = {
    LogProbs: lambda z, factor: z.log_softmax(-1) * factor,
    ShiftedLogProbs: lambda z, factor: z.log_softmax(-1) + math.log(factor),
    ClampedLogProbs: lambda z, factor: z.log_softmax(-1).clamp(min=torch.finfo(z.dtype).min) * factor,
    Probs: lambda z, factor: z.softmax(-1) * factor,
    Exponentials: lambda z, factor: z.exp() * factor,
    Infinite: lambda z, factor: z.isinf(),
    WeighedLogits: lambda z, factor: z.softmax(-1) * z * factor,
    WeighedLogProbs: lambda z, factor: z.softmax(-1) * z.log_softmax(-1) * factor,
}


def pull_back(value: ClassTensor, g: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of the operands of logits whose rows are still those of the projection, given the logits' own.

    Args:
        value: logits without row operations, the class axis last. Without a transform, an operand that no other's
            gradient needs may be missing from its head.
        g: the gradient of all of them, in their shape.
        needs: for which of ``head.input``, ``head.weight`` and ``head.bias`` to compute it.

    Returns:
        These gradients in the dtype of the logits, for autograd to convert, the first two as matrices; or None.
    """
    head = value.head
    leading = g.shape[:-1]
    with torch.autocast(g.device.type, enabled=False):
        g = g.reshape(-1, head.vocab)
        x = None if head.input is None else head.input.reshape(-1, head.hidden).to(head.dtype)
        w = None if head.weight is None else head.weight.to(head.dtype)
        if w is not None and head.weight_transposed:
            w = w.t()
        if value.scale != 1.0 or value.transform:
            acc = acc_dtype(head.dtype)
            g = g.to(acc) * value.scale
            if value.transform:
                assert x is not None and w is not None
                z = _linear(x, w).to(acc)
                z = z if head.bias is None else z + head.bias
                z = _filled(head.filled, head.bias, z)
                _, slope = transform.apply_with_slope(value.transform, z * value.scale)
                assert slope is not None
                g = g * slope
        g = g.to(head.dtype)
        grads: list[Tensor | None] = [None, None, None]
        if needs[2]:
            grads[2] = g.sum(0)
        if head.filled is not None:
            g = g.masked_fill(head.filled, 0.0)
        if needs[0]:
            assert w is not None
            grads[0] = product(g, w).reshape(*leading, head.hidden)
        if needs[1]:
            assert x is not None
            grads[1] = x.t() @ g if head.weight_transposed else g.t() @ x
        return grads
