"""Where the boxes of a drawing go: in layers, each box as far down as what is made of it allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from .picture import Box

_GAP = 22.0  # between two boxes of a layer
_BEND = 10.0  # a line that passes a layer has so much room there
_SWEEPS = 12

Point = tuple[float, float]


@dataclass(frozen=True)
class Placed:
    """A box and where its upper left corner is."""

    box: Box
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Layout:
    """Boxes, the lines from what they are made of to them (each a list of points), and the size of it all."""

    boxes: tuple[Placed, ...]
    lines: tuple[tuple[Point, ...], ...]
    width: float
    height: float


def layout(boxes: Sequence[Box], widths: Mapping[str, float], height: float, step: float) -> Layout:
    """Place boxes of these ``widths`` and one ``height`` in layers that are ``step`` apart."""
    edges = [(source, box.name) for box in boxes for source in box.inputs]
    layer = _layers([box.name for box in boxes], edges)
    chains = []  # of each edge, with a place in every layer that it passes
    for number, (source, target) in enumerate(edges):
        passed = [f"{number} in {between}" for between in range(layer[source] + 1, layer[target])]
        layer |= {name: layer[source] + 1 + i for i, name in enumerate(passed)}
        chains.append([source, *passed, target])
    rows: list[list[str]] = [[] for _ in range(1 + max(layer.values(), default=0))]
    for name, row in layer.items():
        rows[row].append(name)
    links = [pair for chain in chains for pair in pairwise(chain)]
    room = {name: widths.get(name, _BEND) for name in layer}
    centre = _centres(rows, links, room)

    left = min((centre[name] - room[name] / 2 for name in layer), default=0.0)
    right = max((centre[name] + room[name] / 2 for name in layer), default=0.0)
    placed = tuple(
        Placed(box, centre[box.name] - left - widths[box.name] / 2, layer[box.name] * step, widths[box.name], height)
        for box in boxes
    )

    def points(chain: Sequence[str]) -> Iterator[Point]:
        yield centre[chain[0]] - left, layer[chain[0]] * step + height
        for name in chain[1:-1]:
            yield centre[name] - left, layer[name] * step
            yield centre[name] - left, layer[name] * step + height
        yield centre[chain[-1]] - left, layer[chain[-1]] * step

    lines = tuple(tuple(points(chain)) for chain in chains if layer[chain[0]] < layer[chain[-1]])
    return Layout(placed, lines, right - left, max(0.0, (len(rows) - 1) * step + height))


def _layers(names: Sequence[str], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """The layer of each name, 0 at the top. An edge that would close a circle is not followed."""
    users: dict[str, list[str]] = {name: [] for name in names}
    for source, target in edges:
        users[source].append(target)
    below: dict[str, int] = {}

    def depth(name: str, path: frozenset[str]) -> int:
        if name not in below:
            follow = [user for user in users[name] if user not in path]
            below[name] = 1 + max((depth(user, path | {name}) for user in follow), default=-1)
        return below[name]

    deepest = max((depth(name, frozenset([name])) for name in names), default=0)
    return {name: deepest - below[name] for name in names}


def _centres(
    rows: Sequence[list[str]], links: Sequence[tuple[str, str]], room: Mapping[str, float]
) -> dict[str, float]:
    """The middle of each name: close to its neighbours', rows in an order in which few lines cross; sorts ``rows``."""
    above: dict[str, list[str]] = {name: [] for row in rows for name in row}
    below: dict[str, list[str]] = {name: [] for row in rows for name in row}
    for source, target in links:
        above[target].append(source)
        below[source].append(target)
    centre: dict[str, float] = {}
    for row in rows:
        centre |= _apart(row, dict.fromkeys(row, 0.0), room)
    for sweep in range(2 * _SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            beside = above if down else below
            wanted = {
                name: fmean(centre[other] for other in beside[name]) if beside[name] else centre[name] for name in row
            }
            if sweep < _SWEEPS:  # then only the places change
                row.sort(key=wanted.__getitem__)
            centre |= _apart(row, wanted, room)
    return centre


def _apart(row: Sequence[str], wanted: Mapping[str, float], room: Mapping[str, float]) -> dict[str, float]:
    """Places in this order as near to the wanted ones as can be without overlapping."""
    # Neighbours that would overlap become one block, which stands where its members want to be on average.
    blocks: list[tuple[list[str], list[float]]] = []  # members, and where the first of them wants to be for each
    for name in row:
        members, starts = [name], [wanted[name]]
        while blocks and fmean(blocks[-1][1]) + _span([*blocks[-1][0], members[0]], room) > fmean(starts):
            before, their_starts = blocks.pop()
            offset = _span([*before, members[0]], room)
            members, starts = before + members, their_starts + [start - offset for start in starts]
        blocks.append((members, starts))
    return {
        name: fmean(starts) + _span(members[: i + 1], room)
        for members, starts in blocks
        for i, name in enumerate(members)
    }


def _span(names: Sequence[str], room: Mapping[str, float]) -> float:
    """From the middle of the first to that of the last, next to each other."""
    pairs = pairwise(names)
    return sum((room[a] + room[b]) / 2 + _GAP for a, b in pairs)
