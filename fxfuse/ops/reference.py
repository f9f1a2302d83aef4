"""The ops as their definitions read, with the logits in full: the oracle of the tests.

Run it on float64 operands for reference values.  It allocates [N, V] and is never dispatched to.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..transform import apply_with_slope, decode
from .contract import RowStats, acc_dtype, stash_dtype


def logits(
    input: Tensor, weight: Tensor, bias: Tensor | None, scale: float, transform: str
) -> tuple[Tensor, Tensor | None]:
    """``f(u)`` for ``u = scale * (input @ weight.T + bias)`` in the accumulation dtype, [N, V], and ``f'(u)``."""
    acc = acc_dtype(input.dtype)
    z = input.to(acc) @ weight.to(acc).t()
    if bias is not None:
        z = z + bias.to(acc)
    return apply_with_slope(decode(transform), z * scale)


def linear_stats(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    class_weight: Tensor | None,
    scale: float,
    want_class_sum: bool,
    skip_unindexed: bool,
    *,
    want_log_prob_sum: bool = False,
    want_expectation: bool = False,
    want_entropy: bool = False,
    want_top: bool = False,
    transform: str = "",
) -> tuple[Tensor, ...]:
    z, _ = logits(input, weight, bias, scale, transform)
    indexed = index >= 0
    at = index.clamp(min=0)
    zero = z.new_zeros(())
    lse, log_p = z.logsumexp(1), z.log_softmax(1)
    picked = torch.where(indexed, z.gather(1, at), zero)
    log_prob = torch.where(indexed, log_p.gather(1, at), zero)
    class_sum = log_prob_sum = expectation = entropy = top = z.new_zeros((0,))
    argmax = index.new_zeros((0,))
    c = 1.0 if class_weight is None else class_weight.to(z.dtype)
    if want_class_sum:
        class_sum = (z * c).sum(1)
    if want_log_prob_sum:
        log_prob_sum = (log_p * c).sum(1)
    if want_expectation:
        expectation = (log_p.exp() * z).sum(1)
    if want_entropy or want_expectation:
        entropy = -(log_p.exp() * log_p).sum(1)
    if want_top:
        top, argmax = z.max(1)
    # An oracle is asked in float64, where the rounding of lse is below every bound.
    residual = torch.zeros_like(lse)
    if skip_unindexed:
        wanted = indexed.any(1)
        lse, class_sum, log_prob_sum, expectation, entropy, top, argmax = (
            torch.where(wanted, t, 0) if t.numel() else t
            for t in (lse, class_sum, log_prob_sum, expectation, entropy, top, argmax)
        )
    return RowStats(lse, picked, log_prob, class_sum, log_prob_sum, residual, expectation, entropy, top, argmax)


def linear_stats_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    class_weight: Tensor | None,
    scale: float,
    lse: Tensor,
    residual: Tensor,
    g_lse: Tensor,
    g_picked: Tensor,
    g_class_sum: Tensor | None,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
    *,
    entropy: Tensor | None = None,
    g_entropy: Tensor | None = None,
    expectation: Tensor | None = None,
    transform: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    z, slope = logits(input, weight, bias, scale, transform)
    log_p = (z - lse[:, None]) - residual[:, None]
    dz = g_lse[:, None] * log_p.exp()
    dz = dz.scatter_add(1, index.clamp(min=0), torch.where(index >= 0, g_picked, 0.0))
    idle = (g_lse == 0) & (g_picked == 0).all(1)
    if g_class_sum is not None:
        c = z.new_ones(z.shape[1]) if class_weight is None else class_weight.to(z.dtype)
        dz = dz + g_class_sum[:, None] * c
        idle &= g_class_sum == 0
    if g_entropy is not None:
        assert entropy is not None
        dz = dz - g_entropy[:, None] * log_p.exp() * (log_p + entropy[:, None])
        idle &= g_entropy == 0
    if slope is not None:
        dz = dz * slope
    dz = torch.where(idle[:, None], 0.0, dz) * scale
    none = input.new_zeros((0,))
    return (
        (dz @ weight.to(dz.dtype)).to(input.dtype) if need_input else none,
        (dz.t() @ input.to(dz.dtype)).to(weight.dtype) if need_weight else none,
        dz.sum(0).to(weight.dtype if bias is None else bias.dtype) if need_bias else none,
    )


def linear_loss(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    class_weight: Tensor | None,
    scale: float,
    c_log_prob: Tensor,
    c_log_prob_sum: Tensor | None,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
    *,
    transform: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse, _, log_prob, _, log_prob_sum, residual, *_ = linear_stats(
        input, weight, bias, index, class_weight, scale, False, False, want_log_prob_sum=True, transform=transform
    )
    c_log_prob = torch.where(index >= 0, c_log_prob, 0.0)
    g_lse = -c_log_prob.sum(1)

    def weighted(c: Tensor, s: Tensor) -> Tensor:
        return torch.where(c == 0, 0.0, c * s).sum()

    loss = weighted(c_log_prob, log_prob)
    if c_log_prob_sum is not None:
        loss = loss + weighted(c_log_prob_sum, log_prob_sum)
        total = weight.shape[0] if class_weight is None else class_weight.to(lse.dtype).sum()
        g_lse = g_lse - torch.where(c_log_prob_sum == 0, 0.0, c_log_prob_sum * total)
    stash = stash_dtype(input.dtype)
    grads = linear_stats_backward(
        input.to(stash),
        weight.to(stash),
        None if bias is None else bias.to(stash_dtype(bias.dtype)),
        index,
        class_weight,
        scale,
        lse,
        residual,
        g_lse,
        c_log_prob,
        c_log_prob_sum,
        need_input,
        need_weight,
        need_bias,
        transform=transform,
    )
    return loss, *grads


def linear_softmax(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float,
    log: bool,
    dtype: torch.dtype,
    *,
    transform: str = "",
) -> Tensor:
    z, _ = logits(input, weight, bias, scale, transform)
    return (z.log_softmax(1) if log else z.softmax(1)).to(dtype)


def linear_topk(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float,
    k: int,
    largest: bool,
    sorted: bool,
    *,
    transform: str = "",
) -> tuple[Tensor, ...]:
    z, _ = logits(input, weight, bias, scale, transform)
    lse = z.logsumexp(1)
    return *z.topk(k, 1, largest, sorted), lse, torch.zeros_like(lse)


def linear_divergence(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    teacher_scale: float,
    *,
    share: float = 0.0,
    finite: bool = False,
    transform: str = "",
    teacher_transform: str = "",
) -> tuple[Tensor, ...]:
    z, _ = logits(input, weight, bias, scale, transform)
    y, _ = logits(teacher_input, teacher_weight, teacher_bias, teacher_scale, teacher_transform)
    log_q, log_p = z.log_softmax(1), y.log_softmax(1)
    q, p, zero = log_q.exp(), log_p.exp(), z.new_zeros(())
    left_out = z.isinf() | y.isinf() if finite else torch.zeros_like(z, dtype=torch.bool)
    log_m, student_kl, overlap, counted = log_q, *3 * (z.new_zeros((0,)),)
    if share:
        log_m = torch.logaddexp(log_q + math.log1p(-share), log_p + math.log(share))
        student_kl = torch.where((q == 0) | left_out, zero, q * (log_q - log_m)).sum(1)
    if share or finite:
        overlap = torch.where((p == 0) | (q == 0) | left_out, zero, p * q / log_m.exp()).sum(1)
    if finite:
        counted = torch.where(left_out, zero, p).sum(1)
    kl = torch.where((p == 0) | left_out, zero, p * (log_p - log_m)).sum(1)
    cross_entropy = -torch.where((p == 0) | left_out, zero, p * log_m).sum(1)
    lse, teacher_lse = z.logsumexp(1), y.logsumexp(1)
    residual = torch.zeros_like(lse)
    return kl, cross_entropy, student_kl, overlap, overlap, counted, lse, residual, teacher_lse, residual
