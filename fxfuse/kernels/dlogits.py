"""The gradient of the logits for a window of rows and classes, from logits that are computed anew."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .exponential import exponential
from .logits import PAD, grouped, logits_tile


@triton.jit(do_not_specialize=["rows", "indexed"])
def dlogits_kernel(
    x,  # [rows, D]
    w,  # [V, D]
    product,  # [rows, padded] float32: x @ w.T, or None, to make it here; may be the same memory as dz
    bias,  # [V] or None
    index,  # [rows, K] int64
    class_weight,  # [V] or None
    lse,  # [rows] float32
    residual,  # [rows] float32
    g_lse,  # [rows] float32
    g_picked,  # [rows, K] float32
    g_class_sum,  # [rows] float32, or None
    g_entropy,  # [rows] float32, or None
    entropy,  # [rows] float32, or None
    expectation,  # [rows] float32, or None: taken in the place of the entropy
    factor,  # [1] float32, or None for 1
    dz,  # [rows, padded], out
    scale,
    rows,
    vocab,
    hidden,
    indexed,  # K
    first_class,  # the class of column 0
    padded,  # V rounded up to a multiple of PAD
    x_row,
    x_col,
    w_row,
    w_col,
    x_step,
    w_step,
    product_row,
    dz_row,
    TRANSFORM: tl.constexpr,
    EVEN_VOCAB: tl.constexpr,
    EVEN_HIDDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    GROUP: tl.constexpr,
):
    row_blocks = tl.cdiv(rows, BLOCK_ROWS)
    row_block, tile = grouped(tl.program_id(0), row_blocks, tl.cdiv(vocab, BLOCK_VOCAB), GROUP)
    row = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = row < rows
    row64 = row.to(tl.int64)
    tile_start = tile * BLOCK_VOCAB
    col = tile_start + tl.arange(0, BLOCK_VOCAB)

    row_g = tl.load(g_lse + row, mask=in_rows, other=0.0)
    active = row_g != 0
    for k in range(indexed):
        active = active | (tl.load(g_picked + row64 * indexed + k, mask=in_rows, other=0.0) != 0)
    if g_class_sum is not None:
        row_g_class_sum = tl.load(g_class_sum + row, mask=in_rows, other=0.0)
        active = active | (row_g_class_sum != 0)
    if g_entropy is not None:
        row_g_entropy = tl.load(g_entropy + row, mask=in_rows, other=0.0)
        active = active | (row_g_entropy != 0)

    z, slope = logits_tile(
        x,
        w,
        product,
        bias,
        scale,
        tl.minimum(row, rows - 1),
        col,
        vocab,
        padded,
        hidden,
        tl.where(tl.max(active.to(tl.int32), 0) > 0, hidden, 0),  # no product for a block of idle rows
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
    # z - lse is exact where it matters, and only then is the residual not lost beside it.
    log_p = z - tl.load(lse + row, mask=in_rows, other=0.0)[:, None]
    log_p = log_p - tl.load(residual + row, mask=in_rows, other=0.0)[:, None]
    # 16 bits hold fewer digits than tl.exp gives, in fewer instructions.
    p = exponential(log_p) if dz.dtype.element_ty == tl.float32 else tl.exp(log_p)
    g = row_g[:, None] * p
    if g_entropy is not None:
        # The same number: where logits are small, lse and entropy are far larger than it, and so are their roundings.
        if expectation is not None:
            above = z - tl.load(expectation + row, mask=in_rows, other=0.0)[:, None]
        else:
            above = log_p + tl.load(entropy + row, mask=in_rows, other=0.0)[:, None]
        # In this order: the least number of a dtype may become infinite, which 0 would make NaN.
        g -= row_g_entropy[:, None] * (p * above)
    for k in range(indexed):
        at = row64 * indexed + k
        local = tl.load(index + at, mask=in_rows, other=-1) - first_class - tile_start
        local = tl.where((local >= 0) & (local < BLOCK_VOCAB), local, -1).to(tl.int32)
        row_g_picked = tl.load(g_picked + at, mask=in_rows, other=0.0)
        hit = tl.arange(0, BLOCK_VOCAB)[None, :] == local[:, None]
        g += tl.where(hit, row_g_picked[:, None], 0.0)
    if g_class_sum is not None:
        if class_weight is None:
            g += row_g_class_sum[:, None]
        else:
            c = tl.load(class_weight + col, mask=col < vocab, other=0.0).to(tl.float32)
            g += row_g_class_sum[:, None] * c[None, :]
    g *= slope
    if factor is not None:
        scale = scale * tl.load(factor)
    # An idle row is zero even if its logits or its lse are not finite.
    g = tl.where(active[:, None], g * scale, 0.0)
    # The padding is written too: a mask at an odd V would break the stores into single elements.
    tl.store(
        dz + row64[:, None] * dz_row + col[None, :],
        g.to(dz.dtype.element_ty),
        mask=in_rows[:, None] & (col < padded)[None, :],
    )


def write_dlogits(
    dz: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    first_class: int,
    class_weight: Tensor | None,
    scale: float,
    transform: str,
    lse: Tensor,
    residual: Tensor,
    g_lse: Tensor,
    g_picked: Tensor,
    g_class_sum: Tensor | None,
    g_entropy: Tensor | None,
    entropy: Tensor | None,
    expectation: Tensor | None,
    factor: Tensor | None,
    product: Tensor | None = None,
) -> None:
    """Write ``scale * factor`` times the gradient of the logits of ``x [C, D]`` and ``weight [W, D]`` into ``dz``.

    ``weight``, ``bias [W]`` and ``class_weight [W]`` are the classes from ``first_class`` on; ``index [C, K]`` counts
    from class 0. ``dz`` is ``[C, W]`` in the operands' dtype, with unit column stride and a row stride that is a
    multiple of ``PAD`` and at least W; columns between W and the next multiple of ``PAD`` are overwritten. ``lse``,
    ``residual``, ``g_lse``, ``g_class_sum``, ``g_entropy``, ``entropy`` and ``expectation`` ``[C]``, ``g_picked
    [C, K]`` and the one-element ``factor`` are float32. With an ``expectation``, ``entropy`` is not read.
    ``x`` and ``weight`` may have any strides, the rest is contiguous. ``product [C, W]`` is ``x @ weight.T`` in
    float32, laid out as ``dz``, which may be the same memory; None to make it here, of operands in 16 bits.
    """
    (rows, hidden), vocab = x.shape, weight.shape[0]
    shape = tiles.tile(x, weight) if product is None else tiles.stored(x.device)
    dlogits_kernel[(triton.cdiv(rows, shape.rows) * triton.cdiv(vocab, shape.vocab),)](
        x,
        weight,
        product,
        bias,
        index,
        class_weight,
        lse,
        residual,
        g_lse,
        g_picked,
        g_class_sum,
        g_entropy,
        entropy,
        expectation,
        factor,
        dz,
        scale,
        rows,
        vocab,
        hidden,
        index.shape[1],
        first_class,
        triton.cdiv(vocab, PAD) * PAD,
        *x.stride(),
        *weight.stride(),
        shape.hidden * x.stride(1),
        shape.hidden * weight.stride(1),
        0 if product is None else product.stride(0),
        dz.stride(0),
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
