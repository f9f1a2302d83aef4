"""``linear_divergence`` on a GPU: cuBLAS for all products, Triton for what is done to logits.

The forward goes by chunks of rows: float32 products of both heads are made in buffers, which the kernels reduce. The
backward knows the log-sum-exps, so it goes by windows along the longer axis, as ``general`` does. The logits are never
rounded to 16 bits; their gradients are, for the products with them. float64, and GPUs without Triton, take
``divergence``'s way. On CPU tensors the same code runs under Triton's interpreter.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import tiles
from ..transform import decode, steepest
from . import gpu
from .contract import power_of_two
from .divergence import (
    Divergences,
    Operands,
    Upstream,
    linear_divergence_backward_chunked,
    linear_divergence_chunked,
    taken_apart,
)
from .windows import Gradients, chunks_of, multiply, of_products, window_bytes, windows_of


class _Head(NamedTuple):
    """One head's operands, as cuBLAS and the kernels take them."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: float
    transform: str

    @classmethod
    def of(cls, input: Tensor, weight: Tensor, bias: Tensor | None, scale: float, transform: str) -> _Head:
        decode(transform)  # which raises where it is none
        return cls(input, weight, gpu.contiguous(bias), float(scale), transform)

    @classmethod
    def both(cls, operands: Operands, transform: str, teacher_transform: str) -> tuple[_Head, _Head]:
        return cls.of(*operands.student, transform), cls.of(*operands.teacher, teacher_transform)

    def product(self, at_rows: slice, at_classes: slice, buffer: Tensor) -> tuple[Tensor, Tensor | None, float, str]:
        """``input @ weight.T`` there, float32 in ``buffer``, and what makes it logits."""
        product = _window(buffer, at_rows, at_classes)
        multiply(self.input[at_rows], self.weight[at_classes].t(), product)
        return product, None if self.bias is None else self.bias[at_classes], self.scale, self.transform

    def factor(self, bound: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What brings gradients within ``bound [N]`` into float16's range, and what undoes it, if there is need."""
        if self.input.dtype != torch.float16:
            return None, None
        return power_of_two(bound, abs(self.scale) * steepest(decode(self.transform)))


def _has_kernels(operands: Operands) -> bool:
    heads = operands.student, operands.teacher
    return operands.input.shape[0] > 0 and all(gpu.has_kernels(input, weight) for input, weight, *_ in heads)


def _window(buffer: Tensor, at_rows: slice, at_classes: slice) -> Tensor:
    return buffer[: at_rows.stop - at_rows.start, : at_classes.stop - at_classes.start]


def _buffer(input: Tensor, rows: slice, classes: slice, dtype: torch.dtype) -> Tensor:
    """Memory for windows no larger than the first, whose rows begin on whole vectors."""
    return input.new_empty((rows.stop, tiles.padded(classes.stop)), dtype=dtype)


def linear_divergence(
    *args: Any,
    share: float = 0.0,
    finite: bool = False,
    transform: str = "",
    teacher_transform: str = "",
    memory: int = 0,
) -> Divergences:
    operands = Operands(*args)
    if not _has_kernels(operands):
        return linear_divergence_chunked(
            *args, share=share, finite=finite, transform=transform, teacher_transform=teacher_transform, memory=memory
        )
    from ..kernels.divergence import Logits, divergences
    from ..kernels.softmax import row_stats

    heads = _Head.both(operands, transform, teacher_transform)
    rows, vocab = operands.input.shape[0], operands.weight.shape[0]
    out = Divergences.empty(operands, share, finite)
    row_bytes, whole = 2 * 4 * vocab, slice(0, vocab)  # of both heads' products
    chunks = chunks_of(rows, row_bytes, window_bytes(rows * row_bytes, of_products(memory)))
    buffers = [_buffer(operands.input, chunks[0], whole, torch.float32) for _ in heads]
    with gpu.current(operands.input.device):
        for here in chunks:
            read = [head.product(here, whole, at) for head, at in zip(heads, buffers, strict=True)]
            log_q, log_p = (Logits(*one, *row_stats(*one)) for one in read)
            made = divergences(log_q, log_p, share, finite)
            out.write(here, *made, log_q.lse, log_q.residual, log_p.lse, log_p.residual)
    return out


def linear_divergence_backward(
    *args: Any,
    g_student_kl: Tensor | None = None,
    share: float = 0.0,
    finite: bool = False,
    transform: str = "",
    teacher_transform: str = "",
    memory: int = 0,
) -> tuple[Tensor, ...]:
    operands, have, g, needs = taken_apart(args, g_student_kl)
    if not _has_kernels(operands):
        return linear_divergence_backward_chunked(
            *args, g_student_kl=g_student_kl, share=share, finite=finite, transform=transform,
            teacher_transform=teacher_transform, memory=memory,
        )  # fmt: skip
    from ..kernels.divergence import Logits, Row, write_gradients

    heads = student, teacher = _Head.both(operands, transform, teacher_transform)
    rows, vocab = operands.input.shape[0], operands.weight.shape[0]
    have = Divergences(*(t.contiguous() for t in have))
    g_u = g.of_overlap(share)
    row = Row(*(None if t is None or not len(t) else t.contiguous() for t in (*have[:6], *g, g_u)))  # type: ignore[arg-type]
    # An idle row's gradient is zero, but zero times a NaN in its hidden states would still reach the weight.
    active = g.active[:, None]
    wanted = any(needs[:3]), any(needs[3:])
    element = 2 * 4 + sum(head.input.dtype.itemsize for head, want in zip(heads, wanted, strict=True) if want)
    cut = windows_of(rows, vocab, element, of_products(memory))
    at_rows, at_classes = cut
    sums, buffers, factors = [], [], []
    for head, need, want, bound in zip(heads, (needs[:3], needs[3:]), wanted, _bounds(have, g, g_u), strict=True):
        factor, undo = head.factor(bound)
        counted = torch.where(active, head.input, 0.0) if need[1] else head.input
        sums.append(Gradients(head.input, head.weight, head.bias, counted, need, cut, undo))
        buffers.append(_buffer(head.input, at_rows[0], at_classes[0], head.input.dtype) if want else None)
        factors.append(factor)
    products = [_buffer(operands.input, at_rows[0], at_classes[0], torch.float32) for _ in heads]
    with gpu.current(operands.input.device):
        for here in at_rows:
            for at in at_classes:
                log_q = Logits(*student.product(here, at, products[0]), have.lse[here], have.residual[here])
                log_p = Logits(
                    *teacher.product(here, at, products[1]), have.teacher_lse[here], have.teacher_residual[here]
                )
                dz, dy = (None if buffer is None else _window(buffer, here, at) for buffer in buffers)
                write_gradients(dz, dy, log_q, log_p, share, row.at(here), *factors)
                for total, gradient in zip(sums, (dz, dy), strict=True):
                    if gradient is not None:
                        total.add(here, at, gradient)
    # Before the sums are converted, which needs about as much memory again.
    del buffers, products, log_q, log_p, dz, dy
    return tuple(one for total in sums for one in total.result())


def _bounds(have: Divergences, g: Upstream, g_u: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds ``[N]`` of the gradients of the logits of either head, before scale and slope."""
    # Where p_j (log p_j - log m_j) sums up to kl, each term lies between -1/e and kl + 1/e. u is a harmonic mean of p
    # and q, so its terms and their sum are at most 1.
    of_student = g_u.abs()
    of_teacher = g.kl.abs() * _most(have.kl) + g.cross_entropy.abs() * have.cross_entropy
    if len(have.counted):
        of_teacher = of_teacher + g_u.abs() + g.cross_entropy.abs()
    if g.student_kl is None:
        return of_student, of_teacher
    return of_student + g.student_kl.abs() * _most(have.student_kl), of_teacher + g_u.abs()


def _most(kl: Tensor) -> Tensor:
    return kl.clamp(min=0) + 1 / math.e
