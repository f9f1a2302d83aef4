"""PyTorch's own samples of the operators that fxfuse knows, each with a linear put in front.

Of every sample of ``op_db`` whose input has a class axis, the input is replaced by logits of the same shape, with the
vocabulary at the axis that the sample works along and, where that is another one, at the last. 0-d inputs have none.
Compiled must equal eager in values and gradients, or raise where eager raises, and the head must be fused, or kept
for a reason that is on the list.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled, new_sites
from torch import Tensor

from fxfuse import FxfuseWarning
from fxfuse.reasons import KINDS

HIDDEN = 6


@dataclass
class Program:
    """A function of hidden states, a weight and a bias, and of nothing else that requires a gradient."""

    name: str
    function: Callable[[Tensor, Tensor, Tensor], Tensor]
    operands: tuple[Tensor, Tensor, Tensor]


def _class_axis(name: str, sample: Any) -> int | None:
    """The axis that a sample of the operator ``name`` works along, counted from the front; None for several."""
    dims = sample.input.dim()
    if name in ("nn.functional.cross_entropy", "nn.functional.nll_loss"):
        return 0 if dims == 1 else 1
    given = sample.kwargs.get("dim", sample.args[0] if sample.args else None)
    if isinstance(given, (tuple, list)):
        given = given[0] if len(given) == 1 else None
    return None if given is None else given % dims


def _variants(op: Any, sample: Any, axis: int | None) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """What to do with the logits: the sample's operator alone, and with its usual company."""

    def alone(logits: Tensor) -> Tensor:
        return op(logits, *sample.args, **sample.kwargs)

    # Eager's nll_loss has no backward for 4-d input that is not contiguous.
    yield op.name, (lambda z: alone(z.contiguous())) if op.name == "nn.functional.nll_loss" else alone
    if op.name == "nn.functional.nll_loss" or (op.name == "gather" and axis is not None):
        yield f"log_softmax, {op.name}", lambda logits: alone(logits.log_softmax(axis))
    if op.name == "log_softmax":
        shape = list(sample.input.shape)
        if shape[axis] == 0:  # no class to pick
            return
        generator = torch.Generator().manual_seed(sum(shape))
        index = torch.randint(shape[axis], (*shape[:axis], 2, *shape[axis + 1 :]), generator=generator)
        index = index.to(sample.input.device)
        yield f"{op.name}, gather", lambda logits: alone(logits).gather(axis, index)


def programs(op: Any, sample: Any) -> Iterator[Program]:
    """The programs of one sample; each has operands of its own."""
    shape, device, dtype = sample.input.shape, sample.input.device, sample.input.dtype
    if len(shape) == 0:
        return
    axis, last = _class_axis(op.name, sample), len(shape) - 1
    for place in dict.fromkeys((last if axis is None else axis, last)):
        for name, read in _variants(op, sample, axis):
            generator = torch.Generator().manual_seed(len(name) + sum(shape))

            def normal(*size: int, generator: torch.Generator = generator) -> Tensor:
                return torch.randn(*size, generator=generator).to(device, dtype)

            rows = [size for i, size in enumerate(shape) if i != place]
            operands = (normal(*rows, HIDDEN), normal(shape[place], HIDDEN), normal(shape[place]))

            def function(
                x: Tensor, weight: Tensor, bias: Tensor, place: int = place, read: Callable[[Tensor], Tensor] = read
            ) -> Tensor:
                logits = F.linear(x, weight, bias)
                return read(logits if place == logits.dim() - 1 else logits.movedim(-1, place))

            described = (
                f"{name} of {tuple(shape)}, vocabulary at {place}, {_brief(sample.args)} {_brief(sample.kwargs)}"
            )
            yield Program(described, function, operands)


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}={_brief(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_brief, value)) + ")"
    return str(value)


def outcome(function: Callable[..., Tensor], operands: tuple[Tensor, ...]) -> list[Tensor] | Exception:
    """What ``function`` returns and the gradients of its operands, or what it raises."""
    leaves = [t.detach().clone().requires_grad_() for t in operands]
    try:
        out = function(*leaves)
        generator = torch.Generator().manual_seed(1)
        g = torch.randn(out.shape, generator=generator).to(out.device, out.dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, g)]
    except FxfuseWarning:
        raise
    except Exception as error:
        return error


def check(program: Program) -> tuple[list[str], list[str]]:
    """Run a program in eager mode and compiled: what is wrong, and the status or reason of each head."""
    torch._dynamo.reset()
    with warnings.catch_warnings(), new_sites() as sites:
        warnings.simplefilter("error", FxfuseWarning)
        eager = outcome(program.function, program.operands)
        actual = outcome(compiled(program.function), program.operands)
    wrong = []
    if isinstance(eager, Exception) or isinstance(actual, Exception):
        if not (isinstance(eager, Exception) and isinstance(actual, Exception)):
            wrong.append(f"eager gives {eager!r:.300}, compiled {actual!r:.300}")
        return [f"{program.name}: {w}" for w in wrong], ["raised"]
    for what, a, e in zip(("value", "input.grad", "weight.grad", "bias.grad"), actual, eager, strict=True):
        try:
            torch.testing.assert_close(a, e, rtol=1e-5, atol=2e-6, equal_nan=True)
        except AssertionError as error:
            wrong.append(f"{what}: {error}")
    _, weight, _ = program.operands
    if len(sites) != (weight.shape[0] != 1):  # a number for each row is no head
        wrong.append(f"{len(sites)} heads are recorded")
    for site in sites:
        if site.status == "kept":
            if site.reason is None or site.reason.code not in KINDS or site.reason.code == "internal_error":
                wrong.append(f"kept for {site.reason}")
        elif site.status != "fused" or site.reason is not None:
            wrong.append(f"{site}")
    return [f"{program.name}: {w}" for w in wrong], [s.reason.code if s.reason else s.status for s in sites]


# The operator, how many programs its samples make at least, and how many of them are fused at least.
SAMPLES = {
    "nn.functional.cross_entropy": (24, 11),
    "nn.functional.nll_loss": (150, 55),
    "log_softmax": (12, 5),
    "log_softmax with_dtype": (12, 0),  # to float64, which is kept for its precision
    "logsumexp": (14, 8),
    "gather": (6, 4),
}


MANY = pytest.param("nn.functional.nll_loss", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [MANY if name == MANY.values[0] else name for name in SAMPLES])
def test_samples(device: str, name: str) -> None:
    op = _op(name)
    at_least, fused_at_least = SAMPLES[name]
    wrong: list[str] = []
    seen: list[str] = []
    for sample in op.sample_inputs(device, torch.float32, requires_grad=False):
        for program in programs(op, sample):
            failures, outcomes = check(program)
            wrong += failures
            seen += outcomes
    assert not wrong, "\n\n".join([f"{len(wrong)} failures", *wrong])
    counts = {outcome: seen.count(outcome) for outcome in sorted(set(seen))}
    assert "raised" not in counts, "a sample that eager refuses shows nothing"
    assert len(seen) >= at_least, counts
    assert seen.count("fused") >= fused_at_least, counts


def test_bad_samples_of_gather(device: str) -> None:
    """PyTorch's own examples of wrong arguments, an index out of range among them."""
    op, raised = _op("gather"), 0
    for bad in op.error_inputs(device):
        sample = bad.sample_input
        if "out" in sample.kwargs or not sample.input.is_floating_point():
            continue
        for program in programs(op, sample):
            wrong, outcomes = check(program)
            assert not wrong, wrong
            assert outcomes == ["raised"], program.name
            raised += 1
    assert raised >= 6


def _op(name: str) -> Any:
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds to import

    (op,) = (op for op in op_db if f"{op.name} {op.variant_test_name}".strip() == name)
    return op
