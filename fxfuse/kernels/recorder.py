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
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..compat import TorchDispatchMode
from . import launcher, tiles
from .tape import Address, Called, Launched, Place, Step, Tape, based

R = TypeVar("R")

# Of a tape, some 2 KB each; what has more keeps the device busy.
MOST_STEPS = 512
MOST_TAPES = 128
ATTEMPTS = 3

_PLAIN = frozenset((bool, int, float, str))

_tapes: dict[Hashable, Tape | int] = {}  # or calls so far
_lock = threading.RLock()  # a finaliser that calls an op may run anywhere


def replayed(op: Callable[..., R], suits: Callable[..., bool] | None = None) -> Callable[..., R]:
    """``op``, whose later calls are played from a tape.

    Its arguments are tensors, at least one, and what is hashed by value; tuples of these; and objects whose ``leaves``
    are a tuple of these. ``suits``, of the same arguments, tells whether such a call may be played at all.
    """

    @functools.wraps(op)
    def played(*args: Any, **options: Any) -> R:
        seen: dict[int, Tensor] = {}
        looks: list[Hashable] = [op, *options]
        _look((*args, *options.values()), seen, looks)
        tensors = [*seen.values()]
        if launcher.is_nested():
            # By ``launcher.rehearse``; anything else has come in between.
            rehearsed = any(tensor.is_meta for tensor in tensors)
            return op(*args, **options) if rehearsed else launcher.undisturbed(played, *args, **options)
        looks.append(tiles.dot_precision(tensors[0].dtype))
        key = tuple(looks)
        found = _tapes.get(key, 0)
        if isinstance(found, Tape):
            return found.play(*tensors)
        if found == 0 and suits is not None and not suits(*args, **options):
            return op(*args, **options)  # of which nothing is kept: it would take a tape's place
        _keep(key, found + 1)
        if not 0 < found <= ATTEMPTS:  # the first call compiles
            return op(*args, **options)
        recorder = _Recorder(tensors)
        with recorder, launcher.listening(recorder):
            result = op(*args, **options)
        made = recorder.tape(result)
        if made is not None:
            _keep(key, made)
        elif recorder.too_long:
            _keep(key, ATTEMPTS + 1)  # it will always be
        return result

    return played


def _keep(key: Hashable, value: Tape | int) -> None:
    with _lock:
        if key not in _tapes and len(_tapes) >= MOST_TAPES:
            oldest, *_ = _tapes
            _tapes.pop(oldest, None)
        _tapes[key] = value


def _look(values: tuple[Any, ...], tensors: dict[int, Tensor], looks: list[Hashable]) -> None:
    """Add the tensors among the leaves, each once, and of each leaf all that an op may depend on but their values."""
    for value in values:
        if isinstance(value, Tensor):
            if id(value) in tensors:
                looks.append(Place([*tensors].index(id(value))))
                continue
            tensors[id(value)] = value
            looks.append((value.dtype, value.get_device(), value.shape, value.stride(), value.data_ptr() % 16))
        elif value is None or type(value) in _PLAIN:
            looks.append(value)
        elif isinstance(within := getattr(value, "leaves", value), tuple):
            _look(within, tensors, looks)
        else:
            looks.append(within)


def _is_fixed(template: Any) -> bool:
    """Whether nothing but what its places stand for is different every time."""
    if isinstance(template, tuple) and not isinstance(template, Place):
        return all(map(_is_fixed, template))
    return template is None or isinstance(template, (Place, bool, int, float, str))


class _Recorder(TorchDispatchMode):
    """Writes down what happens while it is active."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.values: list[Tensor] = []
        self.kept: list[Tensor] = []  # all are, until the end, so that no other has one's identity
        self.at: dict[int, int] = {}
        self.addresses: list[Address] = []  # of each value: where its memory is within another's
        self.too_long = False
        self.whole = True
        for tensor in tensors:
            self._add(tensor)
        self.given = len(tensors)

    def tape(self, result: Any) -> Tape | None:
        template = self._template(result)
        self.whole &= _is_fixed(template)
        return Tape(self.steps, template, self.values, self.given) if self.whole else None

    def _go_on(self) -> None:
        """Or keep nothing any more, of a call that will be on no tape."""
        self.too_long |= len(self.steps) > MOST_STEPS
        self.whole &= not self.too_long
        if not self.whole:
            for kept in (self.steps, self.values, self.kept, self.at, self.addresses):
                kept.clear()

    def _add(self, tensor: Tensor, base: Tensor | None = None) -> None:
        address = Address(len(self.values), 0)
        if base is not None and tensor.numel() > 0:  # without elements there is no address
            at, offset = self.addresses[self.at[id(base)]]
            address = Address(at, offset + tensor.data_ptr() - base.data_ptr())
        self.at.setdefault(id(tensor), len(self.values))
        self.addresses.append(address)
        self.values.append(tensor)

    def _template(self, value: Any) -> Any:
        """The value with places for its tensors."""
        if isinstance(value, Tensor):
            at = self.at.get(id(value))
            self.whole &= at is not None
            return None if at is None else Place(at)
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
            self.steps.append(Called(func, given, kwargs, len(self.values), result))
            for tensor in results:
                self._add(tensor, args[0] if func.is_view else None)
        self._go_on()
        return result

    def launched(self, kernel: launcher.Launchable, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        given = [self._argument(arg, kernel) for arg in args]
        if self.whole:
            self.steps.append(Launched(kernel, grid, given))
        self._go_on()

    def _argument(self, arg: Any, kernel: launcher.Launchable) -> Any:
        if isinstance(arg, Tensor):
            place = self._template(arg)
            if place is None or not kernel.by_address:
                return place and Address(place.at, 0)
            return self.addresses[place.at]
        if hasattr(arg, "base"):
            return based(arg, self._argument(arg.base, kernel))
        return arg

    def compiled(self) -> None:
        self.whole = False
