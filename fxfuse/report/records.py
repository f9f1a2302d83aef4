"""What is remembered of every head seen: ``Site``, and the ``Report`` that holds them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..reasons import Reason

Status = Literal["fused", "deferred", "kept"]


@dataclass(frozen=True)
class Site:
    """One projection to the vocabulary in one compiled graph, and what became of it.

    Attributes:
        status: ``"fused"`` (the logits no longer exist), ``"deferred"`` (the graph returns them, and they will exist
            when something reads them; what reads them inside is fused) or ``"kept"`` (left as it was).
        pattern: the chain from the projection to its readers, ``"linear → view → cross_entropy"``; several
            readers are joined by ``" + "``.
        where: ``file.py:line`` of the projection in the user's source.
        module: path of the module that owns the weight, ``"lm_head"``; empty if it is no module's.
        rows: number of rows N, or the symbolic expression where it is dynamic.
        hidden: hidden size D.
        vocab: vocabulary size V.
        dtype: dtype of the logits, ``"bfloat16"``.
        variant: how it is computed: ``"gradients in forward"``, ``"exponentials kept for the backward"``,
            ``"recompute in backward"``, ``"forward only"``; empty when kept.
        bytes_saved: bytes of the ``[N, V]`` tensors that eager makes at this site and the fused program does not
            (the logits, their converted copy, their gradient); 0 when kept. Dynamic sizes count by their hint.
        reason: why it was kept; None unless it was.
    """

    status: Status
    pattern: str
    where: str
    module: str
    rows: int | str
    hidden: int | str
    vocab: int | str
    dtype: str
    variant: str = ""
    bytes_saved: int = 0
    reason: Reason | None = None


@dataclass(frozen=True)
class GraphRecord:
    """The sites of one compiled graph, ``id`` counting from 0 in the order of compilation."""

    id: int
    sites: tuple[Site, ...] = ()


@dataclass(frozen=True)
class Read:
    """A place in the program that made deferred logits cost memory after all.

    Attributes:
        kind: ``"read"`` where something needed their values, ``"copied"`` where an optimizer changed the weight while
            they were alive and unread, so that it was copied.
        where: ``file.py:line`` of the statement.
        head: ``file.py:line`` of the projection.
        count: how often.
        bytes: of the logits, or of the copy, all together.
    """

    kind: Literal["read", "copied"]
    where: str
    head: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Report:
    """Every graph that was compiled, with its sites. Iterates over the sites; prints as a table."""

    graphs: tuple[GraphRecord, ...] = field(default_factory=tuple)
    reads: tuple[Read, ...] = field(default_factory=tuple)

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(site for graph in self.graphs for site in graph.sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: ``{"fxfuse": version, "torch": version, "graphs": [{"id": …, "sites": […]}],
        "reads": […]}``.
        """
        import torch

        from .. import __version__

        return {
            "fxfuse": __version__,
            "torch": str(torch.__version__),
            "graphs": [{"id": g.id, "sites": [asdict(s) for s in g.sites]} for g in self.graphs],
            "reads": [asdict(read) for read in self.reads],
        }

    def __str__(self) -> str:
        from .text import table

        return table(self)


class Journal:
    """Graphs in the order in which they were compiled, in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graphs: list[GraphRecord] = []
        self._reads: dict[tuple[Literal["read", "copied"], str, str], tuple[int, int]] = {}

    def add(self, sites: Iterable[Site]) -> GraphRecord:
        with self._lock:
            record = GraphRecord(len(self._graphs), tuple(sites))
            self._graphs.append(record)
        return record

    def note(self, kind: Literal["read", "copied"], site: Site, where: str, size: int) -> None:
        """Remember that deferred logits of ``site`` cost ``size`` bytes."""
        from . import announce  # which makes reports of records

        with self._lock:
            key = (kind, where, site.where)
            count, total = self._reads.get(key, (0, 0))
            self._reads[key] = (count + 1, total + size)
        announce.read(kind, site, where, size, again=count > 0)

    def report(self, since: int = 0) -> Report:
        """The graphs from number ``since`` on, and every read."""
        with self._lock:
            reads = (Read(*key, count, total) for key, (count, total) in self._reads.items())
            return Report(tuple(self._graphs[since:]), tuple(reads))

    def __len__(self) -> int:
        return len(self._graphs)


journal = Journal()
