"""The graphs of a report before and after the rewrite, as a unified diff of their code: ``--diff``."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from .picture import Code, Sketch
from .records import Report, Watched

_RED, _GREEN, _CYAN, _BOLD, _RESET = "\33[31m", "\33[32m", "\33[36m", "\33[1m", "\33[0m"
_COLOURS = {"---": _BOLD, "+++": _BOLD, "@@ ": _CYAN, "-": _RED, "+": _GREEN}


def diff(report: Report, watched: Mapping[int, Watched], colour: bool = False) -> str:
    """What the rewrite changed in each graph that has heads, three lines of context around; one line if nothing.

    ``colour``: with the escape sequences of a terminal.
    """
    lines = [line for graph in report.graphs for line in of_graph(graph.id, watched)]
    if colour:
        lines = [_coloured(line) for line in lines]
    return "\n".join(lines or ["No heads seen: no graph was changed."])


def of_graph(id: int, watched: Mapping[int, Watched]) -> Iterator[str]:
    """The diff of one graph, line by line; nothing if it has no heads."""
    sketch = watched[id].by(Sketch) if id in watched else None
    codes = sketch.codes if sketch else []
    for number, code in enumerate(codes):
        name = f"graph {id}" + (f", part {number}" if len(codes) > 1 else "")
        yield from _of_code(name, code)


def _of_code(name: str, code: Code) -> list[str]:
    lines = list(
        difflib.unified_diff(code.before, code.after, f"{name}, as captured", f"{name}, by fxfuse", lineterm="")
    )
    return lines or [f"{name}: left as it was"]


def _coloured(line: str) -> str:
    colour = next((colour for start, colour in _COLOURS.items() if line.startswith(start)), None)
    return f"{colour}{line}{_RESET}" if colour else line
