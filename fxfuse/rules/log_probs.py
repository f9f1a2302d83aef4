"""``log_softmax``, and picking entries of logits or log-probabilities by class."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .. import ops
from ..algebra import Emit, Handle, Index, Logits, LogProbs, Reader, Statistics, as_log_probs
from ..compat import same
from . import Call, rule
from .casts import converted
from .statistics import along_classes, times

# The index [N, K] and what is picked are small beside [N, V] only while K is small beside V.
MAX_COLUMNS = 64


@rule(torch.log_softmax, torch.special.log_softmax, "log_softmax", reads="loss", derives=True,
      like=lambda input, dim, dtype=None: None)  # fmt: skip
@rule(F.log_softmax, like=F.log_softmax, reads="loss", derives=True)
def log_softmax(call: Call, input: Any, dim: Any = None, dtype: Any = None) -> LogProbs:
    if not isinstance(input, Logits):
        call.keep("unknown_reader", "log_softmax of log-probabilities")
    along_classes(call, input, dim)
    return as_log_probs(input, call.name, converted(call, input, call.out.dtype))


@rule(torch.gather, "gather", reads="loss")
def gather(call: Call, input: Any, dim: Any, index: Any, *, sparse_grad: Any = False) -> Reader:
    if sparse_grad:
        call.keep("unsupported_argument", "gather has sparse_grad=True")
    return _picked(call, input, dim, index)


@rule(torch.take_along_dim, "take_along_dim", reads="loss")
def take_along_dim(call: Call, input: Any, indices: Any, dim: Any = None) -> Reader:
    return _picked(call, input, dim, indices)


def _picked(call: Call, input: Any, dim: Any, index: Any) -> Reader:
    along_classes(call, input, dim)
    like = call.example(index)
    if like.dtype != torch.int64:
        call.keep("dtype", f"{call.name} has an index of {like.dtype}")
    axis = input.class_dim
    fits = like.dim() == len(input.shape) and all(
        same(a, b) for i, (a, b) in enumerate(zip(like.shape, input.shape, strict=True)) if i != axis
    )
    if not fits:
        call.keep("shape", f"{call.name} has an index of shape {tuple(like.shape)} into {tuple(input.shape)}")
    columns = like.shape[axis] if like.dim() else 1
    if not isinstance(columns, int) or columns > MAX_COLUMNS or columns == 0:
        call.keep("unsupported_argument", f"{call.name} picks {columns} classes a row; fxfuse picks 1 to {MAX_COLUMNS}")
    last = axis == max(like.dim(), 1) - 1
    normalised = isinstance(input, LogProbs)

    def rows_first(emit: Emit) -> Handle:
        return index if last else emit(torch.movedim, index, axis, -1)

    def make(emit: Emit) -> Handle:
        flat = emit(torch.reshape, rows_first(emit), (-1, columns))
        return emit(ops.check_index, flat, input.head.vocab, None)

    def finish(emit: Emit, stats: Statistics, _: Handle | None) -> Handle:
        picked = times(emit, stats.log_prob, input.factor) if normalised else stats.picked
        shaped = emit(torch.Tensor.reshape_as, picked, rows_first(emit))
        return shaped if last else emit(torch.movedim, shaped, -1, axis)

    # How the rows lie in the index depends on the axis, so the axis is part of what the index is.
    return Reader(input, call.name, finish, Index(make, (index, "gather", axis)), operands=(index,))
