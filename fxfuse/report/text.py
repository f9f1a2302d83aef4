"""A ``Report`` as text: a row for every head, why each kept head was kept, and the totals."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import get_args

from .records import Read, Report, Site, Status

WIDTH = 100  # columns; a cell breaks onto more lines before the table gets wider
_GAP = 2  # between two columns in tabulate's "simple" format
_PADDING = 2  # that tabulate adds to every header
_PATH = 12  # a path is cut down to this before anything else is cut

# The columns, each with the places where a long cell may break: at a space, inside a path, or never.
_COLUMNS = {
    "status": r"(?!)",
    "where": r"(?<=/)",
    "module": r"(?<=\.)",
    "pattern": r"(?<=[→+])",
    "shape": r"(?= →)",
    "dtype": r"(?!)",
    "variant": r"(?= )",
    "saved": r"(?!)",
}


def table(report: Report) -> str:
    """The report as a table, followed by a note for every kept head and a line of totals."""
    if not report.sites:
        return _no_heads(len(report.graphs))
    return "\n\n".join([_grid(report.sites), *_notes(report.sites), *_reads(report.reads), _totals(report.sites)])


def human_bytes(count: int) -> str:
    """``count`` bytes in the largest binary unit that leaves at least 1: ``"1.2 GiB"``, ``"980 MiB"``, ``"12 B"``."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    exact = units[0] == "B" or size >= 10
    return f"{size:.{0 if exact else 1}f} {units[0]}"


def _grid(sites: Sequence[Site]) -> str:
    from tabulate import tabulate  # here, so that compiling a model does not import it

    places = _COLUMNS.values()
    rows = [[re.split(place, cell) for place, cell in zip(places, _row(site), strict=True)] for site in sites]
    widths = _fit(list(zip(*rows, strict=True)))
    lines = [[_broken(cell, width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return tabulate(lines, list(_COLUMNS), tablefmt="simple", disable_numparse=True, maxcolwidths=widths)


def _row(site: Site) -> tuple[str, ...]:
    shape = f"{site.rows} x {site.hidden} → {site.vocab}"
    saved = human_bytes(site.bytes_saved) if site.bytes_saved else ""
    return (site.status, _short(site.where), site.module, site.pattern, shape, site.dtype, site.variant, saved)


def _short(where: str) -> str:
    """``where`` from the directory that python imports it from: ``transformers/models/llama/modeling_llama.py:480``."""
    roots = (os.path.join(os.path.abspath(root), "") for root in sys.path)
    return where.removeprefix(max((root for root in roots if where.startswith(root)), key=len, default=""))


def _fit(columns: Sequence[Sequence[Sequence[str]]]) -> list[int]:
    """Widths of the columns, ``WIDTH`` together, each column being its cells and each cell its unbreakable pieces.

    The widest gives way first: of those that have a place to break, else of the paths, else of all.
    """
    widths, unbroken = [], []
    for name, column in zip(_COLUMNS, columns, strict=True):
        header = len(name) + _PADDING
        widths.append(max(header, *(len("".join(cell)) for cell in column)))
        unbroken.append(max(header, *(len(piece.strip()) for cell in column for piece in cell)))
    paths = [name in ("where", "module") for name in _COLUMNS]
    while sum(widths) + _GAP * (len(widths) - 1) > WIDTH:
        order = [(widths[i] > unbroken[i], paths[i] and widths[i] > _PATH, widths[i]) for i in range(len(widths))]
        widths[order.index(max(order))] -= 1
    return widths


def _broken(pieces: Sequence[str], width: int) -> str:
    lines = [""]
    for piece in pieces:
        for part in [piece] if len(piece.strip()) <= width else re.split(r"(?<=_)", piece):
            if lines[-1] and len(lines[-1] + part) > width:
                lines.append(part.strip())
            else:
                lines[-1] += part
    return "\n".join(lines)  # a line that is still too long is cut by tabulate's maxcolwidths


def _notes(sites: Sequence[Site]) -> list[str]:
    # A graph that is compiled again, for another shape, says the same again: once is enough.
    notes = Counter(_note(site) for site in sites if site.status == "kept")
    return [f"{note}\n    ({count} times)" if count > 1 else note for note, count in notes.items()]


_COSTS = {
    "read": "deferred logits were computed after all, because something read their values",
    "copied": "a weight was copied before an optimizer changed it, because logits that nothing had read were still "
    "there (`del` them before the step to save the memory)",
}


def _reads(reads: Sequence[Read]) -> Iterator[str]:
    """For each kind of cost of deferred logits, where it arose."""
    for kind, sentence in _COSTS.items():
        lines = [
            f"    {human_bytes(read.bytes // read.count)}, {_plural(read.count, 'time')}: {read.where} "
            f"(logits of {_short(read.head)})"
            for read in reads
            if read.kind == kind
        ]
        if lines:
            yield "\n".join([_filled(f"{kind}: {sentence}", ""), *lines])


def _note(site: Site) -> str:
    details = []
    if site.reason:
        at = [f"at {site.reason.where}"] if site.reason.where else []
        details = [site.reason.sentence, *at, f"remedy: {site.reason.remedy}"]
    head = f"kept: {site.where}" + (f" ({site.module})" if site.module else "")
    return "\n".join([head, *(_filled(line, " " * 4) for line in details)])


def _filled(line: str, indent: str) -> str:
    # A path or an option is copied from here: never break inside one.
    return textwrap.fill(
        line,
        width=WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _totals(sites: Sequence[Site]) -> str:
    counts = Counter(site.status for site in sites)
    parts = ", ".join(f"{counts[status]} {status}" for status in get_args(Status) if counts[status])
    saved = human_bytes(sum(site.bytes_saved for site in sites))
    return f"{_plural(len(sites), 'head')}: {parts}; {saved} of logits not built"


def _no_heads(graphs: int) -> str:
    if not graphs:
        return "No heads seen: nothing was compiled."
    compiled = _plural(graphs, "graph")
    return f"No heads seen: {compiled} compiled, none with a projection to a vocabulary that fxfuse recognises."


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
