"""Doing again what an op did, without finding out anew what that is.

What an op launches follows from the sizes, strides, alignment and dtypes of its operands and from its options, and from
no value: nothing waits for the device. For few rows, finding it out takes the host longer than the device takes; for
many, the device waits for the first launches if it was idle. So the second of several calls that look alike is put on a
tape, all its launches and calls of PyTorch with the places of their arguments among the values so far, and those after
it play the tape.

An op that does anything else than launch kernels, through ``launcher``, and call PyTorch on tensors must not be played.
What a tape cannot hold, it is not made of: a value that the host reads, a tensor that is not of the call's own, a
kernel that had to be compiled.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..compat import TorchDispatchMode
from . import launcher, tiles

R = TypeVar("R")

# Of a tape, some 2 KB each; what has more keeps the device busy.
MOST_STEPS = 512
MOST_TAPES = 128
ATTEMPTS = 3
# Of memory that is allocated together: bytes of one tensor, and what each begins at a multiple of.
MOST_POOLED, ALIGNMENT = 1 << 20, 512

_tapes: dict[Hashable, Tape | int] = {}  # or calls so far
_lock = threading.Lock()


def replayed(op: Callable[..., R]) -> Callable[..., R]:
    """``op``, whose later calls are played from a tape.

    Its arguments are tensors, the first leaf among them, and what is hashed by value; tuples of these; and objects
    whose ``leaves`` are a tuple of these.
    """

    @functools.wraps(op)
    def played(*args: Any) -> R:
        if launcher.is_nested():
            return op(*args)
        leaves = _leaves(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = (op, tiles.dot_precision(leaves[0].dtype), *map(_look, leaves))
        found = _tapes.get(key, 0)
        if isinstance(found, Tape):
            return found.play(tensors)
        _keep(key, found + 1)
        if not 0 < found <= ATTEMPTS:  # the first call compiles
            return op(*args)
        recorder = _Recorder(tensors)
        with recorder, launcher.listening(recorder):
            result = op(*args)
        tape = recorder.tape(result)
        if tape is not None:
            _keep(key, tape)
        elif recorder.too_long:
            _keep(key, ATTEMPTS + 1)  # it will always be
        return result

    return played


def _keep(key: Hashable, value: Tape | int) -> None:
    with _lock:
        if key not in _tapes and len(_tapes) >= MOST_TAPES:
            del _tapes[next(iter(_tapes))]  # the oldest
        _tapes[key] = value


def _leaves(value: tuple[Any, ...]) -> list[Any]:
    leaves = []
    for item in value:
        if isinstance(item, Tensor):
            leaves.append(item)
        elif isinstance(item := getattr(item, "leaves", item), tuple):
            leaves += _leaves(item)
        else:
            leaves.append(item)
    return leaves


def _look(leaf: Any) -> Hashable:
    """All of a leaf that an op may depend on, but a tensor's values."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.dtype, leaf.get_device(), leaf.shape, leaf.stride(), leaf.data_ptr() % 16


# --- tapes ----------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Stands for a value in what a call is given."""

    at: int


class _Step(Protocol):
    results: range  # places of its own values
    allocates: bool  # memory that holds anything, and nothing else

    def needs(self) -> set[int]:
        """Places of the values that it is given."""

    def needs_tensors(self) -> set[int]:
        """Of those, the ones that are more than addresses to it."""

    def play(self, values: list[Any], stream: int | None) -> None:
        """Do it, with the values before it, and put down its own; ``stream`` is of ``launcher.stream``."""


class _Called:
    """A call of PyTorch, whose results are values from ``at`` on."""

    def __init__(self, func: Any, args: list[Any], kwargs: dict[str, Any], at: int, count: int) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.results = range(at, at + count)
        self.allocates = func in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)
        self.places = [(i, arg.at) for i, arg in enumerate(args) if isinstance(arg, _Place)]

    def needs(self) -> set[int]:
        return {at for _, at in self.places}

    needs_tensors = needs

    def play(self, values: list[Any], stream: int | None) -> None:
        args = self.args.copy()
        for i, at in self.places:
            args[i] = values[at]
        result = self.func(*args, **self.kwargs)
        if isinstance(result, Tensor):
            values[self.results.start] = result
        else:
            values[self.results.start : self.results.stop] = result


class _Launched:
    """A launch, of tensors that begin so many bytes after what is at a place."""

    results = range(0)
    allocates = False

    def __init__(self, kernel: launcher.Launchable, grid: tuple[int, ...], args: list[Any]) -> None:
        self.kernel, self.grid, self.args = kernel, grid, args
        self.places = [(i, *arg) for i, arg in enumerate(args) if isinstance(arg, _Address)]
        self.described = [(i, arg.base.at) for i, arg in enumerate(args) if hasattr(arg, "base")]

    def needs(self) -> set[int]:
        return {at for _, at, _ in self.places} | {at for _, at in self.described}

    def needs_tensors(self) -> set[int]:
        return {at for _, at in self.described} if self.kernel.by_address else self.needs()

    def play(self, values: list[Any], stream: int | None) -> None:
        args, place = self.args.copy(), self.kernel.place
        for i, at, offset in self.places:
            args[i] = place(values[at], offset)
        for i, at in self.described:
            args[i] = _based(args[i], values[at])
        self.kernel.launch(self.grid, args, stream)


class _Address(NamedTuple):
    at: int
    offset: int


def _based(descriptor: Any, base: Any) -> Any:
    """The descriptor, of something else; what its constructor checks is known to be so."""
    copy = object.__new__(type(descriptor))
    copy.__dict__.update(descriptor.__dict__, base=base)
    return copy


class Tape:
    """What a call did, to be done from tensors that look like its own."""

    def __init__(self, steps: list[_Step], result: Any, values: list[Tensor]) -> None:
        self.result, self.values = result, len(values)
        self.steps = _pooled(_without_views(steps, _places(result)), _places(result), values)
        self.dead = _dead(self.steps, _places(result))

    def play(self, tensors: list[Tensor]) -> Any:
        values = [*tensors, *[None] * (self.values + 1 - len(tensors))]
        stream = launcher.stream() if torch.cuda.is_initialized() else None
        for step, dead in zip(self.steps, self.dead, strict=True):
            step.play(values, stream)
            for at in dead:
                values[at] = None
        return _filled(self.result, values)


def _dead(steps: list[_Step], needed: set[int]) -> list[set[int]]:
    """After each step, the values that nothing needs any more, so that their memory is free for others."""
    dead: list[set[int]] = []
    for step in reversed(steps):
        own = step.needs() | set(step.results)
        dead.insert(0, own - needed)
        needed = needed | own
    return dead


def _without_views(steps: list[_Step], needed: set[int]) -> list[_Step]:
    """The steps without the views that only kernels need, which are given addresses."""
    rest: list[_Step] = []
    for step in reversed(steps):
        if not (isinstance(step, _Called) and step.func.is_view and needed.isdisjoint(step.results)):
            needed = needed | step.needs()
            rest.insert(0, step)
    return rest


def _pooled(steps: list[_Step], needed: set[int], values: list[Tensor]) -> list[_Step]:
    """The steps with one allocation, the value after all others, for the small memory that only kernels need."""
    for step in steps:
        needed = needed | step.needs_tensors()
    pooled: dict[int, int] = {}
    size, rest = 0, []
    for step in steps:
        at = step.results.start
        if step.allocates and at not in needed and values[at].nbytes <= MOST_POOLED:
            pooled[at] = size
            size += -(-values[at].nbytes // ALIGNMENT) * ALIGNMENT
        else:
            rest.append(step)
    if not pooled:
        return steps
    for step in rest:
        if isinstance(step, _Launched):
            step.places = [
                (i, len(values), pooled[at] + offset) if at in pooled else (i, at, offset)
                for i, at, offset in step.places
            ]
    memory = {"dtype": torch.uint8, "device": values[next(iter(pooled))].device}
    return [_Called(torch.ops.aten.empty.memory_format, [[size]], memory, len(values), 1), *rest]


def _places(template: Any) -> set[int]:
    if isinstance(template, _Place):
        return {template.at}
    return set().union(*map(_places, template)) if isinstance(template, tuple) else set()


def _filled(template: Any, values: list[Any]) -> Any:
    if isinstance(template, _Place):
        return values[template.at]
    if isinstance(template, tuple):
        items = [_filled(item, values) for item in template]
        return type(template)(*items) if hasattr(template, "_fields") else tuple(items)
    return template


class _Recorder(TorchDispatchMode):
    """Writes down what happens while it is active."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.values: list[Tensor] = []
        self.kept: list[Tensor] = []  # all are, until the end, so that no other has one's identity
        self.at: dict[int, int] = {}
        self.addresses: list[_Address] = []  # of each value: where its memory is within another's
        self.too_long = False
        # Of a tensor that is given twice, it could not be told which is meant.
        self.whole = len(set(map(id, tensors))) == len(tensors)
        for tensor in tensors:
            self._add(tensor)
        self.given = len(tensors)

    def tape(self, result: Any) -> Tape | None:
        template = self._template(result)
        return Tape(self.steps, template, self.values) if self.whole else None

    def _go_on(self) -> None:
        """Or keep nothing any more, of a call that will be on no tape."""
        self.too_long |= len(self.steps) > MOST_STEPS
        self.whole &= not self.too_long
        if not self.whole:
            for kept in (self.steps, self.values, self.kept, self.at, self.addresses):
                kept.clear()

    def _add(self, tensor: Tensor, base: Tensor | None = None) -> None:
        address = _Address(len(self.values), 0)
        if base is not None and tensor.numel() > 0:  # without elements there is no address
            at, offset = self.addresses[self.at[id(base)]]
            address = _Address(at, offset + tensor.data_ptr() - base.data_ptr())
        self.at.setdefault(id(tensor), len(self.values))
        self.addresses.append(address)
        self.values.append(tensor)

    def _template(self, value: Any) -> Any:
        """The value with places for its tensors."""
        if isinstance(value, Tensor):
            at = self.at.get(id(value))
            self.whole &= at is not None
            return None if at is None else _Place(at)
        if isinstance(value, tuple):
            items = [self._template(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        within = [*kwargs.values(), *(item for arg in args if isinstance(arg, (tuple, list)) for item in arg)]
        self.whole &= all(isinstance(r, Tensor) for r in results) and not any(isinstance(v, Tensor) for v in within)
        given = [self._template(arg) for arg in args]
        if self.whole and func is torch.ops.aten.detach.default and given[0].at >= self.given:
            # Of its own; PyTorch returns what it allocates as such.
            self.at[id(result)] = given[0].at
            self.kept.append(result)
        elif self.whole:
            self.steps.append(_Called(func, given, kwargs, len(self.values), len(results)))
            for tensor in results:
                self._add(tensor, args[0] if func.is_view else None)
        self._go_on()
        return result

    def launched(self, kernel: launcher.Launchable, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        given = [self._argument(arg, kernel) for arg in args]
        if self.whole:
            self.steps.append(_Launched(kernel, grid, given))
        self._go_on()

    def _argument(self, arg: Any, kernel: launcher.Launchable) -> Any:
        if isinstance(arg, Tensor):
            place = self._template(arg)
            if place is None or not kernel.by_address:
                return place and _Address(place.at, 0)
            return self.addresses[place.at]
        if hasattr(arg, "base"):
            return _based(arg, self._template(arg.base))
        return arg

    def compiled(self) -> None:
        self.whole = False
