"""Torch's library of the ops ``torch.ops.fxfuse.*``, and what all of them need to be registered in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from .. import errors
from ..compat import OpOverload, forward_ad_active, without_dynamo
from .contract import gradient_dtypes

lib = torch.library.Library("fxfuse", "DEF")

NEEDS = "bool need_input, bool need_weight, bool need_bias"

# Of ops that have a formula of autograd: the same without one.
beneath_autograd: dict[OpOverload, OpOverload] = {}


def differentiable(op: OpOverload, backward: Any, setup: Any) -> None:
    """Register a formula, as ``torch.library.register_autograd`` does.

    PyTorch asks Python whether the formula is needed, and Python asks PyTorch for what is beneath it, which takes the
    host longer than some kernels take. So there is the op without it too, for graphs in which it has been applied: it
    is not for tensors that require gradients.
    """
    name, schema = op.name().removeprefix("fxfuse::"), str(op._schema)
    # Dynamo, tracing a backward, would unpack what was saved once more than checkpoints allow.
    torch.library.register_autograd(op.name(), without_dynamo(backward), setup_context=setup, lib=lib)
    lib.define(f"{name}.beneath_autograd{schema[schema.index('(') :]}", tags=op.tags)
    beneath_autograd[op] = getattr(torch.ops.fxfuse, name).beneath_autograd
    torch.library.register_fake(beneath_autograd[op].name(), op, lib=lib)


def implement(op: OpOverload, device: str, implementation: Any) -> None:
    """What runs on this type of device, once it is known whether the op has a formula."""
    run = _guarded(op.name().removeprefix("fxfuse::"), device, implementation)
    for each in (op, beneath_autograd.get(op)):
        if each is not None:
            lib.impl(each, run, device.upper())


def _guarded(op: str, device: str, implementation: Any) -> Any:
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
    return gradients_fake(input, weight, rest[-3:], gradient_dtypes(input, weight, bias))


def if_needed(gradients: Iterable[Tensor], needs: Iterable[bool]) -> tuple[Tensor | None, ...]:
    """What autograd is given: None for what no gradient is needed of, where ops return an empty tensor."""
    return tuple(gradient if need else None for gradient, need in zip(gradients, needs, strict=True))


def refuse_second_order(op: str) -> None:
    # Grad mode is on inside a backward formula only under create_graph=True.
    if torch.is_grad_enabled():
        raise errors.no_double_backward(op)
