"""What is remembered of every head seen: ``Site``, and the ``Report`` that holds them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from ..reasons import Reason

if TYPE_CHECKING:
    from torch.fx import Graph, Node

    from ..analysis import Candidate

Status = Literal["fused", "deferred", "kept"]


@dataclass(frozen=True)
class Cost:
    """Of one head alone, forward and backward: milliseconds, and the peak of memory above its operands in bytes.

    ``bytes`` is None where this cannot be told.
    """

    ms: float
    bytes: int | None


@dataclass(frozen=True)
class Measured:
    """What ``--measure`` found.

    Attributes:
        without, fused: None where it could not be run.
        device: where it ran, ``"cuda:0"``.
        note: why something was not measured, or in what the head alone differs from where it was cut out of.
    """

    without: Cost | None = None
    fused: Cost | None = None
    device: str = ""
    note: str = ""


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
        measured: time and memory of it, where they were asked for; None too where it was kept.
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
    measured: Measured | None = None


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


class Watcher(Protocol):
    """Sees one graph being rewritten, and each checkpointed body in it; keeps neither."""

    def analysed(self, graph: Graph, candidates: Sequence[Candidate], in_checkpoint: bool) -> None:
        """Nothing is changed yet. Only of graphs that have heads, as the others."""

    def planned(self, candidates: Sequence[Candidate]) -> None:
        """It is known what becomes of each head, and what is there now is still there."""

    def rewritten(self, graph: Graph, made: Mapping[Candidate, Sequence[Node]]) -> None:
        """It is done: ``made`` are the new nodes for each head, of which some may be gone again."""


W = TypeVar("W", bound=Watcher)


@dataclass(frozen=True)
class Watched:
    """What ``watchers`` have of a graph that was compiled with ``mode`` and ``options``."""

    watchers: Sequence[Watcher]
    mode: str | None
    options: Mapping[str, Any]

    def by(self, kind: type[W]) -> W | None:
        return next((watcher for watcher in self.watchers if isinstance(watcher, kind)), None)


class Journal:
    """Graphs in the order in which they were compiled, in this process.

    ``watchers`` are made anew for every graph, and there are none but where a report asks for more than the sites;
    ``watched`` has theirs, by the number of the graph.
    """

    def __init__(self) -> None:
        self.watchers: list[Callable[[], Watcher]] = []
        self.watched: dict[int, Watched] = {}
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
        with self._lock:
            key = (kind, where, site.where)
            count, total = self._reads.get(key, (0, 0))
            self._reads[key] = (count + 1, total + size)

    def report(self, since: int = 0) -> Report:
        """The graphs from number ``since`` on, and every read."""
        with self._lock:
            reads = (Read(*key, count, total) for key, (count, total) in self._reads.items())
            return Report(tuple(self._graphs[since:]), tuple(reads))

    def __len__(self) -> int:
        return len(self._graphs)


journal = Journal()
