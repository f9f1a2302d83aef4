"""Scaled exponentials: E = exp(z - c) in 16 bits straight from the product, for an offset c chosen beforehand.

With float32 row sums s, taken before E is rounded, ``lse = c + log s`` and the softmax is ``E / s``; so the gradient
of the logits is ``v * E`` with a factor v per row, and the products for dX and dW need no other pass over ``[rows,
V]``. Where logits are transformed, E is stored times the derivative of that, and the sums are taken without it. The
entries of indexed classes, which are the large ones, are left out of E (0 there) and kept in float32. A row whose sum
leaves the range in which that is accurate is done anew, with its own log-sum-exp for an offset. What sums of a row's
logits give to their gradient can be added to E in the end, for all classes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..exponential import LOG2E
from ..logits import grouped
from .schedule import begin, chunk_bounds, exponent, left_and_right, log_of_sum, logits_of, product_tile
from .stats import class_sum_of

# exp2 of more than this is not stored: E must be finite, also where the row's sum tells that it is of no use.
CEILING = tl.constexpr(100.0)
# Sums between these keep E, and E times a factor of common size, in the normal range of float32 and bfloat16.
LEAST_SUM, MOST_SUM = tl.constexpr(2.0**-60), tl.constexpr(2.0**80)
LEAST_FACTOR, MOST_FACTOR = tl.constexpr(2.0**-105), tl.constexpr(2.0**60)
# What class sums add to E, in its range.
MOST_ADDED = tl.constexpr(2.0**100)
# The factor of a row with the gradient of class sums alone: no other one without a gradient of its log-sum-exp has it.
ALONE = tl.constexpr(2.0)


@triton.jit
def exponentials_of(
    z, bias, col, scale, shift, vocab, SCALED: tl.constexpr, TRANSFORM: tl.constexpr, EVEN_VOCAB: tl.constexpr
):
    """(Exponentials of products ``z [BM, W]``, 0 past the vocabulary; these times the transform's slope; logits)."""
    z, slope = logits_of(z, bias, col, scale, vocab, SCALED, TRANSFORM)
    # A NaN becomes the ceiling here, and comes back when the row is done anew.
    p = tl.exp2(tl.minimum(exponent(z, shift[:, None]), CEILING))
    if not EVEN_VOCAB:
        p = tl.where((col < vocab)[None, :], p, 0.0)
    return p, p * slope, z


@triton.jit
def _store_half(
    e, z, bias, class_weight, part_class_sum, scale, shift, vocab, tile_row, tile_col, SCALED: tl.constexpr,
    TRANSFORM: tl.constexpr, EVEN_VOCAB: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store the exponentials of half a tile, times the derivative of the transform.

    Return the sums of exponentials without it, and those of logits if they are wanted.
    """
    col = tile_col + tl.arange(0, WIDTH)
    p, weighted, z = exponentials_of(z, bias, col, scale, shift, vocab, SCALED, TRANSFORM, EVEN_VOCAB)
    e.store([tile_row, tile_col], weighted.to(e.dtype))
    s = tl.sum(p, 1)
    class_sum = s
    if part_class_sum is not None:
        class_sum = class_sum_of(z, class_weight, col, vocab, EVEN_VOCAB)
    return s, class_sum


@triton.jit(do_not_specialize=["chunk", "most", "programs"])
def exponentials_kernel(
    x,  # descriptor of [most, D]
    w,  # descriptor of [V, D], or of [D, V] if TRANSPOSED
    e,  # descriptor of [most, V], out
    bias,  # [V] or None
    offset,  # [most] float32
    length,  # [1] int32
    class_weight,  # [V] float32, or None for ones
    part_sum,  # [tiles of V, most] float32, out
    part_class_sum,  # the same for the sums of logits, or None
    scale,
    chunk,
    most,
    vocab,
    hidden,
    programs,
    SCALED: tl.constexpr,
    TRANSFORM: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EVEN_VOCAB: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    FLATTEN: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    _, rows = chunk_bounds(tl.load(length), chunk, most, ROWS)
    row_blocks, columns = tl.cdiv(rows, BM), tl.cdiv(vocab, BN)
    HALF: tl.constexpr = BN // 2
    for tile in tl.range(tl.program_id(0), row_blocks * columns, programs, flatten=FLATTEN):
        row_block, column = grouped(tile, row_blocks, columns, GROUP)
        tile_row, tile_col = row_block * BM, column * BN
        row = tile_row + tl.arange(0, BM)
        shift = tl.load(offset + row) * LOG2E
        z = product_tile(x, w, tile_row, tile_col, hidden, TRANSPOSED, BM, BN, BK)
        left, right = left_and_right(z, BM, BN)
        s, class_sum = _store_half(
            e, left, bias, class_weight, part_class_sum, scale, shift, vocab, tile_row, tile_col, SCALED, TRANSFORM,
            EVEN_VOCAB, HALF,
        )  # fmt: skip
        more_s, more_class_sum = _store_half(
            e, right, bias, class_weight, part_class_sum, scale, shift, vocab, tile_row, tile_col + HALF, SCALED,
            TRANSFORM, EVEN_VOCAB, HALF,
        )  # fmt: skip
        at = column.to(tl.int64) * most + row
        tl.store(part_sum + at, s + more_s)
        if part_class_sum is not None:
            tl.store(part_class_sum + at, class_sum + more_class_sum)


@triton.jit
def _over_tiles(parts, row, there, most, tiles, BLOCK: tl.constexpr):
    """The sums over the tiles of ``parts [tiles, most]``."""
    sums = tl.zeros((BLOCK, row.shape[0]), tl.float32)
    for first in range(0, tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        at = tile.to(tl.int64)[:, None] * most + row[None, :]
        sums += tl.load(parts + at, mask=(tile < tiles)[:, None] & there[None, :], other=0.0)
    return tl.sum(sums, 0)


@triton.jit(do_not_specialize=["chunk", "most", "tiles"])
def finish_kernel(
    part_sum,  # [tiles, most] float32
    part_class_sum,  # the same, or None
    offset,  # [most] float32
    index,  # [N] int64, or None
    order,  # [N] int32
    length,  # [1] int32
    g_lse,  # [N] float32
    g_picked,  # [N] float32
    g_class_sum,  # [N] float32, if there is ``part_class_sum``
    picked,  # [N] float32
    slope,  # [N] float32: the derivative of the transform there, or None for 1
    e,  # [most, V]: zeroed at the indexed classes
    own,  # [N] float32, out: the gradients of the indexed logits
    gathered,  # [most, D]: the chunk's hidden states, multiplied by their factors here
    factor,  # [most] float32, out
    lse,  # [N] float32, out
    log_prob,  # [N] float32, out
    class_sum,  # [N] float32, out, if there is ``part_class_sum``
    bad_order,  # [most] int32, out: the rows of N whose offset was bad, in any order
    bad_length,  # [1] int32: their number is added
    bad_row,  # [most] int32, out: the same as rows of the chunk
    bad_gathered,  # [most, D], out: their hidden states
    scale,
    chunk,
    most,
    vocab,
    hidden,
    tiles,
    e_row,
    BLOCK_TILES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """What follows from a row's sum: statistics, the factor v, and the gradients of indexed logits.

    Rows whose offset was bad are listed with factor 1: their part of E is to be overwritten with the gradient itself.
    """
    begin(PDL)
    start, rows = chunk_bounds(tl.load(length), chunk, most, ROWS)
    if tl.program_id(0) * BLOCK_ROWS >= tl.cdiv(rows, ROWS) * ROWS:
        return
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    there = row < rows
    source = tl.load(order + start + row, mask=there, other=0).to(tl.int64)
    s = _over_tiles(part_sum, row, there, most, tiles, BLOCK_TILES)
    c = tl.load(offset + row, mask=there, other=0.0)
    g = tl.load(g_lse + source, mask=there, other=0.0)
    v = g / s
    small = (tl.abs(v * scale) >= LEAST_FACTOR) & (tl.abs(v * scale) <= MOST_FACTOR)
    usable = (s >= LEAST_SUM) & (s <= MOST_SUM) & (small | (v == 0))
    if part_class_sum is not None:
        g_sum = tl.load(g_class_sum + source, mask=there, other=0.0)
        usable = usable & ((tl.abs(g_sum) <= tl.abs(v) * MOST_ADDED) | (g == 0))
        tl.store(class_sum + source, _over_tiles(part_class_sum, row, there, most, tiles, BLOCK_TILES), mask=there)
    if index is not None:
        chosen = tl.load(index + source, mask=there, other=-1)
        is_class = (chosen >= 0) & (chosen < vocab)
        log2 = tl.minimum(exponent(tl.load(picked + source, mask=is_class, other=0.0), c * LOG2E), CEILING)
        # Rounding may not make a probability of more than one.
        tl.store(log_prob + source, tl.where(is_class, tl.minimum(log2 / LOG2E - tl.log(s), 0.0), 0.0), mask=there)
        value = v * tl.exp2(log2) + tl.load(g_picked + source, mask=there, other=0.0)
        counted = is_class & usable
        if slope is not None:
            value *= tl.load(slope + source, mask=counted, other=0.0)
        tl.store(own + source, tl.where(counted, value * scale, 0.0), mask=there)
        zero = tl.zeros((BLOCK_ROWS,), e.dtype.element_ty)
        tl.store(e + row.to(tl.int64) * e_row + chosen, zero, mask=counted)
    tl.store(lse + source, c + log_of_sum(s, c), mask=there)
    v = tl.where(usable, v * scale, tl.where(there, 1.0, 0.0))
    if part_class_sum is not None:
        v = tl.where(usable & (g == 0) & (g_sum != 0), ALONE, v)
    tl.store(factor + row, v)

    bad = tl.where(usable, 0, there.to(tl.int32))
    count = tl.sum(bad, 0)
    if count > 0:  # or nothing is waited for
        slot = tl.atomic_add(bad_length, count) + tl.cumsum(bad, 0) - bad
        tl.store(bad_order + slot, source.to(tl.int32), mask=bad != 0)
        tl.store(bad_row + slot, row, mask=bad != 0)
        for first in range(0, hidden, BLOCK_HIDDEN):
            d = first + tl.arange(0, BLOCK_HIDDEN)
            mask = (bad != 0)[:, None] & (d < hidden)[None, :]
            x = tl.load(gathered + row.to(tl.int64)[:, None] * hidden + d[None, :], mask=mask, other=0.0)
            tl.store(bad_gathered + slot.to(tl.int64)[:, None] * hidden + d[None, :], x, mask=mask)
    for first in range(0, hidden, BLOCK_HIDDEN):
        d = first + tl.arange(0, BLOCK_HIDDEN)
        inside = (d < hidden)[None, :]
        at = row.to(tl.int64)[:, None] * hidden + d[None, :]
        x = tl.load(gathered + at, mask=inside, other=0.0)
        tl.store(gathered + at, (x.to(tl.float32) * v[:, None]).to(x.dtype), mask=inside)


@triton.jit(do_not_specialize=["chunk", "most"])
def add_class_sums_kernel(
    e,  # [most, V]
    factor,  # [most] float32
    g_lse,  # [N] float32
    g_class_sum,  # [N] float32
    class_weight,  # [V] float32, or None for ones
    order,  # [N] int32
    length,  # [1] int32
    scale,
    chunk,
    most,
    vocab,
    e_row,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add to a chunk's E what class sums give to the gradient of its logits, which is E times the factors after it."""
    begin(PDL)
    start, rows = chunk_bounds(tl.load(length), chunk, most, ROWS)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    if tl.program_id(1) * BLOCK_ROWS >= rows:
        return
    there = row < rows
    source = tl.load(order + start + row, mask=there, other=0)
    g = tl.load(g_class_sum + source, mask=there, other=0.0) * scale
    v = tl.load(factor + row, mask=there, other=1.0)
    alone = (tl.load(g_lse + source, mask=there, other=0.0) == 0) & (v == ALONE)
    added = tl.where(g == 0, 0.0, g / v)[:, None]
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if class_weight is not None:
        added *= tl.load(class_weight + col, mask=col < vocab, other=0.0)[None, :]
    at = e + row.to(tl.int64)[:, None] * e_row + col[None, :]
    mask = there[:, None] & (col < vocab)[None, :]
    value = tl.load(at, mask=mask & ~alone[:, None], other=0.0).to(tl.float32)
    tl.store(at, (value + added).to(e.dtype.element_ty), mask=mask)
