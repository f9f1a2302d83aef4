"""Functions of PyTorch's in whose place a program has put its own: these run once, and are what the program sees."""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled, dense_reads, value_and_grads
from programs import VOCAB, DeferredWorld, World
from scripts import python, write
from torch import Tensor

import fxfuse
from fxfuse.originals import is_own, original
from fxfuse.rules import HEADS, IN_PLACE, TABLE

OPTIONS = {"fxfuse.min_logits_bytes": 0, "fxfuse.inner": "eager"}


@contextlib.contextmanager
def replaced(home: Any, name: str, wraps: bool = True) -> Iterator[list[str]]:
    """A function of the program's, which makes three times what PyTorch's does and counts, in its place."""
    theirs, calls = getattr(home, name), []

    def ours(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        result = theirs(*args, **kwargs)
        return result * 3 if isinstance(result, Tensor) else result

    inherited = name not in vars(home)
    setattr(home, name, functools.wraps(theirs)(ours) if wraps else ours)
    try:
        yield calls
    finally:
        delattr(home, name) if inherited else setattr(home, name, theirs)


def _flat(z: Tensor) -> Tensor:
    return z.view(-1, VOCAB)


# Where a function is, its name, what calls it, and how often that computes the values, if that matters.
READERS: dict[str, tuple[Any, str, Callable[[Tensor, Tensor], Any], int | None]] = {
    "cross_entropy": (F, "cross_entropy", lambda z, y: F.cross_entropy(_flat(z), y.flatten()), 0),
    "module": (F, "cross_entropy", lambda z, y: torch.nn.CrossEntropyLoss()(_flat(z), y.flatten()), 0),
    "log_softmax": (F, "log_softmax", lambda z, y: F.log_softmax(z, -1).gather(-1, y[..., None]), 0),
    "softmax": (F, "softmax", lambda z, y: F.softmax(z, -1).square().sum(-1), None),
    "nll_loss": (F, "nll_loss", lambda z, y: F.nll_loss(_flat(z).log_softmax(-1), y.flatten()), 0),
    "logsumexp": (Tensor, "logsumexp", lambda z, y: z.logsumexp(-1), 0),
    "argmax": (Tensor, "argmax", lambda z, y: z.argmax(-1), 0),
    "split": (Tensor, "split", lambda z, y: z.split(2, 1)[0].logsumexp(-1), 0),
    "norm": (Tensor, "norm", lambda z, y: z.norm(dim=-1), 1),
    "sin": (Tensor, "sin", lambda z, y: z.sin(), 1),
    "tolist": (Tensor, "tolist", lambda z, y: z.tolist(), 1),
    "imul": (Tensor, "__imul__", lambda z, y: operator.imul(z.detach(), 2.0), None),
}


@pytest.mark.parametrize("wraps", [True, False], ids=["named", "other_name"])
@pytest.mark.parametrize("case", READERS)
def test_runs_once(device: str, case: str, wraps: bool) -> None:
    """And is fused, as what it calls is."""
    home, name, program, builds = READERS[case]
    answers = []
    for kind in (World, DeferredWorld):
        world = kind.make(device=device)
        with replaced(home, name, wraps) as calls, dense_reads() as reads:
            answer = program(world.z, world.y)
            grads: tuple[Tensor, ...] = ()
            if isinstance(answer, Tensor) and answer.requires_grad:
                grads = torch.autograd.grad(answer.sum(), [world.x, world.w])
        answers.append((answer * 1 if isinstance(answer, Tensor) else answer, grads, calls))
        assert kind is World or builds is None or len(reads) == builds, reads
    assert answers[0][2] == answers[1][2] == [name]
    torch.testing.assert_close(answers[1][:2], answers[0][:2])


def test_hooks_and_gradients(device: str) -> None:
    def program(z: Tensor, y: Tensor) -> list[Any]:
        seen: list[Tensor] = []
        z.register_hook(seen.append)
        F.cross_entropy(z.view(-1, VOCAB), y.flatten()).backward()
        return seen

    with replaced(Tensor, "register_hook"), replaced(torch.autograd, "backward"), replaced(Tensor, "backward"):
        worlds = World.make(device=device), DeferredWorld.make(device=device)
        expected, actual = (program(world.z, world.y) for world in worlds)
    torch.testing.assert_close([t * 1 for t in actual], expected)
    for home, name, ask in (
        (Tensor, "register_hook", lambda z, loss: z.register_hook(print)),
        (torch.autograd, "grad", lambda z, loss: torch.autograd.grad(loss, z)),
    ):
        with replaced(home, name), pytest.raises(fxfuse.FxfuseError, match=name):
            world = DeferredWorld.make(device=device)
            z = world.z
            ask(z, F.cross_entropy(z.view(-1, VOCAB), world.y.flatten()))


def test_reshape_in_the_place_of_view(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As programs have it for devices whose tensors are seldom contiguous."""
    world, plain = DeferredWorld.make(device=device), World.make(device=device)
    monkeypatch.setattr(Tensor, "view", Tensor.reshape)
    torch.testing.assert_close(world.z.view(-1, VOCAB).sin(), plain.z.view(-1, VOCAB).sin())
    loss, expected = (F.cross_entropy(s.z.view(-1, VOCAB), s.y.view(-1)) for s in (world, plain))
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("name", ["clone", "copy_"])
def test_writes_to_logits_where_a_program_wraps_what_fxfuse_calls_for_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait all the same."""
    torch._dynamo.reset()
    own = getattr(Tensor, name)
    monkeypatch.setattr(Tensor, name, lambda self, *args, **kwargs: own(self, *args, **kwargs))
    results = []
    with dense_reads() as reads:
        for project in (compiled(F.linear), F.linear):
            torch.manual_seed(0)
            z = project(torch.randn(5, 8), torch.randn(40, 8, requires_grad=True))
            z.add_(1)
            z.div_(3)
            results.append(z.logsumexp(-1))
    assert reads.deferrals and not reads
    torch.testing.assert_close(*results)


def test_objects_that_were_frozen(device: str) -> None:
    gc.freeze()
    try:
        test_runs_once(device, "norm", wraps=True)
    finally:
        gc.unfreeze()


def test_one_function_for_two_that_are_one() -> None:
    """Of ``torch`` itself nothing asks by its name. What stands for two others raises: ``test_errors.py``."""
    theirs = torch._C.TensorBase.logsumexp
    world, plain = DeferredWorld.make(), World.make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "logsumexp", lambda z, dim: theirs(z, dim) * 3)
        patch.setattr(torch, "logsumexp", Tensor.logsumexp)
        torch.testing.assert_close(world.z.logsumexp(-1), plain.z.logsumexp(-1))


def test_a_method_of_the_programs_own() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "accuracy", lambda z, y: (z.argmax(-1) == y).double().mean(), raising=False)
        world, plain = DeferredWorld.make(), World.make()
        assert world.z.accuracy(world.y) == plain.z.accuracy(plain.y)


class _Proxy:
    """Has every attribute, among them those of functions."""

    def __getattr__(self, name: str) -> Any:
        return F.cross_entropy.__code__ if name == "__code__" else _Proxy()

    def __call__(self, *args: Any) -> Tensor:
        return F.cross_entropy(*args)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x


torch.library.custom_op("originals::doubled", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")


def test_what_is_pytorchs_own() -> None:
    for table in (TABLE, IN_PLACE, HEADS):
        assert all(isinstance(function, str) or is_own(function) for function in table)
    wrapped = functools.wraps(F.cross_entropy)(lambda *args: F.cross_entropy(*args))
    others = [wrapped, functools.partial(F.cross_entropy), torch.no_grad()(wrapped), torch.compiler.disable(wrapped)]
    others += [_Proxy(), _Proxy().__wrapped__, _Square.apply, torch.ops.originals.doubled]
    others[1].__wrapped__ = others[1]
    for function in others:
        assert not is_own(function)
        assert original(function) is function


# --- in graphs ------------------------------------------------------------------------------------------------

IN_GRAPHS: dict[str, tuple[Any, str, Callable[..., Tensor]]] = {
    "loss": (F, "cross_entropy", lambda x, w, y: F.cross_entropy(x @ w.t(), y)),
    "method": (Tensor, "logsumexp", lambda x, w, y: (x @ w.t()).logsumexp(-1).mean()),
    "head": (F, "linear", lambda x, w, y: F.cross_entropy(F.linear(x, w), y)),
    "operator": (Tensor, "__matmul__", lambda x, w, y: F.cross_entropy(x @ w.t(), y)),
    "reflected": (Tensor, "__rmul__", lambda x, w, y: F.cross_entropy(2 * F.linear(x, w), y)),
    "cap": (F, "tanh", lambda x, w, y: F.cross_entropy(F.tanh(x @ w.t()), y)),
}


@pytest.mark.parametrize("case", IN_GRAPHS)
def test_as_uncompiled_in_graphs(device: str, case: str) -> None:
    """A graph may call it, or PyTorch's method by its name, which is the program's then."""
    home, name, program = IN_GRAPHS[case]
    world = World.make(device=device)
    x, w, y = world.x.detach().flatten(0, 1), world.w.detach(), world.y.flatten()
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="fxfuse", options=OPTIONS)
    with replaced(home, name):
        actual, expected = (value_and_grads(lambda x, w, f=f: f(x, w, y), x, w) for f in (compiled, program))
    torch.testing.assert_close(actual, expected)


EARLY = """
import functools, sys, torch, torch.nn.functional as F

def three_times(home, name):
    theirs = getattr(home, name)
    @functools.wraps(theirs)
    def ours(*args, **kwargs):
        return theirs(*args, **kwargs) * 3
    setattr(home, name, ours)

three_times(F, "cross_entropy")
three_times(torch.Tensor, "logsumexp")
three_times(F, "scaled_dot_product_attention")
assert "fxfuse" not in sys.modules

OPTIONS = {"fxfuse.min_logits_bytes": 0, "fxfuse.inner": "eager"}
torch.manual_seed(0)
w, x, y = torch.randn(32, 8, requires_grad=True), torch.randn(6, 8), torch.arange(6)

def project(x):
    return F.linear(x, w)

def read(z):
    return F.cross_entropy(z, y) + z.logsumexp(-1).mean()

def attend(x):
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).sum() + F.cross_entropy(x @ w.t(), y)

for program in (lambda x: read(project(x)), attend):
    torch.testing.assert_close(torch.compile(program, backend="fxfuse", options=OPTIONS)(x), program(x))
z = torch.compile(project, backend="fxfuse", options=OPTIONS)(x)
torch.testing.assert_close(read(z), read(project(x)))
import fxfuse
assert type(z).__name__ == "DeferredLogits" and not fxfuse.reads(), fxfuse.reads()
torch.testing.assert_close(fxfuse.linear_cross_entropy(x, w, y) * 3, F.cross_entropy(project(x), y))
"""


def test_replaced_before_fxfuse_is_imported(tmp_path: Path) -> None:
    write(tmp_path, EARLY, preamble="")
    run = python(tmp_path, "train.py")
    assert run.returncode == 0, run.stderr
