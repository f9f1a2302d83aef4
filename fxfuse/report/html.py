"""A ``Report`` as one page that needs nothing else: ``--html FILE``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, get_args

import torch

from ..reasons import Reason
from .diff import of_graph
from .heads import COMPUTED, Head, heads_of, totals
from .layout import Layout, Placed, layout
from .picture import Box, Drawing, Sketch
from .records import COSTS, GraphRecord, Report, Site, Status, Watched
from .text import human_bytes, no_heads, without_masks

# Of light and dark pages. A test holds every pair that is read against WCAG's contrast of 4.5.
PALETTES = {
    "light": {
        "page": "#f6f7f9",
        "card": "#ffffff",
        "text": "#1b1f24",
        "faint": "#57606a",
        "line": "#d0d7de",
        "code": "#eef1f4",
        "fused": "#116329",
        "fused-tint": "#dcf5e3",
        "deferred": "#0a53a8",
        "deferred-tint": "#dfeeff",
        "kept": "#953800",
        "kept-tint": "#fff0e0",
    },
    "dark": {
        "page": "#0f1318",
        "card": "#181d24",
        "text": "#e6eaef",
        "faint": "#9da7b3",
        "line": "#353d48",
        "code": "#222932",
        "fused": "#6fdd8b",
        "fused-tint": "#12351f",
        "deferred": "#85bdff",
        "deferred-tint": "#12304f",
        "kept": "#ffb878",
        "kept-tint": "#43290f",
    },
}

SIGNS = {"fused": "✓", "deferred": "◷", "kept": "✕"}

_CHARACTER = 7.3  # width of one, in the drawings
_LONGEST = 26  # characters of a line in a box
_HEIGHT, _STEP = 72.0, 108.0


def page(report: Report, watched: Mapping[int, Watched], title: str) -> str:
    """The page, to be written in UTF-8. ``title`` says what was run; heads of graphs in ``watched`` are drawn."""
    from jinja2 import Environment, PackageLoader

    from .. import __version__

    environment = Environment(
        loader=PackageLoader("fxfuse.report", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    here = os.path.join(os.getcwd(), "")
    environment.filters |= {"bytes": human_bytes, "short": lambda where: where.removeprefix(here)}
    heads = heads_of(report)
    sums = totals(heads)
    return environment.get_template("page.jinja").render(
        title=title,
        versions=f"fxfuse {__version__}, PyTorch {torch.__version__}",
        palettes=PALETTES,
        signs=SIGNS,
        counts={status: sums.counts[status] for status in get_args(Status)},
        totals=sums,
        most=max(map(_not_built, report.sites), default=0),
        no_heads="" if report.sites else no_heads(report),
        without_masks=without_masks(report) if report.sites else "",
        heads=[(head, _id(head.graph, head.index), _name(head.site)) for head in heads],
        graphs=[_graph(graph, watched, heads) for graph in report.graphs],
        fused_reads=[read for head in heads for read in head.fused_reads],
        reads={kind: (cost, [r for h in heads for r in h.reads if r.kind == kind]) for kind, cost in COSTS.items()},
    )


@dataclass(frozen=True)
class _Shown:
    """A head, and what the page shows beside what is remembered of it."""

    id: str
    site: Site
    name: str
    is_computed: bool
    chains: tuple[tuple[str, ...], ...]
    line: str
    blocking_line: str
    drawings: tuple[_Figure, ...]
    left_out: int


@dataclass(frozen=True)
class _Label:
    """What stands in a box, and what is said of it where that is not enough."""

    placed: Placed
    role: str
    lines: tuple[str, ...]
    big: bool
    title: str


@dataclass(frozen=True)
class _Figure:
    caption: str
    layout: Layout
    labels: tuple[_Label, ...]
    description: str


def _not_built(site: Site) -> int:
    """Bytes that are not built, without taking off what is in their place."""
    if site.reason:
        return 0
    parts = site.logits_bytes, site.converted_bytes, site.gradient_bytes
    return max(site.bytes_saved or 0, sum(part or 0 for part in parts))


def _id(graph: GraphRecord, index: int) -> str:
    return f"head-{graph.id}-{index}"


def _name(site: Site) -> str:
    return site.module or os.path.basename(site.where) or "a projection"


def _graph(graph: GraphRecord, watched: Mapping[int, Watched], heads: Sequence[Head]) -> dict[str, Any]:
    sketch = watched[graph.id].by(Sketch) if graph.id in watched else None
    drawings = sketch.drawings if sketch else []
    if len(drawings) != len(graph.sites):  # one could not be made, of which a warning has told
        drawings = []
    computed = {(r.graph, r.site) for head in heads for r in head.reads if r.kind in COMPUTED}
    shown = [
        _shown(_id(graph, index), site, (graph.id, index) in computed, drawing)
        for index, (site, drawing) in enumerate(zip_longest(graph.sites, drawings))
    ]
    return {"id": graph.id, "record": graph, "heads": shown, "diff": list(of_graph(graph.id, watched))}


def _shown(id: str, site: Site, is_computed: bool, drawing: Drawing | None) -> _Shown:
    blocking = site.reason.where if site.reason and site.reason.where != site.where else None
    return _Shown(
        id=id,
        site=site,
        name=_name(site),
        is_computed=is_computed,
        chains=_chains(site),
        line=site.source,
        blocking_line=site.reason.source if blocking and site.reason else "",
        drawings=tuple(_figures(site, drawing)) if drawing else (),
        left_out=drawing.left_out if drawing else 0,
    )


def _chains(site: Site) -> tuple[tuple[str, ...], ...]:
    chains = [use.chain for use in site.uses] or site.pattern.split(" + ")
    return tuple(tuple(re.split(r" → (?![^(]*\))", chain)) for chain in chains)  # one in brackets is another's


def _figures(site: Site, drawing: Drawing) -> Iterator[_Figure]:
    if site.reason is not None:
        yield _figure("The graph, left as it was", drawing.before, _blocking(site.reason, drawing.before))
    else:
        yield _figure("Before", drawing.before)
        yield _figure("After", drawing.after)


def _blocking(reason: Reason, boxes: Sequence[Box]) -> set[str]:
    """Names of the readers that a head was kept for: those of that line, or of them those that the reason names."""
    there = [box for box in boxes if box.role == "reader" and box.where == reason.where]
    named = [box for box in there if box.function in reason.sentence]
    return {box.name for box in named or there}


def _figure(caption: str, boxes: Sequence[Box], blocking: Set[str] = frozenset()) -> _Figure:
    most = max((box.bytes for box in boxes if box.role in ("projection", "derived")), default=0)
    texts = {}
    for box in boxes:
        size = human_bytes(box.bytes) if box.bytes else ""
        role: str = "" if box.role == "other" else box.role
        if box.name in blocking:
            role = f"{SIGNS['kept']} reader, in the way"
        about = f"{box.shape} {box.dtype}".strip()
        texts[box.name] = role, (box.function, about, size)
    widths = {
        name: 24 + _CHARACTER * max(len(role), *(min(len(line), _LONGEST) for line in lines))
        for name, (role, lines) in texts.items()
    }
    arranged = layout(boxes, widths, _HEIGHT, _STEP)
    labels = []
    for placed in arranged.boxes:
        box = placed.box
        role, lines = texts[box.name]
        big = box.bytes > 0 and 2 * box.bytes >= most and box.role in ("projection", "derived")
        title = "; ".join(filter(None, (box.name, *lines, box.where)))
        labels.append(_Label(placed, role, tuple(map(_shortened, lines)), big, title))
    steps = (f"{box.function} of {', '.join(_names(boxes, box))}" for box in boxes if box.inputs)
    return _Figure(caption, arranged, tuple(labels), "; ".join(steps))


def _names(boxes: Sequence[Box], box: Box) -> list[str]:
    functions = {other.name: other.function for other in boxes}
    return [functions[name] for name in box.inputs]


def _shortened(line: str) -> str:
    if len(line) <= _LONGEST:
        return line
    half = (_LONGEST - 1) // 2
    return f"{line[:half]}…{line[-half:]}"
