"""Which calls are projections to a vocabulary."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F

from ..algebra import Head
from . import Call, head


@head(F.linear)
def linear(call: Call, input: Any, weight: Any, bias: Any = None) -> Head | None:
    if call.example(weight).dim() != 2:
        return None
    return _head(call, input, weight, bias, transposed=False)


@head(torch.matmul, operator.matmul, torch.mm, "matmul", "mm", "__matmul__")
def matmul(call: Call, input: Any, other: Any) -> Head | None:
    if call.example(other).dim() != 2 or call.example(input).dim() < 1:
        return None
    return _head(call, input, other, None, transposed=True)


@head(torch.addmm, "addmm")
def addmm(call: Call, input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Head | None:
    bias = call.example(input)
    if beta != 1 or alpha != 1 or bias.dim() != 1 or bias.shape[0] != call.out.shape[-1]:
        return None
    return _head(call, mat1, mat2, input, transposed=True)


def _head(call: Call, input: Any, weight: Any, bias: Any, *, transposed: bool) -> Head | None:
    vocab, hidden = call.example(weight).shape
    if transposed:
        vocab, hidden = hidden, vocab
    return Head(input, weight, bias, transposed, hidden, vocab, call.out.dtype)
