"""The classes that a chunk's rows are indexed with: their order, and the large entries that they give to d_weight.

The gradients of indexed logits are kept apart from the product, in float32, and added to the sums before these are
rounded to the gradient's dtype. The first chunk's product may be the last, so there a class has a slot, a float32 row
where the product stores its sum. Later chunks find sums in 24 bits, and add to them before their products do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .products import cut, joined, lower_at
from .schedule import begin, chunk_bounds, chunk_of, last_chunk

# Rows that are looked at together for the end of a class.
MOST_SAME = tl.constexpr(128)


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
    row = tl.load(order + at, mask=at < total, other=0)
    label = tl.load(index + row, mask=at < total, other=-1)
    label = tl.where((label >= 0) & (label < vocab), label, vocab)
    key = chunk_of(at, total, most, ROWS).to(tl.int64) * (vocab + 1) + label
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

    Every row meets all of its chunk, which for chunks of some thousands takes less time than a sort.
    """
    begin(PDL)
    total = tl.load(length)
    first = tl.program_id(0) * BLOCK  # a chunk begins with a block
    if first >= total:
        return
    start, rows = chunk_bounds(total, chunk_of(first, total, most, ROWS), most, ROWS)
    end = start + rows
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
    label = key - tl.full((), chunk, tl.int64) * (vocab + 1)
    return key, label, there & (label < vocab) & (key != before)


@triton.jit(do_not_specialize=["most"])
def slots_kernel(
    keys,  # [N], of ``keys_kernel``, ascending
    length,  # [1] int32
    slots,  # [V] int32, out
    most,
    vocab,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Give the classes of the first chunk their slots: the sorted rows at which they begin."""
    begin(PDL)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start, rows = chunk_bounds(tl.load(length), 0, most, ROWS)
    _, label, is_first = _first_of_class(keys, start, slot, 0, vocab, slot < rows)
    tl.store(slots + label, slot, mask=is_first)


@triton.jit(do_not_specialize=["chunk", "most"])
def own_classes_kernel(
    keys,  # [N], of ``keys_kernel``, ascending
    sources,  # [N] int32: the row of N that each is of
    length,  # [1] int32
    own,  # [N] float32
    x,  # [N, D]
    rows_of_classes,  # [most, D] float32: the first chunk's sums of each class, at its slot
    out,  # [V, D]: added to; or None
    low,  # int8, as ``lower_at`` has them: added to; or None
    d_bias,  # [V] float32, added to; or None
    chunk,
    most,
    vocab,
    hidden,
    x_row,
    x_col,
    IN_PIECES: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add ``own`` times hidden states to the classes of a chunk's rows, rows of the same class in the list's order."""
    begin(PDL)
    count = tl.load(length)
    start, rows = chunk_bounds(count, chunk, most, ROWS)
    slot = tl.program_id(0)
    source = tl.load(sources + start + slot, mask=slot < rows, other=0).to(tl.int64)
    key, label, is_first = _first_of_class(keys, start, slot, chunk, vocab, slot < rows)
    if not is_first:
        return
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = col < hidden
    # Most classes have one row: what those need is loaded at once.
    g = tl.load(own + source)
    total = _times(g, x + source * x_row + col.to(tl.int64) * x_col, there)
    total_bias = g
    if out is not None:
        is_slot = there & (chunk == 0)
        total += tl.load(rows_of_classes + slot.to(tl.int64) * hidden + col, mask=is_slot, other=0.0)
        at = label * hidden + col
        again = there & (chunk > 0)
        upper = tl.load(out + at, mask=again, other=0.0)
        if low is None:
            total += upper.to(tl.float32)
        else:
            low_at = lower_at(label, col, hidden, IN_PIECES)
            total += joined(upper, tl.load(low + low_at, mask=again, other=0))
    more = slot + 1
    end = more
    same = tl.full((), MOST_SAME, tl.int32)
    while same == MOST_SAME:
        next = end + tl.arange(0, MOST_SAME)
        same = tl.sum((tl.load(keys + start + next, mask=next < rows, other=-1) == key).to(tl.int32), 0)
        end += same
    for first in range(more, end, BLOCK_ENTRIES):
        entry = first + tl.arange(0, BLOCK_ENTRIES)
        others = tl.load(sources + start + entry, mask=entry < end, other=0).to(tl.int64)
        of_others = tl.load(own + others, mask=entry < end, other=0.0)
        from_rows = x + others[:, None] * x_row + col.to(tl.int64)[None, :] * x_col
        total += tl.sum(_times(of_others[:, None], from_rows, (entry < end)[:, None] & there[None, :]), 0)
        total_bias += tl.sum(of_others, 0)
    if out is not None:
        if low is None:
            tl.store(out + at, total.to(out.dtype.element_ty), mask=there)
        else:
            # Before a later chunk's product no sum is the last.
            upper, lower = cut(total, (chunk == 0) & (last_chunk(count, most) == 0), out.dtype.element_ty)
            tl.store(out + at, upper, mask=there)
            tl.store(low + low_at, lower, mask=there)
    if d_bias is not None:
        only = tl.program_id(1) == 0  # one program of the class
        tl.store(d_bias + label, tl.load(d_bias + label, mask=only, other=0.0) + total_bias, mask=only)


@triton.jit
def _times(g, at, mask):
    """``g`` times what is there; a row that has nothing to give may hold a NaN."""
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return tl.where(g != 0, g * value, 0.0)
