"""A tensor times a number that is on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .launcher import launch
from .recorder import replayed

BLOCK = 4096
PROGRAMS = 8  # a processor


@triton.jit(do_not_specialize=["size", "programs"])
def scale_kernel(
    values,  # [size]
    factor,  # [] float32
    out,  # [size], which may be values
    size,  # 1 or more
    programs,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    by = tl.load(factor)
    if IN_PLACE and by == 1.0:
        return
    blocks = (size - 1) // BLOCK + 1  # as ``cdiv``, whose sum may be past the largest of 32 bits
    for block in range(tl.program_id(0), blocks, programs):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(values + at, mask=at < size).to(tl.float32)
        tl.store(out + at, (value * by).to(out.dtype.element_ty), mask=at < size)


def scaled(values: Tensor, factor: Tensor) -> Tensor:
    """Contiguous ``values`` times ``factor [] float32``, multiplied in float32 and rounded once."""
    out = torch.empty_like(values)
    _scale(values, factor, out)
    return out


def scale_(values: Tensor, factor: Tensor) -> None:
    """The same where the values are, which are not touched if the factor is one."""
    _scale(values, factor, None)


@replayed
def _scale(values: Tensor, factor: Tensor, out: Tensor | None) -> None:
    size, count = values.numel(), tiles.cdiv(values.numel(), BLOCK)
    if not size:
        return
    programs = min(count, PROGRAMS * tiles.machine(values.device).processors)
    in_place = out is None
    out = values if out is None else out
    aligned = tuple(tensor.data_ptr() % 16 == 0 for tensor in (values, factor, out))
    signature = (values.device, values.dtype, aligned, size < 2**31)
    launch(signature, scale_kernel, (programs,), values, factor, out, size, programs, IN_PLACE=in_place, BLOCK=BLOCK)
