"""The products for the gradients of the operands as in ``..products``, by warpgroups that share a tile, see
``.together``.

The upper bits of old sums come through the ring as two steps more, one for each warpgroup: where a slot has a tile of
the second operand it has room for those of 64x256, and where it has both of the first for those of 128x128. Factors of
rows are a third operand as in ``.products``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...logits import grouped
from ..schedule import begin, last_chunk
from .meeting import arrivals
from .ring import NARROW, after, half, half_of_rows, seen_as, share
from .sums import PIECE, add_bias, add_piece, load_lower, load_pieces, sizes, slots_of
from .together import LEAST, begin_product, end_product, load_product, ring_of_shared

PIECES = gl.constexpr(4)  # of a warpgroup's half, 64x256 or 128x128


@gluon.jit
def _uppers(a_tiles, b_tiles, out, ACROSS: gl.constexpr, STAGES: gl.constexpr):
    """Where the pieces of old sums come to, ``PIECES`` in each slot."""
    return seen_as(b_tiles if ACROSS == PIECES else a_tiles, out, PIECES * STAGES)


@gluon.jit
def _load(
    dz, other, out, low, factors, length, chunk, most, vocab, hidden, programs, term, counter, dz_tiles, other_tiles,
    factor_tiles, uppers, full, empty, OF_INPUT: gl.constexpr, ALONG: gl.constexpr, ACROSS: gl.constexpr,
    BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = PIECES // ACROSS * PIECE
    WIDTH: gl.constexpr = ACROSS * PIECE
    start, stop, row_blocks, columns, tiles, at = sizes(
        length, chunk, most, vocab, hidden, OF_INPUT, LEAST, 2 * HALF, WIDTH, ROWS
    )
    slot = 0
    phase = 1  # every slot is empty at first
    misses = 0
    for tile in range(gl.program_id(0), tiles, programs):
        row_block, column = grouped(tile, row_blocks, columns, GROUP)
        row = row_block * (2 * HALF)
        steps = gl.cdiv(stop - start, BK)
        narrow_start, narrow_stop = share(column, columns, steps)
        expected, coming = arrivals(tile, tiles, programs, steps)
        slot, phase, misses = load_product(
            dz, other, factors, dz_tiles, other_tiles, factor_tiles, full, empty, slot, phase, misses, row, column,
            start, stop, start + narrow_start * BK, start + narrow_stop * BK, counter, expected, coming, OF_INPUT,
            ALONG, BK, STAGES,
        )  # fmt: skip
        for second in gl.static_range(2):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            load_pieces(
                out, low, uppers, PIECES * slot, bar, at + row + second * HALF, column * WIDTH, term, PIECES, ACROSS
            )
            slot, phase = after(slot, phase, STAGES)


@gluon.jit
def _pass_over(full, empty, slot, phase, STAGES: gl.constexpr):
    """Leave a slot to the other warpgroup."""
    mbarrier.wait(full.index(slot), phase)
    mbarrier.arrive(empty.index(slot))
    return after(slot, phase, STAGES)


@gluon.jit
def _piece(acc, i: gl.constexpr, ACROSS: gl.constexpr):
    return half(half(acc, i // 2 == 1) if ACROSS == PIECES else half_of_rows(acc, i // 2 == 1), i % 2 == 1)


@gluon.jit
def _add(
    out, low, d_bias, bias_stride, normalise, class_weight, class_row, rows_of_classes, slots, length, chunk, most,
    vocab, hidden, programs, term, last, dz_tiles, other_tiles, factor_tiles, uppers, full, empty, lead,
    WARPGROUP: gl.constexpr, OF_INPUT: gl.constexpr, ALONG: gl.constexpr, ACROSS: gl.constexpr, BK: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = PIECES // ACROSS * PIECE
    WIDTH: gl.constexpr = ACROSS * PIECE
    start, stop, row_blocks, columns, tiles, at = sizes(
        length, chunk, most, vocab, hidden, OF_INPUT, LEAST, 2 * HALF, WIDTH, ROWS
    )
    steps = gl.cdiv(stop - start, BK)
    slot = 0
    phase = 0
    round = 0
    for tile in range(gl.program_id(0), tiles, programs):
        if WARPGROUP == 1:
            mbarrier.wait(lead.index(0), round & 1)
        taken_factors = None if d_bias is None else factor_tiles
        acc, parts = begin_product(dz_tiles, other_tiles, taken_factors, full, slot, phase, OF_INPUT, ALONG, WARPGROUP)
        # What the sums need is looked up meanwhile.
        row_block, column = grouped(tile, row_blocks, columns, GROUP)
        row = at + row_block * (2 * HALF) + WARPGROUP * HALF
        col = column * WIDTH
        narrow_start, narrow_stop = share(column, columns, steps)
        slot_of_class = (
            slots_of(rows_of_classes, slots, row, term, vocab),
            slots_of(rows_of_classes, slots, row + HALF - PIECE, term, vocab),
        )
        lower = (
            load_lower(low, row, col, term, hidden),
            load_lower(low, row + 1 // ACROSS * PIECE, col + 1 % ACROSS * PIECE, term, hidden),
            load_lower(low, row + 2 // ACROSS * PIECE, col + 2 % ACROSS * PIECE, term, hidden),
            load_lower(low, row + 3 // ACROSS * PIECE, col + 3 % ACROSS * PIECE, term, hidden),
        )
        acc, parts, slot, phase = end_product(
            dz_tiles, other_tiles, taken_factors, acc, parts, full, empty, lead, slot, phase, steps, narrow_start,
            narrow_stop, OF_INPUT, ALONG, WARPGROUP, STAGES,
        )  # fmt: skip
        if d_bias is not None:  # noqa: SIM102
            if narrow_start < narrow_stop:
                add_bias(d_bias, bias_stride, parts, normalise, row, column, vocab)
        if WARPGROUP == 1:
            slot, phase = _pass_over(full, empty, slot, phase, STAGES)
        mbarrier.wait(full.index(slot), phase)
        for i in gl.static_range(PIECES):
            add_piece(
                _piece(acc, i, ACROSS), out, low, uppers.index(PIECES * slot + i), lower[i], normalise, class_weight,
                class_row, rows_of_classes, slot_of_class[i // ACROSS], row + i // ACROSS * PIECE,
                col + i % ACROSS * PIECE, term, term == last, vocab, hidden,
            )  # fmt: skip
        own = slot
        slot, phase = after(slot, phase, STAGES)
        if WARPGROUP == 0:
            slot, phase = _pass_over(full, empty, slot, phase, STAGES)
        tma.store_wait(0)
        mbarrier.arrive(empty.index(own))
        round += 1  # noqa: SIM113


@gluon.jit(do_not_specialize=["chunk", "most", "programs"])
def d_weight_together_kernel(
    dz,  # descriptor of [most, W] in blocks [BK, 64], or [BK, 128]
    x,  # descriptor of [most, D] in blocks [BK, 256], or [BK, 128]
    out,  # descriptor of [W, D] in 16 bits, in blocks [64, 64], out
    low,  # int8, as ``..products.lower_at`` has them, or None: where there is one chunk only
    factors,  # descriptor of [most, 16] in blocks [BK, 16]: the factor of each row in parts; or None
    d_bias,  # [columns of tiles, W] float32, added to: sums of rows of dz times their factors; or None
    bias_stride,
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
    counter,  # [1] int32, zero; for ``.meeting``
    BK: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    begin(PDL)
    gl.static_assert(BK == PIECE)  # so that what old sums take the place of has as many bytes
    ACROSS: gl.constexpr = x.block_shape[1] // PIECE
    last = last_chunk(gl.load(length), most)
    dz_tiles, x_tiles, full, empty, lead = ring_of_shared(dz, x, STAGES)
    factor_tiles = x_tiles  # which is not looked at
    if factors is not None:
        factor_tiles = gl.allocate_shared_memory(factors.dtype, [STAGES, BK, NARROW], factors.layout)
    uppers = _uppers(dz_tiles, x_tiles, out, ACROSS, STAGES)
    gl.warp_specialize(
        [
            (_add, (
                out, low, d_bias, bias_stride, normalise, class_weight, class_row, rows_of_classes, slots, length,
                chunk, most, vocab, hidden, programs, chunk, last, dz_tiles, x_tiles, factor_tiles, uppers, full, empty,
                lead, 0, False, False, ACROSS, BK, GROUP, STAGES, ROWS,
            )),
            (_add, (
                out, low, d_bias, bias_stride, normalise, class_weight, class_row, rows_of_classes, slots, length,
                chunk, most, vocab, hidden, programs, chunk, last, dz_tiles, x_tiles, factor_tiles, uppers, full, empty,
                lead, 1, False, False, ACROSS, BK, GROUP, STAGES, ROWS,
            )),
            (_load, (
                dz, x, out, low, factors, length, chunk, most, vocab, hidden, programs, chunk, counter, dz_tiles,
                x_tiles, factor_tiles, uppers, full, empty, False, False, ACROSS, BK, GROUP, STAGES, ROWS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["chunk", "most", "programs", "term", "last"])
def input_sums_together_kernel(
    dz,  # descriptor of [most, W] in blocks [64, BK]
    w,  # descriptor of [W, D] in blocks [BK, 256], or of [D, W] in [256, BK] if TRANSPOSED
    out,  # descriptor of [N, D] in 16 bits, in blocks [64, 64], out: rows in the order of the list
    low,  # int8, as ``..products.lower_at`` has them
    normalise,
    length,
    chunk,
    most,
    vocab,
    hidden,
    programs,
    term,  # the number of the window, and of the last one
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
    gl.static_assert(BK == PIECE)
    dz_tiles, w_tiles, full, empty, lead = ring_of_shared(dz, w, STAGES)
    uppers = _uppers(dz_tiles, w_tiles, out, PIECES, STAGES)
    gl.warp_specialize(
        [
            (_add, (
                out, low, None, 0, normalise, None, None, None, None, length, chunk, most, vocab, hidden, programs,
                term, last, dz_tiles, w_tiles, w_tiles, uppers, full, empty, lead, 0, True, TRANSPOSED, PIECES, BK,
                GROUP, STAGES, ROWS,
            )),
            (_add, (
                out, low, None, 0, normalise, None, None, None, None, length, chunk, most, vocab, hidden, programs,
                term, last, dz_tiles, w_tiles, w_tiles, uppers, full, empty, lead, 1, True, TRANSPOSED, PIECES, BK,
                GROUP, STAGES, ROWS,
            )),
            (_load, (
                dz, w, out, low, None, length, chunk, most, vocab, hidden, programs, term, counter, dz_tiles, w_tiles,
                w_tiles, uppers, full, empty, True, TRANSPOSED, PIECES, BK, GROUP, STAGES, ROWS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
