"""The graph driver: find the heads of a Dynamo graph, prove how they are read, and rewrite in place.

``rewrite`` analyses everything first, then adds the new nodes, and only then redirects users and erases what it
replaced. A failure before that last step leaves the graph as it was.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from . import compat, errors
from .analysis import Analysis, analyse
from .apart import Apart
from .candidate import Candidate
from .costs import eager_bytes, total
from .escape import Escape, send_out
from .mutation import example_of, storages
from .options import Options
from .passes import BESIDE, WHOLE, compute, why
from .planning import Pass, Planner
from .readers import Reader
from .reasons import because
from .replay import Emit, Handle
from .report.chain import Told, uses_of
from .report.records import Ending, Projection, Site, Watcher
from .report.source import function_name, line_at, location, module_path, projection_name
from .report.telling import telling
from .report.weights import captured_with

# --- rewriting ------------------------------------------------------------------------------------------------


class _GraphEmit(Emit):
    """Adds nodes before a place in a graph, each with an example value of the graph's own fake mode."""

    def __init__(self, graph: Graph, place: Node, like: Node, made: list[Node]) -> None:
        self.graph, self.place, self.like, self.made = graph, place, like, made
        self._shared: dict[Any, Node] = {}
        self._early: dict[Node, Node] = {}

    def make_early(self, node: Node) -> None:
        """Make what ``node`` makes later: here it stands for that from now on."""
        target: Any = node.target
        function = getattr(Tensor, target) if node.op == "call_method" else target
        self._early[node] = self.anew(function, *node.args, **node.kwargs)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        args, kwargs = self._at_hand(args, kwargs)
        key = (function, repr(args), repr(kwargs))
        if key not in self._shared:  # a pure function of the same arguments: once is enough
            self._shared[key] = self.anew(function, *args, **kwargs)
        return self._shared[key]

    def anew(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Like a call, but the node is never one that was made before."""
        args, kwargs = self._at_hand(args, kwargs)
        with self.graph.inserting_before(self.place):
            if isinstance(function, types.MethodDescriptorType):
                node = self.graph.call_method(function.__name__, args, kwargs)
            else:
                node = self.graph.call_function(function, args, kwargs)
        self.made.append(node)
        for name in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if name in self.like.meta:
                node.meta[name] = self.like.meta[name]
        values = torch.fx.node.map_arg((args, kwargs), example_of)
        with compat.fake_mode_of(example_of(self.like)):
            node.meta["example_value"] = function(*values[0], **values[1])
        return node

    def _at_hand(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return torch.fx.node.map_arg((args, kwargs), lambda node: self._early.get(node, node))

    def example(self, handle: Handle) -> Tensor:
        return example_of(handle)


def _write(
    one: Pass, emit_before: Callable[[Node], _GraphEmit], planner: Planner, in_checkpoint: bool, returned: set[int]
) -> tuple[str, list[Node]]:
    """Emit a pass: the variant, and what replaces each of its readers; ``returned`` is the memory of all outputs."""
    places = [planner.finishes_before(one, node) for node, _ in one.readers]
    emits = {place: emit_before(place) for place in (one.place, *places)}
    own = [emits[place] for place in places]
    for node in one.early:
        emits[one.place].make_early(node)
    variant, results = compute(emits[one.place], one.of, in_checkpoint, planner.options.memory, one.room, own)
    if variant == BESIDE:
        return variant, results  # a view, as in eager
    saved = any(example_of(result).requires_grad for result in results)
    return variant, [
        _as_eager(emit, node, result, alone=variant == WHOLE and not (saved and storages(node) & returned))
        for emit, (node, _), result in zip(own, one.readers, results, strict=True)
    ]


def _as_eager(emit: _GraphEmit, node: Node, result: Node, alone: bool) -> Node:
    """``result`` with the dtype that eager returns, in memory that nothing else uses if it is not left ``alone``.

    Two readers may return one statistic, which the backward needs too: what the program does to what it was given
    must reach neither.
    """
    expected = example_of(node)
    if emit.example(result).dtype != expected.dtype:
        result = emit(torch.Tensor.to, result, expected.dtype)
    # What eager returns of these functions is contiguous, and a view of it may rely on that.
    if not alone or not emit.example(result).is_contiguous():
        result = emit.anew(torch.clone, result, memory_format=torch.contiguous_format)
    made = emit.example(result)
    if made.dim() != expected.dim() or made.dtype != expected.dtype:
        raise AssertionError(f"{node.name}: {made.shape} {made.dtype} for {expected.shape} {expected.dtype}")
    return result


# --- telling --------------------------------------------------------------------------------------------------

# The passes of a head: how each is computed, and what it reads.
_Passes = Sequence[tuple[str, Sequence[Reader]]]


def _told(candidate: Candidate, analysis: Analysis, end: Ending | None, in_checkpoint: bool) -> Told:
    """How the logits are used, as far as that can be told."""
    told = Told()
    with telling():
        projections = {
            node: Projection(projection_name(node, head.weight), location(node) or "")
            for node, head in candidate.projections.items()
        }
        returned = [escaped.node for escaped in candidate.escaped]
        told = uses_of(projections, candidate.flow, analysis.carries, end, in_checkpoint, returned)
    return told


def _trained(candidate: Candidate) -> tuple[bool, bool]:
    """Whether the hidden states and the weight require a gradient."""
    head = candidate.head
    return bool(example_of(head.input).requires_grad), bool(example_of(head.weight).requires_grad)


def _site(candidate: Candidate, passes: _Passes, told: Told, in_checkpoint: bool = False, memory: int = 0) -> Site:
    """The record of a head; with less in it, if that cannot be told, for a head is fused all the same."""
    fused, head = candidate.kept is None, candidate.head
    site = Site(
        status="kept" if not fused else "deferred" if candidate.escaped else "fused",
        pattern=" → ".join(candidate.trail or (function_name(candidate.node),)),
        where=location(candidate.node) or "",
        module="",
        rows=candidate.rows,
        hidden=_number(head.hidden),
        vocab=_number(head.vocab),
        dtype=str(head.dtype).removeprefix("torch."),
        variant="; ".join(dict.fromkeys(variant for variant, _ in passes)),
        reason=candidate.kept,
        chain=told.chain,
        uses=told.uses,
        rows_hint=candidate.rows,
        projections=told.projections,
    )
    with telling():
        rows: Any = 1
        shape = example_of(candidate.node).shape
        for i, size in enumerate(shape):
            rows = rows if i == candidate.axis else rows * size
        patterns = dict.fromkeys(reader.pattern for _, readers in passes for reader in readers) if fused else ()
        logits, converted, gradient = eager_bytes(candidate, {variant for variant, _ in passes})
        causes = _causes(candidate, passes, in_checkpoint, memory) if fused else ()
        site = replace(
            site,
            pattern=" + ".join(patterns) or site.pattern,
            module=module_path(candidate.node, head.weight),
            rows=_number(rows),
            bytes_saved=_saved(candidate, logits, converted, gradient) if fused else 0,
            reason=None if fused or site.reason is None else replace(site.reason, source=line_at(site.reason.where)),
            source=line_at(site.where),
            why="; ".join(causes),
            shape=tuple(map(_number, shape)),
            rows_hint=None if logits is None else candidate.rows,
            weights=captured_with(head.weight),
            logits_bytes=logits,
            converted_bytes=converted,
            gradient_bytes=gradient,
            copied_bytes=candidate.copied if fused else 0,
        )
    return site


def _causes(candidate: Candidate, passes: _Passes, in_checkpoint: bool, memory: int) -> Iterator[str]:
    """Why a head is computed as it is."""
    trained = _trained(candidate)
    several = len({variant for variant, _ in passes}) > 1
    found = [(variant, why(variant, readers, any(trained), in_checkpoint, memory)) for variant, readers in passes]
    yield from dict.fromkeys(f"{variant}: {cause}" if several else cause for variant, cause in found)
    input, weight = trained
    if input != weight and any(reader.source.requires_grad for _, reader in candidate.readers):
        yield "the weight is frozen and gets none" if input else "the hidden states need none"
    if candidate.escaped:
        leave = "the logits that leave the graph are computed when something reads their values"
        yield f"what reads logits inside is fused, and {leave}" if candidate.readers else leave


def _number(size: Any) -> int | str:
    return size if isinstance(size, int) else str(size)


def _saved(candidate: Candidate, *sizes: int | None) -> int | None:
    """What is not built, of these ``sizes``, less what is in its place; None where that is not known."""
    built = total(*sizes)
    return None if built is None else max(0, built - candidate.copied)


# --- a graph --------------------------------------------------------------------------------------------------


def bodies(gm: GraphModule) -> Iterator[tuple[GraphModule, bool]]:
    """The module and the checkpointed bodies inside it, each with whether it is one."""
    yield gm, False
    for body in compat.checkpointed_parts(gm).values():
        yield from ((inner, True) for inner, _ in bodies(body))


class Rewritten(NamedTuple):
    """What ``rewrite`` did: the heads, the outputs that are now operands of logits instead of logits, and what the
    arguments must be like for that.
    """

    sites: tuple[Site, ...]
    escapes: tuple[tuple[Escape, Site], ...]
    apart: Apart | None = None


def rewrite(
    gm: GraphModule, options: Options, end: Ending | None = None, watchers: Sequence[Watcher] = ()
) -> Rewritten:
    """Fuse every head of ``gm`` whose readers allow it, in place, and say what became of each.

    ``end`` is how the graph ended, as recorded; ``watchers`` are shown each step.
    """
    sites: list[Site] = []
    escapes: list[tuple[Escape, Site]] = []
    apart: Apart | None = None
    for body, in_checkpoint in bodies(gm):
        found, needs = _rewrite_graph(body, options, in_checkpoint, None if in_checkpoint else end, watchers)
        for site, sent in found:
            sites.append(site)
            escapes += ((escape, site) for escape in sent)
        apart = apart if in_checkpoint else needs
    return Rewritten(tuple(sites), tuple(escapes), apart)


def _tell(watchers: list[Watcher], event: str, *args: Any) -> None:
    """Call a method of every watcher. One that fails is told no more, and changes nothing for the program."""
    for watcher in tuple(watchers):
        try:
            getattr(watcher, event)(*args)
        except Exception as failure:
            watchers.remove(watcher)
            warnings.warn(errors.watching_failed(failure), stacklevel=2)


def _rewrite_graph(
    gm: GraphModule, options: Options, in_checkpoint: bool, end: Ending | None, watchers: Sequence[Watcher]
) -> tuple[list[tuple[Site, list[Escape]]], Apart | None]:
    graph = gm.graph
    candidates: list[Candidate] = []
    made: list[Node] = []
    passes: dict[Candidate, list[tuple[str, Sequence[Reader]]]] = {}
    told: dict[Candidate, Told] = {}
    swaps: list[tuple[Node, Node]] = []
    sent: dict[Candidate, list[Escape]] = {}
    made_for: dict[Candidate, list[Node]] = {}
    listening: list[Watcher] = []
    output = graph.output_node()
    returned = output.args
    try:
        analysis = analyse(graph)
        candidates = [c for c in analysis.candidates if c.is_head]
        told = {candidate: _told(candidate, analysis, end, in_checkpoint) for candidate in candidates}
        leaving = {memory for node in output.all_input_nodes for memory in storages(node)}
        apart = Apart.of(gm, analysis.timeline, candidates)
        planner = Planner(analysis.timeline, options, candidates, in_checkpoint) if candidates else None
        listening = list(watchers) if candidates else []
        _tell(listening, "analysed", graph, candidates, in_checkpoint)
        for candidate in candidates:
            assert planner is not None
            before = len(made)
            for one in planner.plan(candidate) or ():
                like = one.readers[0][0]
                emit_before = functools.partial(_GraphEmit, graph, like=like, made=made)
                variant, results = _write(one, emit_before, planner, in_checkpoint, leaving)
                swaps += zip((node for node, _ in one.readers), results, strict=True)
                if variant != BESIDE:
                    passes.setdefault(candidate, []).append((variant, one.of))
            for node, value in candidate.sizes if candidate.kept is None else ():
                emit = _GraphEmit(graph, node, node, made)
                swaps.append((node, emit(torch.ops.aten.sym_size.int, value.rows(emit), node.args[1])))
            made_for[candidate] = made[before:]
        _tell(listening, "planned", candidates)
        for candidate in candidates:
            before = len(made)
            if candidate.kept is None:
                several = len(candidate.escaped) > 1
                read = any(reader.source.requires_grad for _, reader in candidate.readers)
                for escaped in candidate.escaped:
                    # Where eager made them: in the same mode, before anything else happens.
                    emit = _GraphEmit(graph, escaped.made.next, escaped.node, made)
                    escape = send_out(escaped, emit, output, read or several, told[candidate].ways.get(escaped.node))
                    sent.setdefault(candidate, []).append(escape)
            made_for[candidate] += made[before:]
        for old, new in swaps:
            old.replace_all_uses_with(new)
        replaced = {old for old, _ in swaps}.union(*(c.derived for c in candidates if c.kept is None))
        if left := {user for node in replaced for user in node.users} - replaced:
            raise AssertionError(f"{left} take what was replaced")
        graph.lint()
    except Exception as failure:
        output.args = returned
        for old, new in swaps:
            new.replace_all_uses_with(old)
        for node in reversed(made):
            graph.erase_node(node)
        warnings.warn(errors.analysis_failed(failure, (location(c.node) or "" for c in candidates)), stacklevel=2)
        for candidate in candidates:
            candidate.kept = because("internal_error", f"{type(failure).__name__}: {failure}")
        _tell(listening, "planned", candidates)
        _tell(listening, "rewritten", graph, dict.fromkeys(candidates, ()))
        return [(_site(c, (), told.get(c, Told())), []) for c in candidates], None
    for old, _ in swaps:
        graph.erase_node(old)
    for candidate in candidates:
        for node in reversed(candidate.derived if candidate.kept is None else ()):
            graph.erase_node(node)
    if swaps or sent:
        gm.recompile()
    _tell(listening, "rewritten", graph, made_for)
    memory = options.memory
    sites = [(_site(c, passes.get(c, ()), told[c], in_checkpoint, memory), sent.get(c, [])) for c in candidates]
    return sites, apart if swaps or sent else None
