"""A kernel that writes down in which order programs visit tiles; imported where Triton may be, see test_kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from fxfuse.kernels.logits import grouped


@triton.jit
def order_kernel(out, row_blocks, columns, GROUP: tl.constexpr):
    row_block, column = grouped(tl.program_id(0), row_blocks, columns, GROUP)
    tl.store(out + 2 * tl.program_id(0), row_block)
    tl.store(out + 2 * tl.program_id(0) + 1, column)
