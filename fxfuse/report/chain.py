"""The way from a projection to what reads its logits, in the words of the program."""

from __future__ import annotations

import inspect
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .. import errors
from ..mutation import tensors
from ..rules import IN_PLACE, TABLE
from .records import Ending, Site, Use
from .source import function_name, line_at, location, name_of

ARROW = " → "
_LONGEST = 28  # characters of an argument that are still shown
_ROOM = 60  # and of all arguments together

_SYMBOLS = {
    **{"mul": "*", "multiply": "*", "truediv": "/", "div": "/", "divide": "/", "true_divide": "/", "floordiv": "//"},
    **{"add": "+", "sub": "-", "subtract": "-", "matmul": "@", "pow": "**", "mod": "%"},
    **{"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
}
_COMMUTATIVE = ("*", "+", "*=", "+=")
# The names under which graphs have them, each with its symbol; and those of methods with swapped operands.
_OPERATORS = {name: symbol for base, symbol in _SYMBOLS.items() for name in (base, f"__{base}__", f"__r{base}__")}
_OPERATORS |= {
    name: f"{symbol}=" for base, symbol in _SYMBOLS.items() for name in (f"i{base}", f"{base}_", f"__i{base}__")
}
_SWAPPED = {f"__r{base}__" for base in _SYMBOLS}
# Functions whose arguments tell nothing beyond the shapes.
_PLAIN = ("view", "reshape", "flatten", "expand", "contiguous", "clone", "view_as", "reshape_as", "type_as")
# Arguments that matter although they have the default value, where the program says them.
_TELLING = ("ignore_index",)

# From an argument to its text, or None where it is a tensor without a name; and whether it is the logits.
TextOf = Callable[[Any], str | None]
IsLogits = Callable[[Any], bool]


# --- one step -------------------------------------------------------------------------------------------------


def step(
    function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], text_of: TextOf, is_logits: IsLogits
) -> str:
    """A call as people write it: ``"/ 0.7"``, ``"[..., :-1, :]"``, ``"cross_entropy(ignore_index=-100)"``."""
    if name in _OPERATORS and len(args) == 2 and not kwargs:
        return _operation(name, args[0], args[1], text_of, is_logits)
    if name in ("getitem", "__getitem__") and len(args) == 2:
        return _index(args[1], text_of)
    if name in ("setitem", "__setitem__") and len(args) == 3:
        return f"{_index(args[1], text_of)} = {_text(args[2], text_of)}"
    if name == "getattr" and len(args) == 2:
        return f".{args[1]}"
    shown = "" if name in _PLAIN else ", ".join(_arguments(function, args, kwargs, text_of))
    return f"{_bare(name)}({shown})" if shown else _bare(name)


def _operation(name: str, first: Any, second: Any, text_of: TextOf, is_logits: IsLogits) -> str:
    symbol = _OPERATORS[name]
    if name in _SWAPPED:
        first, second = second, first
    if is_logits(first) or not is_logits(second):
        return f"{symbol} {_text(second, text_of)}"
    other = _text(first, text_of)
    return f"{symbol} {other}" if symbol in _COMMUTATIVE else f"{other} {symbol}"


def word(name: str) -> str:
    """The name of a function without its arguments: ``"/"`` of ``"__truediv__"``."""
    return "[…]" if name in ("getitem", "__getitem__") else _OPERATORS.get(name, _bare(name))


def _bare(name: str) -> str:
    return name.strip("_") if name.startswith("__") else name


def _arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], text_of: TextOf) -> Iterator[str]:
    """The arguments that say more than the name of the function does, as far as there is room."""
    room = _ROOM
    for text in _all_arguments(function, args, kwargs, text_of):
        room -= len(text) + 2
        yield text if room >= 0 else "…"
        if room < 0:
            return


def _all_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], text_of: TextOf) -> Iterator[str]:
    signature = _signature(function)
    try:
        given = None if signature is None else signature.bind(*args, **kwargs).arguments
    except TypeError:
        given = None
    if signature is None or given is None:
        yield from (text for text in (_literal(arg, text_of) for arg in args) if text)
        yield from (f"{name}={_text(arg, text_of)}" for name, arg in kwargs.items() if not _is_last(name, arg))
        return
    for name, value in given.items():
        parameter = signature.parameters[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            yield from (text for text in (_literal(arg, text_of) for arg in value) if text)
        elif parameter.kind is parameter.VAR_KEYWORD:
            yield from (f"{key}={_text(arg, text_of)}" for key, arg in value.items())
        elif name.startswith("_") or _is_last(name, value):
            continue
        elif parameter.default is parameter.empty:
            text = _literal(value, text_of)
            if text:
                yield text
        elif name in _TELLING or not (value is parameter.default or _equal(value, parameter.default)):
            yield f"{name}={_text(value, text_of)}"


def _is_last(name: str, value: Any) -> bool:
    """Whether an argument only says that a function works along the vocabulary, where it is last."""
    (value,) = value if isinstance(value, (tuple, list)) and len(value) == 1 else (value,)
    return name in ("dim", "axis") and type(value) is int and value == -1


def _equal(value: Any, default: Any) -> bool:
    return type(value) in (int, float, str, bool) and bool(value == default)


def _signature(function: Any) -> inspect.Signature | None:
    """How the arguments of a function are called, if that is known."""
    try:
        row = TABLE.get(function) or IN_PLACE.get(function)
    except TypeError:  # it cannot be a key
        row = None
    if isinstance(function, types.FunctionType):
        return inspect.signature(function)
    return None if row is None else row.signature


def _literal(value: Any, text_of: TextOf) -> str:
    """The text of a required argument; empty for a tensor, which the function's name stands for."""
    if isinstance(value, (tuple, list)) and any(isinstance(item, (Tensor, Node)) for item in value):
        return ""
    return "" if isinstance(value, Tensor) or (isinstance(value, Node) and _is_tensor(value)) else _text(value, text_of)


def _is_tensor(node: Node) -> bool:
    return any(True for _ in tensors(node.meta.get("example_value")))


def _text(value: Any, text_of: TextOf) -> str:
    text = _full_text(value, text_of)
    return text if len(text) <= _LONGEST else "…"


def _full_text(value: Any, text_of: TextOf) -> str:
    if isinstance(value, (Node, Tensor)):
        return text_of(value) or "…"
    if isinstance(value, slice):
        parts = ["" if part is None else _text(part, text_of) for part in (value.start, value.stop, value.step)]
        return ":".join(parts[: 2 if value.step is None else 3])
    if isinstance(value, (tuple, list)):
        inside = ", ".join(_text(item, text_of) for item in value)
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    if value is Ellipsis:
        return "..."
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    known = value is None or isinstance(value, (bool, int, torch.SymInt, torch.SymFloat, torch.device))
    return str(value) if known else "…"


def _index(index: Any, text_of: TextOf) -> str:
    entries = index if isinstance(index, tuple) else (index,)
    inside = ", ".join(_text(entry, text_of) for entry in entries)
    return f"[{inside}]" if len(inside) <= _LONGEST else "[…]"


# --- steps of a graph -------------------------------------------------------------------------------------------


def uses_of(
    projections: Mapping[Node, str], flow: Sequence[Node], carries: Callable[[Node], bool], ending: Ending | None
) -> tuple[str, tuple[Use, ...]]:
    """How a graph uses the logits of a head: in one line, and one by one.

    Args:
        projections: the nodes that make the logits, each with its name.
        flow: every other node that takes logits, or what has an entry for each class of them.
        carries: whether such a node returns that again.
        ending: of the graph, if known.
    """
    flow = sorted(dict.fromkeys(flow))  # in the order of the graph
    walk = _Walk(projections, flow, carries)
    found = Counter((walk.steps(node), location(node) or "", False) for node in walk.ends())
    for node in (*projections, *flow):
        if carries(node) and any(user.op == "output" for user in node.users):
            end = "graph break" if ending is not None and ending.is_break else "return"
            found[(*walk.steps(node), end), ending.where if ending is not None else "", True] += 1
    vocab = _last_size(next(iter(projections)))
    uses = tuple(
        Use(ARROW.join(steps), where, line_at(where), count, leaves, vocab)
        for (steps, where, leaves), count in found.items()
    )
    return _joined([steps for steps, _, _ in found]), uses


def _last_size(node: Node) -> int | str:
    size = next((tensor.shape[-1] for tensor in tensors(node.meta["example_value"]) if tensor.dim()), 0)
    return size if isinstance(size, int) else str(size)


class _Walk:
    """Walks back from nodes to the projection that they come from."""

    def __init__(self, projections: Mapping[Node, str], flow: Sequence[Node], carries: Callable[[Node], bool]) -> None:
        self.projections, self.flow, self.carries = projections, dict.fromkeys(flow), carries
        self.writes: dict[Node, list[Node]] = {}  # by what they write to
        for node in flow:
            if node.target in IN_PLACE and isinstance(node.args[0], Node):
                self.writes.setdefault(node.args[0], []).append(node)

    def ends(self) -> list[Node]:
        """What reads the logits for the last time: nothing that takes what it returns reads more of them."""
        ends: dict[Node, None] = {}
        for node in self.flow:
            if self.carries(node) or not node.users or not _is_tensor(node):
                continue
            if not any(user in self.flow for user in node.users):
                ends[self._whole(node)] = None
        return list(ends)

    def _whole(self, node: Node) -> Node:
        """The call of which a node is one of the results."""
        source = node.all_input_nodes[0]
        return source if isinstance(source.meta.get("example_value"), (tuple, list)) else node

    def steps(self, node: Node) -> tuple[str, ...]:
        steps: list[str] = []
        while node not in self.projections:
            source = self._source(node)
            if source is None:
                break
            if self._whole(node) is node:
                steps.append(self._step(node))
            steps += (self._step(write) for write in reversed(self.writes.get(source, ())) if write < node)
            node = source
        return (*([self.projections[node]] if node in self.projections else []), *reversed(steps))

    def _source(self, node: Node) -> Node | None:
        sources = [n for n in node.all_input_nodes if n in self.flow or n in self.projections]
        return next((n for n in sources if self.carries(n) or n in self.projections), next(iter(sources), None))

    def _step(self, node: Node) -> str:
        source = self._source(node)

        def text_of(argument: Any) -> str | None:
            if argument in self.projections:
                return self.projections[argument]
            if argument in self.flow:
                return None if function_name(argument) in _OPERATORS else word(function_name(argument))
            return text_of_node(argument)

        text = step(
            node.target, function_name(node), node.args, node.kwargs, text_of, lambda argument: argument is source
        )
        others = [
            self.steps(n) for n in node.all_input_nodes if n is not source and (n in self.flow or n in self.projections)
        ]
        named = [ARROW.join(steps) for steps in others if source and steps and steps[0] != self.steps(source)[0]]
        return f"{text} with ({named[0]})" if named else text


def chain_of(
    site: Site, trail: Sequence[str], function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """The chain to a call that reads deferred logits of ``site``, which went through the functions ``trail``."""
    projection = site.chain.partition(ARROW)[0]
    logits = next((argument for argument in args if isinstance(argument, Tensor)), None)
    try:
        last = step(function, name, args, kwargs, lambda _: None, lambda argument: argument is logits)
    except Exception as failure:  # which is no reason to stop a training
        warnings.warn(errors.not_told(failure), stacklevel=2)
        last = word(name)
    return ARROW.join((projection, *map(word, trail[1:]), last))


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
    found: dict[Node, tuple[list[Node], Node]] = {}
    for node in graph.nodes:
        row = _row(node)
        if row is None or row.reads != "loss":
            continue
        path = [node]
        while path[-1].op != "placeholder" and _row(path[-1]) is not None and path[-1].all_input_nodes:
            path.append(path[-1].all_input_nodes[0])
        given = path.pop()
        if given.op == "placeholder" and _is_tensor(given):
            for earlier in path[1:]:
                found.pop(earlier, None)
            found[node] = path, given
    uses = []
    for node, (path, given) in found.items():
        walk = _Walk({given: name_of(given) or "logits"}, path, lambda _: True)
        where = location(node) or ""
        uses.append(Use(ARROW.join(walk.steps(node)), where, line_at(where), vocab=_last_size(given)))
    return tuple(uses)


def _row(node: Node) -> Any:
    if node.op not in ("call_function", "call_method"):
        return None
    try:
        return TABLE.get(node.target)
    except TypeError:
        return None
