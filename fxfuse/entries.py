"""What a tensor in a graph certainly holds, told from the nodes that made it.

Of tensors that are made of numbers and labels alone one need not have the entries to know them: constants, one-hot
tensors, and the targets that programs make of these to smooth labels by hand.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from .algebra import Entries, constant
from .compat import same
from .mutation import DEEPEST, Timeline, called, example_of, storages, writes

Told = Callable[[Any], Entries | None]


class Contents:
    """What the tensors of a graph hold, as far as it is known."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._made: dict[Node, Entries | None] = {}  # by the nodes that made them, before anything else wrote to them
        self._depth = 0

    def of(self, handle: Any, place: Node) -> Entries | None:
        """What the tensor of a node, or a number, holds when ``place`` is about to run; None if that is not known."""
        if isinstance(handle, (int, float)) and not isinstance(handle, bool):
            return constant(float(handle))
        if not isinstance(handle, Node) or not isinstance(example_of(handle), Tensor):
            return None
        maker = _maker(handle)
        if example_of(maker).requires_grad or self._timeline.unplaced_write(maker):
            return None
        found = self._of_maker(maker)
        for node in self._timeline.writers(maker, before=place):
            edit = _CHANGES.get(_out_of_place(node))
            if found is None or edit is None or _maker(node) is not maker or storages(node) != storages(maker):
                return None
            found = _stored(edit(node, functools.partial(self._before, node, found)), node)
        # Classes that nothing writes to are what they were.
        written = found is not None and found.classes is not None and self._timeline.is_written(found.classes)
        return None if written else found

    def _of_maker(self, node: Node) -> Entries | None:
        if node not in self._made:
            make = _MAKERS.get(called(node)) or _CHANGES.get(called(node))
            if make is None or node.kwargs.get("out") is not None or self._depth > DEEPEST:
                return None
            self._depth += 1
            self._made[node] = _stored(make(node, functools.partial(self.of, place=node)), node)
            self._depth -= 1
        return self._made[node]

    def _before(self, edit: Node, edited: Entries, handle: Any) -> Entries | None:
        """What the arguments of an edit hold, of which the first is what is edited."""
        return edited if handle is edit.args[0] else self.of(handle, edit)


def _stored(entries: Entries | None, node: Node) -> Entries | None:
    """The same, as the dtype of the node has it."""
    example = example_of(node)
    if entries is None or example.dtype.is_complex:
        return None
    try:
        off, on = (float(torch.tensor(number, dtype=example.dtype, device="cpu")) for number in entries[:2])
    except (RuntimeError, OverflowError, ValueError):  # a number that it cannot hold
        return None
    return entries._replace(off=off, on=on)


def _maker(node: Node) -> Node:
    """The node that made the tensor which ``node`` returns, through those that write to it in place."""
    while node.args and isinstance(node.args[0], Node) and node.args[0] in writes(node).arguments:
        node = node.args[0]
    return node


# --- what nodes make --------------------------------------------------------------------------------------------


def _filled(number: float) -> Callable[[Node, Told], Entries | None]:
    return lambda node, told: constant(number)


def _full(node: Node, told: Told) -> Entries | None:
    """``full(size, fill_value)``, ``full_like`` and ``new_full`` in the same way, and ``fill_(value)``."""
    place = 2 if node.target == "new_full" else 1
    return _constant(told(node.args[place] if len(node.args) > place else _named(node, "fill_value", "value")))


def _tensor(node: Node, told: Told) -> Entries | None:
    return _constant(told(node.args[0])) if len(node.args) == 1 else None


def _one_hot(node: Node, told: Told) -> Entries | None:
    given = dict(zip(("tensor", "num_classes"), node.args, strict=False)) | node.kwargs
    return Entries(0.0, 1.0, given.get("tensor")) if _are_classes(given.get("tensor")) else None


def _scatter(node: Node, told: Told) -> Entries | None:
    given = dict(zip(("input", "dim", "index", "src"), node.args, strict=False)) | node.kwargs
    value = given.pop("value", None)
    base, on = told(given.pop("input", None)), _constant(told(given.pop("src", value)))
    dim, index = given.pop("dim", None), given.pop("index", None)
    if given or base is None or base.classes is not None or on is None or not _are_classes(index):
        return None
    shape, rows = example_of(node).shape, example_of(index).shape
    one_each = len(shape) == len(rows) > 0 and rows[-1] == 1 and all(map(same, shape[:-1], rows[:-1]))
    last = isinstance(dim, int) and dim % max(len(shape), 1) == len(shape) - 1
    return Entries(base.off, on.off, index) if one_each and last else None


def _converted(node: Node, told: Told) -> Entries | None:
    if not node.args:
        return None
    # What is cut off depends on the last bit.
    cuts = example_of(node.args[0]).dtype.is_floating_point and not example_of(node).dtype.is_floating_point
    return None if cuts else told(node.args[0])


def _each(function: Callable[..., float]) -> Callable[[Node, Told], Entries | None]:
    """A function of numbers, of the entries of its arguments."""

    def of_entries(node: Node, told: Told) -> Entries | None:
        if node.kwargs:
            return None
        found: list[Entries] = []
        classes = None
        for arg in node.args:
            entries = told(arg)
            if entries is None:
                return None
            if not isinstance(arg, Node) and example_of(node).dtype != torch.float64:  # as eager converts it first
                entries = constant(float(torch.tensor(entries.off, dtype=torch.float32, device="cpu")))
            found.append(entries)
            if entries.classes is not None:
                spread = not _have_one_shape(example_of(arg), example_of(node))
                if spread or (classes is not None and classes is not entries.classes):
                    return None
                classes = entries.classes
        try:
            return Entries(function(*(e.off for e in found)), function(*(e.on for e in found)), classes)
        except (TypeError, ValueError, ArithmeticError):  # of arguments that it is not defined for
            return None

    return of_entries


def _constant(entries: Entries | None) -> Entries | None:
    return entries if entries is not None and entries.classes is None else None


def _named(node: Node, *names: str) -> Any:
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)


def _are_classes(classes: Any) -> bool:
    example = example_of(classes)
    return isinstance(example, Tensor) and example.dtype == torch.int64


def _have_one_shape(a: Any, b: Any) -> bool:
    return a.dim() == b.dim() and all(map(same, a.shape, b.shape))


_MAKERS: dict[Any, Callable[[Node, Told], Entries | None]] = {
    **dict.fromkeys((torch.zeros_like, torch.zeros, "new_zeros"), _filled(0.0)),
    **dict.fromkeys((torch.ones_like, torch.ones, "new_ones"), _filled(1.0)),
    **dict.fromkeys((torch.empty_like, torch.empty, "new_empty"), _filled(math.nan)),
    **dict.fromkeys((torch.full_like, torch.full, "new_full"), _full),
    torch.tensor: _tensor,
    F.one_hot: _one_hot,
}
# Functions of a tensor, of which some have a form in place.
_CHANGES: dict[Any, Callable[[Node, Told], Entries | None]] = {
    **dict.fromkeys(
        ("to", "type", "type_as", "float", "double", "half", "bfloat16", "long", "int", "clone", torch.clone),
        _converted,
    ),
    **dict.fromkeys((torch.scatter, "scatter"), _scatter),
    "fill": _full,
    "zero": _filled(0.0),
    **{
        spelling: _each(function)
        for function, *spellings in (
            (operator.neg, operator.neg, torch.neg, "neg"),
            (operator.add, operator.add, torch.add, "add"),
            (operator.sub, operator.sub, torch.sub, "sub"),
            (operator.mul, operator.mul, torch.mul, "mul"),
            (operator.truediv, operator.truediv, torch.div, "div"),
            # What ``1 - x`` and ``1 / x`` are where a mode sees them, such as that of a default device.
            (lambda entry, other: other - entry, torch.rsub),
            (lambda entry: 1.0 / entry, torch.reciprocal, "reciprocal"),
            (math.exp, torch.exp, "exp"),
            (math.log, torch.log, "log"),
            (math.log1p, torch.log1p, "log1p"),
        )
        for spelling in spellings
    },
}
_OPERATORS_IN_PLACE: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


def _out_of_place(node: Node) -> Any:
    """The function that returns what a node writes to its first argument."""
    if node.op == "call_method":
        return str(node.target).removesuffix("_")
    return _OPERATORS_IN_PLACE.get(called(node))
