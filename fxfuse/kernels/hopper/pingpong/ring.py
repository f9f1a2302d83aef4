"""What warp-specialised products share: a ring of operand tiles in shared memory, and two warpgroups that take turns.

One warp loads tiles of both operands through the tensor-memory accelerator into the slots of a ring. Two warpgroups
have a 128x128 tile of the result each and multiply one after the other; while one does, the other ends its tile: it
makes exponentials, stores. So epilogues cost no time as long as they are shorter than products (the schedule that
CUTLASS calls ping-pong). Three kinds of barriers keep the order, each with the parity of how often it was passed:

* ``full[slot]``: the tiles that were asked for have come. A warpgroup sees the steps of every other tile only.
* ``empty[slot]``: the products that read the slot have ended.
* ``turn[g]``: warpgroup g may start to multiply: the other has issued all products of its tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ... import tiles
from ...logits import grouped

# Later versions of Triton have other names for these.
load_async = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_async = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
BLOCK = gl.constexpr(128)  # rows and columns of a tile
NARROW = gl.constexpr(tiles.NARROW)  # columns of a third operand


if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def seen_as(tiles, descriptor, COUNT: gl.constexpr):
        """The same shared memory as so many blocks of a descriptor."""
        return tiles.reinterpret(
            descriptor.dtype, [COUNT, descriptor.block_shape[0], descriptor.block_shape[1]], descriptor.layout
        )

else:

    @gluon.jit
    def seen_as(tiles, descriptor, COUNT: gl.constexpr):
        """The same shared memory as so many blocks of a descriptor."""
        return tiles._reinterpret(
            descriptor.dtype, [COUNT, descriptor.block_shape[0], descriptor.block_shape[1]], descriptor.layout
        )


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """So many barriers, each for so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    fence_async_shared()
    return made


@gluon.jit
def ring_of_logits(x, w, BK: gl.constexpr, STAGES: gl.constexpr):
    """What products of hidden states and weights share: (tiles of each, ``full``, ``empty``, ``turn``)."""
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK, BK], x.layout)
    w_tiles = gl.allocate_shared_memory(w.dtype, [STAGES, w.block_shape[0], w.block_shape[1]], w.layout)
    return x_tiles, w_tiles, barriers(STAGES), barriers(STAGES), barriers(2)


@gluon.jit
def narrow_zeros(ROWS: gl.constexpr):
    """What a product with a third operand is added up in."""
    return gl.zeros([ROWS, NARROW], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NARROW, 16]))


@gluon.jit
def half(acc, SECOND: gl.constexpr):
    """One half of the columns of an accumulator: the same registers."""
    rows: gl.constexpr = acc.shape[0]
    width: gl.constexpr = acc.shape[1] // 2
    first, second = acc.reshape([rows, 2, width]).permute([0, 2, 1]).split()
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    return gl.convert_layout(second if SECOND else first, layout, assert_trivial=True)


@gluon.jit
def half_of_rows(acc, SECOND: gl.constexpr):
    """One half of the rows of an accumulator: the same registers."""
    rows: gl.constexpr = acc.shape[0] // 2
    width: gl.constexpr = acc.shape[1]
    first, second = acc.reshape([2, rows, width]).permute([1, 2, 0]).split()
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    return gl.convert_layout(second if SECOND else first, layout, assert_trivial=True)


@gluon.jit
def after(slot, phase, STAGES: gl.constexpr):
    """The slot after ``slot``, and the parity of its barriers there."""
    wrapped = (slot == STAGES - 1).to(gl.int32)
    return (slot + 1) * (1 - wrapped), phase ^ wrapped


@gluon.jit
def add_product(a, b, acc, AGAIN: gl.constexpr, A_ALONG: gl.constexpr, B_ALONG: gl.constexpr):
    """Begin to add the product of two tiles to ``acc``, or to begin it; the product before has ended after it."""
    if not A_ALONG:
        a = a.permute([1, 0])
    if B_ALONG:
        b = b.permute([1, 0])
    acc = warpgroup_mma(a, b, acc, use_acc=AGAIN, is_async=True)
    return warpgroup_mma_wait(1, deps=(acc,))


@gluon.jit
def add_products(a, b, c, acc, sums, AGAIN: gl.constexpr, sums_again):
    """The same for two products of ``a``, with ``b`` and the narrow ``c``, all of them summed over the rows."""
    a = a.permute([1, 0])
    acc = warpgroup_mma(a, b, acc, use_acc=AGAIN, is_async=True)
    sums = warpgroup_mma(a, c, sums, use_acc=sums_again, is_async=True)
    return warpgroup_mma_wait(2, deps=(acc, sums))


@gluon.jit
def load_tile(operand, row, k, bar, tile, ALONG: gl.constexpr):
    """Load the tile of an operand from ``row`` and, in the summed dimension, ``k`` on; ALONG as in ``load_tiles``."""
    if ALONG:
        load_async(operand, [row, k], bar, tile)
    else:
        load_async(operand, [k, row], bar, tile)


@gluon.jit
def load_tiles(
    a, b, c, a_tiles, b_tiles, c_tiles, full, empty, first, last, stride, row_blocks, columns, start, stop,
    A_ALONG: gl.constexpr, B_ALONG: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the operands of the tiles ``first, first + stride, …`` below ``last``, ``BK`` at a time from start to stop.

    Tiles are those of ``grouped``; without a GROUP, those of the one row block ``row_blocks``. A_ALONG and B_ALONG say
    that an operand's descriptor has the summed dimension last. With a descriptor ``c`` there is a third operand,
    ``NARROW`` columns wide, in the steps of ``share``.
    """
    steps = gl.cdiv(stop - start, BK)
    slot = 0
    phase = 1  # every slot is empty at first
    for tile in range(first, last, stride):
        if GROUP > 0:
            row_block, column = grouped(tile, row_blocks, columns, GROUP)
        else:
            row_block, column = row_blocks, tile
        row = row_block * BLOCK
        col = column * BLOCK
        narrow_start, narrow_stop = share(column, columns, steps)
        for k in range(start, stop, BK):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            expect_tiles(bar, c, c_tiles, slot, k, start + narrow_start * BK, start + narrow_stop * BK, BK, 2 * BLOCK)
            load_tile(a, row, k, bar, a_tiles.index(slot), A_ALONG)
            load_tile(b, col, k, bar, b_tiles.index(slot), B_ALONG)
            slot, phase = after(slot, phase, STAGES)


@gluon.jit
def share(column, columns, steps):
    """The steps (from and to) in which a tile of this column has a third operand: each column has a part of them.

    All alike, for where one tile takes longer the others of its round wait for it, in ``.meeting`` too.
    """
    return column * steps // columns, (column + 1) * steps // columns


@gluon.jit
def expect_tiles(bar, c, c_tiles, slot, k, c_start, c_stop, BK: gl.constexpr, WIDTH: gl.constexpr):
    """Let ``bar`` wait for operands that are so wide together, and load the third if ``k`` is where it is wanted."""
    if c is None:
        mbarrier.expect(bar, 2 * BK * WIDTH)
    else:
        if (k >= c_start) & (k < c_stop):
            mbarrier.expect(bar, 2 * BK * (WIDTH + NARROW))
            load_async(c, [k, 0], bar, c_tiles.index(slot))
        else:
            mbarrier.expect(bar, 2 * BK * WIDTH)


@gluon.jit
def _add_steps(
    a_tiles, b_tiles, c_tiles, acc, sums, full, empty, before, slot, phase, first, last, narrow_start,
    A_ALONG: gl.constexpr, B_ALONG: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The steps from ``first`` to ``last`` of a product, none of them its first.

    Those of ``sums`` begin at ``narrow_start``, and have ended afterwards; without ``c_tiles`` they stay as they are.
    """
    for k in range(first, last):
        mbarrier.wait(full.index(slot), phase)
        if c_tiles is None:
            acc = add_product(a_tiles.index(slot), b_tiles.index(slot), acc, True, A_ALONG, B_ALONG)
        else:
            acc, sums = add_products(
                a_tiles.index(slot), b_tiles.index(slot), c_tiles.index(slot), acc, sums, True, k > narrow_start
            )
        mbarrier.arrive(empty.index(before))
        before = slot
        slot, phase = after(slot, phase, STAGES)
    if c_tiles is not None:
        acc, sums = warpgroup_mma_wait(0, deps=(acc, sums))
    return acc, sums, before, slot, phase


@gluon.jit
def multiply(
    a_tiles, b_tiles, full, empty, turn, round, at, steps, A_ALONG: gl.constexpr, B_ALONG: gl.constexpr,
    WARPGROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """This warpgroup's next product ``[128, 128]`` float32, of the ``steps`` of the ring from the ``at``-th on.

    ``round`` counts the warpgroup's own products.
    """
    acc, _sums = multiply_both(
        a_tiles, b_tiles, None, full, empty, turn, round, at, steps, 0, 0, A_ALONG, B_ALONG, WARPGROUP, STAGES
    )
    return acc


@gluon.jit
def multiply_both(
    a_tiles, b_tiles, c_tiles, full, empty, turn, round, at, steps, narrow_start, narrow_stop, A_ALONG: gl.constexpr,
    B_ALONG: gl.constexpr, WARPGROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The same, and with ``c_tiles`` the product ``[128, NARROW]`` with the third operand.

    That is of the steps from ``narrow_start`` to ``narrow_stop``; where these are none, it may be anything.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    slot = at % STAGES
    phase = (at // STAGES) & 1
    # Nobody has to let the first product of all start.
    mbarrier.wait(turn.index(WARPGROUP), (round & 1) ^ (1 - WARPGROUP))
    # The first step by itself: a condition inside the loop would cost it several percent.
    mbarrier.wait(full.index(slot), phase)
    acc = gl.zeros([BLOCK, BLOCK], gl.float32, layout)
    sums = acc
    before = slot
    if c_tiles is None:
        acc = add_product(a_tiles.index(slot), b_tiles.index(slot), acc, False, A_ALONG, B_ALONG)
    else:
        sums = narrow_zeros(BLOCK)
        acc, sums = add_products(a_tiles.index(slot), b_tiles.index(slot), c_tiles.index(slot), acc, sums, False, False)
    slot, phase = after(slot, phase, STAGES)
    done = 1
    if c_tiles is not None:
        # In loops one after the other: of two branches that multiply, ptxas (12.8) lets one take the other's
        # descriptors of tiles, which it has not made.
        first = gl.maximum(narrow_start, 1)
        done = gl.maximum(narrow_stop, 1)
        acc, sums, before, slot, phase = _add_steps(
            a_tiles, b_tiles, None, acc, sums, full, empty, before, slot, phase, 1, first, narrow_start, A_ALONG,
            B_ALONG, STAGES,
        )  # fmt: skip
        acc, sums, before, slot, phase = _add_steps(
            a_tiles, b_tiles, c_tiles, acc, sums, full, empty, before, slot, phase, first, done, narrow_start, A_ALONG,
            B_ALONG, STAGES,
        )  # fmt: skip
    acc, sums, before, slot, phase = _add_steps(
        a_tiles, b_tiles, None, acc, sums, full, empty, before, slot, phase, done, steps, narrow_start, A_ALONG,
        B_ALONG, STAGES,
    )  # fmt: skip
    mbarrier.arrive(turn.index(1 - WARPGROUP))
    if c_tiles is None:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    else:
        acc, sums = warpgroup_mma_wait(0, deps=(acc, sums))
    mbarrier.arrive(empty.index(before))
    return acc, sums
