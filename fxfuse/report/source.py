"""Where in the user's source a graph node comes from."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from ..compat import COMPILED, captured_frame, dynamo_source, given_value, in_captured_frame, modules_in_modules

# Its source is indented further.
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)', re.MULTILINE)
_OF_MODES = ("__torch_dispatch__", "__torch_function__")
TORCH = str(Path(torch.__file__).parent) + os.sep  # not torchtune
OWN = str(Path(__file__).parent.parent) + os.sep
# How Dynamo looks up a module: in ``__dict__`` where one above it has a ``__getattr__`` of its own, as PEFT's have, and
# by getattr where it has a name that Python cannot spell.
_TEXT = r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\""""
_MODULE_PART = re.compile(
    r"(?:\.|\.__dict__\[')_(?:modules|parameters|buffers)(?:'\])?\[(?:" + _TEXT + r")\]"
    r"|, (?:" + _TEXT + r")\)"
    r"|\.((?:(?!, ['\"])[^.\[\]])+)"
)


def location(node: Node) -> str | None:
    """``file.py:line`` of the innermost frame outside of PyTorch, or of what calls that if all are inside, or None."""
    frames = node.meta.get("stack_trace")
    return None if frames is None else innermost(_FRAME.findall(frames)) or caller() or None


def innermost(frames: Iterable[tuple[str, Any, str]]) -> str:
    """``file.py:line`` of the last of ``frames`` (file, line, function) that is outside of PyTorch and no mode's; empty
    if there is none.
    """
    own = [frame for frame in frames if not frame[0].startswith(TORCH) and frame[2] not in _OF_MODES]
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""


def line_at(where: str | None) -> str:
    """The text of the line at ``file.py:line``; empty if there is none to be read."""
    file, _, line = (where or "").rpartition(":")
    return linecache.getline(file, int(line)).strip() if line.isdecimal() else ""


def caller() -> str:
    """``file.py:line`` of the innermost running frame outside of PyTorch, fxfuse and modes; empty if there is none.

    Where compiled code runs, of what it was compiled from, as far as that is known: see ``called_from``.
    """
    if _compiled_from.get():
        return _compiled_from.get()
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and (is_inside(frame) or is_of_mode(frame)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def is_inside(frame: types.FrameType) -> bool:
    """Whether a frame runs code of PyTorch's or fxfuse's, or what was generated (as by FX, or for a dataclass)."""
    file = frame.f_code.co_filename
    # ``python -c``, a prompt and the cells of a notebook have no file, and are the program.
    generated = file.startswith("<") and frame.f_globals.get("__name__") != "__main__"
    return generated or file.startswith((TORCH, OWN))


def is_of_mode(frame: types.FrameType) -> bool:
    """Whether a frame runs a method by which a mode or a subclass of the program's sees calls on their way."""
    return frame.f_code.co_name in _OF_MODES and not is_inside(frame)


_compiled_from: ContextVar[str] = ContextVar("_compiled_from", default="")


@contextlib.contextmanager
def called_from(where: str) -> Iterator[None]:
    """Have ``caller`` say ``where``, for a function that is compiled and has no frame there."""
    token = _compiled_from.set(where)
    try:
        yield
    finally:
        _compiled_from.reset(token)


def function_name(node: Node) -> str:
    """The function that a node calls, as people write it: ``"linear"``, ``"view"``."""
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))


def module_path(node: Node, weight: Any) -> str:
    """Path of the module that made the projection, or else of the one that owns its weight; ``""`` if neither."""
    linear = [path for path, kind in _modules(node) if kind.rpartition(".")[2] == "Linear"]
    source, owned, _ = dynamo_source(given(weight)).rpartition("._parameters")
    if not linear and not owned:
        return ""
    return (linear[-1] if linear else _clean(source)) or _path_of_captured()


def _path_of_captured() -> str:
    """Where the outermost of the modules that are alive has the one that is compiled on its own; empty if none has."""
    _, module = captured_frame() or (None, None)
    above: dict[int, tuple[torch.nn.Module, str]] = {}
    for one, name, child in modules_in_modules():
        if above.get(id(child), (one, COMPILED))[1] == COMPILED:  # the user's own name for it comes first
            above[id(child)] = one, name
    path: list[str] = []
    while id(module) in above:
        module, name = above.pop(id(module))
        path.insert(0, name)
    return ".".join(name for name in path if name != COMPILED)


def projection_name(node: Node, weight: Any) -> str:
    """What a projection is called in a chain: ``"lm_head"`` after the module that it is in, or the function with its
    weight, ``"linear(wte.weight)"``.
    """
    path = module_path(node, weight)
    if path and path in [module for module, kind in _modules(node)]:
        *outer, last = path.split(".")
        return ".".join((*outer[-1:], last)) if last.isdecimal() else last
    made_of = name_of(given(weight))
    return f"{function_name(node)}({made_of})" if made_of else function_name(node)


def name_of(node: Any) -> str:
    """The variable or parameter that a placeholder stands for; empty if it has no name in the program."""
    name = _clean(dynamo_source(node))
    return "" if name.startswith("___") else name


def _modules(node: Node) -> list[tuple[str, str]]:
    """The modules around a node, the outermost first, each with its class."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    return [
        (_clean(in_captured_frame(path)), kind if isinstance(kind, str) else getattr(kind, "__name__", ""))
        for path, kind in stack
    ]


def given(weight: Any) -> Any:
    """The placeholder that a weight is made of; itself if that is a batch's data, as in-batch contrastive losses have.

    That is, if parameters and other tensors are in it.
    """
    first = weight
    while isinstance(first, Node) and first.op != "placeholder" and first.all_input_nodes:
        first = first.all_input_nodes[0]
    return weight if first is not weight and len(set(map(_is_of_module, _placeholders(weight)))) > 1 else first


def _placeholders(node: Node) -> set[Node]:
    """The tensors given to a graph that a node is made of."""
    seen, found, left = {node}, set(), [node]
    while left:
        one = left.pop()
        if one.op == "placeholder" and isinstance(one.meta.get("example_value"), torch.Tensor):
            found.add(one)
        left += (other for other in one.all_input_nodes if other not in seen)
        seen.update(one.all_input_nodes)
    return found


def _is_of_module(placeholder: Node) -> bool:
    source = dynamo_source(placeholder)
    owned = "._parameters[" in source or "._buffers[" in source
    return owned or isinstance(given_value(placeholder), torch.nn.Parameter)


def argument_name(node: Node) -> str:
    """What the program calls an argument of the graph: ``"lm_head.weight"``, ``"ids"``."""
    return _clean(dynamo_source(node)) or node.name


def _clean(path: str) -> str:
    """``"model.lm_head"`` of ``"L['self']._modules['model']._modules['lm_head']"``."""
    root, _, rest = path.partition("]")
    parts = [re.sub(r"\\(['\"\\])", r"\1", "".join(found)) for found in _MODULE_PART.findall(rest)]
    parts = [part for part in parts if part not in ("_modules", "_parameters")]
    # A local or global variable stands for itself only where there is nothing below it.
    return ".".join(parts) or root.rpartition("[")[2].strip("'").replace("self", "")
