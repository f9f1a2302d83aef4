"""The product for the gradient of the weight as in ``..products``, by warpgroups that take turns."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...logits import grouped
from ..products import finish_classes
from ..schedule import chunk_bounds, last_chunk
from .ring import BLOCK, barriers, half, load_tiles, multiply


@gluon.jit
def _sizes(length, chunk, most, vocab, hidden, ROWS: gl.constexpr):
    """(rows of the chunk, at least one row to multiply, blocks of classes, columns, tiles)."""
    _, rows = chunk_bounds(gl.load(length), chunk, most, ROWS)
    class_blocks = gl.cdiv(vocab, BLOCK)
    columns = gl.cdiv(hidden, BLOCK)
    # A chunk without rows has nothing to do, but for the first, which must write.
    tiles = gl.where((rows > 0) | (chunk == 0), class_blocks * columns, 0)
    return rows, gl.maximum(rows, 1), class_blocks, columns, tiles


@gluon.jit
def _load(
    dz, x, length, chunk, most, vocab, hidden, programs, dz_tiles, x_tiles, full, empty, BK: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    _, terms, class_blocks, columns, tiles = _sizes(length, chunk, most, vocab, hidden, ROWS)
    load_tiles(
        dz, x, dz_tiles, x_tiles, full, empty, gl.program_id(0), tiles, programs, class_blocks, columns, terms, False,
        False, BK, GROUP, STAGES,
    )  # fmt: skip


@gluon.jit
def _add(
    out, low, normalise, class_weight, class_row, rows_of_classes, slots, length, chunk, most, vocab, hidden, programs,
    dz_tiles, x_tiles, full, empty, turn, WARPGROUP: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    rows, terms, class_blocks, columns, tiles = _sizes(length, chunk, most, vocab, hidden, ROWS)
    first = chunk == 0
    last = chunk == last_chunk(gl.load(length), most)
    steps = gl.cdiv(terms, BK)
    HALF: gl.constexpr = BLOCK // 2
    # Sixteen bytes of a 16-bit sum a thread, and whole rows of a tile a few threads.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    round = 0
    for tile in range(gl.program_id(0) + WARPGROUP * programs, tiles, 2 * programs):
        class_block, column = grouped(tile, class_blocks, columns, GROUP)
        acc = multiply(
            dz_tiles, x_tiles, full, empty, turn, round, (2 * round + WARPGROUP) * steps, steps, False, False,
            WARPGROUP, STAGES,
        )  # fmt: skip
        round += 1  # noqa: SIM113
        row = class_block * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
        slot = None
        if rows_of_classes is not None:
            slot = gl.load(slots + row, mask=row < vocab, other=-1) - chunk * most
        for i in gl.static_range(2):
            col = column * BLOCK + i * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
            finish_classes(
                gl.convert_layout(half(acc, i == 1), layout), out, low, normalise, class_weight, class_row,
                rows_of_classes, slot, rows, row, col, vocab, hidden, first, last,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["chunk", "most", "programs"])
def d_weight_kernel(
    dz,  # descriptor of [most, W] in blocks [BK, 128]
    x,  # descriptor of [most, D] in blocks [BK, 128]
    out,
    low,
    normalise,
    class_weight,
    class_row,
    rows_of_classes,
    slots,
    length,
    chunk,
    most,
    vocab,
    hidden,
    programs,
    BK: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
):
    dz_tiles = gl.allocate_shared_memory(dz.dtype, [STAGES, BK, BLOCK], dz.layout)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BK, BLOCK], x.layout)
    full = barriers(STAGES)
    empty = barriers(STAGES)
    turn = barriers(2)
    gl.warp_specialize(
        [
            (_add, (
                out, low, normalise, class_weight, class_row, rows_of_classes, slots, length, chunk, most, vocab,
                hidden, programs, dz_tiles, x_tiles, full, empty, turn, 0, BK, GROUP, STAGES, ROWS,
            )),
            (_add, (
                out, low, normalise, class_weight, class_row, rows_of_classes, slots, length, chunk, most, vocab,
                hidden, programs, dz_tiles, x_tiles, full, empty, turn, 1, BK, GROUP, STAGES, ROWS,
            )),
            (_load, (
                dz, x, length, chunk, most, vocab, hidden, programs, dz_tiles, x_tiles, full, empty, BK, GROUP, STAGES,
                ROWS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
