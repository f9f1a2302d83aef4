"""``fxfuse.kernels.recorder``: what is played does to other tensors what the op would. With kernels: test_kernels."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fxfuse.compat import TorchDispatchMode
from fxfuse.kernels import launcher, recorder, tape


@pytest.fixture(autouse=True)
def no_tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(recorder, "_tapes", {})
    yield


class Pair(NamedTuple):
    sum: Tensor
    least: Tensor | None


class Steps:
    """An op that is taped, and how often it ran in steps."""

    def __init__(self) -> None:
        self.count = 0
        self.op = recorder.replayed(self.run)

    def run(self, x: Tensor, pair: tuple[Tensor, Tensor | None], number: float) -> tuple[Tensor, Pair, None]:
        self.count += 1
        a, b = pair
        out = torch.empty_like(x)
        out.copy_(x * number)
        rows = torch.zeros(x.shape[0], dtype=x.dtype) - torch.full((x.shape[0],), 3, dtype=x.dtype)
        rows[1:] += a.view(-1)[: x.shape[0] - 1]
        largest, _ = x.t().max(0)
        values = out.unbind(1)[0]
        return values + rows, Pair(rows * largest, None if b is None else torch.minimum(a, b)), None

    def check(self, *args: Any, count: int) -> None:
        got = self.op(*args)
        assert self.count == count
        want = self.run(*args)
        self.count -= 1
        assert type(got[1]) is Pair and got[2] is None
        for actual, expected in zip((got[0], *got[1]), (want[0], *want[1]), strict=True):
            assert (actual is None) == (expected is None)
            if actual is not None:
                assert torch.equal(actual, expected)


def operands(rows: int = 4) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    return torch.randn(rows, 3), (torch.randn(rows, 2), torch.randn(rows, 2))


def test_the_third_call_is_played_with_its_own_tensors() -> None:
    steps = Steps()
    for count in (1, 2, 2, 2):
        steps.check(*operands(), 2.5, count=count)


@pytest.mark.parametrize("change", ["rows", "strides", "dtype", "alignment", "number", "none", "the same tensor twice"])
def test_what_looks_different_is_done_in_steps(change: str) -> None:
    steps = Steps()
    for count in (1, 2, 2):
        steps.check(*operands(), 2.5, count=count)
    x, (a, b) = operands()
    number = 2.5
    if change == "rows":
        x, (a, b) = operands(5)
    elif change == "strides":
        x = torch.randn(3, 4).t()
    elif change == "dtype":
        x = x.double()
    elif change == "alignment":
        x = torch.randn(13)[1:].view(4, 3)
    elif change == "number":
        number = 0.5
    elif change == "none":
        b = None
    else:
        b = a
    steps.check(x, (a, b), number, count=3)


def test_a_tensor_that_is_given_twice() -> None:
    steps = Steps()
    for count in (1, 2, 2, 2):
        x, (a, _) = operands()
        steps.check(x, (a, a), 2.5, count=count)
    steps.check(*operands(), 2.5, count=3)


ELSEWHERE = torch.ones(4)


@pytest.mark.parametrize(
    "untaped",
    [
        lambda x: x * float(x.sum()),
        lambda x: x[x > 0],
        lambda x: x + ELSEWHERE,
        lambda x: torch.cat([x, x]),
        lambda x: [x * 2, x + 1],
        lambda x: (x, 3 if bool((x > 0).any()) else 4),
    ],
    ids=["number", "size", "foreign", "list", "returned list", "condition"],
)
def test_what_a_tape_cannot_hold(untaped: Any) -> None:
    op = recorder.replayed(lambda x: untaped(x))
    for _ in range(6):
        x = torch.randn(4)
        got, want = op(x), untaped(x)
        assert len(got) == len(want)
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(got, want, strict=True))
    assert list(recorder._tapes.values()) == [6]  # calls that were counted, and no tape


def test_options_count_by_their_names() -> None:
    def op(x: Tensor, *, plus: float = 0.0, times: float = 1.0, by: Tensor | None = None) -> Tensor:
        return (x + plus) * times - (0.0 if by is None else by)

    played = recorder.replayed(op)
    for options in ({"plus": 2.0}, {"times": 2.0}, {"plus": 2.0, "times": 3.0}, {"times": 2.0, "plus": 3.0}):
        for _ in range(4):
            x, by = torch.randn(4), torch.randn(4)
            assert torch.equal(played(x, **options), op(x, **options))
            assert torch.equal(played(x, by=by, **options), op(x, by=by, **options))
    assert [type(made) for made in recorder._tapes.values()] == [tape.Tape] * 8


def test_what_does_not_suit_is_on_no_tape() -> None:
    asked: list[int] = []

    def suits(x: Tensor, number: float = 0.0) -> bool:
        asked.append(len(x))
        return len(x) > 3

    played = recorder.replayed(lambda x, number=1.0: x * number, suits)
    for rows in (3, 4):
        for _ in range(5):
            x = torch.randn(rows)
            assert torch.equal(played(x, number=2.0), x * 2.0)
    assert asked == [3] * 5 + [4]  # and not of what has been on the way to a tape
    assert [type(made) for made in recorder._tapes.values()] == [tape.Tape]  # what does not suit takes no place


def test_more_steps_than_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_STEPS", 3)
    steps = Steps()
    for count in range(1, 5):
        steps.check(*operands(), 2.5, count=count)
    assert list(recorder._tapes.values()) == [recorder.ATTEMPTS + 3]  # one attempt, and two calls after it


def test_what_will_be_on_no_tape_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_STEPS", 3)
    alive: list[int] = []

    def op(x: Tensor) -> Tensor:
        seen = []
        for _ in range(8):
            seen.append(weakref.ref(x * 2))
        alive.append(sum(ref() is not None for ref in seen))
        return x + 1

    played = recorder.replayed(op)
    for _ in range(3):
        played(torch.randn(5))
    assert alive == [0, 0, 0]


def test_memory_is_laid_out_as_it_was() -> None:
    def op(x: Tensor) -> tuple[Tensor, ...]:
        made = torch.empty_like(x), torch.zeros_like(x), x.new_zeros((0, 3)), torch.zeros(2, 3, dtype=torch.int32)
        made[0].copy_(x)
        return *made, torch.empty((0, 2), dtype=torch.float64), torch.full((2, 3), -1, dtype=torch.int32)

    played = recorder.replayed(op)
    for x in (torch.randn(3, 4).t(), torch.randn(3, 4)[:, ::2], torch.randn(4, 3)):
        for _ in range(4):
            for actual, expected in zip(played(x), op(x), strict=True):
                assert torch.equal(actual, expected) and actual.dtype == expected.dtype
                assert actual.stride() == expected.stride()
    assert all(isinstance(made, tape.Tape) for made in recorder._tapes.values()) and len(recorder._tapes) == 3


class Alive(TorchDispatchMode):
    """Counts, before each call, the results of those before it that something keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[weakref.ref[Tensor]] = []
        self.counts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts.append(sum(ref() is not None for ref in self.results))
        result = func(*args, **(kwargs or {}))
        self.results.append(weakref.ref(result))
        return result


def test_memory_is_free_once_nothing_needs_it() -> None:
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        kept = x + 1
        for _ in range(6):
            x = x * 2
        return kept, x.view(-1)

    played = recorder.replayed(op)
    for _ in range(3):
        played(torch.randn(5))
    (made,) = recorder._tapes.values()
    assert isinstance(made, tape.Tape)
    x = torch.randn(5)
    with Alive() as alive:
        doubled = played(x)[1]
    assert torch.equal(doubled, x * 64)
    # Before each step: nothing; what is kept; then that and the last product.
    assert alive.counts == [0, 1, *[2] * 6]


def test_so_many_tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_TAPES", 3)
    steps = Steps()
    for rows in range(2, 12):
        for _ in range(3):
            steps.op(*operands(rows), 1.0)
    assert len(recorder._tapes) == 3
    count = steps.count
    for rows in (9, 10, 11):  # the last ones are there
        steps.check(*operands(rows), 1.0, count=count)
    steps.check(*operands(8), 1.0, count=count + 1)


class Doubled:
    """A kernel that writes twice the float32 numbers of one tensor to another."""

    by_address = False

    def place(self, tensor: Tensor) -> Any:
        return tensor

    def prepare(self, grid: tuple[int, ...], args: Any) -> None:
        return None

    def numbers(self, place: Any, count: int) -> Any:
        return place[:count]

    def launch(self, grid: tuple[int, ...], args: Any, on: int | None = None) -> None:
        source, target, count = args
        with launcher.compat.disable_dispatch_modes():
            self.numbers(target, count)[:] = 2 * self.numbers(source, count)

    def __call__(self, *args: Any) -> None:
        self.launch((1,), [self.place(arg) if isinstance(arg, Tensor) else arg for arg in args])
        if (listener := launcher._listener.get()) is not None:
            listener.launched(self, (1,), args)


class DoubledByAddress(Doubled):
    by_address = True

    def place(self, tensor: Tensor) -> int:
        return tensor.data_ptr()

    def numbers(self, place: int, count: int) -> Any:
        return torch.frombuffer((ctypes.c_float * count).from_address(place), dtype=torch.float32)


@pytest.mark.parametrize("double", [Doubled(), DoubledByAddress()], ids=["by tensor", "by address"])
def test_launches_are_done_again_on_views_and_scratch(double: Doubled) -> None:
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        scratch, large = torch.empty(9), torch.empty(tape.MOST_POOLED // 4 + 1)
        a, b, first = scratch.as_strided((4,), (1,), 1), scratch[5:], torch.empty(5)
        double(x, first, 5)
        double(first[1:], a, 4)
        double(a, b, 4)
        double(b, large[100:], 4)
        out, called = torch.zeros(8), torch.empty_like(x)
        double(large[100:], out[2:], 3)
        double(first, out[5:], 3)
        double(x, called.view(-1), 5)
        return out, called + 1

    played = recorder.replayed(op)
    for _ in range(5):
        x = torch.randn(5)
        for actual, expected in zip(played(x), op(x), strict=True):
            assert torch.equal(actual, expected)
    (made,) = recorder._tapes.values()
    assert isinstance(made, tape.Tape)
    calls = [step.func for step in made.steps if isinstance(step, tape.Called)]
    aten = torch.ops.aten
    if double.by_address:  # one for the scratch; no views, but of what is called or is a result
        assert calls.count(aten.empty.memory_format) == 2
        assert aten.as_strided.default not in calls
    else:
        assert aten.as_strided.default in calls


def test_a_call_that_compiles_is_on_no_tape() -> None:
    def op(x: Tensor) -> Tensor:
        if (listener := launcher._listener.get()) is not None:
            listener.compiled()
        return x + 1

    played = recorder.replayed(op)
    for _ in range(5):
        x = torch.randn(3)
        assert torch.equal(played(x), x + 1)
    assert not any(isinstance(made, tape.Tape) for made in recorder._tapes.values())


def test_what_is_played_within_another_op_is_not_on_its_tape() -> None:
    """A finaliser may call an op anywhere: what it launches, or plays, is no part of what is being written down."""
    double = Doubled()

    def inner(x: Tensor) -> Tensor:
        out = torch.empty(3)
        double(x, out, 3)
        return out

    played = recorder.replayed(inner)
    for _ in range(3):
        played(torch.randn(3))
    results: list[Tensor] = []
    theirs = torch.randn(3)

    def outer(x: Tensor) -> Tensor:
        results.append(played(theirs))
        return x + 1

    op = recorder.replayed(outer)
    for _ in range(4):
        x = torch.randn(3)
        assert torch.equal(op(x), x + 1)
    assert len(results) == 2 and all(torch.equal(result, theirs * 2) for result in results)
    _, made = recorder._tapes.values()
    assert isinstance(made, tape.Tape)
    assert [type(step) for step in made.steps] == [tape.Called]
