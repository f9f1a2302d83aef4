"""``softmax`` and ``log_softmax``, and picking entries of logits or of these by class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from .. import ops
from ..algebra import (
    ClassTensor,
    Exponentials,
    Logits,
    LogProbs,
    Mixture,
    Probs,
    ShiftedLogProbs,
    become,
    derive,
    of_classes,
)
from ..compat import same
from ..readers import Index, Reader, Statistics
from ..replay import ClassOp, Emit, Handle, RowsAt
from . import Call, rule
from .casts import converted
from .statistics import along_classes, most, times

# The index [N, K] and what is picked are small beside [N, V] only while K is small beside V.
MOST_COLUMNS = 64


def _normalised(call: Call, kind: type[ClassTensor], input: Any, dim: Any) -> ClassTensor:
    """``softmax`` or ``log_softmax``, to which log-probabilities are as good as logits."""
    if not isinstance(input, Logits) and not (isinstance(input, LogProbs) and input.factor == 1.0):
        call.keep("unknown_reader", f"{call.name} of something other than logits")
    along_classes(call, input, dim)
    return become(kind, input, call.name, dtype=converted(call, input, call.out.dtype))


@rule(torch.log_softmax, torch.special.log_softmax, "log_softmax", reads="loss", derives=True,
      like=lambda input, dim, dtype=None: None)  # fmt: skip
@rule(F.log_softmax, like=F.log_softmax, reads="loss", derives=True)
def log_softmax(call: Call, input: Any, dim: Any = None, dtype: Any = None) -> ClassTensor:
    return _normalised(call, LogProbs, input, dim)


@rule(torch.softmax, torch.special.softmax, "softmax", reads="scores", derives=True,
      like=lambda input, dim, dtype=None: None)  # fmt: skip
@rule(F.softmax, like=F.softmax, reads="scores", derives=True)
def softmax(call: Call, input: Any, dim: Any = None, dtype: Any = None) -> ClassTensor:
    return _normalised(call, Probs, input, dim)


@rule(torch.exp, "exp")
def exp(call: Call, input: Any) -> ClassTensor:
    if isinstance(input, Mixture) and input.log:
        return derive(input, call.name, log=False)
    plain = isinstance(input, (Logits, LogProbs)) and input.factor == 1.0
    if not isinstance(input, ShiftedLogProbs) and not plain:
        call.keep("unknown_reader")
    return become(Exponentials if isinstance(input, Logits) else Probs, input, call.name)


@rule(torch.log, "log")
def log(call: Call, input: Any) -> ClassTensor:
    if isinstance(input, Mixture) and not input.log:
        return derive(input, call.name, log=True)
    if not isinstance(input, Probs) or input.factor <= 0.0:
        call.keep("unknown_reader")
    return become(LogProbs if input.factor == 1.0 else ShiftedLogProbs, input, call.name)


@rule(torch.gather, "gather", reads="loss", derives=True)
def gather(call: Call, input: Any, dim: Any, index: Any, *, sparse_grad: Any = False) -> Reader | ClassTensor:
    if sparse_grad:
        call.keep("unsupported_argument", "gather has sparse_grad=True")
    return _picked(call, input, dim, index, wraps=False)


@rule(torch.take_along_dim, "take_along_dim", reads="loss", derives=True)
def take_along_dim(call: Call, input: Any, indices: Any, dim: Any = None) -> Reader | ClassTensor:
    return _picked(call, input, dim, indices, wraps=True)


def _picked(call: Call, input: Any, dim: Any, index: Any, wraps: bool) -> Reader | ClassTensor:
    """``wraps``: the index counts on from the start where it passes the end, as ``take_along_dim`` has it."""
    like = call.example(index)
    if isinstance(dim, int) and dim % len(input.shape) != input.class_dim:
        return _rows_at(call, input, dim % len(input.shape), index, like, wraps)
    along_classes(call, input, dim)
    if like.dtype != torch.int64:
        call.keep("dtype", f"{call.name} has an index of {like.dtype}")
    axis = input.class_dim
    fits = like.dim() == len(input.shape) and all(
        same(a, b) for i, (a, b) in enumerate(zip(like.shape, input.shape, strict=True)) if i != axis
    )
    if not fits:
        call.keep("shape", f"{call.name} has an index of shape {tuple(like.shape)} into {tuple(input.shape)}")
    columns = like.shape[axis] if like.dim() else 1
    if not isinstance(columns, int) or columns > MOST_COLUMNS or columns == 0:
        call.keep(
            "unsupported_argument", f"{call.name} picks {columns} classes a row; fxfuse picks 1 to {MOST_COLUMNS}"
        )
    last = axis == max(like.dim(), 1) - 1

    def rows_first(emit: Emit) -> Handle:
        return index if last else emit(torch.movedim, index, axis, -1)

    def make(emit: Emit) -> Handle:
        flat = emit(torch.reshape, rows_first(emit), (-1, columns))
        return emit(ops.check_index, emit(torch.remainder, flat, input.vocab) if wraps else flat, input.vocab, None)

    def finish(emit: Emit, stats: Statistics, _: Handle | None) -> Handle:
        shaped = emit(torch.Tensor.reshape_as, entries(emit, stats), rows_first(emit))
        return shaped if last else emit(torch.movedim, shaped, -1, axis)

    entries = _entries(call, input)
    # How the rows lie in the index depends on the axis, so the axis is part of what the index is.
    which = Index(make, (index, "gather", axis, wraps))
    return Reader(input, call.name, finish, which, operands=(index,), entries=entries)


def _rows_at(call: Call, input: Any, dim: int, index: Any, like: Any, wraps: bool) -> ClassTensor:
    """The rows at an index along axis ``dim``, if it is one index for all classes."""
    axis = input.class_dim
    whole = like.dim() == len(input.shape) and all(
        same(a, b) for i, (a, b) in enumerate(zip(like.shape, input.shape, strict=True)) if i not in (axis, dim)
    )
    one = whole and (like.stride(axis) == 0 or (wraps and same(like.shape[axis], 1)))
    if not one or not same(call.out.shape[axis], input.vocab):
        call.keep("class_dim")
    return derive(input, call.name, RowsAt(torch.gather, (dim, index, axis, wraps)), shape=tuple(call.out.shape))


@rule(torch.topk, "topk", reads="scores")
def topk(
    call: Call, input: Any, k: Any, dim: Any = -1, largest: Any = True, sorted: Any = True
) -> tuple[Reader, Reader]:
    along_classes(call, input, dim)
    if k == 1 and largest:
        return most(call, input, dim, True)
    if not isinstance(k, int) or not 0 < k <= min(MOST_COLUMNS, input.vocab):
        call.keep("unsupported_argument", f"{call.name} has k={k}; fxfuse finds up to {MOST_COLUMNS} classes a row")
    if input.factor < 0:
        call.keep("unknown_reader", f"{call.name} of something other than logits")
    entries = _entries(call, input)

    def shaped(emit: Emit, found: Handle) -> Handle:
        """``found [N, k]`` with the rows of ``input``."""
        column = input.to_last(emit, input.column(emit, keepdim=True))
        rows = emit(torch.Tensor.expand, column, (*[-1] * (len(input.shape) - 1), k))
        return input.from_last(emit, emit(torch.Tensor.reshape_as, found, rows))

    chosen = k, bool(largest), bool(sorted)
    finish = lambda emit, stats, _: shaped(emit, entries(emit, stats))  # noqa: E731
    values = Reader(input, call.name, finish, chosen=chosen, entries=entries)
    return values, Reader(input, call.name, lambda emit, _, index: shaped(emit, index), chosen=chosen)


def entry_of_each(call: Call, input: ClassTensor, index: Handle) -> Reader:
    """The entry ``index[i]`` of row i of ``input``, whose class axis is the last; negative ones count from the end."""

    def make(emit: Emit) -> Handle:
        shape = tuple(input.shape[:-1])
        full = index if tuple(emit.example(index).shape) == shape else emit(torch.broadcast_to, index, shape)
        return emit(ops.check_index, emit(torch.reshape, full, (-1, 1)), input.vocab, None, True)

    def finish(emit: Emit, stats: Statistics, _: Handle | None) -> Handle:
        return emit(torch.Tensor.reshape_as, entries(emit, stats), input.column(emit))

    entries = _entries(call, input)
    return Reader(input, call.name, finish, Index(make, (index, "entry")), operands=(index,), entries=entries)


def entry_of_all(call: Call, input: ClassTensor, index: Any) -> Reader:
    """The entry ``index`` of every row of ``input``, without its class axis. Of logits no other is computed."""
    if type(index) is not int or not -input.vocab <= index < input.vocab:
        call.keep("unknown_reader", f"{call.name} of one class, which is no number that is known,")
    at = index % input.vocab
    entries, source = _entries(call, input), input
    if isinstance(input, Logits):
        shape = (*input.shape[: input.class_dim], 1, *input.shape[input.class_dim + 1 :])
        source = of_classes(input, call.name, ClassOp("take", (slice(at, at + 1),), 1), shape=shape)
        source, at = replace(source, trail=input.trail), 0

    def make(emit: Emit) -> Handle:
        return emit(torch.full_like, emit(torch.reshape, source.column(emit), (-1, 1)), at, dtype=torch.int64)

    def finish(emit: Emit, stats: Statistics, _: Handle | None) -> Handle:
        return emit(torch.Tensor.reshape_as, entries(emit, stats), source.column(emit))

    return Reader(source, call.name, finish, Index(make, (at, "of all")), entries=entries)


def _entries(call: Call, input: ClassTensor) -> Callable[[Emit, Statistics], Handle]:
    """How to make the picked entries of ``input`` from the statistics."""
    if isinstance(input, Logits):
        return lambda emit, stats: stats.picked
    if isinstance(input, LogProbs):
        return lambda emit, stats: times(emit, stats.log_prob, input.factor)
    if isinstance(input, Probs):
        return lambda emit, stats: times(emit, emit(torch.exp, stats.log_prob), input.factor)
    if isinstance(input, Exponentials):
        return lambda emit, stats: times(emit, emit(torch.exp, stats.picked), input.factor)
    call.keep("unknown_reader", f"{call.name} of products of logits")
