"""The public functions against the eager compositions that their docstrings name."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DTYPE_IDS,
    DTYPES,
    SHAPES,
    LargestTensor,
    assert_no_worse_than_eager,
    assert_raises_like,
    doubled,
    floor,
    problem,
    relative_error,
    spied,
    value_and_grads,
)
from torch import Tensor

import fxfuse
from fxfuse import FxfuseError, errors, linear_cross_entropy, linear_log_probs, linear_logsumexp

inf, nan = float("inf"), float("nan")


def eager_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None, **options: Any
) -> Tensor:
    logits = F.linear(input, linear_weight, linear_bias)
    if input.dim() <= 2:
        return F.cross_entropy(logits, target, **options)
    loss = F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)
    return loss.reshape(target.shape) if loss.dim() else loss


def eager_log_probs(
    input: Tensor, linear_weight: Tensor, index: Tensor, *, linear_bias: Tensor | None = None
) -> Tensor:
    log_probs = F.linear(input, linear_weight, linear_bias).log_softmax(-1)
    if index.dim() == input.dim():
        return log_probs.gather(-1, index)
    return log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def eager_logsumexp(input: Tensor, linear_weight: Tensor, *, linear_bias: Tensor | None = None) -> Tensor:
    return F.linear(input, linear_weight, linear_bias).logsumexp(-1)


EAGER: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    linear_cross_entropy: eager_cross_entropy,
    linear_log_probs: eager_log_probs,
    linear_logsumexp: eager_logsumexp,
}


def check(
    ours: Callable[..., Tensor], operands: list[Tensor], *args: Any, at_least: float | None = None, **options: Any
) -> list[Tensor]:
    """Value and gradients of ``ours`` for input, weight and, if given, bias, against eager; returns ours."""

    def bound(function: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
        def call(*leaves: Tensor, options: dict[str, Any] = options) -> list[Tensor]:
            input, weight, *bias = leaves
            return value_and_grads(
                lambda x, w, *b: function(x, w, *args, **({"linear_bias": b[0]} if b else {}), **options),
                *(input, weight, *bias),
            )

        return call

    actual = bound(ours)(*operands)
    eager = bound(EAGER[ours])
    in_float64 = {name: doubled(value)[0] for name, value in options.items()}
    assert_no_worse_than_eager(actual, eager(*operands), eager(*doubled(*operands), options=in_float64), at_least)
    return actual


# --- against eager, over the grid -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cross_entropy(device: str, shape: tuple[int, int, int], reduction: str, dtype: torch.dtype) -> None:
    """With and without bias, class weights and label smoothing; ignore_index a class of its own and a real one."""
    p = problem(*shape, dtype, device)
    for bias, weight, smoothing in itertools.product((False, True), (False, True), (0.0, 0.1)):
        ignore_index = int(p.target[0]) if shape[0] > 1 and bias else -100
        target = p.target.clone()
        target[1::3] = ignore_index
        check(
            linear_cross_entropy,
            [p.input, p.weight, *([p.bias] if bias else [])],
            target,
            weight=p.class_weight if weight else None,
            reduction=reduction,
            label_smoothing=smoothing,
            ignore_index=ignore_index,
            at_least=floor(shape, dtype),
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_log_probs_and_logsumexp(device: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    p = problem(*shape, dtype, device)
    several = (p.target[:, None] + torch.arange(3, device=device) * 11) % shape[2]
    for operands in ([p.input, p.weight], [p.input, p.weight, p.bias]):
        check(linear_log_probs, operands, p.target, at_least=floor(shape, dtype))
        check(linear_log_probs, operands, several, at_least=floor(shape, dtype))
        check(linear_logsumexp, operands, at_least=floor(shape, dtype))


@pytest.mark.parametrize("ignore_index", [-100, -1, 2, 2**40, -(2**40)])
@pytest.mark.parametrize("smoothing", [0.0, 0.25])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_row_ignored(device: str, reduction: str, smoothing: float, ignore_index: int) -> None:
    """NaN for mean, zero for sum, and no gradient, as in eager."""
    p = problem(5, 4, 7, device=device)
    target = torch.full_like(p.target, ignore_index)
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignore_index}
    for weight in (None, p.class_weight):
        loss, *grads = check(linear_cross_entropy, [p.input, p.weight, p.bias], target, weight=weight, **options)
        assert bool(loss.isnan()) if reduction == "mean" else not loss.any()
        assert not any(g.any() for g in grads)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_class_weights_of_zero(device: str, reduction: str) -> None:
    """Rows of a class without weight count for nothing; with no other rows the mean is 0 / 0."""
    p = problem(6, 4, 5, device=device)
    p.class_weight[:3] = 0
    for target in (p.target, p.target % 3):
        for smoothing in (0.0, 0.1):
            options = {"reduction": reduction, "weight": p.class_weight, "label_smoothing": smoothing}
            check(linear_cross_entropy, [p.input, p.weight, p.bias], target, **options)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_class_weights_of_classes_that_are_never_wanted(device: str, reduction: str, smoothing: float) -> None:
    """One over how often a class was seen is infinite for padding; an ignored row is still worth nothing."""
    p = problem(6, 4, 5, device=device)
    target = (p.target % 4 + 1).masked_fill(torch.arange(6, device=device) % 2 == 0, -100)
    for worst in (inf, nan):
        p.class_weight[0] = worst
        options = {"reduction": reduction, "weight": p.class_weight, "label_smoothing": smoothing}
        if smoothing == 0:
            check(linear_cross_entropy, [p.input, p.weight, p.bias], target, **options)
        elif reduction == "none":  # of the other rows the loss is the sum of all weights, times something
            loss = linear_cross_entropy(p.input, p.weight, target, linear_bias=p.bias, **options)
            assert not loss[::2].any() and not loss[1::2].isfinite().any()


@pytest.mark.parametrize("smoothing", [0.5, 1.0, 1])
def test_much_label_smoothing(device: str, smoothing: float) -> None:
    p = problem(6, 4, 5, device=device)
    for weight in (None, p.class_weight):
        check(linear_cross_entropy, [p.input, p.weight], p.target, weight=weight, label_smoothing=smoothing)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("leading", [(), (2,), (2, 3), (2, 1, 3), (2, 0, 3)], ids=str)
def test_leading_dimensions(device: str, leading: tuple[int, ...], dtype: torch.dtype) -> None:
    """Hidden states ``[..., D]``; for the cross entropy of one vector the target is 0-d."""
    p = problem(6, 4, 11, dtype, device)
    count = torch.Size(leading).numel()
    input, target = p.input[:count].reshape(*leading, 4), p.target[:count].reshape(leading)
    operands = [input, p.weight, p.bias]
    for reduction in ("mean", "none"):
        check(linear_cross_entropy, operands, target, reduction=reduction)
    check(linear_log_probs, operands, target)
    check(linear_log_probs, operands, torch.stack((target, 10 - target), -1))
    check(linear_logsumexp, operands)


def test_hidden_states_without_an_axis() -> None:
    p = problem(3, 4, 5)
    for f in (linear_log_probs, eager_log_probs):
        with pytest.raises(RuntimeError, match="at least 1D"):
            f(torch.tensor(1.0), p.weight, torch.tensor([1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_views_as_operands(device: str, dtype: torch.dtype) -> None:
    p = problem(24, 8, 30, dtype, device)
    input = p.input.reshape(4, 6, 8).transpose(0, 1)[:, 1:]
    weight = p.weight.t().contiguous().t()
    target = p.target.reshape(4, 6).t()[:, 1:]
    bias = torch.stack((p.bias, p.bias), 1)[:, 1]
    for tensor in (input, weight, target, bias):
        assert not tensor.is_contiguous()
    check(linear_cross_entropy, [input, weight, bias], target)
    check(linear_log_probs, [input, weight, bias], target)
    check(linear_logsumexp, [input, weight, bias])


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_huge_logits(device: str, reduction: str, dtype: torch.dtype) -> None:
    """Logits near 1e4 and targets far below the maximum, from operands whose products are exact."""
    logits = torch.tensor([[8192.0, 8200.0, 8184.0, -8192.0], [-8192.0, -8200.0, -8192.0, -8208.0]]).repeat(4, 9)
    input = torch.eye(8, device=device, dtype=dtype)
    weight = logits.t().contiguous().to(device, dtype)
    target = torch.arange(8, device=device) % 4

    def run(function: Callable[..., Tensor], *operands: Tensor) -> list[Tensor]:
        return value_and_grads(lambda x, w: function(x, w, target, reduction=reduction), *operands)

    exact = run(eager_cross_entropy, input.double(), weight.double())
    # In float64 eager is its own judge, and one rounding of a log-sum-exp of 8192 is 1e-12 of a probability.
    at_least = 1e-12 if dtype == torch.float64 else None
    actual, eager = run(linear_cross_entropy, input, weight), run(eager_cross_entropy, input, weight)
    assert_no_worse_than_eager(actual, eager, exact, at_least)


def test_classes_ruled_out_by_the_bias(device: str) -> None:
    p = problem(12, 8, 40, device=device)
    bias = p.bias.index_fill(0, torch.tensor([0, 39], device=device), -inf)
    target = p.target.clamp(1, 38)
    check(linear_cross_entropy, [p.input, p.weight, bias], target)
    check(linear_logsumexp, [p.input, p.weight, bias])
    loss, *_ = check(linear_cross_entropy, [p.input, p.weight, bias], target, reduction="sum")
    assert bool(loss.isfinite())
    hopeless = torch.zeros_like(target)
    assert linear_cross_entropy(p.input, p.weight, hopeless, linear_bias=bias).item() == inf


def test_ignored_rows_that_are_not_finite(device: str) -> None:
    """They poison neither the loss nor any other gradient; eager's weight gradient is NaN here."""
    p = problem(9, 4, 13, device=device)
    p.input[4], p.input[8] = nan, inf
    p.target[[4, 8]] = -100
    counted = [0, 1, 2, 3, 5, 6, 7]
    for reduction in ("mean", "sum"):
        loss, d_input, d_weight = value_and_grads(
            lambda x, w, reduction=reduction: linear_cross_entropy(x, w, p.target, reduction=reduction),
            *(p.input, p.weight),
        )
        expected = value_and_grads(
            lambda x, w, reduction=reduction: F.cross_entropy(F.linear(x, w), p.target[counted], reduction=reduction),
            *(p.input[counted], p.weight),
        )
        for a, e in zip((loss, d_input[counted], d_weight), expected, strict=True):
            torch.testing.assert_close(a, e)
        assert not d_input[[4, 8]].any()


# --- autograd -------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[..., Tensor]] = {
    "cross_entropy mean": lambda x, w, b, y: linear_cross_entropy(x, w, y, linear_bias=b, label_smoothing=0.1),
    "cross_entropy none": lambda x, w, b, y: linear_cross_entropy(x, w, y, linear_bias=b, reduction="none"),
    "log_probs": lambda x, w, b, y: linear_log_probs(x, w, y, linear_bias=b),
    "logsumexp": lambda x, w, b, y: linear_logsumexp(x, w, linear_bias=b),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@every_call
def test_gradcheck(device: str, call: Callable[..., Tensor]) -> None:
    p = problem(4, 3, 5, torch.float64, device)
    leaves = [t.requires_grad_() for t in (p.input, p.weight, p.bias)]
    assert torch.autograd.gradcheck(lambda x, w, b: call(x, w, b, p.target), leaves)


@every_call
def test_a_second_backward_through_a_retained_graph(device: str, call: Callable[..., Tensor]) -> None:
    p = problem(7, 4, 11, torch.float64, device)
    leaves = [t.requires_grad_() for t in (p.input, p.weight, p.bias)]
    loss = call(*leaves, p.target).square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(2 * loss, leaves, retain_graph=True)
    third = torch.autograd.grad(loss, leaves)
    for a, b, e in zip(first, second, third, strict=True):
        assert float(a.norm()) > 0
        torch.testing.assert_close(b, 2 * a)
        torch.testing.assert_close(e, a)


@every_call
def test_create_graph_is_refused(device: str, call: Callable[..., Tensor]) -> None:
    p = problem(4, 3, 5, device=device)
    input = p.input.requires_grad_()
    with pytest.raises(FxfuseError, match="create_graph=True"):
        torch.autograd.grad(call(input, p.weight, p.bias, p.target).sum(), input, create_graph=True)


@every_call
def test_only_operands_that_require_gradients_get_them(device: str, call: Callable[..., Tensor]) -> None:
    p = problem(4, 3, 5, device=device)
    operands = (p.input, p.weight, p.bias)
    everything = value_and_grads(lambda x, w, b: call(x, w, b, p.target), *operands)[1:]
    for wanted in range(3):
        alone = [t.detach().clone().requires_grad_(i == wanted) for i, t in enumerate(operands)]
        out = call(*alone, p.target)
        (grad,) = value_and_grads(
            lambda t, wanted=wanted: call(*(t if i == wanted else o for i, o in enumerate(operands)), p.target),
            operands[wanted],
        )[1:]
        torch.testing.assert_close(grad, everything[wanted])
        out.sum().backward()
        assert [t.grad is not None for t in alone] == [i == wanted for i in range(3)]
        with torch.no_grad():
            assert not call(*alone, p.target).requires_grad
            torch.testing.assert_close(call(*alone, p.target), out)
        with torch.inference_mode():
            torch.testing.assert_close(call(*alone, p.target), out)


def test_tied_weights_get_both_gradients(device: str) -> None:
    p = problem(6, 4, 11, device=device)

    def loss(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda weight: function(F.embedding(p.target.flip(0), weight), weight, p.target)

    ours, eager = (value_and_grads(loss(f), p.weight) for f in (linear_cross_entropy, eager_cross_entropy))
    for a, e in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, e)


def test_operands_are_not_written_to(device: str) -> None:
    p = problem(5, 4, 11, device=device)
    p.target[0] = -100
    given = (p.input, p.weight, p.bias, p.class_weight, p.target)
    before = [t.clone() for t in given]
    loss = linear_cross_entropy(p.input, p.weight, p.target, linear_bias=p.bias, weight=p.class_weight)
    linear_log_probs(p.input, p.weight, p.target.clamp(min=0))
    linear_logsumexp(p.input, p.weight)
    assert bool(loss.isfinite())
    for now, then in zip(given, before, strict=True):
        assert torch.equal(now, then)


# --- autocast -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32 activations", "16-bit activations"])
@every_call
def test_autocast(device: str, call: Callable[..., Tensor], mixed: bool, dtype: torch.dtype) -> None:
    """float32 parameters: the result has the dtype that eager gives it, every gradient that of its operand."""
    p = problem(33, 16, 41, device=device)
    operands = (p.input.to(dtype) if mixed else p.input, p.weight, p.bias)
    eager_calls = dict(zip(CALLS.values(), EAGER_CALLS, strict=True))

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        with torch.autocast(device, dtype):
            return value_and_grads(lambda x, w, b: function(x, w, b, p.target), *operands)

    eager = run(eager_calls[call])
    exact = value_and_grads(lambda x, w, b: eager_calls[call](x, w, b, p.target), *doubled(*operands))
    assert_no_worse_than_eager(run(call), eager, exact, floor=torch.finfo(dtype).eps)
    # Not by chance: autocast did something.
    assert relative_error(eager[0], exact[0]) > torch.finfo(torch.float32).eps


EAGER_CALLS: list[Callable[..., Tensor]] = [
    lambda x, w, b, y: eager_cross_entropy(x, w, y, linear_bias=b, label_smoothing=0.1),
    lambda x, w, b, y: eager_cross_entropy(x, w, y, linear_bias=b, reduction="none"),
    lambda x, w, b, y: eager_log_probs(x, w, y, linear_bias=b),
    lambda x, w, b, y: eager_logsumexp(x, w, linear_bias=b),
]


def test_class_weights_under_autocast(device: str) -> None:
    p = problem(33, 16, 41, device=device)
    for smoothing in (0.0, 0.1):
        options = {"linear_bias": p.bias, "weight": p.class_weight, "label_smoothing": smoothing}
        with torch.autocast(device, torch.bfloat16):
            actual = linear_cross_entropy(p.input, p.weight, p.target, **options)
            eager = eager_cross_entropy(p.input, p.weight, p.target, **options)
        assert actual.dtype == eager.dtype == torch.float32
        torch.testing.assert_close(actual, eager, rtol=1e-3, atol=1e-3)


def test_class_weights_under_autocast_need_no_logits() -> None:
    """Autocast converts the weights, so that they may be of another dtype than the logits."""
    p = problem(30, 4, 50)
    operands = (t.float() for t in (p.input, p.weight))
    with torch.autocast("cpu", torch.bfloat16), LargestTensor() as seen:
        linear_cross_entropy(*operands, p.target, weight=p.class_weight.float())
    assert seen.elements < 30 * 50


def test_autocast_leaves_float64_alone(device: str) -> None:
    p = problem(9, 4, 13, torch.float64, device)
    for ours, eager in EAGER.items():
        args = (p.input, p.weight, *([] if ours is linear_logsumexp else [p.target]))
        with torch.autocast(device, torch.bfloat16):
            expected = eager(*args)
            actual = ours(*args)
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected)


# --- what eager alone can do, and what it refuses -------------------------------------------------------------


def test_class_probabilities_are_computed_as_in_eager(device: str) -> None:
    p = problem(5, 4, 7, device=device)
    target = torch.rand(5, 7, device=device).softmax(1)
    check(linear_cross_entropy, [p.input, p.weight, p.bias], target, label_smoothing=0.1, weight=p.class_weight)


def test_unusual_arguments_that_eager_takes(device: str) -> None:
    p = problem(5, 4, 7, device=device)
    operands = [p.input, p.weight]
    check(linear_cross_entropy, operands, p.target.to(torch.uint8))
    check(linear_cross_entropy, [*operands, p.bias[:1]], p.target)  # a bias for all classes alike
    check(linear_log_probs, operands, p.target[:, None].expand(5, 100) % 7)
    check(linear_log_probs, operands, p.target[:3, None])  # fewer rows
    check(linear_log_probs, operands, p.target[:, None][:, :0])
    for input in (p.input, torch.stack([p.input] * 2).detach().requires_grad_()):  # one logit a row
        check(linear_logsumexp, [input, p.weight[0].detach().requires_grad_()])
    for smoothing in (-0.1, nan):  # eager asks whether it is above zero
        check(linear_cross_entropy, operands, p.target, label_smoothing=smoothing)


def _meta(t: Tensor) -> Tensor:
    return t.to("meta" if t.device.type == "cpu" else "cpu")


BAD_CROSS_ENTROPY: dict[str, Callable[[Any], dict[str, Any]]] = {
    "too few targets": lambda p: {"target": p.target[:-1]},
    "targets of another shape": lambda p: {"target": p.target[:, None]},
    "scalar target": lambda p: {"target": p.target[0]},
    "int32 targets": lambda p: {"target": p.target.int()},
    "bool targets": lambda p: {"target": p.target.bool()},
    "float targets": lambda p: {"target": p.target.float()},
    "no targets": lambda p: {"target": None},
    "hidden sizes differ": lambda p: {"input": p.input[:, 1:]},
    "hidden sizes differ, one row": lambda p: {"input": p.input[:1, 1:], "target": p.target[:1]},
    "integer hidden states": lambda p: {"input": p.input.long()},
    "hidden states of another dtype": lambda p: {"input": p.input.double()},
    "head of another dtype": lambda p: {"linear_weight": p.weight.bfloat16()},
    "bias of another dtype": lambda p: {"linear_bias": p.bias.double()},
    "bias too long": lambda p: {"linear_bias": torch.cat((p.bias, p.bias))},
    "3-d head": lambda p: {"linear_weight": p.weight[None]},
    "class weights too few": lambda p: {"weight": p.class_weight[1:]},
    "class weights too many": lambda p: {"weight": torch.cat((p.class_weight, p.class_weight))},
    "class weights that require a gradient": lambda p: {"weight": p.class_weight.clone().requires_grad_()},
    "class weights of another dtype": lambda p: {"weight": p.class_weight.double()},
    "class weights of another dtype, smoothed": lambda p: {"weight": p.class_weight.double(), "label_smoothing": 0.1},
    "2-d class weights": lambda p: {"weight": p.class_weight[None]},
    "label smoothing above 1": lambda p: {"label_smoothing": 1.5},
    "label smoothing of text": lambda p: {"label_smoothing": "0.1"},
    "ignore_index of text": lambda p: {"ignore_index": "0"},
    "fractional ignore_index": lambda p: {"ignore_index": 0.5},
    "targets elsewhere": lambda p: {"target": _meta(p.target)},
    "class weights elsewhere": lambda p: {"weight": _meta(p.class_weight)},
}


@pytest.mark.parametrize("change", BAD_CROSS_ENTROPY.values(), ids=BAD_CROSS_ENTROPY)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_bad_input_to_cross_entropy(device: str, change: Callable[[Any], dict[str, Any]], reduction: str) -> None:
    p = problem(4, 3, 5, device=device)
    good = {"input": p.input, "linear_weight": p.weight, "target": p.target, "reduction": reduction}
    linear_cross_entropy(**good)
    bad = {**good, **change(p)}
    assert_raises_like(lambda: eager_cross_entropy(**bad), lambda: linear_cross_entropy(**bad))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_float32_class_weights_beside_16_bit_logits(device: str, smoothing: float, dtype: torch.dtype) -> None:
    """Whatever eager does with them without autocast."""
    p = problem(6, 4, 9, dtype, device)
    options = {"weight": p.class_weight.float(), "label_smoothing": smoothing}
    try:
        expected = eager_cross_entropy(p.input, p.weight, p.target, **options)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            linear_cross_entropy(p.input, p.weight, p.target, **options)
    else:
        actual = linear_cross_entropy(p.input, p.weight, p.target, **options)
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected)


BAD_LOG_PROBS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "float index": lambda p: {"index": p.target.float()},
    "bool index": lambda p: {"index": p.target.bool()},
    "index of too many dimensions": lambda p: {"index": p.target[:, None, None]},
    "index of too few dimensions": lambda p: {"index": p.target[0]},
    "more rows of index": lambda p: {"index": torch.cat((p.target, p.target))[:, None]},
    "hidden sizes differ": lambda p: {"input": p.input[:, 1:]},
    "head of another dtype": lambda p: {"linear_weight": p.weight.double()},
    "bias of another dtype": lambda p: {"linear_bias": p.bias.double()},
    "bias too long": lambda p: {"linear_bias": torch.cat((p.bias, p.bias))},
}


@pytest.mark.parametrize("change", BAD_LOG_PROBS.values(), ids=BAD_LOG_PROBS)
def test_bad_input_to_log_probs(device: str, change: Callable[[Any], dict[str, Any]]) -> None:
    p = problem(4, 3, 5, device=device)
    good = {"input": p.input, "linear_weight": p.weight, "index": p.target}
    linear_log_probs(**good)
    bad = {**good, **change(p)}
    assert_raises_like(lambda: eager_log_probs(**bad), lambda: linear_log_probs(**bad))
    if "index" not in change(p):
        bad.pop("index")
        assert_raises_like(lambda: eager_logsumexp(**bad), lambda: linear_logsumexp(**bad))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs two devices that compute")
@pytest.mark.parametrize("moved", ["input", "linear_weight", "linear_bias"])
def test_operands_on_two_devices(moved: str) -> None:
    p = problem(4, 3, 5, device="cuda")
    good = {"input": p.input, "linear_weight": p.weight, "target": p.target, "linear_bias": p.bias}
    bad = {**good, moved: good[moved].cpu()}
    assert_raises_like(lambda: eager_cross_entropy(**bad), lambda: linear_cross_entropy(**bad))
    for index in (p.target.cpu(), p.target.cpu()[:, None]):
        assert_raises_like(
            lambda index=index: eager_log_probs(p.input, p.weight, index),
            lambda index=index: linear_log_probs(p.input, p.weight, index),
        )


def test_an_unknown_reduction_is_named(device: str) -> None:
    p = problem(4, 3, 5, device=device)
    for reduction in ("foo", "", None, 1):
        error = assert_raises_like(
            lambda reduction=reduction: eager_cross_entropy(p.input, p.weight, p.target, reduction=reduction),
            lambda reduction=reduction: linear_cross_entropy(p.input, p.weight, p.target, reduction=reduction),
        )
        assert isinstance(error, ValueError)
        assert "reduction" in str(error)
        assert str(reduction) in str(error)


# --- classes out of range -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [5, -1, 2**40, -101])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_target_out_of_range(reduction: str, bad: int) -> None:
    p = problem(4, 3, 5)
    target = p.target.index_fill(0, torch.tensor([2]), bad)
    for smoothing, weight in ((0.0, None), (0.1, p.class_weight)):
        options = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}
        error = assert_raises_like(
            lambda options=options: eager_cross_entropy(p.input, p.weight, target, **options),
            lambda options=options: linear_cross_entropy(p.input, p.weight, target, **options),
        )
        assert isinstance(error, IndexError)
        assert str(error) == f"Target {bad} is out of bounds."


@pytest.mark.parametrize("bad", [5, -1, 2**40])
@pytest.mark.parametrize("columns", [None, 1, 3])
def test_an_index_out_of_range(columns: int | None, bad: int) -> None:
    p = problem(4, 3, 5)
    index = p.target.index_fill(0, torch.tensor([2]), bad)
    index = index if columns is None else index[:, None].expand(4, columns)
    error = assert_raises_like(
        lambda: eager_log_probs(p.input, p.weight, index), lambda: linear_log_probs(p.input, p.weight, index)
    )
    assert f"index {bad} is out of bounds" in str(error)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a device assertion needs a device")
@pytest.mark.parametrize("last", [4, 5, -1, 2**40])
@pytest.mark.parametrize("call", ["cross_entropy", "log_probs"])
def test_a_class_out_of_range_is_a_device_assertion(call: str, last: int) -> None:
    """It ends the process that makes it, so it is made in another. Class 4 of 5 is the last that there is."""
    program = textwrap.dedent(f"""
        import torch, fxfuse
        x, w = torch.randn(4, 16, device="cuda", requires_grad=True), torch.randn(5, 16, device="cuda")
        y = torch.tensor([0, 1, 3, {last}], device="cuda")
        fxfuse.linear_{call}(x, w, y).sum().backward()
        torch.cuda.synchronize()
        print("survived", x.grad.shape)
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    if last == 4:
        assert "survived" in done.stdout, done.stderr
        return
    assert done.returncode != 0
    assert "survived" not in done.stdout
    # What the device prints: PyTorch may hear of it from cuBLAS, which has its own word for it.
    assert errors.INDEX_OUT_OF_RANGE in done.stderr
    assert "illegal memory access" not in done.stderr


# --- memory ---------------------------------------------------------------------------------------------------


@every_call
def test_the_logits_are_never_an_operand_nor_a_result(device: str, call: Callable[..., Tensor]) -> None:
    """Neither forward nor backward, which the op does in pieces (test_ops looks inside)."""
    rows, hidden, vocab = 192, 8, 257
    p = problem(rows, hidden, vocab, device=device)
    leaves = [t.requires_grad_() for t in (p.input, p.weight, p.bias)]
    eager_calls = dict(zip(CALLS.values(), EAGER_CALLS, strict=True))
    with LargestTensor() as ours:
        call(*leaves, p.target).sum().backward()
    assert ours.elements == max(rows * hidden, vocab * hidden), ours.op
    with LargestTensor() as control:
        eager_calls[call](*leaves, p.target).sum().backward()
    assert control.elements == rows * vocab, "the spy does not see logits where they are made"


@every_call
def test_nor_are_they_in_a_compiled_program(device: str, call: Callable[..., Tensor]) -> None:
    """The eager compositions, compiled: the rewritten graph and its backward."""
    rows, hidden, vocab = 192, 8, 257
    p = problem(rows, hidden, vocab, device=device)
    leaves = [t.requires_grad_() for t in (p.input, p.weight, p.bias)]
    function = dict(zip(CALLS.values(), EAGER_CALLS, strict=True))[call]
    torch._dynamo.reset()
    for enabled, expected in ((True, max(rows * hidden, vocab * hidden)), (False, rows * vocab)):
        run, spy = spied(function, enabled=enabled)
        loss = run(*leaves, p.target).sum()
        with spy:
            loss.backward()
        assert spy.elements == expected, f"enabled={enabled}: {spy.op}"


def test_everything_public_is_exported() -> None:
    for name in ("linear_cross_entropy", "linear_log_probs", "linear_logsumexp", "FxfuseError"):
        assert name in fxfuse.__all__


@pytest.mark.parametrize("backend", ["eager", "fxfuse"])
def test_inside_a_compiled_function(device: str, backend: str) -> None:
    """The functions themselves trace into one graph."""
    p = problem(12, 8, 33, device=device)
    index = p.target.view(3, 4)

    def step(input: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        x = input.view(3, 4, 8)
        return (
            fxfuse.linear_cross_entropy(x, weight, index, label_smoothing=0.1),
            fxfuse.linear_log_probs(x, weight, index),
            fxfuse.linear_logsumexp(x, weight),
        )

    graphs: list[torch.fx.GraphModule] = []
    torch._dynamo.reset()
    torch.compile(step, backend=lambda gm, _: graphs.append(gm) or gm, fullgraph=True)(p.input, p.weight)
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("fxfuse.linear_" in name for name in called) == 3, "the logits are built"

    torch._dynamo.reset()
    options = {"fxfuse.inner": "eager"} if backend == "fxfuse" else None
    compiled_step = torch.compile(step, backend=backend, fullgraph=True, options=options)
    torch.testing.assert_close(
        value_and_grads(compiled_step, p.input, p.weight), value_and_grads(step, p.input, p.weight)
    )


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_log_probs, linear_logsumexp])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64])
def test_a_bias_that_autocast_does_not_convert(function: Any, dtype: torch.dtype) -> None:
    p = problem(6, 8, 33)
    rest = () if function is linear_logsumexp else (p.target,)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError, match="same dtype"):
            F.linear(p.input, p.weight, p.bias.to(dtype))
        with pytest.raises(RuntimeError, match="same dtype"):
            function(p.input, p.weight, *rest, linear_bias=p.bias.to(dtype))


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_log_probs, linear_logsumexp])
def test_a_bias_of_two_dimensions(function: Any) -> None:
    """Eager adds it where it can be spread over the logits of these hidden states, and raises elsewhere."""
    p = problem(6, 8, 33)
    y, bias = () if function is linear_logsumexp else (p.target,), torch.randn(6, 33, dtype=p.input.dtype)
    zero = torch.zeros(33, dtype=p.input.dtype)
    expected = function(
        (p.input @ p.weight.T + bias).detach(), torch.eye(33, dtype=p.input.dtype), *y, linear_bias=zero
    )
    torch.testing.assert_close(function(p.input, p.weight, *y, linear_bias=bias), expected)
    with pytest.raises(RuntimeError):
        F.linear(p.input.view(2, 3, 8), p.weight, bias)
    with pytest.raises(RuntimeError):
        function(p.input.view(2, 3, 8), p.weight, *(label.view(2, 3) for label in y), linear_bias=bias)


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_log_probs, linear_logsumexp])
def test_tensors_without_data(function: Any) -> None:
    """Autocast knows no meta device, and raises if it is asked."""
    x, w = (torch.empty(n, 8, device="meta", requires_grad=True) for n in (4, 50))
    rest = () if function is linear_logsumexp else (torch.empty(4, dtype=torch.long, device="meta"),)
    out = function(x, w, *rest)
    out.sum().backward()
    assert out.shape == (() if function is linear_cross_entropy else (4,)) and out.is_meta
    assert x.grad is not None and x.grad.shape == x.shape and w.grad is not None and w.grad.shape == w.shape
