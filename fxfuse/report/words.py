"""How one call is written in a chain: as people write it, with the arguments that matter."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..mutation import example_of, tensors
from ..rules import IN_PLACE, TABLE

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


@dataclass(frozen=True)
class Unnamed:
    """Stands for a tensor that has no name in the program and is gone."""

    what: str


_TENSORS = (Tensor, Unnamed)


def step(
    function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], text_of: TextOf, is_logits: IsLogits
) -> str:
    """A call as people write it: ``"/ 0.7"``, ``"[..., :-1, :]"``, ``"cross_entropy(ignore_index=-100)"``."""
    if name in _OPERATORS and len(args) == 2 and not kwargs:
        return _operation(name, args[0], args[1], text_of, is_logits)
    if name in ("getitem", "__getitem__") and len(args) == 2:
        return _index(args[1], text_of)
    if name == "setitem" and len(args) == 3:
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


def is_operator(name: str) -> bool:
    return name in _OPERATORS


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
    if isinstance(value, (tuple, list)) and any(isinstance(item, (*_TENSORS, Node)) for item in value):
        return ""
    unsaid = isinstance(value, _TENSORS) or (isinstance(value, Node) and is_tensor(value))
    return "" if unsaid else _text(value, text_of)


def is_tensor(node: Node) -> bool:
    return any(True for _ in tensors(example_of(node)))


def _text(value: Any, text_of: TextOf) -> str:
    text = _full_text(value, text_of)
    return text if len(text) <= _LONGEST else "…"


def _full_text(value: Any, text_of: TextOf) -> str:
    if isinstance(value, (Node, *_TENSORS)):
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
