"""Torch's library of the ops ``torch.ops.fxfuse.*``, and what all of them need to be registered in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from .. import errors
from ..compat import forward_ad_active

lib = torch.library.Library("fxfuse", "DEF")

NEEDS = "bool need_input, bool need_weight, bool need_bias"


def guarded(op: str, device: str, implementation: Any) -> Any:
    """``implementation`` out of reach of what surrounds a call of the op.

    It computes in the dtypes that it was given, so ambient autocast must not reach the products inside it. A tangent
    of forward-mode differentiation would be dropped without a word: refuse it.
    """

    def run(*args: Any, **options: Any) -> Any:
        given = (*args, *options.values())
        if forward_ad_active() and any(isinstance(a, Tensor) and unpack_dual(a).tangent is not None for a in given):
            raise errors.no_forward_mode(op)
        if not torch.is_autocast_enabled(device):
            return implementation(*args, **options)
        with torch.autocast(device, enabled=False):
            return implementation(*args, **options)

    return run


def gradients_fake(
    input: Tensor, weight: Tensor, needs: tuple[bool, bool, bool], dtypes: tuple[torch.dtype, ...]
) -> tuple[Tensor, ...]:
    shapes = (tuple(input.shape), tuple(weight.shape), (weight.shape[0],))
    return tuple(
        input.new_empty(shape if need else (0,), dtype=dtype)
        for shape, need, dtype in zip(shapes, needs, dtypes, strict=True)
    )


def backward_fake(input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any, **_: Any) -> tuple[Tensor, ...]:
    dtypes = (input.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
    return gradients_fake(input, weight, rest[-3:], dtypes)


def refuse_second_order(op: str) -> None:
    # Grad mode is on inside a backward formula only under create_graph=True.
    if torch.is_grad_enabled():
        raise errors.no_double_backward(op)
