"""Which calls are projections to a vocabulary.

A product of two matrices may be one in two ways: either may be the weight. A rule then returns both, the likelier
first. Where the weight comes first or the classes do not come last, as is rare, it must look like one: other products
are not to be followed.
"""

from __future__ import annotations

import operator
import string
from typing import Any

import torch
import torch.nn.functional as F

from ..algebra import Head
from ..compat import hint, same
from . import Call, head

# How many times as large as the hidden size a vocabulary is: more than what a gated MLP projects to (28672 / 8192 =
# 3.5), less than in that model (32000 / 8192 = 3.9).
VOCABULARY_RATIO = 3.6


@head(F.linear)
def linear(call: Call, input: Any, weight: Any, bias: Any = None) -> Head | None:
    if call.example(weight).dim() != 2:
        return None
    return _head(call, input, weight, bias, transposed=False)


@head(torch.inner, "inner")
def inner(call: Call, input: Any, other: Any) -> tuple[Head, ...]:
    return _of_one_axis(call, input, other, (call.example(input).dim() - 1, call.example(other).dim() - 1))


@head(torch.tensordot, like=lambda a, b, dims=2, out=None: None)
def tensordot(call: Call, a: Any, b: Any, dims: Any = 2) -> tuple[Head, ...]:
    if dims == 1:
        return _of_one_axis(call, a, b, (call.example(a).dim() - 1, 0))
    if not (isinstance(dims, (tuple, list)) and len(dims) == 2 and all(isinstance(d, (tuple, list)) for d in dims)):
        return ()
    if len(dims[0]) != 1 or len(dims[1]) != 1:
        return ()
    return _of_one_axis(call, a, b, (dims[0][0] % call.example(a).dim(), dims[1][0] % call.example(b).dim()))


def _of_one_axis(call: Call, a: Any, b: Any, axes: tuple[int, int]) -> tuple[Head, ...]:
    """The products over one axis of each, what is left of ``a`` before what is left of ``b``."""
    dims = call.example(a).dim(), call.example(b).dim()
    found: list[Head] = []
    if 0 in dims or not same(call.example(a).shape[axes[0]], call.example(b).shape[axes[1]]):
        return ()  # an axis of size one is spread
    if dims[1] == 2 and axes[0] == dims[0] - 1:
        found.append(_head(call, a, b, None, transposed=axes[1] == 0))
    if dims[0] == 2:
        at = axes[1]
        order = None if at == 0 else (at, *(i for i in range(dims[1]) if i != at))
        head = _head(call, b, a, None, transposed=axes[0] == 0, axis=at - dims[1], order=order)
        found += [head] if _looks_like_one(head) else []
    return tuple(found)


@head(torch.matmul, operator.matmul, torch.mm, "matmul", "mm", "__matmul__")
def matmul(call: Call, input: Any, other: Any) -> tuple[Head, ...]:
    dims = call.example(input).dim(), call.example(other).dim()
    found = []
    if dims[1] == 2 and dims[0] >= 1:
        found.append(_head(call, input, other, None, transposed=True))
    if dims[0] == 2 and dims[1] >= 1:
        classes_first = _head(call, other, input, None, transposed=False, axis=-1 if dims[1] == 1 else -2)
        found += [classes_first] if _looks_like_one(classes_first) else []
    return tuple(found)


@head(torch.mv, "mv")
def mv(call: Call, input: Any, vec: Any) -> tuple[Head, ...]:
    on_cpu = call.out.device.type == "cpu"
    if on_cpu and call.example(input).dtype != call.example(vec).dtype:  # which autocast leaves as they are there
        return ()
    return matmul(call, input, vec)


@head(torch.addmm, "addmm")
def addmm(call: Call, input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Head | None:
    bias = call.example(input)
    if bias.dim() != 1 or bias.shape[0] != call.out.shape[-1]:
        return None
    unsupported = next((f"{name}={value}" for name, value in (("beta", beta), ("alpha", alpha)) if value != 1), "")
    return _head(call, mat1, mat2, input, transposed=True, unsupported=unsupported)


@head(torch.einsum, like=lambda equation, *operands: None)
def einsum(call: Call, equation: Any, operands: Any) -> tuple[Head, ...]:
    """Hidden states and a matrix that share one letter, which goes; that of the vocabulary comes in its place."""
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2:
        return ()
    spelled = _spelled_out(equation, [call.example(operand).dim() for operand in operands])
    if spelled is None:
        return ()
    first, second, result = spelled
    found: list[Head] = []
    for input, rows, weight, classes in ((*pair[0], *pair[1]) for pair in _orders(operands, (first, second))):
        shared = set(rows) & set(classes)
        if len(set(rows)) != len(rows) or len(classes) != 2 or len(shared) != 1 or call.example(weight).dim() != 2:
            continue
        (hidden,) = shared
        vocab = classes.replace(hidden, "")
        placed = rows.replace(hidden, vocab)
        spread = not same(
            call.example(input).shape[rows.index(hidden)], call.example(weight).shape[classes.index(hidden)]
        )
        if sorted(placed) != sorted(result) or spread:  # an axis of size one
            continue
        order = tuple(map(placed.index, result))
        axis = rows.index(hidden) - len(rows)
        layout = {"axis": axis, "order": None if placed == result else order}
        head = _head(call, input, weight, None, transposed=classes.index(hidden) == 0, **layout)
        if result[-1] == vocab:
            found.insert(0, head)
        elif _looks_like_one(head):
            found.append(head)
    return tuple(found)


def _spelled_out(equation: str, dims: list[int]) -> tuple[str, str, str] | None:
    """The letters of two operands of so many dimensions and of the result, as ``torch.einsum`` reads an equation."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    operands = terms.split(",")
    if len(operands) != 2:
        return None
    unused = [letter for letter in string.ascii_letters if letter not in equation]
    rest = max(dim - len(term.replace("...", "")) for term, dim in zip(operands, dims, strict=True))
    rest = rest if "..." in terms else 0
    if rest < 0:
        return None
    ellipsis = "".join(unused[len(unused) - rest :])
    if not arrow:
        letters = terms.replace("...", "").replace(",", "")
        result = "..." * ("..." in terms) + "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    spelled = []
    for term, dim in zip(operands, dims, strict=True):
        here = dim - len(term.replace("...", ""))
        spelled.append(term.replace("...", ellipsis[rest - here :] if here > 0 else ""))
    first, second = spelled
    result = result.replace("...", ellipsis)
    if "." in first + second + result or len(set(result)) != len(result):
        return None
    return first, second, result


def _looks_like_one(head: Head) -> bool:
    return hint(head.vocab) >= VOCABULARY_RATIO * hint(head.hidden)


def _orders(operands: Any, letters: Any) -> Any:
    pairs = list(zip(operands, letters, strict=True))
    return (pairs, pairs[::-1])


def _head(call: Call, input: Any, weight: Any, bias: Any, *, transposed: bool, **layout: Any) -> Head:
    vocab, hidden = call.example(weight).shape
    if transposed:
        vocab, hidden = hidden, vocab
    return Head(input, weight, bias, transposed, hidden, vocab, call.out.dtype, **layout)
