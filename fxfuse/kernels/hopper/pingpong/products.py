"""The product for the gradient of the weight as in ``..products``, by warpgroups that take turns.

A second warp loads the upper bits of a tile's old sums into buffers of their own while it is multiplied. With factors
of rows as a third operand, the gradients of the logits are also multiplied with these, which is the gradient of the
bias: each column of tiles has its share of the rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...logits import grouped
from ..schedule import begin, last_chunk
from .ring import BLOCK, NARROW, barriers, half, half_of_rows, load_tiles, multiply_both, share
from .sums import PIECE, add_bias, add_piece, load_lower, load_pieces, sizes, slots_of

PIECES = gl.constexpr(4)  # of a tile


@gluon.jit
def _load(
    dz, x, factors, length, chunk, most, vocab, hidden, programs, dz_tiles, x_tiles, factor_tiles, full, empty,
    BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    start, stop, class_blocks, columns, tiles, _ = sizes(
        length, chunk, most, vocab, hidden, False, 1, BLOCK, BLOCK, ROWS
    )
    load_tiles(
        dz, x, factors, dz_tiles, x_tiles, factor_tiles, full, empty, gl.program_id(0), tiles, programs, class_blocks,
        columns, start, stop, False, False, BK, GROUP, STAGES,
    )  # fmt: skip


@gluon.jit
def _load_sums(
    out, low, length, chunk, most, vocab, hidden, programs, uppers, come, free, GROUP: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    _, _, class_blocks, columns, tiles, _ = sizes(length, chunk, most, vocab, hidden, False, 1, BLOCK, BLOCK, ROWS)
    warpgroup = 0
    for tile in range(gl.program_id(0), tiles, programs):
        class_block, column = grouped(tile, class_blocks, columns, GROUP)
        for i in gl.static_range(PIECES):
            mbarrier.wait(free.index(i), warpgroup ^ 1)
            row = class_block * BLOCK + i // 2 * PIECE
            col = column * BLOCK + i % 2 * PIECE
            load_pieces(out, low, uppers, i, come.index(warpgroup * PIECES + i), row, col, chunk, 1, 1)
        warpgroup ^= 1


@gluon.jit
def _add(
    out, low, d_bias, bias_stride, normalise, class_weight, class_row, rows_of_classes, slots, length, chunk, most,
    vocab, hidden, programs, dz_tiles, x_tiles, factor_tiles, full, empty, turn, uppers, come, free,
    WARPGROUP: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    start, stop, class_blocks, columns, tiles, _ = sizes(
        length, chunk, most, vocab, hidden, False, 1, BLOCK, BLOCK, ROWS
    )
    is_last = chunk == last_chunk(gl.load(length), most)
    steps = gl.cdiv(stop - start, BK)
    round = 0
    for tile in range(gl.program_id(0) + WARPGROUP * programs, tiles, 2 * programs):
        class_block, column = grouped(tile, class_blocks, columns, GROUP)
        row = class_block * BLOCK
        col = column * BLOCK
        narrow_start, narrow_stop = share(column, columns, steps)
        slot_of_class = (
            slots_of(rows_of_classes, slots, row, chunk, vocab),
            slots_of(rows_of_classes, slots, row + PIECE, chunk, vocab),
        )
        lower = (
            load_lower(low, row, col, chunk, hidden),
            load_lower(low, row, col + PIECE, chunk, hidden),
            load_lower(low, row + PIECE, col, chunk, hidden),
            load_lower(low, row + PIECE, col + PIECE, chunk, hidden),
        )
        acc, parts = multiply_both(
            dz_tiles, x_tiles, None if d_bias is None else factor_tiles, full, empty, turn, round,
            (2 * round + WARPGROUP) * steps, steps, narrow_start, narrow_stop, False, False, WARPGROUP, STAGES,
        )  # fmt: skip
        if d_bias is not None:  # noqa: SIM102
            if narrow_start < narrow_stop:
                add_bias(d_bias, bias_stride, parts, normalise, row, column, vocab)
        for i in gl.static_range(PIECES):
            mbarrier.wait(come.index(WARPGROUP * PIECES + i), round & 1)
            add_piece(
                half(half_of_rows(acc, i // 2 == 1), i % 2 == 1), out, low, uppers.index(i), lower[i], normalise,
                class_weight, class_row, rows_of_classes, slot_of_class[i // 2], row + i // 2 * PIECE,
                col + i % 2 * PIECE, chunk, is_last, vocab, hidden,
            )  # fmt: skip
            if i > 0:
                tma.store_wait(1)  # the piece before has been read
                mbarrier.arrive(free.index(i - 1))
        tma.store_wait(0)
        mbarrier.arrive(free.index(PIECES - 1))
        round += 1  # noqa: SIM113


@gluon.jit(do_not_specialize=["chunk", "most", "programs"])
def d_weight_kernel(
    dz,  # descriptor of [most, W] in blocks [BK, 128]
    x,  # descriptor of [most, D] in blocks [BK, 128]
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
    BK: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    begin(PDL)
    dz_tiles = gl.allocate_shared_memory(dz.dtype, [STAGES, BK, BLOCK], dz.layout)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BK, BLOCK], x.layout)
    factor_tiles = x_tiles  # which is not looked at
    if factors is not None:
        factor_tiles = gl.allocate_shared_memory(factors.dtype, [STAGES, BK, NARROW], factors.layout)
    uppers = gl.allocate_shared_memory(out.dtype, [PIECES, PIECE, PIECE], out.layout)
    full = barriers(STAGES)
    empty = barriers(STAGES)
    turn = barriers(2)
    come = barriers(2 * PIECES)
    free = barriers(PIECES)
    gl.warp_specialize(
        [
            (_add, (
                out, low, d_bias, bias_stride, normalise, class_weight, class_row, rows_of_classes, slots, length,
                chunk, most, vocab, hidden, programs, dz_tiles, x_tiles, factor_tiles, full, empty, turn, uppers, come,
                free, 0, BK, GROUP, STAGES, ROWS,
            )),
            (_add, (
                out, low, d_bias, bias_stride, normalise, class_weight, class_row, rows_of_classes, slots, length,
                chunk, most, vocab, hidden, programs, dz_tiles, x_tiles, factor_tiles, full, empty, turn, uppers, come,
                free, 1, BK, GROUP, STAGES, ROWS,
            )),
            (_load, (
                dz, x, factors, length, chunk, most, vocab, hidden, programs, dz_tiles, x_tiles, factor_tiles, full,
                empty, BK, GROUP, STAGES, ROWS,
            )),
            (_load_sums, (
                out, low, length, chunk, most, vocab, hidden, programs, uppers, come, free, GROUP, ROWS,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
