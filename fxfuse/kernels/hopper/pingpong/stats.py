"""Row statistics as in ``..stats``, by warpgroups that take turns."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..schedule import begin, logits_of, span_rows
from ..stats import class_sum_of, lanes_of, online, relative
from .exponentials import store_half
from .ring import BLOCK, half, load_tiles, multiply, ring_of_logits


@gluon.jit
def lane_of(length, first, most, vocab, programs, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """(row block, row blocks, lane, lanes, columns of tiles) of this program; no columns for one with nothing to do."""
    rows = span_rows(length, first, most)
    row_blocks, lanes = lanes_of(rows, programs, HEIGHT)
    row_block = gl.program_id(0) % row_blocks
    lane = gl.program_id(0) // row_blocks
    columns = gl.where((lane < lanes) & (rows > 0), gl.cdiv(vocab, WIDTH), 0)
    return row_block, row_blocks, lane, lanes, columns


@gluon.jit
def _load(
    x, w, length, first, most, vocab, hidden, programs, x_tiles, w_tiles, full, empty, TRANSPOSED: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    row_block, _row_blocks, lane, lanes, columns = lane_of(length, first, most, vocab, programs, BLOCK, BLOCK)
    load_tiles(
        x, w, None, x_tiles, w_tiles, None, full, empty, lane, columns, lanes, row_block, columns, 0, hidden, True,
        not TRANSPOSED, BK, 0, STAGES,
    )  # fmt: skip


@gluon.jit
def _see(
    z, m, s, t, argmax, class_sum, bias, class_weight, part_class_sum, first, scale, vocab, SCALED: gl.constexpr,
    TRANSFORM: gl.constexpr, EVEN_VOCAB: gl.constexpr, OFFSET: gl.constexpr, MOMENT: gl.constexpr, ARGMAX: gl.constexpr,
):  # fmt: skip
    """The statistics of a row after these products, at the classes from ``first`` on."""
    width: gl.constexpr = z.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16]))
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    col = first + gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    z, _slope = logits_of(z, bias, col, scale, vocab, SCALED, TRANSFORM)
    if part_class_sum is not None:
        of_part = class_sum_of(z, class_weight, col, vocab, EVEN_VOCAB)
        class_sum += gl.convert_layout(of_part, by_row, assert_trivial=True)
    if not EVEN_VOCAB:
        z = gl.where((col < vocab)[None, :], z, float("-inf"))
    m = gl.convert_layout(m, of_rows, assert_trivial=True)
    s = gl.convert_layout(s, of_rows, assert_trivial=True)
    t = gl.convert_layout(t, of_rows, assert_trivial=True)
    argmax = gl.convert_layout(argmax, of_rows, assert_trivial=True)
    if OFFSET:
        s = relative(z, m, s)
    else:
        m, s, t, argmax = online(z, m, s, t, argmax, col, vocab, EVEN_VOCAB, MOMENT, ARGMAX)
    return (
        gl.convert_layout(m, by_row, assert_trivial=True),
        gl.convert_layout(s, by_row, assert_trivial=True),
        gl.convert_layout(t, by_row, assert_trivial=True),
        gl.convert_layout(argmax, by_row, assert_trivial=True),
        class_sum,
    )


@gluon.jit
def _walk(
    stored, bias, length, offset, class_weight, part_max, part_sum, part_class_sum, part_moment, part_argmax, scale,
    first, most, vocab, hidden, programs, x_tiles, w_tiles, full, empty, turn, staged, WARPGROUP: gl.constexpr,
    SCALED: gl.constexpr, TRANSFORM: gl.constexpr, TRANSPOSED: gl.constexpr, EVEN_VOCAB: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    row_block, _row_blocks, lane, lanes, columns = lane_of(length, first, most, vocab, programs, BLOCK, BLOCK)
    steps = gl.cdiv(hidden, BK)
    if offset is None:
        m = gl.full([BLOCK], float("-inf"), gl.float32, by_row)
    else:
        m = gl.load(offset + row_block * BLOCK + gl.arange(0, BLOCK, layout=by_row))
    s = gl.zeros([BLOCK], gl.float32, by_row)
    t = gl.zeros([BLOCK], gl.float32, by_row)
    argmax = gl.zeros([BLOCK], gl.int32, by_row) + (lane + WARPGROUP * lanes) * BLOCK
    class_sum = gl.zeros([BLOCK], gl.float32, by_row)
    round = 0
    for column in range(lane + WARPGROUP * lanes, columns, 2 * lanes):
        z = multiply(
            x_tiles, w_tiles, full, empty, turn, round, (2 * round + WARPGROUP) * steps, steps, True, not TRANSPOSED,
            WARPGROUP, STAGES,
        )  # fmt: skip
        round += 1  # noqa: SIM113
        if stored is not None:
            z = z.to(stored.dtype).to(gl.float32)
            for i in gl.static_range(2):
                store_half(
                    stored, half(z, i == 1), staged.index(2 * WARPGROUP + i), first + row_block * BLOCK,
                    column * BLOCK + i * (BLOCK // 2),
                )  # fmt: skip
        # What is more than a sum needs registers: by halves, which takes twice the reductions over columns.
        MORE: gl.constexpr = part_moment is not None or part_argmax is not None
        HALVES: gl.constexpr = 2 if MORE or (TRANSFORM != "" and offset is None) else 1
        for i in gl.static_range(HALVES):
            part_of_z = z
            if HALVES == 2:
                part_of_z = half(z, i == 1)
            m, s, t, argmax, class_sum = _see(
                part_of_z, m, s, t, argmax, class_sum, bias, class_weight, part_class_sum,
                column * BLOCK + i * (BLOCK // 2), scale, vocab, SCALED, TRANSFORM, EVEN_VOCAB, offset is not None,
                part_moment is not None, part_argmax is not None,
            )  # fmt: skip

    if stored is not None:
        tma.store_wait(0)
    # Two parts a lane: this warpgroup's is one of them.
    part = ((row_block * lanes + lane) * 2 + WARPGROUP) * BLOCK + gl.arange(0, BLOCK, layout=by_row)
    some = part < gl.where(columns > 0, 2 * BLOCK * programs, 0)
    gl.store(part_max + part, m, mask=some)
    gl.store(part_sum + part, s, mask=some)
    if part_class_sum is not None:
        gl.store(part_class_sum + part, class_sum, mask=some)
    if part_moment is not None:
        gl.store(part_moment + part, t, mask=some)
    if part_argmax is not None:
        gl.store(part_argmax + part, argmax, mask=some)


@gluon.jit(do_not_specialize=["first", "most", "programs"])
def stats_kernel(
    x,  # descriptor of [most, D] in blocks [128, BK]
    w,  # descriptor of [V, D] in blocks [128, BK], or of [D, V] in [BK, 128] if TRANSPOSED
    stored,  # descriptor of [N, V] in blocks [128, 64], out, or None
    bias,
    length,
    offset,
    class_weight,
    part_max,  # [row blocks, lanes, 2, 128] float32, out: at most [programs, 2, 128]
    part_sum,  # the same
    part_class_sum,  # the same, or None
    part_moment,  # the same, or None
    part_argmax,  # the same in int32, or None
    scale,
    first,
    most,
    vocab,
    hidden,
    programs,
    SCALED: gl.constexpr,
    TRANSFORM: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    EVEN_VOCAB: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    begin(PDL)
    x_tiles, w_tiles, full, empty, turn = ring_of_logits(x, w, BK, STAGES)
    staged = x_tiles  # which is not looked at
    if stored is not None:
        staged = gl.allocate_shared_memory(stored.dtype, [4, BLOCK, BLOCK // 2], stored.layout)
    gl.warp_specialize(
        [
            (_walk, (
                stored, bias, length, offset, class_weight, part_max, part_sum, part_class_sum, part_moment,
                part_argmax, scale, first, most, vocab, hidden, programs, x_tiles, w_tiles, full, empty, turn, staged,
                0, SCALED, TRANSFORM, TRANSPOSED, EVEN_VOCAB, BK, STAGES,
            )),
            (_walk, (
                stored, bias, length, offset, class_weight, part_max, part_sum, part_class_sum, part_moment,
                part_argmax, scale, first, most, vocab, hidden, programs, x_tiles, w_tiles, full, empty, turn, staged,
                1, SCALED, TRANSFORM, TRANSPOSED, EVEN_VOCAB, BK, STAGES,
            )),
            (_load, (
                x, w, length, first, most, vocab, hidden, programs, x_tiles, w_tiles, full, empty, TRANSPOSED, BK,
                STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
