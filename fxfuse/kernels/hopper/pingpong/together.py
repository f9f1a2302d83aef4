"""The product for the gradient of the weight as in ``..products``, by warpgroups that share a tile of 128x256.

Each has 64 rows of it. A larger tile reads less from L2, which is what limits a product of many rows: the card's power
does. The second warpgroup stays ``LAG`` steps behind, so that one multiplies while the other ends its half. The old
sums come through the ring as two steps more, one for each warpgroup: a slot has room for its 64x256 sums.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from ...logits import grouped
from .ring import BLOCK, add_product, after, barriers, half, load_async, seen_as
from .sums import PIECE, add_piece, load_pieces, sizes, slots_of

WIDTH = gl.constexpr(256)  # columns of a tile
LAG = gl.constexpr(3)  # steps
PIECES = gl.constexpr(4)  # of a warpgroup's half
# Rows to multiply: with fewer than two steps the first warpgroup could come two tiles ahead.
LEAST = gl.constexpr(65)


@gluon.jit
def _multiply(
    dz_tiles, x_tiles, full, empty, lead, slot, phase, steps, WARPGROUP: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """This warpgroup's half ``[64, 256]`` float32 of the next product, and the slot after it with its parity."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    starts = gl.minimum(steps, LAG) - 1  # the step after which the second warpgroup may begin
    mbarrier.wait(full.index(slot), phase)
    acc = gl.zeros([BLOCK // 2, WIDTH], gl.float32, layout)
    acc = add_product(dz_tiles.index(2 * slot + WARPGROUP), x_tiles.index(slot), acc, False, False, False)
    before = slot
    slot, phase = after(slot, phase, STAGES)
    for k in range(1, steps):
        mbarrier.wait(full.index(slot), phase)
        acc = add_product(dz_tiles.index(2 * slot + WARPGROUP), x_tiles.index(slot), acc, True, False, False)
        mbarrier.arrive(empty.index(before))
        if WARPGROUP == 0:  # noqa: SIM102
            if k == starts:
                mbarrier.arrive(lead.index(0))
        before = slot
        slot, phase = after(slot, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(before))
    return acc, slot, phase


@gluon.jit
def _load(
    dz, x, out, low, length, chunk, most, vocab, hidden, programs, dz_tiles, x_tiles, uppers, lowers, full, empty,
    BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BLOCK // 2
    _, terms, class_blocks, columns, tiles = sizes(length, chunk, most, vocab, hidden, LEAST, WIDTH, ROWS)
    slot = 0
    phase = 1  # every slot is empty at first
    for tile in range(gl.program_id(0), tiles, programs):
        class_block, column = grouped(tile, class_blocks, columns, GROUP)
        row = class_block * BLOCK
        col = column * WIDTH
        for k in range(0, terms, BK):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, 2 * BK * (BLOCK + WIDTH))
            load_async(dz, [k, row], bar, dz_tiles.index(2 * slot))
            load_async(x, [k, col], bar, x_tiles.index(slot))
            load_async(dz, [k, row + HALF], bar, dz_tiles.index(2 * slot + 1))
            slot, phase = after(slot, phase, STAGES)
        for second in gl.static_range(2):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            load_pieces(out, low, uppers, lowers, PIECES * slot, bar, row + second * HALF, col, chunk, PIECES)
            slot, phase = after(slot, phase, STAGES)


@gluon.jit
def _pass_over(full, empty, slot, phase, STAGES: gl.constexpr):
    """Leave a slot to the other warpgroup."""
    mbarrier.wait(full.index(slot), phase)
    mbarrier.arrive(empty.index(slot))
    return after(slot, phase, STAGES)


@gluon.jit
def _add(
    out, low, normalise, class_weight, class_row, rows_of_classes, slots, length, chunk, most, vocab, hidden, programs,
    dz_tiles, x_tiles, uppers, lowers, full, empty, lead, WARPGROUP: gl.constexpr, BK: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    rows, terms, class_blocks, columns, tiles = sizes(length, chunk, most, vocab, hidden, LEAST, WIDTH, ROWS)
    steps = gl.cdiv(terms, BK)
    slot = 0
    phase = 0
    round = 0
    for tile in range(gl.program_id(0), tiles, programs):
        class_block, column = grouped(tile, class_blocks, columns, GROUP)
        row = class_block * BLOCK + WARPGROUP * (BLOCK // 2)
        slot_of_class = slots_of(rows_of_classes, slots, row, chunk, most, vocab)
        if WARPGROUP == 1:
            mbarrier.wait(lead.index(0), round & 1)
        acc, slot, phase = _multiply(dz_tiles, x_tiles, full, empty, lead, slot, phase, steps, WARPGROUP, STAGES)
        if WARPGROUP == 1:
            slot, phase = _pass_over(full, empty, slot, phase, STAGES)
        mbarrier.wait(full.index(slot), phase)
        for i in gl.static_range(PIECES):
            at = PIECES * slot + i
            add_piece(
                half(half(acc, i // 2 == 1), i % 2 == 1), out, low, uppers.index(at), lowers.index(at), normalise,
                class_weight, class_row, rows_of_classes, slot_of_class, rows, row, column * WIDTH + i * PIECE, length,
                chunk, most, vocab, hidden,
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
    low,  # descriptor of [W, D] int8 in the same blocks, or None: where there is one chunk only
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
    # A slot's operands and its sums take the same bytes.
    gl.static_assert(BK == PIECE)
    dz_tiles = gl.allocate_shared_memory(dz.dtype, [2 * STAGES, BK, BLOCK // 2], dz.layout)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BK, WIDTH], x.layout)
    uppers = seen_as(x_tiles, out, PIECES * STAGES)
    lowers = uppers  # which is not looked at
    if low is not None:
        lowers = seen_as(dz_tiles, low, PIECES * STAGES)
    full = barriers(STAGES)
    empty = barriers(STAGES, 2)
    lead = barriers(1)
    gl.warp_specialize(
        [
            (_add, (
                out, low, normalise, class_weight, class_row, rows_of_classes, slots, length, chunk, most, vocab,
                hidden, programs, dz_tiles, x_tiles, uppers, lowers, full, empty, lead, 0, BK, GROUP, STAGES, ROWS,
            )),
            (_add, (
                out, low, normalise, class_weight, class_row, rows_of_classes, slots, length, chunk, most, vocab,
                hidden, programs, dz_tiles, x_tiles, uppers, lowers, full, empty, lead, 1, BK, GROUP, STAGES, ROWS,
            )),
            (_load, (
                dz, x, out, low, length, chunk, most, vocab, hidden, programs, dz_tiles, x_tiles, uppers, lowers, full,
                empty, BK, GROUP, STAGES, ROWS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
