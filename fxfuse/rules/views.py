"""Operations that move, select or reshape rows and leave the class axis whole."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from ..algebra import ClassTensor, Logits, LogProbs, Probs, derive, of_classes
from ..compat import same
from ..readers import Beside, Reader, Statistics
from ..replay import HIDDEN, ClassOp, Emit, Handle, Join, RowOp
from . import Call, rule
from .log_probs import entry_of_all, entry_of_each
from .two_heads import can_be_mixed

MOST_JOINS = 64  # in each other: a description of more would be walked for too long


def _dim(call: Call, input: ClassTensor, dim: Any, extra: int = 0) -> int:
    """``dim`` counted from the front."""
    if not isinstance(dim, int):
        call.keep("unsupported_argument", f"{call.name} along a dimension that is not a number")
    return dim + len(input.shape) + extra if dim < 0 else dim


def _sizes(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sizes of ``view(2, 3)``, ``view((2, 3))`` and ``reshape(x, shape=(2, 3))`` alike."""
    return tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape


def _refuse_classes_before_others(call: Call) -> NoReturn:
    """Of a product of two matrices the others may be the classes."""
    call.keep("class_dim", f"{call.name} of a vocabulary that does not come last")


@rule(torch.reshape, like=lambda input, shape: None)
@rule("view", "reshape", like=lambda input, *shape: None)
def reshape(call: Call, input: ClassTensor, shape: tuple[Any, ...]) -> ClassTensor:
    sizes = _sizes(tuple(shape))
    out = call.out.shape
    if any(isinstance(size, torch.dtype) for size in sizes):
        call.keep("unknown_reader", f"{call.name} to another dtype")
    if not input.classes_last:
        _refuse_classes_before_others(call)
    # With its size unchanged, row-major order takes whole rows to whole rows.
    if len(out) == 0 or not same(out[-1], input.vocab):
        if len(out) > 0 and isinstance(out[-1], int) and 1 < out[-1] < input.vocab and input.vocab % out[-1] == 0:
            call.keep("vocabulary_split")
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


@rule(torch.unflatten, "unflatten")
def unflatten(call: Call, input: ClassTensor, dim: Any, sizes: Any) -> ClassTensor:
    at = _dim(call, input, dim)
    if at == input.class_dim:
        if at != len(input.shape) - 1:
            _refuse_classes_before_others(call)
        call.keep("vocabulary_split")
    op = RowOp(torch.unflatten, (at, tuple(sizes) if isinstance(sizes, (tuple, list)) else sizes), keeps_order=True)
    more = len(call.out.shape) - len(input.shape)
    return derive(input, call.name, op, shape=call.out.shape, class_dim=input.class_dim + more * (at < input.class_dim))


@rule(torch.unsqueeze, "unsqueeze")
def unsqueeze(call: Call, input: ClassTensor, dim: Any) -> ClassTensor:
    at = _dim(call, input, dim, extra=1)
    op = RowOp(torch.unsqueeze, (at,), keeps_order=True)
    return derive(input, call.name, op, shape=call.out.shape, class_dim=input.class_dim + (at <= input.class_dim))


@rule(torch.squeeze, "squeeze")
def squeeze(call: Call, input: ClassTensor, dim: Any = None) -> ClassTensor:
    if dim is None:
        ones = [i for i, size in enumerate(input.shape) if same(size, 1)]
        if len(ones) != len(input.shape) - len(call.out.shape) or input.class_dim in ones:
            call.keep("unknown_reader", "squeeze of axes that are not known")
        before = input.trail
        for axis in reversed(ones):
            op = RowOp(torch.squeeze, (axis,), keeps_order=True)
            shape = (*input.shape[:axis], *input.shape[axis + 1 :])
            input = derive(input, call.name, op, shape=shape, class_dim=input.class_dim - (axis < input.class_dim))
        return replace(input, trail=(*before, call.name))
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


@rule("expand", like=lambda input, *shape: None)
def expand(call: Call, input: ClassTensor, shape: tuple[Any, ...]) -> ClassTensor:
    sizes, out = list(_sizes(tuple(shape))), call.out.shape
    axis = len(out) - (len(input.shape) - input.class_dim)
    if not same(out[axis], input.vocab):
        call.keep("unknown_reader", "expand of the vocabulary")
    sizes[axis] = -1
    return derive(input, call.name, RowOp(torch.Tensor.expand, tuple(sizes)), shape=out, class_dim=axis)


# --- selections -------------------------------------------------------------------------------------------------


@rule(torch.select, "select")
def select(call: Call, input: ClassTensor, dim: Any, index: Any) -> ClassTensor | Reader:
    at = _dim(call, input, dim)
    if at == input.class_dim:
        return entry_of_all(call, input, index)
    if not _is_number(call, index):
        call.keep("unknown_reader", "select by a tensor")
    op = RowOp(torch.select, (at, index))
    return derive(input, call.name, op, shape=call.out.shape, class_dim=input.class_dim - (at < input.class_dim))


@rule(torch.narrow, "narrow")
def narrow(call: Call, input: ClassTensor, dim: Any, start: Any, length: Any) -> ClassTensor:
    at = _dim(call, input, dim)
    if not _is_number(call, start) or not _is_number(call, length):
        call.keep("unknown_reader", "narrow by a tensor")
    if at == input.class_dim:
        if not isinstance(start, int) or not isinstance(length, int):
            call.keep("unknown_reader", "narrow of the vocabulary by sizes that are not known")
        start = start + input.vocab if start < 0 else start
        return _taken(call, input, call.name, slice(start, start + length), shape=call.out.shape)
    return derive(input, call.name, RowOp(torch.narrow, (at, start, length)), shape=call.out.shape)


@rule(torch.roll, "roll")
def roll(call: Call, input: ClassTensor, shifts: Any, dims: Any = None) -> ClassTensor:
    if isinstance(dims, (tuple, list)) and not dims:
        call.keep("unknown_reader", "roll of all entries")
    return _along_rows(call, input, torch.roll, dims, (shifts, dims))


@rule(torch.flip, like=lambda input, dims: None)
@rule("flip", like=lambda input, *dims: None)
def flip(call: Call, input: ClassTensor, dims: Any) -> ClassTensor:
    dims = _sizes(dims if isinstance(dims, tuple) else (dims,))
    return _along_rows(call, input, torch.flip, dims, (dims,))


@rule("repeat", like=lambda input, *repeats: None)
def repeat(call: Call, input: ClassTensor, repeats: tuple[Any, ...]) -> ClassTensor:
    times, out = _sizes(tuple(repeats)), call.out.shape
    axis = len(out) - (len(input.shape) - input.class_dim)
    if type(times[axis]) is not int or times[axis] != 1:
        call.keep("unknown_reader", "repeat of the vocabulary")
    return derive(input, call.name, RowOp(torch.Tensor.repeat, times), shape=out, class_dim=axis)


@rule(torch.repeat_interleave, "repeat_interleave", like=lambda input, repeats, dim=None, *, output_size=None: None)
def repeat_interleave(call: Call, input: ClassTensor, repeats: Any, dim: Any = None) -> ClassTensor:
    if not _is_number(call, repeats):
        call.keep("unknown_reader", f"{call.name} by a tensor")
    return _along_rows(call, input, torch.repeat_interleave, dim, (repeats, dim))


@rule(torch.index_select, "index_select")
def index_select(call: Call, input: ClassTensor, dim: Any, index: Any) -> ClassTensor:
    return _along_rows(call, input, torch.index_select, dim, (dim, index))


def _along_rows(call: Call, input: ClassTensor, function: Callable[..., Any], dims: Any, args: Any) -> ClassTensor:
    """A function that moves or selects entries of axes ``dims``, of which the class axis must be none."""
    axes = [_dim(call, input, dim) for dim in (dims if isinstance(dims, (tuple, list)) else (dims,))]
    if input.class_dim in axes:
        call.keep("unknown_reader", f"{call.name} of the vocabulary")
    return derive(input, call.name, RowOp(function, args), shape=call.out.shape)


@rule(operator.getitem, "__getitem__", like=lambda input, index: None)
def getitem(call: Call, input: ClassTensor, index: Any) -> ClassTensor | Reader:
    entries = list(index) if isinstance(index, tuple) else [index]
    dims = len(input.shape)
    taken = sum(_axes(call, entry) for entry in entries)
    ellipses = [i for i, entry in enumerate(entries) if entry is Ellipsis]
    if ellipses:
        at = ellipses[0]
        entries[at : at + 1] = [slice(None)] * (dims - taken)
    else:
        entries += [slice(None)] * (dims - taken)
    axis, class_dim, place = 0, -1, 0  # of the input; of the class axis in the result; of the result
    advanced, behind = False, 0  # new axes behind that of the classes
    classes: Any = None
    for i, entry in enumerate(entries):
        if entry is None:
            place += 1
            behind += axis > input.class_dim
            continue
        if axis == input.class_dim:
            others = entries[:i] + entries[i + 1 :]
            by_list = _is_list(call, entry) and not any(_is_advanced(call, other) for other in others)
            if _is_index(call, entry) and not by_list:
                return _entries(call, input, entries)
            by_slice = isinstance(entry, slice) and _is_constant(entry)
            if not by_list and not by_slice and type(entry) is not int:
                call.keep("unknown_reader", "a selection of classes")
            classes = None if by_slice and _is_whole(entry, input.vocab) else entry
            entries[i] = entry = slice(None)
            class_dim = place
        elif isinstance(entry, slice):
            if not all(part is None or _is_number(call, part) for part in (entry.start, entry.stop, entry.step)):
                call.keep("unknown_reader", "a slice of the logits by a tensor")
        elif _is_index(call, entry) or _is_list(call, entry):
            advanced = True
        elif _is_mask(call, entry):
            advanced = True
            axis += _axes(call, entry) - 1
            if axis >= input.class_dim > axis - _axes(call, entry):
                call.keep("unknown_reader", "a mask of single entries")
        elif not _is_number(call, entry):
            call.keep("unknown_reader", "indexing of the logits by something unknown")
        place += isinstance(entry, slice)
        axis += 1
    shape = tuple(call.out.shape)
    of_one = type(classes) is int
    if advanced:
        # Where indexed axes end up depends on which they are; the class axis stays the last if it was.
        if not input.classes_last:
            call.keep("unknown_reader", "indexing of the logits by a tensor, with the vocabulary not last,")
        class_dim = len(shape) + of_one - 1 - behind
    if of_one:
        shape = (*shape[:class_dim], input.vocab, *shape[class_dim:])
    op = RowOp(operator.getitem, (tuple(entries),))
    selected = derive(input, "[…]", op, shape=shape, class_dim=class_dim)
    if classes is None:
        return selected
    # The classes are taken by the same call.
    selected = replace(selected, trail=input.trail)
    return entry_of_all(call, selected, classes) if of_one else _taken(call, selected, "[…]", classes)


def _taken(call: Call, input: ClassTensor, name: str, classes: Any, **changes: Any) -> ClassTensor:
    """Some of the classes of logits: those of a slice, a list or an index tensor."""
    if not isinstance(input, Logits):
        call.keep("unknown_reader", "a selection of classes of what is made of the logits")
    if not isinstance(classes, slice):
        count = len(classes) if isinstance(classes, list) else call.example(classes).shape[0]
        if not isinstance(count, int):
            call.keep("unknown_reader", "a selection of classes whose number is not known")
        if count == 0:
            call.keep("unknown_reader", "an empty selection of classes")
        return of_classes(input, name, ClassOp("select", (classes,), count), **changes)
    count = len(range(*classes.indices(input.vocab)))
    if count == 0 or (classes.step or 1) < 1:
        call.keep("unknown_reader", "an empty selection of classes")
    return of_classes(input, name, ClassOp("take", (classes,), count), **changes)


def _entries(call: Call, input: ClassTensor, entries: list[Any]) -> Reader:
    """One entry at each position of an index for every axis: rows first, then one class of each."""
    rows, labels = entries[:-1], entries[-1]
    if not rows or not input.classes_last or not all(_is_index(call, entry) for entry in rows):
        call.keep("unknown_reader", "indexing of some classes of every row")
    shape = tuple(call.out.shape)
    ops = [RowOp(operator.getitem, ((*rows, slice(None)),))]
    if any(tuple(call.example(row).shape) != shape for row in rows):
        if not all(isinstance(size, int) for size in shape):
            call.keep("unknown_reader", "indexing of the logits by tensors of symbolic shapes")
        ops.append(RowOp(torch.Tensor.expand, (*shape, HIDDEN)))
    selected = derive(input, "[…]", *ops, shape=(*shape, input.vocab), class_dim=len(shape))
    return entry_of_each(call, replace(selected, trail=input.trail), labels)


def _is_index(call: Call, entry: Any) -> bool:
    """Whether an entry of an index is a tensor of indices."""
    if entry is None or entry is Ellipsis or isinstance(entry, (slice, int, torch.SymInt, tuple, list)):
        return False
    like = call.example(entry)
    return isinstance(like, torch.Tensor) and like.dtype == torch.int64 and like.dim() > 0


def _is_list(call: Call, entry: Any) -> bool:
    """Whether an entry of an index is a list of some indices."""
    if isinstance(entry, list):
        return bool(entry) and all(type(one) is int for one in entry)
    return _is_index(call, entry) and call.example(entry).dim() == 1


def _is_advanced(call: Call, entry: Any) -> bool:
    """Whether an entry of an index is neither a slice nor a number nor a new axis."""
    return not (entry is None or isinstance(entry, slice) or _is_number(call, entry))


def _is_mask(call: Call, entry: Any) -> bool:
    """Whether an entry of an index is a mask."""
    like = call.example(entry)
    return isinstance(like, torch.Tensor) and like.dtype == torch.bool and like.dim() > 0


def _axes(call: Call, entry: Any) -> int:
    """How many axes an entry of an index is about."""
    if entry is None or entry is Ellipsis:
        return 0
    return call.example(entry).dim() if _is_mask(call, entry) else 1


def _is_constant(entry: slice) -> bool:
    return all(part is None or isinstance(part, int) for part in (entry.start, entry.stop, entry.step))


def _is_whole(entry: slice, size: int) -> bool:
    """Whether a slice takes all of an axis."""
    return entry.start in (None, 0) and entry.stop in (None, size) and entry.step in (None, 1)


def _is_number(call: Call, value: Any) -> bool:
    """Whether an argument is a number, also a symbolic one; a tensor could be written to later."""
    if not isinstance(value, (int, torch.SymInt)):
        value = call.example(value)
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


# --- several parts ----------------------------------------------------------------------------------------------


@rule(torch.split, "split", like=lambda input, split_size_or_sections, dim=0: None)
def split(call: Call, input: ClassTensor, split_size_or_sections: Any, dim: Any = 0) -> tuple[ClassTensor, ...]:
    return _parts(call, input, torch.split, (split_size_or_sections, dim), dim)


@rule(torch.chunk, "chunk")
def chunk(call: Call, input: ClassTensor, chunks: Any, dim: Any = 0) -> tuple[ClassTensor, ...]:
    return _parts(call, input, torch.chunk, (chunks, dim), dim)


@rule(torch.tensor_split, "tensor_split", like=lambda input, indices_or_sections, dim=0: None)
def tensor_split(call: Call, input: ClassTensor, indices_or_sections: Any, dim: Any = 0) -> tuple[ClassTensor, ...]:
    return _parts(call, input, torch.tensor_split, (indices_or_sections, dim), dim)


@rule(torch.unbind, "unbind")
def unbind(call: Call, input: ClassTensor, dim: Any = 0) -> tuple[ClassTensor, ...]:
    at = _dim(call, input, dim)
    if at == input.class_dim:
        call.keep("unknown_reader", "unbind of the vocabulary")
    if not isinstance(call.out, (tuple, list)):
        call.keep("unknown_reader")
    class_dim = input.class_dim - (at < input.class_dim)
    # Each by itself: there may be thousands.
    return tuple(
        derive(input, call.name, RowOp(torch.select, (at, i)), shape=part.shape, class_dim=class_dim)
        for i, part in enumerate(call.out)
    )


def _parts(
    call: Call, input: ClassTensor, function: Callable[..., Any], args: Any, dim: Any
) -> tuple[ClassTensor, ...]:
    if not isinstance(call.out, (tuple, list)):
        call.keep("unknown_reader")
    at = _dim(call, input, dim)
    sizes = [part.shape[at] for part in call.out]
    ends = list(itertools.accumulate(sizes, initial=0))
    one_by_one = same(ends[-1], input.shape[at])  # ``tensor_split`` at places that decrease has parts that overlap
    if at == input.class_dim:
        if not one_by_one:
            call.keep("unknown_reader", "parts of the vocabulary that overlap")
        return tuple(
            _taken(call, input, call.name, slice(start, end), shape=part.shape)
            for part, (start, end) in zip(call.out, itertools.pairwise(ends), strict=True)
        )
    if one_by_one and all(isinstance(size, int) for size in sizes):  # each by itself, as there may be thousands
        return tuple(
            derive(input, call.name, RowOp(torch.narrow, (at, start, size)), shape=part.shape)
            for part, start, size in zip(call.out, ends[:-1], sizes, strict=True)
        )
    whole = RowOp(function, args)
    return tuple(
        derive(input, call.name, whole, RowOp(operator.getitem, (i,)), shape=part.shape)
        for i, part in enumerate(call.out)
    )


@rule(torch.broadcast_tensors, like=lambda *tensors: None, tracked=("tensors",))
def broadcast_tensors(call: Call, tensors: Any) -> tuple[ClassTensor | Reader, ...]:
    """As ``Categorical.log_prob`` has it: logits, which stay as they are, and labels."""
    described = [tensor for tensor in tensors if isinstance(tensor, ClassTensor)]
    shape = call.out[0].shape
    if len(described) != 1 or not all(map(same, described[0].shape, shape)) or len(described[0].shape) != len(shape):
        call.keep("unknown_reader", "broadcast_tensors, which adds rows,")
    (input,) = described

    def expanded(tensor: Handle) -> Beside:
        def finish(emit: Emit, _: Statistics, __: Handle | None) -> Handle:
            rows = input.hidden_states(emit)
            sizes = [emit(torch.Tensor.size, rows, axis) for axis in range(len(shape))]
            sizes[input.class_dim] = input.vocab
            return emit(torch.Tensor.expand, tensor, sizes)

        return Beside(input, call.name, finish, operands=(tensor,))

    return tuple(derive(input, call.name) if tensor is input else expanded(tensor) for tensor in tensors)


@rule(torch.cat, torch.concat, torch.concatenate, tracked=("tensors",))
def cat(call: Call, tensors: Any, dim: Any = 0) -> ClassTensor:
    return _joined(call, torch.cat, tensors, dim, 0)


@rule(torch.stack, tracked=("tensors",))
def stack(call: Call, tensors: Any, dim: Any = 0) -> ClassTensor | tuple[ClassTensor, ...]:
    if dim == 0 and can_be_mixed(tensors):
        return tuple(tensors)  # which a stack along the first axis is, to those that take its parts
    return _joined(call, torch.stack, tensors, dim, 1)


def _joined(call: Call, function: Callable[..., Any], tensors: Any, dim: Any, added: int) -> ClassTensor:
    first = tensors[0]
    if type(first) not in (Logits, LogProbs, Probs) or any(type(t) is not type(first) for t in tensors):
        call.keep("unknown_reader", f"{call.name} of logits with something else")
    if any(t.row_shifts for t in tensors):  # which would have to be joined as the rows are
        call.keep("unknown_reader", f"{call.name} of logits with a number added to each row")
    for other in tensors[1:]:
        made_alike = first.logits_key() == other.logits_key() and first.factor == other.factor
        alike = made_alike and first.dtype == other.dtype and first.requires_grad == other.requires_grad
        if not alike or first.class_dim != other.class_dim or not first.head.shares_classes_with(other.head):
            call.keep("unknown_reader", f"{call.name} of logits of different kinds")
    if sum(t.joins() for t in tensors) >= MOST_JOINS:
        call.keep("unknown_reader", f"{call.name} of logits of so many others")
    at = _dim(call, first, dim, extra=added)
    if not added and at == first.class_dim:
        call.keep("unknown_reader", f"{call.name} of the vocabulary")
    class_dim = first.class_dim + (added and at <= first.class_dim)
    shape = call.out.shape
    joined = replace(first, row_ops=(Join(function, (tuple(tensors), at)),), shape=shape, class_dim=class_dim)
    return derive(joined, call.name)
