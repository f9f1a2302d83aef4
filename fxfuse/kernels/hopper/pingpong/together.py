"""What products share in which two warpgroups share a tile, and each has half of its rows: 128x256 or 256x128.

A larger tile reads less from L2, which is what limits a product of many rows: the card's power does. The second
warpgroup stays ``LAG`` steps behind, so that one multiplies while the other ends its half. That hides as long an end
as ``LAG`` steps take. The barriers are those of ``.ring``, but ``empty`` waits for both, and in the place of ``turn``
there is ``lead``: the first warpgroup has gone ahead.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from .meeting import EVERY, meet
from .ring import add_product, add_products, after, barriers, expect_tiles, load_tile, narrow_zeros

WIDTH = gl.constexpr(256)  # columns of most tiles
LAG = gl.constexpr(3)  # steps
# Numbers to sum: with one step the second warpgroup is never let in, and with fewer than three steps, counting those in
# which a slot has something else than operands, the first could come two tiles ahead of it.
LEAST = gl.constexpr(65)


@gluon.jit
def ring_of_shared(a, b, STAGES: gl.constexpr):
    """(tiles of two operands, of which warpgroups have halves of the first; ``full``, ``empty``, ``lead``)."""
    a_tiles = gl.allocate_shared_memory(a.dtype, [2 * STAGES, a.block_shape[0], a.block_shape[1]], a.layout)
    b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES, b.block_shape[0], b.block_shape[1]], b.layout)
    return a_tiles, b_tiles, barriers(STAGES), barriers(STAGES, 2), barriers(1)


@gluon.jit
def load_product(
    a, b, c, a_tiles, b_tiles, c_tiles, full, empty, slot, phase, misses, row, column, start, stop, c_start, c_stop,
    counter, expected, coming, A_ALONG: gl.constexpr, B_ALONG: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the operands of a tile as ``load_tiles`` does, and meet: ``expected`` and ``coming`` are of ``arrivals``.

    The third is loaded from ``c_start`` to ``c_stop`` of what is summed over.
    Returned are the next slot, its parity, and the misses so far.
    """
    ROWS: gl.constexpr = a_tiles.shape[1] if A_ALONG else a_tiles.shape[2]
    COLUMNS: gl.constexpr = b_tiles.shape[1] if B_ALONG else b_tiles.shape[2]
    for k in range(start, stop, BK):
        if (k - start) % (BK * EVERY) == 0:
            expected += coming
            misses = meet(counter, expected, misses)
        mbarrier.wait(empty.index(slot), phase)
        bar = full.index(slot)
        expect_tiles(bar, c, c_tiles, slot, k, c_start, c_stop, BK, 2 * ROWS + COLUMNS)
        load_tile(a, row, k, bar, a_tiles.index(2 * slot), A_ALONG)
        load_tile(b, column * COLUMNS, k, bar, b_tiles.index(slot), B_ALONG)
        load_tile(a, row + ROWS, k, bar, a_tiles.index(2 * slot + 1), A_ALONG)
        slot, phase = after(slot, phase, STAGES)
    return slot, phase, misses


@gluon.jit
def begin_product(
    a_tiles, b_tiles, c_tiles, full, slot, phase, A_ALONG: gl.constexpr, B_ALONG: gl.constexpr,
    WARPGROUP: gl.constexpr,
):  # fmt: skip
    """The first step of a product: ``end_product``'s results so far. What comes next is done meanwhile."""
    ROWS: gl.constexpr = a_tiles.shape[1] if A_ALONG else a_tiles.shape[2]
    COLUMNS: gl.constexpr = b_tiles.shape[1] if B_ALONG else b_tiles.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    mbarrier.wait(full.index(slot), phase)
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    sums = acc
    a_tile = a_tiles.index(2 * slot + WARPGROUP)
    if c_tiles is None:
        acc = add_product(a_tile, b_tiles.index(slot), acc, False, A_ALONG, B_ALONG)
    else:
        sums = narrow_zeros(ROWS)
        acc, sums = add_products(a_tile, b_tiles.index(slot), c_tiles.index(slot), acc, sums, False, False)
    return acc, sums


@gluon.jit
def _add_steps(
    a_tiles, b_tiles, c_tiles, acc, sums, full, empty, lead, before, slot, phase, first, last, narrow_start, last_alone,
    A_ALONG: gl.constexpr, B_ALONG: gl.constexpr, WARPGROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As in ``.ring``; after the step ``last_alone`` the second warpgroup may begin."""
    for k in range(first, last):
        mbarrier.wait(full.index(slot), phase)
        a_tile = a_tiles.index(2 * slot + WARPGROUP)
        if c_tiles is None:
            acc = add_product(a_tile, b_tiles.index(slot), acc, True, A_ALONG, B_ALONG)
        else:
            acc, sums = add_products(
                a_tile, b_tiles.index(slot), c_tiles.index(slot), acc, sums, True, k > narrow_start
            )
        mbarrier.arrive(empty.index(before))
        if WARPGROUP == 0:  # noqa: SIM102
            if k == last_alone:
                mbarrier.arrive(lead.index(0))
        before = slot
        slot, phase = after(slot, phase, STAGES)
    if c_tiles is not None:
        acc, sums = warpgroup_mma_wait(0, deps=(acc, sums))
    return acc, sums, before, slot, phase


@gluon.jit
def end_product(
    a_tiles, b_tiles, c_tiles, acc, sums, full, empty, lead, slot, phase, steps, narrow_start, narrow_stop,
    A_ALONG: gl.constexpr, B_ALONG: gl.constexpr, WARPGROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """(this warpgroup's half, float32, of a product, its other result, the next slot, its parity).

    The product is the one that ``begin_product`` began at ``slot``. The other result is as ``multiply_both`` has it.
    """
    last_alone = gl.minimum(steps, LAG) - 1
    before = slot
    slot, phase = after(slot, phase, STAGES)
    done = 1
    if c_tiles is not None:
        # In loops one after the other, as in ``multiply_both``.
        first = gl.maximum(narrow_start, 1)
        done = gl.maximum(narrow_stop, 1)
        acc, sums, before, slot, phase = _add_steps(
            a_tiles, b_tiles, None, acc, sums, full, empty, lead, before, slot, phase, 1, first, narrow_start,
            last_alone, A_ALONG, B_ALONG, WARPGROUP, STAGES,
        )  # fmt: skip
        acc, sums, before, slot, phase = _add_steps(
            a_tiles, b_tiles, c_tiles, acc, sums, full, empty, lead, before, slot, phase, first, done, narrow_start,
            last_alone, A_ALONG, B_ALONG, WARPGROUP, STAGES,
        )  # fmt: skip
    acc, sums, before, slot, phase = _add_steps(
        a_tiles, b_tiles, None, acc, sums, full, empty, lead, before, slot, phase, done, steps, narrow_start,
        last_alone, A_ALONG, B_ALONG, WARPGROUP, STAGES,
    )  # fmt: skip
    if c_tiles is None:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    else:
        acc, sums = warpgroup_mma_wait(0, deps=(acc, sums))
    mbarrier.arrive(empty.index(before))
    return acc, sums, slot, phase
