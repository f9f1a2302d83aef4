"""A graph around its heads, before and after the rewrite, as plain data: what ``--html`` and ``--diff`` draw."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch.fx import Graph, Node

from .. import compat
from ..mutation import example_of, storages, tensors
from .source import argument_name, function_name, location

if TYPE_CHECKING:
    from ..candidate import Candidate
    from ..mutation import Region

LIMIT = 40  # boxes of one drawing
_TOGETHER = 2  # so many small operations next to each other make one box
_NOWHERE = "# No stacktrace found for following nodes"

Role = Literal["operand", "projection", "derived", "reader", "fused", "deferred", "other"]


@dataclass(frozen=True)
class Box:
    """One node of a graph, or several small ones that fxfuse added next to each other.

    Attributes:
        name: of the node, in the graph's code.
        function: as people write it, ``"linear"``; an argument's own name, ``"lm_head.weight"``.
        role: ``"operand"`` (what logits are made of or read with), ``"projection"``, ``"derived"`` (has its classes
            too), ``"reader"``, ``"fused"`` (fxfuse's op in their place), ``"deferred"`` (what the caller makes of what
            the graph returns) or ``"other"``.
        shape: ``"8192 × 4096"``, symbolic where it is dynamic; empty for what is no tensor.
        dtype: ``"bfloat16"``, or empty.
        bytes: that the node takes for itself; 0 for arguments and views. Dynamic sizes count by their hint.
        where: ``file.py:line``, or empty.
        inputs: names of the boxes it is made of.
        count: how many nodes it stands for.
    """

    name: str
    function: str
    role: Role
    shape: str = ""
    dtype: str = ""
    bytes: int = 0
    where: str = ""
    inputs: tuple[str, ...] = ()
    count: int = 1


@dataclass(frozen=True)
class Drawing:
    """What is around one head. ``after`` is empty where the head was kept.

    No more than ``LIMIT`` boxes each, those nearest to the projection; ``left_out`` is how many more there were.
    """

    before: tuple[Box, ...]
    after: tuple[Box, ...] = ()
    left_out: int = 0


@dataclass(frozen=True)
class Code:
    """The lines of a graph, or of a checkpointed body in it, before and after the rewrite."""

    before: tuple[str, ...]
    after: tuple[str, ...]


class Sketch:
    """Takes the picture of one graph: a ``records.Watcher``.

    Attributes:
        drawings: of each head, in the order of the sites.
        codes: of the graph and of every checkpointed body, if it has a head.
    """

    def __init__(self) -> None:
        self.drawings: list[Drawing] = []
        self.codes: list[Code] = []

    def analysed(self, graph: Graph, candidates: Sequence[Candidate], outside: Region | None) -> None:
        self._code = _lines(graph)

    def planned(self, candidates: Sequence[Candidate]) -> None:
        self._planned = [_before(candidate) for candidate in candidates]

    def rewritten(self, graph: Graph, made: Mapping[Candidate, Sequence[Node]]) -> None:
        for before, (candidate, new) in zip(self._planned, made.items(), strict=True):
            after = () if candidate.kept else _after(candidate, graph, new)
            drawn, drawn_after = _nearest(before, "projection"), _nearest(after, "fused")
            left_out = len(before) - len(drawn) + len(after) - len(drawn_after)
            self.drawings.append(Drawing(drawn, drawn_after, left_out))
        self.codes.append(Code(self._code, _lines(graph)))


def _lines(graph: Graph) -> tuple[str, ...]:
    """The code of a graph with shapes, as ``GraphModule.print_readable`` shows it, but for what ends its variables."""
    source = graph.python_code("self", verbose=True).src
    lines = (
        re.sub(r";(  \w+ =( \w+ =)*)+ None( *#.*)?$", "", line).removeprefix("    ") for line in source.split("\n")
    )
    return tuple(line.rstrip() for line in lines if line.strip() and line.strip() != _NOWHERE)


# --- what is around a head ------------------------------------------------------------------------------------


def _before(candidate: Candidate) -> tuple[Box, ...]:
    derived = set(candidate.derived) | {candidate.node}
    readers = {node for node, _ in candidate.readers}
    users = {user for node in derived for user in node.users}
    readers |= {user for user in users - derived if user.op != "output"}  # of a kept head, what has no rule too
    handles = [handle for handle, _ in candidate.operands]
    handles += [handle for _, reader in candidate.readers for handle in reader.operands]
    operands = {handle for handle in handles if isinstance(handle, Node) and _is_tensor(handle)}
    others = {user for node in readers for user in node.users} | {user for user in users if user.op == "output"}
    projections = [node for node in derived if not derived.intersection(node.all_input_nodes)]
    roles = _all(others, "other") | _all(operands, "operand") | _all(readers, "reader")
    return _boxes(candidate.node.graph, roles | _all(derived, "derived") | _all(projections, "projection"))


def _all(nodes: Iterable[Node], role: Role) -> dict[Node, Role]:
    return dict.fromkeys(nodes, role)


def _after(candidate: Candidate, graph: Graph, made: Iterable[Node]) -> tuple[Box, ...]:
    alive = set(graph.nodes)
    new = {node for node in made if node in alive and node.users}  # not the statistics that nobody asked for
    users = {user for node in new for user in node.users if user.users or user.op == "output"}
    sources = {source for node in new for source in node.all_input_nodes if _is_tensor(source)}
    fused = {node for node in new if _is_fused(node)}
    roles = _all(users, "other") | _all(sources, "operand") | _all(new, "other") | _all(fused, "fused")
    operands = dict.fromkeys(handle for handle, _ in candidate.operands if handle in alive)
    output = graph.output_node()
    if candidate.escaped:
        roles = _all(operands, "operand") | roles | {output: "other"}
    boxes = _boxes(graph, roles)
    small = {node.name for node in new - fused}
    outside = (output.name, *(node.name for node in operands if output not in node.users))
    for escaped in candidate.escaped:
        logits = _box(escaped.node, {escaped.node: "deferred"})
        boxes += (replace(logits, function="DeferredLogits", bytes=0, inputs=outside),)
    return _together(boxes, small)


def _is_tensor(node: Node) -> bool:
    return isinstance(example_of(node), torch.Tensor)


def _is_fused(node: Node) -> bool:
    name = compat.qualified_name(node.target) or ""
    return name.startswith("fxfuse.") and "check_index" not in name


def _boxes(graph: Graph, roles: Mapping[Node, Role]) -> tuple[Box, ...]:
    return tuple(_box(node, roles) for node in graph.nodes if node in roles)


def _box(node: Node, roles: Mapping[Node, Role]) -> Box:
    example = example_of(node)
    tensor = example if isinstance(example, torch.Tensor) else None
    given = node.op in ("placeholder", "get_attr", "output")
    # Of a node that is cut off from its place, what it is made of may be drawn all the same.
    inputs = dict.fromkeys(source.name for source in node.all_input_nodes if source in roles)
    own = not given and not any(storages(source) & storages(node) for source in node.all_input_nodes)
    return Box(
        name=node.name,
        function=_name(node),
        role=roles[node],
        shape="" if tensor is None else " × ".join(map(str, tensor.shape)) or "scalar",
        dtype="" if tensor is None else str(tensor.dtype).removeprefix("torch."),
        bytes=sum(_bytes(value) for value in tensors(example)) if own else 0,
        where=location(node) or "",
        inputs=tuple(inputs),
    )


def _name(node: Node) -> str:
    if node.op == "placeholder":
        return argument_name(node)
    if node.op == "output":
        return "return"
    return compat.qualified_name(node.target) or function_name(node)


def _bytes(tensor: torch.Tensor) -> int:
    size = tensor.element_size()
    for length in tensor.shape:
        size *= compat.hint(length) if compat.is_known(length) else 0
    return size


# --- small enough to be looked at -----------------------------------------------------------------------------


def _together(boxes: tuple[Box, ...], small: set[str]) -> tuple[Box, ...]:
    """``boxes`` with one in place of every few of ``small`` that are next to each other.

    Only such as are all before, or all after, the ops of fxfuse: none is both.
    """
    late: set[str] = set()
    for box in boxes:
        if box.role == "fused" or late.intersection(box.inputs):
            late.add(box.name)
    beside = _beside(boxes, lambda a, b: {a, b} <= small and (a in late) == (b in late))
    groups: dict[str, list[str]] = {}
    for box in boxes:
        if box.name not in groups:
            group = _reached(box.name, beside)
            for name in group:
                groups[name] = group if len(group) >= _TOGETHER else [name]
    merged: dict[str, list[Box]] = {}
    for box in boxes:
        key = groups[box.name][0]
        merged[key] = [*merged.pop(key, []), box]  # in the place of its last
    return tuple(_one(key, several, {n: groups[n][0] for n in groups}) for key, several in merged.items())


def _one(name: str, boxes: list[Box], names: Mapping[str, str]) -> Box:
    inputs = tuple(dict.fromkeys(names[source] for box in boxes for source in box.inputs if names[source] != name))
    if len(boxes) == 1:
        return replace(boxes[0], inputs=inputs)
    size = sum(box.bytes for box in boxes)
    function = f"{len(boxes)} small operations" if len(boxes) > 2 else " → ".join(box.function for box in boxes)
    return Box(name, function, "other", bytes=size, inputs=inputs, count=len(boxes))


def _nearest(boxes: tuple[Box, ...], centre: Role) -> tuple[Box, ...]:
    """The ``LIMIT`` of ``boxes`` that are fewest edges away from the first of the role ``centre``."""
    if len(boxes) <= LIMIT:
        return boxes
    start = next((box.name for box in boxes if box.role == centre), boxes[0].name)
    near = set(_reached(start, _beside(boxes, lambda a, b: True))[:LIMIT])
    return tuple(
        replace(box, inputs=tuple(name for name in box.inputs if name in near)) for box in boxes if box.name in near
    )


def _beside(boxes: Iterable[Box], counts: Callable[[str, str], bool]) -> dict[str, list[str]]:
    """The names of the boxes that an edge which ``counts`` leads to or from, for each box."""
    beside: dict[str, list[str]] = {box.name: [] for box in boxes}
    for box in boxes:
        for source in box.inputs:
            if counts(box.name, source):
                beside[box.name].append(source)
                beside[source].append(box.name)
    return beside


def _reached(start: str, beside: Mapping[str, Sequence[str]]) -> list[str]:
    """``start`` and what can be reached from it, the nearest first."""
    found = {start: None}
    queue = [start]
    for name in queue:
        fresh = [other for other in beside[name] if other not in found]
        found |= dict.fromkeys(fresh)
        queue += dict.fromkeys(fresh)
    return queue
