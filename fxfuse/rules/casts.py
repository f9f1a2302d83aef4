"""Conversions of dtype, and copies. The fused ops keep float32 (or float64) throughout, whatever the dtype."""

from __future__ import annotations

import torch

from ..algebra import ClassTensor, derive
from . import Call, rule


def converted(call: Call, input: ClassTensor, dtype: torch.dtype) -> torch.dtype:
    """``dtype``, if logits may be converted to it."""
    if not dtype.is_floating_point or dtype.itemsize == 1:
        call.keep("dtype", f"{call.name} converts the logits to {dtype}")
    if dtype == torch.float64 and input.head.dtype != torch.float64:
        call.keep("dtype", f"{call.name} converts {input.head.dtype} logits to float64, which asks for its precision")
    return dtype


@rule("float", "half", "bfloat16", "double", like=lambda input, memory_format=None: None)
@rule("to", "type", "type_as", like=lambda input, *_args, **_kwargs: None)
def cast(call: Call, input: ClassTensor) -> ClassTensor:
    if not isinstance(call.out, torch.Tensor) or call.out.device != call.example(input.head.input).device:
        call.keep("unknown_reader", f"{call.name} to another device")
    return derive(input, call.name, dtype=converted(call, input, call.out.dtype))


@rule("contiguous", like=lambda input, memory_format=torch.contiguous_format: None)
@rule(torch.clone, "clone", like=lambda input, *, memory_format=torch.preserve_format: None)
def copy(call: Call, input: ClassTensor) -> ClassTensor:
    return derive(input, call.name)


@rule(torch.detach, "detach")
def detach(call: Call, input: ClassTensor) -> ClassTensor:
    return derive(input, call.name, requires_grad=False)
