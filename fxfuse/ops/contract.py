"""What every implementation of the ops computes, and the types it computes in.

Letters: N rows (tokens), D hidden size, V vocabulary (classes), K indexed classes per row.

For hidden states ``input [N, D]``, a head ``weight [V, D]`` with optional ``bias [V]``, a number ``scale`` and a
pointwise function f, ``transform`` (see ``fxfuse.transform``; the identity unless given), the logits are
``z = f(u)`` with ``u = scale * (input @ weight.T + bias)``.  They are never an argument and never a result.  The
**row statistics** of z are

======================  =======  ===========================================================================
``lse``                 [N]      ``log sum_j exp z_ij``
``picked``              [N, K]   ``z_i,index_ik``                    (0 where ``index_ik`` is -1)
``log_prob``            [N, K]   ``z_i,index_ik - lse_i``, evaluated as ``(z - max) - log sum exp(z - max)``,
                                 which does not cancel when the probability is near one (0 at index -1;
                                 NaN, as ``log_softmax`` gives, in a row whose maximum is not finite)
``class_sum``           [N]      ``sum_j c_j z_ij``, where ``c`` is ``class_weight [V]`` or all ones;
                                 an empty tensor unless asked for
``log_prob_sum``        [N]      ``sum_j c_j (z_ij - lse_i)``, evaluated without what all logits of a row have in
                                 common, of which ``class_sum`` and ``lse`` may be the rounding; an empty tensor unless
                                 asked for
``residual``            [N]      what rounding took from ``lse``: their sum is the log-sum-exp to about twice the
                                 precision. exp(z - lse) is off by as much as lse is, which at logits of some
                                 thousands is 5e-4 in float32, so the backward wants both. Not differentiable
``expectation``         [N]      ``sum_j p_ij z_ij`` of the softmax p: ``lse - entropy``, without the rounding of these.
                                 NaN where ``entropy`` is; an empty tensor unless asked for. Comes with ``entropy``,
                                 which its gradient is made of
``entropy``             [N]      ``-sum_j p_ij log p_ij`` of the softmax p, evaluated as ``log s - t / s`` with
                                 ``m = max_j z_ij``, ``s = sum_j exp(z_ij - m)``,
                                 ``t = sum_j (z_ij - m) exp(z_ij - m)``: neither term is negative, so
                                 nothing cancels where one class is nearly certain. NaN, as eager's ``0 * -inf`` gives,
                                 in a row with a logit of -inf or with a maximum that is not finite; an empty
                                 tensor unless asked for
``top``                 [N]      ``max_j z_ij``, NaN in a row with a NaN; an empty tensor unless asked for
``argmax``              [N]      int64: where ``top`` is, as ``torch.max`` has it: the lowest of equals, the first NaN
                                 if there is one. Comes with ``top``. Not differentiable
======================  =======  ===========================================================================

All of these but ``argmax``, and every coefficient and upstream gradient, are in the accumulation dtype: float64 for
float64 operands, float32 for everything else.  A call that skips rows without an index gives them zeros throughout.
``index`` is int64 with entries in [0, V) or -1 for "none here": ``fxfuse::check_index`` makes it so, and an
implementation must not touch foreign memory if it is not so.

Every statistic is linear in z but ``lse`` and those with it in their formula, ``entropy``, ``expectation`` and ``top``.
The gradient of ``lse`` is the softmax p.  With ``log p_ij = z_ij - lse_i``, the entropy is ``H = lse - sum_k p_k z_k``,
and ``dp_k / dz_j = p_k ([j = k] - p_j)``, so

    dH / dz_j = p_j - p_j - p_j (z_j - sum_k p_k z_k) = -p_j (log p_j + H)

which is evaluated as it stands on the right, with the residual in log p: both summands are small where one class is
nearly certain.  Where a gradient of ``expectation`` is in ``g_entropy``, an implementation may take that statistic, and
``z_ij - expectation_i`` for ``log p_ij + H_i``: of small logits H is far larger.  The gradients of ``log_prob``,
``log_prob_sum`` and ``expectation`` are differences of others.  ``top`` is the logit at ``argmax``, which receives its
gradient: to a backward it is one more indexed class.  So for upstream gradients ``g_lse [N]``, ``g_picked [N, K]``,
``g_class_sum [N]`` and ``g_entropy [N]`` the gradient of the logits is

    dz_ij = g_lse_i p_ij + sum_k g_picked_ik [j = index_ik] + g_class_sum_i c_j - g_entropy_i p_ij (log p_ij + H_i)

and with ``du = dz * f'(u) * scale``, ``d_input = du @ weight``, ``d_weight = du.T @ input``, ``d_bias = du.sum(0)``.
A row whose upstream gradients are all zero contributes exactly zero, whatever its logits are.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SUPPORTED_DEVICES = ("cpu", "cuda")
SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
AUTOCAST_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))  # which autocast converts to its own


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics of operands of ``dtype`` are accumulated and returned."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def stash_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of gradients that ``linear_loss`` computes before the upstream gradient is known.

    float16 cannot hold them: unscaled by the loss scale they underflow.  float32 can.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def gradient_dtypes(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """The dtypes of the gradients of a head's operands."""
    return input.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype


def gradient_or_none(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype, needed: bool) -> Tensor:
    """A zeroed gradient of ``shape``, or the empty tensor that stands for "not asked for"."""
    return like.new_zeros(shape if needed else (0,), dtype=dtype)


@dataclass(frozen=True)
class Operands:
    """A head's operands, as the ops are given them."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    index: Tensor
    class_weight: Tensor | None
    scale: float
    transform: str

    @property
    def leaves(self) -> tuple[Tensor | float | str | None, ...]:
        return self.input, self.weight, self.bias, self.index, self.class_weight, self.scale, self.transform


class RowStats(NamedTuple):
    """The row statistics, in the order in which the op returns them; empty where not asked for."""

    lse: Tensor
    picked: Tensor
    log_prob: Tensor
    class_sum: Tensor
    log_prob_sum: Tensor
    residual: Tensor
    expectation: Tensor
    entropy: Tensor
    top: Tensor
    argmax: Tensor


class Upstream(NamedTuple):
    """The gradient that each statistic receives.

    In the accumulation dtype: ``lse [N]``, ``picked [N, K]``, ``class_sum [N]`` or None, ``entropy [N]`` or None.
    """

    lse: Tensor
    picked: Tensor
    class_sum: Tensor | None
    entropy: Tensor | None = None

    def nonzero(self) -> Tensor:
        """The rows that contribute anything, [N] bool."""
        rows = (self.lse != 0) | (self.picked != 0).any(1)
        for g in (self.class_sum, self.entropy):
            if g is not None:
                rows = rows | (g != 0)
        return rows


class Coefficients(NamedTuple):
    """Those of a loss that is linear in the statistics, with None for zeros.

    In the accumulation dtype: ``log_prob [N, K]``, ``log_prob_sum [N]``.
    """

    log_prob: Tensor
    log_prob_sum: Tensor | None

    def known(self, index: Tensor) -> Coefficients:
        """With zeros where there is no index."""
        return self._replace(log_prob=torch.where(index >= 0, self.log_prob, 0.0))

    def upstream(self, total: Tensor | float) -> Upstream:
        """The gradients that they are: of log-probabilities, so they count for what these are the difference of.

        ``total`` is what the weights of all classes add up to.
        """
        lse = -self.log_prob.sum(1)
        if self.log_prob_sum is not None:
            lse = lse - torch.where(self.log_prob_sum == 0, 0.0, self.log_prob_sum * total)
        return Upstream(lse, self.log_prob, self.log_prob_sum)

    def loss(self, *statistics: Tensor | None) -> Tensor:
        """``sum c * s``, where a zero coefficient also silences a statistic that is not finite."""
        terms = ((c, s) for c, s in zip(self, statistics, strict=True) if c is not None and s is not None)
        return functools.reduce(torch.add, (torch.where(c == 0, 0.0, c * s).sum() for c, s in terms))


def total_weight(class_weight: Tensor | None, vocab: int, dtype: torch.dtype) -> Tensor | float:
    """What the weights ``[V]`` of all classes add up to, 0-d in ``dtype``; of all ones where there are none."""
    return float(vocab) if class_weight is None else class_weight.sum(dtype=dtype)


def normalisation(
    up: Upstream, class_weight: Tensor | None, steepest: float, entropy: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A power of two that brings the finite gradients of the logits below 2**15, and its inverse, ``[1]`` float32 each.

    ``entropy [N]`` is the statistic itself, where ``up`` has a gradient for it.  ``steepest`` bounds
    what the gradients of the logits are multiplied by on their way to the product.
    They then fit float16 with the largest near the top, so that small probabilities times small coefficients keep their
    bits. Nothing is read by the host.
    """
    rows = up.lse.abs() + up.picked.abs().sum(1)
    if up.class_sum is not None:
        rows = rows + up.class_sum.abs() * (1.0 if class_weight is None else class_weight.abs().amax())
    if up.entropy is not None and entropy is not None:
        # p (log p + H) lies between the least p log p, which is -1/e, and H.
        rows = rows + up.entropy.abs() * entropy.clamp(min=1 / math.e)
    return power_of_two(rows, steepest)


def power_of_two(rows: Tensor, steepest: float) -> tuple[Tensor, Tensor]:
    """The same for given bounds ``[N]`` of the gradients of each row, of which there is at least one."""
    bound = torch.where(rows.isfinite(), rows, 0.0).amax(0, keepdim=True) * steepest
    _, exponent = torch.frexp(bound)
    # An exponent far below 0 would overflow the factor.
    exponent = exponent.clamp(min=-100)
    return torch.exp2((15 - exponent).float()), torch.exp2((exponent - 15).float())
