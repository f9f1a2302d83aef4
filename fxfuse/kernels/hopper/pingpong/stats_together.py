"""Maxima and sums as in ``..stats``, of products and a scale alone, by warpgroups that share a tile, see ``.together``.

What ends a tile must hide behind ``LAG`` steps of the other warpgroup. Where that takes longer, for other statistics
and for logits with a bias or a transform, there is ``.stats``. At least three steps are needed, fewer than
``tiles.MANY_HIDDEN`` hidden units have.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..schedule import begin, logits_of
from ..stats import online
from .ring import BLOCK
from .stats import lane_of
from .together import WIDTH, begin_product, end_product, load_product, ring_of_shared


@gluon.jit
def _load(
    x, w, length, chunk, most, vocab, hidden, programs, x_tiles, w_tiles, full, empty, TRANSPOSED: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    row_block, lane, lanes, columns = lane_of(length, chunk, most, vocab, programs, WIDTH, ROWS)
    slot = 0
    phase = 1  # every slot is empty at first
    for column in range(lane, columns, lanes):
        slot, phase = load_product(
            x, w, None, x_tiles, w_tiles, None, full, empty, slot, phase, row_block * BLOCK, column, 0, hidden, True,
            not TRANSPOSED, BK, STAGES,
        )  # fmt: skip


@gluon.jit
def _walk(
    length, part_max, part_sum, scale, chunk, most, vocab, hidden, programs, x_tiles, w_tiles, full, empty, lead,
    WARPGROUP: gl.constexpr, SCALED: gl.constexpr, TRANSPOSED: gl.constexpr, EVEN_VOCAB: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BLOCK // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    row_block, lane, lanes, columns = lane_of(length, chunk, most, vocab, programs, WIDTH, ROWS)
    steps = gl.cdiv(hidden, BK)
    m = gl.full([HALF], float("-inf"), gl.float32, by_row)
    s = gl.zeros([HALF], gl.float32, by_row)
    slot = 0
    phase = 0
    round = 0
    for column in range(lane, columns, lanes):
        if WARPGROUP == 1:
            mbarrier.wait(lead.index(0), round & 1)
        z, nothing = begin_product(x_tiles, w_tiles, None, full, slot, phase, True, not TRANSPOSED, WARPGROUP)
        z, nothing, slot, phase = end_product(
            x_tiles, w_tiles, None, z, nothing, full, empty, lead, slot, phase, steps, False, True, not TRANSPOSED,
            WARPGROUP, STAGES,
        )  # fmt: skip
        round += 1  # noqa: SIM113
        col = column * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
        z, _slope = logits_of(z, None, col, scale, vocab, SCALED, "")
        if not EVEN_VOCAB:
            z = gl.where((col < vocab)[None, :], z, float("-inf"))
        m, s, _t, _argmax = online(z, m, s, m, m, col, vocab, EVEN_VOCAB, False, False)
    part = (row_block * lanes + lane) * BLOCK + WARPGROUP * HALF + gl.arange(0, HALF, layout=by_row)
    some = part < gl.where(columns > 0, BLOCK * programs, 0)
    gl.store(part_max + part, m, mask=some)
    gl.store(part_sum + part, s, mask=some)


@gluon.jit(do_not_specialize=["chunk", "most", "programs"])
def stats_together_kernel(
    x,  # descriptor of [most, D] in blocks [64, BK]
    w,  # descriptor of [V, D] in blocks [256, BK], or of [D, V] in [BK, 256] if TRANSPOSED
    length,
    part_max,  # [row blocks, lanes, 128] float32, out: at most [programs, 128]
    part_sum,  # the same
    scale,
    chunk,
    most,
    vocab,
    hidden,
    programs,
    SCALED: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    EVEN_VOCAB: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    begin(PDL)
    x_tiles, w_tiles, full, empty, lead = ring_of_shared(x, w, STAGES)
    gl.warp_specialize(
        [
            (_walk, (
                length, part_max, part_sum, scale, chunk, most, vocab, hidden, programs, x_tiles, w_tiles, full, empty,
                lead, 0, SCALED, TRANSPOSED, EVEN_VOCAB, BK, STAGES, ROWS,
            )),
            (_walk, (
                length, part_max, part_sum, scale, chunk, most, vocab, hidden, programs, x_tiles, w_tiles, full, empty,
                lead, 1, SCALED, TRANSPOSED, EVEN_VOCAB, BK, STAGES, ROWS,
            )),
            (_load, (
                x, w, length, chunk, most, vocab, hidden, programs, x_tiles, w_tiles, full, empty, TRANSPOSED, BK,
                STAGES, ROWS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
