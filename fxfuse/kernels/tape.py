"""A tape: what an op did, as a function that does it with other tensors.

It calls PyTorch and launches kernels, one after the other, and knows from where among the values so far each argument
comes. To a compiled kernel a tensor is where it begins, so views that only kernels are given are not made anew, and
small memory that only they see is allocated together.

Compiled kernels are launched by CUDA's driver (``prepared``), whose arguments are kept from call to call, so by one
call at a time. Triton launches those of a call meanwhile, of another thread or of a finaliser, and what the driver
refuses, so that an error is Triton's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from . import launcher
from .prepared import library

# Of memory that is allocated together: bytes of one tensor, and what each begins at a multiple of.
MOST_POOLED, ALIGNMENT = 1 << 20, 512

_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)
_ZEROS = (torch.ops.aten.zeros.default, torch.ops.aten.zeros_like.default, torch.ops.aten.new_zeros.default)
_FULL = torch.ops.aten.full.default


class Place(NamedTuple):
    """Stands for a value in what a call is given."""

    at: int


class Address(NamedTuple):
    """Stands for a tensor that begins so many bytes after a value's memory, in what a kernel is given."""

    at: int
    offset: int


class _Memory(NamedTuple):
    """All of a tensor that a descriptor is asked for once it is made."""

    address: int

    def data_ptr(self) -> int:
        return self.address


class Step(Protocol):
    results: range  # places of its own values
    allocates: bool  # memory that holds anything, and nothing else

    def needs(self) -> set[int]:
        """Places of the values that it is given."""

    def needs_tensors(self) -> set[int]:
        """Of those, the ones that are more than addresses to it."""

    def lines(self, source: _Source) -> list[str]:
        """What does it, with the values before it as v0, v1 ..., their addresses as a0, a1 ..."""


class Called:
    """A call of PyTorch, whose results are values from ``at`` on."""

    def __init__(self, func: Any, args: list[Any], kwargs: dict[str, Any], at: int, results: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.single = isinstance(results, Tensor)
        self.results = range(at, at + (1 if self.single else len(results)))
        self.allocation = _allocation(func, args, results) if self.single else None
        self.allocates = func in _EMPTY

    def needs(self) -> set[int]:
        return set() if self.allocation else {arg.at for arg in self.args if isinstance(arg, Place)}

    needs_tensors = needs

    def lines(self, source: _Source) -> list[str]:
        results = "".join(f"v{at}, " for at in self.results)
        results = results[:-2] if self.single else f"({results})"
        if self.allocation:
            return [f"{results} = {source.name(self.allocation)}()"]
        args = [f"v{arg.at}" if isinstance(arg, Place) else source.name(arg) for arg in self.args]
        kwargs = [f"{name}={source.name(value)}" for name, value in self.kwargs.items()]
        return [f"{results} = {source.name(self.func)}({', '.join([*args, *kwargs])})"]


def _allocation(func: Any, args: list[Any], result: Tensor) -> Callable[[], Tensor] | None:
    """What does as ``func`` did, if that made a tensor of which all is known: sooner than an operator's overload."""
    shape, dtype, device = result.shape, result.dtype, result.device
    if func in _EMPTY or (func in _ZEROS and result.numel() == 0):
        return functools.partial(torch.empty_strided, shape, result.stride(), dtype=dtype, device=device)
    if func in _ZEROS and result.is_contiguous():
        return functools.partial(torch.zeros, shape, dtype=dtype, device=device)
    if func is _FULL and result.is_contiguous():
        return functools.partial(torch.full, shape, args[1], dtype=dtype, device=device)
    return None


class Launched:
    """A launch, of tensors as addresses if that is all that the kernel knows of them."""

    results = range(0)
    allocates = False

    def __init__(self, kernel: launcher.Launchable, grid: tuple[int, ...], args: list[Any]) -> None:
        self.kernel, self.grid, self.args = kernel, grid, args

    def needs(self) -> set[int]:
        return {base.at for arg in self.args if isinstance(base := getattr(arg, "base", arg), Address)}

    def needs_tensors(self) -> set[int]:
        return set() if self.kernel.by_address else self.needs()

    def moved(self, to: dict[int, Address]) -> Launched:
        """With other addresses in place of values that are no more."""

        def place(arg: Any) -> Any:
            if hasattr(arg, "base"):
                return based(arg, place(arg.base))
            if isinstance(arg, Address) and arg.at in to:
                return to[arg.at]._replace(offset=to[arg.at].offset + arg.offset)
            return arg

        return Launched(self.kernel, self.grid, [place(arg) for arg in self.args])

    def lines(self, source: _Source) -> list[str]:
        args = "".join(self._argument(arg, source) + ", " for arg in self.args)
        launch = f"{source.name(self.kernel.launch)}({source.name(self.grid)}, ({args}), on)"
        ready = self.kernel.prepare(self.grid, self.args)
        if ready is None:
            return [launch]
        source.name(ready)  # which keeps the memory that all of it points to
        addresses = "".join(self._argument(arg, source) + ", " for arg in ready.addressed)
        replace, launch_by_driver = map(source.name, (library().cuTensorMapReplaceAddress, library().cuLaunchKernelEx))
        calls = [f"{replace}({source.name(map)}, {self._argument(base, source)})" for map, base in ready.maps]
        calls.append(f"{launch_by_driver}({', '.join(map(source.name, ready.arguments))})")
        return [
            "if alone:",
            f" {source.name(ready.addresses)}[:] = ({addresses})",
            f" {source.name(ready.config)}.stream = on",
            f"if not alone or {' or '.join(calls)}:",  # each returns zero if it did what it should
            f" {launch}",
        ]

    def _argument(self, arg: Any, source: _Source) -> str:
        if isinstance(arg, Address):
            return f"a{arg.at} + {arg.offset}" if self.kernel.by_address else f"v{arg.at}"
        if hasattr(arg, "base"):
            base = self._argument(arg.base, source)
            base = f"{source.name(_Memory)}({base})" if self.kernel.by_address else base
            return f"{source.name(based)}({source.name(arg)}, {base})"
        return source.name(arg)


def based(descriptor: Any, base: Any) -> Any:
    """The descriptor, of something else; what its constructor checks is known to be so."""
    copy = object.__new__(type(descriptor))
    copy.__dict__.update(descriptor.__dict__, base=base)
    return copy


class Tape:
    """What a call did, to be done from tensors that look like its own: a function, as that takes the least time."""

    def __init__(self, steps: list[Step], result: Any, values: list[Tensor], given: int) -> None:
        needed = _places(result)
        self.steps = _pooled(_without_views(steps, needed), needed, values)
        source = _Source(given, self.steps)
        for step, dead in zip(self.steps, _dead(self.steps, needed), strict=True):
            source.add(step, dead)
        self.play: Callable[..., Any] = source.function(result)


class _Source:
    """The source of a function of so many tensors."""

    def __init__(self, given: int, steps: list[Step]) -> None:
        self.names: dict[str, Any] = {}
        self.addressed = set().union(*(step.needs() - step.needs_tensors() for step in steps))
        self.busy = threading.Lock()
        self.lines: list[str] = []
        self.given = given
        self._addresses(range(given))

    def name(self, value: Any) -> str:
        """An expression for the value."""
        if value is None or type(value) in (bool, int):
            return repr(value)
        name = f"c{id(value)}"
        self.names[name] = value  # which keeps it, so that no other has its identity
        return name

    def add(self, step: Step, dead: set[int]) -> None:
        """``dead`` are the values that nothing needs after it, so that their memory is free for others."""
        self.lines += step.lines(self)
        self._addresses(step.results)
        if dead:
            self.lines.append("del " + ", ".join(f"v{at}" for at in dead))

    def _addresses(self, places: range) -> None:
        self.lines += [f"a{at} = v{at}.data_ptr()" for at in places if at in self.addressed]

    def function(self, result: Any) -> Any:
        lines = [
            f"def play({', '.join(f'v{at}' for at in range(self.given))}):",
            f" on = {self.name(_stream)}()",
            f" alone = on is not None and {self.name(self.busy.acquire)}(False)",
            " try:",
            *(f"  {line}" for line in self.lines),
            f"  return {self._filled(result)}",
            " finally:",
            f"  if alone: {self.name(self.busy.release)}()",
        ]
        made: dict[str, Any] = {}
        exec(compile("\n".join(lines), "<tape>", "exec"), self.names, made)
        return made["play"]

    def _filled(self, template: Any) -> str:
        if isinstance(template, Place):
            return f"v{template.at}"
        if isinstance(template, tuple):
            make = self.name(type(template)) if hasattr(template, "_fields") else ""
            return f"{make}({''.join(self._filled(item) + ', ' for item in template)})"
        return self.name(template)


def _stream() -> int | None:
    return launcher.stream() if torch.cuda.is_initialized() else None


def _dead(steps: list[Step], needed: set[int]) -> list[set[int]]:
    """After each step, the values that nothing needs any more, so that their memory is free for others."""
    dead: list[set[int]] = []
    for step in reversed(steps):
        own = step.needs() | set(step.results)
        dead.insert(0, own - needed)
        needed = needed | own
    return dead


def _without_views(steps: list[Step], needed: set[int]) -> list[Step]:
    """The steps without the views that only kernels need, which are given addresses."""
    rest: list[Step] = []
    for step in reversed(steps):
        if not (isinstance(step, Called) and step.func.is_view and needed.isdisjoint(step.results)):
            needed = needed | step.needs()
            rest.insert(0, step)
    return rest


def _pooled(steps: list[Step], needed: set[int], values: list[Tensor]) -> list[Step]:
    """The steps with one allocation, the value after all others, for the small memory that only kernels need."""
    for step in steps:
        needed = needed | step.needs_tensors()
    pooled: dict[int, Address] = {}
    size, rest = 0, []
    for step in steps:
        at = step.results.start
        if step.allocates and at not in needed and values[at].nbytes <= MOST_POOLED:
            pooled[at] = Address(len(values), size)
            size += -(-values[at].nbytes // ALIGNMENT) * ALIGNMENT
        else:
            rest.append(step.moved(pooled) if isinstance(step, Launched) else step)
    if not pooled:
        return steps
    memory = torch.empty(size, dtype=torch.uint8, device=values[next(iter(pooled))].device)
    return [Called(torch.ops.aten.empty.memory_format, [], {}, len(values), memory), *rest]


def _places(template: Any) -> set[int]:
    if isinstance(template, Place):
        return {template.at}
    return set().union(*map(_places, template)) if isinstance(template, tuple) else set()
