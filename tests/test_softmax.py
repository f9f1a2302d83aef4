"""``torch.ops.fxfuse.linear_softmax`` against eager and its definition."""

from __future__ import annotations

from collections.abc import Callable
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
from fxfuse.ops import chunked, reference, softmax
from fxfuse.ops.contract import acc_dtype

inf, nan = float("inf"), float("nan")
LOG = pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])


def eager(log: bool, dtype: torch.dtype, scale: float = 0.5, softcap: bool = False) -> Callable[..., Tensor]:
    """As a user writes it, with the projection in the operands' dtype."""

    def run(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        z = F.linear(input, weight, bias) * scale
        z = z.tanh() * 3.0 if softcap else z
        return z.log_softmax(1, dtype=dtype) if log else z.softmax(1, dtype=dtype)

    return run


def ours(log: bool, dtype: torch.dtype, scale: float = 0.5, softcap: bool = False) -> Callable[..., Tensor]:
    def run(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        transform = "tanh mul:3.0" if softcap else ""
        return ops.linear_softmax(input, weight, bias, scale, log, dtype, transform=transform)

    return run


# --- values and gradients -------------------------------------------------------------------------------------


@LOG
@pytest.mark.parametrize("softcap", [False, True], ids=["plain", "softcap"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("shape", SOME_SLOW, ids=str)
def test_errs_no_more_than_eager(
    device: str, shape: tuple[int, int, int], dtype: torch.dtype, softcap: bool, log: bool
) -> None:
    p = problem(*shape, dtype, device)
    for operands in ((p.input, p.weight, p.bias), (p.input, p.weight)):
        exact = value_and_grads(eager(log, torch.float64, 0.5, softcap), *doubled(*operands))
        actual, expected = (value_and_grads(f(log, dtype, 0.5, softcap), *operands) for f in (ours, eager))
        assert_no_worse_than_eager(actual, expected, exact, floor(shape, dtype))


@LOG
@pytest.mark.parametrize("result", DTYPES, ids=lambda dtype: f"to {dtype}".replace("torch.", ""))
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_every_dtype_of_the_result(device: str, dtype: torch.dtype, result: torch.dtype, log: bool) -> None:
    p = problem(33, 16, 101, dtype, device)
    operands = (p.input, p.weight, p.bias)
    exact = value_and_grads(eager(log, torch.float64), *doubled(*operands))
    actual = value_and_grads(ours(log, result), *operands)
    expected = value_and_grads(eager(log, result), *operands)
    assert_no_worse_than_eager(actual[:1], expected[:1], exact[:1], max(FLOORS[result], 0 if dtype == result else 1e-6))
    # A gradient may lose to the dtype of its upstream gradient and to its own.
    at_least = max(FLOORS[result], FLOORS[dtype], 1e-13 if dtype == result == torch.float64 else 1e-6)
    assert_no_worse_than_eager(actual[1:], expected[1:], exact[1:], at_least)


@LOG
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_float32_results_of_16_bit_operands_come_from_unrounded_logits(
    device: str, dtype: torch.dtype, log: bool
) -> None:
    p = problem(33, 64, 101, dtype, device)
    out = ours(log, torch.float32, 4.0)(p.input, p.weight, p.bias)
    exact = eager(log, torch.float64, 4.0)(*doubled(p.input, p.weight, p.bias))
    rounded = eager(log, torch.float32, 4.0)(p.input, p.weight, p.bias)
    assert relative_error(out, exact) < 2e-6 < relative_error(rounded, exact) / 50


@LOG
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_huge_logits(device: str, dtype: torch.dtype, log: bool) -> None:
    """1e4 overflows exp in every dtype; the differences that matter are small."""
    logits = torch.tensor([[8192.0, 8200.0, 8184.0, -8192.0], [-8192.0, -8200.0, -8192.0, -8208.0]]).repeat(4, 9)
    operands = (torch.eye(8, dtype=dtype, device=device), logits.t().contiguous().to(device, dtype))

    def small(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *operands: f(*operands) / 64  # or its gradients are too large for float16

    exact = value_and_grads(small(eager(log, torch.float64, 1.0)), *doubled(*operands))
    actual, expected = (value_and_grads(small(f(log, dtype, 1.0)), *operands) for f in (ours, eager))
    # Gradients of the hidden states are what is left of sums of 8192 times numbers that add up to zero, some roundings
    # of which are luck; and in float64 eager is its own judge.
    allowed = {torch.float64: 1e-10, torch.float32: 4e-3}.get(dtype)
    assert_no_worse_than_eager(actual, expected, exact, allowed)


def test_a_nearly_certain_class_keeps_its_log_probability(device: str) -> None:
    logits = torch.full((3, 9), 1000.0)
    logits[:, 4] = torch.tensor([1008.0, 1012.0, 1014.0])
    out = ours(True, torch.float32, 1.0)(torch.eye(3, device=device), logits.t().contiguous().to(device))
    exact = logits.to(device).double().log_softmax(1)
    torch.testing.assert_close(out.double()[:, 4], exact[:, 4], rtol=2e-2, atol=2e-7)


@LOG
def test_masked_classes(device: str, log: bool) -> None:
    """A bias of -inf rules a class out: its gradient is zero and the others are as if it were not there."""
    p = problem(12, 8, 40, device=device)
    barred = torch.tensor([0, 7, 39], device=device)
    kept = torch.ones(40, dtype=torch.bool, device=device).index_fill(0, barred, False)
    bias = p.bias.index_fill(0, barred, -inf)
    out = ours(log, torch.float32)(p.input, p.weight, bias)
    assert bool((out[:, barred] == (-inf if log else 0)).all())

    def of_kept(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *operands: f(*operands)[:, kept]

    operands = (p.input, p.weight, bias)
    actual, expected, exact = (
        value_and_grads(of_kept(f), *given)
        for f, given in (
            (ours(log, torch.float32), operands),
            (eager(log, torch.float32), operands),
            (eager(log, torch.float64), doubled(*operands)),
        )
    )
    assert_no_worse_than_eager(actual, expected, exact)
    assert not actual[-1][barred].any() and not actual[-2][barred].any()


@LOG
@pytest.mark.parametrize(
    "row",
    [[-inf, 1.0, 2.0], [-inf, -inf, -inf], [inf, 1.0, 2.0], [inf, -inf, 0.0], [nan, 1.0, 2.0], [1.0, nan, 2.0]],
    ids=str,
)
def test_rows_that_are_not_finite(device: str, row: list[float], log: bool) -> None:
    """As eager has them, and the finite row beside them is untouched."""
    bias = torch.tensor([*row, 0.5], device=device)
    input, weight = torch.zeros(2, 1, device=device), torch.zeros(4, 1, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        out = ops.linear_softmax(input, weight, bias, 1.0, log, dtype)
        want = (bias.log_softmax(0) if log else bias.softmax(0)).to(dtype).expand(2, 4)
        torch.testing.assert_close(out, want, equal_nan=True, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    input, weight = (
        torch.eye(2, device=device),
        torch.tensor([[r, 1.0] for r in row], device=device).nan_to_num(0, 9, -9),
    )
    out = ops.linear_softmax(input, weight, None, 1.0, log, torch.float32)
    torch.testing.assert_close(out[1].exp() if log else out[1], torch.full((3,), 1 / 3, device=device))


# --- what is asked for ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_only_the_gradients_asked_for_are_made(device: str, needs: tuple[bool, bool, bool]) -> None:
    p = problem(6, 4, 9, device=device)
    operands = (p.input, p.weight, p.bias, 1.0, True)
    out = ops.linear_softmax(*operands, torch.float32)
    g = upstream(out)
    everything = softmax.linear_softmax_backward(*operands, out, g, True, True, True)
    some = softmax.linear_softmax_backward(*operands, out, g, *needs)
    for whole, part, needed in zip(everything, some, needs, strict=True):
        if needed:
            torch.testing.assert_close(part, whole)
        else:
            assert part.shape == (0,)
    leaves = [t.clone().requires_grad_(need) for t, need in zip((p.input, p.weight, p.bias), needs, strict=True)]
    ops.linear_softmax(*leaves, 1.0, True, torch.float32).backward(g)
    for leaf, need, whole in zip(leaves, needs, everything, strict=True):
        assert (leaf.grad is not None) == need
        if need:
            torch.testing.assert_close(leaf.grad, whole)


def test_operands_and_results_are_not_written_to(device: str) -> None:
    p = problem(9, 4, 21, device=device)
    operands = (p.input, p.weight, p.bias)
    for log in (False, True):
        out = ops.linear_softmax(*operands, 0.5, log, torch.float32, transform="tanh")
        g = upstream(out)
        given = (*operands, out, g)
        before = [t.clone() for t in given]
        softmax.linear_softmax_backward(*operands, 0.5, log, out, g, True, True, True, transform="tanh")
        assert all(torch.equal(now, then) for now, then in zip(given, before, strict=True))


def test_bias_keeps_its_own_dtype(device: str) -> None:
    p = problem(64, 16, 33, torch.bfloat16, device)
    bias = (p.bias.float() + 1e-3).requires_grad_()
    out = ops.linear_softmax(p.input, p.weight, bias, 1.0, True, torch.float32)
    (grad,) = torch.autograd.grad(out, bias, upstream(out))
    exact_bias = bias.detach().double().requires_grad_()
    exact = reference.linear_softmax(p.input.double(), p.weight.double(), exact_bias, 1.0, True, torch.float64)
    (exact_grad,) = torch.autograd.grad(exact, exact_bias, upstream(out).double())
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    assert grad.dtype == torch.float32
    # Its terms may come from 16-bit gradients of the logits (on a GPU); their sum may not be rounded to 16 bits.
    assert relative_error(grad, exact_grad) < 2e-3


@LOG
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("layout", [strided, transposed, every_other_row])
def test_memory_layout_does_not_matter(
    device: str, layout: Callable[[Tensor], Tensor], dtype: torch.dtype, log: bool
) -> None:
    p = problem(19, 8, 37, dtype, device)

    def run(place: Callable[[Tensor], Tensor], bias: Tensor) -> list[Tensor]:
        operands = [t.detach().requires_grad_() for t in (place(p.input), place(p.weight), bias)]
        out = ops.linear_softmax(*operands, 0.5, log, dtype, transform="tanh")
        return [out.detach(), *torch.autograd.grad(out, operands, place(upstream(out)))]

    for a, e in zip(run(layout, torch.stack((p.bias, p.bias), 1)[:, 0]), run(torch.clone, p.bias), strict=True):
        assert relative_error(a, e.double()) < max(2 * torch.finfo(dtype).eps, 2e-6 if dtype != torch.float64 else 0)


def test_expanded_operands(device: str) -> None:
    """All rows and all upstream gradients one and the same memory, as ``sum().backward()`` gives them."""
    p = problem(1, 6, 11, torch.float64, device)

    def expanded(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda input: f(input.expand(5, 6), p.weight, p.bias[:1].expand(11))[:, :4].square().sum()

    def total(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda input: f(input.expand(5, 6), p.weight, p.bias).sum()

    for reduce in (expanded, total):
        a, e = (value_and_grads(reduce(f(True, torch.float64)), p.input) for f in (ours, eager))
        for one, other in zip(a, e, strict=True):
            torch.testing.assert_close(one, other)


def test_autocast_does_not_reach_inside(device: str) -> None:
    p = problem(16, 32, 65, device=device)
    operands = (p.input, p.weight, p.bias)
    plain = value_and_grads(ours(True, torch.float32), *operands)
    with torch.autocast(device, torch.bfloat16):
        inside = value_and_grads(ours(True, torch.float32), *operands)
    for a, e in zip(inside, plain, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6)


@LOG
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_the_same_bits_every_time(device: str, dtype: torch.dtype, log: bool) -> None:
    p = problem(64, 48, 1001, dtype, device)
    runs = [value_and_grads(ours(log, dtype, softcap=True), p.input, p.weight, p.bias) for _ in range(3)]
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))


# --- autograd -------------------------------------------------------------------------------------------------


@LOG
@pytest.mark.parametrize("transform", ["", "add:0.5 mul:1.5 sigmoid mul:-4.0"])
def test_gradcheck(device: str, log: bool, transform: str) -> None:
    p = problem(4, 3, 5, torch.float64, device)
    leaves = [t.requires_grad_() for t in (p.input, p.weight, p.bias)]

    def f(*operands: Tensor) -> Tensor:
        return ops.linear_softmax(*operands, -0.7, log, torch.float64, transform=transform)

    assert torch.autograd.gradcheck(f, leaves)


def test_a_second_backward_through_a_retained_graph(device: str) -> None:
    p = problem(7, 4, 11, torch.float64, device)
    leaves = [t.requires_grad_() for t in (p.input, p.weight, p.bias)]
    loss = ops.linear_softmax(*leaves, 1.0, False, torch.float64).square().sum()
    first = torch.autograd.grad(loss, leaves, torch.tensor(-3.0).to(loss), retain_graph=True)
    second = torch.autograd.grad(loss, leaves, torch.tensor(6.0).to(loss))
    for a, b in zip(first, second, strict=True):
        assert float(a.norm()) > 0
        torch.testing.assert_close(b, -2 * a)


def test_what_has_no_derivative_is_refused(device: str) -> None:
    p = problem(4, 3, 5, device=device)
    input = p.input.clone().requires_grad_()
    out = ops.linear_softmax(input, p.weight, None, 1.0, True, torch.float32)
    with pytest.raises(FxfuseError, match="second derivative"):
        torch.autograd.grad(out.sum(), input, create_graph=True)
    with forward_ad.dual_level(), pytest.raises(FxfuseError, match="forward-mode"):
        dual = forward_ad.make_dual(p.input, torch.ones_like(p.input))
        ops.linear_softmax(dual, p.weight, None, 1.0, True, torch.float32)
    with pytest.raises(ValueError):
        ops.linear_softmax(p.input, p.weight, None, 1.0, True, torch.float32, transform="tan")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@LOG
def test_opcheck(device: str, log: bool, grad: bool, dtype: torch.dtype) -> None:
    p = problem(5, 4, 7, dtype, device)
    for bias, options in ((p.bias, {"transform": "tanh"}), (None, {"memory": 1 << 20}), (None, {})):
        operands = [t if t is None else t.detach().clone().requires_grad_(grad) for t in (p.input, p.weight, bias)]
        opcheck(ops.linear_softmax, (*operands, 0.5, log, torch.float32), options)
        opcheck(ops.linear_softmax, (*operands, 0.5, log, dtype), options)
        plain = [t if t is None else t.detach() for t in operands]
        out = ops.linear_softmax(*plain, 0.5, log, dtype, **options)
        needs = (grad, True, bias is not None)
        opcheck(softmax.linear_softmax_backward, (*plain, 0.5, log, out, upstream(out), *needs), options)


# --- chunks and memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_chunk_boundaries_do_not_show(
    device: str, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "LEAST_CHUNK_ROWS", 1)
    monkeypatch.setattr(chunked, "CHUNK_BYTES", rows * 23 * 4 * softmax.BACKWARD_BUFFERS)
    monkeypatch.setattr(chunked, "CHUNK_ROWS", 0)
    monkeypatch.setattr(chunked, "CAST_ELEMENTS", 7 * 4)
    p = problem(13, 4, 23, dtype, device)
    for log in (False, True):
        for transform in ("", "tanh"):
            head = (p.input, p.weight, p.bias, 0.5, log)
            out = softmax.linear_softmax_chunked(*head, acc_dtype(dtype), transform=transform)
            grads = softmax.linear_softmax_backward_chunked(
                *head, out, upstream(out), True, True, True, transform=transform
            )

            def exact(*operands: Tensor, log=log, transform=transform) -> Tensor:
                return reference.linear_softmax(*operands, 0.5, log, torch.float64, transform=transform)

            expected = value_and_grads(exact, *doubled(p.input, p.weight, p.bias))
            for a, e in zip((out, *grads), expected, strict=True):
                eps = torch.finfo(a.dtype).eps
                assert relative_error(a, e) < max(2 * eps, 3e-6 if dtype != torch.float64 else 1e-13)


@pytest.mark.parametrize("transform", ["", "tanh"])
def test_nothing_else_of_the_size_of_the_logits_is_made(
    device: str, transform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "LEAST_CHUNK_ROWS", 1)
    rows, hidden, vocab, step = 96, 8, 211, 4
    memory = step * vocab * 4 * softmax.BACKWARD_BUFFERS
    p = problem(rows, hidden, vocab, device=device)
    for log in (False, True):
        head = (p.input, p.weight, p.bias, 0.5, log)
        with _LargestButResult(rows * vocab) as spy:
            out = softmax.linear_softmax_chunked(*head, torch.float32, transform=transform, memory=memory)
        assert spy.whole == 1 and spy.elements <= 2 * step * vocab
        g = torch.ones((), device=device).expand(rows, vocab)
        with LargestTensor() as strict:
            softmax.linear_softmax_backward_chunked(*head, out, g, True, True, True, transform=transform, memory=memory)
        assert strict.elements <= max(step * vocab, vocab * hidden) < rows * vocab / 8, strict.op


class _LargestButResult(LargestTensor):
    """Counts tensors of ``whole`` elements, and records the largest of the others."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.whole = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.elements, self.op
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(out, Tensor) and out.numel() == self.size:
            self.whole += 1
            self.elements, self.op = before
        return out
