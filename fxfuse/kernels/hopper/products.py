"""Products of the gradient of a chunk's logits with the weight and with the hidden states, added up in 24 bits or more.

A gradient in 16 bits is added up without a second matrix in 32: the upper 16 bits of each float32 sum stand in the
gradient's own memory and the next 8 beside it, until the last addition rounds to the gradient's dtype. Sums so kept
have a unit roundoff of 2**-17, against 2**-9 of bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..logits import grouped
from .schedule import begin, chunk_bounds, last_chunk, left_and_right

MOST_PIECES = tl.constexpr(32)


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
def _finish_rows(
    value, out, low, factor, normalise, g_class_sum, class_row, own, index, weight, order, start, rows, row, col,
    hidden, indexed, w_row, w_col, out_row, first, last,
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
        for k in range(indexed):
            g = tl.load(own + source * indexed + k, mask=there, other=0.0)
            label = tl.where(g != 0, tl.load(index + source * indexed + k, mask=there, other=0), 0)
            from_class = weight + label[:, None] * w_row + col.to(tl.int64)[None, :] * w_col
            inside = (g != 0)[:, None] & (col < hidden)[None, :]
            value += g[:, None] * tl.load(from_class, mask=inside, other=0.0).to(tl.float32)
    at = source[:, None] * out_row + col[None, :]
    accumulate(out, low, at, there[:, None] & (col < hidden)[None, :], value, first, last)


@triton.jit
def _shares(rows, hidden, vocab, programs, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
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
    each = tl.cdiv(steps, pieces)
    return row_blocks, columns, whole, rest, tl.cdiv(steps, each), each


@triton.jit(do_not_specialize=["chunk", "most", "indexed", "programs", "first", "last"])
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
    own,  # [N, K] float32: gradients of indexed logits that dz leaves out, or None
    index,  # [N, K] int64
    weight,  # [V, D]
    order,
    length,
    chunk,
    most,
    vocab,
    hidden,
    indexed,
    w_row,
    w_col,
    out_row,
    programs,
    first,
    last,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    start, rows = chunk_bounds(tl.load(length), chunk, most, ROWS)
    row_blocks, columns, whole, rest, pieces, each = _shares(rows, hidden, vocab, programs, BM, BN, BK)
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
                if TRANSPOSED:
                    acc = tl.dot(a, w.load([tile_col, k * BK]).T, acc, input_precision=PRECISION)
                else:
                    acc = tl.dot(a, w.load([k * BK, tile_col]), acc, input_precision=PRECISION)
            left, right = left_and_right(acc, BM, BN)
            row = tile_row + tl.arange(0, BM)
            col = tile_col + tl.arange(0, HALF)
            if is_whole:
                _finish_rows(
                    left, out, low, factor, normalise, g_class_sum, class_row, own, index, weight, order, start,
                    rows, row, col, hidden, indexed, w_row, w_col, out_row, first, last,
                )  # fmt: skip
                _finish_rows(
                    right, out, low, factor, normalise, g_class_sum, class_row, own, index, weight, order, start,
                    rows, row, col + HALF, hidden, indexed, w_row, w_col, out_row, first, last,
                )  # fmt: skip
            else:
                slot = program.to(tl.int64) * BM
                at = (slot + tl.arange(0, BM))[:, None] * BN + tl.arange(0, HALF)[None, :]
                tl.store(parts + at, left)
                tl.store(parts + at + HALF, right)


@triton.jit(do_not_specialize=["chunk", "most", "indexed", "programs", "first", "last"])
def d_input_rest_kernel(
    parts, out, low, factor, normalise, g_class_sum, class_row, own, index, weight, order, length, chunk, most, vocab,
    hidden, indexed, w_row, w_col, out_row, programs, first, last,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, STRIP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Add the parts of the tiles that were cut up, in order, and finish them like whole ones."""
    begin(PDL)
    start, rows = chunk_bounds(tl.load(length), chunk, most, ROWS)
    row_blocks, columns, whole, rest, pieces, _ = _shares(rows, hidden, vocab, programs, BM, BN, BK)
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
    _finish_rows(
        value, out, low, factor, normalise, g_class_sum, class_row, own, index, weight, order, start, rows, row, col,
        hidden, indexed, w_row, w_col, out_row, first, last,
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
    rows_of_classes,  # [most, D] float32, out: the sums of the classes that have a slot in this chunk; or None
    slots,  # [W] int32: chunk * most + row of rows_of_classes
    length,  # [1] int32
    chunk,
    most,
    vocab,
    hidden,
    programs,
    PRECISION: tl.constexpr,
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
            acc = tl.dot(dz.load([k * BK, tile_row]).T, x.load([k * BK, tile_col]), acc, input_precision=PRECISION)
        left, right = left_and_right(acc, BM, BN)
        row = tile_row + tl.arange(0, BM)
        col = tile_col + tl.arange(0, HALF)
        slot = None
        if rows_of_classes is not None:
            slot = tl.load(slots + row, mask=row < vocab, other=-1) - chunk * most
        _finish_classes(
            left, out, low, normalise, class_weight, class_row, rows_of_classes, slot, rows, row, col, vocab, hidden,
            first, last,
        )  # fmt: skip
        _finish_classes(
            right, out, low, normalise, class_weight, class_row, rows_of_classes, slot, rows, row, col + HALF, vocab,
            hidden, first, last,
        )  # fmt: skip


@triton.jit
def scaled(value, normalise, class_weight, class_row, rows, row, col, vocab, hidden, first):
    """A tile of d_weight scaled, with what class sums give."""
    value = tl.where(rows > 0, value, 0.0)
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
    value = scaled(value, normalise, class_weight, class_row, rows, row, col, vocab, hidden, first)
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


@triton.jit(do_not_specialize=["rows", "most"])
def keys_kernel(
    index,  # [N] int64
    order,  # [N] int32
    length,  # [1] int32
    keys,  # [N] int32 or int64, out
    rows,
    most,
    vocab,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """By which the listed rows are sorted: first their chunk, then their class; those without one end a chunk."""
    begin(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(length)
    _, step = chunk_bounds(total, 0, most, ROWS)
    row = tl.load(order + at, mask=at < total, other=0)
    label = tl.load(index + row, mask=at < total, other=-1)
    label = tl.where((label >= 0) & (label < vocab), label, vocab)
    key = (at // tl.maximum(step, 1)).to(tl.int64) * (vocab + 1) + label
    tl.store(keys + at, tl.where(at < total, key, LARGEST).to(keys.dtype.element_ty), mask=at < rows)


@triton.jit(do_not_specialize=["most"])
def ranks_kernel(
    keys,  # [N] of ``keys_kernel``
    order,  # [N] int32
    length,  # [1] int32
    ranked,  # [N], out: the keys, ascending
    source,  # [N] int32, out: the row of N that each is of
    most,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sort each chunk's rows by key, equal ones as listed: a row comes after as many as are to be before it.

    Every row meets all of its chunk, which for chunks of thousands takes less time than the launches of a sort.
    """
    begin(PDL)
    total = tl.load(length)
    _, step = chunk_bounds(total, 0, most, ROWS)
    first = tl.program_id(0) * BLOCK  # a chunk begins with a block
    if first >= total:
        return
    start = first // step * step
    end = tl.minimum(start + step, total)
    at = first + tl.arange(0, BLOCK)
    key = tl.load(keys + at, mask=at < total, other=0)
    before = tl.zeros((BLOCK, WIDE), tl.int32)
    for wide in range(start, end, WIDE):
        other = wide + tl.arange(0, WIDE)
        inside = other < end
        less = tl.load(keys + other, mask=inside, other=0)[None, :] - key[:, None]
        sooner = (less < 0) | ((less == 0) & (other[None, :] < at[:, None]))
        before += (sooner & inside[None, :]).to(tl.int32)
    to = start + tl.sum(before, 1)
    tl.store(ranked + to, key, mask=at < total)
    tl.store(source + to, tl.load(order + at, mask=at < total, other=0), mask=at < total)


@triton.jit
def _first_of_class(keys, start, slot, chunk, vocab, there):
    """(the key, the class) of the sorted row ``slot`` of a chunk, and whether it is the first row of a class."""
    key = tl.load(keys + start + slot, mask=there, other=0).to(tl.int64)
    before = tl.load(keys + start + slot - 1, mask=there & (slot > 0), other=-1)
    label = key - chunk.to(tl.int64) * (vocab + 1)
    return key, label, there & (label < vocab) & (key != before)


@triton.jit
def _place_classes(keys, count, slots, slot, chunk, most, vocab, ROWS: tl.constexpr):
    """Give the classes of a chunk that begin at the sorted rows ``slot`` their slots: chunk * most + that row."""
    start, rows = chunk_bounds(count, chunk, most, ROWS)
    _, label, is_first = _first_of_class(keys, start, slot, chunk, vocab, slot < rows)
    tl.store(slots + label, chunk * most + slot, mask=is_first)


@triton.jit(do_not_specialize=["chunk", "most"])
def slots_kernel(
    keys,  # [N], of ``keys_kernel``, ascending
    length,  # [1] int32
    slots,  # [V] int32, out
    chunk,
    most,
    vocab,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _place_classes(keys, tl.load(length), slots, slot, chunk, most, vocab, ROWS)


@triton.jit(do_not_specialize=["chunk", "most"])
def own_classes_kernel(
    keys,  # [N], of ``keys_kernel``, ascending
    sources,  # [N] int32: the row of N that each is of
    length,  # [1] int32
    own,  # [N] float32
    x,  # [N, D]
    rows_of_classes,  # [most, D] float32: the sums of each class so far, at its slot
    slots,  # [V] int32, out: of the next chunk
    out,  # [V, D], out; or None
    low,  # [V, D] int8, out; or None
    d_bias,  # [V] float32, added to; or None
    chunk,
    most,
    vocab,
    hidden,
    x_row,
    x_col,
    BLOCK_ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add ``own`` times hidden states to the classes of a chunk's rows, rows of the same class in the list's order.

    The product that needed this chunk's slots is done, so the next chunk's take their place.
    """
    begin(PDL)
    count = tl.load(length)
    start, rows = chunk_bounds(count, chunk, most, ROWS)
    slot = tl.program_id(0)
    source = tl.load(sources + start + slot, mask=slot < rows, other=0).to(tl.int64)
    key, label, is_first = _first_of_class(keys, start, slot, chunk, vocab, slot < rows)
    _place_classes(keys, count, slots, slot, chunk + 1, most, vocab, ROWS)
    if not is_first:
        return
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = col < hidden
    # Most classes have one row: what those need is loaded at once.
    g = tl.load(own + source)
    total = _times(g, x + source * x_row + col.to(tl.int64) * x_col, there)
    total_bias = g
    if out is not None:
        total += tl.load(rows_of_classes + slot.to(tl.int64) * hidden + col, mask=there, other=0.0)
    more = slot + 1
    while tl.load(keys + start + more, mask=more < rows, other=-1) == key:
        at = more + tl.arange(0, BLOCK_ENTRIES)
        same = tl.load(keys + start + at, mask=at < rows, other=-1) == key
        others = tl.load(sources + start + at, mask=same, other=0).to(tl.int64)
        of_others = tl.load(own + others, mask=same, other=0.0)
        from_rows = x + others[:, None] * x_row + col.to(tl.int64)[None, :] * x_col
        total += tl.sum(_times(of_others[:, None], from_rows, same[:, None] & there[None, :]), 0)
        total_bias += tl.sum(of_others, 0)
        more += BLOCK_ENTRIES
    if out is not None:
        at = label * hidden + col
        if low is None:
            tl.store(out + at, total.to(out.dtype.element_ty), mask=there)
        else:
            upper, lower = cut(total, chunk == last_chunk(count, most), out.dtype.element_ty)
            tl.store(out + at, upper, mask=there)
            tl.store(low + at, lower, mask=there)
    if d_bias is not None:
        only = tl.program_id(1) == 0  # one program of the class
        tl.store(d_bias + label, tl.load(d_bias + label, mask=only, other=0.0) + total_bias, mask=only)


@triton.jit
def _times(g, at, mask):
    """``g`` times what is there; a row that has nothing to give may hold a NaN."""
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return tl.where(g != 0, g * value, 0.0)
