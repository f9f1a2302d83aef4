"""``fxfuse::linear_divergence``: how far the softmax of one head is from that of another, row by row.

A student (``input [N, D]``, ``weight [V, D]``, ``bias [V]`` or None, ``scale``, ``transform``) and a teacher (the same
with another D) have the logits z and y, both ``[N, V]``, as ``contract`` says; with q = softmax(z) and p = softmax(y)

================================================================  =====================================================
``kl [N]``                                                        ``sum_j p_j (log p_j - log q_j)``
``cross_entropy [N]``                                             ``-sum_j p_j log q_j``
``lse``, ``residual``, ``teacher_lse``, ``teacher_residual [N]``  either head's log-sum-exps as in ``contract``, for the
                                                                  backward; unspecified in rows that are not finite
================================================================  =====================================================

A term is 0 where p_j is, whatever q_j is there (``torch.xlogy``): classes that both heads rule out count for nothing.
Each sum is one of such terms: the difference of a cross entropy and an entropy would cancel where the student is close
to the teacher. All are in the accumulation dtype, float64 if an operand is and else float32; only ``kl`` and
``cross_entropy`` are differentiable. Hinton, Vinyals & Dean 2015 (arXiv:1503.02531) has the losses; temperatures are
scales.

As sum_j p_j = sum_j q_j = 1 and the derivative of log p_j by y_k is [j = k] - p_k, upstream gradients ``g_kl [N]`` and
``g_cross_entropy [N]`` give

    dz_j = (g_kl + g_cross_entropy) (q_j - p_j)
    dy_j = p_j (g_kl (log p_j - log q_j - kl) + g_cross_entropy (-log q_j - cross_entropy))

times scale and slope. dy_j too is 0 where p_j is, and a row whose upstream gradients are both zero contributes exactly
zero. A teacher without gradients costs the backward its logits and no further product. There is a chunk of the logits
of either head at a time. ``memory`` bounds the buffers in bytes; 0 leaves them to the implementation.

Here are the op's schema and what a CPU runs: ATen in chunks of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .chunked import Gradients, Head, row_slices
from .contract import acc_dtype
from .library import backward_fake, guarded, lib, refuse_second_order

_OPERANDS = (
    "Tensor input, Tensor weight, Tensor? bias, float scale,"
    " Tensor teacher_input, Tensor teacher_weight, Tensor? teacher_bias, float teacher_scale"
)
_OPTIONS = "str transform='', str teacher_transform='', int memory=0"
_NEEDS = (
    "bool need_input, bool need_weight, bool need_bias,"
    " bool need_teacher_input, bool need_teacher_weight, bool need_teacher_bias"
)
# Of the size of a chunk of logits, while it is worked on: of either head logits and a slope, and what is made of them.
BUFFERS = 6


class _LogSoftmax(NamedTuple):
    values: Tensor  # [C, V]
    slope: Tensor | None  # [C, V]: the derivative of the transform, if it was wanted and is not 1
    lse: Tensor  # [C]
    residual: Tensor  # [C]


class _Side(NamedTuple):
    """One of the two heads with its hidden states, and the dtype in which both are compared."""

    input: Tensor
    head: Head
    acc: torch.dtype

    def log_softmax(self, at: slice, want_slope: bool) -> _LogSoftmax:
        buffer = self.input.new_empty((at.stop - at.start, self.head.weight.shape[0]), dtype=self.head.acc)
        z, slope = self.head.logits(self.input[at].to(self.head.acc), buffer, want_slope)
        z = z.to(self.acc)
        top = z.amax(1)
        z = z.sub_(top[:, None])
        total = z.exp().sum(1).log()
        lse = top + total
        return _LogSoftmax(z.sub_(total[:, None]), slope, lse, ((top - lse) + total).nan_to_num_(0.0))

    def add(self, grads: Gradients, at: slice, dz: Tensor, slope: Tensor | None, active: Tensor) -> None:
        """Add to ``grads`` what the gradient ``dz [C, V]`` of transformed logits gives, which is overwritten."""
        if not grads.any():
            return
        dz = dz.to(self.head.acc)
        if slope is not None:
            dz.mul_(slope)
        # Zero times a NaN in the hidden states of an idle row would still reach the weight.
        rows = self.input[at].to(self.head.acc).masked_fill(~active[:, None], 0.0)
        grads.add(at, rows, dz.mul_(self.head.scale).masked_fill_(~active[:, None], 0.0))


def accumulates_in(input: Tensor, teacher_input: Tensor) -> torch.dtype:
    """The accumulation dtype of the two together."""
    return torch.promote_types(acc_dtype(input.dtype), acc_dtype(teacher_input.dtype))


def _slices(student: _Side, memory: int) -> list[slice]:
    vocab = student.head.weight.shape[0]
    return row_slices(student.input.shape[0], BUFFERS * vocab * student.acc.itemsize, memory)


def linear_divergence_chunked(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    teacher_scale: float,
    *,
    transform: str = "",
    teacher_transform: str = "",
    memory: int = 0,
) -> tuple[Tensor, ...]:
    acc = accumulates_in(input, teacher_input)
    student = _Side(input, Head.of(input, weight, bias, scale, transform), acc)
    teacher_head = Head.of(teacher_input, teacher_weight, teacher_bias, teacher_scale, teacher_transform)
    teacher = _Side(teacher_input, teacher_head, acc)
    out = tuple(input.new_empty((input.shape[0],), dtype=acc) for _ in range(6))
    for at in _slices(student, memory):
        log_q, log_p = student.log_softmax(at, False), teacher.log_softmax(at, False)
        p = log_p.values.exp()
        nothing = p == 0
        kl = (log_p.values - log_q.values).mul_(p).masked_fill_(nothing, 0.0).sum(1)
        cross_entropy = -p.mul_(log_q.values).masked_fill_(nothing, 0.0).sum(1)
        made = (kl, cross_entropy, log_q.lse, log_q.residual, log_p.lse, log_p.residual)
        for whole, part in zip(out, made, strict=True):
            whole[at] = part
    return out


def linear_divergence_backward_chunked(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    teacher_scale: float,
    kl: Tensor,
    cross_entropy: Tensor,
    lse: Tensor,
    residual: Tensor,
    teacher_lse: Tensor,
    teacher_residual: Tensor,
    g_kl: Tensor,
    g_cross_entropy: Tensor,
    *needs: bool,
    transform: str = "",
    teacher_transform: str = "",
    memory: int = 0,
) -> tuple[Tensor, ...]:
    acc = accumulates_in(input, teacher_input)
    student = _Side(input, Head.of(input, weight, bias, scale, transform), acc)
    teacher_head = Head.of(teacher_input, teacher_weight, teacher_bias, teacher_scale, teacher_transform)
    teacher = _Side(teacher_input, teacher_head, acc)
    grads = Gradients(input.shape[0], student.head, *needs[:3])
    teacher_grads = Gradients(input.shape[0], teacher.head, *needs[3:])
    active = (g_kl != 0) | (g_cross_entropy != 0)
    for at in _slices(student, memory):
        log_q, log_p = student.log_softmax(at, grads.any()), teacher.log_softmax(at, teacher_grads.any())
        p = log_p.values.exp()
        if grads.any():
            dz = log_q.values.exp().sub_(p).mul_((g_kl + g_cross_entropy)[at, None])
            student.add(grads, at, dz, log_q.slope, active[at])
        if teacher_grads.any():
            # The logarithms are not needed any more once they are in here.
            dy = log_p.values.sub_(log_q.values).sub_(kl[at, None]).mul_(g_kl[at, None])
            dy.sub_(log_q.values.add_(cross_entropy[at, None]).mul_(g_cross_entropy[at, None]))
            teacher.add(teacher_grads, at, dy.mul_(p).masked_fill_(p == 0, 0.0), log_p.slope, active[at])
    return *grads.like(input, weight, bias), *teacher_grads.like(teacher_input, teacher_weight, teacher_bias)


# --- the op ---------------------------------------------------------------------------------------------------

_STATISTICS = (
    "Tensor kl, Tensor cross_entropy, Tensor lse, Tensor residual, Tensor teacher_lse, Tensor teacher_residual"
)
_SIX = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"

for _name, _schema, _implementation in (
    ("linear_divergence", f"({_OPERANDS}, *, {_OPTIONS}) -> {_SIX}", linear_divergence_chunked),
    (
        "linear_divergence_backward",
        f"({_OPERANDS}, {_STATISTICS}, Tensor g_kl, Tensor g_cross_entropy, {_NEEDS}, *, {_OPTIONS}) -> {_SIX}",
        linear_divergence_backward_chunked,
    ),
):
    lib.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    lib.impl(_name, guarded(_name, "cpu", _implementation), "CPU")

linear_divergence = torch.ops.fxfuse.linear_divergence.default
linear_divergence_backward = torch.ops.fxfuse.linear_divergence_backward.default


@torch.library.register_fake("fxfuse::linear_divergence", lib=lib)
def _fake(*args: Any, **_: Any) -> tuple[Tensor, ...]:
    input, teacher_input = args[0], args[4]
    acc = accumulates_in(input, teacher_input)
    return tuple(input.new_empty(input.shape[:1], dtype=acc) for _ in range(6))


@torch.library.register_fake("fxfuse::linear_divergence_backward", lib=lib)
def _backward_fake(*args: Any, **_: Any) -> tuple[Tensor, ...]:
    needs = args[-6:]
    return *backward_fake(*args[:3], *needs[:3]), *backward_fake(*args[4:7], *needs[3:])


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]) -> None:
    *student, ctx.scale, teacher_input, teacher_weight, teacher_bias, ctx.teacher_scale = inputs
    ctx.options = keyword_only_inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*student, teacher_input, teacher_weight, teacher_bias, *output)


def _backward(ctx: Any, g_kl: Tensor | None, g_cross_entropy: Tensor | None, *_: None) -> tuple[Any, ...]:
    refuse_second_order("linear_divergence")
    student, teacher, out = ctx.saved_tensors[:3], ctx.saved_tensors[3:6], ctx.saved_tensors[6:]
    if g_kl is None and g_cross_entropy is None:
        return (None,) * 8
    g_kl, g_cross_entropy = (torch.zeros_like(out[0]) if g is None else g for g in (g_kl, g_cross_entropy))
    needs = ctx.needs_input_grad[:3] + ctx.needs_input_grad[4:7]
    grads = linear_divergence_backward(
        *student, ctx.scale, *teacher, ctx.teacher_scale, *out, g_kl, g_cross_entropy, *needs, **ctx.options
    )
    d = [grad if need else None for grad, need in zip(grads, needs, strict=True)]
    return *d[:3], None, *d[3:], None


torch.library.register_autograd("fxfuse::linear_divergence", _backward, setup_context=_setup, lib=lib)
