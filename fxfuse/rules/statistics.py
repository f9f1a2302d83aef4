"""Functions that are row statistics as they stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..algebra import ClassTensor, Emit, Handle, Logits, Reader, Statistics
from . import Call, rule
from .casts import converted


@rule(torch.logsumexp, torch.special.logsumexp, "logsumexp", reads="loss")
def logsumexp(call: Call, input: Any, dim: Any, keepdim: Any = False) -> Reader:
    if not isinstance(input, Logits):
        call.keep("unknown_reader", "logsumexp of log-probabilities")
    along_classes(call, input, dim)
    return Reader(input, call.name, _one_a_row(input, keepdim, lambda emit, stats: stats.lse))


@rule(torch.sum, "sum", reads="scores")
def sum(call: Call, input: Any, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Reader:
    return _total(call, input, dim, keepdim, 1.0)


@rule(torch.mean, "mean", reads="scores")
def mean(call: Call, input: Any, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Reader:
    return _total(call, input, dim, keepdim, 1.0 / input.head.vocab)


def _total(call: Call, input: Any, dim: Any, keepdim: Any, share: float) -> Reader:
    """The sum over the vocabulary, times ``share``."""
    along_classes(call, input, dim)
    converted(call, input, call.out.dtype)
    vocab = float(input.head.vocab)

    def total(emit: Emit, stats: Statistics) -> Handle:
        if isinstance(input, Logits):
            return times(emit, stats.class_sum, share)
        return times(emit, emit(torch.sub, stats.class_sum, emit(torch.mul, stats.lse, vocab)), share * input.factor)

    return Reader(input, call.name, _one_a_row(input, keepdim, total), want_class_sum=True)


def times(emit: Emit, handle: Handle, factor: float) -> Handle:
    return handle if factor == 1.0 else emit(torch.mul, handle, factor)


def _one_a_row(
    source: ClassTensor, keepdim: bool, number: Callable[[Emit, Statistics], Handle]
) -> Callable[[Emit, Statistics, Handle | None], Handle]:
    """How a reader that gives one number a row finishes, in the shape that reducing the class axis leaves."""

    def finish(emit: Emit, stats: Statistics, index: Handle | None) -> Handle:
        # One column of the hidden states has the shape that is wanted, also where sizes are symbolic.
        column = emit(torch.narrow, source.hidden_states(emit), source.class_dim, 0, 1)
        shape = column if keepdim else emit(torch.squeeze, column, source.class_dim)
        return emit(torch.Tensor.reshape_as, number(emit, stats), shape)

    return finish


def along_classes(call: Call, input: Any, dim: Any) -> None:
    """Refuse unless ``dim`` is the class axis, alone."""
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    dims = max(len(input.shape), 1)
    if not isinstance(dim, int) or not -dims <= dim < dims or dim % dims != input.class_dim:
        call.keep("class_dim")


@rule(torch.softmax, torch.nn.functional.softmax, "softmax", torch.argmax, "argmax", torch.topk, "topk",
      torch.max, "max", "amax", torch.amax, reads="scores", like=lambda input, *_args, **_kwargs: None)  # fmt: skip
def unsupported(call: Call, input: Any) -> Reader:
    """Readers of logits that have no rule yet: listed so that the head they read is reported."""
    call.keep("unknown_reader")
