"""Making deferred logits, of the operands of a head."""

from __future__ import annotations

import functools
import math
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import compat
from .algebra import Head, Logits, quickly_replace
from .deferred import DeferredLogits, describe
from .eager import dense, pull_back
from .lazy import State
from .operands import Operands, Trained
from .origin import Origin
from .report.chain import Way
from .report.records import Site, journal
from .report.source import caller


class _Projection(torch.autograd.Function):
    """From the operands to the deferred logits; gradients that reach these flow on as through a linear."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        given: tuple[Logits, tuple[int, ...] | None, Origin, Trained],  # one argument: each takes time
    ) -> DeferredLogits:
        value, strides, origin, trained = given
        # What eager's linear keeps: either operand for the other's gradient. A transform's slope needs the logits.
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        needs_all = bool(value.transform)
        ctx.saves = needs_input or needs_weight or needs_all
        ctx.save_for_backward(
            input if needs_weight or needs_all else None,
            weight if needs_input or needs_all else None,
            bias if needs_all else None,
        )
        ctx.value = value
        ctx.trained = trained  # for what is computed of the operands directly
        ctx.set_materialize_grads(False)
        return _made(value, strides, origin, input.device)

    @staticmethod
    @compat.without_dynamo  # which would unpack what was saved once more, as checkpoints forbid
    def backward(ctx: Any, g: Tensor | None) -> tuple[Any, ...]:
        if g is None:
            return (None,) * 4
        # Asking for what was saved raises in a second backward, which there may be of a bias alone.
        input, weight, bias = ctx.saved_tensors if ctx.saves else (None, None, None)
        head = ctx.value.head.of(input=input, weight=weight, bias=bias)
        return *pull_back(replace(ctx.value, head=head), g, ctx.needs_input_grad[:3]), None


def _made(value: Logits, strides: tuple[int, ...] | None, origin: Origin, device: torch.device) -> DeferredLogits:
    return DeferredLogits(State(origin, _meta(tuple(value.shape), value.dtype, strides)), device)


@functools.lru_cache(maxsize=64)
def _meta(shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None) -> Tensor:
    """A tensor without data, to which nobody writes.

    It begins where its memory does, also where eager's is a part of more: of a tensor of a subclass that does not,
    autograd takes views of views from the wrong place of its gradient.
    """
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def defer(
    value: Logits,
    head: Head,
    site: Site,
    least: int,
    memory: int,
    strides: tuple[int, ...] | None = None,
    exposed: bool = False,
    bypassed: bool = False,
    way: Way | None = None,
) -> Tensor:
    """The logits that ``value`` describes, of a ``head`` whose operands are tensors; computed when they are read.

    Args:
        value: logits without row operations, the class axis last, of a head without operands.
        head: the same with them.
        site: of the head, for the report.
        least: logits of fewer bytes are computed at once.
        memory: the option ``fxfuse.memory``.
        strides: of what eager returns; None if it is contiguous.
        exposed: whether others have the hidden states and may write to them, so that they must be copied.
        bypassed: whether gradients went past them already.
        way: how they came to be, for the report; None where that is not known.
    """
    # Gradients as in the graph, whatever the caller's mode.
    with compat.no_torch_function_or_mode(), compat.grad_mode(value.requires_grad):
        weight = journal.deferred(site, head.weight)
        size = math.prod(value.shape) * value.dtype.itemsize
        if size < max(least, 1) or compat.transform_active() or compat.forward_ad_active():
            if size:
                journal.note("at_once", site, weight, site.where, site.where, size)
            return dense(replace(value, head=head))
        where = way.projection.where if way else site.where
        operands = Operands(
            head, exposed, where, lambda size: journal.note("copied", site, weight, where, caller(), size)
        )
        origin = Origin(site, operands, memory, weight, bypassed=bypassed, way=way)
        if value.requires_grad:
            trained = Trained(head)
            operands.trained_by(trained)
            made = compat.applied(_Projection, head.input, head.weight, head.bias, (value, strides, origin, trained))
        else:
            made = _made(value, strides, origin, head.input.device)
        describe(made, quickly_replace(value, head=operands.head, requires_grad=made.requires_grad))
        operands.are_of(size, weakref.ref(made._deferred), origin)
    return made
