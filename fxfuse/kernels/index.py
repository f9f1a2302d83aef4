"""Class indices, cleaned and checked in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import errors
from . import tiles
from .launcher import launch
from .recorder import replayed

BLOCK = 1024
MESSAGE = tl.constexpr(errors.INDEX_OUT_OF_RANGE)


# Assertions are compiled under ``debug`` alone.
@triton.jit(do_not_specialize=["size", "vocab", "ignore_index"], debug=True)
def clean_kernel(
    index,  # [size] int64
    clean,  # [size] int64, out
    size,
    vocab,
    ignore_index,
    IGNORES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(index + at, mask=at < size, other=0)
    known = (label >= 0) & (label < vocab)
    if IGNORES:
        ignored = label == ignore_index
        known = known | ignored
        label = tl.where(ignored, -1, label)
    tl.device_assert(known, MESSAGE, mask=at < size)
    tl.store(clean + at, label, mask=at < size)


@replayed
def clean(index: Tensor, vocab: int, ignore_index: int | None) -> Tensor:
    """The index, contiguous int64 on a GPU, with -1 for what is ignored; the device asserts that the rest are classes.

    Triton's interpreter, which is for tests, asserts nothing.
    """
    out = torch.empty_like(index)
    numbers = (index.numel(), vocab, 0 if ignore_index is None else ignore_index)
    wide = tuple(not -(2**31) <= number < 2**31 for number in numbers)
    signature = (index.device, index.dtype, index.data_ptr() % 16 == 0, wide)
    grid = (tiles.cdiv(index.numel(), BLOCK),)
    ignores = ignore_index is not None
    launch(signature, clean_kernel, grid, index, out, *numbers, IGNORES=ignores, BLOCK=BLOCK, num_warps=4)
    return out
