"""Kernels that write down how work is divided; imported where Triton may be, see test_kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from fxfuse.kernels.hopper.schedule import chunk_bounds, chunk_of
from fxfuse.kernels.logits import grouped


@triton.jit
def order_kernel(out, row_blocks, columns, GROUP: tl.constexpr):
    row_block, column = grouped(tl.program_id(0), row_blocks, columns, GROUP)
    tl.store(out + 2 * tl.program_id(0), row_block)
    tl.store(out + 2 * tl.program_id(0) + 1, column)


@triton.jit
def chunks_kernel(bounds, chunks, count, most, BLOCK: tl.constexpr):
    """``bounds`` of the chunk that is this program's, and of the row that is, its one of ``chunks``."""
    start, rows = chunk_bounds(count, tl.program_id(0), most, BLOCK)
    tl.store(bounds + 2 * tl.program_id(0), start)
    tl.store(bounds + 2 * tl.program_id(0) + 1, rows)
    tl.store(chunks + tl.program_id(0), chunk_of(tl.program_id(0), count, most, BLOCK))
