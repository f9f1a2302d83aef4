"""Running what the algebra describes on tensors, at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import transform
from .algebra import ClassTensor, Emit, LogProbs
from .ops.contract import acc_dtype


class EagerEmit(Emit):
    """Runs functions as they come."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def example(self, handle: Any) -> Tensor:
        return handle


EMIT = EagerEmit()


def dense(value: ClassTensor) -> Tensor:
    """What ``value`` describes, in full: of its shape and dtype, differentiable with regard to the head's operands.

    The product is in the dtype of the logits, as eager's; everything between it and ``value`` in the accumulation
    dtype.
    """
    head = value.head
    weight = head.weight.t() if head.weight_transposed else head.weight
    last = value.class_dim == len(value.shape) - 1
    rows = value.hidden_states(EMIT)
    if not last:
        rows = rows.movedim(value.class_dim, -1)
    with torch.autocast(rows.device.type, enabled=False):
        bias = None if head.bias is None else head.bias.to(head.dtype)
        z = F.linear(rows.to(head.dtype), weight.to(head.dtype), bias)
        if value.scale != 1.0 or value.transform or isinstance(value, LogProbs):
            z = transform.apply(value.transform, z.to(acc_dtype(head.dtype)) * value.scale)
        if isinstance(value, LogProbs):
            z = z.log_softmax(-1) * value.factor
    z = z.to(value.dtype)
    return z if last else z.movedim(-1, value.class_dim)


def pull_back(value: ClassTensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of the operands of logits whose rows are still those of the projection, given the logits' own.

    Args:
        value: logits without row operations, the class axis last.
        g: the gradient of all of them, in their shape.

    Returns:
        Gradients of ``head.input``, ``head.weight`` and ``head.bias``, in their shapes and dtypes.
    """
    head = value.head
    weight = head.weight.t() if head.weight_transposed else head.weight
    with torch.autocast(g.device.type, enabled=False):
        x, w = head.input.reshape(-1, head.hidden).to(head.dtype), weight.to(head.dtype)
        g = g.reshape(-1, head.vocab)
        if value.scale != 1.0 or value.transform:
            acc = acc_dtype(head.dtype)
            g = g.to(acc) * value.scale
            if value.transform:
                bias = None if head.bias is None else head.bias.to(head.dtype)
                _, slope = transform.apply_with_slope(value.transform, F.linear(x, w, bias).to(acc) * value.scale)
                assert slope is not None
                g = g * slope
        g = g.to(head.dtype)
        g_weight = (x.t() @ g if head.weight_transposed else g.t() @ x).to(head.weight.dtype)
        g_bias = None if head.bias is None else g.sum(0).to(head.bias.dtype)
        return (g @ w).to(head.input.dtype).reshape(head.input.shape), g_weight, g_bias
