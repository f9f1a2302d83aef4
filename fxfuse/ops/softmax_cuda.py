"""``linear_softmax`` on a GPU: Triton for the softmax and its gradient, cuBLAS for most products.

The products are stored where the result is to be, and one pass makes the softmax of them. The statistics come from the
epilogue of our own product where that is the faster way (``hopper.suits_products``), else from a pass over cuBLAS's.
The backward takes the sums of each row, and then goes window by window as ``general`` does. float64, and GPUs without
Triton, take ``softmax``'s way. On CPU tensors the same code runs under Triton's interpreter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import tiles
from ..transform import decode, steepest
from . import gpu
from .contract import power_of_two
from .softmax import linear_softmax_backward_chunked, linear_softmax_chunked
from .windows import Gradients, multiply, windows_of


def linear_softmax(
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
    if not gpu.has_kernels(input, weight) or dtype == torch.float64:
        return linear_softmax_chunked(input, weight, bias, scale, log, dtype, transform=transform, memory=memory)
    from ..kernels.softmax import row_stats, write_softmax

    head = gpu.GpuOperands.of(
        input, weight, bias, input.new_empty((input.shape[0], 0), dtype=torch.int64), None, scale, transform
    )
    out = input.new_empty((input.shape[0], weight.shape[0]), dtype=dtype)
    if out.numel():
        with gpu.current(input.device):
            # Statistics of other logits than these, unrounded ones, could make probabilities add up to more than one.
            in_place = out.dtype in (input.dtype, torch.float32)
            product = out if in_place else torch.empty_like(out, dtype=torch.float32)
            call = head.call() if head.is_described() else None
            if call is not None and gpu.hopper().suits_products(call, product):
                lse, residual = gpu.hopper().products(call, product)
            else:
                multiply(input, weight.t(), product)
                lse, residual = row_stats(product, head.bias, head.scale, transform)
            write_softmax(out, product, head.bias, lse, residual, head.scale, transform, log)
    return out


def linear_softmax_backward(
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
    needs = (need_input, need_weight, need_bias)
    if not gpu.has_kernels(input, weight) or out.dtype == torch.float64 or not out.numel():
        return linear_softmax_backward_chunked(
            input, weight, bias, scale, log, out, g, *needs, transform=transform, memory=memory
        )
    from ..kernels.softmax import mean_and_bound, write_gradient

    (rows, vocab), out, bias = out.shape, out.contiguous(), gpu.contiguous(bias)
    # Beside the gradient, what was transformed, in float32.
    cut = windows_of(rows, vocab, input.dtype.itemsize + 4 * bool(transform), memory)
    at_rows, at_classes = cut
    with gpu.current(input.device):
        mean, bound = mean_and_bound(out, g, log)
        factor = undo = None
        if input.dtype == torch.float16:
            factor, undo = power_of_two(bound, abs(scale) * steepest(decode(transform)))
        grads = Gradients(input, weight, bias, input, needs, cut, undo)
        buffer = input.new_empty((at_rows[0].stop, tiles.padded(at_classes[0].stop)))
        products = input.new_empty(buffer.shape if transform else (0,), dtype=torch.float32)
        for here in at_rows:
            for at in at_classes:
                window = slice(0, here.stop - here.start), slice(0, at.stop - at.start)
                dz, product = buffer[window], None
                if transform:
                    product = products[window]
                    multiply(input[here], weight[at].t(), product)
                write_gradient(
                    dz, out[here], g[here], mean[here], at.start, product, None if bias is None else bias[at],
                    float(scale), transform, factor, log,
                )  # fmt: skip
                grads.add(here, at, dz)
    return grads.result()
