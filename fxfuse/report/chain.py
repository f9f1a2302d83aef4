"""The way from a projection to what reads its logits, in the words of the program."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_iter

from .. import compat
from ..algebra import map_leaves
from ..mutation import storages, tensors, writes
from ..rules import IN_PLACE, TABLE, Rule
from .records import Ending, Projection, Use
from .source import function_name, line_at, location, name_of
from .telling import telling
from .words import Unnamed, is_operator, is_tensor, step, word

ARROW = " → "
_WHOLE = 20  # functions at either end of a chain that are still told one by one
_ROOM = 60  # characters of a chain that is told inside of another


# --- steps of a graph -------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """Where logits come from, and the chain from there to what they are."""

    projection: Projection
    chain: str


@dataclass(frozen=True)
class Told:
    """How a graph uses the logits of a head.

    Attributes:
        chain: in one line.
        uses: one by one.
        projections: that make the logits, in the order of the graph.
        ways: to the nodes for which they were asked for.
    """

    chain: str = ""
    uses: tuple[Use, ...] = ()
    projections: tuple[Projection, ...] = ()
    ways: Mapping[Node, Way] = field(default_factory=dict)


def uses_of(
    projections: Mapping[Node, Projection],
    flow: Iterable[Node],
    carries: Callable[[Node], bool],
    ending: Ending | None,
    in_checkpoint: bool = False,
    returned: Iterable[Node] = (),
) -> Told:
    """How a graph uses the logits of a head.

    Args:
        projections: the nodes that make the logits, each with its name and place.
        flow: every other node that takes logits, or what has an entry for each class of them.
        carries: whether such a node returns that again.
        ending: of the graph, if known.
        in_checkpoint: whether it is a checkpointed part of the graph that is compiled.
        returned: nodes to which the way is asked for.
    """
    walk = _Walk({node: made.name for node, made in projections.items()}, flow, carries)
    found = Counter((walk.steps(node), location(node) or "", False) for node in walk.ends())
    broken = ending is not None and ending.is_break
    end = "end of checkpoint" if in_checkpoint else "graph break" if broken else "return"
    for node in walk:
        if (node in projections or carries(node)) and any(user.op == "output" for user in node.users):
            found[(*walk.steps(node), end), ending.where if ending is not None else "", True] += 1
    vocab = _last_size(next(iter(projections)))
    uses = tuple(
        Use(ARROW.join(steps), where, line_at(where), count, leaves, vocab, leaves and in_checkpoint)
        for (steps, where, leaves), count in found.items()
    )
    chain = _joined([steps for steps, _, _ in found])
    ways = {node: Way(projections[walk.origin(node)], ARROW.join(walk.steps(node))) for node in returned}
    return Told(chain, uses, tuple(projections[node] for node in sorted(projections)), ways)


def _last_size(node: Node) -> int | str:
    size = next((tensor.shape[-1] for tensor in tensors(node.meta["example_value"]) if tensor.dim()), 0)
    return size if isinstance(size, int) else str(size)


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
        first = (*self.first, text) if self.depth < _WHOLE else self.first
        return _Place(text, bare, word, self, self.projection, first, self.depth + 1)

    def back(self) -> Iterator[_Place]:
        place: _Place | None = self
        while place is not None:
            yield place
            place = place.before

    def steps(self) -> tuple[str, ...]:
        """The way here, the middle of a long one left out."""
        left = self.depth - len(self.first)
        last = [place.text for place, _ in zip(self.back(), range(min(left, _WHOLE)), strict=False)]
        return (*self.first, *["…"] * (left > _WHOLE), *reversed(last))

    def inside(self) -> str:
        """The way here as it is told inside of another, whose length must not grow with it."""
        if self.depth <= _WHOLE:
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


class _Walk:
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
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, Node) and isinstance(source.meta.get("example_value"), (tuple, list)):
        return source
    return node


def _fills_memory(node: Node) -> bool:
    """Whether what a node returns has all of its memory; several results may together."""
    taken, memory = 0, {}
    for tensor in tensors(node.meta.get("example_value")):
        taken += math.prod(map(compat.hint, tensor.shape)) * tensor.element_size()
        if (key := compat.storage(tensor)) is not None:
            memory[key] = compat.hint(tensor.untyped_storage().nbytes())
    return taken >= sum(memory.values())


def text_of_node(node: Any) -> str | None:
    """The number or the variable that a node stands for, if it does."""
    example = node.meta.get("example_value")
    if isinstance(example, (int, float, torch.SymInt, torch.SymFloat)):
        return str(example)
    return name_of(node) or None


def _joined(chains: Sequence[Sequence[str]]) -> str:
    """Several chains as one, with what they begin with said once: ``"lm_head → view → cross_entropy + argmax"``."""
    chains = list(dict.fromkeys(map(tuple, chains)))
    if not chains:
        return ""
    shared = 0
    while all(len(chain) > shared + 1 and chain[shared] == chains[0][shared] for chain in chains):
        shared += 1
    ends = [ARROW.join(chain[shared:]) for chain in chains]
    if len(ends) > 1:
        ends = [f"({end})" if ARROW in end else end for end in ends]
    return ARROW.join((*chains[0][:shared], " + ".join(ends)))


def losses_of_inputs(graph: Graph) -> tuple[Use, ...]:
    """The losses in a graph of what it is given, which another graph may have made."""
    losses = {node for node in graph.nodes if (row := _row(node)) is not None and row.reads == "loss"}
    if not losses:
        return ()
    given: dict[Node, Node] = {}  # what it is that a node is made of
    ended: dict[Node, Node] = {}  # the last loss on the way there, which is no end if it is read by another
    found: dict[Node, None] = {}
    for node in graph.nodes:
        source = node if node.op == "placeholder" and is_tensor(node) else _read_by(node)
        if source is node or source in given:
            given[node] = given.get(source, node)
        if source in ended:
            ended[node] = ended[source]
        if node in losses and node in given:
            found.pop(ended.get(node, node), None)
            ended[node] = node
            found[node] = None
    walks = {}
    for start in dict.fromkeys(given[node] for node in found):
        flow = [node for node, other in given.items() if other is start]
        walks[start] = _Walk({start: name_of(start) or "logits"}, flow, lambda _: True)
    uses = []
    for node in found:
        start, where = given[node], location(node) or ""
        chain = ARROW.join(walks[start].steps(node))
        uses.append(Use(chain, where, line_at(where), vocab=_last_size(start)))
    return tuple(uses)


def _read_by(node: Node) -> Node | None:
    """What a function of the table reads: the first of the arguments that may be logits."""
    row = _row(node) or _row(node, IN_PLACE)
    if row is None:
        return None
    try:
        given = row.signature.bind(*node.args, **node.kwargs).arguments
    except TypeError:
        return None
    tracked = (part for name in row.tracked for part in tree_iter(given.get(name)))
    return next((part for part in tracked if isinstance(part, Node)), None)


def _row(node: Node, table: Mapping[Any, Rule] = TABLE) -> Rule | None:
    if node.op not in ("call_function", "call_method"):
        return None
    try:
        return table.get(node.target)
    except TypeError:
        return None


# --- calls at run time ------------------------------------------------------------------------------------------


# In the places of the logits and of every other tensor among the arguments of a call.
_LOGITS, _TENSOR = Unnamed("logits"), Unnamed("tensor")


class Applied(NamedTuple):
    """A function that was called with logits, without the tensors; ``key`` is equal for calls that are told alike."""

    function: Any
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: str

    @classmethod
    def of(cls, function: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], logits: Tensor) -> Applied:
        def told(leaf: Any) -> Any:
            return leaf if not isinstance(leaf, Tensor) else _LOGITS if leaf is logits else _TENSOR

        args, kwargs = map_leaves(told, args), {key: map_leaves(told, value) for key, value in kwargs.items()}
        return cls(function, name, args, kwargs, f"{name}{args!r}{kwargs!r}")

    def text(self) -> str:
        return step(self.function, self.name, self.args, self.kwargs, lambda _: None, lambda arg: arg is _LOGITS)


def chain_of(before: str, calls: Sequence[Applied], in_full: bool = True) -> str:
    """The chain to a call that reads deferred logits, the last of ``calls``; ``before`` is what the graph had done.

    Unless ``in_full``, it does not tell what was done in between.
    """
    if not in_full:
        return ARROW.join((before, "…", word(calls[-1].name)))
    steps = [word(call.name) for call in calls]
    with telling():  # for a failure is no reason to stop a training
        steps = [call.text() for call in calls]
    if len(steps) > 2 * _WHOLE:
        steps[_WHOLE:-_WHOLE] = ["…"]
    return ARROW.join((before, *steps))
