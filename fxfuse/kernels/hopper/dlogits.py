"""The gradient of the logits of listed rows, from logits that are made anew."""

from __future__ import annotations

import triton
import triton.language as tl

from ..exponential import LOG2E
from ..logits import grouped
from .schedule import begin, chunk_bounds, left_and_right, logits_of, product_tile


@triton.jit
def _gradient(z, lse, residual, g, g_entropy, entropy):
    """p (g - g_entropy (log p + entropy)), for log p = z - lse; the entropies may be None."""
    # z - lse is exact where it matters, and only then is the residual not lost beside it.
    log_p = (z - lse) - residual
    p = tl.exp2(log_p * LOG2E)
    g = g * p
    if g_entropy is not None:
        # In this order: the least number of a dtype may become infinite, which 0 would make NaN.
        g -= g_entropy * (p * (log_p + entropy))
    return g


@triton.jit
def gradients_of(
    z, bias, col, class_weight, lse, residual, g, g_class_sum, g_entropy, entropy, there, scale, out_scale, vocab,
    SCALED: tl.constexpr, TRANSFORM: tl.constexpr,
):  # fmt: skip
    """The gradients of the logits of products ``z [BM, W]``, 0 in rows that are not ``there``."""
    z, slope = logits_of(z, bias, col, scale, vocab, SCALED, TRANSFORM)
    if g_entropy is None:
        d = _gradient(z, lse[:, None], residual[:, None], g[:, None], None, None)
    else:
        d = _gradient(z, lse[:, None], residual[:, None], g[:, None], g_entropy[:, None], entropy[:, None])
    if g_class_sum is not None:
        if class_weight is None:
            d += g_class_sum[:, None]
        else:
            c = tl.load(class_weight + col, mask=col < vocab, other=0.0).to(tl.float32)
            d += g_class_sum[:, None] * c[None, :]
    return tl.where(there[:, None], d * slope * out_scale, 0.0)


@triton.jit
def _store_half(
    dz, z, bias, class_weight, lse, residual, g, g_class_sum, g_entropy, entropy, there, scale, out_scale, vocab,
    tile_row, tile_col, SCALED: tl.constexpr, TRANSFORM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    col = tile_col + tl.arange(0, WIDTH)
    d = gradients_of(
        z, bias, col, class_weight, lse, residual, g, g_class_sum, g_entropy, entropy, there, scale, out_scale, vocab,
        SCALED, TRANSFORM,
    )  # fmt: skip
    dz.store([tile_row, tile_col], d.to(dz.dtype))


@triton.jit(do_not_specialize=["chunk", "most", "programs"])
def dlogits_kernel(
    x,  # descriptor of [most, D]
    w,  # descriptor of [W, D], or of [D, W] if TRANSPOSED
    dz,  # descriptor of [most, W], out
    bias,  # [W] or None
    order,  # [N] int32
    length,  # [1] int32
    class_weight,  # [W] or None
    lse,  # [N] float32
    residual,  # [N] float32
    g_lse,  # [N] float32
    g_class_sum,  # [N] float32, or None
    g_entropy,  # [N] float32, or None
    entropy,  # [N] float32, or None
    normalise,  # [1] float32, or None for 1
    scale,
    chunk,
    most,
    vocab,  # W
    hidden,
    programs,
    SCALED: tl.constexpr,
    TRANSFORM: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    FLATTEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """All of the gradient but what ``picked`` receives: ``correct_kernel`` writes the entries that have some."""
    begin(PDL)
    start, rows = chunk_bounds(tl.load(length), chunk, most, ROWS)
    row_blocks, columns = tl.cdiv(rows, BM), tl.cdiv(vocab, BN)
    out_scale = scale
    if normalise is not None:
        out_scale = scale * tl.load(normalise)
    HALF: tl.constexpr = BN // 2
    for tile in tl.range(tl.program_id(0), row_blocks * columns, programs, flatten=FLATTEN):
        row_block, column = grouped(tile, row_blocks, columns, GROUP)
        tile_row, tile_col = row_block * BM, column * BN
        row = tile_row + tl.arange(0, BM)
        there = row < rows
        source = tl.load(order + start + row, mask=there, other=0)
        row_lse = tl.load(lse + source, mask=there, other=0.0)
        row_residual = tl.load(residual + source, mask=there, other=0.0)
        g = tl.load(g_lse + source, mask=there, other=0.0)
        g_sum = None
        if g_class_sum is not None:
            g_sum = tl.load(g_class_sum + source, mask=there, other=0.0)
        row_g_entropy, row_entropy = None, None
        if g_entropy is not None:
            row_g_entropy = tl.load(g_entropy + source, mask=there, other=0.0)
            row_entropy = tl.load(entropy + source, mask=there, other=0.0)
        z = product_tile(x, w, tile_row, tile_col, hidden, TRANSPOSED, BM, BN, BK)
        left, right = left_and_right(z, BM, BN)
        _store_half(
            dz, left, bias, class_weight, row_lse, row_residual, g, g_sum, row_g_entropy, row_entropy, there, scale,
            out_scale, vocab, tile_row, tile_col, SCALED, TRANSFORM, HALF,
        )  # fmt: skip
        _store_half(
            dz, right, bias, class_weight, row_lse, row_residual, g, g_sum, row_g_entropy, row_entropy, there, scale,
            out_scale, vocab, tile_row, tile_col + HALF, SCALED, TRANSFORM, HALF,
        )  # fmt: skip


@triton.jit(do_not_specialize=["chunk", "most", "indexed", "first_class"])
def correct_kernel(
    dz,  # [most, W]
    index,  # [N, K] int64
    order,  # [N] int32
    length,  # [1] int32
    class_weight,  # [W] or None
    picked,  # [N, K] float32
    slope,  # [N, K] float32: the derivative of the transform there, or None for 1
    lse,  # [N] float32
    residual,  # [N] float32
    g_lse,  # [N] float32
    g_picked,  # [N, K] float32
    g_class_sum,  # [N] float32, or None
    g_entropy,  # [N] float32, or None
    entropy,  # [N] float32, or None
    normalise,  # [1] float32, or None for 1
    scale,
    chunk,
    most,
    vocab,  # W
    indexed,
    first_class,  # the class of column 0
    dz_row,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The entries of indexed classes anew, with their own coefficients, rounded once."""
    begin(PDL)
    start, rows = chunk_bounds(tl.load(length), chunk, most, ROWS)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    source = tl.load(order + start + row, mask=there, other=0).to(tl.int64)
    row_lse = tl.load(lse + source, mask=there, other=0.0)
    row_residual = tl.load(residual + source, mask=there, other=0.0)
    g = tl.load(g_lse + source, mask=there, other=0.0)
    row_g_entropy, row_entropy = None, None
    if g_entropy is not None:
        row_g_entropy = tl.load(g_entropy + source, mask=there, other=0.0)
        row_entropy = tl.load(entropy + source, mask=there, other=0.0)
    if normalise is not None:
        scale = scale * tl.load(normalise)
    for k in range(indexed):
        at = source * indexed + k
        chosen = tl.load(index + at, mask=there, other=-1)
        col = chosen - first_class
        here = there & (col >= 0) & (col < vocab)
        z = tl.load(picked + at, mask=here, other=0.0)
        d = _gradient(z, row_lse, row_residual, g, row_g_entropy, row_entropy)
        for other in range(indexed):
            same = tl.load(index + source * indexed + other, mask=there, other=-1) == chosen
            d += tl.where(same, tl.load(g_picked + source * indexed + other, mask=there, other=0.0), 0.0)
        if g_class_sum is not None:
            g_sum = tl.load(g_class_sum + source, mask=there, other=0.0)
            if class_weight is None:
                d += g_sum
            else:
                d += g_sum * tl.load(class_weight + col, mask=here, other=0.0).to(tl.float32)
        if slope is not None:
            d *= tl.load(slope + at, mask=here, other=0.0)
        tl.store(dz + row.to(tl.int64) * dz_row + col, (d * scale).to(dz.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["most", "programs"])
def scattered_dlogits_kernel(
    x,  # descriptor of [most, D]
    w,  # descriptor of [V, D], or of [D, V] if TRANSPOSED
    dz,  # [most, V], out: some rows
    to,  # [most] int32: which
    bias,  # [V] or None
    index,  # [N] int64, or None
    order,  # [most] int32
    length,  # [1] int32
    lse,  # [N] float32
    residual,  # [N] float32
    g_lse,  # [N] float32
    g_picked,  # [N] float32
    scale,
    most,
    vocab,
    hidden,
    dz_row,
    programs,
    SCALED: tl.constexpr,
    TRANSFORM: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Those of one chunk, mostly a few or none, to rows apart from each other, but for what class sums give."""
    begin(PDL)
    _, rows = chunk_bounds(tl.load(length), 0, most, ROWS)
    row_blocks, columns = tl.cdiv(rows, BM), tl.cdiv(vocab, BN)
    for tile in range(tl.program_id(0), row_blocks * columns, programs):
        row_block, column = grouped(tile, row_blocks, columns, GROUP)
        tile_row, tile_col = row_block * BM, column * BN
        row = tile_row + tl.arange(0, BM)
        col = tile_col + tl.arange(0, BN)
        there = row < rows
        source = tl.load(order + row, mask=there, other=0).to(tl.int64)
        z = product_tile(x, w, tile_row, tile_col, hidden, TRANSPOSED, BM, BN, BK)
        z, slope = logits_of(z, bias, col, scale, vocab, SCALED, TRANSFORM)
        row_lse = tl.load(lse + source, mask=there, other=0.0)
        row_residual = tl.load(residual + source, mask=there, other=0.0)
        g = tl.load(g_lse + source, mask=there, other=0.0)
        d = _gradient(z, row_lse[:, None], row_residual[:, None], g[:, None], None, None)
        if index is not None:
            local = tl.load(index + source, mask=there, other=-1) - tile_col
            local = tl.where((local >= 0) & (local < BN), local, -1).to(tl.int32)
            own = tl.load(g_picked + source, mask=there, other=0.0)
            d += tl.where(tl.arange(0, BN)[None, :] == local[:, None], own[:, None], 0.0)
        d *= slope
        target = tl.load(to + row, mask=there, other=0).to(tl.int64)
        mask = there[:, None] & (col < vocab)[None, :]
        tl.store(dz + target[:, None] * dz_row + col[None, :], (d * scale).to(dz.dtype.element_ty), mask=mask)
