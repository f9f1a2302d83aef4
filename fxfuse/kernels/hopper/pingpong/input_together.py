"""The product for the gradient of the input as in ``..products``, by warpgroups that share a tile: ``.together``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...logits import grouped
from ..products import LEAST_STEPS, finish_rows, shares
from ..schedule import begin, chunk_bounds
from .meeting import EVERY
from .ring import BLOCK, half
from .sums import LAYOUT, PIECE
from .together import WIDTH, begin_product, end_product, load_product, ring_of_shared

PIECES = gl.constexpr(4)  # of a warpgroup's half, which are ended one after the other


@gluon.jit
def _shares(length, chunk, most, vocab, hidden, programs, BK: gl.constexpr, ROWS: gl.constexpr):
    """What ``shares`` tells, and how many items this program has: whole tiles, and last of all a part of another."""
    _, rows = chunk_bounds(gl.load(length), chunk, most, ROWS)
    row_blocks, columns, whole, rest, pieces, each = shares(rows, hidden, vocab, programs, BLOCK, WIDTH, BK)
    has_part = gl.program_id(0) < rest * pieces
    return row_blocks, columns, whole, rest, pieces, each, whole + has_part.to(gl.int32)


@gluon.jit
def _item(item, row_blocks, columns, whole, rest, each, steps, programs, GROUP: gl.constexpr):
    """(row block, column, first step, last step) of one of them."""
    program = gl.program_id(0)
    is_whole = item < whole
    piece = program // gl.maximum(rest, 1)
    tile = gl.where(is_whole, program, program - piece * rest) + item * programs
    first = gl.where(is_whole, 0, piece * each)
    last = gl.where(is_whole, steps, gl.minimum(first + each, steps))
    row_block, column = grouped(tile, row_blocks, columns, GROUP)
    # The last part may have fewer than the least. Past the vocabulary there are zeros.
    return row_block, column, first, gl.maximum(last, first + LEAST_STEPS)


@gluon.jit
def _load(
    dz, w, length, chunk, most, vocab, hidden, programs, counter, dz_tiles, w_tiles, full, empty,
    TRANSPOSED: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    row_blocks, columns, whole, rest, pieces, each, items = _shares(
        length, chunk, most, vocab, hidden, programs, BK, ROWS
    )
    steps = gl.cdiv(vocab, BK)
    slot = 0
    phase = 1  # every slot is empty at first
    misses = 0
    for item in range(items):
        row_block, column, first, last = _item(item, row_blocks, columns, whole, rest, each, steps, programs, GROUP)
        expected = item * programs * gl.cdiv(steps, EVERY)
        # The last parts of tiles may have fewer steps, so they come to fewer meetings: nobody waits for them.
        waited_for = gl.where(pieces * each == steps, pieces, pieces - 1) * rest
        slot, phase, misses = load_product(
            dz, w, None, dz_tiles, w_tiles, None, full, empty, slot, phase, misses, row_block * BLOCK, column,
            first * BK, last * BK, 0, 0, counter, expected, gl.where(item < whole, programs, waited_for), True,
            TRANSPOSED, BK, STAGES,
        )  # fmt: skip


@gluon.jit
def _add(
    out, low, parts, factor, normalise, g_class_sum, class_row, own, index, weight, order, length, chunk, most, vocab,
    hidden, w_row, w_col, out_row, programs, first_term, last_term, dz_tiles, w_tiles, full, empty, lead,
    WARPGROUP: gl.constexpr, TRANSPOSED: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    start, rows = chunk_bounds(gl.load(length), chunk, most, ROWS)
    row_blocks, columns, whole, rest, _pieces, each, items = _shares(
        length, chunk, most, vocab, hidden, programs, BK, ROWS
    )
    steps = gl.cdiv(vocab, BK)
    slot = 0
    phase = 0
    for item in range(items):
        row_block, column, first, last = _item(item, row_blocks, columns, whole, rest, each, steps, programs, GROUP)
        if WARPGROUP == 1:
            mbarrier.wait(lead.index(0), item & 1)
        acc, nothing = begin_product(dz_tiles, w_tiles, None, full, slot, phase, True, TRANSPOSED, WARPGROUP)
        acc, nothing, slot, phase = end_product(
            dz_tiles, w_tiles, None, acc, nothing, full, empty, lead, slot, phase, last - first, 0, 0, True,
            TRANSPOSED, WARPGROUP, STAGES,
        )  # fmt: skip
        row_within = WARPGROUP * (BLOCK // 2) + gl.arange(0, BLOCK // 2, layout=gl.SliceLayout(1, LAYOUT))
        for i in gl.static_range(PIECES):
            value = half(half(acc, i // 2 == 1), i % 2 == 1)
            col_within = i * PIECE + gl.arange(0, PIECE, layout=gl.SliceLayout(0, LAYOUT))
            if item < whole:
                finish_rows(
                    value, out, low, factor, normalise, g_class_sum, class_row, own, index, weight, order, start, rows,
                    row_block * BLOCK + row_within, column * WIDTH + col_within, hidden, w_row, w_col, out_row,
                    first_term, last_term,
                )  # fmt: skip
            else:
                at = (gl.program_id(0).to(gl.int64) * BLOCK + row_within)[:, None] * WIDTH + col_within[None, :]
                gl.store(parts + at, value)


@gluon.jit(do_not_specialize=["chunk", "most", "programs", "first", "last"])
def d_input_together_kernel(
    dz,  # descriptor of [most, W] in blocks [64, BK]
    w,  # descriptor of [W, D] in blocks [BK, 256], or of [D, W] in [256, BK] if TRANSPOSED
    out,
    low,
    parts,  # [programs, 128, 256] float32, out: of the tiles that are cut up
    factor,
    normalise,
    g_class_sum,
    class_row,
    own,
    index,
    weight,
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
    counter,  # [1] int32, zero; for ``.meeting``
    TRANSPOSED: gl.constexpr,
    BK: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    begin(PDL)
    dz_tiles, w_tiles, full, empty, lead = ring_of_shared(dz, w, STAGES)
    gl.warp_specialize(
        [
            (_add, (
                out, low, parts, factor, normalise, g_class_sum, class_row, own, index, weight, order, length, chunk,
                most, vocab, hidden, w_row, w_col, out_row, programs, first, last, dz_tiles, w_tiles, full,
                empty, lead, 0, TRANSPOSED, BK, GROUP, STAGES, ROWS,
            )),
            (_add, (
                out, low, parts, factor, normalise, g_class_sum, class_row, own, index, weight, order, length, chunk,
                most, vocab, hidden, w_row, w_col, out_row, programs, first, last, dz_tiles, w_tiles, full,
                empty, lead, 1, TRANSPOSED, BK, GROUP, STAGES, ROWS,
            )),
            (_load, (
                dz, w, length, chunk, most, vocab, hidden, programs, counter, dz_tiles, w_tiles, full, empty,
                TRANSPOSED, BK, GROUP, STAGES, ROWS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
