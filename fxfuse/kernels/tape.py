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
            return found.play(*tensors)
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


class _Address(NamedTuple):
    """Stands for a tensor that begins so many bytes after a value's memory, in what a kernel is given."""

    at: int
    offset: int


class _Memory(NamedTuple):
    """All of a tensor that a descriptor is asked for once it is made."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class _Step(Protocol):
    results: range  # places of its own values
    allocates: bool  # memory that holds anything, and nothing else

    def needs(self) -> set[int]:
        """Places of the values that it is given."""

    def needs_tensors(self) -> set[int]:
        """Of those, the ones that are more than addresses to it."""

    def line(self, source: _Source) -> str:
        """The statement that does it, with the values before it as v0, v1 ..., their addresses as a0, a1 ..."""


class _Called:
    """A call of PyTorch, whose results are values from ``at`` on."""

    def __init__(self, func: Any, args: list[Any], kwargs: dict[str, Any], at: int, results: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.single = isinstance(results, Tensor)
        self.results = range(at, at + (1 if self.single else len(results)))
        self.allocation = _allocation(func, results) if self.single else None
        self.allocates = func in _EMPTY

    def needs(self) -> set[int]:
        return set() if self.allocation else {arg.at for arg in self.args if isinstance(arg, _Place)}

    needs_tensors = needs

    def line(self, source: _Source) -> str:
        results = "".join(f"v{at}, " for at in self.results)
        results = results[:-2] if self.single else f"({results})"
        if self.allocation:
            return f"{results} = {source.name(self.allocation)}()"
        args = [f"v{arg.at}" if isinstance(arg, _Place) else source.name(arg) for arg in self.args]
        kwargs = [f"{name}={source.name(value)}" for name, value in self.kwargs.items()]
        return f"{results} = {source.name(self.func)}({', '.join([*args, *kwargs])})"


_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)
_ZEROS = (torch.ops.aten.zeros.default, torch.ops.aten.zeros_like.default, torch.ops.aten.new_zeros.default)


def _allocation(func: Any, result: Tensor) -> Callable[[], Tensor] | None:
    """What does as ``func`` did, if that made a tensor of which all is known: sooner than by way of the dispatcher."""
    shape, dtype, device = result.shape, result.dtype, result.device
    if func in _EMPTY or (func in _ZEROS and result.numel() == 0):
        return functools.partial(torch.empty_strided, shape, result.stride(), dtype=dtype, device=device)
    if func in _ZEROS and result.is_contiguous():
        return functools.partial(torch.zeros, shape, dtype=dtype, device=device)
    return None


class _Launched:
    """A launch, of tensors as addresses if that is all that the kernel knows of them."""

    results = range(0)
    allocates = False

    def __init__(self, kernel: launcher.Launchable, grid: tuple[int, ...], args: list[Any]) -> None:
        self.kernel, self.grid, self.args = kernel, grid, args

    def needs(self) -> set[int]:
        return {base.at for arg in self.args if isinstance(base := getattr(arg, "base", arg), _Address)}

    def needs_tensors(self) -> set[int]:
        return set() if self.kernel.by_address else self.needs()

    def moved(self, to: dict[int, _Address]) -> _Launched:
        """With other addresses in place of values that are no more."""

        def place(arg: Any) -> Any:
            if hasattr(arg, "base"):
                return _based(arg, place(arg.base))
            if isinstance(arg, _Address) and arg.at in to:
                return to[arg.at]._replace(offset=to[arg.at].offset + arg.offset)
            return arg

        return _Launched(self.kernel, self.grid, [place(arg) for arg in self.args])

    def line(self, source: _Source) -> str:
        args = "".join(self._argument(arg, source) + ", " for arg in self.args)
        return f"{source.name(self.kernel.launch)}({source.name(self.grid)}, ({args}), on)"

    def _argument(self, arg: Any, source: _Source) -> str:
        if isinstance(arg, _Address):
            return f"a{arg.at} + {arg.offset}" if self.kernel.by_address else f"v{arg.at}"
        if hasattr(arg, "base"):
            base = self._argument(arg.base, source)
            base = f"{source.name(_Memory)}({base})" if self.kernel.by_address else base
            return f"{source.name(_based)}({source.name(arg)}, {base})"
        return source.name(arg)


def _based(descriptor: Any, base: Any) -> Any:
    """The descriptor, of something else; what its constructor checks is known to be so."""
    copy = object.__new__(type(descriptor))
    copy.__dict__.update(descriptor.__dict__, base=base)
    return copy


class Tape:
    """What a call did, to be done from tensors that look like its own: a function, as that takes the least time."""

    def __init__(self, steps: list[_Step], result: Any, values: list[Tensor], given: int) -> None:
        needed = _places(result)
        self.steps = _pooled(_without_views(steps, needed), needed, values)
        source = _Source(given, self.steps)
        for step, dead in zip(self.steps, _dead(self.steps, needed), strict=True):
            source.add(step, dead)
        self.play: Callable[..., Any] = source.function(result)


class _Source:
    """The source of a function of so many tensors."""

    def __init__(self, given: int, steps: list[_Step]) -> None:
        self.names: dict[str, Any] = {}
        self.addressed = set().union(*(step.needs() - step.needs_tensors() for step in steps))
        self.lines = [f"def play({', '.join(f'v{at}' for at in range(given))}):", f"on = {self.name(_stream)}()"]
        self._addresses(range(given))

    def name(self, value: Any) -> str:
        """An expression for the value."""
        if value is None or type(value) in (bool, int):
            return repr(value)
        name = f"c{id(value)}"
        self.names[name] = value  # which keeps it, so that no other has its identity
        return name

    def add(self, step: _Step, dead: set[int]) -> None:
        """``dead`` are the values that nothing needs after it, so that their memory is free for others."""
        self.lines.append(step.line(self))
        self._addresses(step.results)
        if dead:
            self.lines.append("del " + ", ".join(f"v{at}" for at in dead))

    def _addresses(self, places: range) -> None:
        self.lines += [f"a{at} = v{at}.data_ptr()" for at in places if at in self.addressed]

    def function(self, result: Any) -> Any:
        self.lines.append(f"return {self._filled(result)}")
        exec(compile("\n ".join(self.lines), "<tape>", "exec"), self.names)
        return self.names["play"]

    def _filled(self, template: Any) -> str:
        if isinstance(template, _Place):
            return f"v{template.at}"
        if isinstance(template, tuple):
            make = self.name(type(template)) if hasattr(template, "_fields") else ""
            return f"{make}({''.join(self._filled(item) + ', ' for item in template)})"
        return self.name(template)


def _stream() -> int | None:
    return launcher.stream() if torch.cuda.is_initialized() else None


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
    pooled: dict[int, _Address] = {}
    size, rest = 0, []
    for step in steps:
        at = step.results.start
        if step.allocates and at not in needed and values[at].nbytes <= MOST_POOLED:
            pooled[at] = _Address(len(values), size)
            size += -(-values[at].nbytes // ALIGNMENT) * ALIGNMENT
        else:
            rest.append(step.moved(pooled) if isinstance(step, _Launched) else step)
    if not pooled:
        return steps
    memory = torch.empty(size, dtype=torch.uint8, device=values[next(iter(pooled))].device)
    return [_Called(torch.ops.aten.empty.memory_format, [], {}, len(values), memory), *rest]


def _places(template: Any) -> set[int]:
    if isinstance(template, _Place):
        return {template.at}
    return set().union(*map(_places, template)) if isinstance(template, tuple) else set()


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
        return Tape(self.steps, template, self.values, self.given) if self.whole else None

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
            self.steps.append(_Called(func, given, kwargs, len(self.values), result))
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
            return _based(arg, self._argument(arg.base, kernel))
        return arg

    def compiled(self) -> None:
        self.whole = False
