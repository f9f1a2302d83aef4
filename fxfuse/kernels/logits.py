"""What both kernels share: a tile of logits, and the order in which programs visit the tiles.

The product is made in the tile, or read where cuBLAS has stored it: in float32 cuBLAS takes less than half of the time
that Triton's products take, with and without tensor cores, and its products are eager's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .transform import transformed

# Elements to which the rows of stored products and gradients are padded: Triton moves whole vectors only along strides
# that it knows to be multiples of 16, and cuBLAS wants rows on 16 bytes.
PAD = 16


@triton.jit
def grouped(program, row_blocks, columns, GROUP: tl.constexpr):
    """(row block, column) of a program, at most ``GROUP`` row blocks at a time through all columns, to reuse L2.

    Groups differ by one row block at most: a small last one would read each column for almost nothing.
    """
    groups = tl.maximum(tl.cdiv(row_blocks, GROUP), 1)
    size = row_blocks // groups
    larger = row_blocks - groups * size  # so many groups have a row block more, and come first
    of_larger = larger * (size + 1)
    is_larger = program < of_larger * columns
    program -= tl.where(is_larger, 0, of_larger * columns)
    size = tl.maximum(size + is_larger.to(tl.int32), 1)
    first = tl.where(is_larger, 0, of_larger) + program // (size * columns) * size
    within = program % (size * columns)
    return first + within % size, within // size


@triton.jit
def logits_tile(
    x,  # [rows, D]
    w,  # [V, D]
    product,  # [rows, padded] float32: x @ w.T, or None, to make it here
    bias,  # [V] or None
    scale,
    row,  # [BLOCK_ROWS] int32, all of them rows of x
    col,  # [BLOCK_VOCAB] int32, perhaps past V
    vocab,
    padded,  # V rounded up to a multiple of PAD
    hidden,
    until,  # hidden, or 0 for a tile that nobody needs
    x_row,
    x_col,
    w_row,
    w_col,
    x_step,  # BLOCK_HIDDEN * x_col and BLOCK_HIDDEN * w_col, made on the host: they may exceed 32 bits
    w_step,
    product_row,
    TRANSFORM: tl.constexpr,
    EVEN_VOCAB: tl.constexpr,
    EVEN_HIDDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
):
    """The transform of ``scale * (x @ w.T + bias)`` at ``row`` and ``col``, float32, and its derivative there.

    At columns past V it is the transform of 0. The derivative of the identity is the number 1.
    """
    if product is not None:
        # With the padding, so that whole vectors are loaded: it holds anything.
        at = product + row.to(tl.int64)[:, None] * product_row + col[None, :]
        z = tl.load(at, mask=(col < padded)[None, :], other=0.0)
        if not EVEN_VOCAB:
            z = tl.where((col < vocab)[None, :], z, 0.0)
    else:
        d = tl.arange(0, BLOCK_HIDDEN)
        # Offsets in 64 bits: N * D and V * D pass 2**31.
        x_at = x + row.to(tl.int64)[:, None] * x_row + d.to(tl.int64)[None, :] * x_col
        w_at = w + col.to(tl.int64)[None, :] * w_row + d.to(tl.int64)[:, None] * w_col
        z = tl.zeros((BLOCK_ROWS, BLOCK_VOCAB), dtype=tl.float32)
        for start in range(0, until, BLOCK_HIDDEN):
            if EVEN_HIDDEN and EVEN_VOCAB:
                a = tl.load(x_at)
                b = tl.load(w_at)
            elif EVEN_HIDDEN:
                a = tl.load(x_at)
                b = tl.load(w_at, mask=(col < vocab)[None, :], other=0.0)
            else:
                in_hidden = d < hidden - start
                a = tl.load(x_at, mask=in_hidden[None, :], other=0.0)
                b = tl.load(w_at, mask=in_hidden[:, None] & (col < vocab)[None, :], other=0.0)
            z = tl.dot(a, b, z)
            x_at += x_step
            w_at += w_step
    if bias is not None:
        z += tl.load(bias + col, mask=col < vocab, other=0.0).to(tl.float32)[None, :]
    return transformed(z, TRANSFORM, scale)
