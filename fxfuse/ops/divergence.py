"""``fxfuse::linear_divergence``: how far the softmax of one head is from that of another, row by row.

A student (``input [N, D]``, ``weight [V, D]``, ``bias [V]`` or None, ``scale``, ``transform``) and a teacher (the same
with another D) have the logits z and y, both ``[N, V]``, as ``contract`` says; with q = softmax(z), p = softmax(y) and
their mixture m = (1 - share) q + share p, which is q itself for a ``share`` of 0

================================================================  =====================================================
``kl [N]``                                                        ``sum_j p_j (log p_j - log m_j)``
``cross_entropy [N]``                                             ``-sum_j p_j log m_j``
``student_kl [N]``                                                ``sum_j q_j (log q_j - log m_j)``
``overlap``, ``teacher_overlap [N]``                              ``sum_j u_j`` with ``u_j = p_j q_j / m_j``, over the
                                                                  sums of q and of p, for the backward
``counted [N]``                                                   ``sum_j p_j`` over the finite, for the backward
``lse``, ``residual``, ``teacher_lse``, ``teacher_residual [N]``  either head's log-sum-exps as in ``contract``, for the
                                                                  backward; unspecified in rows that are not finite
================================================================  =====================================================

``student_kl`` is empty for a share of 0, where it would be 0. A term is 0 where the probability before it is, whatever
the other is there (``torch.xlogy``): classes that both heads rule out count for nothing. With ``finite`` neither do
those for which the logit of either is infinite; without, ``counted`` would be 1 and is empty, as are the overlaps if
the share is 0, too. Each sum is one of such terms: the difference of a cross entropy and an entropy would cancel where
the student is close to the teacher. Each is taken over the sum of the probabilities in it: that is 1 but for rounding,
which all classes have in common, so that in the gradients of hidden states it would not average out. All are in the
accumulation dtype, float64 if an operand is and else float32; only ``kl``, ``cross_entropy`` and ``student_kl`` are
differentiable.

Hinton, Vinyals & Dean 2015 (arXiv:1503.02531) has the losses without a mixture; temperatures are scales. ``share kl +
(1 - share) student_kl`` is the generalised Jensen-Shannon divergence of Agarwal et al. 2024 (arXiv:2306.13649), and
either term alone the skewed one of Ko et al. 2024 (arXiv:2402.03898), whose code, as that of Gu et al. 2024
(arXiv:2306.08543), leaves out infinite logits.

The derivatives of log q_j by z_k and of log p_j by y_k are [j = k] - q_k and [j = k] - p_k, and those of log m_j are
(1 - share) q_j / m_j and share p_j / m_j times these. So upstream gradients ``g_kl``, ``g_cross_entropy`` and
``g_student_kl [N]`` give, with ``g = (1 - share) (g_kl + g_cross_entropy) - share g_student_kl``,

    dz_j = g_student_kl q_j (log q_j - log m_j - student_kl) - g (u_j - q_j overlap)
    dy_j = p_j (g_kl (log p_j - log m_j - kl) + g_cross_entropy (-log m_j - cross_entropy))
           + g (u_j - p_j teacher_overlap) - g_cross_entropy p_j (1 - counted)

times scale and slope. Where a logit is infinite and only the finite count, the logarithms, u_j and that 1 are 0.
Without a mixture u is p, and dz_j is g (q_j - p_j). What is multiplied by p_j or q_j is 0 where these are, and a row
whose upstream gradients are all zero contributes exactly zero. A teacher without gradients costs the backward its
logits and no further product. There is a chunk of the logits of either head at a time. ``memory`` bounds the buffers in
bytes; 0 leaves them to the implementation.

Here are the op's schema and what a CPU runs: ATen in chunks of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .chunked import Gradients, Head, row_slices
from .contract import acc_dtype
from .library import backward_fake, differentiable, if_needed, implement, lib, refuse_second_order

# Of the size of a chunk of logits, while it is worked on: of either head logits and a slope, and what is made of them.
BUFFERS, MIXED_BUFFERS = 6, 11


class Operands(NamedTuple):
    """The operands of the op, in the order of its schema."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: float
    teacher_input: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor | None
    teacher_scale: float

    @property
    def student(self) -> tuple[Tensor, Tensor, Tensor | None, float]:
        return self.input, self.weight, self.bias, self.scale

    @property
    def teacher(self) -> tuple[Tensor, Tensor, Tensor | None, float]:
        return self.teacher_input, self.teacher_weight, self.teacher_bias, self.teacher_scale

    @property
    def acc(self) -> torch.dtype:
        """The accumulation dtype of the two together."""
        return torch.promote_types(acc_dtype(self.input.dtype), acc_dtype(self.teacher_input.dtype))


class Divergences(NamedTuple):
    """What the op returns, in its order; see above."""

    kl: Tensor
    cross_entropy: Tensor
    student_kl: Tensor
    overlap: Tensor
    teacher_overlap: Tensor
    counted: Tensor
    lse: Tensor
    residual: Tensor
    teacher_lse: Tensor
    teacher_residual: Tensor

    @classmethod
    def empty(cls, operands: Operands, share: float, finite: bool) -> Divergences:
        """Memory for all."""
        rows = operands.input.shape[0]
        mixed, overlaps, counted = (rows if wanted else 0 for wanted in (share, share or finite, finite))
        sizes = (rows, rows, mixed, overlaps, overlaps, counted, *4 * (rows,))
        return cls(*(operands.input.new_empty((size,), dtype=operands.acc) for size in sizes))

    def write(self, at: slice, *parts: Tensor | None) -> None:
        """Set rows of each to what was made of them; None of what is empty."""
        for whole, part in zip(self, parts, strict=True):
            if part is not None:
                whole[at] = part


class Upstream(NamedTuple):
    """Upstream gradients of the divergences, ``[N]`` each; None without a mixture."""

    kl: Tensor
    cross_entropy: Tensor
    student_kl: Tensor | None

    @property
    def active(self) -> Tensor:
        """The rows that count, ``[N]``."""
        active = (self.kl != 0) | (self.cross_entropy != 0)
        return active if self.student_kl is None else active | (self.student_kl != 0)

    def of_overlap(self, share: float) -> Tensor:
        """What multiplies the terms with u, ``[N]``."""
        g = self.kl + self.cross_entropy
        return g if self.student_kl is None else (1.0 - share) * g - share * self.student_kl


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

    @classmethod
    def both(cls, operands: Operands, transform: str, teacher_transform: str) -> tuple[_Side, _Side]:
        return (
            cls(operands.input, Head.of(*operands.student, transform), operands.acc),
            cls(operands.teacher_input, Head.of(*operands.teacher, teacher_transform), operands.acc),
        )

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


class _Mixed(NamedTuple):
    """Entry by entry, what relates two distributions to their mixture, ``[C, V]`` each."""

    above: Tensor  # log p - log m
    log_m: Tensor
    student_above: Tensor | None  # log q - log m, where m is not q
    u: Tensor | None  # p q / m, where that is not p
    infinite: Tensor | None  # where one of them is, if such count for nothing: all of the others are 0 there

    @classmethod
    def of(cls, log_q: Tensor, log_p: Tensor, q: Tensor | None, p: Tensor, share: float, finite: bool) -> _Mixed:
        """``q`` is needed with a mixture alone."""
        if not finite:
            return cls(*cls._parts(log_q, log_p, q, p, share), None)
        infinite = log_q.isinf().logical_or_(log_p.isinf())
        above, log_m, student_above, u = cls._parts(log_q, log_p, q, p, share)

        def of_finite(part: Tensor) -> Tensor:
            return part.masked_fill(infinite, 0.0)

        student_above = None if student_above is None else of_finite(student_above)
        return cls(of_finite(above), of_finite(log_m), student_above, of_finite(p if u is None else u), infinite)

    @staticmethod
    def _parts(
        log_q: Tensor, log_p: Tensor, q: Tensor | None, p: Tensor, share: float
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        if not share:
            return log_p - log_q, log_q, None, None
        assert q is not None
        # Of the larger of p and q, m is the part (1 - w) + w r, with r the smaller over the larger and w its weight in
        # m. Where they are close, so that this is close to 1, only 1 + w (r - 1) keeps how far it is from that.
        apart = log_q - log_p
        r = apart.abs().neg_().exp_()
        of_q, of_p = (apart.new_full((), part) for part in (1.0 - share, share))
        w, rest = torch.where(apart < 0, of_q, of_p), torch.where(apart < 0, of_p, of_q)
        part = torch.where(r < 0.5, rest + w * r, 1.0 + w * (r - 1.0))
        u = (torch.minimum(p, q) / part).masked_fill_((p == 0) | (q == 0), 0.0)
        below = part.log_()
        above = (-apart).clamp_(max=0.0) - below
        return above, log_p - above, apart.clamp_(max=0.0).sub_(below), u


def _mean(weight: Tensor, terms: Tensor, total: Tensor) -> Tensor:
    """The means ``[C]`` by weights whose sums are ``total``, of terms that count for nothing where the weight is 0."""
    return (weight * terms).masked_fill_(weight == 0, 0.0).sum(1) / total


def _slices(student: _Side, share: float, finite: bool, memory: int) -> list[slice]:
    vocab = student.head.weight.shape[0]
    buffers = MIXED_BUFFERS if share or finite else BUFFERS
    return row_slices(student.input.shape[0], vocab * student.acc.itemsize, memory, buffers)


def linear_divergence_chunked(
    *args: Any,
    share: float = 0.0,
    finite: bool = False,
    transform: str = "",
    teacher_transform: str = "",
    memory: int = 0,
) -> Divergences:
    operands = Operands(*args)
    student, teacher = _Side.both(operands, transform, teacher_transform)
    out = Divergences.empty(operands, share, finite)
    for at in _slices(student, share, finite, memory):
        log_q, log_p = student.log_softmax(at, False), teacher.log_softmax(at, False)
        p, q = log_p.values.exp(), log_q.values.exp() if share or finite else None
        mixed = _Mixed.of(log_q.values, log_p.values, q, p, share, finite)
        student_kl = overlap = teacher_overlap = counted = None
        teacher_total = p.sum(1)
        if q is not None:
            assert mixed.u is not None
            student_total, u_total = q.sum(1), mixed.u.sum(1)
            overlap, teacher_overlap = u_total / student_total, u_total / teacher_total
            if mixed.student_above is not None:
                student_kl = _mean(q, mixed.student_above, student_total)
        if mixed.infinite is not None:
            counted = p.masked_fill(mixed.infinite, 0.0).sum(1) / teacher_total
        kl, cross_entropy = _mean(p, mixed.above, teacher_total), -_mean(p, mixed.log_m, teacher_total)
        divergences = kl, cross_entropy, student_kl, overlap, teacher_overlap, counted
        out.write(at, *divergences, log_q.lse, log_q.residual, log_p.lse, log_p.residual)
    return out


def linear_divergence_backward_chunked(
    *args: Any,
    g_student_kl: Tensor | None = None,
    share: float = 0.0,
    finite: bool = False,
    transform: str = "",
    teacher_transform: str = "",
    memory: int = 0,
) -> tuple[Tensor, ...]:
    operands, have, g, needs = taken_apart(args, g_student_kl)
    student, teacher = _Side.both(operands, transform, teacher_transform)
    grads = Gradients(operands.input.shape[0], student.head, *needs[:3])
    teacher_grads = Gradients(operands.input.shape[0], teacher.head, *needs[3:])
    active, g_u = g.active, g.of_overlap(share)
    for at in _slices(student, share, finite, memory):
        log_q, log_p = student.log_softmax(at, grads.any()), teacher.log_softmax(at, teacher_grads.any())
        p, q = log_p.values.exp(), log_q.values.exp() if share or grads.any() else None
        mixed = _Mixed.of(log_q.values, log_p.values, q, p, share, finite)
        if grads.any():
            assert q is not None
            if mixed.u is None:
                dz = q.sub_(p).mul_(g_u[at, None])
            else:
                dz = (q * have.overlap[at, None]).sub_(mixed.u).mul_(g_u[at, None])
            if mixed.student_above is not None:
                assert g.student_kl is not None
                above = mixed.student_above.sub_(have.student_kl[at, None]).mul_(g.student_kl[at, None])
                dz.add_(above.mul_(q).masked_fill_(q == 0, 0.0))
            student.add(grads, at, dz, log_q.slope, active[at])
        if teacher_grads.any():
            dy = mixed.above.sub_(have.kl[at, None]).mul_(g.kl[at, None])
            dy.sub_(mixed.log_m.add_(have.cross_entropy[at, None]).mul_(g.cross_entropy[at, None]))
            dy = dy.mul_(p).masked_fill_(p == 0, 0.0)
            if mixed.u is not None:
                dy.add_((mixed.u - p * have.teacher_overlap[at, None]).mul_(g_u[at, None]))
            if mixed.infinite is not None:
                rest = p.masked_fill(mixed.infinite, 0.0).sub_(p * have.counted[at, None])
                dy.sub_(rest.mul_(g.cross_entropy[at, None]))
            teacher.add(teacher_grads, at, dy, log_p.slope, active[at])
    return *grads.like(*operands.student[:3]), *teacher_grads.like(*operands.teacher[:3])


def taken_apart(
    args: tuple[Any, ...], g_student_kl: Tensor | None
) -> tuple[Operands, Divergences, Upstream, tuple[bool, ...]]:
    """The arguments of the backward: operands, what the forward returned, upstream gradients, and the needs."""
    return Operands(*args[:8]), Divergences(*args[8:18]), Upstream(args[18], args[19], g_student_kl), args[20:]


# --- the op ---------------------------------------------------------------------------------------------------

_OPERANDS = (
    "Tensor input, Tensor weight, Tensor? bias, float scale,"
    " Tensor teacher_input, Tensor teacher_weight, Tensor? teacher_bias, float teacher_scale"
)
_OPTIONS = "float share=0.0, bool finite=False, str transform='', str teacher_transform='', int memory=0"
_NEEDS = (
    "bool need_input, bool need_weight, bool need_bias,"
    " bool need_teacher_input, bool need_teacher_weight, bool need_teacher_bias"
)
_DIVERGENCES = ", ".join(f"Tensor {name}" for name in Divergences._fields)


def _tensors(count: int) -> str:
    return f"({', '.join(['Tensor'] * count)})"


for _schema in (
    f"linear_divergence({_OPERANDS}, *, {_OPTIONS}) -> {_tensors(len(Divergences._fields))}",
    f"linear_divergence_backward({_OPERANDS}, {_DIVERGENCES}, Tensor g_kl, Tensor g_cross_entropy, {_NEEDS},"
    f" *, Tensor? g_student_kl=None, {_OPTIONS}) -> {_tensors(6)}",
):
    lib.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

linear_divergence = torch.ops.fxfuse.linear_divergence.default
linear_divergence_backward = torch.ops.fxfuse.linear_divergence_backward.default


@torch.library.register_fake("fxfuse::linear_divergence", lib=lib)
def _fake(*args: Any, share: float = 0.0, finite: bool = False, **_: Any) -> tuple[Tensor, ...]:
    return tuple(Divergences.empty(Operands(*args), share, finite))


@torch.library.register_fake("fxfuse::linear_divergence_backward", lib=lib)
def _backward_fake(*args: Any, **_: Any) -> tuple[Tensor, ...]:
    needs = args[-6:]
    return *backward_fake(*args[:3], *needs[:3]), *backward_fake(*args[4:7], *needs[3:])


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]) -> None:
    *student, ctx.scale, teacher_input, teacher_weight, teacher_bias, ctx.teacher_scale = inputs
    ctx.options = keyword_only_inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[3 if ctx.options["share"] else 2 :])
    ctx.save_for_backward(*student, teacher_input, teacher_weight, teacher_bias, *output)


def _backward(
    ctx: Any, g_kl: Tensor | None, g_cross_entropy: Tensor | None, g_student_kl: Tensor | None, *_: None
) -> tuple[Any, ...]:
    refuse_second_order("linear_divergence")
    saved = ctx.saved_tensors  # once: a checkpoint computes them for each time that they are asked for, or refuses
    student, teacher, out = saved[:3], saved[3:6], saved[6:]
    upstream = (g_kl, g_cross_entropy, g_student_kl)
    if all(g is None for g in upstream):
        return (None,) * 8
    g_kl, g_cross_entropy, g_student_kl = (torch.zeros_like(out[0]) if g is None else g for g in upstream)
    needs = ctx.needs_input_grad[:3] + ctx.needs_input_grad[4:7]
    grads = linear_divergence_backward(
        *student, ctx.scale, *teacher, ctx.teacher_scale, *out, g_kl, g_cross_entropy, *needs,
        g_student_kl=g_student_kl if ctx.options["share"] else None, **ctx.options,
    )  # fmt: skip
    d = if_needed(grads, needs)
    return *d[:3], None, *d[3:], None


differentiable(linear_divergence, _backward, _setup)
implement(linear_divergence, "cpu", linear_divergence_chunked)
implement(linear_divergence_backward, "cpu", linear_divergence_backward_chunked)
