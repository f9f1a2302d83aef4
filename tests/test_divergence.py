"""``torch.ops.fxfuse.linear_divergence`` against eager and its definition."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DTYPE_IDS,
    DTYPES,
    FLOORS,
    SOME_SLOW,
    LargestTensor,
    assert_no_worse_than_eager,
    doubled,
    every_other_row,
    floor,
    problem,
    relative_error,
    strided,
    transposed,
    upstream,
    value_and_grads,
)
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import opcheck

from fxfuse import FxfuseError, ops
from fxfuse.ops import chunked, divergence, reference
from fxfuse.ops.contract import acc_dtype

inf, nan = float("inf"), float("nan")
SOFTCAPS = {"transform": "tanh mul:3.0", "teacher_transform": "tanh mul:2.0"}
SCALE, TEACHER_SCALE = 0.5, -0.75
MIXED = {"share": 0.3}
FINITE: dict[str, Any] = {"finite": True}
OPTIONS = [{}, SOFTCAPS, MIXED, {"share": 0.8, **SOFTCAPS}, FINITE, FINITE | MIXED]
OPTION_IDS = ["plain", "softcap", "mixture", "softcap and mixture", "finite", "finite and mixture"]


def two_heads(
    rows: int, hidden: int, vocab: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, ...]:
    """Input, weight and bias of a student and of a teacher with more hidden units."""
    student, teacher = problem(rows, hidden, vocab, dtype, device), problem(rows, 2 * hidden + 3, vocab, dtype, device)
    return student.input, student.weight, student.bias, teacher.input, teacher.weight, teacher.bias


def arguments(operands: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return *operands[:3], SCALE, *operands[3:], TEACHER_SCALE


def read(out: Sequence[Tensor], share: float) -> tuple[Tensor, ...]:
    """The divergences of what the op returns."""
    return tuple(out[: 3 if share else 2])


def ours(*operands: Tensor | None, share: float = 0.0, **options: Any) -> tuple[Tensor, ...]:
    return read(ops.linear_divergence(*arguments(operands), share=share, **options), share)


def divergences(log_q: Tensor, log_p: Tensor, share: float) -> tuple[Tensor, ...]:
    """As TRL computes the first and the last of them."""
    log_m, p = log_q, log_p.exp()
    if share:
        log_m = torch.logsumexp(torch.stack([log_q + math.log1p(-share), log_p + math.log(share)]), 0)
    kls = (F.kl_div(log_m, t, reduction="none", log_target=True).sum(1) for t in (log_p, log_q))
    kl, student_kl = kls
    return (kl, -(p * log_m).sum(1), student_kl) if share else (kl, -(p * log_m).sum(1))


def eager(
    *operands: Tensor | None,
    share: float = 0.0,
    finite: bool = False,
    transform: str = "",
    teacher_transform: str = "",
) -> tuple[Tensor, ...]:
    """As a careful user writes them: the projections in the operands' dtypes, the rest in float32."""
    if finite:
        return of_the_finite(*operands, share=share)

    def log_softmax(input: Any, weight: Any, bias: Any, scale: float, softcap: float | None) -> Tensor:
        z = F.linear(input, weight, bias).to(acc_dtype(input.dtype)) * scale
        return (z if softcap is None else z.tanh() * softcap).log_softmax(1)

    log_q = log_softmax(*operands[:3], SCALE, 3.0 if transform else None)
    log_p = log_softmax(*operands[3:], TEACHER_SCALE, 2.0 if teacher_transform else None)
    return divergences(log_q, log_p, share)


def of_the_finite(*operands: Tensor | None, share: float) -> tuple[Tensor, ...]:
    """As MiniLLM and DistiLLM write them: with zeros where the logit of either is infinite."""
    z, y = (
        F.linear(x, w, b).to(acc_dtype(x.dtype)) * scale  # type: ignore[arg-type, union-attr]
        for x, w, b, scale in ((*operands[:3], SCALE), (*operands[3:], TEACHER_SCALE))
    )
    infinite = z.isinf() | y.isinf()
    # What is put in the place of -inf changes neither softmax, and keeps its gradient from becoming NaN.
    log_q, log_p = (t.masked_fill(t.isinf(), -1e4).log_softmax(1) for t in (z, y))
    q, p = log_q.exp(), log_p.exp()
    log_m = torch.logaddexp(log_q + math.log1p(-share), log_p + math.log(share)) if share else log_q

    def of(terms: Tensor) -> Tensor:
        return terms.masked_fill(infinite, 0).sum(1)

    divergences = of(p * (log_p - log_m)), of(-p * log_m), of(q * (log_q - log_m))
    return divergences if share else divergences[:2]


def with_biases(biases: bool, f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``f`` of all six operands, or of the four that are no biases."""
    if biases:
        return lambda *six: f(*six, **options)
    return lambda x, w, y, v: f(x, w, None, y, v, None, **options)


# --- values and gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=OPTION_IDS)
@pytest.mark.parametrize("biases", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("shape", SOME_SLOW, ids=str)
def test_errs_no_more_than_eager(
    device: str, shape: tuple[int, int, int], dtype: torch.dtype, biases: bool, options: dict[str, Any]
) -> None:
    if "share" in options and shape[2] == 1:
        pytest.skip("a divergence of zero is all rounding in eager")
    operands = two_heads(*shape, dtype, device)
    given = operands if biases else (*operands[:2], *operands[3:5])
    ours_, eager_ = (with_biases(biases, f, **options) for f in (ours, eager))
    exact = value_and_grads(eager_, *doubled(*given))
    assert_no_worse_than_eager(
        value_and_grads(ours_, *given), value_and_grads(eager_, *given), exact,
        # With a mixture terms of either sign add up to the gradients, and in a row or seven roundings are luck.
        floor(shape, dtype) * (5 if "share" in options else 1),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["kl", "cross_entropy", "student_kl"])
def test_each_alone_has_its_gradients(device: str, which: int, share: float, dtype: torch.dtype) -> None:
    if which == 2 and not share:
        pytest.skip("there is none without a mixture")
    operands = two_heads(21, 8, 37, dtype, device)
    ours_, eager_ = (lambda *six, f=f: f(*six, share=share)[which] for f in (ours, eager))
    exact = value_and_grads(eager_, *doubled(*operands))
    assert_no_worse_than_eager(value_and_grads(ours_, *operands), value_and_grads(eager_, *operands), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("distance", [1e-1, 1e-2, 1e-3])
def test_a_student_close_to_its_teacher(device: str, distance: float, share: float, dtype: torch.dtype) -> None:
    """Its divergence is about the square of the distance: far below the two sums whose difference it is, too."""
    p = problem(200, 16, 301, dtype, device)
    noise = torch.randn(p.weight.shape, generator=torch.Generator().manual_seed(0)).to(p.weight) * distance

    def total(kl: Tensor, _: Tensor, student_kl: Tensor | None = None) -> Tensor:
        return kl if student_kl is None else share * kl + (1 - share) * student_kl

    def by_op(x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return total(*read(ops.linear_divergence(x, w, None, 1.0, y, v, None, 1.0, share=share), share))

    def by_hand(x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> Tensor:
        log_q, log_p = ((a @ b.t()).to(acc_dtype(a.dtype)).log_softmax(1) for a, b in ((x, w), (y, v)))
        return total(*divergences(log_q, log_p, share))

    operands = (p.input, p.weight + noise, p.input.clone(), p.weight)
    exact = value_and_grads(by_hand, *doubled(*operands))
    assert 0 < float(exact[0].mean()) < 20 * distance**2 + 1e-2 * (dtype in (torch.float16, torch.bfloat16))
    assert_no_worse_than_eager(
        value_and_grads(by_op, *operands),
        value_and_grads(by_hand, *operands),
        exact,
        1e-9 if dtype == torch.float64 else None,
    )


def test_the_divergence_from_itself_is_zero(device: str) -> None:
    p = problem(33, 16, 1001, device=device)
    for share in (0.0, 0.3, 0.5):
        twice = (p.input, p.weight, p.bias, 3.0) * 2
        kl, cross_entropy, student_kl, *overlaps = ops.linear_divergence(*twice, share=share)[:5]
        log_p = (F.linear(p.input, p.weight, p.bias) * 3).log_softmax(1)
        assert not kl.any() and not student_kl.any()
        torch.testing.assert_close(overlaps, [torch.ones_like(overlap) for overlap in overlaps])
        torch.testing.assert_close(cross_entropy, -(log_p.exp() * log_p).sum(1))


def test_a_mixture_of_almost_one_alone(device: str) -> None:
    """A share near 0 or 1 leaves a hundred-thousandth of the other, of which most of its own divergence comes."""
    operands = two_heads(64, 8, 501, device=device)
    for share, of in ((1e-5, "kl"), (1 - 1e-5, "student_kl")):
        mixed = {"share": share, "transform": "mul:12.0", "teacher_transform": "mul:12.0"}
        actual = divergence.Divergences(*ops.linear_divergence(*arguments(operands), **mixed))
        exact = divergence.Divergences(*reference.linear_divergence(*doubled(*arguments(operands)), **mixed))
        for name in (of, "cross_entropy", "overlap", "teacher_overlap"):
            assert relative_error(getattr(actual, name), getattr(exact, name)) < 4e-6, name


@pytest.mark.parametrize("teacher_dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_heads_of_different_dtypes(device: str, dtype: torch.dtype, teacher_dtype: torch.dtype) -> None:
    operands = two_heads(21, 8, 37, dtype, device)
    operands = (*operands[:3], *two_heads(21, 8, 37, teacher_dtype, device)[3:])
    out = ops.linear_divergence(*arguments(operands))
    acc = torch.float64 if torch.float64 in (dtype, teacher_dtype) else torch.float32
    assert all(t.dtype == acc for t in out)
    exact = value_and_grads(eager, *doubled(*operands))
    actual = value_and_grads(ours, *operands)
    for i, (a, e) in enumerate(zip(actual, exact, strict=True)):
        assert i < 2 or a.dtype == operands[i - 2].dtype
        at_least = FLOORS[torch.float64 if dtype == teacher_dtype == torch.float64 else torch.float32]
        assert relative_error(a, e) < 2 * max(at_least, torch.finfo(a.dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_log_sum_exps_are_those_of_linear_stats(device: str, dtype: torch.dtype) -> None:
    operands = two_heads(21, 8, 37, dtype, device)
    sums = ops.linear_divergence(*arguments(operands), **SOFTCAPS)[6:]
    index = torch.zeros(21, 1, dtype=torch.int64, device=device)
    for head, scale, transform, (lse, residual) in (
        (operands[:3], SCALE, SOFTCAPS["transform"], sums[:2]),
        (operands[3:], TEACHER_SCALE, SOFTCAPS["teacher_transform"], sums[2:]),
    ):
        stats = ops.linear_stats(*head, index, None, scale, False, False, transform=transform)
        exact = reference.linear_stats(*doubled(*head), index, None, scale, False, False, transform=transform)[0]
        torch.testing.assert_close(lse, stats[0])
        assert bool((residual.abs() <= torch.finfo(lse.dtype).eps * lse.abs().amax()).all())
        assert relative_error(lse, exact) < 4 * torch.finfo(lse.dtype).eps


# --- numbers at the edge --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)], ids=["kl", "cross_entropy", "student_kl", "all"])
def test_infinite_logits_may_be_left_out(device: str, which: tuple[int, ...], share: float, dtype: torch.dtype) -> None:
    if 2 in which and not share:
        which = which[:-1]
    if not which:
        pytest.skip("there is none without a mixture")
    x, w, b, y, v, c = two_heads(21, 8, 37, dtype, device)
    b = b.index_fill(0, torch.tensor([0, 7, 36], device=device), -inf)
    c = c.index_fill(0, torch.tensor([3, 7, 35], device=device), inf)  # the negative scale makes -inf of it
    operands = (x, w, b, y, v, c)
    ours_, eager_ = (lambda *six, f=f: [f(*six, share=share, finite=True)[i] for i in which] for f in (ours, eager))
    exact = value_and_grads(eager_, *doubled(*operands))
    assert all(bool(one.isfinite().all()) for one in exact)
    assert_no_worse_than_eager(value_and_grads(ours_, *operands), value_and_grads(eager_, *operands), exact)
    assert bool(ours(*operands, share=share)[0].isinf().all()) == (share == 0), "where they count"


def test_a_row_with_a_logit_of_plus_infinity_is_no_number(device: str) -> None:
    """As its softmax is, so that nothing finite comes of it."""
    operands = list(two_heads(21, 8, 37, device=device))
    operands[2] = operands[2].index_fill(0, torch.tensor([4], device=device), inf)
    for share in (0.0, 0.3):
        for one in ours(*operands, share=share, finite=True):
            assert bool(one.isnan().all())


def of_logits(student: Tensor, teacher: Tensor, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Operands without biases whose logits are these, without any rounding."""
    eye = torch.eye(student.shape[0], dtype=dtype, device=device)
    weights = [z.t().contiguous().to(device, dtype) for z in (student, teacher)]
    return [eye, weights[0], eye.clone(), weights[1]]


def plainly(f: Callable[..., Any], share: float) -> Callable[..., Any]:
    def with_op(x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> Any:
        return read(f(x, w, None, 1.0, y, v, None, 1.0, share=share), share)

    return with_op


def plain_eager(x: Tensor, w: Tensor, _: None, __: float, y: Tensor, v: Tensor, *___: Any, share: float) -> Any:
    log_q, log_p = ((a @ b.t()).to(acc_dtype(a.dtype)).log_softmax(1) for a, b in ((x, w), (y, v)))
    return divergences(log_q, log_p, share)


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_huge_logits(device: str, dtype: torch.dtype, share: float) -> None:
    """They overflow exp in every dtype; the differences that matter are small, and are there in this one too."""
    size = 1024.0 if dtype == torch.bfloat16 else 8192.0
    student = torch.tensor([[0.0, 8, -8, -2 * size], [-2 * size, -2 * size - 8, -2 * size, -2 * size - 16]]) + size
    teacher = torch.tensor([[0.0, 0, -4, -2 * size], [-2 * size, -2 * size, -2 * size - 8, -2 * size - 16]]) + size
    student, teacher = student.repeat(4, 9), (teacher - torch.tensor([[size / 2], [0.0]])).repeat(4, 9)

    def small(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands: [one / 64 for one in plainly(f, share)(*operands)]  # gradients within float16's range

    operands = of_logits(student, teacher, device, dtype)
    exact = value_and_grads(small(plain_eager), *doubled(*operands))
    actual = value_and_grads(small(ops.linear_divergence), *operands)
    # Gradients of the hidden states are what is left of sums of such numbers times others that add up to zero, some
    # roundings of which are luck; and in float64 eager is its own judge.
    allowed = {torch.float64: 1e-10, torch.float32: 4e-3}.get(dtype)
    assert_no_worse_than_eager(actual, value_and_grads(small(plain_eager), *operands), exact, allowed, 2.0)


def test_classes_that_either_rules_out_of_a_mixture(device: str) -> None:
    """The other has them all the same: with a mixture no divergence is infinite."""
    dtype = torch.float64
    x, w, b, y, v, c = two_heads(21, 8, 37, dtype, device)
    both = torch.tensor([7, 36], device=device)
    b = b.index_fill(0, torch.tensor([0, 7, 36], device=device), -inf)
    c = c.index_fill(0, torch.tensor([3, 7, 36], device=device), inf)  # the negative scale makes -inf of it
    operands = (x, w, b, y, v, c)
    kept = torch.ones(37, dtype=torch.bool, device=device).index_fill(0, both, False)

    def without(*operands: Tensor) -> Any:
        """With classes that one of them rules out given a probability of e-200 there."""
        x, w, b, y, v, c = operands
        z, t = F.linear(x, w[kept], b[kept]) * SCALE, F.linear(y, v[kept], c[kept]) * TEACHER_SCALE
        return divergences(*(one.clamp(min=-200.0).log_softmax(1) for one in (z, t)), 0.25)

    actual = value_and_grads(lambda *six: ours(*six, share=0.25), *operands)
    for a, e in zip(actual, value_and_grads(without, *operands), strict=True):
        assert bool(a.isfinite().all())
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_classes_that_the_teacher_rules_out_count_for_nothing(device: str, dtype: torch.dtype) -> None:
    """And those that both rule out, where eager's 0 * -inf is NaN."""
    x, w, b, y, v, c = two_heads(21, 8, 37, dtype, device)
    barred, both = torch.tensor([0, 7, 12, 36], device=device), torch.tensor([7, 36], device=device)
    # The negative scale makes -inf of it.
    operands = (x, w, b.index_fill(0, both, -inf), y, v, c.index_fill(0, barred, inf))
    kept = torch.ones(37, dtype=torch.bool, device=device).index_fill(0, both, False)
    teacher_kept = kept.clone().index_fill(0, barred, False)

    def without(*operands: Tensor) -> Any:
        """The same in float64, with sums over fewer classes."""
        x, w, b, y, v, c = operands
        log_q = F.linear(x, w[kept], b[kept]).mul(SCALE).log_softmax(1)[:, teacher_kept[kept]]
        log_p = F.linear(y, v[teacher_kept], c[teacher_kept]).mul(TEACHER_SCALE).log_softmax(1)
        return (log_p.exp() * (log_p - log_q)).sum(1), -(log_p.exp() * log_q).sum(1)

    exact = value_and_grads(without, *doubled(*operands))
    actual = value_and_grads(ours, *operands)
    for a, e in zip(actual, exact, strict=True):
        assert bool(a.isfinite().all())
        assert relative_error(a, e) < 2 * max(torch.finfo(a.dtype).eps, 1e-6 if dtype != torch.float64 else 1e-13)
    assert not actual[3][both].any() and not actual[4][both].any()
    assert not actual[6][barred].any() and not actual[7][barred].any()


def test_a_class_that_only_the_student_rules_out(device: str) -> None:
    student, teacher = torch.randn(3, 5), torch.randn(3, 5)
    bias = torch.tensor([0, 0, -inf, 0, 0], device=device)
    x, w, y, v = of_logits(student, teacher, device, torch.float32)
    kl, cross_entropy, *_ = ops.linear_divergence(x, w, bias, 1.0, y, v, None, 1.0)
    assert bool((kl == inf).all()) and bool((cross_entropy == inf).all())
    w = w.requires_grad_()
    kl, *_ = ops.linear_divergence(x, w, bias, 1.0, y, v, None, 1.0)
    (d_weight,) = torch.autograd.grad(kl.sum(), w)
    q = (student.to(device) + bias).softmax(1)
    torch.testing.assert_close(d_weight.t(), q - teacher.to(device).softmax(1))


@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize(
    "row", [[-inf, -inf, -inf], [inf, 1.0, 2.0], [inf, -inf, 0.0], [nan, 1.0, 2.0], [1.0, nan, 2.0]], ids=str
)
def test_rows_that_are_not_finite_are_nan(device: str, row: list[float], side: str) -> None:
    bias = torch.tensor(row, device=device)
    other, zeros, ones = (
        torch.randn(3, device=device),
        torch.zeros(2, 1, device=device),
        torch.zeros(3, 1, device=device),
    )
    pair = (bias, other) if side == "student" else (other, bias)
    for share in (0.0, 0.5):
        out = ops.linear_divergence(zeros, ones, pair[0], 1.0, zeros, ones, pair[1], 1.0, share=share)
        assert all(bool(one.isnan().all()) for one in read(out, share))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("options", [{}, MIXED], ids=["plain", "mixture"])
@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_row_that_counts_for_nothing_contributes_nothing(
    device: str, bad: float, options: dict[str, Any], dtype: torch.dtype
) -> None:
    operands = two_heads(10, 8, 21, dtype, device)
    counted = [i for i in range(10) if i not in (2, 7)]

    def run(x: Tensor, y: Tensor, rows: list[int]) -> list[Tensor]:
        def total(*operands: Tensor) -> Tensor:
            kl, *others = ours(*operands, **options)
            return kl[rows].sum() + sum(one[rows].square().sum() for one in others)

        return value_and_grads(total, x, *operands[1:3], y, *operands[4:])

    x, y = operands[0].clone(), operands[3].clone()
    x[2], y[7] = bad, bad
    value, *grads = run(x, y, counted)
    want, *wanted = run(operands[0][counted], operands[3][counted], list(range(8)))
    tolerance = {"rtol": 2e-2, "atol": 4e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(value, want, **tolerance)
    for i, (a, e) in enumerate(zip(grads, wanted, strict=True)):
        if i in (0, 3):
            assert not a[[2, 7]].any()
            a = a[counted]
        torch.testing.assert_close(a, e, **tolerance)


# --- what is asked for ----------------------------------------------------------------------------------------


def upstreams(out: Sequence[Tensor], share: float) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """Upstream gradients of what the op returns, as its backward takes them: two, and options."""
    options = {"share": share, "g_student_kl": upstream(out[2]) * 0.7} if share else {}
    return (upstream(out[0]), upstream(out[1]).flip(0)), options


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("needed", range(6))
def test_only_the_gradients_asked_for_are_made(device: str, needed: int, share: float) -> None:
    operands = two_heads(6, 4, 9, device=device)
    args = arguments(operands)
    out = ops.linear_divergence(*args, share=share)
    g, options = upstreams(out, share)
    everything = divergence.linear_divergence_backward(*args, *out, *g, *[True] * 6, **options)
    some = divergence.linear_divergence_backward(*args, *out, *g, *[i == needed for i in range(6)], **options)
    for i, (whole, part) in enumerate(zip(everything, some, strict=True)):
        if i == needed:
            torch.testing.assert_close(part, whole)
        else:
            assert part.shape == (0,)
    leaves = [t.clone().requires_grad_(i == needed) for i, t in enumerate(operands)]
    torch.autograd.backward(ours(*leaves, share=share), (*g, options["g_student_kl"]) if share else g)
    for i, leaf in enumerate(leaves):
        assert (leaf.grad is not None) == (i == needed)
    torch.testing.assert_close(leaves[needed].grad, everything[needed])


def test_only_the_divergences_are_differentiable(device: str) -> None:
    operands = [t.requires_grad_() for t in two_heads(6, 4, 9, device=device)]
    for share in (0.0, 0.5):
        out = ops.linear_divergence(*arguments(operands), share=share)
        assert [t.requires_grad for t in out] == [True, True, bool(share), *[False] * 7]
        assert [t.shape[0] for t in out] == [6, 6, *[6 if share else 0] * 3, 0, *[6] * 4]
        with_infinite = ops.linear_divergence(*arguments(operands), share=share, finite=True)
        assert [t.shape[0] for t in with_infinite] == [6, 6, 6 if share else 0, *[6] * 7]


def test_operands_and_results_are_not_written_to(device: str) -> None:
    operands = two_heads(9, 4, 21, device=device)
    args = arguments(operands)
    for share in (0.0, 0.3):
        out = ops.linear_divergence(*args, share=share, **SOFTCAPS)
        g, options = upstreams(out, share)
        given = (*operands, *out, *g, *filter(torch.is_tensor, options.values()))
        before = [t.clone() for t in given]
        divergence.linear_divergence_backward(*args, *out, *g, *[True] * 6, **options, **SOFTCAPS)
        assert all(torch.equal(now, then) for now, then in zip(given, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("layout", [strided, transposed, every_other_row])
def test_memory_layout_does_not_matter(device: str, layout: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    operands = two_heads(19, 8, 37, dtype, device)
    placed = [layout(t) if t.dim() == 2 else torch.stack((t, t), 1)[:, 0] for t in operands]
    for a, e in zip(value_and_grads(ours, *placed), value_and_grads(ours, *operands), strict=True):
        assert relative_error(a, e.double()) < max(2 * torch.finfo(a.dtype).eps, 2e-6 if dtype != torch.float64 else 0)


def test_expanded_upstream_gradients(device: str) -> None:
    operands = two_heads(1, 6, 11, torch.float64, device)

    def mean(f: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Tensor, y: Tensor) -> Tensor:
            kl, cross_entropy = f(x.expand(5, 6), *operands[1:3], y.expand(5, 15), *operands[4:])
            return kl.mean() + cross_entropy.sum()

        return run

    given = (operands[0], operands[3])
    for a, e in zip(value_and_grads(mean(ours), *given), value_and_grads(mean(eager), *given), strict=True):
        torch.testing.assert_close(a, e)


def test_autocast_does_not_reach_inside(device: str) -> None:
    operands = two_heads(16, 32, 65, device=device)
    plain = value_and_grads(ours, *operands)
    with torch.autocast(device, torch.bfloat16):
        inside = value_and_grads(ours, *operands)
    for a, e in zip(inside, plain, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_the_same_bits_every_time(device: str, dtype: torch.dtype) -> None:
    operands = two_heads(64, 48, 1001, dtype, device)
    runs = [value_and_grads(lambda *six: ours(*six, **SOFTCAPS), *operands) for _ in range(3)]
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


# --- autograd -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=OPTION_IDS)
def test_gradcheck(device: str, options: dict[str, Any]) -> None:
    leaves = [t.requires_grad_() for t in two_heads(4, 3, 5, torch.float64, device)]
    assert torch.autograd.gradcheck(lambda *six: ours(*six, **options), leaves)


def test_a_second_backward_through_a_retained_graph(device: str) -> None:
    leaves = [t.requires_grad_() for t in two_heads(7, 4, 11, torch.float64, device)]
    kl, cross_entropy, student_kl = ours(*leaves, **MIXED)
    loss = kl.square().sum() + cross_entropy.sum() + student_kl.sum()
    first = torch.autograd.grad(loss, leaves, torch.tensor(-3.0).to(loss), retain_graph=True)
    second = torch.autograd.grad(loss, leaves, torch.tensor(6.0).to(loss))
    for a, b in zip(first, second, strict=True):
        assert float(a.norm()) > 0
        torch.testing.assert_close(b, -2 * a)


def test_what_has_no_derivative_is_refused(device: str) -> None:
    operands = list(two_heads(4, 3, 5, device=device))
    operands[0] = operands[0].requires_grad_()
    with pytest.raises(FxfuseError, match="second derivative"):
        torch.autograd.grad(ours(*operands)[0].sum(), operands[0], create_graph=True)
    with forward_ad.dual_level(), pytest.raises(FxfuseError, match="forward-mode"):
        teacher = forward_ad.make_dual(operands[3], torch.ones_like(operands[3]))
        ours(operands[0].detach(), *operands[1:3], teacher, *operands[4:])
    for name in SOFTCAPS:
        with pytest.raises(ValueError):
            ours(*operands, **{name: "tan"})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_opcheck(device: str, grad: bool, dtype: torch.dtype) -> None:
    x, w, b, y, v, c = (t.requires_grad_(grad) for t in two_heads(5, 4, 7, dtype, device))
    for operands, options in (
        ((x, w, b, y, v, c), SOFTCAPS),
        ((x, w, b, y, v, c), MIXED),
        ((x, w, None, y.detach(), v.detach(), None), {"memory": 1 << 20}),
    ):
        args = arguments(operands)
        opcheck(ops.linear_divergence, args, options)
        plain = arguments([t if t is None else t.detach() for t in operands])
        out = ops.linear_divergence(*plain, **options)
        needs = (grad, True, operands[2] is not None, grad, False, operands[5] is not None)
        g, more = upstreams(out, options.get("share", 0.0))
        opcheck(divergence.linear_divergence_backward, (*plain, *out, *g, *needs), options | more)


# --- chunks and memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_chunk_boundaries_do_not_show(
    device: str, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "LEAST_CHUNK_ROWS", 1)
    monkeypatch.setattr(chunked, "CHUNK_BYTES", rows * 23 * 4 * divergence.BUFFERS)
    monkeypatch.setattr(chunked, "CHUNK_ROWS", 0)
    monkeypatch.setattr(chunked, "CAST_ELEMENTS", 7 * 4)
    operands = two_heads(13, 4, 23, dtype, device)
    for options in OPTIONS:
        args, share = arguments(operands), options.get("share", 0.0)
        out = divergence.linear_divergence_chunked(*args, **options)
        *g, g_student_kl = (*map(upstream, read(out, share)), *([] if share else [None]))
        more = {"g_student_kl": g_student_kl, **options}
        grads = divergence.linear_divergence_backward_chunked(*args, *out, *g, *[True] * 6, **more)

        def exact(*operands: Tensor, options=options, share=share) -> Any:
            return read(reference.linear_divergence(*arguments(operands), **options), share)

        for a, e in zip((*read(out, share), *grads), value_and_grads(exact, *doubled(*operands)), strict=True):
            assert relative_error(a, e) < max(2 * torch.finfo(a.dtype).eps, 3e-6 if dtype != torch.float64 else 1e-13)


@pytest.mark.parametrize("options", OPTIONS, ids=OPTION_IDS)
def test_no_operation_inside_makes_the_logits(
    device: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "LEAST_CHUNK_ROWS", 1)
    rows, hidden, vocab, step = 96, 4, 211, 4
    share = options.get("share", 0.0)
    memory = step * vocab * 4 * (divergence.MIXED_BUFFERS if share else divergence.BUFFERS)
    operands = two_heads(rows, hidden, vocab, device=device)
    args = arguments(operands)
    out = divergence.linear_divergence_chunked(*args, **options)
    g, more = upstreams(out, share)
    with LargestTensor() as spy:
        divergence.linear_divergence_chunked(*args, **options, memory=memory)
        divergence.linear_divergence_backward_chunked(*args, *out, *g, *[True] * 6, **options | more, memory=memory)
    largest_wanted = max(step * vocab, *(t.numel() for t in operands))
    assert step * vocab <= spy.elements <= largest_wanted < rows * vocab / 8, spy.op
    with LargestTensor() as control:
        reference.linear_divergence(*args, **options)
    assert control.elements >= rows * vocab, "the spy does not see logits where they are made"
