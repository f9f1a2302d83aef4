"""Which nodes of a Dynamo graph write to which storage, and where grad mode and the like change."""

from __future__ import annotations

import bisect
import functools
import inspect
import operator
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map_only

from .compat import Versions, fake_mode_of, is_autocast_enabled, is_known, operator_tags, schemas, storage
from .originals import is_own

_INPLACE_OPERATORS = frozenset(
    (
        *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod),
        *(operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor),
        *(operator.ilshift, operator.irshift, operator.iconcat, operator.setitem),
    )
)
_INPLACE_METHODS = frozenset(f"__{function.__name__}__" for function in _INPLACE_OPERATORS)
# Functions that update buffers which they are given, with nothing in their name or schema to tell.
_UPDATING = ("batch_norm", "instance_norm")
_PURE_MODULES = ("torch", "_operator", "operator", "builtins", "math")
# Of what is made of so many nodes one after the other nothing is found out, so that Python's stack suffices.
DEEPEST = 50
_PLAIN_CALLABLES = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)


def called(node: Node) -> Any:
    """The function, or the name of the method, that a node calls; None if that cannot be looked up, or is not PyTorch's
    or Python's own.
    """
    target: Any = node.target
    if node.op not in ("call_function", "call_method"):
        return None
    try:
        hash(target)
    except TypeError:
        return None
    return target if all(map(is_own, _meant_by(target))) else None


def _meant_by(target: Any) -> list[Any]:
    """What is called as ``target``: a method by its name, and a method is what most operators call."""
    if isinstance(target, str):
        return [getattr(torch.Tensor, target, None)]
    name = target.__name__.strip("_") if getattr(target, "__module__", None) == operator.add.__module__ else ""
    return [target, *(getattr(torch.Tensor, f"__{each}__", None) for each in (name, f"r{name}"))]


def example_of(handle: Any) -> Any:
    """The example value of a node; anything else as it is."""
    return handle.meta.get("example_value") if isinstance(handle, Node) else handle


def is_one_of_several(node: Node) -> bool:
    """Whether a node is one of the results of the call that is its first argument."""
    return node.target is operator.getitem and isinstance(example_of(node.args[0]), (tuple, list))


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a nest of tuples and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def storages(node: Node) -> set[int]:
    """The storages that a node's value lives in."""
    found = {storage(t) for t in tensors(example_of(node))}
    if "dropout" in getattr(called(node), "__name__", ""):  # returns its input where it drops none; examples do not
        found.update(*map(storages, node.all_input_nodes))
    return found - {None}  # type: ignore[return-value]


def is_inplace_name(name: str) -> bool:
    return name in _INPLACE_METHODS or (name.endswith("_") and not name.endswith("__"))


class Writes(NamedTuple):
    """The arguments that a call writes to. Not ``certain``: it may, as far as can be seen from outside."""

    arguments: list[Node]
    certain: bool = True


def writes(node: Node) -> Writes:
    """What a node writes to; perhaps all of its arguments, for a call that fxfuse cannot see into."""
    if node.op in ("placeholder", "get_attr", "output"):
        return Writes([])
    out = node.kwargs.get("out")
    written = [n for n in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(n, Node)]
    first = [n for n in node.args[:1] if isinstance(n, Node)]
    if node.op == "call_method":
        return Writes(written + first if is_inplace_name(str(node.target)) else written)
    if node.op != "call_function":
        return Writes(node.all_input_nodes, certain=False)
    if node.target in _INPLACE_OPERATORS:
        return Writes(first)
    if getattr(node.target, "__module__", None) == operator.add.__module__:  # and_ and not_ have a keyword's name
        return Writes([])
    found = schemas(node.target)
    if found is not None:
        return Writes(node.all_input_nodes if any(schema.is_mutable for schema in found) else written)
    name = getattr(node.target, "__name__", "")
    if is_inplace_name(name) or any(part in name for part in _UPDATING) or _asks_for_inplace(node):
        return Writes(node.all_input_nodes)
    return Writes(written) if is_pure(node.target) else Writes(node.all_input_nodes, certain=False)


def is_pure(target: Any) -> bool:
    """Whether a function without an in-place name is PyTorch's or Python's own, which then writes to nothing.

    A user's function that Dynamo was told not to look into, a higher-order operator or a NumPy call may write.
    """
    module = getattr(target, "__module__", None) or "torch"
    known = module.split(".")[0] in _PURE_MODULES and not module.startswith("torch._dynamo")
    return known and isinstance(target, _PLAIN_CALLABLES) and is_own(target)


# Conversions, and what is no operator of PyTorch's by its name.
_REPEATABLE = frozenset(("getitem", "long", "int", "bool", "mod", "and_", "or_", "invert"))
_UNREPEATABLE_TAGS = {
    torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output,
}  # fmt: skip


def is_repeatable(node: Node) -> bool:
    """Whether calling the function of a node once more returns the same tensor, and does nothing else."""
    example, target = example_of(node), called(node)
    if not isinstance(example, torch.Tensor) or not all(map(is_known, example.shape)) or writes(node) != Writes([]):
        return False
    if schemas(target) is not None or example.is_floating_point():  # another's operator; no labels, which may be dear
        return False
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name in _REPEATABLE:
        return True
    found = operator_tags(name) or operator_tags(name.strip("_"))  # of __eq__, say
    return found is not None and not found & _UNREPEATABLE_TAGS


@functools.cache
def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # most builtins tell nothing
        return None


def _asks_for_inplace(node: Node) -> bool:
    """Whether a call such as ``F.relu(x, inplace=True)`` works in place; ``F.embedding`` does under max_norm."""
    signature = _signature(node.target)
    try:
        given = signature.bind(*node.args, **node.kwargs).arguments if signature else {}
    except TypeError:
        return False
    return bool(given.get("inplace")) or given.get("max_norm") is not None


class Region(NamedTuple):
    """A stretch of nodes that run in the same modes.

    Attributes:
        number: which of the graph's stretches it is, counted from 0.
        levels: how many ``torch.func`` transforms are around them.
        autocast: the ``torch.autocast`` contexts that were entered since the graph began, or that which calls it, from
            the outermost on: the arguments of each, of which the first is a kind of device.
        grad: grad mode, last, and those that leaving the ``torch.inference_mode`` contexts around returns to.
        inference: which of these contexts keep gradients off, whatever grad mode says.
    """

    number: int
    levels: int
    autocast: tuple[tuple[Any, ...], ...]
    grad: tuple[bool, ...]
    inference: tuple[bool, ...]

    @classmethod
    def around(cls) -> Region:
        """What is around the caller, and so around the graph."""
        return cls(0, 0, (), (torch.is_grad_enabled(),), (torch.is_inference_mode_enabled(),))

    @property
    def makes_gradients(self) -> bool:
        return self.grad[-1] and not self.inference[-1]

    def autocast_of(self, device: str) -> tuple[Any, ...]:
        """The arguments of the ``torch.autocast`` for a kind of device."""
        entered = (given for given in reversed(self.autocast) if given[0] == device)
        on = is_autocast_enabled(device)
        return next(entered, (device, torch.get_autocast_dtype(device) if on else None, on, None))

    def has_autocast(self, device: str) -> bool:
        """Whether autocast is enabled for a kind of device."""
        given = self.autocast_of(device)
        return len(given) < 3 or bool(given[2])


def _region_after(node: Node, region: Region) -> Region:
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    inner = name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")
    if not (inner or name == "_set_grad_enabled" or "_enter_" in name or "_exit_" in name):
        return region
    autocast, grad, inference = region.autocast, region.grad, region.inference
    if name == "_enter_autocast":
        autocast = (*autocast, node.args)
    elif name == "_exit_autocast":
        autocast = autocast[:-1]
    elif name == "_set_grad_enabled":
        grad = (*grad[:-1], bool(node.args[0]))
    elif name == "_enter_inference_mode":
        grad, inference = (*grad, grad[-1] and not node.args[0]), (*inference, bool(node.args[0]))
    elif name == "_exit_inference_mode":
        grad, inference = grad[:-1], inference[:-1]
    return Region(region.number + 1, region.levels + inner, autocast, grad, inference)


def regions(graph: Graph, outside: Region | None = None) -> Iterator[tuple[Node, Region]]:
    """Every node, in order, with the region that it is in; one that switches a mode begins the next.

    ``outside`` is the region of the node that calls the graph, if another graph does.
    """
    region = Region.around() if outside is None else outside._replace(number=0)
    for node in graph.nodes:
        region = _region_after(node, region)
        yield node, region


def _version_of_results(node: Node) -> int:
    """The version of what one of PyTorch's functions returns, told by a call with other examples; else 0."""
    if node.op != "call_function" or not is_pure(node.target):
        return 0
    with fake_mode_of(next(tensors(example_of(node)), None)), torch.no_grad():
        examples = tree_map_only(Node, example_of, (node.args, node.kwargs))
        args, kwargs = tree_map_only(torch.Tensor, torch.empty_like, examples)
        try:
            results = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # of examples that are not like those that it was captured with, say
            return 0
    return max((result._version for result in tensors(results)), default=0)


class Timeline:
    """The order of a graph's nodes, the modes that they run in, and what is written between two of them."""

    def __init__(self, graph: Graph, outside: Region | None = None) -> None:
        self.position: dict[Node, int] = {}
        self.region: dict[Node, Region] = {}
        self._region_ends: list[Node] = []
        self._writes: dict[int, list[tuple[int, Node, bool]]] = {}  # position, writer, certain
        self._written_at: list[int] = []  # in order
        self._last_use: dict[Node, int] = {}
        self._versions = Versions(graph)
        self._born: dict[Node, int] = {}
        number = 0
        for position, (node, region) in enumerate(regions(graph, outside)):
            self.position[node] = position
            self._last_use.update(dict.fromkeys(node.all_input_nodes, position))
            if region.number != number:
                self._region_ends.append(node)
            self.region[node], number = region, region.number
            written = writes(node)
            if written.arguments:
                self._written_at.append(position)
            for key in {key for argument in written.arguments for key in storages(argument)}:
                self._writes.setdefault(key, []).append((position, node, written.certain))

    @property
    def switches(self) -> bool:
        """Whether any node switches a mode."""
        return bool(self._region_ends)

    def region_before(self, place: Node) -> Region:
        """The region just before ``place``, which may be a node that the timeline does not have."""
        node = place.prev
        while node not in self.region:
            node = node.prev
        return self.region[node]

    def end_of_region(self, node: Node) -> Node | None:
        """The next node that switches a mode, if any."""
        number = self.region[node].number
        return self._region_ends[number] if number < len(self._region_ends) else None

    def is_used_after(self, operand: Node, place: Node) -> bool:
        """Whether a node after ``place`` takes ``operand``."""
        return self._last_use.get(operand, -1) > self.position[place]

    def write_between(self, operand: Node, read: Node, place: Node) -> Node | None:
        """A node that may change ``operand`` between its being read by ``read`` and just before ``place``."""
        low, high = sorted((self.position[read], self.position[place] - 0.5))
        found = (writer for position, writer, _ in self._writes_to(operand) if low < position < high)
        return next(found, None)

    def any_write_between(self, place: Node, node: Node) -> bool:
        """Whether anything is written to from ``place`` on and before ``node``: arguments may share memory one day."""
        low, high = self.position[place], self.position[node]
        return bisect.bisect_left(self._written_at, low) < bisect.bisect_left(self._written_at, high)

    def write_after(self, operand: Node, place: Node) -> Node | None:
        """A node from ``place`` on that changes ``operand``, which a backward would then find changed."""
        low = self.position[place]
        found = (writer for position, writer, certain in self._writes_to(operand) if certain and position >= low)
        return next(found, None)

    def is_written(self, operand: Node) -> bool:
        """Whether anything in this graph may write to ``operand``."""
        return any(self._writes_to(operand)) or self.unplaced_write(operand)

    def writers(self, made: Node, before: Node) -> list[Node]:
        """The nodes that may change what ``made`` returned before ``before`` runs, in order."""
        first, last = self.position[made], self.position[before]
        found = {node: position for position, node, _ in self._writes_to(made) if first < position < last}
        return sorted(found, key=found.__getitem__)

    def _writes_to(self, operand: Node) -> Iterator[tuple[int, Node, bool]]:
        for key in storages(operand):
            yield from self._writes.get(key, ())

    def unplaced_write(self, operand: Node) -> bool:
        """Whether something in this graph wrote to ``operand`` that was not recognised as a write.

        An example value counts writes to itself and its views in its version, whatever made them.
        """
        seen = max(map(self._versions.of, tensors(example_of(operand))), default=0)
        known = sum(certain for _, _, certain in self._writes_to(operand))
        return seen > known and seen > known + self._born_with(operand)

    @functools.cached_property
    def _makers(self) -> dict[int, Node]:
        """The first node that has each storage."""
        makers: dict[int, Node] = {}
        for node in self.position:
            for key in storages(node):
                makers.setdefault(key, node)
        return makers

    def _born_with(self, operand: Node) -> int:
        """The version that the memory of ``operand`` has when it is new: ``gru_cell`` writes to its own result."""
        maker = min((self._makers[key] for key in storages(operand)), key=self.position.__getitem__)
        if maker not in self._born:
            self._born[maker] = _version_of_results(maker)
        return self._born[maker]
