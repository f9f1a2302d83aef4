"""The product for the gradient of the weight as in ``..products``, by warpgroups that share a tile of 128x256.

Each has 64 rows of it. A larger tile reads less from L2, which is what limits a product of many rows: the card's power
does. The second warpgroup stays ``LAG`` steps behind, so that one multiplies while the other ends its half. The upper
bits of old sums come through the ring as two steps more, one for each warpgroup: where a slot has a tile of x it has
room for those of 64x256. Factors of rows are a third operand as in ``.products``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from ...logits import grouped
from ..schedule import begin, last_chunk
from .ring import (
    BLOCK,
    NARROW,
    add_product,
    add_products,
    after,
    barriers,
    expect_tiles,
    half,
    load_async,
    narrow_zeros,
    seen_as,
)
from .sums import PIECE, add_bias, add_piece, load_lower, load_pieces, sizes, slots_of

WIDTH = gl.constexpr(256)  # columns of a tile
LAG = gl.constexpr(3)  # steps
PIECES = gl.constexpr(4)  # of a warpgroup's half
# Rows to multiply: with fewer than two steps the first warpgroup could come two tiles ahead.
LEAST = gl.constexpr(65)


@gluon.jit
def _add_steps(
    dz_tiles, x_tiles, factor_tiles, acc, sums, full, empty, lead, before, slot, phase, steps, last_alone,
    WARPGROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """All steps of a product but the first; after the step ``last_alone`` the second warpgroup may begin."""
    for k in range(1, steps):
        mbarrier.wait(full.index(slot), phase)
        dz_tile = dz_tiles.index(2 * slot + WARPGROUP)
        if factor_tiles is None:
            acc = add_product(dz_tile, x_tiles.index(slot), acc, True, False, False)
        else:
            acc, sums = add_products(dz_tile, x_tiles.index(slot), factor_tiles.index(slot), acc, sums, True)
        mbarrier.arrive(empty.index(before))
        if WARPGROUP == 0:  # noqa: SIM102
            if k == last_alone:
                mbarrier.arrive(lead.index(0))
        before = slot
        slot, phase = after(slot, phase, STAGES)
    return acc, sums, before, slot, phase


@gluon.jit
def _begin(dz_tiles, x_tiles, factor_tiles, full, slot, phase, WARPGROUP: gl.constexpr):
    """The first step of a product: ``_multiply``'s results so far."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    mbarrier.wait(full.index(slot), phase)
    acc = gl.zeros([BLOCK // 2, WIDTH], gl.float32, layout)
    sums = acc
    dz_tile = dz_tiles.index(2 * slot + WARPGROUP)
    if factor_tiles is None:
        acc = add_product(dz_tile, x_tiles.index(slot), acc, False, False, False)
    else:
        sums = narrow_zeros(BLOCK // 2)
        acc, sums = add_products(dz_tile, x_tiles.index(slot), factor_tiles.index(slot), acc, sums, False)
    return acc, sums


@gluon.jit
def _multiply(
    dz_tiles, x_tiles, factor_tiles, acc, sums, full, empty, lead, slot, phase, steps, first_column,
    WARPGROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """(this warpgroup's half ``[64, 256]`` float32 of the next product, its other result, the next slot, its parity).

    What ``_begin`` has begun at ``slot``, ended. The other result is as ``multiply_both`` has it.
    """
    last_alone = gl.minimum(steps, LAG) - 1
    before = slot
    slot, phase = after(slot, phase, STAGES)
    rest = steps
    if factor_tiles is not None:
        # In two loops, as in ``multiply_both``.
        acc, sums, before, slot, phase = _add_steps(
            dz_tiles, x_tiles, factor_tiles, acc, sums, full, empty, lead, before, slot, phase,
            gl.where(first_column, steps, 1), last_alone, WARPGROUP, STAGES,
        )  # fmt: skip
        rest = gl.where(first_column, 1, steps)
    acc, sums, before, slot, phase = _add_steps(
        dz_tiles, x_tiles, None, acc, sums, full, empty, lead, before, slot, phase, rest, last_alone, WARPGROUP, STAGES
    )
    if factor_tiles is None:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    else:
        acc, sums = warpgroup_mma_wait(0, deps=(acc, sums))
    mbarrier.arrive(empty.index(before))
    return acc, sums, slot, phase


@gluon.jit
def _load(
    dz, x, out, low, factors, length, chunk, most, vocab, hidden, programs, dz_tiles, x_tiles, factor_tiles, uppers,
    full, empty, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BLOCK // 2
    start, stop, class_blocks, columns, tiles = sizes(length, chunk, most, vocab, hidden, LEAST, WIDTH, ROWS)
    slot = 0
    phase = 1  # every slot is empty at first
    for tile in range(gl.program_id(0), tiles, programs):
        class_block, column = grouped(tile, class_blocks, columns, GROUP)
        row = class_block * BLOCK
        col = column * WIDTH
        for k in range(start, stop, BK):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            expect_tiles(bar, factors, factor_tiles, slot, k, column, BK, BLOCK + WIDTH)
            load_async(dz, [k, row], bar, dz_tiles.index(2 * slot))
            load_async(x, [k, col], bar, x_tiles.index(slot))
            load_async(dz, [k, row + HALF], bar, dz_tiles.index(2 * slot + 1))
            slot, phase = after(slot, phase, STAGES)
        for second in gl.static_range(2):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            load_pieces(out, low, uppers, PIECES * slot, bar, row + second * HALF, col, chunk, PIECES)
            slot, phase = after(slot, phase, STAGES)


@gluon.jit
def _pass_over(full, empty, slot, phase, STAGES: gl.constexpr):
    """Leave a slot to the other warpgroup."""
    mbarrier.wait(full.index(slot), phase)
    mbarrier.arrive(empty.index(slot))
    return after(slot, phase, STAGES)


@gluon.jit
def _add(
    out, low, d_bias, normalise, class_weight, class_row, rows_of_classes, slots, length, chunk, most, vocab, hidden,
    programs, dz_tiles, x_tiles, factor_tiles, uppers, full, empty, lead, WARPGROUP: gl.constexpr,
    BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    start, stop, class_blocks, columns, tiles = sizes(length, chunk, most, vocab, hidden, LEAST, WIDTH, ROWS)
    is_last = chunk == last_chunk(gl.load(length), most)
    steps = gl.cdiv(stop - start, BK)
    slot = 0
    phase = 0
    round = 0
    for tile in range(gl.program_id(0), tiles, programs):
        if WARPGROUP == 1:
            mbarrier.wait(lead.index(0), round & 1)
        taken_factors = None if d_bias is None else factor_tiles
        acc, parts = _begin(dz_tiles, x_tiles, taken_factors, full, slot, phase, WARPGROUP)
        # What the sums need is looked up meanwhile.
        class_block, column = grouped(tile, class_blocks, columns, GROUP)
        row = class_block * BLOCK + WARPGROUP * (BLOCK // 2)
        col = column * WIDTH
        slot_of_class = slots_of(rows_of_classes, slots, row, chunk, vocab)
        lower = (
            load_lower(low, row, col, chunk, hidden),
            load_lower(low, row, col + PIECE, chunk, hidden),
            load_lower(low, row, col + 2 * PIECE, chunk, hidden),
            load_lower(low, row, col + 3 * PIECE, chunk, hidden),
        )
        acc, parts, slot, phase = _multiply(
            dz_tiles, x_tiles, taken_factors, acc, parts, full, empty, lead, slot, phase, steps, column == 0, WARPGROUP,
            STAGES,
        )  # fmt: skip
        if d_bias is not None:  # noqa: SIM102
            if column == 0:
                add_bias(d_bias, parts, normalise, row, vocab)
        if WARPGROUP == 1:
            slot, phase = _pass_over(full, empty, slot, phase, STAGES)
        mbarrier.wait(full.index(slot), phase)
        for i in gl.static_range(PIECES):
            add_piece(
                half(half(acc, i // 2 == 1), i % 2 == 1), out, low, uppers.index(PIECES * slot + i), lower[i],
                normalise, class_weight, class_row, rows_of_classes, slot_of_class, row, col + i * PIECE, chunk,
                is_last, vocab, hidden,
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
    dz,  # descriptor of [most, W] in blocks [BK, 64]
    x,  # descriptor of [most, D] in blocks [BK, 256]
    out,  # descriptor of [W, D] in 16 bits, in blocks [64, 64], out
    low,  # int8, as ``..products.lower_at`` has them, or None: where there is one chunk only
    factors,  # descriptor of [most, 16] in blocks [BK, 16]: the factor of each row in parts; or None
    d_bias,  # [W] float32, added to: the sums over the rows of dz times their factors; or None
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
    # A slot's tile of x and the upper bits of a warpgroup's sums take the same bytes.
    gl.static_assert(BK == PIECE)
    dz_tiles = gl.allocate_shared_memory(dz.dtype, [2 * STAGES, BK, BLOCK // 2], dz.layout)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BK, WIDTH], x.layout)
    factor_tiles = x_tiles  # which is not looked at
    if factors is not None:
        factor_tiles = gl.allocate_shared_memory(factors.dtype, [STAGES, BK, NARROW], factors.layout)
    uppers = seen_as(x_tiles, out, PIECES * STAGES)
    full = barriers(STAGES)
    empty = barriers(STAGES, 2)
    lead = barriers(1)
    gl.warp_specialize(
        [
            (_add, (
                out, low, d_bias, normalise, class_weight, class_row, rows_of_classes, slots, length, chunk, most,
                vocab, hidden, programs, dz_tiles, x_tiles, factor_tiles, uppers, full, empty, lead, 0, BK,
                GROUP, STAGES, ROWS,
            )),
            (_add, (
                out, low, d_bias, normalise, class_weight, class_row, rows_of_classes, slots, length, chunk, most,
                vocab, hidden, programs, dz_tiles, x_tiles, factor_tiles, uppers, full, empty, lead, 1, BK,
                GROUP, STAGES, ROWS,
            )),
            (_load, (
                dz, x, out, low, factors, length, chunk, most, vocab, hidden, programs, dz_tiles, x_tiles, factor_tiles,
                uppers, full, empty, BK, GROUP, STAGES, ROWS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
