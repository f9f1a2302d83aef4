"""One pass through the nodes that take logits: where each of them is on the way from its projection."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from .. import compat
from ..mutation import example_of, is_one_of_several, storages, tensors, writes
from .source import function_name, name_of
from .words import is_operator, is_tensor, step, word

ARROW = " → "
WHOLE = 20  # functions at either end of a chain that are still told one by one
_ROOM = 60  # characters of a chain that is told inside of another


@dataclass(eq=False)
class _Place:
    """A place on the way of logits: what was done to them last, and the place before; a projection has none.

    Attributes:
        text: how the last step is written; ``bare``: without the chains of other projections' logits; ``word``: without
            its arguments.
        first: the texts of the first steps, as many as are told one by one.
        depth: how many steps there are.
    """

    text: str
    bare: str
    word: str
    before: _Place | None
    projection: Node
    first: tuple[str, ...]
    depth: int

    @classmethod
    def at(cls, projection: Node, name: str) -> _Place:
        return cls(name, name, name, None, projection, (name,), 1)

    def then(self, text: str, bare: str, word: str) -> _Place:
        first = (*self.first, text) if self.depth < WHOLE else self.first
        return _Place(text, bare, word, self, self.projection, first, self.depth + 1)

    def back(self) -> Iterator[_Place]:
        place: _Place | None = self
        while place is not None:
            yield place
            place = place.before

    def steps(self) -> tuple[str, ...]:
        """The way here, the middle of a long one left out."""
        left = self.depth - len(self.first)
        last = [place.text for place, _ in zip(self.back(), range(min(left, WHOLE)), strict=False)]
        return (*self.first, *["…"] * (left > WHOLE), *reversed(last))

    def inside(self) -> str:
        """The way here as it is told inside of another, whose length must not grow with it."""
        if self.depth <= WHOLE:
            text = ARROW.join(reversed([place.bare for place in self.back()]))
            if len(text) <= _ROOM:
                return text
        return ARROW.join((self.first[0], *["…"] * (self.depth > 2), *[self.word] * (self.depth > 1)))


@dataclass(eq=False)
class _Tensor:
    """What nodes return that are one tensor: the place that it has come to.

    Attributes:
        fills: whether it has all of its memory.
        base, how: of a view, what it was made of, and how that is written.
        views: that were made of it.
    """

    place: _Place
    fills: bool
    base: _Tensor | None = None
    how: str = ""
    views: list[_Tensor] = field(default_factory=list)


class Walk:
    """Goes once, in the order of the graph, through the nodes that take logits, and notes where each of them is.

    What is written in place is a step of all that it changes: of every view, if it is written to the whole memory.
    """

    def __init__(self, projections: Mapping[Node, str], flow: Iterable[Node], carries: Callable[[Node], bool]) -> None:
        self.projections, self.carries = projections, carries
        self.flow = dict.fromkeys(sorted(set(flow).difference(projections)))
        self._tensors: dict[Node, _Tensor] = {}
        self._of_memory: dict[int, dict[_Tensor, None]] = {}
        self._writers: set[Node] = set()
        for node in sorted((*projections, *self.flow)):
            if node in projections:
                self._note(node, _Tensor(_Place.at(node, projections[node]), _fills_memory(node)))
            else:
                self._visit(node)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._tensors)

    def steps(self, node: Node) -> tuple[str, ...]:
        return self._tensors[node].place.steps()

    def origin(self, node: Node) -> Node:
        """The projection that a node comes from."""
        return self._tensors[node].place.projection

    def ends(self) -> list[Node]:
        """What reads the logits for the last time: nothing that takes what it returns reads more of them."""
        ends: dict[Node, None] = {}
        for node in self.flow:
            if node not in self._tensors or node in self._writers:
                continue
            if not node.users or not is_tensor(node):
                is_end = bool(writes(node).arguments)  # it is there for what it does
            else:
                is_end = not self.carries(node) and not any(user in self.flow for user in node.users)
            if is_end:
                ends[_call(node)] = None
        return list(ends)

    def _note(self, node: Node, tensor: _Tensor) -> None:
        self._tensors[node] = tensor
        for memory in storages(node):
            self._of_memory.setdefault(memory, {})[tensor] = None

    def _visit(self, node: Node) -> None:
        target = self._written(node)
        source = target or self._source(node)
        if source is None:
            return
        origin = self._tensors[source]
        if target is not None:
            self._writers.add(node)
            if not self._is_written_back(node, target):
                self._write(target, node)
            self._note(node, origin)
            return
        if _call(node) is node:
            place, how = self._after(origin.place, node, source), self._text(node, source)
        else:
            place, how = origin.place, f"[{node.args[1]}]"
        if storages(node) & storages(source):
            made = _Tensor(place, _fills_memory(node), origin, how)
            origin.views.append(made)
        else:
            made = _Tensor(place, _fills_memory(node))
        self._note(node, made)

    def _source(self, node: Node) -> Node | None:
        """What of the logits a node takes first."""
        sources = [n for n in node.all_input_nodes if n in self._tensors]
        return next((n for n in sources if self.carries(n) or n in self.projections), next(iter(sources), None))

    def _written(self, node: Node) -> Node | None:
        """What of the logits a node writes to, if it does for certain."""
        written = writes(node)
        for argument in written.arguments if written.certain else ():
            # It returns what it has written to; others of its arguments may have been read.
            is_it = node.target is operator.setitem or storages(node) & storages(argument)
            if argument in self._tensors and is_it:
                return argument
        return None

    def _is_written_back(self, node: Node, target: Node) -> bool:
        """Whether a node assigns what was written in place already: ``z[0] *= 2`` is ``z[0] = z[0].mul_(2)``."""
        value = node.args[2] if node.target is operator.setitem else None
        if not isinstance(value, Node) or value not in self._writers:
            return False
        there = step(operator.getitem, "getitem", node.args[:2], {}, self._named, lambda arg: arg is target)
        edited = self._tensors[value]
        return edited.base is self._tensors[target] and edited.how == there

    def _write(self, target: Node, node: Node) -> None:
        """Go on by a step that is written to ``target``, with all that is certain to change."""
        changed: dict[_Tensor, str]  # and what is selected of it, where that is a part
        known = [tensor for memory in storages(target) for tensor in self._of_memory[memory]]
        tensor: _Tensor | None = self._tensors[target]
        assert tensor is not None
        assigned = node.target is operator.setitem  # to some of it, which may be nothing of a view
        if tensor.fills and not assigned:
            changed = dict.fromkeys(known, "")
        else:
            changed = {} if assigned else dict.fromkeys(_views_of(tensor), "")
            selected: list[str] = []
            while tensor is not None:
                changed[tensor] = " ".join(reversed(selected)) if len(selected) < 3 else "…"
                selected.append(tensor.how)
                tensor = tensor.base
            part = next((part for tensor, part in changed.items() if tensor.fills), "…")
            changed = dict.fromkeys((tensor for tensor in known if tensor.fills), part) | changed
        moved: dict[tuple[_Place, str], _Place] = {}  # what was at one place still is
        for tensor, part in changed.items():
            place = tensor.place
            if (place, part) not in moved:
                moved[place, part] = self._after(place, node, target, part)
            tensor.place = moved[place, part]

    def _after(self, place: _Place, node: Node, source: Node, part: str = "") -> _Place:
        """The place after ``node``, which takes ``source``; or writes to ``part`` of what is there."""
        bare = f"{part} {self._text(node, source)}".strip()
        others = (self._tensors[n].place for n in node.all_input_nodes if n is not source and n in self._tensors)
        other = next((other for other in others if other.first[0] != place.first[0]), None)
        text = bare if other is None else f"{bare} with ({other.inside()})"
        return place.then(text, bare, word(function_name(node)))

    def _text(self, node: Node, source: Node) -> str:
        return step(node.target, function_name(node), node.args, node.kwargs, self._named, lambda arg: arg is source)

    def _named(self, argument: Any) -> str | None:
        if argument in self.projections:
            return self.projections[argument]
        if argument in self._tensors:
            name = function_name(argument)
            return None if is_operator(name) else word(name)
        return text_of_node(argument)


def _views_of(tensor: _Tensor) -> Iterator[_Tensor]:
    """Views of a tensor, and views of these."""
    waiting = [*tensor.views]
    while waiting:
        yield (view := waiting.pop())
        waiting += view.views


def _call(node: Node) -> Node:
    """The call of which a node is one of the results, or the node."""
    return node.args[0] if is_one_of_several(node) else node  # type: ignore[return-value]


def _fills_memory(node: Node) -> bool:
    """Whether what a node returns has all of its memory; several results may together."""
    taken, memory = 0, {}
    for tensor in tensors(example_of(node)):
        taken += math.prod(map(compat.hint, tensor.shape)) * tensor.element_size()
        if (key := compat.storage(tensor)) is not None:
            memory[key] = compat.hint(tensor.untyped_storage().nbytes())
    return taken >= sum(memory.values())


def text_of_node(node: Any) -> str | None:
    """The number or the variable that a node stands for, if it does."""
    example = example_of(node)
    if isinstance(example, torch.SymFloat) and compat.is_guarded(example):
        return f"{compat.value_now(example):g}"
    if isinstance(example, (int, float, torch.SymInt, torch.SymFloat)):
        return str(example)
    return name_of(node) or None
