"""``fxfuse::scaled`` and ``fxfuse::scale_``: a gradient made beforehand, times the one that comes from above.

For ``gradient``, of any shape, and ``factor []`` of its dtype or a wider one, the product in the gradient's dtype,
rounded once: PyTorch's own on a GPU rounds the factor to the gradient's 16 bits first, and all of the gradient is off
by that. ``scale_`` writes it over the gradient, and leaves that alone where the factor is one, as it is for
``loss.backward()``: the device sees that for itself. Strides are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import gpu
from .library import implement, lib

lib.define("scaled(Tensor gradient, Tensor factor) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
lib.define("scale_(Tensor(a!) gradient, Tensor factor) -> ()", tags=(torch.Tag.pt2_compliant_tag,))

scaled = torch.ops.fxfuse.scaled.default
scale_ = torch.ops.fxfuse.scale_.default


def scaled_cpu(gradient: Tensor, factor: Tensor) -> Tensor:
    return gradient * factor


def scale_cpu_(gradient: Tensor, factor: Tensor) -> None:
    if factor != 1.0:
        gradient.mul_(factor)


def scaled_cuda(gradient: Tensor, factor: Tensor) -> Tensor:
    if not _has_kernel(gradient, factor):
        return (gradient.to(factor.dtype) * factor).to(gradient.dtype)
    from ..kernels import scale

    with gpu.current(gradient.device):
        return scale.scaled(gradient, factor)


def scale_cuda_(gradient: Tensor, factor: Tensor) -> None:
    if not _has_kernel(gradient, factor):
        gradient.copy_(gradient.to(factor.dtype) * factor)
        return
    from ..kernels import scale

    with gpu.current(gradient.device):
        scale.scale_(gradient, factor)


def _has_kernel(gradient: Tensor, factor: Tensor) -> bool:
    return gradient.is_contiguous() and factor.dtype == torch.float32 and gpu.has_kernels(gradient, gradient)


implement(scaled, "cpu", scaled_cpu)
implement(scaled, "cuda", scaled_cuda)
implement(scale_, "cpu", scale_cpu_)
implement(scale_, "cuda", scale_cuda_)


@torch.library.register_fake("fxfuse::scaled", lib=lib)
def _scaled_fake(gradient: Tensor, factor: Tensor) -> Tensor:
    return torch.empty_like(gradient)


@torch.library.register_fake("fxfuse::scale_", lib=lib)
def _scale_fake(gradient: Tensor, factor: Tensor) -> None:
    return None
