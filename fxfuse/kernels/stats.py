"""Row statistics of logits that are never stored: a fused product and online softmax, then a merge.

Each program walks a part of the vocabulary for a block of rows and keeps, per row, the maximum m and the sum s of
exp(z - m) so far (online softmax: Milakov & Gimelshein 2018). The parts of one row are merged by rescaling each s
to the common maximum, as flash-decoding merges parts of a sequence, so one row can use the whole device.

For the entropy log s - t / s there is the sum t of (z - m) exp(z - m) too. When the maximum rises by d, every term of t
becomes (z - m - d) exp(z - m) exp(-d), so that t becomes (t - d s) exp(-d). The expectation of the logits is u / s: u
is the sum of z exp(z - m), as it may be far less than m, of which m + t / s would have the rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .logits import PAD, grouped, logits_tile

MERGE_SPLITS, MERGE_ROWS = 32, 32
LAST = tl.constexpr(2**31 - 1)  # past every class


@triton.jit
def rescale(old, new):
    """exp(old - new), and 1 where both are the same infinity, whose difference would be NaN."""
    return tl.where(old == new, 1.0, tl.exp(old - new))


@triton.jit
def finite_or_zero(m):
    """What exponents are taken relative to: m, but 0 for an infinite m."""
    return tl.where(tl.abs(m) == float("inf"), 0.0, m)


@triton.jit
def rescaled_moment(t, s, old, new):
    """The sum t of (z - m) exp(z - m) at another maximum. At m = -inf there are no terms: t is 0, or NaN for good."""
    d = tl.where((old == new) | (old == float("-inf")), 0.0, old - new)
    return (t + d * s) * rescale(old, new)


@triton.jit
def first_best(z, tile_max, tile_sum, col):
    """The first class of a tile with its largest logit: to ``torch.max`` that is a NaN, which the sum tells of."""
    has_nan = tile_sum != tile_sum
    largest = tl.where(has_nan[:, None], z != z, z == tile_max[:, None])
    return tl.min(tl.where(largest, col[None, :], LAST), 1)


@triton.jit(do_not_specialize=["rows", "indexed", "splits", "tiles_per_split"])
def stats_kernel(
    x,  # [rows, D]
    w,  # [V, D]
    product,  # [rows, padded] float32: x @ w.T, or None, to make it here
    bias,  # [V] or None
    index,  # [rows, K] int64
    class_weight,  # [V] or None
    wanted,  # [rows] int8, or None for all
    part_max,  # [splits, rows] float32, out
    part_sum,  # [splits, rows] float32, out
    part_class_sum,  # [splits, rows] float64, out, or None
    part_moment,  # [splits, rows] float32, out, or None: the sums t
    part_weighted,  # [splits, rows] float32, out, or None: the sums u
    part_argmax,  # [splits, rows] int32, out, or None
    picked,  # [rows, K] float32, out: only where the index is a class
    scale,
    rows,
    vocab,
    padded,  # V rounded up to a multiple of PAD
    hidden,
    indexed,  # K
    splits,
    tiles_per_split,
    x_row,
    x_col,
    w_row,
    w_col,
    x_step,
    w_step,
    product_row,
    TRANSFORM: tl.constexpr,
    EVEN_VOCAB: tl.constexpr,
    EVEN_HIDDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    GROUP: tl.constexpr,
):
    row_block, split = grouped(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), splits, GROUP)
    row = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = row < rows
    row64 = row.to(tl.int64)
    # Rows past the end repeat the last one, which spares every load of x a mask.
    x_rows = tl.minimum(row, rows - 1)

    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tl.cdiv(vocab, BLOCK_VOCAB))
    if wanted is not None:
        # A block without a wanted row walks nothing; the merge gives its rows zeros.
        any_wanted = tl.max(tl.load(wanted + row, mask=in_rows, other=0).to(tl.int32), 0)
        last = tl.where(any_wanted != 0, last, first)

    m = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    s = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    # Of logits less the mean of the row's first, which they all have in common: its sum is made in float64.
    class_sum = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    anchor = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    weights = tl.zeros((1,), dtype=tl.float64)
    t = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    u = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    argmax = tl.zeros((BLOCK_ROWS,), dtype=tl.int32) + first * BLOCK_VOCAB
    for tile in range(first, last):
        tile_start = tile * BLOCK_VOCAB
        col = tile_start + tl.arange(0, BLOCK_VOCAB)
        z, _slope = logits_tile(
            x,
            w,
            product,
            bias,
            scale,
            x_rows,
            col,
            vocab,
            padded,
            hidden,
            hidden,
            x_row,
            x_col,
            w_row,
            w_col,
            x_step,
            w_step,
            product_row,
            TRANSFORM,
            EVEN_VOCAB,
            EVEN_HIDDEN,
            BLOCK_ROWS,
            BLOCK_VOCAB,
            BLOCK_HIDDEN,
        )
        if part_class_sum is not None:
            if tile == first:
                total = tl.sum(tl.where((col < vocab)[None, :], z, 0.0), 1)
                anchor = finite_or_zero(total / tl.minimum(vocab - tile_start, BLOCK_VOCAB))
            terms = z - anchor[:, None]
            c = (col < vocab).to(tl.float32)
            if class_weight is not None:
                c = tl.load(class_weight + col, mask=col < vocab, other=0.0).to(tl.float32)
                terms *= c[None, :]
            class_sum += tl.sum(tl.where((col < vocab)[None, :], terms, 0.0), 1)
            weights += tl.sum(c.to(tl.float64), 0)
        if not EVEN_VOCAB:
            z = tl.where((col < vocab)[None, :], z, float("-inf"))

        for k in range(indexed):
            at = row64 * indexed + k
            local = tl.load(index + at, mask=in_rows, other=-1) - tile_start
            here = (local >= 0) & (local < BLOCK_VOCAB)
            # Most tiles hold no row's class: skip the search of the tile.
            if tl.max(here.to(tl.int32), 0) > 0:
                hit = tl.arange(0, BLOCK_VOCAB)[None, :] == tl.where(here, local, -1).to(tl.int32)[:, None]
                tl.store(picked + at, tl.sum(tl.where(hit, z, 0.0), 1), mask=here)

        # A NaN is no maximum, but makes its row's sum NaN.
        tile_max = tl.max(z, 1)
        m_new = tl.maximum(m, tile_max)
        rescaled = s * rescale(m, m_new)
        shifted = z - finite_or_zero(m_new)[:, None]
        e = tl.exp(shifted)
        tile_sum = tl.sum(e, 1)
        if part_moment is not None:
            terms = e * shifted
            if not EVEN_VOCAB:  # past the vocabulary it is 0 * -inf
                terms = tl.where((col < vocab)[None, :], terms, 0.0)
            t = rescaled_moment(t, s, m, m_new) + tl.sum(terms, 1)
        if part_weighted is not None:
            terms = e * z
            if not EVEN_VOCAB:
                terms = tl.where((col < vocab)[None, :], terms, 0.0)
            u = u * rescale(m, m_new) + tl.sum(terms, 1)
        if part_argmax is not None:
            better = (s == s) & ((tile_sum != tile_sum) | (tile_max > m))
            argmax = tl.where(better, first_best(z, tile_max, tile_sum, col), argmax)
        s = rescaled + tile_sum
        m = m_new

    part = split.to(tl.int64) * rows + row64
    tl.store(part_max + part, m, mask=in_rows)
    tl.store(part_sum + part, s, mask=in_rows)
    if part_class_sum is not None:
        tl.store(part_class_sum + part, class_sum.to(tl.float64) + anchor.to(tl.float64) * weights, mask=in_rows)
    if part_moment is not None:
        tl.store(part_moment + part, t, mask=in_rows)
    if part_weighted is not None:
        tl.store(part_weighted + part, u, mask=in_rows)
    if part_argmax is not None:
        tl.store(part_argmax + part, argmax, mask=in_rows)


@triton.jit(do_not_specialize=["rows", "vocab", "indexed", "splits"])
def merge_kernel(
    part_max,  # [splits, rows] float32
    part_sum,  # [splits, rows] float32
    part_class_sum,  # [splits, rows] float64, or None
    part_moment,  # [splits, rows] float32, or None
    part_weighted,  # [splits, rows] float32, or None
    part_argmax,  # [splits, rows] int32, or None
    index,  # [rows, K] int64
    total_weight,  # [] float64: of all classes, or None if each has 1
    wanted,  # [rows] int8, or None for all
    lse,  # [rows] float32, out
    residual,  # [rows] float32, out
    picked,  # [rows, K] float32: read where the index is a class, zeroed elsewhere
    log_prob,  # [rows, K] float32, out
    class_sum,  # [rows] float32, out, or None
    log_prob_sum,  # [rows] float32, out, or None
    expectation,  # [rows] float32, out, or None
    entropy,  # [rows] float32, out, or None
    top,  # [rows] float32, out, or None
    argmax,  # [rows] int64, out, or None
    rows,
    vocab,
    indexed,
    splits,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = row < rows
    row64 = row.to(tl.int64)

    m = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    for start in range(0, splits, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        part = split.to(tl.int64)[:, None] * rows + row64[None, :]
        inside = (split < splits)[:, None] & in_rows[None, :]
        m = tl.maximum(m, tl.max(tl.load(part_max + part, mask=inside, other=float("-inf")), 0))

    s = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK_ROWS,), dtype=tl.float64)
    t = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    u = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    for start in range(0, splits, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        part = split.to(tl.int64)[:, None] * rows + row64[None, :]
        inside = (split < splits)[:, None] & in_rows[None, :]
        their_m = tl.load(part_max + part, mask=inside, other=float("-inf"))
        their_s = tl.load(part_sum + part, mask=inside, other=0.0)
        s += tl.sum(their_s * rescale(their_m, m[None, :]), 0)
        if entropy is not None:
            their_t = tl.load(part_moment + part, mask=inside, other=0.0)
            t += tl.sum(rescaled_moment(their_t, their_s, their_m, m[None, :]), 0)
        if expectation is not None:
            their_u = tl.load(part_weighted + part, mask=inside, other=0.0)
            u += tl.sum(their_u * rescale(their_m, m[None, :]), 0)
        if part_class_sum is not None:
            weighted += tl.sum(tl.load(part_class_sum + part, mask=inside, other=0.0), 0)

    log_s = tl.log(s)
    shift = finite_or_zero(m)
    row_lse = shift + log_s
    # What the rounding of that sum lost (Dekker's fast two-sum: |shift| is the larger wherever it matters).
    row_residual = tl.where(tl.abs(row_lse) < float("inf"), (shift - row_lse) + log_s, 0.0)
    if wanted is not None:
        row_wanted = tl.load(wanted + row, mask=in_rows, other=0) != 0
        row_lse = tl.where(row_wanted, row_lse, 0.0)
        row_residual = tl.where(row_wanted, row_residual, 0.0)
    if expectation is not None:
        row_expectation = u / s
        if wanted is not None:
            row_expectation = tl.where(row_wanted, row_expectation, 0.0)
        tl.store(expectation + row, row_expectation, mask=in_rows)
    if entropy is not None:
        row_entropy = log_s - t / s
        if wanted is not None:
            row_entropy = tl.where(row_wanted, row_entropy, 0.0)
        tl.store(entropy + row, row_entropy, mask=in_rows)
    if argmax is not None:
        lowest = tl.full((BLOCK_ROWS,), LAST, dtype=tl.int32)
        for start in range(0, splits, BLOCK_SPLITS):
            split = start + tl.arange(0, BLOCK_SPLITS)
            part = split.to(tl.int64)[:, None] * rows + row64[None, :]
            inside = (split < splits)[:, None] & in_rows[None, :]
            their_m = tl.load(part_max + part, mask=inside, other=float("-inf"))
            their_s = tl.load(part_sum + part, mask=inside, other=0.0)
            largest = tl.where((s != s)[None, :], their_s != their_s, their_m == m[None, :])
            theirs = tl.load(part_argmax + part, mask=inside & largest, other=LAST)
            lowest = tl.minimum(lowest, tl.min(theirs, 0))
        row_top = tl.where(s != s, s, m)
        if wanted is not None:
            row_top = tl.where(row_wanted, row_top, 0.0)
            lowest = tl.where(row_wanted, lowest, 0)
        tl.store(top + row, row_top, mask=in_rows)
        tl.store(argmax + row, lowest.to(tl.int64), mask=in_rows)
    tl.store(lse + row, row_lse, mask=in_rows)
    tl.store(residual + row, row_residual, mask=in_rows)
    if part_class_sum is not None:
        if wanted is not None:
            weighted = tl.where(row_wanted, weighted, 0.0)
        if class_sum is not None:
            tl.store(class_sum + row, weighted.to(tl.float32), mask=in_rows)
        if log_prob_sum is not None:
            total = tl.load(total_weight) if total_weight is not None else vocab.to(tl.float64)
            weighted -= total * (row_lse.to(tl.float64) + row_residual.to(tl.float64))
            tl.store(log_prob_sum + row, weighted.to(tl.float32), mask=in_rows)
    for k in range(indexed):
        at = row64 * indexed + k
        chosen = tl.load(index + at, mask=in_rows, other=-1)
        is_class = (chosen >= 0) & (chosen < vocab)
        if wanted is not None:
            is_class = is_class & row_wanted
        z = tl.load(picked + at, mask=is_class, other=0.0)
        tl.store(picked + at, z, mask=in_rows)
        # m - m is 0, or NaN for an infinite maximum, where log_softmax is NaN too.
        tl.store(log_prob + at, tl.where(is_class, (z - m) - (log_s + (m - m)), 0.0), mask=in_rows)


def row_stats(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    class_weight: Tensor | None,
    scale: float,
    transform: str,
    want_class_sum: bool,
    want_log_prob_sum: bool,
    wanted: Tensor | None,
    want_expectation: bool = False,
    want_entropy: bool = False,
    want_top: bool = False,
    product: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The statistics of ``ops.contract``, in its order.

    All are float32 but ``argmax``, which is int64, and empty where not asked for; ``argmax`` comes with ``top``.
    ``x [N, D]`` and ``weight [V, D]`` may have any strides; ``index [N, K]``, ``bias [V]``, ``class_weight [V]`` and
    ``wanted [N]`` (bool; rows outside it get zeros; None for all) are contiguous. ``product [N, V]`` is
    ``x @ weight.T`` in float32, with unit column stride and a row stride that is a multiple of ``PAD`` and at least V;
    None to make it here, of operands in 16 bits.
    """
    (rows, hidden), vocab, indexed = x.shape, weight.shape[0], index.shape[1]

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    lse, picked, log_prob = empty(rows), empty(rows, indexed), empty(rows, indexed)
    wants = want_class_sum, want_log_prob_sum, True, want_expectation, want_entropy, want_top
    optional = [empty(rows if want else 0) for want in wants]
    class_sum, log_prob_sum, residual, expectation, entropy, top = optional
    argmax = torch.empty_like(top, dtype=torch.int64)
    out = lse, picked, log_prob, *optional, argmax
    if rows == 0:
        return out

    shape = tiles.tile(x, weight) if product is None else tiles.stored(x.device)
    row_blocks, vocab_tiles = triton.cdiv(rows, shape.rows), triton.cdiv(vocab, shape.vocab)
    each = tiles.tiles_per_split(row_blocks, vocab_tiles, tiles.machine(x.device).processors * shape.slots)
    splits = triton.cdiv(vocab_tiles, each)
    part_max, part_sum = empty(splits, rows), empty(splits, rows)
    part_class_sum = total_weight = None
    if want_class_sum or want_log_prob_sum:
        part_class_sum = torch.empty_like(part_max, dtype=torch.float64)
        total_weight = None if class_weight is None else class_weight.sum(dtype=torch.float64)
    part_moment = empty(splits, rows) if want_entropy else None
    part_weighted = empty(splits, rows) if want_expectation else None
    part_argmax = torch.empty_like(part_max, dtype=torch.int32) if want_top else None
    wanted = None if wanted is None else wanted.view(torch.int8)
    stats_kernel[(row_blocks * splits,)](
        x,
        weight,
        product,
        bias,
        index,
        class_weight,
        wanted,
        part_max,
        part_sum,
        part_class_sum,
        part_moment,
        part_weighted,
        part_argmax,
        picked,
        scale,
        rows,
        vocab,
        triton.cdiv(vocab, PAD) * PAD,
        hidden,
        indexed,
        splits,
        each,
        *x.stride(),
        *weight.stride(),
        shape.hidden * x.stride(1),
        shape.hidden * weight.stride(1),
        0 if product is None else product.stride(0),
        TRANSFORM=transform,
        EVEN_VOCAB=vocab % shape.vocab == 0,
        EVEN_HIDDEN=hidden % shape.hidden == 0,
        BLOCK_ROWS=shape.rows,
        BLOCK_VOCAB=shape.vocab,
        BLOCK_HIDDEN=shape.hidden,
        GROUP=tiles.GROUP,
        num_warps=shape.warps,
        num_stages=shape.stages,
        # Logits of a stored product must be the same numbers in both kernels.
        enable_fp_fusion=product is None,
    )
    merge_kernel[(triton.cdiv(rows, MERGE_ROWS),)](
        part_max,
        part_sum,
        part_class_sum,
        part_moment,
        part_weighted,
        part_argmax,
        index,
        total_weight,
        wanted,
        lse,
        residual,
        picked,
        log_prob,
        class_sum if want_class_sum else None,
        log_prob_sum if want_log_prob_sum else None,
        expectation if want_expectation else None,
        entropy if want_entropy else None,
        top if want_top else None,
        argmax if want_top else None,
        rows,
        vocab,
        indexed,
        splits,
        BLOCK_SPLITS=MERGE_SPLITS,
        BLOCK_ROWS=MERGE_ROWS,
        num_warps=4,
    )
    return out
