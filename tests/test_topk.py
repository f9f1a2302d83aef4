"""``torch.ops.fxfuse.linear_topk`` against eager and its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DTYPE_IDS,
    DTYPES,
    FLOORS,
    LargestTensor,
    assert_no_worse_than_eager,
    doubled,
    problem,
    relative_error,
    value_and_grads,
)
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import opcheck

from fxfuse import FxfuseError, ops
from fxfuse.ops import chunked, reference, topk

SHAPE = (33, 16, 101)


def ours(*operands: Tensor, largest: bool = True, transform: str = "tanh") -> list[Tensor]:
    values, _, lse, residual = ops.linear_topk(*operands, 0.5, 3, largest, True, transform=transform)
    return [values, (values - lse[:, None]) - residual[:, None], lse]


def eager(*operands: Tensor, largest: bool = True) -> list[Tensor]:
    z = (F.linear(*operands) * 0.5).tanh()
    return [z.topk(3, 1, largest).values, z.log_softmax(1).topk(3, 1, largest).values, z.logsumexp(1)]


@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_errs_no_more_than_eager(device: str, dtype: torch.dtype, largest: bool) -> None:
    p = problem(*SHAPE, dtype, device)
    operands = (p.input, p.weight, p.bias)

    def exact_of_ours(*operands: Tensor) -> list[Tensor]:
        """At the classes that were found, which rounding may make others than eager's."""
        z = (F.linear(*operands) * 0.5).tanh()
        return [z.gather(1, index), z.log_softmax(1).gather(1, index), z.logsumexp(1)]

    index = ops.linear_topk(*operands, 0.5, 3, largest, True, transform="tanh")[1]
    actual = value_and_grads(lambda *o: ours(*o, largest=largest), *operands)
    exact = value_and_grads(exact_of_ours, *doubled(*operands))
    expected = value_and_grads(lambda *o: [one.to(a.dtype) for one, a in zip(exact_of_ours(*o), actual, strict=False)],
                               *operands)  # fmt: skip
    assert_no_worse_than_eager(actual, expected, exact, FLOORS[dtype])
    if dtype == torch.float64:
        torch.testing.assert_close(exact[:3], eager(*operands, largest=largest))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_values_are_unrounded(device: str, dtype: torch.dtype) -> None:
    p = problem(33, 64, 101, dtype, device)
    values = ops.linear_topk(p.input, p.weight, p.bias, 1.0, 5, True, True)[0]
    exact = F.linear(*doubled(p.input, p.weight, p.bias)).topk(5).values
    assert relative_error(values, exact) < 2e-6


def test_order_and_special_values_are_those_of_torch(device: str) -> None:
    nan, inf = float("nan"), float("inf")
    z = torch.tensor([[1.0, nan, 3, -inf], [inf, 2, 4, 3], [-inf, -inf, -inf, -inf], [5, 1, 2, 7]], device=device)
    eye = torch.eye(4, device=device)
    # Infinities would be multiplied by zeros on the way through a product, a bias is added.
    for row in z:
        for largest in (True, False):
            values, index, lse, _ = ops.linear_topk(eye[:1] * 0, eye, row, 1.0, 3, largest, True)
            expected = row[None].topk(3, 1, largest)
            torch.testing.assert_close(values, expected.values, equal_nan=True)
            torch.testing.assert_close(row[index], expected.values, equal_nan=True)
            torch.testing.assert_close(lse, row[None].logsumexp(1), equal_nan=True)


@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_chunk_boundaries_do_not_show(
    device: str, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "LEAST_CHUNK_ROWS", 1)
    monkeypatch.setattr(chunked, "CAST_ELEMENTS", 7 * 4)
    p = problem(13, 4, 23, dtype, device)
    head = (p.input, p.weight, p.bias, 0.5, 4, True, True)
    values, index, lse, residual = topk.linear_topk_chunked(*head, memory=rows * 23 * 4)
    exact = reference.linear_topk(*doubled(*head))
    assert torch.equal(index, exact[1])
    eps = 1e-13 if dtype == torch.float64 else 3e-6
    assert relative_error(values, exact[0]) < eps
    assert relative_error(lse.double() + residual, exact[2]) < eps


def test_nothing_of_the_size_of_the_logits_is_made(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "LEAST_CHUNK_ROWS", 1)
    rows, hidden, vocab, step = 96, 8, 211, 4
    p = problem(rows, hidden, vocab, device=device)
    with LargestTensor() as spy:
        topk.linear_topk_chunked(p.input, p.weight, p.bias, 1.0, 3, True, True, memory=step * vocab * 4)
    assert spy.elements <= max(step * vocab, vocab * hidden)


def test_no_rows(device: str) -> None:
    p = problem(3, 4, 7, device=device)
    out = ops.linear_topk(p.input[:0], p.weight, p.bias, 1.0, 2, True, True)
    assert [tuple(one.shape) for one in out] == [(0, 2), (0, 2), (0,), (0,)]


def test_only_what_is_needed_has_a_gradient(device: str) -> None:
    p = problem(5, 4, 7, device=device)
    for used in (0, 2):  # the values, or the log-sum-exp
        weight = p.weight.clone().requires_grad_()
        out = ops.linear_topk(p.input, weight, None, 1.0, 2, True, True)
        assert [one.requires_grad for one in out] == [True, False, True, False]
        (g,) = torch.autograd.grad(out[used].sum(), weight, retain_graph=True)
        z = p.input @ weight.t()
        (expected,) = torch.autograd.grad((z.topk(2).values if used == 0 else z.logsumexp(1)).sum(), weight)
        torch.testing.assert_close(g, expected)


def test_second_and_forward_mode_derivatives_are_refused(device: str) -> None:
    p = problem(5, 4, 7, device=device)
    head: Any = (p.weight, None, 1.0, 2, True, True)
    input = p.input.clone().requires_grad_()
    with pytest.raises(FxfuseError, match="second derivative"):
        torch.autograd.grad(ops.linear_topk(input, *head)[0].sum(), input, create_graph=True)
    with forward_ad.dual_level(), pytest.raises(FxfuseError, match="forward-mode"):
        ops.linear_topk(forward_ad.make_dual(p.input, torch.ones_like(p.input)), *head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_opcheck(device: str, grad: bool, dtype: torch.dtype) -> None:
    p = problem(5, 4, 7, dtype, device)
    for bias, options in ((p.bias, {"transform": "tanh"}), (None, {"memory": 1 << 20})):
        operands = [t if t is None else t.detach().clone().requires_grad_(grad) for t in (p.input, p.weight, bias)]
        opcheck(ops.linear_topk, (*operands, 0.5, 3, False, True), options)
