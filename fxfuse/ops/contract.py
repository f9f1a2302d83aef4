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
``residual``            [N]      what rounding took from ``lse``: their sum is the log-sum-exp to about twice the
                                 precision. exp(z - lse) is off by as much as lse is, which at logits of some
                                 thousands is 5e-4 in float32, so the backward wants both. Not differentiable
======================  =======  ===========================================================================

All of these, and every coefficient and upstream gradient, are in the accumulation dtype: float64 for float64
operands, float32 for everything else.  ``index`` is int64 with entries in [0, V) or -1 for "none here":
``fxfuse::check_index`` makes it so, and an implementation must not touch foreign memory if it is not so.

Every statistic is linear in z but ``lse``, whose gradient is the softmax p.  So for upstream gradients
``g_lse [N]``, ``g_picked [N, K]`` and ``g_class_sum [N]`` the gradient of the logits is

    dz_ij = g_lse_i p_ij + sum_k g_picked_ik [j = index_ik] + g_class_sum_i c_j

and with ``du = dz * f'(u) * scale``, ``d_input = du @ weight``, ``d_weight = du.T @ input``, ``d_bias = du.sum(0)``.
A row whose three upstream gradients are all zero contributes exactly zero, whatever its logits are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics of operands of ``dtype`` are accumulated and returned."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def stash_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of gradients that ``linear_loss`` computes before the upstream gradient is known.

    float16 cannot hold them: unscaled by the loss scale they underflow.  float32 can.
    """
    return torch.float32 if dtype == torch.float16 else dtype


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


class Upstream(NamedTuple):
    """The gradient that each statistic receives (or the coefficients of a loss that is linear in them).

    In the accumulation dtype: ``lse [N]``, ``picked [N, K]`` and ``class_sum [N]`` or None.
    """

    lse: Tensor
    picked: Tensor
    class_sum: Tensor | None

    def nonzero(self) -> Tensor:
        """The rows that contribute anything, [N] bool."""
        rows = (self.lse != 0) | (self.picked != 0).any(1)
        return rows if self.class_sum is None else rows | (self.class_sum != 0)


def weighted(c: Tensor, s: Tensor) -> Tensor:
    """``sum c * s``, where a zero coefficient also silences a statistic that is not finite."""
    return torch.where(c == 0, 0.0, c * s).sum()


def normalisation(up: Upstream, class_weight: Tensor | None, steepest: float) -> tuple[Tensor, Tensor]:
    """A power of two that brings the finite gradients of the logits below 2**15, and its inverse, ``[1]`` float32 each.

    ``steepest`` bounds what the gradients of the logits are multiplied by on their way to the product.
    They then fit float16 with the largest near the top, so that small probabilities times small coefficients keep their
    bits. Nothing is read by the host.
    """
    rows = up.lse.abs() + up.picked.abs().sum(1)
    if up.class_sum is not None:
        rows = rows + up.class_sum.abs() * (1.0 if class_weight is None else class_weight.abs().amax())
    bound = torch.where(rows.isfinite(), rows, 0.0).amax(0, keepdim=True) * steepest
    _, exponent = torch.frexp(bound)
    # An exponent far below 0 would overflow the factor.
    exponent = exponent.clamp(min=-100)
    return torch.exp2((15 - exponent).float()), torch.exp2((exponent - 15).float())
