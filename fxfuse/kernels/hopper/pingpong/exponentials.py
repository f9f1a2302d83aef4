"""Scaled exponentials as in ``..exponentials``, by warpgroups that take turns."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ...exponential import LOG2E
from ...logits import grouped
from ..exponentials import exponentials_of
from ..schedule import begin, chunk_bounds
from ..stats import class_sum_of
from .ring import BLOCK, half, load_tiles, multiply, ring_of_logits, store_async


@gluon.jit
def load_blocks(
    x, w, length, chunk, most, vocab, hidden, programs, x_tiles, w_tiles, full, empty, TRANSPOSED: gl.constexpr,
    BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Load the operands of every tile of a chunk's logits."""
    _, rows = chunk_bounds(gl.load(length), chunk, most, ROWS)
    row_blocks = gl.cdiv(rows, BLOCK)
    columns = gl.cdiv(vocab, BLOCK)
    load_tiles(
        x, w, None, x_tiles, w_tiles, None, full, empty, gl.program_id(0), row_blocks * columns, programs, row_blocks,
        columns, 0, hidden, True, not TRANSPOSED, BK, GROUP, STAGES,
    )  # fmt: skip


@gluon.jit
def store_half(out, value, buffer, row, col):
    """Store half a tile through one of a warpgroup's two buffers in turn."""
    tma.store_wait(1)  # the store before the last has read this buffer
    buffer.store(value.to(out.dtype))
    fence_async_shared()
    store_async(out, [row, col], buffer)


@gluon.jit
def _make(
    e, bias, offset, length, class_weight, part_sum, part_class_sum, scale, chunk, most, vocab, hidden, programs,
    x_tiles, w_tiles, full, empty, turn, staged, WARPGROUP: gl.constexpr, SCALED: gl.constexpr,
    TRANSFORM: gl.constexpr, TRANSPOSED: gl.constexpr, EVEN_VOCAB: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    _, rows = chunk_bounds(gl.load(length), chunk, most, ROWS)
    row_blocks = gl.cdiv(rows, BLOCK)
    columns = gl.cdiv(vocab, BLOCK)
    HALF: gl.constexpr = BLOCK // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    steps = gl.cdiv(hidden, BK)
    round = 0
    for tile in range(gl.program_id(0) + WARPGROUP * programs, row_blocks * columns, 2 * programs):
        row_block, column = grouped(tile, row_blocks, columns, GROUP)
        row = row_block * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
        shift = gl.load(offset + row) * LOG2E
        z = multiply(
            x_tiles, w_tiles, full, empty, turn, round, (2 * round + WARPGROUP) * steps, steps, True, not TRANSPOSED,
            WARPGROUP, STAGES,
        )  # fmt: skip
        round += 1  # noqa: SIM113
        s = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, layout))
        class_sum = s
        for i in gl.static_range(2):
            tile_col = column * BLOCK + i * HALF
            col = tile_col + gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
            p, weighted, of_part = exponentials_of(
                half(z, i == 1), bias, col, scale, shift, vocab, SCALED, TRANSFORM, EVEN_VOCAB
            )
            s += gl.sum(p, 1)
            if part_class_sum is not None:
                class_sum += class_sum_of(of_part, class_weight, col, vocab, EVEN_VOCAB)
            store_half(e, weighted, staged.index(2 * WARPGROUP + i), row_block * BLOCK, tile_col)
        at = column.to(gl.int64) * most + row
        gl.store(part_sum + at, s)
        if part_class_sum is not None:
            gl.store(part_class_sum + at, class_sum)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["chunk", "most", "programs"])
def exponentials_kernel(
    x,  # descriptor of [most, D] in blocks [128, BK]
    w,  # descriptor of [V, D] in blocks [128, BK], or of [D, V] in [BK, 128] if TRANSPOSED
    e,  # descriptor of [most, V] in blocks [128, 64], out
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
    x_tiles, w_tiles, full, empty, turn = ring_of_logits(x, w, BK, STAGES)
    staged = gl.allocate_shared_memory(e.dtype, [4, BLOCK, BLOCK // 2], e.layout)
    # Spelled out: a tuple with a name would turn constants into tensors.
    gl.warp_specialize(
        [
            (_make, (
                e, bias, offset, length, class_weight, part_sum, part_class_sum, scale, chunk, most, vocab, hidden,
                programs, x_tiles, w_tiles, full, empty, turn, staged, 0, SCALED, TRANSFORM, TRANSPOSED, EVEN_VOCAB,
                BK, GROUP, STAGES, ROWS,
            )),
            (_make, (
                e, bias, offset, length, class_weight, part_sum, part_class_sum, scale, chunk, most, vocab, hidden,
                programs, x_tiles, w_tiles, full, empty, turn, staged, 1, SCALED, TRANSFORM, TRANSPOSED, EVEN_VOCAB,
                BK, GROUP, STAGES, ROWS,
            )),
            (load_blocks, (
                x, w, length, chunk, most, vocab, hidden, programs, x_tiles, w_tiles, full, empty, TRANSPOSED, BK,
                GROUP, STAGES, ROWS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
