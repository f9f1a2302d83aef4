"""What is known of a graph as Dynamo hands it over: whose it is, why it was compiled again, and why it ends."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch

from .. import compat
from .chain import losses_of_inputs
from .records import Ending, GraphRecord
from .source import innermost, line_at
from .telling import telling

_PART = re.compile(r"^ +(Explanation|Hint|Developer debug context): ", re.MULTILINE)
_RESUMED = re.compile(rf"{compat.RESUMED}(.+)_at_\d+")


def captured(gm: Any) -> GraphRecord:
    """The record of the graph that is being compiled, before anything is changed in it; without number and sites."""
    record = GraphRecord(0)
    with telling():
        record = _captured(gm)
    return record


def _captured(gm: Any) -> GraphRecord:
    name, where = _function()
    return GraphRecord(
        0,
        function=_RESUMED.sub(r"\1", name),
        where=where,
        resumed=compat.RESUMED in name,
        compile_id=compat.compile_id(),
        recompiled=_in_one_line(compat.recompile_reason()),
        ending=_ending(gm),
        losses=losses_of_inputs(gm.graph),
    )


def _function() -> tuple[str, str]:
    """The name of the function that is being captured, and where it begins; empty if not known."""
    frame = compat.captured_frame()
    if frame is None:
        return "", ""
    code, owner = frame
    name = getattr(code, "co_qualname", code.co_name)
    if isinstance(owner, torch.nn.Module):
        forward = type(owner).forward
        if getattr(forward, "__code__", None) is code:  # which may be that of a decorator
            name = f"{type(owner).__name__}.forward"
            code = getattr(inspect.unwrap(forward), "__code__", code)
    return name, f"{code.co_filename}:{code.co_firstlineno}"


def _ending(gm: Any) -> Ending | None:
    """Why a graph ends, or None where Dynamo does not say."""
    known = compat.end_of_graph(gm)
    if known is None:
        return None
    is_break, said, frames = known
    # "What happened", then paragraphs with a label each, and a pointer to the documentation.
    said, _, _ = said.partition("\n\n For more details")
    reason, *labelled = _PART.split(said)
    parts = list(zip(labelled[::2], map(_in_one_line, labelled[1::2]), strict=True))
    return Ending(
        is_break=is_break,
        reason=_in_one_line(reason),
        explanation=" ".join(text for label, text in parts if label == "Explanation"),
        hints=tuple(text for label, text in parts if label == "Hint"),
        where=innermost(frames),
        source=line_at(innermost(frames)),
    )


def _in_one_line(text: str) -> str:
    return " ".join(text.split())
