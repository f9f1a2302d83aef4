"""The ops ``torch.ops.fxfuse.*`` against their definitions (``ops.reference`` in float64) and against eager."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DTYPE_IDS,
    DTYPES,
    FLOORS,
    SHAPES,
    LargestTensor,
    Problem,
    assert_no_worse_than_eager,
    doubled,
    every_other_row,
    floor,
    new_sites,
    problem,
    relative_error,
    strided,
    transposed,
    upstream,
    value_and_grads,
)
from torch import Tensor
from torch.library import opcheck

import fxfuse
from fxfuse import FxfuseError, ops
from fxfuse.ops import chunked, cuda, reference
from fxfuse.ops.contract import Upstream, acc_dtype, normalisation, stash_dtype

STATISTICS = ("lse", "picked", "log_prob", "class_sum", "log_prob_sum")
EVERYTHING = (*STATISTICS, "residual", "expectation", "entropy", "top", "argmax")  # as the op returns it
# The optional ones, and where the differentiable statistics stand among all that the op returns.
SUMS = {"want_log_prob_sum": True}
BOTH = {"want_entropy": True, "want_top": True}
ALL = {**SUMS, "want_expectation": True, **BOTH}
DIFFERENTIABLE = {name: i for i, name in enumerate(EVERYTHING) if name not in ("residual", "argmax")}
inf, nan = float("inf"), float("nan")


def some_index(p: Problem, columns: int) -> Tensor:
    """[N, K]: the targets first, then other classes; every third row has no index in its last column."""
    rows, vocab = p.target.shape[0], p.weight.shape[0]
    offsets = torch.arange(columns, device=p.target.device) * 7
    index = (p.target[:, None] + offsets) % vocab
    index[::3, -1] = -1
    return index.reshape(rows, columns)


def stats_tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Statistics are accumulated in float32 (float64): not a bit is lost to 16-bit operands."""
    return {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}


def eager_stats(
    input: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, class_weight: Tensor | None, scale: float
) -> tuple[Tensor, ...]:
    """The statistics as a careful user writes them: the projection in the operands' dtype, the rest in float32."""
    if bias is not None:
        bias = bias.to(input.dtype)
    return stats_of(F.linear(input, weight, bias).to(acc_dtype(input.dtype)) * scale, index, class_weight)


def stats_of(z: Tensor, index: Tensor, class_weight: Tensor | None) -> tuple[Tensor, ...]:
    at, indexed = index.clamp(min=0), index >= 0
    picked = torch.where(indexed, z.gather(1, at), 0.0)
    log_prob = torch.where(indexed, z.log_softmax(1).gather(1, at), 0.0)
    c = 1.0 if class_weight is None else class_weight.to(z.dtype)
    return z.logsumexp(1), picked, log_prob, (z * c).sum(1), (z.log_softmax(1) * c).sum(1)


def entropy_and_top(z: Tensor) -> tuple[Tensor, Tensor]:
    log_p = z.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1), z.max(1).values


def every_differentiable(out: tuple[Tensor, ...]) -> list[Tensor]:
    return [out[i] for i in DIFFERENTIABLE.values()]


# --- linear_stats ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip_unindexed", [False, True], ids=["every row", "skip"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics_are_those_of_the_reference(
    device: str, shape: tuple[int, int, int], dtype: torch.dtype, skip_unindexed: bool
) -> None:
    p = problem(*shape, dtype, device)
    for columns, class_weight, bias, scale in ((1, p.class_weight, p.bias, 0.5), (3, None, None, -2.0)):
        args = (p.input, p.weight, bias, some_index(p, columns), class_weight, scale, True, skip_unindexed)
        actual = ops.linear_stats(*args, **SUMS)
        expected = reference.linear_stats(*doubled(*args), **SUMS)
        for name, a, e in zip(STATISTICS, actual[:5], expected[:5], strict=True):
            tolerance = stats_tolerance(dtype)
            if name == "class_sum":  # a sum of terms of both signs: its error grows with the root of their number
                tolerance["atol"] *= math.sqrt(shape[2])
            assert a.dtype == acc_dtype(dtype)
            torch.testing.assert_close(a.double(), e, **tolerance, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics_and_gradients_err_no_more_than_eager(
    device: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    p = problem(*shape, dtype, device)
    index = some_index(p, 2)

    def with_op(*operands: Tensor) -> Any:
        return ops.linear_stats(*operands, index, p.class_weight, 0.5, True, False, **SUMS)[:5]

    def with_eager(*operands: Tensor) -> Any:
        return eager_stats(*operands, index, p.class_weight, 0.5)

    operands = (p.input, p.weight, p.bias)
    exact = value_and_grads(with_eager, *doubled(*operands))
    assert_no_worse_than_eager(
        value_and_grads(with_op, *operands), value_and_grads(with_eager, *operands), exact, floor(shape, dtype)
    )


@pytest.mark.parametrize("columns", [0, 2])
@pytest.mark.parametrize("read", DIFFERENTIABLE)
def test_each_statistic_alone_has_its_gradient(device: str, read: str, columns: int) -> None:
    p = problem(9, 4, 13, torch.float64, device)
    index = some_index(p, 2)[:, :columns]

    def one(stats: Any) -> Callable[..., Tensor]:
        options = {} if read in STATISTICS[:4] else {f"want_{read}": True}
        return lambda *operands: stats(*operands, index, p.class_weight, 1.5, True, False, **options)[
            DIFFERENTIABLE[read]
        ]

    actual = value_and_grads(one(ops.linear_stats), p.input, p.weight, p.bias)
    expected = value_and_grads(one(reference.linear_stats), p.input, p.weight, p.bias)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-12)


TRANSFORMS = ("tanh", "tanh mul:3.0 add:-0.5", "add:0.5 mul:1.5 sigmoid mul:-4.0", "mul:2.0")


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_transformed_logits_err_no_more_than_eager(device: str, dtype: torch.dtype, transform: str) -> None:
    p = problem(21, 8, 37, dtype, device)
    index, *c = loss_arguments(p, 2)

    def terms(lse: Tensor, picked: Tensor, log_prob: Tensor, class_sum: Tensor, log_prob_sum: Tensor) -> Tensor:
        pairs = zip(c, (log_prob, log_prob_sum), strict=True)
        return sum((a.to(lse.dtype) * b).sum() for a, b in pairs) + picked.sum() + (0.1 * class_sum).sum()

    def with_stats(*operands: Tensor) -> Tensor:
        options = {"transform": transform, **SUMS}
        return terms(*ops.linear_stats(*operands, index, p.class_weight, 0.5, True, False, **options)[:5])

    def with_loss(*operands: Tensor) -> Tensor:
        loss = ops.linear_loss(*operands, index, p.class_weight, 0.5, *c, True, True, True, transform=transform)[0]
        stats = ops.linear_stats(*operands, index, p.class_weight, 0.5, True, False, transform=transform)
        return loss + stats[1].sum() + (0.1 * stats[3]).sum()

    def with_eager(*operands: Tensor) -> Tensor:
        z = F.linear(*operands) * 0.5
        for word in transform.split():  # spelled out here, so that no code is shared with what is tested
            name, _, number = word.partition(":")
            z = {"tanh": torch.tanh, "sigmoid": torch.sigmoid, "mul": torch.mul, "add": torch.add}[name](
                z, *([float(number)] if number else [])
            )
        return terms(*stats_of(z.to(acc_dtype(z.dtype)), index, p.class_weight))

    operands = (p.input, p.weight, p.bias)
    exact = value_and_grads(with_eager, *doubled(*operands))
    for op in (with_stats, with_loss):
        assert_no_worse_than_eager(
            value_and_grads(op, *operands), value_and_grads(with_eager, *operands), exact, floor((21, 8, 37), dtype)
        )


@pytest.mark.parametrize("text", ["tan", "tanh:2", "mul", "mul:x", "add:"])
def test_a_transform_that_is_none_is_refused(device: str, text: str) -> None:
    p = problem(5, 4, 7, device=device)
    with pytest.raises(ValueError):
        ops.linear_stats(p.input, p.weight, None, some_index(p, 1), None, 1.0, False, False, transform=text)


def test_class_sum_is_empty_unless_asked_for(device: str) -> None:
    p = problem(5, 4, 7, device=device)
    assert ops.linear_stats(p.input, p.weight, None, some_index(p, 1), None, 1.0, False, False)[3].shape == (0,)


def test_the_same_class_in_two_columns_counts_twice(device: str) -> None:
    p = problem(4, 3, 6, torch.float64, device)

    def picked(*columns: Tensor) -> Callable[[Tensor], Tensor]:
        index = torch.stack(columns, 1)
        return lambda input: ops.linear_stats(input, p.weight, None, index, None, 1.0, False, False)[1].sum()

    _, once = value_and_grads(picked(p.target), p.input)
    _, twice = value_and_grads(picked(p.target, p.target), p.input)
    torch.testing.assert_close(twice, 2 * once)
    assert float(once.abs().sum()) > 0


# --- entropy and top ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", ["", "tanh mul:3.0"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_statistic_errs_no_more_than_eager(
    device: str, shape: tuple[int, int, int], dtype: torch.dtype, transform: str
) -> None:
    """And neither does its gradient, beside those of the others."""
    p = problem(*shape, dtype, device)
    index = some_index(p, 2)

    def with_op(*operands: Tensor) -> Any:
        out = ops.linear_stats(*operands, index, p.class_weight, 0.5, True, False, **ALL, transform=transform)
        return every_differentiable(out)

    def with_eager(input: Tensor, weight: Tensor, bias: Tensor) -> Any:
        z = F.linear(input, weight, bias).to(acc_dtype(input.dtype)) * 0.5
        z = z.tanh() * 3.0 if transform else z
        return *stats_of(z, index, p.class_weight), (z.softmax(1) * z).sum(1), *entropy_and_top(z)

    operands = (p.input, p.weight, p.bias)
    exact = value_and_grads(with_eager, *doubled(*operands))
    assert_no_worse_than_eager(
        value_and_grads(with_op, *operands), value_and_grads(with_eager, *operands), exact, floor(shape, dtype)
    )


@pytest.mark.parametrize("skip_unindexed", [False, True], ids=["every row", "skip"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics_come_only_if_asked_for(
    device: str, shape: tuple[int, int, int], dtype: torch.dtype, skip_unindexed: bool
) -> None:
    p = problem(*shape, dtype, device)
    args = (p.input, p.weight, p.bias, some_index(p, 1), p.class_weight, 0.5, True, skip_unindexed)
    plain, exact = ops.linear_stats(*args), reference.linear_stats(*doubled(*args), **ALL)
    always = {"lse", "picked", "log_prob", "class_sum", "residual"}
    brought = {"top": ["argmax"], "expectation": ["entropy"]}
    for asked in ([], ["log_prob_sum"], ["expectation"], ["entropy"], ["top"], ["log_prob_sum", "expectation", "top"]):
        out = ops.linear_stats(*args, **{f"want_{name}": True for name in asked})
        came = {*asked, *(other for name in asked for other in brought.get(name, []))}
        for name, a, e, before in zip(EVERYTHING, out, exact, plain, strict=True):
            if name in always:
                torch.testing.assert_close(a, before)
            elif name in came:
                tolerance = stats_tolerance(dtype)
                if name == "log_prob_sum":
                    tolerance["atol"] *= shape[2]
                assert a.dtype == (torch.int64 if name == "argmax" else acc_dtype(dtype))
                torch.testing.assert_close(a.to(e.dtype), e, **tolerance, msg=lambda m, n=name: f"{n}: {m}")
            else:
                assert a.shape == (0,), name
    if skip_unindexed:
        assert not any(bool(t[::3].any()) for t in out)


@pytest.mark.parametrize("offset", [30.0, 300.0, 1e4])
def test_what_all_logits_of_a_row_have_in_common_cancels_in_sums_of_log_probabilities(
    device: str, offset: float
) -> None:
    """``class_sum`` less V log-sum-exps would err 4, 20 and 40 times as much as eager."""
    p = problem(16, 8, 1013, device=device)
    index = torch.empty(16, 0, dtype=torch.int64, device=device)

    def with_stats(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ops.linear_stats(input, weight, bias, index, None, 1.0, False, False, **SUMS)[4]

    def with_loss(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        one = torch.ones(16, dtype=acc_dtype(input.dtype), device=device)
        return ops.linear_loss(input, weight, bias, index, None, 1.0, one[:, None][:, :0], one, True, True, True)[0]

    operands = p.input, p.weight, p.bias + offset
    for with_op, of in ((with_stats, lambda row: row), (with_loss, torch.sum)):

        def with_eager(input: Tensor, weight: Tensor, bias: Tensor, of=of) -> Tensor:
            return of(F.linear(input, weight, bias).log_softmax(1).sum(1))

        exact = value_and_grads(with_eager, *doubled(*operands))
        answers = value_and_grads(with_op, *operands), value_and_grads(with_eager, *operands)
        assert_no_worse_than_eager(*answers, exact, 2e-7)


@pytest.mark.parametrize("size", [1e-3, 0.1, 1.0])
def test_the_expectation_of_small_logits_does_not_cancel(device: str, size: float) -> None:
    """Nor that of logits of one size: lse - entropy would err thousands of times as much as eager, and 3 times."""
    p = problem(16, 64, 1013, device=device)
    index = torch.empty(16, 0, dtype=torch.int64, device=device)

    def with_op(input: Tensor, weight: Tensor) -> Tensor:
        return ops.linear_stats(input, weight, None, index, None, size, False, False, want_expectation=True)[6]

    def with_eager(input: Tensor, weight: Tensor) -> Tensor:
        z = F.linear(input, weight) * size
        return (z.softmax(1) * z).sum(1)

    exact = value_and_grads(with_eager, *doubled(p.input, p.weight))
    answers = value_and_grads(with_op, p.input, p.weight), value_and_grads(with_eager, p.input, p.weight)
    # On a GPU p is exp(z - lse), which has the rounding of that difference, near 7.
    assert_no_worse_than_eager(*answers, exact, 2e-7 if device == "cpu" else 5e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("gap", [8.0, 16.0, 20.0, 40.0])
def test_the_entropy_of_a_nearly_certain_class_does_not_cancel(device: str, gap: float, dtype: torch.dtype) -> None:
    """With a maximum of 1e3, lse - sum p z would be off by 1e-4; the entropies here are down to 3e-15."""
    logits = torch.full((6, 17), 1024.0 - gap)
    logits[:, 3] = 1024.0
    # The sum of the exponentials is just above one: how it is rounded is luck, for eager too.
    unit, entropy = torch.finfo(acc_dtype(dtype)).eps, float(entropy_and_top(logits[:1].double())[0])
    check_row_entropies(logits, device, dtype, 2 * unit / entropy)


def check_row_entropies(logits: Tensor, device: str, dtype: torch.dtype, luck: float = 0.0) -> None:
    """Against eager; ``luck`` is an error that an entropy may always have."""
    input, weight = exact_logits(logits, device, dtype)
    index = torch.empty(len(logits), 0, dtype=torch.int64, device=device)

    def with_op(input: Tensor, weight: Tensor) -> Any:
        return ops.linear_stats(input, weight, None, index, None, 1.0, False, False, **BOTH)[7:9]

    def with_eager(input: Tensor, weight: Tensor) -> Any:
        return entropy_and_top((input @ weight.t()).to(acc_dtype(input.dtype)))

    exact = value_and_grads(with_eager, input.double(), weight.double())
    at_least = 1e-12 if dtype == torch.float64 else FLOORS[dtype]
    answers = value_and_grads(with_op, input, weight), value_and_grads(with_eager, input, weight), exact
    assert_no_worse_than_eager(*([entropy] for entropy, *_ in answers), max(luck, at_least))
    assert_no_worse_than_eager(*(rest for _, *rest in answers), at_least)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_entropies_of_huge_logits(device: str, dtype: torch.dtype) -> None:
    logits = torch.tensor([[8192.0, 8200.0, 8184.0, -8192.0], [-8192.0, -8200.0, -8192.0, -8208.0]]).repeat(4, 9)
    check_row_entropies(logits, device, dtype)
    check_row_entropies(torch.zeros(3, 17).index_fill(1, torch.tensor([5]), 4096.0), device, dtype)


@pytest.mark.parametrize(
    "row",
    [
        *([-inf, 1.0, 2.0], [-inf, -inf, -inf], [inf, 1.0, 2.0], [inf, -inf, inf], [nan, 1.0, 2.0], [1.0, nan, inf]),
        *([1.0, 2.0, nan], [nan, nan, nan], [-inf, nan, -inf], [0.0, 0.0, 0.0], [-0.0, 0.0, -1.0], [1.0, 2.0, 2.0]),
    ],
    ids=str,
)
def test_statistics_of_rows_that_are_not_finite_or_tied(device: str, row: list[float]) -> None:
    """As eager has them: 0 * -inf is NaN."""
    bias = torch.tensor(row, device=device)
    input, weight = torch.zeros(2, 4, device=device), torch.ones(3, 4, device=device)
    index = torch.tensor([[0, 1], [2, 0]], device=device)
    out = ops.linear_stats(input, weight, bias, index, None, 1.0, False, False, **ALL)
    _, _, _, _, log_prob_sum, _, expectation, entropy, top, argmax = out
    z = bias.expand(2, 3)
    want_entropy, _ = entropy_and_top(z)
    want_top, want_argmax = z.max(1)
    exact = {"equal_nan": True, "rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(log_prob_sum, z.log_softmax(1).sum(1), **exact)
    torch.testing.assert_close(expectation, (z.softmax(1) * z).sum(1), **exact)
    torch.testing.assert_close(entropy, want_entropy, **exact)
    torch.testing.assert_close(top, want_top, **exact)
    assert torch.equal(argmax, want_argmax)


def test_the_top_of_many_equal_logits_is_the_lowest_class(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-2, 3, (40, 3001), generator=generator).float()
    input, weight = exact_logits(logits, device, torch.float32)
    index = torch.empty(40, 0, dtype=torch.int64, device=device)
    leaves = [input.requires_grad_(), weight.requires_grad_()]
    *_, top, argmax = ops.linear_stats(*leaves, None, index, None, 1.0, False, False, want_top=True)
    want = (logits.to(device) == 2).int().argmax(1)
    assert torch.equal(argmax, want) and bool((top == 2).all())
    assert not argmax.requires_grad
    _, d_weight = torch.autograd.grad(top.sum(), leaves)
    assert torch.equal(d_weight.t(), torch.zeros_like(weight.t()).scatter_(1, want[:, None], 1.0))


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_row_whose_entropy_counts_for_nothing_contributes_nothing(device: str, bad: float) -> None:
    p = problem(10, 8, 21, device=device)
    index = p.target[:, None]
    counted = [i for i in range(10) if i not in (2, 7)]
    poisoned = p.input.clone()
    poisoned[[2, 7]] = bad

    def run(input: Tensor, rows: list[int]) -> list[Tensor]:
        def total(*operands: Tensor) -> Tensor:
            out = ops.linear_stats(*operands, index[: len(input)], None, 1.0, False, False, **BOTH)
            return out[7][rows].square().sum() + out[8][rows].sum()

        return value_and_grads(total, input, p.weight, p.bias)

    value, d_input, d_weight, d_bias = run(poisoned, counted)
    assert not d_input[[2, 7]].any()
    without = run(p.input[counted], list(range(8)))
    for a, e in zip((value, d_input[counted], d_weight, d_bias), without, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


def test_an_entropy_with_a_gradient_keeps_an_otherwise_idle_row() -> None:
    zero, one = torch.zeros(3), torch.tensor([0.0, 1.0, 0.0])
    assert Upstream(zero, zero[:, None], None, one).nonzero().tolist() == [False, True, False]
    assert Upstream(zero, zero[:, None], one, zero).nonzero().tolist() == [False, True, False]


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 5.0, 100.0])
@pytest.mark.parametrize("vocab", [1, 2, 3, 1000])
def test_the_bound_of_float16_gradients_holds_for_entropies(vocab: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    log_p = (torch.randn(50, vocab, generator=generator) * spread).log_softmax(1)
    g_lse, g_entropy = torch.randn(2, 50, generator=generator) * torch.logspace(-6, 5, 50)
    entropy, _ = entropy_and_top(log_p)
    dz = g_lse[:, None] * log_p.exp() - g_entropy[:, None] * log_p.exp() * (log_p + entropy[:, None])
    entropy[7] = nan  # a row that is not finite does not count
    up = Upstream(g_lse, torch.zeros(50, 0), None, g_entropy)
    factor, undo = normalisation(up, None, 1.0, entropy)
    largest = (dz * factor)[torch.arange(50) != 7].abs().max()
    assert largest < 2.0**15
    if vocab == 2 and spread == 1.0:  # nor is it far above
        assert largest > 2.0**12
    assert float(factor * undo) == 1.0


@pytest.mark.parametrize("memory", [3 * 4 * 23 * 4, 1])
def test_entropies_keep_within_the_memory_of_buffers(device: str, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "LEAST_CHUNK_ROWS", 1)
    p = problem(40, 2, 23, device=device)
    index = some_index(p, 1)
    head = (p.input, p.weight, p.bias, index, None, 1.0)
    g = torch.ones_like(p.input[:, 0])
    whole = chunked.linear_stats(*head, False, False, **BOTH)
    with LargestTensor() as spy:
        out = chunked.linear_stats(*head, False, False, **BOTH, memory=memory)
        grads = chunked.linear_stats_backward(
            *head, out[0], out[5], g, g[:, None], None, True, True, True, entropy=out[7], g_entropy=g, memory=memory
        )
    assert spy.elements <= max(memory // 3 // 4, p.input.numel())
    want = reference.linear_stats_backward(
        *doubled(*head), *doubled(whole[0], whole[5], g, g[:, None]), None, True, True, True,
        entropy=whole[7].double(), g_entropy=g.double(),
    )  # fmt: skip
    for a, e in zip((*out, *grads), (*whole, *want), strict=True):
        torch.testing.assert_close(a.to(e.dtype), e, rtol=1e-5, atol=1e-5)


# --- linear_loss ----------------------------------------------------------------------------------------------


def loss_arguments(p: Problem, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """index, c_log_prob, c_log_prob_sum, of the signs and sizes of a smoothed loss: its terms do not cancel.

    Every fourth row has nothing but zeros.
    """
    acc, index = acc_dtype(p.input.dtype), some_index(p, columns)
    each, of_all = (upstream(p.input.new_empty(shape, dtype=acc)).abs() for shape in (index.shape, index.shape[:1]))
    # Not of a single class, where the gradient of that sum is 0: eager's is exact, kernels' parts cancel to rounding.
    c = (-each, -of_all.flip(0) / p.weight.shape[0] * (p.weight.shape[0] > 1))
    for one in c:
        one[1::4] = 0
    return index, *c


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradients_err_no_more_than_eager(
    device: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    p = problem(*shape, dtype, device)
    for columns, class_weight in ((1, p.class_weight), (2, None)):
        index, *c = loss_arguments(p, columns)

        def with_op(*operands: Tensor, index=index, class_weight=class_weight, c=c) -> Tensor:
            return ops.linear_loss(*operands, index, class_weight, 0.5, *c, True, True, True)[0]

        def with_eager(*operands: Tensor, index=index, class_weight=class_weight, c=c) -> Tensor:
            _, _, log_prob, _, log_prob_sum = eager_stats(*operands, index, class_weight, 0.5)
            # The coefficients are what makes the gradients here: float64 ones for float64 statistics.
            c_log_prob, c_log_prob_sum = (one.to(log_prob.dtype) for one in c)
            return (c_log_prob * log_prob).sum() + (c_log_prob_sum * log_prob_sum).sum()

        operands = (p.input, p.weight, p.bias)
        exact = value_and_grads(with_eager, *doubled(*operands))
        assert_no_worse_than_eager(
            value_and_grads(with_op, *operands), value_and_grads(with_eager, *operands), exact, floor(shape, dtype)
        )


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7])
@pytest.mark.parametrize(("hidden", "vocab"), [(64, 32000), (4096, 2003)])
def test_a_few_labels_of_many_rows_err_no_more_than_eager(device: str, rows: int, hidden: int, vocab: int) -> None:
    """Which multiplies all rows, and BLAS takes other kernels for a few."""
    p = problem(16, hidden, vocab, device=device)
    target = p.target.clone()
    target[rows:] = -100

    def with_op(input: Tensor, weight: Tensor) -> Tensor:
        return fxfuse.linear_cross_entropy(input, weight, target, reduction="sum")

    def with_eager(input: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(input, weight), target, reduction="sum")

    exact = value_and_grads(with_eager, *doubled(p.input, p.weight))
    actual, eager = (value_and_grads(f, p.input, p.weight) for f in (with_op, with_eager))
    assert_no_worse_than_eager(actual, eager, exact, floor=2e-7, times=2.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_made_gradients_are_those_of_the_reference(device: str, dtype: torch.dtype) -> None:
    """Forward only: the op returns the gradients of its unscaled loss, in the stash dtype."""
    p = problem(21, 8, 37, dtype, device)
    index, *c = loss_arguments(p, 2)
    args = (p.input, p.weight, p.bias, index, p.class_weight, -0.75, *c, True, True, True)
    loss, *grads = ops.linear_loss(*args)
    expected_loss, *expected_grads = reference.linear_loss(*doubled(*args))
    torch.testing.assert_close(loss.double(), expected_loss, **stats_tolerance(dtype))
    eps = torch.finfo(dtype).eps
    for a, e in zip(grads, expected_grads, strict=True):
        assert a.dtype == stash_dtype(dtype)
        assert float((a.double() - e).norm() / e.norm()) < max(2 * eps, 2e-6 if dtype != torch.float64 else 1e-13)


def test_float16_gradients_of_a_tiny_loss_do_not_underflow(device: str) -> None:
    """A mean over many tokens has gradients below float16's smallest number, until the loss scale multiplies them."""
    p = problem(6, 8, 11, torch.float16, device)
    index, *c = loss_arguments(p, 1)
    tiny, operands = 2.0**-24, tuple(t.requires_grad_() for t in (p.input, p.weight, p.bias))

    def grads(share: float, loss_scale: float) -> tuple[Tensor, ...]:
        scaled = [one * share for one in c]
        loss = ops.linear_loss(*operands, index, None, 1.0, *scaled, True, True, True)[0]
        return torch.autograd.grad(loss, operands, torch.tensor(loss_scale, device=device))

    for small, plain in zip(grads(tiny, 1 / tiny), grads(1.0, 1.0), strict=True):
        assert float(plain.float().abs().sum()) > 0
        torch.testing.assert_close(small, plain, rtol=2e-3, atol=1e-5)


def test_a_loss_without_coefficients_is_zero(device: str) -> None:
    p = problem(5, 4, 7, torch.float64, device)
    index, c_log_prob, c_log_prob_sum = loss_arguments(p, 1)
    needs = (True, True, True)
    zeros = (torch.zeros_like(c_log_prob), None)
    for result in ops.linear_loss(p.input, p.weight, p.bias, index, None, 1.0, *zeros, *needs):
        assert not result.any()
    c = zeros[0], c_log_prob_sum
    assert bool(ops.linear_loss(p.input, p.weight, p.bias, index, None, 1.0, *c, *needs)[0] != 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_no_coefficients_of_sums_are_zeros(device: str, dtype: torch.dtype) -> None:
    p = problem(21, 8, 37, dtype, device)
    index, c_log_prob, c_log_prob_sum = loss_arguments(p, 2)
    args = (p.input, p.weight, p.bias, index, p.class_weight, -0.75, c_log_prob)
    needs = (True, True, True)
    without = ops.linear_loss(*args, None, *needs)
    with_zeros = ops.linear_loss(*args, torch.zeros_like(c_log_prob_sum), *needs)
    assert all(map(torch.equal, without, with_zeros))
    of_reference = reference.linear_loss(*doubled(*args), None, *needs)
    torch.testing.assert_close(without[0].double(), of_reference[0], **stats_tolerance(dtype))


def test_a_zero_coefficient_silences_a_statistic_that_is_not_finite(device: str) -> None:
    """One class is ruled out (its log-probability is -inf, and so is their sum), but only others are asked for."""
    p = problem(4, 3, 6, device=device)
    bias = p.bias.index_fill(0, torch.tensor([2], device=device), -inf)
    index = torch.tensor([2, 3], device=device).expand(4, 2).contiguous()
    one, zero = torch.ones(4, device=device), torch.zeros(4, device=device)
    args = (index, None, 1.0, torch.stack((zero, one), 1), zero, True, True, True)
    loss, *grads = ops.linear_loss(p.input, p.weight, bias, *args)
    torch.testing.assert_close(loss, F.linear(p.input, p.weight, bias).log_softmax(1)[:, 3].sum())
    assert all(bool(g.isfinite().all()) for g in grads)
    assert not grads[2][2]


# --- both -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_only_the_gradients_asked_for_are_made(device: str, needs: tuple[bool, bool, bool]) -> None:
    p = problem(6, 4, 9, device=device)
    index, *c = loss_arguments(p, 1)
    operands = (p.input, p.weight, p.bias, index, None, 1.0)
    g = (torch.ones_like(c[1]), torch.zeros_like(c[0]), None)
    lse = ops.linear_stats(*operands, False, False)[0]
    for run in (
        lambda *n: ops.linear_loss(*operands, *c, *n)[1:],
        lambda *n: ops.linear_stats_backward(*operands, lse, torch.zeros_like(lse), *g, *n),
    ):
        everything, some = run(True, True, True), run(*needs)
        for whole, part, needed in zip(everything, some, needs, strict=True):
            if needed:
                torch.testing.assert_close(part, whole)
            else:
                assert part.shape == (0,)


def test_frozen_operands_get_no_gradient(device: str) -> None:
    p = problem(6, 4, 9, device=device)
    index, *c = loss_arguments(p, 1)
    weight = p.weight.requires_grad_()
    for loss in (
        ops.linear_loss(p.input, weight, p.bias, index, None, 1.0, *c, False, True, False)[0],
        ops.linear_stats(p.input, weight, p.bias, index, None, 1.0, False, False)[0].sum(),
    ):
        loss.backward()
        assert p.input.grad is None
        assert p.bias.grad is None
        assert weight.grad is not None
        assert float(weight.grad.norm()) > 0
        weight.grad = None


def test_bias_keeps_its_own_dtype(device: str) -> None:
    """A float32 bias beside bfloat16 operands is not rounded, and neither is its gradient."""
    p = problem(64, 16, 33, torch.bfloat16, device)
    bias = (p.bias.float() + 1e-3).requires_grad_()
    index = some_index(p, 1)
    lse, _, log_prob, *_ = ops.linear_stats(p.input, p.weight, bias, index, None, 1.0, False, False)
    (grad,) = torch.autograd.grad((lse.sum(), log_prob.sum()), bias)
    exact_bias = bias.detach().double().requires_grad_()
    exact = reference.linear_stats(p.input.double(), p.weight.double(), exact_bias, index, None, 1.0, False, False)
    (exact_grad,) = torch.autograd.grad((exact[0].sum(), exact[2].sum()), exact_bias)
    torch.testing.assert_close(lse.double(), exact[0], rtol=1e-5, atol=1e-5)
    assert grad.dtype == torch.float32
    # Its terms may come from 16-bit gradients of the logits (on a GPU); their sum may not be rounded to 16 bits.
    assert float((grad.double() - exact_grad).norm() / exact_grad.norm()) < 2e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("layout", [strided, transposed, every_other_row])
def test_memory_layout_does_not_matter(device: str, layout: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    p = problem(19, 8, 37, dtype, device)
    index, *c = loss_arguments(p, 3)

    def run(input: Tensor, weight: Tensor, vector: Callable[[Tensor], Tensor]) -> list[Tensor]:
        bias, class_weight = vector(p.bias), vector(p.class_weight)

        def both(*operands: Tensor) -> tuple[Tensor, ...]:
            own = layout(index) if vector is not torch.clone else index
            loss = ops.linear_loss(*operands, own, class_weight, 0.5, *c, True, True, True)[0]
            return loss, *ops.linear_stats(*operands, own, class_weight, 0.5, True, False, **SUMS)[:5]

        return value_and_grads(both, input, weight, bias)

    plain = run(p.input, p.weight, torch.clone)
    assert not layout(p.input).is_contiguous()
    other = run(layout(p.input), layout(p.weight), lambda t: torch.stack((t, t), 1)[:, 0])
    for a, e in zip(other, plain, strict=True):
        if dtype == torch.bfloat16:  # another layout may take other tiles, whose sums are rounded differently
            assert relative_error(a, e.double()) < 2 * torch.finfo(dtype).eps
        else:
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


def test_expanded_operands(device: str) -> None:
    """All rows and all upstream gradients one and the same memory."""
    p = problem(1, 6, 11, torch.float64, device)
    index = p.target[:, None].expand(5, 1)

    def lse(input: Tensor) -> Tensor:
        stats = ops.linear_stats(input.expand(5, 6), p.weight, p.bias[:1].expand(11), index, None, 1.0, False, False)
        return stats[2].sum()

    def eager(input: Tensor) -> Tensor:
        z = F.linear(input.expand(5, 6), p.weight, p.bias[:1].expand(11))
        return z.log_softmax(1).gather(1, index).sum()

    for a, e in zip(value_and_grads(lse, p.input), value_and_grads(eager, p.input), strict=True):
        torch.testing.assert_close(a, e)


def test_autocast_does_not_reach_inside(device: str) -> None:
    p = problem(16, 32, 65, device=device)
    index, *c = loss_arguments(p, 1)

    def both(*operands: Tensor) -> tuple[Tensor, ...]:
        loss = ops.linear_loss(*operands, index, p.class_weight, 1.0, *c, True, True, True)[0]
        return loss, *ops.linear_stats(*operands, index, p.class_weight, 1.0, True, False, **SUMS)[:5]

    plain = value_and_grads(both, p.input, p.weight, p.bias)
    with torch.autocast(device, torch.bfloat16):
        inside = value_and_grads(both, p.input, p.weight, p.bias)
    for a, e in zip(inside, plain, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6)


def test_operands_are_not_written_to(device: str) -> None:
    p = problem(9, 4, 21, device=device)
    index, *c = loss_arguments(p, 2)
    given = (p.input, p.weight, p.bias, index, p.class_weight, *c)
    before = [t.clone() for t in given]
    loss = ops.linear_loss(*given[:5], 1.0, *c, True, True, True)
    lse, *_ = ops.linear_stats(*given[:5], 1.0, True, False)
    ops.linear_stats_backward(*given[:5], 1.0, lse, torch.zeros_like(lse), c[1], *c, True, True, True)
    ops.check_index(index.clamp(min=0), 21, 3)
    assert len(loss) == 4
    for now, then in zip(given, before, strict=True):
        assert torch.equal(now, then)


# --- numbers at the edge --------------------------------------------------------------------------------------


def exact_logits(logits: Tensor, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """An input and a weight whose product is ``logits`` without any rounding."""
    rows = logits.shape[0]
    return torch.eye(rows, dtype=dtype, device=device), logits.t().contiguous().to(device, dtype)


def check_row_gradients(logits: Tensor, target: Tensor, device: str, dtype: torch.dtype) -> None:
    """Statistics and their gradients of given logits, against log_softmax and autograd in float64."""
    input, weight = exact_logits(logits, device, dtype)
    target = target.to(device)[:, None]

    def with_op(input: Tensor, weight: Tensor) -> Any:
        lse, _, log_prob, *_ = ops.linear_stats(input, weight, None, target, None, 1.0, False, False)
        return lse, log_prob

    def with_eager(input: Tensor, weight: Tensor) -> Any:
        z = (input @ weight.t()).to(acc_dtype(input.dtype))
        return z.logsumexp(1), z.log_softmax(1).gather(1, target)

    exact = value_and_grads(with_eager, input.double(), weight.double())
    # In float64 eager is its own judge, and one rounding of a log-sum-exp of 8192 is 1e-12 of a probability.
    at_least = 1e-12 if dtype == torch.float64 else None
    assert_no_worse_than_eager(
        value_and_grads(with_op, input, weight), value_and_grads(with_eager, input, weight), exact, at_least
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_huge_logits(device: str, dtype: torch.dtype) -> None:
    """1e4 overflows exp in every dtype; the differences that matter are small."""
    logits = torch.tensor([[8192.0, 8200.0, 8184.0, -8192.0], [-8192.0, -8200.0, -8192.0, -8208.0]]).repeat(4, 9)
    check_row_gradients(logits, torch.arange(8) % 4, device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_a_target_far_below_the_maximum(device: str, dtype: torch.dtype) -> None:
    """Its probability is zero in float32, its log-probability is not."""
    logits = torch.zeros(3, 17)
    logits[:, 5] = torch.tensor([128.0, 256.0, 4096.0])
    check_row_gradients(logits, torch.tensor([0, 3, 16]), device, dtype)
    input, weight = exact_logits(logits, device, dtype)
    index = torch.tensor([[0], [3], [16]], device=device)
    log_prob = ops.linear_stats(input, weight, None, index, None, 1.0, False, False)[2]
    torch.testing.assert_close(log_prob[:, 0].cpu().double(), torch.tensor([-128.0, -256.0, -4096.0]).double())


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_the_log_probability_of_a_likely_class_does_not_cancel(device: str, dtype: torch.dtype) -> None:
    """With a maximum of 1e3, picked - lse would be off by 1e-4; the probabilities here are near one."""
    logits = torch.full((4, 5), 1000.0)
    logits[:, 2] += torch.tensor([8.0, 4.0, 16.0, 0.0])
    check_row_gradients(logits, torch.full((4,), 2), device, dtype)
    input, weight = exact_logits(logits, device, dtype)
    index = torch.full((4, 1), 2, device=device)
    log_prob = ops.linear_stats(input, weight, None, index, None, 1.0, False, False)[2]
    exact = logits.double().log_softmax(1)[:, 2]
    torch.testing.assert_close(log_prob[:, 0].cpu().double(), exact, rtol=1e-3, atol=2e-7)


def test_masked_classes(device: str) -> None:
    """A bias of -inf rules a class out: its gradient is zero and the others are as if it were not there."""
    p = problem(12, 8, 40, device=device)
    barred = torch.tensor([0, 7, 39], device=device)
    bias = p.bias.index_fill(0, barred, -inf)
    target = torch.where(torch.isin(p.target, barred), 1, p.target)[:, None]

    def with_op(input: Tensor, weight: Tensor, bias: Tensor) -> Any:
        lse, _, log_prob, *_ = ops.linear_stats(input, weight, bias, target, None, 1.0, False, False)
        return lse, log_prob

    def with_eager(input: Tensor, weight: Tensor, bias: Tensor) -> Any:
        z = F.linear(input, weight, bias)
        return z.logsumexp(1), z.log_softmax(1).gather(1, target)

    operands = (p.input, p.weight, bias)
    actual = value_and_grads(with_op, *operands)
    assert_no_worse_than_eager(
        actual, value_and_grads(with_eager, *operands), value_and_grads(with_eager, *doubled(*operands))
    )
    assert not actual[-1][barred].any()
    assert bool(actual[-1][p.target[0]] != 0)


@pytest.mark.parametrize(
    "row",
    [[-inf, 1.0, 2.0], [-inf, -inf, -inf], [inf, 1.0, 2.0], [inf, -inf, 0.0], [nan, 1.0, 2.0], [1.0, nan, 2.0]],
    ids=str,
)
def test_statistics_of_rows_that_are_not_finite(device: str, row: list[float]) -> None:
    """As eager's logsumexp and log_softmax, and the finite row beside them is untouched."""
    bias = torch.tensor(row, device=device)
    input, weight = torch.zeros(2, 4, device=device), torch.ones(3, 4, device=device)
    index = torch.tensor([[0, 1], [2, 0]], device=device)
    lse, picked, log_prob, *_ = ops.linear_stats(input, weight, bias, index, None, 1.0, False, False)
    z = bias.expand(2, 3)
    exact = {"equal_nan": True, "rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(picked, z.gather(1, index), **exact)
    torch.testing.assert_close(lse, z.logsumexp(1), **exact)
    torch.testing.assert_close(log_prob, z.log_softmax(1).gather(1, index), **exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("op", ["loss", "stats"])
def test_a_row_that_counts_for_nothing_contributes_nothing(
    device: str, op: str, bad: float, dtype: torch.dtype
) -> None:
    """Whatever its hidden states: eager's weight gradient is NaN here, the contract says exactly zero."""
    p = problem(10, 8, 21, dtype, device)
    index = p.target[:, None].clone()
    index[[2, 7]] = -1
    c_log_prob = torch.full((10, 1), -0.1, dtype=acc_dtype(dtype), device=device)

    def run(input: Tensor, at: Tensor, rows: int) -> list[Tensor]:
        def loss(*operands: Tensor) -> Tensor:
            if op == "loss":
                return ops.linear_loss(*operands, at, None, 1.0, c_log_prob[:rows], None, True, True, True)[0]
            return (ops.linear_stats(*operands, at, None, 1.0, False, True)[2] * c_log_prob[:rows]).sum()

        return value_and_grads(loss, input, p.weight, p.bias)

    counted = [i for i in range(10) if i not in (2, 7)]
    poisoned = p.input.clone()
    poisoned[[2, 7]] = bad
    value, d_input, d_weight, d_bias = run(poisoned, index, 10)
    without = run(p.input[counted], index[counted], 8)
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for a, e in zip((value, d_input[counted], d_weight, d_bias), without, strict=True):
        torch.testing.assert_close(a, e, **tolerance)
    assert not d_input[[2, 7]].any()


@pytest.mark.parametrize("op", ops.beneath_autograd, ids=str)
def test_ops_without_their_formulas_of_autograd(op: torch._ops.OpOverload) -> None:
    beneath = ops.beneath_autograd[op]
    assert str(op._schema).split("(", 1)[1] == str(beneath._schema).split("(", 1)[1]
    assert op.tags == beneath.tags and beneath.name() == f"{op.name()}.beneath_autograd"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for kind in ("CPU", "CUDA", "Meta"):
        assert has(op.name(), kind) == has(beneath.name(), kind)
    assert has(op.name(), "Autograd") and not has(beneath.name(), "Autograd")


@pytest.mark.parametrize("factor", [1.0, 1 / 3, -0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_gradient_is_scaled_by_all_digits_of_its_factor(device: str, dtype: torch.dtype, factor: float) -> None:
    """PyTorch rounds the factor to the gradient's 16 bits on a GPU."""
    wide = torch.promote_types(dtype, torch.float32)
    by = torch.tensor(factor, device=device, dtype=wide)
    rows = torch.randn(301, 77, device=device).to(dtype)
    for gradient in (rows, rows.t(), rows[:, 1:], rows[:0]):
        expected = (gradient.to(wide) * by).to(dtype)
        scaled, own = ops.scaled(gradient, by), gradient.clone()
        ops.scale_(own, by)
        for each in (scaled, own):
            assert each.stride() == own.stride()
            torch.testing.assert_close(each, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("hip", "capability", "expected"),
    [(None, (9, 0), True), (None, (8, 0), True), (None, (7, 5), False), ("6.4", (9, 4), False)],
)
def test_gpus_that_the_kernels_are_made_for(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, capability: tuple[int, int], expected: bool
) -> None:
    """Others compute with ATen: an AMD GPU's number is one that Hopper has."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert ops.gpu.has_triton.__wrapped__(torch.device("cuda")) is expected


# --- check_index ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 4, 9, 2**40])
def test_check_index_replaces_the_ignored_class(device: str, ignore_index: int) -> None:
    index = torch.tensor([ignore_index, 1, 4, 0, ignore_index], device=device)
    clean = ops.check_index(index, 5, ignore_index)
    expected = [-1 if i == ignore_index else i for i in index.tolist()]
    assert clean.tolist() == expected
    assert expected.count(-1) >= 2


def test_check_index_returns_memory_of_its_own(device: str) -> None:
    index = torch.arange(12, device=device).reshape(3, 4).t()
    for ignore_index in (None, -100):
        clean = ops.check_index(index, 12, ignore_index)
        assert clean.is_contiguous()
        assert clean.data_ptr() != index.data_ptr()
        assert torch.equal(clean, index)
    assert ops.check_index(index[:0], 12, None).shape == (0, 3)


@pytest.mark.parametrize("bad", [-1, 5, -100, 2**62, -(2**62)])
def test_check_index_refuses_foreign_classes(bad: int) -> None:
    """On CUDA it is a device assertion, which ends the process: test_functional has it."""
    index = torch.tensor([[0, bad], [4, 1]])
    with pytest.raises(RuntimeError, match=f"index {bad} is out of bounds for dimension 1 with size 5"):
        ops.check_index(index, 5, None)
    with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
        ops.check_index(index, 5, 3)
    assert ops.check_index(index, 5, bad).tolist() == [[0, -1], [4, 1]]


def test_check_index_counts_from_the_end(device: str) -> None:
    index = torch.tensor([[0, -1], [4, -5]], device=device)
    assert ops.check_index(index, 5, None, wraps=True).tolist() == [[0, 4], [4, 0]]


@pytest.mark.parametrize("bad", [5, 2**40])
def test_an_unchecked_index_touches_no_foreign_memory(bad: int) -> None:
    p = problem(3, 4, 5)
    index = torch.tensor([[0], [bad], [1]])
    _, c_log_prob, _ = loss_arguments(p, 1)
    with pytest.raises((RuntimeError, IndexError)):
        ops.linear_stats(p.input, p.weight, None, index, None, 1.0, False, False)
    with pytest.raises((RuntimeError, IndexError)):
        ops.linear_loss(p.input, p.weight, None, index, None, 1.0, c_log_prob + 1, None, True, True, False)
    lse, g = torch.zeros(3), torch.ones(3, 1)
    with pytest.raises((RuntimeError, IndexError)):
        ops.linear_stats_backward(p.input, p.weight, None, index, None, 1.0, lse, lse, lse, g, None, True, True, False)


# --- autograd -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("class_weight", [False, True], ids=["ones", "class_weight"])
def test_gradcheck_of_linear_stats(device: str, class_weight: bool) -> None:
    p = problem(4, 3, 5, torch.float64, device)
    index = some_index(p, 2)
    index[1] = index[1, 0]  # the same class twice
    c = p.class_weight if class_weight else None
    leaves = [t.requires_grad_() for t in (p.input, p.weight, p.bias)]
    assert torch.autograd.gradcheck(lambda x, w, b: ops.linear_stats(x, w, b, index, c, -0.7, True, False)[:4], leaves)

    def with_all(*operands: Tensor) -> list[Tensor]:
        return every_differentiable(ops.linear_stats(*operands, index, c, -0.7, True, False, **ALL))

    assert torch.autograd.gradcheck(with_all, leaves)


def test_gradcheck_of_linear_loss(device: str) -> None:
    p = problem(4, 3, 5, torch.float64, device)
    index, *c = loss_arguments(p, 2)
    leaves = [t.requires_grad_() for t in (p.input, p.weight, p.bias)]

    def loss(*operands: Tensor) -> Tensor:
        return ops.linear_loss(*operands, index, p.class_weight, -0.7, *c, True, True, True)[0]

    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("op", ["loss", "log_prob", "log_prob_sum", "expectation", "entropy", "top"])
def test_a_second_backward_through_a_retained_graph(device: str, op: str) -> None:
    p = problem(7, 4, 11, torch.float64, device)
    index, *c = loss_arguments(p, 1)
    leaves = [t.requires_grad_() for t in (p.input, p.weight, p.bias)]
    if op == "loss":
        loss = ops.linear_loss(*leaves, index, None, 1.0, *c, True, True, True)[0]
    else:
        out = ops.linear_stats(*leaves, index, None, 1.0, False, False, **ALL)
        loss = out[DIFFERENTIABLE[op]].square().sum()
    first = torch.autograd.grad(loss, leaves, torch.tensor(-3.0).to(loss), retain_graph=True)
    second = torch.autograd.grad(loss, leaves, torch.tensor(6.0).to(loss), retain_graph=True)
    third = torch.autograd.grad(loss, leaves, torch.tensor(-3.0).to(loss))
    for a, b, e in zip(first, second, third, strict=True):
        assert float(a.norm()) > 0
        torch.testing.assert_close(b, -2 * a)
        torch.testing.assert_close(e, a)


def test_what_has_no_derivative_is_refused(device: str) -> None:
    p = problem(4, 3, 5, device=device)
    index, *c = loss_arguments(p, 1)
    input = p.input.clone().requires_grad_()
    made = (True, False, False)
    for loss in (
        ops.linear_loss(input, p.weight, None, index, None, 1.0, *c, *made)[0],
        ops.linear_stats(input, p.weight, None, index, None, 1.0, False, False)[0].sum(),
        ops.linear_stats(input, p.weight, None, index, None, 1.0, False, False, want_entropy=True)[7].sum(),
        ops.linear_stats(input, p.weight, None, index, None, 1.0, False, False, want_top=True)[8].sum(),
    ):
        with pytest.raises(FxfuseError, match="second derivative"):
            torch.autograd.grad(loss, input, create_graph=True)
    class_weight = p.class_weight.clone().requires_grad_()
    with pytest.raises(FxfuseError, match="class_weight"):
        ops.linear_stats(p.input, p.weight, None, index, class_weight, 1.0, True, False)
    with pytest.raises(FxfuseError, match="class_weight"):
        ops.linear_loss(p.input, p.weight, None, index, class_weight, 1.0, *c, False, False, False)
    for at, name in enumerate(("c_log_prob", "c_log_prob_sum")):
        differentiable = [one.clone().requires_grad_(i == at) for i, one in enumerate(c)]
        with pytest.raises(FxfuseError, match=rf"{name}\b"):
            ops.linear_loss(p.input, p.weight, None, index, None, 1.0, *differentiable, False, False, False)
    with pytest.raises(FxfuseError, match="need_input"):
        ops.linear_loss(input, p.weight, None, index, None, 1.0, *c, False, True, False)


# --- opcheck --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("op", ["linear_stats", "linear_loss", "linear_stats_backward"])
def test_opcheck(device: str, op: str, grad: bool, dtype: torch.dtype) -> None:
    p = problem(5, 4, 7, dtype, device)
    for bias, class_weight in ((p.bias, p.class_weight), (None, None)):
        index, c_log_prob, c_log_prob_sum = loss_arguments(p, 2)
        operands = [t if t is None else t.detach().clone().requires_grad_(grad) for t in (p.input, p.weight, bias)]
        shared = (*operands, index, class_weight, 0.5)
        needs = (grad, grad, grad and bias is not None)
        if op == "linear_stats":
            opcheck(ops.linear_stats, (*shared, bias is not None, True))
            opcheck(ops.linear_stats, (*shared, bias is not None, False), {**ALL, "transform": "tanh"})
            opcheck(ops.linear_stats, (*shared, False, True), {"want_top": True, "memory": 1 << 20})
        elif op == "linear_loss":
            opcheck(ops.linear_loss, (*shared, c_log_prob, None if bias is None else c_log_prob_sum, *needs))
        else:
            plain = (*(None if t is None else t.detach() for t in operands), index, class_weight, 0.5)
            lse = ops.linear_stats(*plain, False, False)[0]
            g = (c_log_prob_sum, c_log_prob, None if bias is None else c_log_prob_sum)
            opcheck(ops.linear_stats_backward, (*plain, lse, lse * 0, *g, *needs))
            entropies = {"entropy": lse * 0 + 1, "g_entropy": c_log_prob_sum}
            opcheck(ops.linear_stats_backward, (*plain, lse, lse * 0, *g, *needs), entropies)


@pytest.mark.parametrize("ignore_index", [None, 2])
def test_opcheck_of_check_index(device: str, ignore_index: int | None) -> None:
    index = torch.tensor([[0, 2, 4], [3, 1, 2]], device=device)
    opcheck(ops.check_index, (index, 5, ignore_index))
    opcheck(ops.check_index, (index.t(), 5, ignore_index))


# --- chunks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", [1, 3, 11])
@pytest.mark.parametrize(("rows", "vocab"), [(1024, 50257), (1024, 151936), (4096, 151936), (64, 32000)])
def test_chunks_on_a_cpu_are_a_fraction_of_the_logits(rows: int, vocab: int, buffers: int) -> None:
    """All buffers of a chunk together, but where the fewest rows that make a product take more."""
    slices = chunked.row_slices(rows, 4 * vocab, 0, buffers)
    assert [i for s in slices for i in range(s.start, s.stop)] == list(range(rows))
    most = max(chunked.CHUNK_BYTES, rows * 4 * vocab // 4, chunked.LEAST_CHUNK_ROWS * buffers * 4 * vocab)
    assert max(s.stop - s.start for s in slices) * buffers * 4 * vocab <= most


@pytest.fixture(params=[(1, 1), (2, 3), (5, 7), (6, 4), (100, 1000)], ids=lambda p: f"{p[0]} rows, {p[1]} classes")
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """At most so many rows a chunk and so many classes converted at a time, for V = 23 and D = 4."""
    rows, classes = request.param
    monkeypatch.setattr(chunked, "LEAST_CHUNK_ROWS", 1)
    monkeypatch.setattr(chunked, "CHUNK_BYTES", rows * 23 * 4)
    monkeypatch.setattr(chunked, "CHUNK_ROWS", 0)
    monkeypatch.setattr(chunked, "CAST_ELEMENTS", classes * 4)
    return rows, classes


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_chunk_boundaries_do_not_show(device: str, chunks: tuple[int, int], dtype: torch.dtype) -> None:
    p = problem(13, 4, 23, dtype, device)
    index, *c = loss_arguments(p, 2)
    index[[0, 5, 6, 12]] = -1
    head = (p.input, p.weight, p.bias, index, p.class_weight, 0.5)
    needs = (True, True, True)
    for skip in (False, True):
        actual = chunked.linear_stats(*head, True, skip, **ALL)
        expected = reference.linear_stats(*doubled(*head), True, skip, **ALL)
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a.to(e.dtype), e, **stats_tolerance(dtype))
    rounding = {"rtol": 2 * torch.finfo(dtype).eps, "atol": stats_tolerance(dtype)["atol"] * 10}
    exact_lse = reference.linear_stats(*doubled(*head), True, False)[0]
    exact_entropy = reference.linear_stats(*doubled(*head), True, False, **BOTH)[7]
    for g in (None, upstream(c[1]).roll(1)):
        arguments = exact_lse, exact_lse * 0, c[1].flip(0), *c, *needs, exact_entropy, g
        actual, expected = (
            module.linear_stats_backward(*given[:6], *given[6:-2], entropy=given[-2], g_entropy=given[-1])
            for module, given in (
                (chunked, (*head, *(t.to(c[0].dtype) if isinstance(t, Tensor) else t for t in arguments))),
                (reference, doubled(*head, *arguments)),
            )
        )
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a.double(), e, **rounding)
    actual = chunked.linear_loss(*head, *c, *needs)
    expected = reference.linear_loss(*doubled(*head), *doubled(*c), *needs)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e, **rounding)


# --- memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_no_operation_inside_makes_the_logits(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, hidden, vocab, step = 96, 8, 211, 4
    monkeypatch.setattr(chunked, "LEAST_CHUNK_ROWS", 1)
    monkeypatch.setattr(chunked, "CHUNK_BYTES", step * vocab * torch.finfo(acc_dtype(dtype)).bits // 8)
    monkeypatch.setattr(chunked, "CHUNK_ROWS", 0)
    monkeypatch.setattr(chunked, "CAST_ELEMENTS", 16 * hidden)
    p = problem(rows, hidden, vocab, dtype, device)
    index, *c = loss_arguments(p, 2)
    head = (p.input, p.weight, p.bias, index, p.class_weight, 0.5)
    needs = (True, True, True)
    lse = chunked.linear_stats(*head, True, False)[0]
    calls = {
        "linear_stats": lambda module: module.linear_stats(*head, True, False),
        "linear_stats_backward": lambda module: module.linear_stats_backward(*head, lse, lse * 0, c[1], *c, *needs),
        "linear_loss": lambda module: module.linear_loss(*head, *c, *needs),
    }
    assert max(step * vocab, rows * hidden, vocab * hidden) < rows * vocab / 8
    for name, call in calls.items():
        with LargestTensor() as ours:
            call(chunked)
        # Of the weight's size there are its gradient and views of it, but no copy converted from 16 bits.
        weight_sized = name != "linear_stats" or dtype == acc_dtype(dtype)
        largest_wanted = max(step * vocab, rows * hidden, vocab * hidden if weight_sized else 0)
        assert step * vocab <= ours.elements <= largest_wanted, f"{name}: {ours.op} makes {ours.elements} elements"
        with LargestTensor() as control:
            call(reference)
        assert control.elements >= rows * vocab, "the spy does not see logits where they are made"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures the memory of a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_memory_on_a_gpu_stays_below_the_logits(dtype: torch.dtype) -> None:
    """Forward and backward, beyond operands and gradients: under a quarter of one copy of the logits."""
    rows, hidden, vocab = 16384, 64, 131071
    itemsize = torch.finfo(acc_dtype(dtype)).bits // 8
    p = problem(rows, hidden, vocab, dtype, "cuda")
    index, *c = loss_arguments(p, 1)
    leaves = [t.requires_grad_() for t in (p.input, p.weight, p.bias)]
    logits = rows * vocab * torch.finfo(dtype).bits // 8
    gradients = 3 * itemsize * (p.input.numel() + p.weight.numel() + p.bias.numel())

    def loss() -> Tensor:
        return ops.linear_loss(*leaves, index, None, 1.0, *c, True, True, True)[0]

    def stats() -> Tensor:
        return ops.linear_stats(*leaves, index, None, 1.0, False, False)[2].sum()

    for run in (loss, stats):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(run(), leaves)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before - gradients
        assert math.isfinite(float(grads[0].double().norm()))
        assert extra < logits / 4, f"{run.__name__}: {extra >> 20} MiB beside logits of {logits >> 20} MiB"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures the memory of a GPU")
@pytest.mark.parametrize("shape", [(16384, 1024, 65536), (4096, 4096, 32000)], ids=str)
def test_the_memory_of_buffers_can_be_bounded(shape: tuple[int, int, int]) -> None:
    """Loss and gradients through the compiled program, beyond operands and gradients."""
    most = 128 << 20
    p = problem(*shape, torch.bfloat16, "cuda")
    leaves = [p.input.requires_grad_(), p.weight.requires_grad_()]

    def extra(**options: Any) -> int:
        torch._dynamo.reset()
        f = torch.compile(lambda x, w: F.cross_entropy(x @ w.t(), p.target), backend="fxfuse", options=options)
        torch.autograd.grad(f(*leaves), leaves)
        gc.collect()  # what other tests left, and what is then not freed while this one looks
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(f(*leaves), leaves)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in grads)

    bounded, usual = extra(**{"fxfuse.memory": most}), extra()
    assert bounded <= most < usual, (bounded, usual)


@pytest.mark.parametrize("shift", [0.0, 8191.0, -3.3e5])
def test_the_residual_is_what_rounding_took_from_lse(shift: float, device: str) -> None:
    p = problem(9, 16, 101, device=device)
    bias = p.bias * 0 + shift
    index = p.target[:, None]
    lse, _, _, _, _, residual, *_ = ops.linear_stats(p.input, p.weight, bias, index, None, 1.0, False, False)
    # The logits themselves are float32: take them as they are, and only what is made of them as exact.
    z = (p.input @ p.weight.t() + bias).double()
    exact = z.logsumexp(1)
    unit = torch.finfo(torch.float32).eps * z.abs().amax()
    assert bool(((lse.double() - exact).abs() <= unit).all())
    assert bool((residual.double().abs() <= unit).all())
    top = z.amax(1)
    log_total = (z - top[:, None]).exp().sum(1).log()
    torch.testing.assert_close((lse.double() - top) + residual.double(), log_total, rtol=1e-5, atol=1e-5)


# --- exponentials kept for the backward -----------------------------------------------------------------------


def test_few_rows_keep_their_exponentials_where_a_gpu_has_the_kernels(device: str) -> None:
    # Whole blocks of rows and of classes: what pads them is never written, so opcheck may not compare it.
    shape = 128, 128, 2048
    p = problem(*shape, torch.bfloat16, device)
    fast = device == "cuda" and torch.cuda.get_device_capability()[0] in (9, 10)
    assert cuda.keeps_exponentials(p.input, p.weight, 1, False, "") == fast
    if not fast:
        return
    index, *c = loss_arguments(p, 1)
    shared = (p.input, p.weight, p.bias, index, p.class_weight, 0.5)
    opcheck(ops.linear_loss_exponentials, (*shared, *c))
    needs = [t.detach().requires_grad_() for t in (p.input, p.weight, p.bias)]
    opcheck(ops.linear_loss_exponentials, (*needs, *shared[3:], *c), {"transform": ""})

    def step(input: Tensor, weight: Tensor) -> Tensor:
        z = input @ weight.t()
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        return F.cross_entropy(z, p.target, label_smoothing=0.1) * 5

    torch._dynamo.reset()
    fused = torch.compile(step, backend="fxfuse", options={"fxfuse.min_logits_bytes": 0})
    operands = (p.input, p.weight)
    exact = value_and_grads(step, *doubled(*operands))
    with new_sites() as sites:
        got = value_and_grads(fused, *operands)
    assert [site.variant for site in sites] == ["exponentials kept for the backward"]
    assert_no_worse_than_eager(got, value_and_grads(step, *operands), exact, floor(shape, torch.bfloat16))
    # Operands that began off a vector's boundary when the program runs, which nobody knows when it is compiled.
    moved = torch.empty(p.weight.numel() + 1, dtype=torch.bfloat16, device=device)[1:].view_as(p.weight)
    moved.copy_(p.weight)
    for a, b in zip(value_and_grads(fused, p.input, moved), got, strict=True):
        assert torch.equal(a, b)
