"""What is remembered of every head seen: ``Site``, and the ``Report`` that holds them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

from .. import compat
from ..reasons import Reason
from .source import line_at
from .telling import telling
from .weights import number_of

if TYPE_CHECKING:
    from torch.fx import Graph, Node

    from ..candidate import Candidate
    from ..mutation import Region
    from .chain import Applied

Status = Literal["fused", "deferred", "kept"]
Kind = Literal["read", "copied", "at_once"]
COSTS: dict[Kind, str] = {
    "read": "deferred logits were computed after all, because something read their values",
    "at_once": "logits were computed at once, because there were fewer bytes of them than fxfuse.min_logits_bytes, or "
    "inside of a functional transform",
    "copied": "a weight was copied before an optimizer changed it, because logits that nothing had read were still "
    "there (`del` them before the step to save the memory)",
}
_MOST_WEIGHTS = 64  # of a site that are told apart: a program may make a new one in every step
_WAYS = 8  # to one reader of deferred logits that are told apart
SCHEMA = 2  # of the JSON form; see docs/report.md


@dataclass(frozen=True)
class Use:
    """One way in which a program uses logits.

    Attributes:
        chain: from the projection to what reads them, each function as people write it, with the arguments that
            matter: ``"lm_head → float → view → cross_entropy(ignore_index=-100)"``. Logits that leave the graph end in
            ``"return"`` or ``"graph break"``, those that leave a checkpointed part of it in ``"end of checkpoint"``.
        where: ``file.py:line`` of the last step; empty if not known.
        source: the text of that line when the graph was captured; empty if it could not be read.
        count: how often the graph has it, as it may in a loop.
        leaves: whether the logits leave the graph here, or a part of it.
        vocab: vocabulary size V.
        checkpointed: whether it is a checkpointed part that they leave, which the rest of the graph reads.
    """

    chain: str
    where: str
    source: str = ""
    count: int = 1
    leaves: bool = False
    vocab: int | str = 0
    checkpointed: bool = False


@dataclass(frozen=True)
class Projection:
    """What makes the logits of a head, or a part of them.

    Attributes:
        name: with which chains begin: ``"lm_head"``, after its module; or the function with its weight,
            ``"linear(wte.weight)"``.
        where: ``file.py:line`` in the user's source.
    """

    name: str
    where: str


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
        pattern: the functions from the projection to its readers, ``"linear → view → cross_entropy"``; several
            readers are joined by ``" + "``.
        where: ``file.py:line`` of the projection in the user's source, or of what calls a function of PyTorch's.
        module: path of the module that owns the weight, ``"lm_head"``; empty if it is no module's.
        rows: number of rows N, of all projections if the program joins several, or the symbolic expression where it is
            dynamic.
        hidden: hidden size D.
        vocab: vocabulary size V.
        dtype: dtype of the logits, ``"bfloat16"``.
        variant: how it is computed: ``"gradients in forward"``, ``"exponentials kept for the backward"``,
            ``"recompute in backward"``, ``"forward only"``, ``"all entries, normalised in place"``, ``"without a
            product"``; several are joined by ``"; "``; empty when kept.
        bytes_saved: bytes of the ``[N, V]`` tensors that eager makes at this site and the fused program does not
            (the logits, their converted copy, their gradient), less ``copied_bytes``; 0 when kept. Of a deferred head,
            as long as nothing computes them: see ``Report.reads``. Dynamic sizes count by their hint; None where one
            has none.
        reason: why it was kept; None unless it was.
        chain: all uses in one line, ``"lm_head → float → cross_entropy + argmax"``.
        source: the text of the line at ``where`` when the graph was captured; empty if it could not be read.
        uses: what reads the logits, in the order of the graph.
        why: why this variant, a sentence for each; empty when kept.
        shape: of the logits (of the first projection), the vocabulary last, with expressions where it is dynamic.
        rows_hint: number of rows when the graph was captured; None where it depends on values, as what a mask selects.
        logits_bytes, converted_bytes, gradient_bytes: bytes, in eager, of the logits, of their copies in other dtypes,
            and of their gradient; None as ``bytes_saved``, which is their sum less the next, at least 0, unless the
            head is kept.
        copied_bytes: bytes of copies of the weight, and of its gradients but the first, that the fused program makes
            and eager does not.
        weights: numbers, in this process, of the parameters that are known to have been its weight: that which the
            graph was captured with and, of deferred logits, those that it was called with. Modules of one class may
            share compiled code. Empty if the weight is no parameter.
        measured: time and memory of it, where they were asked for; None too where it was kept.
        projections: all of them, in the order of the graph, if the program joins the logits of several; else the one.
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
    bytes_saved: int | None = 0
    reason: Reason | None = None
    chain: str = ""
    source: str = ""
    uses: tuple[Use, ...] = ()
    why: str = ""
    shape: tuple[int | str, ...] = ()
    rows_hint: int | None = 0
    logits_bytes: int | None = 0
    converted_bytes: int | None = 0
    gradient_bytes: int | None = 0
    copied_bytes: int = 0
    weights: tuple[int, ...] = ()
    measured: Measured | None = None
    projections: tuple[Projection, ...] = ()


@dataclass(frozen=True)
class Ending:
    """Why a graph ended where it did.

    Attributes:
        is_break: whether that was a graph break, and not the end of the function.
        reason: in Dynamo's words, one line: ``"Failed to trace builtin operator"``.
        explanation: what Dynamo adds to it; may be empty.
        hints: what Dynamo advises.
        where: ``file.py:line`` of the innermost frame outside of PyTorch; empty if not known.
        source: the text of that line.
    """

    is_break: bool
    reason: str
    explanation: str = ""
    hints: tuple[str, ...] = ()
    where: str = ""
    source: str = ""


@dataclass(frozen=True)
class GraphRecord:
    """One compiled graph.

    Attributes:
        id: counts from 0 in the order of compilation.
        sites: its heads.
        function: the function that it was captured from, ``"Model.forward"`` (without its class before Python 3.11 if
            it is not a module's ``forward``); empty if not known.
        where: ``file.py:line`` where that begins, or where it goes on after a graph break.
        resumed: whether it goes on after a graph break.
        compile_id: Dynamo's: the number of the function, and which compilation of it this is: ``"0/1"``.
        recompiled: why the function was compiled again, in Dynamo's words; empty if this was the first time.
        ending: why it ended; None where it is a part of a graph that was split, as ``DDPOptimizer`` does.
        losses: losses in it of what it was given, of which another graph may have made the logits.
        enabled: the option ``fxfuse.enabled``, without which no head is looked for.
        unmasked: ``file.py:line`` of each attention that has ``is_causal``, or nothing, in place of its mask.
    """

    id: int
    sites: tuple[Site, ...] = ()
    function: str = ""
    where: str = ""
    resumed: bool = False
    compile_id: str = ""
    recompiled: str = ""
    ending: Ending | None = None
    losses: tuple[Use, ...] = ()
    enabled: bool = True
    unmasked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Read:
    """A place in the program that made deferred logits cost memory after all.

    Attributes:
        kind: ``"read"`` where something needed their values, ``"copied"`` where an optimizer changed the weight while
            they were alive and unread, so that it was copied; ``"at_once"`` where they were not deferred in this call,
            as they were smaller than ``fxfuse.min_logits_bytes`` or inside of a functional transform.
        where: ``file.py:line`` of the statement.
        head: ``file.py:line`` of the projection.
        count: how often.
        bytes: of the logits, or of the copy, all together.
        source: the text of the line at ``where`` when it was first run; empty if it could not be read.
        graph: ``id`` of the graph that the logits left.
        site: which of its ``sites`` they are of.
        weight: which of that site's ``weights``; None if it was no parameter, or one of too many.
    """

    kind: Kind
    where: str
    head: str
    count: int
    bytes: int
    source: str = ""
    graph: int = 0
    site: int = 0
    weight: int | None = None


@dataclass(frozen=True)
class FusedRead:
    """A place in the program that read deferred logits without their being computed.

    Attributes:
        chain: from the projection to what reads them, those steps inside of the graph too.
        where: ``file.py:line`` of the statement.
        source: the text of that line when it was first run; empty if it could not be read.
        head: ``file.py:line`` of the projection.
        count: how often.
        graph, site, weight: as in ``Read``.
    """

    chain: str
    where: str
    source: str
    head: str
    count: int
    graph: int = 0
    site: int = 0
    weight: int | None = None


@dataclass(frozen=True)
class Report:
    """Every graph that was compiled, with its sites. Iterates over the sites; prints as a table.

    Attributes:
        graphs: in the order of compilation.
        reads: where deferred logits cost memory after all.
        fused_reads: where they were read and did not.
    """

    graphs: tuple[GraphRecord, ...] = field(default_factory=tuple)
    reads: tuple[Read, ...] = field(default_factory=tuple)
    fused_reads: tuple[FusedRead, ...] = field(default_factory=tuple)

    @property
    def sites(self) -> tuple[Site, ...]:
        """The heads of all graphs."""
        return tuple(site for graph in self.graphs for site in graph.sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, every field of which ``docs/report.md`` describes."""
        import torch

        from .. import __version__

        return {"schema": SCHEMA, "fxfuse": __version__, "torch": str(torch.__version__), **asdict(self)}

    def __str__(self) -> str:
        from .text import table, width_of

        return table(self, width_of(sys.stdout))


class Watcher(Protocol):
    """Sees one graph being rewritten, and each checkpointed body in it; keeps neither."""

    def analysed(self, graph: Graph, candidates: Sequence[Candidate], outside: Region | None) -> None:
        """Nothing is changed yet. Only of graphs that have heads, as the others; ``outside`` is around a part that is
        checkpointed."""

    def planned(self, candidates: Sequence[Candidate]) -> None:
        """It is known what becomes of each head, and what is there now is still there."""

    def rewritten(self, graph: Graph, made: Mapping[Candidate, Sequence[Node]]) -> None:
        """It is done: ``made`` are the new nodes for each head, of which some may be gone again."""


W = TypeVar("W", bound=Watcher)


class Watched(NamedTuple):
    """What ``watchers`` have of a graph that was compiled with ``mode`` and ``options``."""

    watchers: Sequence[Watcher]
    mode: str | None
    options: Mapping[str, Any]

    def by(self, kind: type[W]) -> W | None:
        return next((watcher for watcher in self.watchers if isinstance(watcher, kind)), None)


class Listener(Protocol):
    """Is told of every decision, as it is made."""

    def graph(self, record: GraphRecord) -> None:
        """A graph was compiled."""

    def read(self, kind: Kind, head: str, where: str, size: int, again: bool) -> None:
        """Deferred logits of the projection at ``head`` cost ``size`` bytes, ``again`` at the same place or not."""


@dataclass
class _Noted:
    """What a place did with deferred logits of ``site``, made of parameter ``weight`` by the projection at ``head``."""

    site: Site  # which keeps its identity from becoming that of another
    weight: int | None
    head: str
    where: str
    source: str
    chain: str = ""
    count: int = 0
    bytes: int = 0


class Journal:
    """Graphs in the order in which they were compiled, in this process, and what became of deferred logits.

    ``watchers`` are made anew for every graph, and there are none but where a report asks for more than the sites;
    ``watched`` has theirs, by the number of the graph. ``listeners`` are called outside of the lock. A finaliser that
    reads logits may run anywhere, inside of the lock as well: so what is walked is a copy.
    """

    def __init__(self) -> None:
        self.watchers: list[Callable[[], Watcher]] = []
        self.watched: dict[int, Watched] = {}
        self.listeners: list[Listener] = []
        self._lock = threading.RLock()
        self._graphs: list[GraphRecord] = []
        # By the identity of the site, as two graphs may have equal ones.
        self._reads: dict[tuple[Kind, int, int | None, str, str], _Noted] = {}
        self._fused_reads: dict[tuple[int, int | None, str, str, str, str], dict[tuple[str, ...], _Noted]] = {}
        self._weights: dict[int, dict[int, None]] = {}

    def add(self, sites: Iterable[Site], captured: GraphRecord | None = None) -> GraphRecord:
        """Remember a graph with its ``sites``, of which everything else is as in ``captured``."""
        with self._lock:
            record = replace(captured or GraphRecord(0), id=len(self._graphs), sites=tuple(sites))
            self._graphs.append(record)
        for listener in self.listeners:
            with telling():
                listener.graph(record)
        return record

    @contextlib.contextmanager
    def recorded(self, sites: Iterable[Site], captured: GraphRecord, watched: Watched | None) -> Iterator[None]:
        """``add`` a graph, and what watched it, once it is compiled or has failed to be.

        Not one that PyTorch gives up to capture it anew, for a number that turned out to be needed, say.
        """
        try:
            yield
        except BaseException as error:
            if not compat.is_captured_anew(error):
                self._add(sites, captured, watched)
            raise
        self._add(sites, captured, watched)

    def _add(self, sites: Iterable[Site], captured: GraphRecord, watched: Watched | None) -> None:
        record = self.add(sites, captured)
        if watched is not None:
            self.watched[record.id] = watched

    def deferred(self, site: Site, weight: Any) -> int | None:
        """Remember that logits of ``site`` were made of ``weight``, and say which parameter that is; None where it is
        no parameter, or one too many.
        """
        number = number_of(weight)
        if number is None or number in site.weights:
            return number
        with self._lock:
            known = self._weights.setdefault(id(site), {})
            if len(known) < _MOST_WEIGHTS:
                known[number] = None
            return number if number in known else None

    def note(self, kind: Kind, site: Site, weight: int | None, head: str, where: str, size: int) -> None:
        """Remember that deferred logits of ``site``, made of parameter ``weight``, cost ``size`` bytes.

        ``head`` is where their projection is, which is not ``site.where`` for the second of several.
        """
        key = (kind, id(site), weight, head, where)
        noted = self._reads.get(key) or _Noted(site, weight, head, where, line_at(where))
        with self._lock:
            noted = self._reads.setdefault(key, noted)
            again = noted.count > 0
            noted.count += 1
            noted.bytes += size
        for listener in self.listeners:
            with telling():
                listener.read(kind, head, where, size, again)

    def note_fused(
        self, site: Site, weight: int | None, head: str, where: str, before: str, calls: Sequence[Applied]
    ) -> None:
        """Remember that the last of ``calls`` read deferred logits by a fused op; all else as in ``note``.

        ``before`` is the chain to what left the graph, ``calls`` what was done since. Called at every step of a
        training, perhaps with other numbers each time: only the first few ways to a reader are told apart.
        """
        from .chain import chain_of  # which makes records of graphs

        ways = self._fused_reads.setdefault((id(site), weight, head, where, before, calls[-1].name), {})
        key: tuple[str, ...] = tuple(call.key for call in calls)
        if key not in ways and len(ways) >= _WAYS:
            key = ()
        # Outside of the lock: what is called for it may read logits itself.
        noted = ways.get(key) or _Noted(
            site, weight, head, where, line_at(where), chain_of(before, calls, in_full=bool(key))
        )
        with self._lock:
            ways.setdefault(key, noted).count += 1

    def report(self, since: int = 0) -> Report:
        """The graphs from number ``since`` on, and what became of logits that left them."""
        with self._lock:
            graphs = self._graphs[since:]
            places = {id(site): (graph.id, i) for graph in graphs for i, site in enumerate(graph.sites)}
            reads = [
                Read(kind, n.where, n.head, n.count, n.bytes, n.source, *places[id(n.site)], n.weight)
                for (kind, *_), n in self._reads.copy().items()
                if id(n.site) in places
            ]
            fused = [
                FusedRead(n.chain, n.where, n.source, n.head, n.count, *places[id(n.site)], n.weight)
                for ways in self._fused_reads.copy().values()
                for n in ways.copy().values()
                if id(n.site) in places
            ]
            return Report(tuple(map(self._called, graphs)), tuple(reads), tuple(fused))

    def _called(self, graph: GraphRecord) -> GraphRecord:
        """``graph`` with every parameter that its sites were called with."""
        if not any(id(site) in self._weights for site in graph.sites):
            return graph
        sites = (replace(site, weights=(*site.weights, *self._weights.get(id(site), ()))) for site in graph.sites)
        return replace(graph, sites=tuple(sites))

    def __len__(self) -> int:
        return len(self._graphs)


journal = Journal()
