"""Operations that move, select or reshape rows and leave the class axis whole."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from ..algebra import HIDDEN, ClassTensor, RowOp, derive
from ..compat import same
from . import Call, rule


def _dim(call: Call, input: ClassTensor, dim: Any, extra: int = 0) -> int:
    """``dim`` counted from the front."""
    if not isinstance(dim, int):
        call.keep("unsupported_argument", f"{call.name} along a dimension that is not a number")
    return dim + len(input.shape) + extra if dim < 0 else dim


def _sizes(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sizes of ``view(2, 3)``, ``view((2, 3))`` and ``reshape(x, shape=(2, 3))`` alike."""
    return tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape


@rule(torch.reshape, like=lambda input, shape: None)
@rule("view", "reshape", like=lambda input, *shape: None)
def reshape(call: Call, input: ClassTensor, shape: tuple[Any, ...]) -> ClassTensor:
    sizes = _sizes(tuple(shape))
    out = call.out.shape
    if any(isinstance(size, torch.dtype) for size in sizes):
        call.keep("unknown_reader", f"{call.name} to another dtype")
    # With the class axis last and its size unchanged, row-major order takes whole rows to whole rows.
    if input.class_dim != len(input.shape) - 1 or len(out) == 0 or not same(out[-1], input.head.vocab):
        call.keep("unknown_reader", f"{call.name}, which splits or merges the vocabulary,")
    op = RowOp(torch.reshape, ((*sizes[:-1], HIDDEN),), keeps_order=True)
    return derive(input, call.name, op, shape=out, class_dim=len(out) - 1)


@rule(torch.flatten, "flatten")
def flatten(call: Call, input: ClassTensor, start_dim: Any = 0, end_dim: Any = -1) -> ClassTensor:
    start, end = _dim(call, input, start_dim), _dim(call, input, end_dim)
    if start <= input.class_dim <= end and start != end:
        call.keep("unknown_reader", "flatten, which merges the vocabulary,")
    # Merging neighbouring row axes keeps the order of the rows, wherever the class axis is.
    op = RowOp(torch.flatten, (start, end), keeps_order=True)
    merged = end - start if end < input.class_dim else 0
    return derive(input, call.name, op, shape=call.out.shape, class_dim=input.class_dim - merged)


@rule(torch.unsqueeze, "unsqueeze")
def unsqueeze(call: Call, input: ClassTensor, dim: Any) -> ClassTensor:
    at = _dim(call, input, dim, extra=1)
    op = RowOp(torch.unsqueeze, (at,), keeps_order=True)
    return derive(input, call.name, op, shape=call.out.shape, class_dim=input.class_dim + (at <= input.class_dim))


@rule(torch.squeeze, "squeeze")
def squeeze(call: Call, input: ClassTensor, dim: Any) -> ClassTensor:
    at = _dim(call, input, dim)
    if at == input.class_dim:
        call.keep("unknown_reader", "squeeze of the vocabulary")
    op = RowOp(torch.squeeze, (at,), keeps_order=True)
    dropped = at < input.class_dim and len(call.out.shape) < len(input.shape)
    return derive(input, call.name, op, shape=call.out.shape, class_dim=input.class_dim - dropped)


def _permuted(call: Call, input: ClassTensor, order: Sequence[int]) -> ClassTensor:
    """``input`` with axis ``order[i]`` moved to place ``i``."""
    rows_before = [axis for axis in range(len(input.shape)) if axis != input.class_dim]
    rows_after = [axis for axis in order if axis != input.class_dim]
    op = RowOp(torch.permute, (tuple(order),), keeps_order=rows_before == rows_after)
    return derive(input, call.name, op, shape=call.out.shape, class_dim=list(order).index(input.class_dim))


@rule(torch.permute, like=lambda input, dims: None)
@rule("permute", like=lambda input, *dims: None)
def permute(call: Call, input: ClassTensor, dims: tuple[Any, ...]) -> ClassTensor:
    return _permuted(call, input, [_dim(call, input, dim) for dim in _sizes(tuple(dims))])


@rule(torch.transpose, torch.swapaxes, torch.swapdims, "transpose", "swapaxes", "swapdims",
      like=lambda input, dim0, dim1: None)  # fmt: skip
def transpose(call: Call, input: ClassTensor, dim0: Any, dim1: Any) -> ClassTensor:
    order = list(range(len(input.shape)))
    a, b = _dim(call, input, dim0), _dim(call, input, dim1)
    order[a], order[b] = order[b], order[a]
    return _permuted(call, input, order)


@rule(torch.movedim, torch.moveaxis, "movedim", "moveaxis", like=lambda input, source, destination: None)
def movedim(call: Call, input: ClassTensor, source: Any, destination: Any) -> ClassTensor:
    a, b = _dim(call, input, source), _dim(call, input, destination)
    order = [axis for axis in range(len(input.shape)) if axis != a]
    order.insert(b, a)
    return _permuted(call, input, order)


@rule(torch.t, "t")
def t(call: Call, input: ClassTensor) -> ClassTensor:
    return _permuted(call, input, list(reversed(range(len(input.shape)))))


@rule(getattr)
def attribute(call: Call, input: ClassTensor, name: str) -> ClassTensor:
    order = list(range(len(input.shape)))
    if name == "mT":
        order[-2:] = order[:-3:-1]
    elif name == "T":
        order.reverse()
    else:
        call.keep("unknown_reader", f".{name}")
    return _permuted(call, input, order)


@rule(torch.select, "select")
def select(call: Call, input: ClassTensor, dim: Any, index: Any) -> ClassTensor:
    at = _dim(call, input, dim)
    if at == input.class_dim:
        call.keep("unknown_reader", "select of one class")
    if not _is_number(call, index):
        call.keep("unknown_reader", "select by a tensor")
    op = RowOp(torch.select, (at, index))
    return derive(input, call.name, op, shape=call.out.shape, class_dim=input.class_dim - (at < input.class_dim))


@rule(torch.narrow, "narrow")
def narrow(call: Call, input: ClassTensor, dim: Any, start: Any, length: Any) -> ClassTensor:
    at = _dim(call, input, dim)
    if at == input.class_dim:
        call.keep("unknown_reader", "narrow of the vocabulary")
    if not _is_number(call, start) or not _is_number(call, length):
        call.keep("unknown_reader", "narrow by a tensor")
    return derive(input, call.name, RowOp(torch.narrow, (at, start, length)), shape=call.out.shape)


@rule(operator.getitem, "__getitem__", like=lambda input, index: None)
def getitem(call: Call, input: ClassTensor, index: Any) -> ClassTensor:
    entries = list(index) if isinstance(index, tuple) else [index]
    dims = len(input.shape)
    taken = sum(entry is not None and entry is not Ellipsis for entry in entries)
    ellipses = [i for i, entry in enumerate(entries) if entry is Ellipsis]
    if ellipses:
        at = ellipses[0]
        entries[at : at + 1] = [slice(None)] * (dims - taken)
    else:
        entries += [slice(None)] * (dims - taken)
    axis, class_dim, place = 0, -1, 0  # of the input; of the class axis in the result; of the result
    for i, entry in enumerate(entries):
        if entry is None:
            place += 1
            continue
        if axis == input.class_dim:
            if not _is_whole(entry, input.head.vocab):
                call.keep("unknown_reader", "a selection of classes")
            entries[i], class_dim = slice(None), place
        elif isinstance(entry, slice):
            if not all(part is None or _is_number(call, part) for part in (entry.start, entry.stop, entry.step)):
                call.keep("unknown_reader", "a slice of the logits by a tensor")
        elif not _is_number(call, entry):
            call.keep("unknown_reader", "indexing of the logits by a tensor or a mask")
        place += isinstance(entry, slice)
        axis += 1
    op = RowOp(operator.getitem, (tuple(entries),))
    return derive(input, "[…]", op, shape=call.out.shape, class_dim=class_dim)


def _is_whole(entry: Any, size: int) -> bool:
    """Whether an index entry takes all of an axis."""
    return (
        isinstance(entry, slice) and entry.start in (None, 0) and entry.stop in (None, size) and entry.step in (None, 1)
    )


def _is_number(call: Call, value: Any) -> bool:
    """Whether an argument is a number, also a symbolic one; a tensor could be written to later."""
    if not isinstance(value, (int, torch.SymInt)):
        value = call.example(value)
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
