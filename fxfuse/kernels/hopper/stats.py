"""Row statistics of a span of listed rows, from logits that need not be stored: a fused product, then a merge.

Each program walks a lane of the vocabulary for a block of rows and keeps, per row, the maximum m and the sum s of
exp(z - m) so far (online softmax: Milakov & Gimelshein 2018). Of logits with a small bound, as a softcap has, m is any
one. The lanes of a row are merged by rescaling each s to the common maximum, as flash-decoding merges parts of a
sequence, so one row can use the whole device. For the entropy there is the sum t of (z - m) exp(z - m) too, as in the
general ``kernels.stats``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..exponential import LOG2E
from ..stats import LAST, finite_or_zero, first_best, rescale, rescaled_moment
from .rows import total_of, weigh
from .schedule import begin, exponent, left_and_right, listed_row, log_of_sum, logits_of, product_tile, span_rows


@triton.jit
def lanes_of(rows, programs, BM: tl.constexpr):
    """(row blocks, lanes of the vocabulary) of a span, so that a program each fills the device."""
    row_blocks = tl.maximum(tl.cdiv(rows, BM), 1)
    return row_blocks, tl.maximum(programs // row_blocks, 1)


@triton.jit
def class_sum_of(z, class_weight, col, vocab, EVEN_VOCAB: tl.constexpr):
    """The sums over the classes of a tile of logits, weighted or not."""
    if class_weight is not None:
        z = z * tl.load(class_weight + col, mask=col < vocab, other=0.0).to(tl.float32)[None, :]
    if not EVEN_VOCAB:  # past the vocabulary z is a transform of 0, or NaN in a row of infinite hidden states
        z = tl.where((col < vocab)[None, :], z, 0.0)
    return tl.sum(z, 1)


@triton.jit
def online(z, m, s, t, argmax, col, vocab, EVEN_VOCAB: tl.constexpr, MOMENT: tl.constexpr, ARGMAX: tl.constexpr):
    """The maximum and the sum of a row after another tile of its logits; the sum t and the class of the maximum, if
    these are wanted.
    """
    # A NaN is no maximum, but makes its row's sum NaN.
    tile_max = tl.max(z, 1)
    m_new = tl.maximum(m, tile_max)
    shift = finite_or_zero(m_new)
    e = tl.exp2(exponent(z, (shift * LOG2E)[:, None]))
    if MOMENT:
        terms = e * (z - shift[:, None])
        if not EVEN_VOCAB:  # past the vocabulary it is 0 * -inf
            terms = tl.where((col < vocab)[None, :], terms, 0.0)
        t = rescaled_moment(t, s, m, m_new) + tl.sum(terms, 1)
    tile_sum = tl.sum(e, 1)
    if ARGMAX:
        better = (s == s) & ((tile_sum != tile_sum) | (tile_max > m))
        argmax = tl.where(better, first_best(z, tile_max, tile_sum, col), argmax)
    return m_new, s * rescale(m, m_new) + tile_sum, t, argmax


@triton.jit
def relative(z, m, s):
    """The sum of a row after another tile of its logits, which are all so near to m that it need not be the largest."""
    return s + tl.sum(tl.exp2(exponent(z, (m * LOG2E)[:, None])), 1)


@triton.jit(do_not_specialize=["first", "most", "programs"])
def stats_kernel(
    x,  # descriptor of [most, D]
    w,  # descriptor of [V, D], or of [D, V] if TRANSPOSED
    stored,  # descriptor of [N, V], out, or None: the products, from which logits are then made as they are stored
    bias,  # [V] or None
    length,  # [1] int32, or None: there are ``most`` rows
    offset,  # [most] float32, or None: what stands for the maximum of bounded logits, where nothing but sums is wanted
    class_weight,  # [V] or None
    part_max,  # [row blocks, lanes, BM] float32, out: at most [programs, BM]
    part_sum,  # the same
    part_class_sum,  # the same, or None
    part_moment,  # the same, or None: the sums t
    part_argmax,  # the same in int32, or None
    scale,
    first,
    most,
    vocab,
    hidden,
    programs,
    SCALED: tl.constexpr,
    TRANSFORM: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EVEN_VOCAB: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FLATTEN: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    rows = span_rows(length, first, most)
    row_blocks, lanes = lanes_of(rows, programs, BM)
    columns = tl.cdiv(vocab, BN)
    row_block, lane = tl.program_id(0) % row_blocks, tl.program_id(0) // row_blocks
    if (lane >= lanes) | (rows == 0):
        return
    tile_row = row_block * BM
    if offset is None:
        m = tl.full((BM,), float("-inf"), dtype=tl.float32)
    else:
        m = tl.load(offset + tile_row + tl.arange(0, BM))
    s = tl.zeros((BM,), dtype=tl.float32)
    t = tl.zeros((BM,), dtype=tl.float32)
    argmax = tl.zeros((BM,), dtype=tl.int32) + lane * BN
    class_sum = tl.zeros((BM,), dtype=tl.float32)
    for column in tl.range(lane, columns, lanes, flatten=FLATTEN):
        tile_col = column * BN
        col = tile_col + tl.arange(0, BN)
        z = product_tile(x, w, tile_row, tile_col, hidden, TRANSPOSED, BM, BN, BK)
        if stored is not None:
            z = z.to(stored.dtype)
            left, right = left_and_right(z, BM, BN)
            stored.store([first + tile_row, tile_col], left)
            stored.store([first + tile_row, tile_col + BN // 2], right)
            z = z.to(tl.float32)
        z, _slope = logits_of(z, bias, col, scale, vocab, SCALED, TRANSFORM)
        if part_class_sum is not None:
            class_sum += class_sum_of(z, class_weight, col, vocab, EVEN_VOCAB)
        if not EVEN_VOCAB:
            z = tl.where((col < vocab)[None, :], z, float("-inf"))
        if offset is None:
            m, s, t, argmax = online(
                z, m, s, t, argmax, col, vocab, EVEN_VOCAB, part_moment is not None, part_argmax is not None
            )
        else:
            s = relative(z, m, s)

    part = (row_block * lanes + lane) * BM + tl.arange(0, BM)
    tl.store(part_max + part, m)
    tl.store(part_sum + part, s)
    if part_class_sum is not None:
        tl.store(part_class_sum + part, class_sum)
    if part_moment is not None:
        tl.store(part_moment + part, t)
    if part_argmax is not None:
        tl.store(part_argmax + part, argmax)


@triton.jit(do_not_specialize=["first", "most", "vocab", "indexed", "programs"])
def merge_kernel(
    part_max,  # [row blocks, lanes * PARTS, BM] float32
    part_sum,
    part_class_sum,  # or None
    part_moment,  # or None
    part_argmax,  # int32, or None
    index,  # [N, K] int64
    order,  # [N] int32, or None: every row
    length,  # [1] int32, or None with it
    lse,  # [N] float32, out
    residual,  # [N] float32, out
    picked,  # [N, K] float32
    log_prob,  # [N, K] float32, out
    class_sum,  # [N] float32, out, or None
    expectation,  # [N] float32, out, or None
    entropy,  # [N] float32, out, or None
    top,  # [N] float32, out, or None
    argmax,  # [N] int64, out, or None
    total,  # as in ``rows.loss_kernel``, as is what follows
    c_log_prob,
    c_log_prob_sum,
    loss,  # [] float32, out; or None where there is more than one program, which would have a part of the rows each
    first,
    most,
    vocab,
    indexed,
    programs,
    PARTS: tl.constexpr,  # a lane
    BM: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    rows = span_rows(length, first, most)
    if tl.program_id(0) * BLOCK_ROWS >= rows:
        return
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    there = row < rows
    _, lanes = lanes_of(rows, programs, BM)
    lanes *= PARTS
    first_part = row // BM * lanes * BM + row % BM
    source = listed_row(order, first + row, there)

    m = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    for first_lane in range(0, lanes, BLOCK_LANES):
        lane = first_lane + tl.arange(0, BLOCK_LANES)
        part = lane[:, None] * BM + first_part[None, :]
        inside = (lane < lanes)[:, None] & there[None, :]
        m = tl.maximum(m, tl.max(tl.load(part_max + part, mask=inside, other=float("-inf")), 0))

    s = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    t = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    for first_lane in range(0, lanes, BLOCK_LANES):
        lane = first_lane + tl.arange(0, BLOCK_LANES)
        part = lane[:, None] * BM + first_part[None, :]
        inside = (lane < lanes)[:, None] & there[None, :]
        their_m = tl.load(part_max + part, mask=inside, other=float("-inf"))
        their_s = tl.load(part_sum + part, mask=inside, other=0.0)
        s += tl.sum(their_s * rescale(their_m, m[None, :]), 0)
        if entropy is not None:
            their_t = tl.load(part_moment + part, mask=inside, other=0.0)
            t += tl.sum(rescaled_moment(their_t, their_s, their_m, m[None, :]), 0)
        if class_sum is not None:
            weighted += tl.sum(tl.load(part_class_sum + part, mask=inside, other=0.0), 0)

    log_s = tl.log(s)
    shift = finite_or_zero(m)
    log_sum = log_of_sum(s, shift)
    row_lse = shift + log_sum
    # What the rounding of that sum lost (Dekker's fast two-sum: |shift| is the larger wherever it matters).
    tl.store(residual + source, tl.where(tl.abs(row_lse) < float("inf"), (shift - row_lse) + log_sum, 0.0), mask=there)
    tl.store(lse + source, row_lse, mask=there)
    if class_sum is not None:
        tl.store(class_sum + source, weighted, mask=there)
    if expectation is not None:  # which comes with the entropy
        tl.store(expectation + source, shift + t / s, mask=there)
    if entropy is not None:
        tl.store(entropy + source, log_sum - t / s, mask=there)
    if argmax is not None:
        best = tl.full((BLOCK_ROWS,), LAST, dtype=tl.int32)
        for first_lane in range(0, lanes, BLOCK_LANES):
            lane = first_lane + tl.arange(0, BLOCK_LANES)
            part = lane[:, None] * BM + first_part[None, :]
            inside = (lane < lanes)[:, None] & there[None, :]
            their_m = tl.load(part_max + part, mask=inside, other=float("-inf"))
            their_s = tl.load(part_sum + part, mask=inside, other=0.0)
            largest = tl.where((s != s)[None, :], their_s != their_s, their_m == m[None, :])
            best = tl.minimum(best, tl.min(tl.load(part_argmax + part, mask=inside & largest, other=LAST), 0))
        tl.store(top + source, tl.where(s != s, s, m), mask=there)
        tl.store(argmax + source, best.to(tl.int64), mask=there)
    terms = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    for k in range(indexed):
        at = source * indexed + k
        chosen = tl.load(index + at, mask=there, other=-1)
        is_class = (chosen >= 0) & (chosen < vocab)
        log2 = exponent(tl.load(picked + at, mask=is_class, other=0.0), shift * LOG2E)
        # m - m is 0, or NaN for an infinite maximum, where log_softmax is NaN too. Rounding may not make a probability
        # of more than one.
        value = log2 / LOG2E - (log_s + (m - m))
        value = tl.where(is_class, tl.where(value > 0, 0.0, value), 0.0)
        tl.store(log_prob + at, value, mask=there)
        if loss is not None:
            terms += weigh(tl.load(c_log_prob + at, mask=is_class, other=0.0), value)
    if loss is not None:
        if class_sum is not None:
            log_prob_sum = weighted - total_of(total, vocab) * row_lse
            terms += weigh(tl.load(c_log_prob_sum + source, mask=there, other=0.0), log_prob_sum)
        tl.store(loss, tl.sum(terms, 0))
