"""Logits that a compiled graph returns: the graph returns their hidden states instead, and the caller makes
``DeferredLogits`` of these after every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from . import compat
from .algebra import ClassTensor, Logits, quickly_replace
from .defer import defer
from .deferred import DeferredLogits
from .eager import dense
from .mutation import Timeline, called, example_of, is_one_of_several, is_pure, storages
from .replay import Emit
from .report.chain import Way
from .report.records import Site
from .report.source import called_from, function_name, location
from .rules import IN_PLACE, TABLE

# Functions or names of methods, each with the arguments that follow the tensor.
Chain = tuple[tuple[Any, tuple[Any, ...], Mapping[str, Any]], ...]


def chain_between(base: Node, view: Node) -> Chain | None:
    """How ``view`` is made of ``base``, if by functions of the table and numbers alone."""
    steps: list[Any] = []
    while view is not base:
        function = called(view)
        if (function not in TABLE and function not in IN_PLACE) or not view.args or not isinstance(view.args[0], Node):
            return None
        if function not in IN_PLACE:  # else it is its argument, which is by now what was written
            if len(view.all_input_nodes) != 1:
                return None
            steps.append((function, view.args[1:], view.kwargs))
        view = view.args[0]
    return tuple(reversed(steps))


def _follow(tensor: Tensor, chain: Chain) -> Tensor:
    for function, args, kwargs in chain:
        method = isinstance(function, str)
        tensor = getattr(tensor, function)(*args, **kwargs) if method else function(tensor, *args, **kwargs)
    return tensor


@dataclass(frozen=True, eq=False)
class Escaped:
    """Logits that are returned: the node, what it is, and the node after which it is that.

    ``views`` are other nodes that are returned and have the same memory, each with how to make it of the first, which
    itself need not be returned then.
    """

    node: Node
    value: ClassTensor
    made: Node
    views: tuple[tuple[Node, Chain], ...] = ()

    def nodes(self) -> set[Node]:
        return {self.node, *(node for node, _ in self.views)}


class _Place(NamedTuple):
    """Where an operand is: in what the graph is given, or returns in the logits' place or after everything else."""

    among: Literal[0, 1]
    position: int


@dataclass(frozen=True)
class Escape:
    """How to make returned logits of what the graph is given and returns.

    Attributes:
        positions: of the logits in what the graph returned.
        value: the logits, with the rows' operations done already and no operands.
        operands: where each of the head's is that it has.
        filled: where that is which the head calls so, if it has it.
        strides: of what eager returns; None if it is contiguous and they are not known.
        exposed: whether something else has the memory of the hidden states: the caller, or another output.
        views: positions of views of the logits, and how each is made.
        bypassed: whether the graph reads them too, so that not all of their gradient passes through what is returned.
        way: how they came to be, for the report; None where that is not known.
    """

    positions: tuple[int, ...]
    value: Logits
    operands: Mapping[str, _Place]
    filled: _Place | None
    strides: tuple[int, ...] | None
    exposed: bool
    views: tuple[tuple[tuple[int, ...], Chain], ...]
    bypassed: bool
    way: Way | None = None


def why_not(escaped: Escaped, operands: Sequence[tuple[Any, Node]], timeline: Timeline) -> str:
    """Why logits cannot be computed later from ``operands``, each with the node that reads it; empty if they can."""
    value, head = escaped.value, escaped.value.head
    output = escaped.node.graph.output_node()
    if not isinstance(value, Logits):
        return "normalised"
    if not value.classes_last:
        return "with the vocabulary not last"
    if value.row_shifts:
        return "with something added that has no entry for each class"
    if value.extends_filled:
        return "masked and then with a temperature for each row"
    nodes = [escaped.node, *(node for node, _ in escaped.views)]
    if any(example_of(node).requires_grad != value.requires_grad for node in nodes):
        return "as a view that was made under no_grad"
    others = {node for node in output.all_input_nodes if node not in escaped.nodes()}
    if any(storages(node) & storages(escaped.node) for node in others):
        return "beside a view of them"
    operands = [
        (operand, at)
        for operand, at in operands
        if isinstance(operand, Node) and isinstance(example_of(operand), Tensor)
    ]
    read = [operand for operand, _ in operands]
    # What is returned beside an operand becomes a view of it, or of what it is a view of; and so does the operand.
    beside = [node for node in others if any(storages(node) & storages(operand) for operand in read)]
    if any(map(_hides_gradients, [*beside, *(read if value.requires_grad else ())])):
        return "of, or beside, a view that has a hook or a backward of its own, or none"
    if any(function_name(node) == "set_" for node in output.graph.nodes):
        return "from a graph that assigns to .data"  # what shared memory before can no longer be told
    for operand, read_at in operands:
        if operand is not head.input and _has_other_versions(operand, others):
            which = "a weight" if operand in (head.weight, head.bias) else "an index or a number"
            return f"of {which} of which others have views with versions of their own"
        writer = timeline.write_between(operand, read_at, output)
        if writer is not None:
            return f"after {function_name(writer)} has changed an operand"
        if timeline.unplaced_write(operand):
            return "and an operation changes an operand"
    if _strides(escaped.node) is None and not _is_contiguous(escaped.node):
        return "with symbolic strides"
    rows = math.prod(map(compat.hint, value.shape[:-1]))
    made = any(op.copies_weight for op in value.class_ops)
    if (made or not _is_given(head.weight)) and compat.hint(value.hidden) > rows:
        return "fewer than the weight, which is computed in the graph"
    return ""


def _hides_gradients(returned: Node) -> bool:
    """Whether gradients of what is returned are changed, or end, on their way to memory of which it is a view.

    What a graph returns of memory that it was given, or returns twice, AOTAutograd makes anew as a view of that, with
    a view's gradient: it leaves out hooks and ``torch.autograd.Function``s that have no memory of their own.
    """
    example, memory, node, has_hook = example_of(returned), storages(returned), returned, False
    made = example
    while isinstance(example, Tensor) and example.requires_grad and node.op in ("call_function", "call_method"):
        made_of = node.args[0] if node.args else None
        is_hook = function_name(node) == "register_hook"
        if is_hook or is_one_of_several(node):
            has_hook |= is_hook
            node = made_of  # type: ignore[assignment]
            continue
        sources = [argument for argument in node.all_input_nodes if storages(argument) & memory]
        if not (node.op == "call_method" or is_pure(node.target)):
            return bool(sources) or (example._is_view() and _changes_gradients(node))
        has_hook |= any(function_name(user) == "register_hook" for user in node.users)
        if isinstance(example_of(node), Tensor):  # else it was one of several
            made = example_of(node)
        if has_hook or not sources or (made.is_leaf and made._is_view()):  # under no_grad: none goes past it
            return bool(sources)
        node = sources[0]
    return False


def _changes_gradients(node: Node) -> bool:
    """Whether there are hooks or ``torch.autograd.Function``s in the graphs that a node runs."""
    if function_name(node) in ("register_hook", "autograd_function_apply"):
        return True
    owner = node.graph.owning_module
    bodies = (getattr(owner, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr")
    return any(_changes_gradients(n) for body in bodies if isinstance(body, GraphModule) for n in body.graph.nodes)


def _has_other_versions(weight: Node, others: Set[Node]) -> bool:
    """Whether a write to the memory of a weight may not show in its version.

    It was taken by ``.data``, in the graph or before; or it is computed in the graph and returned too, for what
    compiled code returns in one memory need not have one version.
    """
    by_data = (node for node in weight.graph.nodes if function_name(node) == "_get_data_attr")
    returned = () if _is_given(weight) else others - {weight}
    given = (node for node in weight.graph.find_nodes(op="placeholder") if _overlap_apart(node, weight))
    return any(storages(node) & storages(weight) for node in (*by_data, *returned, *given))


def _overlap_apart(one: Node, other: Node) -> bool:
    """Whether two tensors, if they are in one storage, may have elements in common, and are no views of one tensor."""
    a, b = example_of(one), example_of(other)
    if not isinstance(a, Tensor) or compat.viewed(a) is compat.viewed(b):
        return False
    (first, end), (others_first, others_end) = map(_extent, (a, b))
    return not (compat.is_less(end, others_first + 1) or compat.is_less(others_end, first + 1))


def _extent(tensor: Tensor) -> tuple[Any, Any]:
    """Of its storage, the first element that a tensor has and the one after its last."""
    first = tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, last + 1


def _is_contiguous(node: Node) -> bool:
    """Whether eager returns it contiguous, for certain."""
    example, expected = example_of(node), 1
    for size, stride in zip(reversed(example.shape), reversed(example.stride()), strict=True):
        if not compat.same(stride, expected) and not compat.same(size, 1):
            return False
        expected = expected * size
    return True


def _strides(node: Node) -> tuple[int, ...] | None:
    """The strides of what eager returns, where they are numbers."""
    strides = tuple(example_of(node).stride())
    return strides if all(isinstance(stride, int) for stride in strides) else None


def _is_given(node: Node) -> bool:
    """Whether a node is an argument of the graph or a view of one, so that returning it takes no memory."""
    given = (n for n in node.graph.nodes if n.op in ("placeholder", "get_attr"))
    return any(storages(node) & storages(argument) for argument in given)


def send_out(escaped: Escaped, emit: Emit, output: Node, bypassed: bool, way: Way | None) -> Escape:
    """Return the operands of ``escaped`` from the graph instead of it; ``bypassed`` and ``way`` as in ``Escape``."""
    value, head = escaped.value, escaped.value.head
    arguments = [node for node in output.graph.nodes if node.op == "placeholder"]
    (results,) = output.args
    assert isinstance(results, (tuple, list))
    returned = list(results)

    def positions_of(node: Node) -> tuple[int, ...]:
        return tuple(i for i, other in enumerate(results) if other is node)

    positions = positions_of(escaped.node)
    views = tuple((positions_of(view), chain) for view, chain in escaped.views)
    weight, bias = value.classes(emit) if value.class_ops else (head.weight, head.bias)

    def cut(operand: Node) -> Node:
        """Without a gradient where the logits have none: else there would be a backward of what is before it."""
        is_cut = operand in arguments or not example_of(operand).requires_grad
        return operand if is_cut or value.requires_grad else emit(Tensor.detach, operand)

    operands = {"input": value.hidden_states(emit), "weight": weight, "bias": bias, "filled": value.filled(emit)}
    operands = {name: cut(operand) for name, operand in operands.items() if operand is not None}
    input = operands["input"]
    others = (*arguments, *(n for n in output.all_input_nodes if n not in escaped.nodes()))
    exposed = any(storages(input) & storages(node) for node in others)
    for i in (*positions, *(i for places, _ in views for i in places)):
        returned[i] = input

    def place(operand: Node) -> _Place:
        if operand in arguments:
            return _Place(0, arguments.index(operand))
        if operand not in returned:
            returned.append(operand)
        return _Place(1, returned.index(operand))

    places = {name: place(operand) for name, operand in operands.items()}
    filled = places.pop("filled", None)
    output.args = (tuple(returned),)
    transposed = head.weight_transposed and not value.class_ops
    bare = replace(head, input=None, weight=None, bias=None, weight_transposed=transposed)
    bare = replace(bare, hidden=value.hidden, vocab=value.vocab, wide_bias=value.adds_to_classes)
    logits: Any = replace(value, head=bare, row_ops=(), class_ops=())
    return Escape(positions, logits, places, filled, _strides(escaped.node), exposed, views, bypassed, way)


def restored(
    run: Callable[..., Any],
    count: int,
    escapes: Sequence[tuple[Escape, Site]],
    unread: Sequence[int],
    least: int,
    memory: int,
) -> Callable[..., Any]:
    """``run``, a compiled graph, with ``DeferredLogits`` among the ``count`` tensors that it returns.

    Args:
        run: takes the arguments of the graph, and returns its results with hidden states where logits were.
        count: how many of its results the program knows; those after them are operands of ``escapes``.
        escapes: which results are to be logits again, of what, and what the report says of them.
        unread: positions of arguments that ``run`` gets detached. Else the gradient of a weight that nothing but logits
            is made of would be ready, for a hook or DistributedDataParallel, when all that is compiled has its own.
        least: logits of fewer bytes are computed at once.
        memory: the option ``fxfuse.memory``.
    """

    run = compat.undisabled(run)  # Dynamo disables ``call``
    are_known = [all(isinstance(size, int) for size in escape.value.shape) for escape, _ in escapes]

    def call(*args: Any) -> list[Any]:
        given = list(args)
        for i in unread:
            given[i] = given[i].detach()
        results = list(run(*given))
        both = args, results
        made = []
        for (escape, site), known in zip(escapes, are_known, strict=True):
            value = escape.value
            if escape.filled is not None:
                among, position = escape.filled
                value = quickly_replace(value, head=value.head.of(filled=both[among][position]))
            operands = {name: both[among][position] for name, (among, position) in escape.operands.items()}
            head, input = value.head.of(**operands), operands["input"]
            shape = *input.shape[:-1], head.vocab
            if not (known and shape == value.shape):
                value = quickly_replace(value, shape=shape)
            if compat.is_fake(input):
                made.append(dense(replace(value, head=head)))
            else:
                rest = escape.strides, escape.exposed, escape.bypassed, escape.way
                made.append(defer(value, head, site, least, memory, *rest))
        for (escape, _), logits in zip(escapes, made, strict=True):
            for i in escape.positions:
                results[i] = logits
            for places, chain in escape.views:
                with torch.set_grad_enabled(escape.value.requires_grad):
                    view = _follow(logits, chain)
                for i in places:
                    results[i] = view
        return results[:count]

    return call


def unread_with_gradients(graph: Graph) -> list[int]:
    """The positions of arguments that require gradients and that a graph does not read."""
    arguments = enumerate(graph.find_nodes(op="placeholder"))
    return [i for i, node in arguments if not node.users and getattr(example_of(node), "requires_grad", False)]


def first_reads(graph: Graph) -> list[str]:
    """For each argument of a graph, ``file.py:line`` of what takes it first; empty if nothing does."""
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    return [location(min(node.users)) or "" if node.users else "" for node in arguments]


def on_plain_tensors(run: Callable[..., Any], places: Sequence[str]) -> Callable[..., Any]:
    """``run``, a part of a graph that was split, which may be given what another part returned: with values put in.

    Compiled code reads memory and asks no ``__torch_function__``. ``places`` say where it reads each argument first.
    """

    def plain(arg: Any, place: str) -> Any:
        if not isinstance(arg, DeferredLogits):
            return arg
        with called_from(place):
            return arg.plain()

    def call(*args: Any) -> Any:
        # A place is only told: if one is missing, nothing must come of it.
        return run(*(plain(arg, place) for arg, place in zip_longest(args, places[: len(args)], fillvalue="")))

    return call
