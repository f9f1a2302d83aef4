"""The graph driver: find the heads of a Dynamo graph, prove how they are read, and rewrite in place.

``rewrite`` analyses everything first, then adds the new nodes, and only then redirects users and erases what it
replaced. A failure before that last step leaves the graph as it was.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from . import compat, errors
from .analysis import Analysis, analyse
from .apart import Apart
from .candidate import Candidate, example_of
from .costs import copied, eager_bytes, has_known_size, makes_gradient, too_dear, total
from .escape import Escape, send_out, why_not
from .mutation import Timeline, storages
from .options import Options
from .passes import BESIDE, compute, computes_again, keeps_much, why
from .readers import Reader, Whole
from .reasons import Reason, because
from .replay import Emit, Handle
from .report.chain import Told, uses_of
from .report.records import Ending, Projection, Site, Watcher
from .report.source import function_name, line_at, location, module_path, projection_name
from .report.telling import telling
from .report.weights import captured_with


@dataclass
class Pass:
    """Readers that share one computation of their rows' statistics, and the node before which it is placed.

    ``room`` says whether it may keep a gradient of the weight between forward and backward.
    """

    readers: list[tuple[Node, Reader]]
    place: Node
    room: bool = True

    @property
    def of(self) -> list[Reader]:
        return [reader for _, reader in self.readers]


# --- planning -------------------------------------------------------------------------------------------------


class _Planner:
    def __init__(self, timeline: Timeline, options: Options, candidates: list[Candidate], in_checkpoint: bool) -> None:
        self.timeline = timeline
        self.options = options
        self.in_checkpoint = in_checkpoint
        self.readers = {node for candidate in candidates for node, _ in candidate.readers}
        self.graded: set[int] = set()  # memory of weights of which a pass makes a gradient in the forward

    def plan(self, candidate: Candidate) -> list[Pass] | None:
        """How to compute the readers of a head; None, with the reason noted, where it must be kept."""
        if candidate.kept is None:
            candidate.kept = self._obstacle(candidate)
        if candidate.kept is not None:
            return None
        alike: dict[Any, list[Pass]] = {}
        for node, reader in candidate.readers:
            passes = alike.setdefault(self._kind(node, reader), [])
            for index, known in enumerate(passes):
                joined = self._joined(known, node, reader)
                if joined is not None and self._changed(candidate, joined) is None:
                    passes[index] = joined
                    break
            else:
                passes.append(Pass([(node, reader)], node))
        position = self.timeline.position
        planned = sorted(
            (one for passes in alike.values() for one in passes), key=lambda one: position[one.readers[0][0]]
        )
        graded = set(self.graded)
        for one in planned:
            one.room = self._has_room(one, graded)
            candidate.kept = candidate.kept or self._changed(candidate, one)
        groups = [one.of for one in planned]
        candidate.copied = copied(groups)
        if self.options.min_logits_bytes > 0:  # else all that is sound is to be fused
            candidate.kept = candidate.kept or too_dear(candidate, groups)
        if candidate.kept is not None:
            return None
        self.graded = graded
        return planned

    def _has_room(self, one: Pass, graded: set[int]) -> bool:
        """Whether ``one`` may make its gradient of the weight in the forward; then the weight is ``graded``.

        Such gradients stay until the backward, all at once, where eager has one at a time. So each weight may have
        one, and more only where they are no larger than what eager keeps of the same loss, its log-probabilities.
        """
        source = one.of[0].source
        trained = makes_gradient(source) and not self.in_checkpoint
        if not trained or not keeps_much(one.of, self.options.memory):
            return True
        memory = storages(source.head.weight)
        if graded & memory:
            return False
        graded |= memory
        return True

    def _obstacle(self, candidate: Candidate) -> Reason | None:
        head = candidate.head
        where = location(candidate.node)
        if compat.forward_ad_active():
            return because("functional_transform", "forward-mode differentiation", where)
        for node in (*candidate.derived, *(node for node, _ in candidate.readers)):
            if self.timeline.region[node].levels:
                return because("functional_transform", function_name(node), location(node))
        read = [(handle, node) for node, reader in candidate.readers for handle in reader.operands]
        made_of = [(handle, node) for handle, node in candidate.operands if isinstance(example_of(handle), Tensor)]
        for handle, node in read + made_of:
            example, name = example_of(handle), function_name(node)
            if not isinstance(example, Tensor) or not compat.is_plain(example):
                return because("subclass", f"an argument of {name} ({type(example).__name__})", where)
            number = example.dim() == 0 and (handle, node) in made_of  # which PyTorch takes from a CPU
            if example.device != example_of(head.input).device and not number:
                return because("device", f"{example_of(head.input).device} and {example.device}", location(node))
        for _, reader in candidate.readers:
            # Beside other readers the product would be computed for each.
            if isinstance(reader, Whole) and len(candidate.readers) > 1 and reader.reason is not None:
                return reader.reason
        size = candidate.rows * head.vocab * head.dtype.itemsize
        if has_known_size(example_of(candidate.node)) and size < self.options.min_logits_bytes:
            return because("too_small", f"{size:,} bytes", where)
        for escaped in candidate.escaped:
            output = f"as an output of shape {' × '.join(str(size) for size in escaped.value.shape)}"
            if self.in_checkpoint:
                return because("checkpointed", output, location(escaped.node))
            detail = "and they are not deferred"
            if self.options.defer_logits:
                detail = why_not(escaped, candidate.operands, self.timeline)
            if detail:
                return because("returned", f"{output}, {detail}", location(escaped.node))
        return None

    def _kind(self, node: Node, reader: Reader) -> Any:
        """Equal for readers that can share a computation, as far as one can say without looking at others."""
        source, mode = reader.source, self.timeline.region[node]
        if reader.is_alone:
            return node
        return id(source.head), source.row_key(), source.logits_key(), source.requires_grad, mode, reader.chosen

    def _joined(self, known: Pass, node: Node, reader: Reader) -> Pass | None:
        """``known`` with one more reader of its kind, or None where they cannot share a computation."""
        weights = {r.class_weight for _, r in known.readers if r.want_class_sum}
        if reader.want_class_sum and weights and weights != {reader.class_weight}:
            return None
        readers = [*known.readers, (node, reader)]
        position = self.timeline.position
        # Where one reader is an operand of another, of this head or not, each is best left where it is.
        if any(user in self.readers for n, _ in readers for user in n.users):
            return None
        # As late as possible, so that every reader's labels exist: before anything uses what a reader returns.
        users = [user for n, _ in readers for user in n.users]
        end = self.timeline.end_of_region(node)
        place = min((*users, *([end] if end else [])), key=position.__getitem__, default=node)
        operands = [
            handle for _, r in readers for handle in (*r.operands, *r.source.handles()) if isinstance(handle, Node)
        ]
        if any(position[handle] >= position[place] for handle in operands):
            return None
        return Pass(readers, place)

    def _changed(self, candidate: Candidate, one: Pass) -> Reason | None:
        """Why the operands are not at ``one.place`` what they were where eager reads them, if so."""
        operands = [*candidate.operands]
        operands += [(handle, node) for node, reader in one.readers for handle in reader.operands]
        saves = computes_again(one.of, self.options.memory, one.room)
        for handle, read_at in operands:
            if not isinstance(handle, Node):
                continue
            writer = self.timeline.write_between(handle, read_at, one.place)
            if writer is None and saves:
                writer = self.timeline.write_after(handle, one.place)
            if writer is not None:
                return because("operand_mutated", function_name(writer), location(writer))
            if self.timeline.unplaced_write(handle):
                return because("operand_mutated", "an operation", location(read_at))
        return None


# --- rewriting ------------------------------------------------------------------------------------------------


class _GraphEmit(Emit):
    """Adds nodes before a place in a graph, each with an example value of the graph's own fake mode."""

    def __init__(self, graph: Graph, place: Node, like: Node, made: list[Node]) -> None:
        self.graph, self.place, self.like, self.made = graph, place, like, made
        self._shared: dict[Any, Node] = {}

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        key = (function, repr(args), repr(kwargs))
        if key not in self._shared:  # a pure function of the same arguments: once is enough
            self._shared[key] = self.anew(function, *args, **kwargs)
        return self._shared[key]

    def anew(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Like a call, but the node is never one that was made before."""
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

    def example(self, handle: Handle) -> Tensor:
        return example_of(handle)


def _write(one: Pass, emit: _GraphEmit, in_checkpoint: bool, memory: int) -> tuple[str, list[Node]]:
    """Emit a pass: the variant, and what replaces each of its readers."""
    variant, results = compute(emit, one.of, in_checkpoint, memory, one.room)
    if variant == BESIDE:
        return variant, results  # a view, as in eager
    return variant, [_as_eager(emit, node, result) for (node, _), result in zip(one.readers, results, strict=True)]


def _as_eager(emit: _GraphEmit, node: Node, result: Node) -> Node:
    """``result`` with the dtype that eager returns, in memory that nothing else uses.

    Two readers may return one statistic, which the backward needs too: what the program does to what it was given
    must reach neither.
    """
    expected = example_of(node)
    if emit.example(result).dtype != expected.dtype:
        result = emit(torch.Tensor.to, result, expected.dtype)
    # What eager returns of these functions is contiguous, and a view of it may rely on that.
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
        apart = Apart.of(gm, analysis.timeline, candidates)
        planner = _Planner(analysis.timeline, options, candidates, in_checkpoint) if candidates else None
        listening = list(watchers) if candidates else []
        _tell(listening, "analysed", graph, candidates, in_checkpoint)
        for candidate in candidates:
            assert planner is not None
            before = len(made)
            for one in planner.plan(candidate) or ():
                emit = _GraphEmit(graph, one.place, one.readers[0][0], made)
                variant, results = _write(one, emit, in_checkpoint, options.memory)
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
