"""The graph driver: find the heads of a Dynamo graph, prove how they are read, and rewrite in place.

``rewrite`` analyses everything first, then adds the new nodes, and only then redirects users and erases what it
replaced. A failure before that last step leaves the graph as it was.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from . import compat, errors
from .analysis import analyse
from .apart import Apart
from .candidate import Candidate
from .escape import Escape, send_out
from .mutation import Region, Timeline, example_of, regions, storages, tensors
from .options import Options
from .passes import BESIDE, WHOLE, compute
from .planning import Pass, Planner
from .readers import Reader
from .reasons import because
from .replay import Emit, Handle
from .report.chain import Told
from .report.records import Ending, Site, Watcher
from .report.site import site_of, told_of
from .report.source import location

# --- rewriting ------------------------------------------------------------------------------------------------


class _GraphEmit(Emit):
    """Adds nodes before a place in a graph, each with an example value of the graph's own fake mode.

    These are made in the grad mode of that place, so that they require gradients if the nodes will.
    """

    def __init__(self, timeline: Timeline, place: Node, like: Node, made: list[Node]) -> None:
        self.graph, self.place, self.like, self.made = place.graph, place, like, made
        self._timeline, region = timeline, timeline.region_before(place)
        self._grad, self._inference = region.makes_gradients, region.inference[-1]
        self._shared: dict[Any, Node] = {}
        self._early: dict[Node, Node] = {}

    def make_early(self, node: Node) -> None:
        """Make what ``node`` makes later: here it stands for that from now on."""
        target: Any = node.target
        function = getattr(Tensor, target) if node.op == "call_method" else target
        self._early[node] = self.anew(function, *node.args, **node.kwargs)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        args, kwargs = self._at_hand(args, kwargs)
        if self._inference and function in (torch.detach, Tensor.detach):
            return args[0]  # nothing has a gradient there
        key = (function, repr(args), repr(kwargs))
        if key not in self._shared:  # a pure function of the same arguments: once is enough
            self._shared[key] = self.anew(function, *args, **kwargs)
        return self._shared[key]

    def anew(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Like a call, but the node is never one that was made before."""
        args, kwargs = self._at_hand(args, kwargs)
        example = self._example(function, args, kwargs)
        if self._inference and (seen := self._seen_through(example, args, kwargs)):
            copies = {node: self(torch.clone, node) for node in seen}
            args, kwargs = torch.fx.node.map_arg((args, kwargs), lambda node: copies.get(node, node))
            example = self._example(function, args, kwargs)
        with self.graph.inserting_before(self.place):
            if isinstance(function, types.MethodDescriptorType):
                node = self.graph.call_method(function.__name__, args, kwargs)
            else:
                node = self.graph.call_function(function, args, kwargs)
        self.made.append(node)
        for name in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if name in self.like.meta:
                node.meta[name] = self.like.meta[name]
        node.meta["example_value"] = example
        return node

    def _example(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = torch.fx.node.map_arg((args, kwargs), example_of)
        with compat.fake_mode_of(example_of(self.like)), torch.set_grad_enabled(self._grad):
            return function(*values[0], **values[1])

    def _seen_through(self, example: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Node]:
        """The arguments of which ``example`` is a view and that were made outside of inference mode.

        AOTAutograd cannot trace views of such in that mode (PyTorch 2.13 and before).
        """
        given: list[Node] = []
        torch.fx.node.map_arg((args, kwargs), given.append)
        memory, here = set(map(compat.storage, tensors(example))), {*self._shared.values()}

        def is_outside(node: Node) -> bool:
            region = self._timeline.region.get(node)
            return node not in here and (region is None or not region.inference[-1])

        return [node for node in given if is_outside(node) and storages(node) & memory]

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


# --- a graph --------------------------------------------------------------------------------------------------


def bodies(gm: GraphModule, outside: Region | None = None) -> Iterator[tuple[GraphModule, Region | None]]:
    """The module and the checkpointed bodies inside it, each with the region around it if it is such a body."""
    yield gm, outside
    if parts := compat.checkpointed_parts(gm):
        around = dict(regions(gm.graph, outside))
        for node, body in parts.items():
            yield from bodies(body, around[node])


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
    for body, outside in bodies(gm):
        in_checkpoint = outside is not None
        found, needs = _rewrite_graph(body, options, outside, None if in_checkpoint else end, watchers)
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


class _Rewriting:
    """What is made in a graph in the place of its heads, until that is done or undone."""

    def __init__(self, graph: Graph, in_checkpoint: bool) -> None:
        self.graph, self.in_checkpoint = graph, in_checkpoint
        self.passes: dict[Candidate, list[tuple[str, Sequence[Reader]]]] = {}
        self.sent: dict[Candidate, list[Escape]] = {}
        self.made_for: dict[Candidate, list[Node]] = {}
        self._made: list[Node] = []
        self._swaps: list[tuple[Node, Node]] = []
        self._output = graph.output_node()
        self._returned = self._output.args

    @functools.cached_property
    def _leaving(self) -> set[int]:
        return {memory for node in self._output.all_input_nodes for memory in storages(node)}

    def fuse(self, candidate: Candidate, planner: Planner) -> None:
        """Make what the readers of a head return, and the sizes that the program asks its logits for."""
        before = len(self._made)
        for one in planner.plan(candidate) or ():
            like = one.readers[0][0]
            emit_before = functools.partial(_GraphEmit, planner.timeline, like=like, made=self._made)
            variant, results = _write(one, emit_before, planner, self.in_checkpoint, self._leaving)
            self._swaps += zip((node for node, _ in one.readers), results, strict=True)
            if variant != BESIDE:
                self.passes.setdefault(candidate, []).append((variant, one.of))
        for node, value, axis in candidate.sizes if candidate.kept is None else ():
            emit = _GraphEmit(planner.timeline, node, node, self._made)
            self._swaps.append((node, emit(torch.ops.aten.sym_size.int, value.rows(emit), axis)))
        self.made_for[candidate] = self._made[before:]

    def send_out(self, candidate: Candidate, told: Told, timeline: Timeline) -> None:
        """Return operands in the place of logits."""
        if candidate.kept is not None:
            return
        before = len(self._made)
        several = len(candidate.escaped) > 1
        read = any(reader.source.requires_grad for _, reader in candidate.readers)
        for escaped in candidate.escaped:
            # Where eager made them: in the same mode, before anything else happens.
            emit = _GraphEmit(timeline, escaped.made.next, escaped.node, self._made)
            escape = send_out(escaped, emit, self._output, read or several, told.ways.get(escaped.node))
            self.sent.setdefault(candidate, []).append(escape)
        self.made_for[candidate] += self._made[before:]

    def redirect(self, candidates: Sequence[Candidate]) -> None:
        """Let the program take what was made, and see that nothing takes what is to go."""
        for old, new in self._swaps:
            old.replace_all_uses_with(new)
        replaced = {old for old, _ in self._swaps}.union(*(c.derived for c in candidates if c.kept is None))
        if left := {user for node in replaced for user in node.users} - replaced:
            raise AssertionError(f"{left} take what was replaced")
        self.graph.lint()

    def undo(self) -> None:
        """Leave the graph as it was."""
        self._output.args = self._returned
        for old, new in self._swaps:
            new.replace_all_uses_with(old)
        for node in reversed(self._made):
            self.graph.erase_node(node)

    def finish(self, candidates: Sequence[Candidate]) -> bool:
        """Erase what was replaced. Whether anything was."""
        for old, _ in self._swaps:
            self.graph.erase_node(old)
        for candidate in candidates:
            for node in reversed(candidate.derived if candidate.kept is None else ()):
                self.graph.erase_node(node)
        return bool(self._swaps or self.sent)


def _rewrite_graph(
    gm: GraphModule, options: Options, outside: Region | None, end: Ending | None, watchers: Sequence[Watcher]
) -> tuple[list[tuple[Site, list[Escape]]], Apart | None]:
    graph, in_checkpoint = gm.graph, outside is not None
    candidates: list[Candidate] = []
    told: dict[Candidate, Told] = {}
    listening: list[Watcher] = []
    rewriting = _Rewriting(graph, in_checkpoint)
    try:
        compat.put_placeholders_first(graph)
        analysis = analyse(graph, outside)
        candidates = [c for c in analysis.candidates if c.is_head]
        told = {candidate: told_of(candidate, analysis, end, in_checkpoint) for candidate in candidates}
        apart = Apart.of(gm, analysis.timeline, candidates)
        listening = list(watchers) if candidates else []
        _tell(listening, "analysed", graph, candidates, outside)
        if candidates:
            planner = Planner(analysis.timeline, options, candidates, in_checkpoint)
            for candidate in candidates:
                rewriting.fuse(candidate, planner)
        _tell(listening, "planned", candidates)
        for candidate in candidates:
            rewriting.send_out(candidate, told[candidate], analysis.timeline)
        rewriting.redirect(candidates)
    except Exception as failure:
        rewriting.undo()
        warnings.warn(errors.analysis_failed(failure, (location(c.node) or "" for c in candidates)), stacklevel=2)
        for candidate in candidates:
            candidate.kept = because("internal_error", f"{type(failure).__name__}: {failure}")
        _tell(listening, "planned", candidates)
        _tell(listening, "rewritten", graph, dict.fromkeys(candidates, ()))
        return [(site_of(c, (), told.get(c, Told())), []) for c in candidates], None
    changed = rewriting.finish(candidates)
    if changed:
        gm.recompile()
    _tell(listening, "rewritten", graph, rewriting.made_for)
    passes, memory = rewriting.passes, options.memory
    sites = [site_of(c, passes.get(c, ()), told[c], in_checkpoint, memory) for c in candidates]
    sent = [rewriting.sent.get(c, []) for c in candidates]
    return list(zip(sites, sent, strict=True)), apart if changed else None
