"""What products share in which two warpgroups lie side by side: each has 128 of a tile's 256 columns, and all its rows.

A tile has as many rows as fit the registers of two warpgroups, 192, in parts of 64 that have accumulators of their own.
So it asks L2 for two ninths less than one of 128x256. The barriers are ``full`` and ``empty`` of ``.ring``, but
``empty`` waits for both warpgroups.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .meeting import EVERY, meet
from .ring import after, barriers, load_tile

PART = gl.constexpr(64)  # rows of an accumulator
WIDTH = gl.constexpr(128)  # columns of a warpgroup
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@gluon.jit
def nothing():
    """A tuple to put one thing for each part in."""
    return ()


@gluon.jit
def ring_beside(x, w, PARTS: gl.constexpr, STAGES: gl.constexpr):
    """(tiles of hidden states in parts, tiles of weights by warpgroups, ``full``, ``empty``)."""
    x_tiles = gl.allocate_shared_memory(x.dtype, [PARTS * STAGES, x.block_shape[0], x.block_shape[1]], x.layout)
    w_tiles = gl.allocate_shared_memory(w.dtype, [2 * STAGES, w.block_shape[0], w.block_shape[1]], w.layout)
    return x_tiles, w_tiles, barriers(STAGES), barriers(STAGES, 2)


@gluon.jit
def load_product(
    x, w, x_tiles, w_tiles, full, empty, slot, phase, misses, row, column, hidden, counter, expected, coming,
    ALONG: gl.constexpr, PARTS: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the operands of a tile, and meet, as in ``.together``.

    ALONG says that the weight's descriptor has the hidden units last.
    """
    for k in range(0, hidden, BK):
        if k % (BK * EVERY) == 0:
            expected += coming
            misses = meet(counter, expected, misses)
        mbarrier.wait(empty.index(slot), phase)
        bar = full.index(slot)
        mbarrier.expect(bar, 2 * BK * (PARTS * PART + 2 * WIDTH))
        for i in gl.static_range(PARTS):
            load_tile(x, row + i * PART, k, bar, x_tiles.index(PARTS * slot + i), True)
        for i in gl.static_range(2):
            load_tile(w, (2 * column + i) * WIDTH, k, bar, w_tiles.index(2 * slot + i), ALONG)
        slot, phase = after(slot, phase, STAGES)
    return slot, phase, misses


@gluon.jit
def _add_products(x_tiles, w, acc, slot, AGAIN: gl.constexpr, ALONG: gl.constexpr, PARTS: gl.constexpr):
    """Begin to add a slot's products to ``acc``, or to begin it; those of the slot before have ended after it."""
    if ALONG:
        w = w.permute([1, 0])
    added = nothing()
    for i in gl.static_range(PARTS):
        added += (warpgroup_mma(x_tiles.index(PARTS * slot + i), w, acc[i], use_acc=AGAIN, is_async=True),)
    return warpgroup_mma_wait(PARTS, deps=added)


@gluon.jit
def multiply(
    x_tiles, w_tiles, full, empty, slot, phase, steps, ALONG: gl.constexpr, WARPGROUP: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """(this warpgroup's half of a product, in parts ``[64, 128]`` float32; the next slot; its parity)."""
    zeros = gl.zeros([PART, WIDTH], gl.float32, LAYOUT)
    acc = nothing()
    for _ in gl.static_range(PARTS):
        acc += (zeros,)
    mbarrier.wait(full.index(slot), phase)
    acc = _add_products(x_tiles, w_tiles.index(2 * slot + WARPGROUP), acc, slot, False, ALONG, PARTS)
    before = slot
    slot, phase = after(slot, phase, STAGES)
    for _ in range(1, steps):
        mbarrier.wait(full.index(slot), phase)
        acc = _add_products(x_tiles, w_tiles.index(2 * slot + WARPGROUP), acc, slot, True, ALONG, PARTS)
        mbarrier.arrive(empty.index(before))
        before = slot
        slot, phase = after(slot, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=acc)
    mbarrier.arrive(empty.index(before))
    return acc, slot, phase
