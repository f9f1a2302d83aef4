"""Class indices, cleaned and checked in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .launcher import launch
from .recorder import replayed

BLOCK, MOST_BLOCK = 1024, 4096


@triton.jit(do_not_specialize=["size", "vocab", "ignore_index"])
def clean_kernel(
    index,  # [size] int64
    clean,  # [size] int64, out
    valid,  # [] bool, True before unless ALONE; out: whether every index is a class or ignored
    size,
    vocab,
    ignore_index,
    IGNORES: tl.constexpr,
    ALONE: tl.constexpr,  # there is one program
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(index + at, mask=at < size, other=0)
    foreign = (label < 0) | (label >= vocab)
    if IGNORES:
        ignored = label == ignore_index
        foreign = foreign & (ignored == 0)
        label = tl.where(ignored, -1, label)
    tl.store(clean + at, label, mask=at < size)
    found = tl.sum((foreign & (at < size)).to(tl.int32), 0) > 0
    if ALONE:
        tl.store(valid, found == 0)
    else:  # whoever finds one stores the same zero
        tl.store(valid, 0, mask=found)


@replayed
def clean(index: Tensor, vocab: int, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """The index, contiguous int64, with -1 for what is ignored; and a bool ``[]``: whether the rest are classes."""
    out = torch.empty_like(index)
    alone = index.numel() <= MOST_BLOCK
    block = tiles.next_power_of_2(max(index.numel(), BLOCK)) if alone else BLOCK
    valid = (torch.empty if alone else torch.ones)((), dtype=torch.bool, device=index.device)
    numbers = (index.numel(), vocab, 0 if ignore_index is None else ignore_index)
    ignores = ignore_index is not None
    wide = tuple(not -(2**31) <= number < 2**31 for number in numbers)
    signature = (index.device, index.dtype, index.data_ptr() % 16 == 0, wide)
    grid = (tiles.cdiv(index.numel(), block),)
    launch(
        signature, clean_kernel, grid, index, out, valid, *numbers, IGNORES=ignores, ALONE=alone, BLOCK=block,
        num_warps=block // 256,
    )  # fmt: skip
    return out, valid
