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


@head(torch.einsum, like=lambda equation, *operands: None)
def einsum(call: Call, equation: Any, operands: Any) -> Head | None:
    """Hidden states and a matrix that share one letter, which goes; that of the vocabulary comes last."""
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2:
        return None
    terms, arrow, result = equation.replace(" ", "").partition("->")
    first, comma, second = terms.partition(",")
    if not arrow or not comma or "." in terms or "," in second:
        return None
    for input, rows, weight, classes in ((*pair[0], *pair[1]) for pair in _orders(operands, (first, second))):
        if len(set(rows)) != len(rows) or len(classes) != 2 or call.example(weight).dim() != 2:
            continue
        shared = set(rows) & set(classes)
        if len(shared) != 1 or result[-1:] not in classes or result[-1:] in shared or result[:-1] in ("", *shared):
            continue
        (hidden,) = shared
        if rows == result[:-1] + hidden:
            return _head(call, input, weight, None, transposed=classes.index(hidden) == 0)
    return None


def _orders(operands: Any, letters: Any) -> Any:
    pairs = list(zip(operands, letters, strict=True))
    return (pairs, pairs[::-1])


def _head(call: Call, input: Any, weight: Any, bias: Any, *, transposed: bool) -> Head | None:
    vocab, hidden = call.example(weight).shape
    if transposed:
        vocab, hidden = hidden, vocab
    return Head(input, weight, bias, transposed, hidden, vocab, call.out.dtype)
