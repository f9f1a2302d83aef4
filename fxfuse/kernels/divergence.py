"""Divergences between the rows of two heads, and their gradients, from stored products of a chunk of either head.

Both heads' logits are made of float32 products where they are read, so bias, scale and transform take no pass of their
own. As in ``softmax``, programs reduce tiles of parts of rows, so that rows may be of any length and number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dlogits import PAD
from .exponential import exponential
from .softmax import OPTIONS, block, divided, finished, log_softmax


@triton.jit(do_not_specialize=["rows", "splits", "tiles_per_split"])
def divergence_kernel(
    product,  # [rows, V] float32: the student's
    bias,  # [V] or None
    lse,  # [rows] float32
    residual,  # [rows] float32
    teacher_product,  # the same of the teacher
    teacher_bias,
    teacher_lse,
    teacher_residual,
    part_kl,  # [splits, rows] float32, out
    part_cross_entropy,  # [splits, rows] float32, out
    scale,
    teacher_scale,
    rows,
    vocab,
    splits,
    tiles_per_split,
    product_row,
    teacher_product_row,
    TRANSFORM: tl.constexpr,
    TEACHER_TRANSFORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    first = split * tiles_per_split
    kl = tl.zeros((BLOCK,), dtype=tl.float32)
    cross_entropy = tl.zeros((BLOCK,), dtype=tl.float32)
    for tile in range(first, tl.minimum(first + tiles_per_split, tl.cdiv(vocab, BLOCK))):
        col = tile * BLOCK + tl.arange(0, BLOCK)
        inside = col < vocab
        z, _slope = finished(product + row * product_row, bias, scale, col, inside, TRANSFORM)
        y, _slope = finished(
            teacher_product + row * teacher_product_row, teacher_bias, teacher_scale, col, inside, TEACHER_TRANSFORM
        )
        log_q = log_softmax(z, lse, residual, row)
        log_p = log_softmax(y, teacher_lse, teacher_residual, row)
        p = exponential(log_p)
        counts = inside & (p != 0)
        kl += tl.where(counts, p * (log_p - log_q), 0.0)
        cross_entropy -= tl.where(counts, p * log_q, 0.0)
    part = split.to(tl.int64) * rows + row
    tl.store(part_kl + part, tl.sum(kl, 0))
    tl.store(part_cross_entropy + part, tl.sum(cross_entropy, 0))


@triton.jit
def gradients_kernel(
    product,  # [rows, W] float32: the student's
    bias,  # [W] or None
    lse,  # [rows] float32
    residual,  # [rows] float32
    teacher_product,  # the same of the teacher
    teacher_bias,
    teacher_lse,
    teacher_residual,
    kl,  # [rows] float32
    cross_entropy,  # [rows] float32
    g_kl,  # [rows] float32
    g_cross_entropy,  # [rows] float32
    factor,  # [1] float32, or None for 1
    teacher_factor,  # [1] float32, or None for 1
    dz,  # [rows, W], out, or None: of the student's logits
    dy,  # [rows, W], out, or None: of the teacher's
    scale,
    teacher_scale,
    classes,  # W
    product_row,
    teacher_product_row,
    dz_row,
    dy_row,
    padded,  # W rounded up to a multiple of PAD
    TRANSFORM: tl.constexpr,
    TEACHER_TRANSFORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile_count = tl.cdiv(padded, BLOCK)
    row = (tl.program_id(0) // tile_count).to(tl.int64)
    col = tl.program_id(0) % tile_count * BLOCK + tl.arange(0, BLOCK)
    inside = col < classes
    z, slope = finished(product + row * product_row, bias, scale, col, inside, TRANSFORM)
    y, teacher_slope = finished(
        teacher_product + row * teacher_product_row, teacher_bias, teacher_scale, col, inside, TEACHER_TRANSFORM
    )
    log_q = log_softmax(z, lse, residual, row)
    log_p = log_softmax(y, teacher_lse, teacher_residual, row)
    p = exponential(log_p)
    row_g_kl = tl.load(g_kl + row)
    row_g_cross_entropy = tl.load(g_cross_entropy + row)
    # An idle row is zero even if its logits are not finite.
    active = (row_g_kl != 0) | (row_g_cross_entropy != 0)
    # The padding is written too: a mask at an odd W would break the stores into single elements.
    if dz is not None:
        d = (row_g_kl + row_g_cross_entropy) * (exponential(log_q) - p) * slope
        if factor is not None:
            scale = scale * tl.load(factor)
        d = tl.where(active, d * scale, 0.0)
        tl.store(dz + row * dz_row + col, d.to(dz.dtype.element_ty), mask=col < padded)
    if dy is not None:
        above = row_g_kl * (log_p - log_q - tl.load(kl + row))
        d = p * (above - row_g_cross_entropy * (log_q + tl.load(cross_entropy + row))) * teacher_slope
        if teacher_factor is not None:
            teacher_scale = teacher_scale * tl.load(teacher_factor)
        d = tl.where(active, tl.where(p != 0, d * teacher_scale, 0.0), 0.0)
        tl.store(dy + row * dy_row + col, d.to(dy.dtype.element_ty), mask=col < padded)


# --- launches -------------------------------------------------------------------------------------------------


class Logits(NamedTuple):
    """Logits of C rows and W classes of one head, as the kernels take them."""

    product: Tensor  # [C, W] float32 with unit column stride: input @ weight.T
    bias: Tensor | None  # [W], contiguous
    scale: float
    transform: str
    lse: Tensor  # [C] float32, contiguous, as are all vectors here: of all classes
    residual: Tensor  # [C] float32


def divergences(student: Logits, teacher: Logits) -> tuple[Tensor, Tensor]:
    """``kl`` and ``cross_entropy [C]``, float32, of whole rows."""
    rows, vocab = student.product.shape
    splits, each = divided(rows, vocab, student.product.device)
    parts = torch.empty((2, splits, rows), dtype=torch.float32, device=student.product.device)
    divergence_kernel[(rows * splits,)](
        student.product,
        student.bias,
        student.lse,
        student.residual,
        teacher.product,
        teacher.bias,
        teacher.lse,
        teacher.residual,
        *parts.unbind(),
        student.scale,
        teacher.scale,
        rows,
        vocab,
        splits,
        each,
        student.product.stride(0),
        teacher.product.stride(0),
        TRANSFORM=student.transform,
        TEACHER_TRANSFORM=teacher.transform,
        BLOCK=block(student.product.device),
        **OPTIONS,
    )
    kl, cross_entropy = parts.sum(1).unbind()
    return kl, cross_entropy


def write_gradients(
    dz: Tensor | None,
    dy: Tensor | None,
    student: Logits,
    teacher: Logits,
    kl: Tensor,
    cross_entropy: Tensor,
    g_kl: Tensor,
    g_cross_entropy: Tensor,
    factor: Tensor | None,
    teacher_factor: Tensor | None,
) -> None:
    """Write the gradients of the student's logits into ``dz`` and of the teacher's into ``dy``, times scale and factor.

    Either is ``[C, W]`` in the dtype of that head's operands, with unit column stride and rows a multiple of ``PAD``
    apart, or None; columns between W and the next such multiple are overwritten. The vectors are float32 ``[C]``.
    """
    (rows, classes), length = student.product.shape, block(student.product.device)
    padded = triton.cdiv(classes, PAD) * PAD
    gradients_kernel[(rows * triton.cdiv(padded, length),)](
        student.product,
        student.bias,
        student.lse,
        student.residual,
        teacher.product,
        teacher.bias,
        teacher.lse,
        teacher.residual,
        kl,
        cross_entropy,
        g_kl,
        g_cross_entropy,
        factor,
        teacher_factor,
        dz,
        dy,
        student.scale,
        teacher.scale,
        classes,
        student.product.stride(0),
        teacher.product.stride(0),
        0 if dz is None else dz.stride(0),
        0 if dy is None else dy.stride(0),
        padded,
        TRANSFORM=student.transform,
        TEACHER_TRANSFORM=teacher.transform,
        BLOCK=length,
        **OPTIONS,
    )
