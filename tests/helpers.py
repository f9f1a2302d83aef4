"""What several test files need: problems to solve, eager answers, and the ways in which two answers are compared."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import fxfuse
from fxfuse.deferred import DeferredLogits
from fxfuse.ops import chunked
from fxfuse.report.records import journal

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
DTYPE_IDS = ["fp32", "fp16", "bf16", "fp64"]

# What a relative L2 error may always be: one rounding of a 16-bit result, eight of a float32 one. Eager in float64 is
# its own judge, so there the floor is all that is allowed: what a sum over a vocabulary may lose.
FLOORS = {
    torch.float64: 1e-13,
    torch.float32: 1e-6,
    torch.float16: torch.finfo(torch.float16).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
}

# rows, hidden, vocab
SHAPES = [(1, 8, 5), (7, 3, 33), (64, 48, 101), (33, 16, 1), (0, 4, 9), (1, 8, 50257), (12, 16, 50257)]
# The same, the largest of them left out of the quick check.
SOME_SLOW = [pytest.param(s, marks=pytest.mark.slow) if s[0] * s[2] > 100_000 else s for s in SHAPES]


def floor(shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    """The floor for one of ``SHAPES``: higher in float32 for one class."""
    if dtype == torch.float32 and shape[2] == 1:
        return 4e-6  # every gradient is zero, so that the error is absolute
    return FLOORS[dtype]


# --- problems -------------------------------------------------------------------------------------------------


@dataclass
class Problem:
    """Hidden states ``[N, D]``, a head ``[V, D]`` with bias ``[V]``, class weights ``[V]`` and targets ``[N]``."""

    input: Tensor
    weight: Tensor
    bias: Tensor
    class_weight: Tensor
    target: Tensor


def problem(rows: int, hidden: int, vocab: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Problem:
    """Random operands, the same on every device: logits of unit scale, positive class weights."""
    generator = torch.Generator().manual_seed(rows + 31 * hidden + 1009 * vocab)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return Problem(
        normal(rows, hidden),
        normal(vocab, hidden) / math.sqrt(hidden),
        normal(vocab),
        (torch.rand(vocab, generator=generator) + 0.25).to(device, dtype),
        torch.randint(vocab, (rows,), generator=generator).to(device),
    )


def upstream(like: Tensor) -> Tensor:
    """A gradient for ``like``: the same numbers in every dtype, and never 1."""
    generator = torch.Generator().manual_seed(like.numel())
    return (torch.randn(like.shape, generator=generator) + 1.5).bfloat16().to(like.device, like.dtype)


def value_and_grads(f: Callable[..., Tensor | Sequence[Tensor]], *leaves: Tensor) -> list[Tensor]:
    """What ``f(*leaves)`` returns, then the gradient of each leaf (layouts are kept)."""
    leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    out = f(*leaves)
    outs = [out] if isinstance(out, Tensor) else list(out)
    return [*(o.detach() for o in outs), *torch.autograd.grad(outs, leaves, [upstream(o) for o in outs])]


def doubled(*tensors: Any) -> tuple[Any, ...]:
    """Floating-point tensors in float64, everything else as it is."""
    return tuple(t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors)


# --- comparisons ----------------------------------------------------------------------------------------------


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """The L2 norm of the error, relative to that of ``exact`` (absolute where that is zero)."""
    norm = float(exact.norm())
    return float((actual.double() - exact).norm()) / (norm or 1.0)


def assert_no_worse_than_eager(
    actual: Sequence[Tensor],
    eager: Sequence[Tensor],
    exact: Sequence[Tensor],
    floor: float | None = None,
    times: float = 1.5,
) -> None:
    """Each of ``actual`` errs at most ``times`` as much as eager in the same dtype, or ``floor`` (``FLOORS``).

    ``exact`` is eager in float64 on the same numbers. Entries that are not finite must be the same ones, and the
    same infinities, as in ``exact``; dtypes and shapes as in ``eager``.
    """
    assert len(actual) == len(eager) == len(exact)
    for i, (a, e, x) in enumerate(zip(actual, eager, exact, strict=True)):
        assert x.dtype == torch.float64, "the third argument is eager in float64"
        assert (a.dtype, a.shape, a.device) == (e.dtype, e.shape, e.device), f"tensor {i}: {a.dtype} {a.shape}"
        finite = x.isfinite()
        torch.testing.assert_close(
            a[~finite].double(), x[~finite], equal_nan=True, msg=lambda m, i=i: f"tensor {i}, where not finite: {m}"
        )
        assert bool(a[finite].isfinite().all()), f"tensor {i} is not finite where eager in float64 is"
        ours, theirs = relative_error(a[finite], x[finite]), relative_error(e[finite], x[finite])
        allowed = max(times * theirs if math.isfinite(theirs) else 0.0, FLOORS[a.dtype] if floor is None else floor)
        assert ours <= allowed, f"tensor {i}: relative error {ours:.3g}, eager's {theirs:.3g}, allowed {allowed:.3g}"


def assert_raises_like(eager: Callable[[], Any], ours: Callable[[], Any]) -> Exception:
    """``ours`` raises an exception of the class that ``eager`` raises; returns it."""
    errors = []
    for f in (eager, ours):
        try:
            result = f()
        except Exception as error:
            errors.append(error)
        else:
            name = "eager" if f is eager else "fxfuse"
            raise AssertionError(f"{name} returned {result!r} instead of raising {errors[:1]}")
    theirs, raised = errors
    assert type(raised) is type(theirs), f"eager raises {theirs!r}, fxfuse {raised!r}"
    return raised


# --- what is allocated ----------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of any tensor that an operation returns inside ``with``.

    An fxfuse op is one operation here. To see inside it, call the functions of ``fxfuse.ops.chunked`` directly.
    Dynamo steps aside while such a mode is active: for what is compiled, see ``spied``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.op = ""  # the operation that returned it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, DeferredLogits):
                continue  # has no memory
            if isinstance(tensor, Tensor) and tensor.numel() > self.elements:
                self.elements, self.op = tensor.numel(), str(func)
        return out


# --- the backend ----------------------------------------------------------------------------------------------


def compiled(f: Callable[..., Any], *, dynamic: bool = False, **options: Any) -> Callable[..., Any]:
    """``f`` compiled by fxfuse: any size is fused, and the rewritten graph runs in eager mode unless told else."""
    given = {"inner": "eager", "min_logits_bytes": 0, **options}
    return torch.compile(
        f, backend="fxfuse", options={f"fxfuse.{name}": value for name, value in given.items()}, dynamic=dynamic
    )


_spies = itertools.count()


def spied(f: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], LargestTensor]:
    """``f`` compiled by fxfuse, and a spy on every operation of the rewritten graph.

    The backward runs outside of the graph: call it inside ``with spy``.
    """
    spy, name = LargestTensor(), f"spied_{next(_spies)}"

    def watch(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with spy:
                return gm(*args)

        return run

    torch._dynamo.register_backend(watch, name=name)
    return compiled(f, inner=name, **options), spy


@contextlib.contextmanager
def new_sites() -> Iterator[list[fxfuse.Site]]:
    """A list that holds, after ``with``, the sites that were recorded inside."""
    before, sites = len(fxfuse.sites()), []
    yield sites
    sites += fxfuse.sites()[before:]


class Reads(list[str]):
    """Where deferred logits were built, each build an entry; and how often logits were deferred."""

    deferrals = 0


@contextlib.contextmanager
def dense_reads() -> Iterator[Reads]:
    """What deferred logits were built inside ``with``, after it.

    That nothing was built is to be said together with ``deferrals``: where nothing is deferred nothing is built either.
    """

    def count() -> Counter[str]:
        counts: Counter[str] = Counter()
        for read in journal.report().reads:  # one place may have read several heads
            if read.kind == "read":
                counts[read.where] += read.count
        return counts

    before, reads = count(), Reads()

    def counted(*args: Any) -> None:
        reads.deferrals += 1
        describe(*args)

    making = importlib.import_module("fxfuse.defer")
    describe = making.describe
    with mock.patch.object(making, "describe", counted):
        yield reads
    reads += (count() - before).elements()


@contextlib.contextmanager
def products_of_rows(vocab: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A list that holds, after ``with``, of how many rows products made so many classes inside, if of several.

    The ops on a CPU compute one row at a time meanwhile. Neither a dispatch mode, which steps aside inside a tensor
    subclass, nor the journal, which is fxfuse's own, needs to be believed: it is PyTorch's profiler that counts.
    """
    for name, size in (("CHUNK_BYTES", 1), ("CHUNK_ROWS", 0), ("LEAST_CHUNK_ROWS", 1)):
        monkeypatch.setattr(chunked, name, size)
    found: list[int] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        yield found
    for event in profile.events():
        if event.name in ("aten::mm", "aten::addmm", "aten::bmm"):
            first = int(event.name == "aten::addmm")  # comes after what is added
            (*_, rows, summed), (*_, made) = event.input_shapes[first : first + 2]
            if made == vocab and rows > 1 and summed > 1:  # of one row, for the weight's gradient, nothing is summed
                found.append(rows)


# --- the same values, laid out otherwise ------------------------------------------------------------------------


def _garbage(like: Tensor, *shape: int) -> Tensor:
    return like.new_full(shape, math.nan if like.is_floating_point() else 10**6)


def strided(t: Tensor) -> Tensor:
    wide = _garbage(t, t.shape[0], 2 * t.shape[1] + 1)
    wide[:, 1::2] = t
    return wide[:, 1::2]


def transposed(t: Tensor) -> Tensor:
    return t.t().contiguous().t()


def every_other_row(t: Tensor) -> Tensor:
    tall = _garbage(t, 2 * t.shape[0], t.shape[1])
    tall[::2] = t
    return tall[::2]
