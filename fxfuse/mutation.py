"""Which nodes of a Dynamo graph write to which storage, and where grad mode and the like change."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import Graph, Node

from .compat import storage

_INPLACE_OPERATORS = frozenset(
    (
        *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod),
        *(operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor),
        *(operator.ilshift, operator.irshift, operator.iconcat, operator.setitem),
    )
)


_WRITES_ANYTHING = SimpleNamespace(is_mutable=True)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a nest of tuples and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def storages(node: Node) -> set[int]:
    """The storages that a node's value lives in."""
    found = (storage(t) for t in tensors(node.meta.get("example_value")))
    return {key for key in found if key is not None}


def _is_inplace_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def written_arguments(node: Node) -> Iterable[Node]:
    """The arguments that a node writes to; all of them for a call that fxfuse cannot see into."""
    if node.op in ("placeholder", "get_attr", "output"):
        return ()
    out = node.kwargs.get("out")
    written = [n for n in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(n, Node)]
    first = [n for n in node.args[:1] if isinstance(n, Node)]
    if node.op == "call_method":
        return [*written, *first] if _is_inplace_name(str(node.target)) else written
    if node.op != "call_function":
        return node.all_input_nodes
    if node.target in _INPLACE_OPERATORS:
        return first
    schemas = _schemas(node.target)
    if schemas is not None:
        opaque = any(schema.is_mutable for schema in schemas)
    else:
        opaque = _is_inplace_name(getattr(node.target, "__name__", "")) or _asks_for_inplace(node)
    return node.all_input_nodes if opaque else written


def _schemas(target: Any) -> list[Any] | None:
    """The schemas of an operator; None for a plain function. A higher-order operator may write anything."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name)._schema for name in target.overloads()]
    if isinstance(target, torch._ops.OpOverload):
        return [target._schema]
    return [_WRITES_ANYTHING] if isinstance(target, torch._ops.OperatorBase) else None


def _asks_for_inplace(node: Node) -> bool:
    """Whether a call such as ``F.relu(x, inplace=True)`` works in place; ``F.embedding`` does under max_norm."""
    try:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return bool(given.get("inplace")) or given.get("max_norm") is not None


def _toggles_mode(node: Node) -> bool:
    """Whether a node switches grad mode, autocast, inference mode or a ``torch.func`` level."""
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and any(
        part in name for part in ("set_grad_enabled", "_enter_", "_exit_", "_nesting", "_set_tensor_requires_grad")
    )


class Timeline:
    """The order of a graph's nodes, and what happens to storages and modes between two of them."""

    def __init__(self, graph: Graph) -> None:
        self.position: dict[Node, int] = {}
        self.region: dict[Node, int] = {}
        self._writes: dict[int, list[tuple[int, Node]]] = {}
        self.region_ends: list[Node] = []
        for position, node in enumerate(graph.nodes):
            self.position[node] = position
            if _toggles_mode(node):
                self.region_ends.append(node)
            self.region[node] = len(self.region_ends)
            for written in written_arguments(node):
                for key in storages(written):
                    self._writes.setdefault(key, []).append((position, node))

    def end_of_region(self, node: Node) -> Node | None:
        """The next node that switches a mode, if any."""
        region = self.region[node]
        return self.region_ends[region] if region < len(self.region_ends) else None

    def write_between(self, operand: Node, start: Node, stop: Node) -> Node | None:
        """A node after ``start`` and before ``stop`` that may change ``operand``."""
        low, high = self.position[start], self.position[stop]
        for key in storages(operand):
            for position, writer in self._writes.get(key, ()):
                if low < position < high:
                    return writer
        return None

    def unplaced_write(self, operand: Node) -> bool:
        """Whether ``operand`` was written to by something in this graph that was not recognised as a write.

        An example value counts writes to itself and its views in its version, whatever made them.
        """
        example = operand.meta.get("example_value")
        versions = (t._version for t in tensors(example) if not t.is_inference())
        return any(versions) and not any(key in self._writes for key in storages(operand))
