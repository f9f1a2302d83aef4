"""``fxfuse::linear_topk``: the ``k`` largest or smallest logits of each row and their classes, as ``torch.topk`` does.

For ``input [N, D]``, ``weight [V, D]``, ``bias [V]``, ``scale`` and ``transform`` as in ``contract`` it returns

======================  =======  ===========================================================================
``values``              [N, k]   the logits, in order if ``sorted``; a NaN counts as larger than any number
``index``               [N, k]   int64: their classes, any of equals. Not differentiable
``lse``, ``residual``   [N]      as in ``contract``: ``values - lse - residual`` are log-probabilities
======================  =======  ===========================================================================

in the accumulation dtype. The gradients are those of ``linear_stats`` for the classes in ``index``.

On every device ATen in chunks of rows: the logits of a chunk are made in full, unrounded, for ``torch.topk``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .chunked import Head, exponentiate, row_slices
from .contract import acc_dtype
from .library import differentiable, if_needed, implement, lib, refuse_second_order

# Of logits on a GPU, which smaller chunks would not fill.
_GPU_CHUNK_BYTES = 256 << 20


def linear_topk_chunked(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float,
    k: int,
    largest: bool,
    sorted: bool,
    *,
    transform: str = "",
    memory: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    head = Head.of(input, weight, bias, scale, transform)
    rows, vocab = input.shape[0], weight.shape[0]
    values = input.new_empty((rows, k), dtype=head.acc)
    index = input.new_empty((rows, k), dtype=torch.int64)
    lse = input.new_empty((rows,), dtype=head.acc)
    residual = torch.empty_like(lse)
    nothing = index[:, :0]
    most = _GPU_CHUNK_BYTES if input.is_cuda else None
    slices = row_slices(rows, vocab * head.acc.itemsize, memory, most=most)
    buffer = input.new_empty((slices[0].stop if slices else 0, vocab), dtype=head.acc)
    for here in slices:
        z, _ = head.logits(input[here], buffer[: here.stop - here.start], want_slope=False)
        values[here], index[here] = z.topk(k, 1, largest, sorted)
        stats, _ = exponentiate(z, nothing[here], None)
        lse[here], residual[here] = stats.lse, stats.residual
    return values, index, lse, residual


# --- the op ---------------------------------------------------------------------------------------------------

lib.define(
    "linear_topk(Tensor input, Tensor weight, Tensor? bias, float scale, int k, bool largest, bool sorted, *,"
    " str transform='', int memory=0) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)

linear_topk = torch.ops.fxfuse.linear_topk.default


@torch.library.register_fake("fxfuse::linear_topk", lib=lib)
def _fake(input: Tensor, weight: Tensor, bias: Tensor | None, scale: float, k: int, *_: Any, **__: Any) -> Any:
    rows, acc = input.shape[0], acc_dtype(input.dtype)
    shapes = (((rows, k), acc), ((rows, k), torch.int64), ((rows,), acc), ((rows,), acc))
    return tuple(input.new_empty(shape, dtype=dtype) for shape, dtype in shapes)


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    input, weight, bias, ctx.scale, *_ = inputs
    ctx.options = keyword_only_inputs
    _, index, lse, residual = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(input, weight, bias, index, lse, residual)
    ctx.mark_non_differentiable(index, residual)


def _backward(ctx: Any, g_values: Tensor | None, _: None, g_lse: Tensor | None, __: None) -> tuple[Any, ...]:
    refuse_second_order("linear_topk")
    nothing = (None,) * 4
    if g_values is None and g_lse is None:
        return None, None, None, *nothing
    input, weight, bias, index, lse, residual = ctx.saved_tensors
    g_values = torch.zeros(index.shape, dtype=lse.dtype, device=lse.device) if g_values is None else g_values
    g_lse = torch.zeros_like(lse) if g_lse is None else g_lse
    needs = ctx.needs_input_grad[:3]
    grads = torch.ops.fxfuse.linear_stats_backward.default(
        input, weight, bias, index, None, ctx.scale, lse, residual, g_lse, g_values, None, *needs, **ctx.options
    )
    return *if_needed(grads, needs), *nothing


differentiable(linear_topk, _backward, _setup)
implement(linear_topk, "cpu", linear_topk_chunked)
implement(linear_topk, "cuda", linear_topk_chunked)
