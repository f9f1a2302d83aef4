"""Where in the user's source a graph node comes from."""

from __future__ import annotations

import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from ..compat import dynamo_source

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_TORCH = str(Path(torch.__file__).parent) + os.sep  # not torchtune
_OWN = str(Path(__file__).parent.parent) + os.sep
_MODULE_PART = re.compile(r"\._?(?:modules|parameters|buffers)\['?([^\]']+)'?\]|\.([A-Za-z_]\w*)")


def location(node: Node) -> str | None:
    """``file.py:line`` of the innermost frame outside of PyTorch, or None."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)] or frames
    return f"{own[-1][0]}:{own[-1][1]}" if own else None


def caller() -> str:
    """``file.py:line`` of the innermost running frame outside of PyTorch and fxfuse; empty if there is none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _OWN, "<")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def function_name(node: Node) -> str:
    """The function that a node calls, as people write it: ``"linear"``, ``"view"``."""
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))


def module_path(node: Node, weight: Any) -> str:
    """Path of the module that made the projection, or else of the one that owns its weight; ``""`` if neither."""
    stack = node.meta.get("nn_module_stack") or {}
    for path, kind in reversed(list(stack.values())):
        name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
        if name.rpartition(".")[2] == "Linear":
            return _clean(path)
    while isinstance(weight, Node) and weight.op != "placeholder" and weight.all_input_nodes:
        weight = weight.all_input_nodes[0]
    path, owned, _ = dynamo_source(weight).rpartition("._parameters")
    return _clean(path) if owned else ""


def argument_name(node: Node) -> str:
    """What the program calls an argument of the graph: ``"lm_head.weight"``, ``"ids"``."""
    return _clean(dynamo_source(node)) or node.name


def _clean(path: str) -> str:
    """``"model.lm_head"`` of ``"L['self']._modules['model']._modules['lm_head']"``."""
    root, _, rest = path.partition("]")
    parts = [a or b for a, b in _MODULE_PART.findall(rest)]
    parts = [part for part in parts if part not in ("_modules", "_parameters")]
    # A local or global variable stands for itself only where there is nothing below it.
    return ".".join(parts) or root.rpartition("[")[2].strip("'").replace("self", "")
