"""A ``Report`` as text: a row for every head, what is to be said of each, where memory went, and the totals."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TextIO, get_args

from .heads import Head, compilations, heads_of, totals
from .records import COSTS, Ending, GraphRecord, Report, Status, Use
from .telling import is_terminal

WIDTH = 100  # columns at most; a cell breaks onto more lines before the table gets wider
_NARROWEST = 60
_GAP = 2  # between two columns in tabulate's "simple" format
_PADDING = 2  # that tabulate adds to every header
_PATH = 12  # a path is cut down to this before anything else is cut

# The columns, each with the places where a long cell may break: at a space, inside a path, or never.
_COLUMNS = {
    "status": r"(?!)",
    "head": r"(?<=\.)",
    "where": r"(?<=/)",
    "shape": r"(?= →)",
    "dtype": r"(?!)",
    "saved": r"(?!)",
}
_COLOURS = {"fused": 32, "deferred": 36, "kept": 33}


def table(report: Report, width: int = WIDTH) -> str:
    """The report as a table in ``width`` columns, then a paragraph for every head, and a line of totals."""
    if not report.sites:
        return "\n\n".join([_filled(no_heads(report), "", width), *_recompilations(report, width)])
    heads = heads_of(report)
    parts = [_grid(heads, width), *(_told(head, report, width) for head in heads)]
    return "\n\n".join([*parts, *_reads(heads, width), *_recompilations(report, width), _totals(report, heads, width)])


def for_stream(report: Report, stream: TextIO | None) -> str:
    """The report as ``stream`` shows it best: in the width of a terminal, and coloured if ``NO_COLOR`` is not set."""
    text = table(report, width_of(stream))
    if not is_terminal(stream) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return re.sub(r"^(fused|deferred|kept)\b", lambda m: f"\033[1;{_COLOURS[m[0]]}m{m[0]}\033[0m", text, flags=re.M)


def width_of(stream: TextIO | None) -> int:
    """The columns to fill: those of a terminal, within limits."""
    columns = shutil.get_terminal_size((WIDTH, 0)).columns if is_terminal(stream) else WIDTH
    return max(_NARROWEST, min(columns, WIDTH))


def human_bytes(count: int) -> str:
    """``count`` bytes in the largest binary unit that leaves at least 1: ``"1.2 GiB"``, ``"980 MiB"``, ``"12 B"``."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    exact = units[0] == "B" or size >= 10
    return f"{size:.{0 if exact else 1}f} {units[0]}"


# --- the table --------------------------------------------------------------------------------------------------


def _grid(heads: Sequence[Head], width: int) -> str:
    from tabulate import tabulate  # here, so that compiling a model does not import it

    places = _COLUMNS.values()
    rows = [[re.split(place, cell) for place, cell in zip(places, _row(head), strict=True)] for head in heads]
    widths = _fit(list(zip(*rows, strict=True)), width)
    lines = [[_broken(cell, width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return tabulate(lines, list(_COLUMNS), tablefmt="simple", disable_numparse=True, maxcolwidths=widths)


def _row(head: Head) -> tuple[str, ...]:
    site = head.site
    shape = f"{site.rows} x {site.hidden} → {site.vocab}"
    saved = "?" if head.bytes_saved is None else human_bytes(head.bytes_saved) if head.bytes_saved else ""
    name = site.module or (site.projections[0].name if site.projections else "")
    return (site.status, name, _short(site.where), shape, site.dtype, saved)


def _short(where: str) -> str:
    """``where`` from the directory that python imports it from: ``transformers/models/llama/modeling_llama.py:480``."""
    roots = (os.path.join(os.path.abspath(root), "") for root in sys.path)
    return where.removeprefix(max((root for root in roots if where.startswith(root)), key=len, default=""))


def _fit(columns: Sequence[Sequence[Sequence[str]]], width: int) -> list[int]:
    """Widths of the columns, ``width`` together, each column being its cells and each cell its unbreakable pieces.

    The widest gives way first: of those that have a place to break, else of the paths, else of all.
    """
    widths, unbroken = [], []
    for name, column in zip(_COLUMNS, columns, strict=True):
        header = len(name) + _PADDING
        widths.append(max(header, *(len("".join(cell)) for cell in column)))
        unbroken.append(max(header, *(len(piece.strip()) for cell in column for piece in cell)))
    paths = [name in ("where", "head") for name in _COLUMNS]
    while sum(widths) + _GAP * (len(widths) - 1) > width:
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


# --- a paragraph for each head ----------------------------------------------------------------------------------


def _told(head: Head, report: Report, width: int) -> str:
    site = head.site
    times = f"  ({head.count} alike)" if head.count > 1 else ""
    lines = [_filled(f"{site.status}: {site.chain or site.pattern}{times}", "", width, "    ")]
    blocked = site.reason.where if site.reason else None
    read = [(use.where, use.source) for use in site.uses if use.where and not use.leaves and use.where != blocked]
    lines += _sources([(site.where, site.source), *read], width)
    for i, cause in enumerate(site.why.split("; ") if site.why else ()):
        several = "; " in site.variant or not site.variant  # it says itself which it is of
        lines.append(_filled(cause if i or several else f"{site.variant}: {cause}", "    ", width))
    if site.reason:
        at = ":" if site.reason.where and site.reason.where != site.where else ""
        lines.append(_filled(site.reason.sentence + at, "    ", width))
        lines += _sources([(site.reason.where or "", site.reason.source)] if at else [], width, "      ")
        lines.append(_filled(f"remedy: {site.reason.remedy}", "    ", width))
    if any(use.leaves and not use.checkpointed for use in site.uses):
        lines += _left(head, report, width)
    lines += [_filled(worth, "    ", width) for worth in _worth(head)]
    return "\n".join(lines)


def _sources(places: Sequence[tuple[str, str]], width: int, indent: str = "    ") -> list[str]:
    """Lines of the program, each place once, with their text beside it where there is room."""
    shown = {_short(where): text for where, text in places if where}
    column = max((len(where) for where in shown if len(where) <= width // 2), default=0)
    lines = []
    for where, text in shown.items():
        if len(where) <= column:
            lines.append(f"{indent}{where:<{column}}  {text}".rstrip())
        else:
            lines += [f"{indent}{where}", *([f"{indent}  {text}"] if text else [])]
        if text and len(lines[-1]) > width:
            lines[-1] = lines[-1][: width - 1] + "…"
    return lines


def _left(head: Head, report: Report, width: int) -> Iterator[str]:
    """How the logits left their graph, and what read them afterwards."""
    graph, site = head.graph, head.site
    if graph.ending is not None and graph.ending.is_break:
        yield _filled(f"the graph breaks here, while the logits are needed later: {graph.ending.reason}", "    ", width)
        yield from _break(graph.ending, width)
    elif graph.ending is not None:
        yield _filled(f"returned by {graph.function or 'the function'}:", "    ", width)
        yield from _sources([(graph.ending.where, graph.ending.source)], width, "      ")
    for read in head.fused_reads:
        yield _filled(f"read later by a fused op, {_plural(read.count, 'time')}: {read.chain}", "    ", width)
        yield from _sources([(read.where, read.source)], width, "      ")
    for later, use in _loss_in_the_rest(head, report):
        yield _filled(f"{_function(later)} has a loss of logits of that size: {use.chain}", "    ", width)
        yield from _sources([(use.where, use.source)], width, "      ")
    if site.status == "deferred":
        for kind, what in (("at_once", "not deferred, but computed at once"), ("read", "computed after all")):
            times = sum(read.count for read in head.reads if read.kind == kind)
            if times:
                yield f"    {what}, {_plural(times, 'time')}: see below"
        if not head.is_computed and not head.fused_reads:
            yield "    nothing was seen to read them"


def _function(graph: GraphRecord) -> str:
    name = graph.function or f"graph {graph.id}"
    return f"the rest of {name}" if graph.resumed else name


def _break(ending: Ending, width: int) -> Iterator[str]:
    yield from _sources([(ending.where, ending.source)], width, "      ")
    if ending.explanation:
        yield _filled(ending.explanation, "      ", width)
    for hint in ending.hints[:1]:  # the most likely one; the others are in the JSON form
        yield _filled(f"hint: {hint}", "      ", width)


def _loss_in_the_rest(head: Head, report: Report) -> Iterator[tuple[GraphRecord, Use]]:
    """The one loss of logits of this vocabulary in the graph of what comes after the break; if no other head's logits
    of this size cross it, they are most likely these.
    """
    graph, vocab = head.graph, head.site.vocab
    crossing = [site for site in graph.sites if site.vocab == vocab and any(use.leaves for use in site.uses)]
    if graph.ending is None or not graph.ending.is_break or len(crossing) != 1:
        return
    for later in report.graphs:
        if later.id > graph.id and later.function == graph.function:
            found = [use for use in later.losses if use.vocab == vocab] if later.resumed else []
            if len(found) == 1:
                yield later, found[0]
            return


def _worth(head: Head) -> Iterator[str]:
    site = head.site
    parts = {
        "logits": site.logits_bytes,
        "copies in other dtypes": site.converted_bytes,
        "gradient": site.gradient_bytes,
    }
    built = "built" if site.status == "kept" else "built at least in part" if head.is_computed else "not built"
    if site.rows_hint is None:
        yield f"{built}: ? bytes, as the number of rows depends on values"
    elif named := " + ".join(f"{name} {human_bytes(size)}" for name, size in parts.items() if size):
        rows = "" if isinstance(site.rows, int) else f" for {_plural(site.rows_hint, 'row')}"
        less = (
            f", less {human_bytes(site.copied_bytes)} of copies of the weight or its gradient"
            if site.copied_bytes
            else ""
        )
        yield f"{built}{rows}: {named}{less}"


# --- what came later --------------------------------------------------------------------------------------------


def _reads(heads: Sequence[Head], width: int) -> Iterator[str]:
    """For each kind of cost of deferred logits, where it arose."""
    for kind, sentence in COSTS.items():
        lines = []
        for read in (read for head in heads for read in head.reads if read.kind == kind):
            size = human_bytes(read.bytes // read.count)
            lines.append(f"    {size}, {_plural(read.count, 'time')} (logits of {_short(read.head)})")
            lines += _sources([(read.where, read.source)], width, "      ")
        if lines:
            yield "\n".join([_filled(f"{kind.replace('_', ' ')}: {sentence}", "", width), *lines])


def _recompilations(report: Report, width: int) -> Iterator[str]:
    """For each function that was compiled more than once, how often and why."""
    again: dict[tuple[str, str], Counter[str]] = {}
    for graph in dict(compilations(report)).values():
        causes = again.get(place := (_function(graph), graph.where))
        if causes is None:  # Dynamo has one code for several functions that it wraps, and compiles that again
            again[place] = Counter()
        elif graph.recompiled:
            causes[re.sub(r"^\d+/\d+: ", "", graph.recompiled)] += 1
    for (function, where), causes in again.items():
        if not causes:
            continue
        times = _plural(causes.total(), "time")
        lines = [_filled(f"compiled again: {function} ({_short(where)}), {times}", "", width)]
        lines += [
            _filled(f"{cause}{f' ({count} times)' if count > 1 else ''}", "    ", width)
            for cause, count in causes.items()
        ]
        yield "\n".join(lines)


def _filled(line: str, indent: str, width: int, further: str = "") -> str:
    # A path or an option is copied from here: never break inside one.
    return textwrap.fill(
        line,
        width=width,
        initial_indent=indent,
        subsequent_indent=further or f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _totals(report: Report, heads: Sequence[Head], width: int) -> str:
    sums = totals(heads)
    parts = ", ".join(f"{sums.counts[status]} {status}" for status in get_args(Status) if sums.counts[status])
    bytes_ = [f"{human_bytes(sums.saved)} not built{', and ? more' if sums.unknown else ''}"]
    if sums.computed:
        bytes_.append(f"{human_bytes(sums.computed)} deferred, and built at least in part")
    line = _filled(f"{_plural(sums.counts.total(), 'head')}: {parts}; {'; '.join(bytes_)}", "", width)
    return "\n".join([line, *(_filled(said, "", width) for said in _beside(report))])


def _beside(report: Report) -> Iterator[str]:
    if said := without_masks(report):
        yield said
    count = sum(not graph.enabled for graph in report.graphs)
    if count:
        yield f"None was looked for in {_plural(count, 'graph')}, compiled with fxfuse.enabled=False."


def without_masks(report: Report) -> str:
    """Where attention is called without its mask; empty if nowhere."""
    places: Counter[str] = Counter()
    for graph in report.graphs:
        places |= Counter(graph.unmasked)  # once for all compilations
    at = ", ".join(_short(where) for where in places if where)
    calls = f"{_plural(places.total(), 'attention')}{f' ({at})' if at else ''}"
    return f"is_causal in place of a causal mask, or of one that hides nothing: {calls}." if places else ""


def no_heads(report: Report) -> str:
    """What is said where there is no head."""
    if not report.graphs:
        return "No heads seen: nothing was compiled."
    searched = sum(graph.enabled for graph in report.graphs)
    none = f": {_plural(searched, 'graph')} compiled, none with a projection to a vocabulary that fxfuse recognises."
    return " ".join([f"No heads seen{none if searched else '.'}", *_beside(report)])


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
