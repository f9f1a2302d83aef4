"""Products of the gradient of a chunk's logits with the weight and with the hidden states, added up in 24 bits or more.

A gradient in 16 bits is added up without a second matrix in 32: the upper 16 bits of each float32 sum stand in the
gradient's own memory and the next 8 beside it (``lower_at``), until the last addition rounds to the gradient's dtype.
Sums so kept have a unit roundoff of 2**-16, against 2**-8 of bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import tiles
from ..logits import grouped
from .schedule import begin, chunk_bounds, last_chunk, left_and_right

# Of a tile of d_input that is cut: the most parts, and the least steps of one, which warpgroups that share tiles need.
MOST_PIECES, LEAST_STEPS = tl.constexpr(tiles.MOST_PIECES), tl.constexpr(3)


@triton.jit
def _unless(flag, mask):
    return tl.where(flag != 0, mask ^ mask, mask)


@triton.jit
def joined(upper, lower):
    """The sums whose upper 16 bits are ``upper`` (of any type) and whose next 8 are ``lower``."""
    bits = (upper.to(tl.int16, bitcast=True).to(tl.int32) << 16) | ((lower.to(tl.int32) & 0xFF) << 8)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def cut(value, last, DTYPE: tl.constexpr):
    """The upper 16 and the next 8 bits of sums; if ``last``, the sums rounded to a DTYPE of 16 bits, and anything."""
    bits = value.to(tl.int32, bitcast=True)
    # Rounded to 24 bits; infinities and NaNs have no bits to round.
    bits = tl.where(tl.abs(value) < float("inf"), bits + 0x80, bits)
    rounded = value.to(DTYPE).to(tl.int16, bitcast=True)
    upper = tl.where(last != 0, rounded, (bits >> 16).to(tl.int16))
    return upper.to(DTYPE, bitcast=True), (bits >> 8).to(tl.int8)


@triton.jit
def lower_at(row, col, hidden, IN_PIECES: tl.constexpr):
    """Where the next bits of a gradient's sums are.

    In rows like the gradient itself. Or IN_PIECES of 64x64, one row of pieces after the other, and in a piece as the
    threads of a warpgroup have the elements of a product: in either half of a warp's 16 rows, a thread's eight pairs of
    columns side by side.
    """
    if not IN_PIECES:
        return row * hidden + col
    piece = (row // 64) * ((hidden + 63) // 64) + col // 64
    row_within, col_within = row % 64, col % 64
    row_in_order = row_within // 8 % 2 * 32 + row_within // 16 * 8 + row_within % 8
    col_in_order = col_within % 8 // 2 * 16 + col_within // 8 * 2 + col_within % 2
    return piece * (64 * 64) + row_in_order * 64 + col_in_order


@triton.jit
def accumulate(out, low, at, mask, value, first, last):
    """Add ``value`` to the sums at ``out + at``, which begin with it if ``first`` and are rounded if ``last``.

    The sums are returned as they are before rounding.
    """
    # Predicates, not branches: those would keep the compiler from overlapping this with the next tile.
    again = _unless(first, mask)
    if low is None:
        value += tl.load(out + at, mask=again, other=0.0).to(tl.float32)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)
    else:
        value += joined(tl.load(out + at, mask=again, other=0.0), tl.load(low + at, mask=again, other=0))
        upper, lower = cut(value, last, out.dtype.element_ty)
        tl.store(out + at, upper, mask=mask)
        tl.store(low + at, lower, mask=_unless(last, mask))
    return value


@triton.jit
def finish_rows(
    value, out, low, factor, normalise, g_class_sum, class_row, own, index, weight, order, start, rows, row, col,
    hidden, w_row, w_col, out_row, first, last,
):  # fmt: skip
    """Scale a tile of d_input, add what class sums and indexed classes give, and put it where its rows came from."""
    there = row < rows
    source = tl.load(order + start + row, mask=there, other=0).to(tl.int64)
    if factor is not None:
        value = value * tl.load(factor + row, mask=there, other=0.0)[:, None]
    if normalise is not None:
        value = value * tl.load(normalise)
    if g_class_sum is not None:
        g = tl.load(g_class_sum + source, mask=there, other=0.0)
        value += g[:, None] * tl.load(class_row + col, mask=col < hidden, other=0.0)[None, :]
    if own is not None:
        g = tl.load(own + source, mask=there, other=0.0)
        label = tl.where(g != 0, tl.load(index + source, mask=there, other=0), 0)
        from_class = weight + label[:, None] * w_row + col.to(tl.int64)[None, :] * w_col
        inside = (g != 0)[:, None] & (col < hidden)[None, :]
        value += g[:, None] * tl.load(from_class, mask=inside, other=0.0).to(tl.float32)
    at = source[:, None] * out_row + col[None, :]
    accumulate(out, low, at, there[:, None] & (col < hidden)[None, :], value, first, last)


@triton.jit
def shares(rows, hidden, vocab, programs, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """How the tiles of d_input are shared out: in full waves, and the rest each cut along the vocabulary.

    All tiles of the rest are cut alike, so that programs read the same part of the vocabulary at the same time.
    Returns (row blocks, columns, whole tiles a program, tiles of the rest, parts of each, steps a part).
    """
    row_blocks, columns = tl.cdiv(rows, BM), tl.cdiv(hidden, BN)
    tiles = row_blocks * columns
    whole = tiles // programs
    rest = tiles - whole * programs
    steps = tl.cdiv(vocab, BK)
    # More pieces would be read for longer than they are made faster.
    pieces = tl.minimum(tl.minimum(programs // tl.maximum(rest, 1), MOST_PIECES), steps)
    each = tl.maximum(tl.cdiv(steps, pieces), LEAST_STEPS)
    return row_blocks, columns, whole, rest, tl.cdiv(steps, each), each


@triton.jit(do_not_specialize=["chunk", "most", "programs", "first", "last"])
def d_input_kernel(
    dz,  # descriptor of [most, W] in blocks [BM, BK]
    w,  # descriptor of [W, D] in blocks [BK, BN], or of [D, W] in [BN, BK] if TRANSPOSED
    out,  # [N, D], out
    low,  # [N, D] int8, or None
    parts,  # [programs, BM, BN] float32, out: of the tiles that are cut up
    factor,  # [most] float32 or None
    normalise,  # [1] float32 or None
    g_class_sum,  # [N] float32 or None
    class_row,  # [D] float32 or None
    own,  # [N] float32: gradients of indexed logits that dz leaves out, or None
    index,  # [N] int64, if there is ``own``
    weight,  # [V, D]
    order,
    length,
    chunk,
    most,
    vocab,
    hidden,
    w_row,
    w_col,
    out_row,
    programs,
    first,
    last,
    TRANSPOSED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    start, rows = chunk_bounds(tl.load(length), chunk, most, ROWS)
    row_blocks, columns, whole, rest, pieces, each = shares(rows, hidden, vocab, programs, BM, BN, BK)
    steps = tl.cdiv(vocab, BK)
    program = tl.program_id(0)
    HALF: tl.constexpr = BN // 2
    for item in range(whole + 1):
        is_whole = item < whole
        piece = program // tl.maximum(rest, 1)
        tile = tl.where(is_whole, program, program - piece * rest) + item * programs
        k_first = tl.where(is_whole, 0, piece * each)
        k_last = tl.where(is_whole, steps, tl.minimum(k_first + each, steps))
        if is_whole | (piece < tl.where(rest > 0, pieces, 0)):
            row_block, column = grouped(tile, row_blocks, columns, GROUP)
            tile_row, tile_col = row_block * BM, column * BN
            acc = tl.zeros((BM, BN), tl.float32)
            for k in range(k_first, k_last):
                a = dz.load([tile_row, k * BK])
                b = w.load([tile_col, k * BK]).T if TRANSPOSED else w.load([k * BK, tile_col])
                acc = tl.dot(a, b, acc)
            left, right = left_and_right(acc, BM, BN)
            row = tile_row + tl.arange(0, BM)
            col = tile_col + tl.arange(0, HALF)
            if is_whole:
                finish_rows(
                    left, out, low, factor, normalise, g_class_sum, class_row, own, index, weight, order, start,
                    rows, row, col, hidden, w_row, w_col, out_row, first, last,
                )  # fmt: skip
                finish_rows(
                    right, out, low, factor, normalise, g_class_sum, class_row, own, index, weight, order, start,
                    rows, row, col + HALF, hidden, w_row, w_col, out_row, first, last,
                )  # fmt: skip
            else:
                slot = program.to(tl.int64) * BM
                at = (slot + tl.arange(0, BM))[:, None] * BN + tl.arange(0, HALF)[None, :]
                tl.store(parts + at, left)
                tl.store(parts + at + HALF, right)


@triton.jit(do_not_specialize=["chunk", "most", "programs", "first", "last"])
def d_input_rest_kernel(
    parts, out, low, factor, normalise, g_class_sum, class_row, own, index, weight, order, length, chunk, most, vocab,
    hidden, w_row, w_col, out_row, programs, first, last,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, STRIP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Add the parts of the tiles that were cut up, in order, and finish them like whole ones."""
    begin(PDL)
    start, rows = chunk_bounds(tl.load(length), chunk, most, ROWS)
    row_blocks, columns, whole, rest, pieces, _ = shares(rows, hidden, vocab, programs, BM, BN, BK)
    cut = tl.program_id(0)
    if cut >= rest:
        return
    strip = tl.program_id(1) * STRIP
    value = tl.zeros((STRIP, BN), tl.float32)
    # Unrolled, or reading would be waiting.
    for piece in tl.range(pieces, loop_unroll_factor=8):
        slot = (piece * rest + cut).to(tl.int64) * BM + strip
        value += tl.load(parts + (slot + tl.arange(0, STRIP))[:, None] * BN + tl.arange(0, BN)[None, :])
    row_block, column = grouped(whole * programs + cut, row_blocks, columns, GROUP)
    row = row_block * BM + strip + tl.arange(0, STRIP)
    col = column * BN + tl.arange(0, BN)
    finish_rows(
        value, out, low, factor, normalise, g_class_sum, class_row, own, index, weight, order, start, rows, row, col,
        hidden, w_row, w_col, out_row, first, last,
    )  # fmt: skip


@triton.jit(do_not_specialize=["chunk", "most", "programs"])
def d_weight_kernel(
    dz,  # descriptor of [most, W] in blocks [BK, BM]
    x,  # descriptor of [most, D] in blocks [BK, BN]
    out,  # [W, D], out
    low,  # [W, D] int8, or None
    normalise,  # [1] float32 or None
    class_weight,  # [W] float32, or None for ones
    class_row,  # [D] float32 or None: added to the first sum, times the class's weight
    rows_of_classes,  # [most, D] float32, out: the first chunk's sums of the classes that have a slot; or None
    slots,  # [W] int32: rows of rows_of_classes
    length,  # [1] int32
    chunk,
    most,
    vocab,
    hidden,
    programs,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    FLATTEN: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    total = tl.load(length)
    _, rows = chunk_bounds(total, chunk, most, ROWS)
    first, last = chunk == 0, chunk == last_chunk(total, most)
    class_blocks, columns = tl.cdiv(vocab, BM), tl.cdiv(hidden, BN)
    # A chunk without rows has nothing to do, but for the first, which must write.
    tiles = tl.where((rows > 0) | first, class_blocks * columns, 0)
    HALF: tl.constexpr = BN // 2
    for tile in tl.range(tl.program_id(0), tiles, programs, flatten=FLATTEN):
        class_block, column = grouped(tile, class_blocks, columns, GROUP)
        tile_row, tile_col = class_block * BM, column * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(tl.maximum(tl.cdiv(rows, BK), 1)):
            acc = tl.dot(dz.load([k * BK, tile_row]).T, x.load([k * BK, tile_col]), acc)
        left, right = left_and_right(acc, BM, BN)
        row = tile_row + tl.arange(0, BM)
        col = tile_col + tl.arange(0, HALF)
        slot = None
        if rows_of_classes is not None:
            slot = tl.load(slots + row, mask=row < tl.where(first, vocab, 0), other=-1)
        _finish_classes(
            left, out, low, normalise, class_weight, class_row, rows_of_classes, slot, rows, row, col, vocab, hidden,
            first, last,
        )  # fmt: skip
        _finish_classes(
            right, out, low, normalise, class_weight, class_row, rows_of_classes, slot, rows, row, col + HALF, vocab,
            hidden, first, last,
        )  # fmt: skip


@triton.jit
def scaled(value, normalise, class_weight, class_row, row, col, vocab, hidden, first):
    """A tile of d_weight scaled, with what class sums give."""
    if normalise is not None:
        value = value * tl.load(normalise)
    if class_row is not None:
        added = tl.load(class_row + col, mask=col < tl.where(first, hidden, 0), other=0.0)[None, :]
        if class_weight is not None:
            added = added * tl.load(class_weight + row, mask=row < vocab, other=0.0)[:, None]
        value += added
    return value


@triton.jit
def keep_classes(value, rows_of_classes, slot, col, hidden):
    """Store the sums of classes that have a slot: what indexed logits give to them is added there."""
    mask = (slot >= 0)[:, None] & (col < hidden)[None, :]
    tl.store(rows_of_classes + slot.to(tl.int64)[:, None] * hidden + col[None, :], value, mask=mask)


@triton.jit
def _finish_classes(
    value, out, low, normalise, class_weight, class_row, rows_of_classes, slot, rows, row, col, vocab, hidden, first,
    last,
):  # fmt: skip
    """Add a tile of d_weight to the sums."""
    value = tl.where(rows > 0, value, 0.0)
    value = scaled(value, normalise, class_weight, class_row, row, col, vocab, hidden, first)
    at = row.to(tl.int64)[:, None] * hidden + col[None, :]
    sums = accumulate(out, low, at, (row < vocab)[:, None] & (col < hidden)[None, :], value, first, last)
    if rows_of_classes is not None:
        keep_classes(sums, rows_of_classes, slot, col, hidden)


@triton.jit(do_not_specialize=["chunk", "most"])
def factors_kernel(
    factor,  # [most] float32, or None for ones
    parts,  # [most, WIDTH] in 16 bits, out: three that add up to the factor, and zeros
    length,
    chunk,
    most,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The factors of a chunk's rows as an operand of a product: three parts of 8 bits each lose nothing."""
    begin(PDL)
    _, rows = chunk_bounds(tl.load(length), chunk, most, ROWS)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.where(row < rows, 1.0, 0.0)
    if factor is not None:
        value = tl.load(factor + row, mask=row < rows, other=0.0)
    first = value.to(parts.dtype.element_ty)
    value -= first.to(tl.float32)
    second = value.to(parts.dtype.element_ty)
    third = (value - second.to(tl.float32)).to(parts.dtype.element_ty)
    part = tl.arange(0, WIDTH)[None, :]
    of_row = tl.where(part == 0, first[:, None], tl.where(part == 1, second[:, None], third[:, None]))
    tl.store(parts + row[:, None] * WIDTH + part, tl.where(part < 3, of_row, 0.0), mask=(row < most)[:, None])


@triton.jit(do_not_specialize=["chunk", "most"])
def d_bias_kernel(
    dz,  # [most, W]
    factor,  # [most] float32 or None
    normalise,  # [1] float32 or None
    out,  # [W] float32: added to
    length,
    chunk,
    most,
    vocab,
    dz_row,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    _, rows = chunk_bounds(tl.load(length), chunk, most, ROWS)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    for first in range(0, rows, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        mask = (row < rows)[:, None] & (col < vocab)[None, :]
        value = tl.load(dz + row.to(tl.int64)[:, None] * dz_row + col[None, :], mask=mask, other=0.0).to(tl.float32)
        if factor is not None:
            value = value * tl.load(factor + row, mask=row < rows, other=0.0)[:, None]
        acc += value
    total = tl.sum(acc, 0)
    if normalise is not None:
        total = total * tl.load(normalise)
    tl.store(out + col, tl.load(out + col, mask=col < vocab, other=0.0) + total, mask=col < vocab)


@triton.jit(do_not_specialize=["rows", "each"])
def weighted_sum_kernel(
    matrix,  # [rows, D]
    weights,  # [rows] float32, or None for ones
    parts,  # [programs over rows, D] float32, out
    rows,
    each,
    hidden,
    m_row,
    m_col,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    strip = tl.program_id(1) * each
    acc = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    for first in range(strip, tl.minimum(strip + each, rows), BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        mask = (row < tl.minimum(strip + each, rows))[:, None] & (col < hidden)[None, :]
        at = row.to(tl.int64)[:, None] * m_row + col.to(tl.int64)[None, :] * m_col
        value = tl.load(matrix + at, mask=mask, other=0.0).to(tl.float32)
        if weights is not None:
            c = tl.load(weights + row, mask=row < rows, other=0.0)[:, None]
            value = tl.where(c == 0, 0.0, value * c)
        acc += value
    tl.store(parts + tl.program_id(1) * hidden + col, tl.sum(acc, 0), mask=col < hidden)
