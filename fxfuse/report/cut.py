"""Single heads, cut out of a graph while that is compiled, to be run alone: for ``--measure``.

A head is its projection, what is derived of the logits and what reads them; its operands are the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.split_module import split_module

from .. import compat
from ..mutation import Region, example_of, regions
from .source import function_name

if TYPE_CHECKING:
    from ..candidate import Candidate

_CASTS = ("to", "float", "type", "double", "half", "bfloat16")


@dataclass(frozen=True)
class Operand:
    """A tensor that a head is given, as it was when the graph was captured. Dynamic sizes are their hints.

    ``below``: what its values must be smaller than, if it holds indices.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    below: int = 0

    def make(self) -> Tensor:
        """Random values: class indices in range, or numbers that a program can divide by and take logarithms of."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        made = torch.empty(last + 1, dtype=self.dtype, device=self.device)  # of which several elements may be one
        if self.dtype == torch.bool:
            made.bernoulli_()
        elif not self.dtype.is_floating_point:
            made.random_(0, max(self.below, 1))
        elif len(self.shape) > 1:
            made.normal_(std=self.shape[-1] ** -0.25)  # so that logits are of the size of one
        else:
            made.uniform_(0.5, 1.5)
        return made.as_strided(self.shape, self.strides).requires_grad_(self.requires_grad)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Cut:
    """One head alone.

    Attributes:
        program: from the operands to what reads the logits, then to the logits that the graph returns.
        readers: how many of the results are the former; gradients flow back from them.
        in_checkpoint: whether activation checkpointing is around it.
    """

    program: torch.nn.Module
    operands: tuple[Operand, ...]
    readers: int
    in_checkpoint: bool


class Mode(NamedTuple):
    """Grad mode, and the arguments of the ``torch.autocast`` around."""

    grad: bool
    autocast: tuple[Any, ...]


class _InMode(torch.nn.Module):
    """``part`` in a mode."""

    def __init__(self, part: torch.nn.Module, mode: Mode) -> None:
        super().__init__()
        self.part, self.mode = part, mode

    def forward(self, *args: Any) -> Any:
        with torch.set_grad_enabled(self.mode.grad), torch.autocast(*self.mode.autocast):
            return self.part(*args)


class Cutter:
    """Cuts the heads of one graph out: a ``records.Watcher``.

    Attributes:
        cuts: for each head, in the order of the sites; None where it was kept, or where nothing reads its logits.
    """

    def __init__(self) -> None:
        self.cuts: list[Cut | None] = []

    def analysed(self, graph: Graph, candidates: Sequence[Candidate], outside: Region | None) -> None:
        self._outside = outside
        self._start = len(self.cuts)

    def planned(self, candidates: Sequence[Candidate]) -> None:
        self.cuts[self._start :] = [
            None if candidate.kept or not candidate.readers else _cut(candidate, self._outside)
            for candidate in candidates
        ]

    def rewritten(self, graph: Graph, made: Mapping[Candidate, Sequence[Node]]) -> None:
        pass


def _cut(candidate: Candidate, outside: Region | None) -> Cut:
    graph = candidate.node.graph
    readers = list(dict.fromkeys(node for node, _ in candidate.readers))
    results = list(dict.fromkeys([*readers, *(escaped.node for escaped in candidate.escaped)]))
    inside = _inside(graph, {*candidate.derived, *readers})
    classes = min(compat.hint(reader.source.vocab) for _, reader in candidate.readers)
    own = Graph()
    copies: dict[Node, Any] = {}
    operands: list[Operand] = []
    for node in graph.nodes:
        users = [user for user in node.users if user in inside]
        if node in inside or not users:
            continue
        example = example_of(node)
        if isinstance(example, Tensor):
            copies[node] = own.placeholder(f"operand_{len(operands)}")
            operands.append(_operand(example, users, classes))
        else:
            copies[node] = compat.hint(example) if isinstance(example, torch.SymInt) else example
    modes: list[Mode] = []
    parts: dict[Node, int] = {}
    for node, region in regions(graph, outside):
        if node in inside:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            # Without its meta, which holds the example values of all of the graph.
            copies[node] = own.create_node(node.op, node.target, args, kwargs)
            mode = Mode(region.makes_gradients, region.autocast_of(operands[0].device.type))
            if not modes or mode != modes[-1]:
                modes.append(mode)
            parts[copies[node]] = len(modes) - 1
    own.output(tuple(copies[node] for node in results))
    program = GraphModule(torch.nn.Module(), own)
    if modes != [Mode(True, (operands[0].device.type, None, False, None))]:
        split = split_module(program, program, parts.__getitem__)
        for number, mode in enumerate(modes):
            part = getattr(split, f"submod_{number}")
            # Made anew, as Dynamo does not look into one that writes its code when it is first called.
            setattr(split, f"submod_{number}", _InMode(GraphModule(part, part.graph), mode))
        program = GraphModule(split, split.graph)
    return Cut(program, tuple(operands), len(readers), outside is not None)


def _inside(graph: Graph, wanted: set[Node]) -> set[Node]:
    """``wanted``, what is between them, and what reads them cannot do without the making of: one-hot rows, ranges."""
    later: set[Node] = set()
    for node in graph.nodes:
        if later.intersection(node.all_input_nodes) or node in wanted:
            later.add(node)
    inside: set[Node] = set()
    for node in reversed(graph.nodes):
        used = any(user in inside for user in node.users)
        if node in wanted or (used and (node in later or _is_made_here(node))):
            inside.add(node)
    return inside


def _is_made_here(node: Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    if function_name(node) in _CASTS:
        return isinstance(node.args[0], Node) and _is_made_here(node.args[0])
    one_hot = node.target is torch.nn.functional.one_hot
    return one_hot or not any(isinstance(example_of(n), Tensor) for n in node.all_input_nodes)


def _operand(example: Tensor, users: Sequence[Node], classes: int) -> Operand:
    below = classes
    for user in users:
        if function_name(user) in ("getitem", "index_select", "index"):  # of classes or of rows: fits both
            indexed = user.args[0]
            sizes = example_of(indexed).shape if isinstance(indexed, Node) else ()
            below = min([below, *map(compat.hint, sizes)])
    return Operand(
        tuple(map(compat.hint, example.shape)),
        tuple(map(compat.hint, example.stride())),
        example.dtype,
        example.device,
        example.requires_grad,
        below,
    )
