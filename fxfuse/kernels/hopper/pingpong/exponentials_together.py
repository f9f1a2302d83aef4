"""Scaled exponentials as in ``..exponentials``, by warpgroups that share a tile, see ``.together``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...exponential import LOG2E
from ...logits import grouped
from ..exponentials import exponentials_of
from ..schedule import begin, chunk_bounds
from ..stats import class_sum_of
from .exponentials import store_half
from .meeting import arrivals
from .ring import BLOCK, half
from .together import WIDTH, begin_product, end_product, load_product, ring_of_shared

PARTS = gl.constexpr(4)  # of a warpgroup's half, 64 columns each, which are stored one after the other
PART = gl.constexpr(64)


@gluon.jit
def _load(
    x, w, length, chunk, most, vocab, hidden, programs, counter, x_tiles, w_tiles, full, empty,
    TRANSPOSED: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    _, rows = chunk_bounds(gl.load(length), chunk, most, ROWS)
    row_blocks = gl.cdiv(rows, BLOCK)
    columns = gl.cdiv(vocab, WIDTH)
    slot = 0
    phase = 1  # every slot is empty at first
    misses = 0
    for tile in range(gl.program_id(0), row_blocks * columns, programs):
        row_block, column = grouped(tile, row_blocks, columns, GROUP)
        expected, coming = arrivals(tile, row_blocks * columns, programs, gl.cdiv(hidden, BK))
        slot, phase, misses = load_product(
            x, w, None, x_tiles, w_tiles, None, full, empty, slot, phase, misses, row_block * BLOCK, column, 0, hidden,
            0, 0, counter, expected, coming, True, not TRANSPOSED, BK, STAGES,
        )  # fmt: skip


@gluon.jit
def _make(
    e, bias, offset, length, class_weight, part_sum, part_class_sum, scale, chunk, most, vocab, hidden, programs,
    x_tiles, w_tiles, full, empty, lead, staged, WARPGROUP: gl.constexpr, SCALED: gl.constexpr,
    TRANSFORM: gl.constexpr, TRANSPOSED: gl.constexpr, EVEN_VOCAB: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    _, rows = chunk_bounds(gl.load(length), chunk, most, ROWS)
    row_blocks = gl.cdiv(rows, BLOCK)
    columns = gl.cdiv(vocab, WIDTH)
    HALF: gl.constexpr = BLOCK // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    steps = gl.cdiv(hidden, BK)
    slot = 0
    phase = 0
    round = 0
    for tile in range(gl.program_id(0), row_blocks * columns, programs):
        if WARPGROUP == 1:
            mbarrier.wait(lead.index(0), round & 1)
        z, nothing = begin_product(x_tiles, w_tiles, None, full, slot, phase, True, not TRANSPOSED, WARPGROUP)
        # What the end needs is looked up meanwhile.
        row_block, column = grouped(tile, row_blocks, columns, GROUP)
        first_row = row_block * BLOCK + WARPGROUP * HALF
        row = first_row + gl.arange(0, HALF, layout=by_row)
        shift = gl.load(offset + row) * LOG2E
        z, nothing, slot, phase = end_product(
            x_tiles, w_tiles, None, z, nothing, full, empty, lead, slot, phase, steps, 0, 0, True, not TRANSPOSED,
            WARPGROUP, STAGES,
        )  # fmt: skip
        round += 1  # noqa: SIM113
        s = gl.zeros([HALF], gl.float32, by_row)
        class_sum = s
        for i in gl.static_range(PARTS):
            tile_col = column * WIDTH + i * PART
            col = tile_col + gl.arange(0, PART, layout=gl.SliceLayout(0, layout))
            p, weighted, of_part = exponentials_of(
                half(half(z, i // 2 == 1), i % 2 == 1), bias, col, scale, shift, vocab, SCALED, TRANSFORM, EVEN_VOCAB
            )
            s += gl.sum(p, 1)
            if part_class_sum is not None:
                class_sum += class_sum_of(of_part, class_weight, col, vocab, EVEN_VOCAB)
            store_half(e, weighted, staged.index(2 * WARPGROUP + i % 2), first_row, tile_col)
        at = column.to(gl.int64) * most + row
        gl.store(part_sum + at, s)
        if part_class_sum is not None:
            gl.store(part_class_sum + at, class_sum)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["chunk", "most", "programs"])
def exponentials_together_kernel(
    x,  # descriptor of [most, D] in blocks [64, BK]
    w,  # descriptor of [V, D] in blocks [256, BK], or of [D, V] in [BK, 256] if TRANSPOSED
    e,  # descriptor of [most, V] in blocks [64, 64], out
    bias,
    offset,
    length,
    class_weight,
    part_sum,  # [tiles of V, most] float32, out
    part_class_sum,  # the same for the sums of logits, or None
    scale,
    chunk,
    most,
    vocab,
    hidden,
    programs,
    counter,  # [1] int32, zero; for ``.meeting``
    SCALED: gl.constexpr,
    TRANSFORM: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    EVEN_VOCAB: gl.constexpr,
    BK: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    begin(PDL)
    x_tiles, w_tiles, full, empty, lead = ring_of_shared(x, w, STAGES)
    staged = gl.allocate_shared_memory(e.dtype, [4, BLOCK // 2, PART], e.layout)
    gl.warp_specialize(
        [
            (_make, (
                e, bias, offset, length, class_weight, part_sum, part_class_sum, scale, chunk, most, vocab, hidden,
                programs, x_tiles, w_tiles, full, empty, lead, staged, 0, SCALED, TRANSFORM, TRANSPOSED, EVEN_VOCAB,
                BK, GROUP, STAGES, ROWS,
            )),
            (_make, (
                e, bias, offset, length, class_weight, part_sum, part_class_sum, scale, chunk, most, vocab, hidden,
                programs, x_tiles, w_tiles, full, empty, lead, staged, 1, SCALED, TRANSFORM, TRANSPOSED, EVEN_VOCAB,
                BK, GROUP, STAGES, ROWS,
            )),
            (_load, (
                x, w, length, chunk, most, vocab, hidden, programs, counter, x_tiles, w_tiles, full, empty, TRANSPOSED,
                BK, GROUP, STAGES, ROWS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
