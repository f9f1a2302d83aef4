"""The gradient of the logits as in ``..dlogits``, by warpgroups that share a tile, see ``.together``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...logits import grouped
from ..dlogits import gradients_of
from ..schedule import begin, chunk_bounds
from .exponentials import store_half
from .exponentials_together import PART, PARTS, load_blocks
from .ring import BLOCK, half
from .together import WIDTH, begin_product, end_product, ring_of_shared


@gluon.jit
def _make(
    dz, bias, order, length, class_weight, lse, residual, g_lse, g_class_sum, g_entropy, entropy, normalise, scale,
    chunk, most, vocab, hidden, programs, x_tiles, w_tiles, full, empty, lead, staged, WARPGROUP: gl.constexpr,
    SCALED: gl.constexpr, TRANSFORM: gl.constexpr, TRANSPOSED: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    start, rows = chunk_bounds(gl.load(length), chunk, most, ROWS)
    row_blocks = gl.cdiv(rows, BLOCK)
    columns = gl.cdiv(vocab, WIDTH)
    HALF: gl.constexpr = BLOCK // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    out_scale = scale
    if normalise is not None:
        out_scale = scale * gl.load(normalise)
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
        row = first_row + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
        there = row < rows
        source = gl.load(order + start + row, mask=there, other=0)
        row_lse = gl.load(lse + source, mask=there, other=0.0)
        row_residual = gl.load(residual + source, mask=there, other=0.0)
        g = gl.load(g_lse + source, mask=there, other=0.0)
        g_sum = None
        if g_class_sum is not None:
            g_sum = gl.load(g_class_sum + source, mask=there, other=0.0)
        row_g_entropy = None
        row_entropy = None
        if g_entropy is not None:
            row_g_entropy = gl.load(g_entropy + source, mask=there, other=0.0)
            row_entropy = gl.load(entropy + source, mask=there, other=0.0)
        z, nothing, slot, phase = end_product(
            x_tiles, w_tiles, None, z, nothing, full, empty, lead, slot, phase, steps, False, True, not TRANSPOSED,
            WARPGROUP, STAGES,
        )  # fmt: skip
        round += 1  # noqa: SIM113
        for i in gl.static_range(PARTS):
            tile_col = column * WIDTH + i * PART
            col = tile_col + gl.arange(0, PART, layout=gl.SliceLayout(0, layout))
            d = gradients_of(
                half(half(z, i // 2 == 1), i % 2 == 1), bias, col, class_weight, row_lse, row_residual, g, g_sum,
                row_g_entropy, row_entropy, there, scale, out_scale, vocab, SCALED, TRANSFORM,
            )  # fmt: skip
            store_half(dz, d, staged.index(2 * WARPGROUP + i % 2), first_row, tile_col)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["chunk", "most", "programs"])
def dlogits_together_kernel(
    x,  # descriptor of [most, D] in blocks [64, BK]
    w,  # descriptor of [W, D] in blocks [256, BK], or of [D, W] in [BK, 256] if TRANSPOSED
    dz,  # descriptor of [most, W] in blocks [64, 64], out
    bias,
    order,
    length,
    class_weight,
    lse,
    residual,
    g_lse,
    g_class_sum,
    g_entropy,
    entropy,
    normalise,
    scale,
    chunk,
    most,
    vocab,
    hidden,
    programs,
    SCALED: gl.constexpr,
    TRANSFORM: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    BK: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    begin(PDL)
    x_tiles, w_tiles, full, empty, lead = ring_of_shared(x, w, STAGES)
    staged = gl.allocate_shared_memory(dz.dtype, [4, BLOCK // 2, PART], dz.layout)
    gl.warp_specialize(
        [
            (_make, (
                dz, bias, order, length, class_weight, lse, residual, g_lse, g_class_sum, g_entropy, entropy, normalise,
                scale, chunk, most, vocab, hidden, programs, x_tiles, w_tiles, full, empty, lead, staged, 0, SCALED,
                TRANSFORM, TRANSPOSED, BK, GROUP, STAGES, ROWS,
            )),
            (_make, (
                dz, bias, order, length, class_weight, lse, residual, g_lse, g_class_sum, g_entropy, entropy, normalise,
                scale, chunk, most, vocab, hidden, programs, x_tiles, w_tiles, full, empty, lead, staged, 1, SCALED,
                TRANSFORM, TRANSPOSED, BK, GROUP, STAGES, ROWS,
            )),
            (load_blocks, (
                x, w, length, chunk, most, vocab, hidden, programs, x_tiles, w_tiles, full, empty, TRANSPOSED, BK,
                GROUP, STAGES, ROWS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
