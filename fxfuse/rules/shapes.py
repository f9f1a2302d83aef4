"""Functions that take of logits only their shape, dtype and device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..algebra import ClassTensor
from ..compat import same
from ..readers import Beside, Statistics
from ..replay import Emit, Handle
from . import Call, rule


def _filled(call: Call, input: ClassTensor, function: Callable[..., Any], *number: Any) -> Beside:
    if not call.out.is_contiguous() or not all(map(same, call.out.shape, input.shape)):
        call.keep("unknown_reader", f"{call.name}, which is not laid out as it would be of the logits,")

    def finish(emit: Emit, _: Statistics, __: Handle | None) -> Handle:
        column = input.column(emit, keepdim=True)
        sizes = [input.vocab if axis == input.class_dim else -1 for axis in range(len(input.shape))]
        like = emit(torch.Tensor.expand, column, sizes)
        return emit(function, like, *number, dtype=call.out.dtype, memory_format=torch.contiguous_format)

    return Beside(input, call.name, finish)


@rule(
    *(torch.zeros_like, torch.ones_like, torch.empty_like),
    derives=False,
    like=lambda input, *, dtype=None, requires_grad=False: None,
)
def tensor_like(call: Call, input: ClassTensor, dtype: Any = None) -> Beside:
    return _filled(call, input, getattr(torch, call.name))


@rule(torch.full_like, derives=False, like=lambda input, fill_value, *, dtype=None, requires_grad=False: None)
def full_like(call: Call, input: ClassTensor, fill_value: Any, dtype: Any = None) -> Beside:
    return _filled(call, input, torch.full_like, fill_value)


def _new(call: Call, input: ClassTensor, *arguments: Any, device: Any) -> Beside:
    def finish(emit: Emit, _: Statistics, __: Handle | None) -> Handle:
        return emit(
            getattr(torch.Tensor, call.name), input.column(emit), *arguments, dtype=call.out.dtype, device=device
        )

    return Beside(input, call.name, finish)


@rule(
    *("new_zeros", "new_ones", "new_empty"),
    derives=False,
    like=lambda input, *size, dtype=None, device=None, requires_grad=False: None,
)
def new_tensor(call: Call, input: ClassTensor, size: Any, dtype: Any = None, device: Any = None) -> Beside:
    return _new(call, input, *size, device=device)


@rule(
    "new_full",
    derives=False,
    like=lambda input, size, fill_value, *, dtype=None, device=None, requires_grad=False: None,
)
def new_full(
    call: Call, input: ClassTensor, size: Any, fill_value: Any, dtype: Any = None, device: Any = None
) -> Beside:
    return _new(call, input, size, fill_value, device=device)
