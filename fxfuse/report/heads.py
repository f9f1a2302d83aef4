"""The heads of a program, each once, however often it was compiled: what the forms of a report count and add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from .records import FusedRead, GraphRecord, Read, Report, Site, Status
from .source import TORCH

COMPUTED = ("read", "at_once")  # kinds of reads in which deferred logits, or some of their rows, were built


@dataclass(frozen=True)
class Head:
    """A head of the program.

    A function that is compiled again has the same heads again, as have two functions that call one module. Several
    modules that run the same compiled code have one each, where it is known: if their logits are deferred.

    Attributes:
        site: of the graph that spares most with it, as it was compiled for most rows; the last of such.
        graph: that graph.
        index: of ``site`` in it.
        graphs: how many have it.
        count: how many are alike, and were read alike.
        reads: where their deferred logits cost memory after all; each place once.
        fused_reads: where these were read and did not; each place once.
        bytes: that no graph built for these; None where it is not known.
    """

    site: Site
    graph: GraphRecord
    index: int
    graphs: int
    count: int
    reads: tuple[Read, ...]
    fused_reads: tuple[FusedRead, ...]
    bytes: int | None

    @property
    def bytes_saved(self) -> int | None:
        """What was not built at all: 0 where logits were computed after all, None where it is not known."""
        return 0 if self.is_computed else self.bytes

    @property
    def is_computed(self) -> bool:
        """Whether deferred logits of it, or some of their rows, were built."""
        return any(read.kind in COMPUTED for read in self.reads)


@dataclass(frozen=True)
class Totals:
    """Heads by what became of them; bytes that were not built; and how many heads there are of which these are unknown.

    ``computed`` are bytes that no graph built, but something that read deferred logits: they are not among ``saved``.
    """

    counts: Counter[Status]
    saved: int
    computed: int
    unknown: int


def heads_of(report: Report) -> list[Head]:
    groups: dict[object, list[_Seen]] = {}
    for compilation, graph in compilations(report):
        for index, site in enumerate(graph.sites):
            code = site.reason.code if site.reason else ""
            # Whose weight is known is that head in whatever function; else only what is compiled again is the same.
            function = () if site.weights else (graph.compile_id.partition("/")[0], graph.function)
            # Of a function of torch's it is where that was called.
            where = "" if graph.where.startswith(TORCH) else site.where
            shape = (site.hidden, site.vocab, site.dtype)
            key = (function, site.status, where, site.module, site.pattern, *shape, site.variant, code)
            groups.setdefault(key, []).append(_Seen(compilation, graph, index, site))
    return [head for group in groups.values() for head in _alike(report, group)]


def totals(heads: Iterable[Head]) -> Totals:
    heads = list(heads)
    counts: Counter[Status] = Counter()
    for head in heads:
        counts[head.site.status] += head.count
    return Totals(
        counts,
        saved=sum(head.bytes_saved or 0 for head in heads),
        computed=sum(head.bytes or 0 for head in heads if head.is_computed),
        unknown=sum(head.count for head in heads if head.bytes_saved is None),
    )


def compilations(report: Report) -> Iterator[tuple[int, GraphRecord]]:
    """Each graph with the number of the compilation that it is from: one of a whole function has one graph, but
    ``DDPOptimizer`` splits it.
    """
    number, last = -1, None
    for graph in report.graphs:
        is_part = graph.ending is None and last is not None and last.ending is None and graph.compile_id != ""
        if not (is_part and last is not None and last.compile_id == graph.compile_id):
            number += 1
        last = graph
        yield number, graph


@dataclass(frozen=True)
class _Seen:
    compilation: int
    graph: GraphRecord
    index: int
    site: Site


def _alike(report: Report, group: Sequence[_Seen]) -> Iterator[Head]:
    """The heads in a group of sites that differ at most in their weights, those together that were read alike."""
    places = {(seen.graph.id, seen.index) for seen in group}
    reads = [read for read in report.reads if (read.graph, read.site) in places]
    fused = [read for read in report.fused_reads if (read.graph, read.site) in places]
    weights = dict.fromkeys(weight for seen in group for weight in seen.site.weights)
    unknown = None in {read.weight for read in reads} | {read.weight for read in fused}
    if unknown or not weights:  # then they cannot be told apart
        yield _head(group, (), reads, fused)
        return
    together: dict[object, list[int]] = {}
    for weight in weights:
        costs = {(read.kind, read.where) for read in reads if read.weight == weight}
        chains = {(read.where, read.chain) for read in fused if read.weight == weight}
        together.setdefault((frozenset(costs), frozenset(chains)), []).append(weight)
    for some in together.values():
        yield _head(
            [seen for seen in group if set(some) & set(seen.site.weights)],
            some,
            [read for read in reads if read.weight in some],
            [read for read in fused if read.weight in some],
        )


def _head(group: Sequence[_Seen], weights: Sequence[int], reads: Sequence[Read], fused: Sequence[FusedRead]) -> Head:
    largest = max(reversed(group), key=lambda seen: _bytes(seen.site))  # the last of such
    by_compilation: dict[int, list[Site]] = {}
    for seen in group:
        by_compilation.setdefault(seen.compilation, []).append(seen.site)
    # Each of several modules that share compiled code has what its own sites show, compiled for most rows.
    of_each = [
        max(sum(_bytes(site) for site in sites if weight in site.weights) for sites in by_compilation.values())
        for weight in weights
    ] or [max(sum(map(_bytes, sites)) for sites in by_compilation.values())]
    return Head(
        site=largest.site,
        graph=largest.graph,
        index=largest.index,
        graphs=len(by_compilation),
        count=max(len(weights), *map(len, by_compilation.values())),
        reads=_once(reads, lambda read: (read.kind, read.where)),
        fused_reads=_once(fused, lambda read: (read.chain, read.where)),
        bytes=sum(of_each) if all(seen.site.bytes_saved is not None for seen in group) else None,
    )


def _bytes(site: Site) -> int:
    return site.bytes_saved or 0


R = TypeVar("R", bound=Read | FusedRead)


def _once(reads: Iterable[R], place_of: Callable[[R], object]) -> tuple[R, ...]:
    """``reads`` of a head, of which several are of one place where it was compiled several times."""
    merged: dict[object, R] = {}
    for read in reads:
        known = merged.setdefault(place_of(read), read)
        if known is not read:
            summed = {
                name: getattr(known, name) + getattr(read, name) for name in ("count", "bytes") if hasattr(read, name)
            }
            merged[place_of(read)] = replace(known, **summed)
    return tuple(merged.values())
