"""Sums of d_weight or d_input as they come, are added to, and go back: in pieces of 64x64.

A piece's upper 16 bits, see ``..products``, come to shared memory and leave it through the tensor-memory accelerator.
The next 8 bits never leave the op, so they lie as the threads have them: in the order of ``..products.lower_at``, in
which a thread reads and writes whole vectors. What is done to an element is spelled out, as one warp of a warpgroup has
a processor's scheduler to itself: each instruction here is time in which its tensor core may have nothing to do.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ... import tiles
from ..products import keep_classes, scaled
from ..schedule import chunk_bounds
from .ring import NARROW, load_async, store_async

PIECE = gl.constexpr(tiles.PIECE)
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_IN_ORDER = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))

# Of four elements: their upper bits in two registers and the next in one, to four sums.
_JOIN = gl.constexpr(
    """{
    .reg .b32 lower;
    prmt.b32 lower, $6, 0, 0x1404;
    prmt.b32 $0, lower, $4, 0x5410;
    prmt.b32 $1, lower, $4, 0x7632;
    prmt.b32 lower, $6, 0, 0x3424;
    prmt.b32 $2, lower, $5, 0x5410;
    prmt.b32 $3, lower, $5, 0x7632;
    }"""
)
# The reverse, rounded to 24 bits. The bits of the NaN that arithmetic makes, 0x7fffffff, are lowered to those of
# another one, as nothing could be added to them; an infinity has no bits that could carry.
_CUT = gl.constexpr(
    """{
    .reg .b32 a, b, c, d;
    min.s32 a, $3, 0x7fffff7f;
    min.s32 b, $4, 0x7fffff7f;
    min.s32 c, $5, 0x7fffff7f;
    min.s32 d, $6, 0x7fffff7f;
    add.s32 a, a, 0x80;
    add.s32 b, b, 0x80;
    add.s32 c, c, 0x80;
    add.s32 d, d, 0x80;
    prmt.b32 $0, a, b, 0x7632;
    prmt.b32 $1, c, d, 0x7632;
    prmt.b32 a, a, b, 0x0051;
    prmt.b32 c, c, d, 0x5100;
    prmt.b32 $2, a, c, 0x7610;
    }"""
)


@gluon.jit
def _in_order(piece):
    """A piece as its bytes lie in memory: the same registers."""
    piece = piece.reshape([4, 2, 8, 8, 4, 2]).permute([1, 0, 2, 4, 3, 5]).reshape([PIECE, PIECE])
    return gl.convert_layout(piece, _IN_ORDER, assert_trivial=True)


@gluon.jit
def _as_accumulated(piece):
    """The reverse."""
    piece = piece.reshape([2, 4, 8, 4, 8, 2]).permute([1, 0, 2, 4, 3, 5]).reshape([PIECE, PIECE])
    return gl.convert_layout(piece, LAYOUT, assert_trivial=True)


@gluon.jit
def _joined(upper, lower):
    """As ``..products.joined`` for the upper bits of a piece and the next, which are in order."""
    bits = gl.inline_asm_elementwise(
        _JOIN, "=&r,=&r,=&r,=&r,r,r,r", [_in_order(upper.to(gl.int16, bitcast=True)), lower], dtype=gl.int32,
        is_pure=True, pack=4,
    )  # fmt: skip
    return _as_accumulated(bits).to(gl.float32, bitcast=True)


@gluon.jit
def _cut(value, DTYPE: gl.constexpr):
    """The upper bits of a piece, and the next in order; as ``..products.cut`` where it is not the last sum."""
    upper, lower = gl.inline_asm_elementwise(
        _CUT, "=r,=r,=r,r,r,r,r", [_in_order(value.to(gl.int32, bitcast=True))], dtype=(gl.int16, gl.int8),
        is_pure=True, pack=4,
    )  # fmt: skip
    return _as_accumulated(upper).to(DTYPE, bitcast=True), lower


@gluon.jit
def _lower(low, tile_row, tile_col, hidden):
    """Where the lower bits of a piece are, in order."""
    row = gl.arange(0, PIECE, layout=gl.SliceLayout(1, _IN_ORDER))
    col = gl.arange(0, PIECE, layout=gl.SliceLayout(0, _IN_ORDER))
    piece = (tile_row // PIECE).to(gl.int64) * gl.cdiv(hidden, PIECE) + tile_col // PIECE
    return low + piece * (PIECE * PIECE) + (row[:, None] * PIECE + col[None, :])


@gluon.jit
def sizes(
    length, chunk, most, vocab, hidden, OF_INPUT: gl.constexpr, LEAST: gl.constexpr, HEIGHT: gl.constexpr,
    WIDTH: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """(what is summed over: from and to, at least ``LEAST``; blocks of rows, columns, tiles; the result's first row).

    The product's rows are the window's classes, summed over the chunk's rows; OF_INPUT it is the other way round.
    """
    at, rows = chunk_bounds(gl.load(length), chunk, most, ROWS)
    columns = gl.cdiv(hidden, WIDTH)
    if OF_INPUT:
        row_blocks = gl.cdiv(rows, HEIGHT)
        return 0, gl.maximum(vocab, LEAST), row_blocks, columns, row_blocks * columns, at
    else:
        start = gl.where(rows > 0, 0, most)  # if there are none, those past the end: zeros
        row_blocks = gl.cdiv(vocab, HEIGHT)
        # A chunk without rows has nothing to do, but for the first, which must write.
        tiles = gl.where((rows > 0) | (chunk == 0), row_blocks * columns, 0)
        return start, start + gl.maximum(rows, LEAST), row_blocks, columns, tiles, 0


@gluon.jit
def load_pieces(out, low, uppers, at, bar, row, col, term, COUNT: gl.constexpr, ACROSS: gl.constexpr):
    """Load so many pieces of upper bits, ``ACROSS`` side by side, to ``at`` and after it; ``bar`` waits.

    If there are no sums, it waits for nothing.
    """
    if low is None:
        mbarrier.arrive(bar)
    else:
        if term == 0:
            mbarrier.arrive(bar)
        else:
            mbarrier.expect(bar, COUNT * 2 * PIECE * PIECE)
            for i in gl.static_range(COUNT):
                load_async(out, [row + i // ACROSS * PIECE, col + i % ACROSS * PIECE], bar, uppers.index(at + i))


@gluon.jit
def load_lower(low, tile_row, tile_col, term, hidden):
    """The lower bits of a piece, in order; anything if there are no sums. Asked for long before they are needed."""
    if low is None:
        return 0
    else:
        return gl.load(_lower(low, tile_row, tile_col, hidden), mask=(term > 0) & (tile_col < hidden), other=0)


@gluon.jit
def add_bias(d_bias, stride, parts, normalise, tile_row, column, vocab):
    """Add ``parts [classes, NARROW]``, sums in parts, to what a column of tiles gives to the gradient of the bias."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NARROW, 16])
    value = gl.sum(parts, 1)
    if normalise is not None:
        value *= gl.load(normalise)
    row = tile_row + gl.arange(0, parts.shape[0], layout=gl.SliceLayout(1, layout))
    there = row < vocab
    at = d_bias + column.to(gl.int64) * stride + row
    gl.store(at, gl.load(at, mask=there, other=0.0) + value, mask=there)


@gluon.jit
def slots_of(rows_of_classes, slots, tile_row, term, vocab):
    """The slots of a piece's classes in the first term, below 0 for those without."""
    row = tile_row + gl.arange(0, PIECE, layout=gl.SliceLayout(1, LAYOUT))
    if rows_of_classes is None:
        return row
    else:
        return gl.load(slots + row, mask=row < gl.where(term == 0, vocab, 0), other=-1)


@gluon.jit
def _send(out, value, buffer, tile_row, tile_col):
    buffer.store(value)
    fence_async_shared()
    store_async(out, [tile_row, tile_col], buffer)


@gluon.jit
def add_piece(
    value, out, low, upper, lower, normalise, class_weight, class_row, rows_of_classes, slot, tile_row, tile_col, term,
    is_last, vocab, hidden,
):  # fmt: skip
    """Add ``value [64, 64]`` to the piece ``upper`` and ``lower``, if this is not the first term, and store it."""
    row = tile_row + gl.arange(0, PIECE, layout=gl.SliceLayout(1, LAYOUT))
    col = tile_col + gl.arange(0, PIECE, layout=gl.SliceLayout(0, LAYOUT))
    value = gl.convert_layout(value, LAYOUT, assert_trivial=True)
    value = scaled(value, normalise, class_weight, class_row, row, col, vocab, hidden, term == 0)
    if low is None:
        _send(out, value.to(out.dtype), upper, tile_row, tile_col)
    else:
        if term > 0:
            value += _joined(upper.load(LAYOUT), lower)
        if is_last:
            _send(out, value.to(out.dtype), upper, tile_row, tile_col)
        else:
            high, next = _cut(value, out.dtype)
            _send(out, high, upper, tile_row, tile_col)
            # After the fence in there, which would wait for it.
            gl.store(_lower(low, tile_row, tile_col, hidden), next, mask=tile_col < hidden)
    if rows_of_classes is not None:  # noqa: SIM102
        if term == 0:
            keep_classes(value, rows_of_classes, slot, col, hidden)
