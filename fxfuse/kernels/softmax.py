"""Softmax over stored rows of any length: one pass for their statistics, then one in place.

A row belongs to no program: programs reduce tiles of fixed size of parts of rows, and ``stats.merge_kernel`` puts the
parts together, so rows may be as long as they like, and a single one uses the whole device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .exponential import exponential
from .logits import PAD
from .stats import MERGE_ROWS, MERGE_SPLITS, finite_or_zero, merge_kernel, rescale
from .transform import spelled, transformed

# The logits must be the same numbers in every kernel here that reads them: a product that is not rounded before it is
# added to, as fused operations have it, is another number, and a log-probability came out above 0.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
# Elements of a row in one step of a program that multiplies nothing.
BLOCK, INTERPRETED_BLOCK = 2048, 64
# Programs for each processor, among which a pass over few rows is divided.
PROGRAMS = 8


@triton.jit(do_not_specialize=["rows", "splits", "tiles_per_split"])
def stats_kernel(
    product,  # [rows, V]
    bias,  # [V] or None
    part_max,  # [splits, rows] float32, out
    part_sum,  # [splits, rows] float32, out
    scale,
    rows,
    vocab,
    splits,
    tiles_per_split,
    product_row,
    TRANSFORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    first = split * tiles_per_split
    m = float("-inf")
    s = 0.0
    for tile in range(first, tl.minimum(first + tiles_per_split, tl.cdiv(vocab, BLOCK))):
        col = tile * BLOCK + tl.arange(0, BLOCK)
        z, _slope = finished(product + row * product_row, bias, scale, col, col < vocab, TRANSFORM)
        z = tl.where(col < vocab, z, float("-inf"))
        # A NaN is no maximum, but makes its row's sum NaN.
        m_new = tl.maximum(m, tl.max(z, 0))
        s = s * rescale(m, m_new) + tl.sum(tl.exp(z - finite_or_zero(m_new)), 0)
        m = m_new
    part = split.to(tl.int64) * rows + row
    tl.store(part_max + part, m)
    tl.store(part_sum + part, s)


@triton.jit
def log_softmax(z, lse, residual, row):
    """The logarithm of the softmax, at most 0; NaN in a row whose log-sum-exp is infinite, as eager has it."""
    row_lse = tl.load(lse + row)
    # z - lse is exact where it matters, and only then is the residual not lost beside it.
    value = (z - (row_lse + (row_lse - row_lse))) - tl.load(residual + row)
    return tl.minimum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def normalise_kernel(
    out,  # [rows, V], out: the softmax; may be the same memory as
    product,  # [rows, V]
    bias,  # [V] or None
    lse,  # [rows] float32
    residual,  # [rows] float32
    scale,
    vocab,
    TRANSFORM: tl.constexpr,
    LOG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile_count = tl.cdiv(vocab, BLOCK)
    row = tl.program_id(0) // tile_count
    col = tl.program_id(0) % tile_count * BLOCK + tl.arange(0, BLOCK)
    start = row.to(tl.int64) * vocab
    z, _slope = finished(product + start, bias, scale, col, col < vocab, TRANSFORM)
    value = log_softmax(z, lse, residual, row)
    if not LOG:
        value = exponential(value)
    tl.store(out + start + col, value.to(out.dtype.element_ty), mask=col < vocab)


@triton.jit(do_not_specialize=["rows", "splits", "tiles_per_split"])
def sums_kernel(
    out,  # [rows, V]: the softmax
    g,  # [rows, V]: its gradient, with any strides
    part_total,  # [splits, rows] float32, out: sums of p
    part_sum,  # [splits, rows] float32, out: sums of g, or of p g
    part_most,  # [splits, rows] float32, out: largest absolute values of g
    rows,
    vocab,
    splits,
    tiles_per_split,
    g_row,
    g_col,
    LOG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    first = split * tiles_per_split
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK,), dtype=tl.float32)
    most = tl.zeros((BLOCK,), dtype=tl.float32)
    for tile in range(first, tl.minimum(first + tiles_per_split, tl.cdiv(vocab, BLOCK))):
        col = tile * BLOCK + tl.arange(0, BLOCK)
        inside = col < vocab
        p = tl.load(out + row * vocab + col, mask=inside, other=float("-inf") if LOG else 0.0).to(tl.float32)
        their_g = tl.load(g + row * g_row + col.to(tl.int64) * g_col, mask=inside, other=0.0).to(tl.float32)
        if LOG:
            p = exponential(p)
            weighted += their_g
        else:
            weighted += p * their_g
        total += p
        most = tl.maximum(most, tl.abs(their_g))
    part = split.to(tl.int64) * rows + row
    tl.store(part_total + part, tl.sum(total, 0))
    tl.store(part_sum + part, tl.sum(weighted, 0))
    tl.store(part_most + part, tl.max(most, 0))


@triton.jit(do_not_specialize=["first_class"])
def gradient_kernel(
    out,  # [rows, V]: the softmax
    g,  # [rows, V]: its gradient, with any strides
    mean,  # [rows] float32: the sums of g, or of p g, over those of p
    product,  # [rows, W] float32: input @ weight.T, or None where nothing is transformed
    bias,  # [W] or None
    factor,  # [1] float32, or None for 1
    dz,  # [rows, W], out
    scale,
    first_class,  # the class of column 0
    classes,  # W
    vocab,
    g_row,
    g_col,
    product_row,
    dz_row,
    padded,  # W rounded up to a multiple of PAD
    TRANSFORM: tl.constexpr,
    LOG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile_count = tl.cdiv(padded, BLOCK)
    row = (tl.program_id(0) // tile_count).to(tl.int64)
    col = tl.program_id(0) % tile_count * BLOCK + tl.arange(0, BLOCK)
    inside = col < classes
    at = first_class + col
    p = tl.load(out + row * vocab + at, mask=inside, other=0.0).to(tl.float32)
    their_g = tl.load(g + row * g_row + at.to(tl.int64) * g_col, mask=inside, other=0.0).to(tl.float32)
    row_mean = tl.load(mean + row)
    d = their_g - exponential(p) * row_mean if LOG else p * (their_g - row_mean)
    if product is not None:
        _z, slope = finished(product + row * product_row, bias, scale, col, inside, TRANSFORM)
        d *= slope
    if factor is not None:
        scale = scale * tl.load(factor)
    # The padding is written too: a mask at an odd W would break the stores into single elements.
    tl.store(dz + row * dz_row + col, (d * scale).to(dz.dtype.element_ty), mask=col < padded)


@triton.jit
def finished(product, bias, scale, col, inside, TRANSFORM: tl.constexpr):
    """The logits of a row of products, and the derivative of their transform; of 0 outside."""
    u = tl.load(product + col, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        u += tl.load(bias + col, mask=inside, other=0.0).to(tl.float32)
    return transformed(u, TRANSFORM, scale)


# --- launches -------------------------------------------------------------------------------------------------


def block(device: torch.device) -> int:
    """The length of a tile of a row."""
    return INTERPRETED_BLOCK if tiles.machine(device).generation == "interpreter" else BLOCK


def divided(rows: int, classes: int, device: torch.device) -> tuple[int, int]:
    """Into how many parts to cut each row of a pass that reduces them, and the tiles of a part."""
    count = triton.cdiv(classes, block(device))
    parts = min(count, max(1, triton.cdiv(PROGRAMS * tiles.machine(device).processors, rows)))
    each = triton.cdiv(count, parts)
    return triton.cdiv(count, each), each


def merge(part_max: Tensor, part_sum: Tensor) -> tuple[Tensor, Tensor]:
    """``lse`` and ``residual [N]`` of the maxima and sums of exponentials ``[splits, N]`` of parts of rows."""
    splits, rows = part_max.shape
    lse, residual = part_max.new_empty((2, rows)).unbind()
    nothing = part_max.new_empty((rows, 0))
    merge_kernel[(triton.cdiv(rows, MERGE_ROWS),)](
        part_max=part_max,
        part_sum=part_sum,
        part_class_sum=None,
        part_moment=None,
        part_weighted=None,
        part_argmax=None,
        index=nothing.long(),
        total_weight=None,
        wanted=None,
        lse=lse,
        residual=residual,
        picked=nothing,
        log_prob=nothing,
        class_sum=None,
        log_prob_sum=None,
        expectation=None,
        entropy=None,
        top=None,
        argmax=None,
        rows=rows,
        vocab=0,
        indexed=0,
        splits=splits,
        BLOCK_SPLITS=MERGE_SPLITS,
        BLOCK_ROWS=MERGE_ROWS,
        num_warps=4,
    )
    return lse, residual


def row_stats(product: Tensor, bias: Tensor | None, scale: float, transform: str) -> tuple[Tensor, Tensor]:
    """``lse`` and ``residual [C]`` of whole rows ``product [C, V]``, with unit column stride; C is not 0."""
    rows, vocab = product.shape
    splits, each = divided(rows, vocab, product.device)
    parts = torch.empty((2, splits, rows), dtype=torch.float32, device=product.device)
    stats_kernel[(rows * splits,)](
        product,
        bias,
        *parts.unbind(),
        scale,
        rows,
        vocab,
        splits,
        each,
        product.stride(0),
        TRANSFORM=spelled(transform, product.dtype),
        BLOCK=block(product.device),
        **OPTIONS,
    )
    return merge(*parts.unbind())


def write_softmax(
    out: Tensor,
    product: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    residual: Tensor,
    scale: float,
    transform: str,
    log: bool,
) -> None:
    """Write the softmax of logits, or its logarithm, into ``out [N, V]``, which may be the ``product`` of them.

    Both (float32 or of 16 bits) and ``bias [V]`` are contiguous. ``lse`` and ``residual [N]`` are as ``row_stats`` has
    them. N is not 0.
    """
    rows, vocab = out.shape
    length = block(out.device)
    normalise_kernel[(rows * triton.cdiv(vocab, length),)](
        out, product, bias, lse, residual, scale, vocab, TRANSFORM=spelled(transform, product.dtype), LOG=log,
        BLOCK=length, **OPTIONS,
    )  # fmt: skip


def mean_and_bound(out: Tensor, g: Tensor, log: bool) -> tuple[Tensor, Tensor]:
    """What the gradient of the logits needs of each row of ``out`` and ``g [N, V]``, float32 ``[N]`` each.

    The sum of g (of p g, without ``log``) over that of p, and a bound of the gradient's absolute values. ``out`` is
    contiguous.
    """
    rows, vocab = out.shape
    splits, each = divided(rows, vocab, out.device)
    parts = torch.empty((3, splits, rows), dtype=torch.float32, device=out.device)
    sums_kernel[(rows * splits,)](
        out, g, *parts.unbind(), rows, vocab, splits, each, *g.stride(), LOG=log, BLOCK=block(out.device), **OPTIONS
    )
    # In float64: what a mean is off by, all classes have, so that d_input does not average it out.
    total, weighted = parts[:2].sum(1, dtype=torch.float64)
    mean = (weighted / total).float()
    return mean, parts[2].amax(0) + mean.abs()


def write_gradient(
    dz: Tensor,
    out: Tensor,
    g: Tensor,
    mean: Tensor,
    first_class: int,
    product: Tensor | None,
    bias: Tensor | None,
    scale: float,
    transform: str,
    factor: Tensor | None,
    log: bool,
) -> None:
    """Write ``scale * factor`` times the gradient of the logits for the W classes from ``first_class`` on into ``dz``.

    ``out`` and ``g`` are ``[C, V]``, ``out`` contiguous. ``dz`` and ``product`` (what was transformed, before bias and
    scale, in float32; None where nothing is) are ``[C, W]`` with unit column strides; the rows of ``dz`` begin a
    multiple of ``PAD`` apart, and its columns between W and the next such multiple are overwritten.
    """
    (rows, classes), length = dz.shape, block(dz.device)
    padded = triton.cdiv(classes, PAD) * PAD
    gradient_kernel[(rows * triton.cdiv(padded, length),)](
        out,
        g,
        mean,
        product,
        bias,
        factor,
        dz,
        scale,
        first_class,
        classes,
        out.shape[1],
        *g.stride(),
        0 if product is None else product.stride(0),
        dz.stride(0),
        padded,
        TRANSFORM=transform,
        LOG=log,
        BLOCK=length,
        **OPTIONS,
    )
