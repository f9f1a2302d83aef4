"""Programs that ``generator`` makes: the same to their caller, under both drivers, as in eager.

``make fuzz`` runs many (``FUZZ_EXAMPLES``), each time other ones. With another checkout first in ``PYTHONPATH``, and
from another directory, ``python -m pytest <this file>`` judges that one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from generator import Program, generate
from helpers import dense_reads
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from programs import DeferredWorld, World
from torch import Tensor
from tqdm import tqdm

import fxfuse
from fxfuse.deferred import DeferredLogits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUZZ_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}
SETTINGS = (
    settings(max_examples=FUZZ_EXAMPLES, print_blob=True, **COMMON)
    if FUZZ_EXAMPLES
    else settings(max_examples=250, derandomize=True, phases=(Phase.generate, Phase.shrink), **COMMON)
)
# Of float64; of a program that converts to a lower precision, whose rounding differs.
TOLERANCE, ROUNDED = {"rtol": 1e-7, "atol": 1e-7}, {"rtol": 2e-3, "atol": 2e-3}
ENOUGH = 0.2  # of the programs must have a head that is fused or deferred


@st.composite
def programs(draw: st.DrawFn) -> Program:
    return generate(lambda options: draw(st.sampled_from(options)))


class Rejected(Exception):
    """Eager does not run this program, or PyTorch's own tracer changes what it does."""


@dataclass
class Seen:
    """Everything that the caller of a program can see after it."""

    values: list[Tensor]
    facts: list[tuple[Any, ...]]  # of each value
    gradients: list[Tensor | None]
    operands: list[Tensor]
    shared: list[tuple[int, int]]  # which values and operands lie in one memory


def see(program: Callable[[World], Any], world: World) -> Seen:
    returned = program(world)
    outs = list(returned) if isinstance(returned, tuple) else [returned]
    facts = [(tuple(o.shape), o.dtype, o.requires_grad, o.is_leaf, _strides(o)) for o in outs]
    everything = [*outs, *vars(world).values()]
    shared = [
        (i, j)
        for i, a in enumerate(everything)
        for j, b in enumerate(everything[:i])
        # Deferred logits have memory only when they are asked for it.
        if not isinstance(a, DeferredLogits)
        and not isinstance(b, DeferredLogits)
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    ]
    gradients: list[Tensor | None] = []
    differentiable = [o for o in outs if o.requires_grad and o.grad_fn is not None]
    if differentiable:
        # Distinct upstream gradients, so that a swapped or dropped one shows.
        upstream = [
            torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype, device=o.device).view(o.shape) + i
            for i, o in enumerate(differentiable)
        ]
        gradients = list(torch.autograd.grad(differentiable, world.leaves(), upstream, allow_unused=True))
    # Not before: what is deferred should be so in the backward.
    values = [_plain((o * 1).detach()) for o in outs]
    operands = [t.detach().clone() for t in vars(world).values()]
    return Seen(values, facts, gradients, operands, shared)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.plain() if isinstance(tensor, DeferredLogits) else tensor


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides that mean something."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


def _where_defined(actual: Tensor | None, expected: Tensor | None) -> tuple[Any, Any]:
    """Without what is NaN in eager: fxfuse computes nothing of a row that does not matter, and has a number there.

    Nor what is infinite in eager and NaN here: gradients that eager adds up before it multiplies them by infinity.
    """
    if actual is None or expected is None or actual.shape != expected.shape or not expected.is_floating_point():
        return actual, expected
    undefined = expected.isnan() | (expected.isinf() & actual.isnan())
    return actual.masked_fill(undefined, 0.0), expected.masked_fill(undefined, 0.0)


def assert_same(actual: Seen, expected: Seen, tolerance: dict[str, float], all_plain: bool) -> None:
    assert actual.facts == expected.facts, f"{actual.facts}, in eager {expected.facts}"
    # Zero times a NaN from above: eager skips ignored rows, gradients that are made in the forward are multiplied.
    undefined = any(bool(v.isnan().any()) for v in expected.values)
    for what in ("values", "operands", *([] if undefined else ["gradients"])):
        pairs = zip(getattr(actual, what), getattr(expected, what), strict=True)
        for i, (mine, eager) in enumerate(_where_defined(a, e) for a, e in pairs):
            torch.testing.assert_close(mine, eager, **tolerance, msg=lambda m, at=f"{what}[{i}]": f"{at}: {m}")
    if all_plain:
        assert actual.shared == expected.shared, "other tensors share memory"


def compile_with(backend: str, program: Program, dynamic: bool, **options: Any) -> Callable[[World], Any]:
    torch._dynamo.reset()
    given = {f"fxfuse.{name}": value for name, value in options.items()} or None
    return torch.compile(program.function(), backend=backend, options=given, dynamic=dynamic)


@dataclass
class Tally:
    """What became of the programs, so that it shows when they prove nothing."""

    programs: int = 0
    invalid: Counter[str] = field(default_factory=Counter)  # that eager refuses
    rejected: Counter[str] = field(default_factory=Counter)  # that fxfuse refuses, or torch.compile without it
    rewritten: int = 0  # programs with a head that is fused or deferred
    heads: Counter[str] = field(default_factory=Counter)
    at_run_time: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        def listed(counts: Counter[str]) -> str:
            return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "none"

        return (
            f"fxfuse of {os.path.dirname(fxfuse.__file__)}\n"
            f"{self.programs} programs, {self.rewritten} with a head that is fused or deferred\n"
            f"heads: {listed(self.heads)}\n"
            f"deferred logits: {listed(self.at_run_time)}\n"
            f"eager refuses: {listed(self.invalid)}\n"
            f"rejected: {listed(self.rejected)}"
        )


def check(program: Program, dynamic: bool, memory: int, tally: Tally) -> None:
    """Raise if fxfuse does to ``program`` what its caller can see."""
    try:
        expected = see(program.function(), World.make(device=DEVICE))
    except Exception as error:
        tally.invalid[f"{type(error).__name__}: {str(error)[:60]}"] += 1
        raise Rejected from error
    text = repr(program)
    rounds = any(word in text for word in ("float()", "float32", "autocast"))
    tolerance = ROUNDED if rounds else TOLERANCE

    def compare(run: Callable[[World], Any], world: World) -> None:
        actual = see(run, world)
        assert_same(
            actual, expected, tolerance, all_plain="deferred" not in {s.status for s in fxfuse.sites()[before:]}
        )

    before = len(fxfuse.sites())
    try:
        compare(
            compile_with("fxfuse", program, dynamic, inner="eager", min_logits_bytes=0, memory=memory),
            World.make(device=DEVICE),
        )
    except fxfuse.FxfuseError as error:
        tally.rejected[type(error).__name__] += 1  # it says what it cannot do rather than be wrong
    except Exception:
        with _ours_alone(tally):
            compare(compile_with("eager", program, dynamic), World.make(device=DEVICE))
        raise
    finally:
        sites = fxfuse.sites()[before:]
        torch._dynamo.reset()
    assert not any(site.reason and site.reason.code == "internal_error" for site in sites), sites
    tally.programs += 1
    tally.rewritten += any(site.status != "kept" for site in sites)
    tally.heads.update(f"kept ({site.reason.code})" if site.reason else site.status for site in sites)
    if "s.z" in text:
        with dense_reads() as reads:
            try:
                actual = see(program.function(), DeferredWorld.make(device=DEVICE))
            except fxfuse.FxfuseError as error:
                tally.at_run_time[type(error).__name__] += 1
                return
        tally.at_run_time["built" if reads else "not built"] += 1
        assert_same(actual, expected, tolerance, all_plain=False)


@contextlib.contextmanager
def _ours_alone(tally: Tally) -> Iterator[None]:
    """Reject the program if its body, which compares it without fxfuse, fails too."""
    try:
        yield
    except Exception as error:
        tally.rejected[f"torch.compile {type(error).__name__}"] += 1
        raise Rejected from error


@pytest.mark.slow
def test_generated_programs() -> None:
    tally = Tally()
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # graph breaks are meant
    bar = tqdm(total=SETTINGS.max_examples, unit=" programs", disable=not FUZZ_EXAMPLES)

    @SETTINGS
    @given(program=programs(), dynamic=st.booleans(), memory=st.sampled_from((0, 0, 1)))
    def run(program: Program, dynamic: bool, memory: int) -> None:
        bar.update()
        note(repr(program))
        with warnings.catch_warnings(), contextlib.suppress(Rejected):
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", fxfuse.FxfuseWarning)
            check(program, dynamic, memory, tally)

    try:
        run()
    finally:
        bar.close()
        print(tally)
    assert tally.rewritten >= ENOUGH * tally.programs, str(tally)
    assert sum(tally.invalid.values()) <= 2 + 0.25 * tally.programs, str(tally)
    assert sum(tally.rejected.values()) <= 2 + 0.05 * tally.programs, str(tally)
