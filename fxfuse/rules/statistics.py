"""Functions that are row statistics as they stand."""

from __future__ import annotations

from typing import Any

import torch

from ..algebra import Emit, Handle, Logits, Reader, Statistics
from . import Call, rule


@rule(torch.logsumexp, torch.special.logsumexp, "logsumexp", reads="loss")
def logsumexp(call: Call, input: Any, dim: Any, keepdim: Any = False) -> Reader:
    axis = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not isinstance(input, Logits):
        call.keep("unknown_reader", "logsumexp of log-probabilities")
    along_classes(call, input, axis)
    source: Logits = input

    def finish(emit: Emit, stats: Statistics, index: Handle | None) -> Handle:
        # One column of the hidden states has the shape that is wanted, also where sizes are symbolic.
        column = emit(torch.narrow, source.hidden_states(emit), source.class_dim, 0, 1)
        shape = column if keepdim else emit(torch.squeeze, column, source.class_dim)
        return emit(torch.Tensor.reshape_as, stats.lse, shape)

    return Reader(source, call.name, finish)


def along_classes(call: Call, input: Any, dim: Any) -> None:
    """Refuse unless ``dim`` is the class axis."""
    dims = max(len(input.shape), 1)
    if not isinstance(dim, int) or not -dims <= dim < dims or dim % dims != input.class_dim:
        call.keep("class_dim")


@rule(torch.softmax, torch.nn.functional.softmax, "softmax", torch.argmax, "argmax", torch.topk, "topk",
      torch.max, "max", "amax", torch.amax, reads="scores", like=lambda input, *_args, **_kwargs: None)  # fmt: skip
def unsupported(call: Call, input: Any) -> Reader:
    """Readers of logits that have no rule yet: listed so that the head they read is reported."""
    call.keep("unknown_reader")
