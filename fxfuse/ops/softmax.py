"""``fxfuse::linear_softmax``: the softmax of the logits or its logarithm, in full, for programs that need all of it.

For ``input [N, D]``, ``weight [V, D]``, ``bias [V]``, ``scale`` and ``transform`` as in ``contract``, with the logits
``z [N, V]``, it returns ``out [N, V]`` in ``dtype``:

    out_ij = exp(z_ij) / sum_k exp(z_ik)      or, with ``log``, the logarithm of that

A row with a maximum that is not finite is NaN throughout, as eager's is. Beside ``out`` itself nothing of the size of
the logits exists. It is all that the backward needs: for the upstream gradient ``g [N, V]`` and the softmax p,

    dz_ij = p_ij (g_ij - sum_k p_ik g_ik)      or      g_ij - p_ij sum_k g_ik

(the derivative of p_i by z_j is p_i ([i = j] - p_j)), times ``scale`` and the slope of the transform, for which alone
the logits are computed anew. Both sums are divided by sum_k p_ik, which rounding of ``out`` keeps from being one: else
a constant in ``g`` would not cancel. All of this is in float32, or in float64 if operands or ``dtype`` are. ``memory``
bounds the buffers in bytes; 0 leaves them to the implementation.

Here are the op's schema and what a CPU runs: ATen in chunks of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .chunked import Gradients, Head, row_slices
from .library import NEEDS, backward_fake, differentiable, if_needed, implement, lib, refuse_second_order

_OPERANDS = "Tensor input, Tensor weight, Tensor? bias, float scale, bool log"
# Of the size of a chunk of logits, while it is worked on.
FORWARD_BUFFERS, BACKWARD_BUFFERS = 2, 4


def linear_softmax_chunked(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float,
    log: bool,
    dtype: torch.dtype,
    *,
    transform: str = "",
    memory: int = 0,
) -> Tensor:
    head = Head.of(input, weight, bias, scale, transform)
    acc = torch.promote_types(head.acc, dtype)
    rows, vocab = input.shape[0], weight.shape[0]
    out = input.new_empty((rows, vocab), dtype=dtype)
    slices = row_slices(rows, vocab * acc.itemsize, memory, FORWARD_BUFFERS)
    buffer = input.new_empty((slices[0].stop if slices else 0, vocab), dtype=head.acc)
    for here in slices:
        z, _ = head.logits(input[here].to(head.acc), buffer[: here.stop - here.start], want_slope=False)
        out[here] = z.log_softmax(1, dtype=acc) if log else z.softmax(1, dtype=acc)
    return out


def linear_softmax_backward_chunked(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float,
    log: bool,
    out: Tensor,
    g: Tensor,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
    *,
    transform: str = "",
    memory: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    head = Head.of(input, weight, bias, scale, transform)
    acc = torch.promote_types(head.acc, out.dtype)
    rows, vocab = out.shape
    grads = Gradients(rows, head, need_input, need_weight, need_bias)
    slices = row_slices(rows, vocab * acc.itemsize, memory, BACKWARD_BUFFERS)
    buffer = input.new_empty((slices[0].stop if slices else 0, vocab), dtype=head.acc)
    for here in slices:
        part, g_here = input[here].to(head.acc), g[here].to(acc)
        p = out[here].to(acc)
        p = p.exp() if log else p
        # In float64: what a mean is off by, all classes have, so that d_input does not average it out.
        total, mean = (t.sum(1, keepdim=True, dtype=torch.float64) for t in (p, g_here if log else p * g_here))
        mean = (mean / total).to(acc)
        dz = g_here - p * mean if log else p * (g_here - mean)
        dz = dz.to(head.acc)
        if transform:
            _, slope = head.logits(part, buffer[: here.stop - here.start], want_slope=True)
            assert slope is not None
            dz.mul_(slope)
        grads.add(here, part, dz.mul_(scale))
    return grads.like(input, weight, bias)


# --- the op ---------------------------------------------------------------------------------------------------

for _schema in (
    f"linear_softmax({_OPERANDS}, ScalarType dtype, *, str transform='', int memory=0) -> Tensor",
    f"linear_softmax_backward({_OPERANDS}, Tensor out, Tensor g, {NEEDS}, *, str transform='', int memory=0)"
    " -> (Tensor, Tensor, Tensor)",
):
    lib.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

linear_softmax = torch.ops.fxfuse.linear_softmax.default
linear_softmax_backward = torch.ops.fxfuse.linear_softmax_backward.default


@torch.library.register_fake("fxfuse::linear_softmax", lib=lib)
def _fake(
    input: Tensor, weight: Tensor, bias: Tensor | None, scale: float, log: bool, dtype: torch.dtype, **_: Any
) -> Tensor:
    return input.new_empty((input.shape[0], weight.shape[0]), dtype=dtype)


torch.library.register_fake("fxfuse::linear_softmax_backward", backward_fake, lib=lib)


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    input, weight, bias, ctx.scale, ctx.log, _ = inputs
    ctx.options = keyword_only_inputs
    ctx.save_for_backward(input, weight, bias, output)


def _backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    refuse_second_order("linear_softmax")
    input, weight, bias, out = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    grads = linear_softmax_backward(input, weight, bias, ctx.scale, ctx.log, out, g, *needs, **ctx.options)
    return *if_needed(grads, needs), None, None, None


differentiable(linear_softmax, _backward, _setup)
implement(linear_softmax, "cpu", linear_softmax_chunked)
implement(linear_softmax_backward, "cpu", linear_softmax_backward_chunked)
