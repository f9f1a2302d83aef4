"""Sums of d_weight as they come to shared memory, are added to, and go back: in pieces of 64x64.

A piece's upper bits (16) and next bits (8), see ``..products``, are loaded and stored through the tensor-memory
accelerator, so that no thread waits for memory with a tile in its registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..products import cut, joined, keep_classes, scaled
from ..schedule import chunk_bounds, last_chunk
from .ring import BLOCK, NARROW, load_async, store_async

PIECE = gl.constexpr(64)  # rows and columns


@gluon.jit
def sizes(length, chunk, most, vocab, hidden, LEAST: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr):
    """(rows of the chunk, rows to multiply: at least ``LEAST``, blocks of classes, columns, tiles)."""
    _, rows = chunk_bounds(gl.load(length), chunk, most, ROWS)
    class_blocks = gl.cdiv(vocab, BLOCK)
    columns = gl.cdiv(hidden, WIDTH)
    # A chunk without rows has nothing to do, but for the first, which must write.
    tiles = gl.where((rows > 0) | (chunk == 0), class_blocks * columns, 0)
    return rows, gl.maximum(rows, LEAST), class_blocks, columns, tiles


@gluon.jit
def load_pieces(out, low, uppers, lowers, at, bar, row, col, chunk, COUNT: gl.constexpr):
    """Load so many pieces of the sums side by side, to ``at`` and after it, if there are sums; ``bar`` waits for it."""
    if low is None:
        mbarrier.arrive(bar)
    else:
        if chunk == 0:
            mbarrier.arrive(bar)
        else:
            mbarrier.expect(bar, COUNT * 3 * PIECE * PIECE)
            for i in gl.static_range(COUNT):
                load_async(out, [row, col + i * PIECE], bar, uppers.index(at + i))
                load_async(low, [row, col + i * PIECE], bar, lowers.index(at + i))


@gluon.jit
def add_bias(d_bias, parts, normalise, rows, tile_row, vocab):
    """Add ``parts [classes, NARROW]``, the columns' sums in parts, to the gradient of the bias, if there are rows."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NARROW, 16])
    value = gl.sum(parts, 1)
    if normalise is not None:
        value *= gl.load(normalise)
    row = tile_row + gl.arange(0, parts.shape[0], layout=gl.SliceLayout(1, layout))
    there = row < gl.where(rows > 0, vocab, 0)
    gl.store(d_bias + row, gl.load(d_bias + row, mask=there, other=0.0) + value, mask=there)


@gluon.jit
def slots_of(rows_of_classes, slots, tile_row, chunk, most, vocab):
    """The slots of a piece's classes, below 0 for those without."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    row = tile_row + gl.arange(0, PIECE, layout=gl.SliceLayout(1, layout))
    if rows_of_classes is None:
        return row * 0 - 1
    else:
        return gl.load(slots + row, mask=row < vocab, other=-1) - chunk * most


@gluon.jit
def add_piece(
    value, out, low, upper, lower, normalise, class_weight, class_row, rows_of_classes, slot, rows, tile_row, tile_col,
    length, chunk, most, vocab, hidden,
):  # fmt: skip
    """Add ``value [64, 64]`` to the piece that ``upper`` and ``lower`` hold, if this is not the first, and store it."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    row = tile_row + gl.arange(0, PIECE, layout=gl.SliceLayout(1, layout))
    col = tile_col + gl.arange(0, PIECE, layout=gl.SliceLayout(0, layout))
    first = chunk == 0
    value = gl.convert_layout(value, layout, assert_trivial=True)
    value = scaled(value, normalise, class_weight, class_row, rows, row, col, vocab, hidden, first)
    if low is None:
        upper.store(value.to(out.dtype))
    else:
        value += gl.where(first, 0.0, joined(upper.load(layout), lower.load(layout)))
        high, next = cut(value, chunk == last_chunk(gl.load(length), most), out.dtype)
        upper.store(high)
        lower.store(next)
    fence_async_shared()
    store_async(out, [tile_row, tile_col], upper)
    if low is not None:
        store_async(low, [tile_row, tile_col], lower)
    if rows_of_classes is not None:
        keep_classes(value, rows_of_classes, slot, col, hidden)
