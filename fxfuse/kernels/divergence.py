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

from .exponential import exponential
from .logits import PAD
from .softmax import OPTIONS, block, divided, finished, log_softmax


@triton.jit
def mixed(log_q, log_p, share, own):
    """log q and log p less log m, and m over the larger of q and p; m is own q + share p. See ``ops.divergence``."""
    apart = log_q - log_p
    r = exponential(-tl.abs(apart))
    w = tl.where(apart < 0.0, own, share)
    part = tl.where(r < 0.5, tl.where(apart < 0.0, share, own) + w * r, 1.0 + w * (r - 1.0))
    below = tl.log(part)
    # Of a NaN ``below`` is one too.
    return tl.minimum(apart, 0.0) - below, tl.minimum(-apart, 0.0) - below, part


@triton.jit
def finite(log_q, log_p):
    """Where neither is infinite. (What is no number is none of these.)"""
    return (tl.abs(log_q) != float("inf")) & (tl.abs(log_p) != float("inf"))


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
    part_total,  # [splits, rows] float32, out: sums of p
    part_kl,  # the same: of p (log p - log m)
    part_cross_entropy,  # the same: of -p log m
    part_student_total,  # the same: of q; or None where q is m and all count
    part_overlap,  # the same: of p q / m
    part_student_kl,  # the same: of q (log q - log m); or None where q is m
    part_counted,  # the same: of p where both logits are finite; or None where all count
    scale,
    teacher_scale,
    share,
    own,  # 1 - share
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
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    kl = tl.zeros((BLOCK,), dtype=tl.float32)
    cross_entropy = tl.zeros((BLOCK,), dtype=tl.float32)
    student_total = tl.zeros((BLOCK,), dtype=tl.float32)
    student_kl = tl.zeros((BLOCK,), dtype=tl.float32)
    overlap = tl.zeros((BLOCK,), dtype=tl.float32)
    counted = tl.zeros((BLOCK,), dtype=tl.float32)
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
        if part_counted is not None:
            counts &= finite(log_q, log_p)
            counted += tl.where(counts, p, 0.0)
        log_m = log_q
        above = log_p - log_q
        u = p
        if part_overlap is not None:
            q = exponential(log_q)
            student_total += tl.where(inside, q, 0.0)
        if part_student_kl is not None:
            student_above, above, part = mixed(log_q, log_p, share, own)
            log_m = log_p - above
            student_counts = inside & (q != 0)
            if part_counted is not None:
                student_counts &= finite(log_q, log_p)
            student_kl += tl.where(student_counts, q * student_above, 0.0)
            u = tl.where(q != 0, tl.minimum(p, q) / part, 0.0)
        if part_overlap is not None:
            overlap += tl.where(counts, u, 0.0)
        total += tl.where(inside, p, 0.0)
        kl += tl.where(counts, p * above, 0.0)
        cross_entropy -= tl.where(counts, p * log_m, 0.0)
    at = split.to(tl.int64) * rows + row
    tl.store(part_total + at, tl.sum(total, 0))
    tl.store(part_kl + at, tl.sum(kl, 0))
    tl.store(part_cross_entropy + at, tl.sum(cross_entropy, 0))
    if part_overlap is not None:
        tl.store(part_student_total + at, tl.sum(student_total, 0))
        tl.store(part_overlap + at, tl.sum(overlap, 0))
    if part_student_kl is not None:
        tl.store(part_student_kl + at, tl.sum(student_kl, 0))
    if part_counted is not None:
        tl.store(part_counted + at, tl.sum(counted, 0))


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
    kl,  # [rows] float32, as are all from here on
    cross_entropy,
    student_kl,  # or None, where q is m
    overlap,  # or None, where q is m and all count
    teacher_overlap,  # or None
    counted,  # or None, where all count
    g_kl,
    g_cross_entropy,
    g_student_kl,  # or None
    g_u,  # what multiplies the terms with u
    factor,  # [1] float32, or None for 1
    teacher_factor,  # [1] float32, or None for 1
    dz,  # [rows, W], out, or None: of the student's logits
    dy,  # [rows, W], out, or None: of the teacher's
    scale,
    teacher_scale,
    share,
    own,  # 1 - share
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
    q = exponential(log_q)
    row_g_kl = tl.load(g_kl + row)
    row_g_cross_entropy = tl.load(g_cross_entropy + row)
    row_g_u = tl.load(g_u + row)
    # An idle row is zero even if its logits are not finite.
    active = (row_g_kl != 0) | (row_g_cross_entropy != 0)
    log_m = log_q
    above = log_p - log_q
    u = p
    if student_kl is not None:
        row_g_student_kl = tl.load(g_student_kl + row)
        active |= row_g_student_kl != 0
        student_above, above, part = mixed(log_q, log_p, share, own)
        log_m = log_p - above
        u = tl.where((p != 0) & (q != 0), tl.minimum(p, q) / part, 0.0)
    if counted is not None:
        counts = finite(log_q, log_p)
        above = tl.where(counts, above, 0.0)
        log_m = tl.where(counts, log_m, 0.0)
        u = tl.where(counts, u, 0.0)
        if student_kl is not None:
            student_above = tl.where(counts, student_above, 0.0)
    # The padding is written too: a mask at an odd W would break the stores into single elements.
    if dz is not None:
        of_q = q
        if overlap is not None:
            of_q = q * tl.load(overlap + row)
        d = row_g_u * (of_q - u)
        if student_kl is not None:
            d += tl.where(q != 0, row_g_student_kl * q * (student_above - tl.load(student_kl + row)), 0.0)
        if factor is not None:
            scale = scale * tl.load(factor)
        d = tl.where(active, d * slope * scale, 0.0)
        tl.store(dz + row * dz_row + col, d.to(dz.dtype.element_ty), mask=col < padded)
    if dy is not None:
        above = row_g_kl * (above - tl.load(kl + row))
        d = p * (above - row_g_cross_entropy * (log_m + tl.load(cross_entropy + row)))
        d = tl.where(p != 0, d, 0.0)
        if overlap is not None:
            d += row_g_u * (u - p * tl.load(teacher_overlap + row))
        if counted is not None:
            d -= row_g_cross_entropy * (tl.where(counts, p, 0.0) - p * tl.load(counted + row))
        if teacher_factor is not None:
            teacher_scale = teacher_scale * tl.load(teacher_factor)
        d = tl.where(active, d * teacher_slope * teacher_scale, 0.0)
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

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.product, self.bias, self.lse, self.residual


class Row(NamedTuple):
    """What the gradients need of each row, float32 ``[C]``; None of what is not made. See ``ops.divergence``."""

    kl: Tensor
    cross_entropy: Tensor
    student_kl: Tensor | None
    overlap: Tensor | None
    teacher_overlap: Tensor | None
    counted: Tensor | None
    g_kl: Tensor
    g_cross_entropy: Tensor
    g_student_kl: Tensor | None
    g_u: Tensor

    def at(self, rows: slice) -> Row:
        return Row(*(None if t is None else t[rows] for t in self))  # type: ignore[arg-type]


def divergences(student: Logits, teacher: Logits, share: float, finite: bool) -> tuple[Tensor | None, ...]:
    """``kl``, ``cross_entropy``, ``student_kl``, ``overlap``, ``teacher_overlap``, ``counted``; None of what is empty.

    Of whole rows, float64 ``[C]``; see ``ops.divergence``.
    """
    rows, vocab = student.product.shape
    splits, each = divided(rows, vocab, student.product.device)
    wanted = (True, True, True, share or finite, share or finite, share, finite)
    parts = torch.empty((sum(map(bool, wanted)), splits, rows), dtype=torch.float32, device=student.product.device)
    each_part = iter(parts)
    divergence_kernel[(rows * splits,)](
        *student.tensors,
        *teacher.tensors,
        *(next(each_part) if want else None for want in wanted),
        student.scale,
        teacher.scale,
        share,
        1.0 - share,
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
    sums = iter(parts.sum(1, dtype=torch.float64))
    total, kl, cross_entropy, student_total, overlap, student_kl, counted = (
        next(sums) if want else None for want in wanted
    )

    def over(sum: Tensor | None, whole: Tensor | None) -> Tensor | None:
        return None if sum is None or whole is None else sum / whole

    return (
        over(kl, total), over(cross_entropy, total), over(student_kl, student_total), over(overlap, student_total),
        over(overlap, total), over(counted, total),
    )  # fmt: skip


def write_gradients(
    dz: Tensor | None,
    dy: Tensor | None,
    student: Logits,
    teacher: Logits,
    share: float,
    row: Row,
    factor: Tensor | None,
    teacher_factor: Tensor | None,
) -> None:
    """Write the gradients of the student's logits into ``dz`` and of the teacher's into ``dy``, times scale and factor.

    Either is ``[C, W]`` in the dtype of that head's operands, with unit column stride and rows a multiple of ``PAD``
    apart, or None; columns between W and the next such multiple are overwritten.
    """
    (rows, classes), length = student.product.shape, block(student.product.device)
    padded = triton.cdiv(classes, PAD) * PAD
    gradients_kernel[(rows * triton.cdiv(padded, length),)](
        *student.tensors,
        *teacher.tensors,
        *row,
        factor,
        teacher_factor,
        dz,
        dy,
        student.scale,
        teacher.scale,
        share,
        1.0 - share,
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
