"""Maxima and sums of logits as in ``..stats``, by warpgroups side by side, see ``.beside``.

Of logits without a transform, or of bounded ones. What ends a tile is not hidden but as far as one warpgroup runs ahead
of the other. Where it takes longer, for other statistics and other transforms, there is ``.stats``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..schedule import begin, logits_of
from ..stats import online, relative
from .beside import LAYOUT, PART, WIDTH, load_product, multiply, nothing, ring_beside
from .meeting import arrivals
from .stats import lane_of


@gluon.jit
def _load(
    x, w, length, first, most, vocab, hidden, programs, counter, x_tiles, w_tiles, full, empty,
    TRANSPOSED: gl.constexpr, PARTS: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    row_block, row_blocks, lane, lanes, columns = lane_of(length, first, most, vocab, programs, PARTS * PART, 2 * WIDTH)
    slot = 0
    phase = 1  # every slot is empty at first
    misses = 0
    for column in range(lane, columns, lanes):
        expected, coming = arrivals(column * row_blocks, columns * row_blocks, lanes * row_blocks, gl.cdiv(hidden, BK))
        slot, phase, misses = load_product(
            x, w, x_tiles, w_tiles, full, empty, slot, phase, misses, row_block * (PARTS * PART), column, hidden,
            counter, expected, coming, not TRANSPOSED, PARTS, BK, STAGES,
        )  # fmt: skip


@gluon.jit
def _walk(
    bias, length, offset, part_max, part_sum, scale, first, most, vocab, hidden, programs, x_tiles, w_tiles, full,
    empty, WARPGROUP: gl.constexpr, SCALED: gl.constexpr, TRANSFORM: gl.constexpr, TRANSPOSED: gl.constexpr,
    EVEN_VOCAB: gl.constexpr, PARTS: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    by_row: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    row_block, _row_blocks, lane, lanes, columns = lane_of(
        length, first, most, vocab, programs, PARTS * PART, 2 * WIDTH
    )
    steps = gl.cdiv(hidden, BK)
    m = nothing()
    s = nothing()
    for i in gl.static_range(PARTS):
        if offset is None:
            m += (gl.full([PART], float("-inf"), gl.float32, by_row),)
        else:
            m += (gl.load(offset + (row_block * PARTS + i) * PART + gl.arange(0, PART, layout=by_row)),)
        s += (gl.zeros([PART], gl.float32, by_row),)
    slot = 0
    phase = 0
    for column in range(lane, columns, lanes):
        products, slot, phase = multiply(
            x_tiles, w_tiles, full, empty, slot, phase, steps, not TRANSPOSED, WARPGROUP, PARTS, STAGES
        )
        col = (2 * column + WARPGROUP) * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
        m_before = m
        s_before = s
        m = nothing()
        s = nothing()
        for i in gl.static_range(PARTS):
            z, _slope = logits_of(products[i], bias, col, scale, vocab, SCALED, TRANSFORM)
            if not EVEN_VOCAB:
                z = gl.where((col < vocab)[None, :], z, float("-inf"))
            if offset is None:
                m_i, s_i, _t, _argmax = online(
                    z, m_before[i], s_before[i], m_before[i], m_before[i], col, vocab, EVEN_VOCAB, False, False
                )
                m += (m_i,)
                s += (s_i,)
            else:
                m += (m_before[i],)
                s += (relative(z, m_before[i], s_before[i]),)
    # Two parts a lane: this warpgroup's is one of them.
    its_parts = ((row_block * lanes + lane) * 2 + WARPGROUP) * (PARTS * PART)
    for i in gl.static_range(PARTS):
        part = its_parts + i * PART + gl.arange(0, PART, layout=by_row)
        some = part < gl.where(columns > 0, 2 * PARTS * PART * programs, 0)
        gl.store(part_max + part, m[i], mask=some)
        gl.store(part_sum + part, s[i], mask=some)


@gluon.jit(do_not_specialize=["first", "most", "programs"])
def stats_together_kernel(
    x,  # descriptor of [most, D] in blocks [64, BK]
    w,  # descriptor of [V, D] in blocks [128, BK], or of [D, V] in [BK, 128] if TRANSPOSED
    bias,
    length,
    offset,  # [most] float32, or None
    part_max,  # [row blocks, lanes, 2, rows of a tile] float32, out: at most [programs, 2, rows of a tile]
    part_sum,  # the same
    scale,
    first,
    most,
    vocab,
    hidden,
    programs,
    counter,  # [1] int32, zero; for ``.meeting``
    SCALED: gl.constexpr,
    TRANSFORM: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    EVEN_VOCAB: gl.constexpr,
    PARTS: gl.constexpr,  # of a tile's rows
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    begin(PDL)
    x_tiles, w_tiles, full, empty = ring_beside(x, w, PARTS, STAGES)
    gl.warp_specialize(
        [
            (_walk, (
                bias, length, offset, part_max, part_sum, scale, first, most, vocab, hidden, programs, x_tiles, w_tiles,
                full, empty, 0, SCALED, TRANSFORM, TRANSPOSED, EVEN_VOCAB, PARTS, BK, STAGES,
            )),
            (_walk, (
                bias, length, offset, part_max, part_sum, scale, first, most, vocab, hidden, programs, x_tiles, w_tiles,
                full, empty, 1, SCALED, TRANSFORM, TRANSPOSED, EVEN_VOCAB, PARTS, BK, STAGES,
            )),
            (_load, (
                x, w, length, first, most, vocab, hidden, programs, counter, x_tiles, w_tiles, full, empty, TRANSPOSED,
                PARTS, BK, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
