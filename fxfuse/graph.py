"""The graph driver: find the heads of a Dynamo graph, prove how they are read, and rewrite in place.

``rewrite`` analyses everything first, then adds the new nodes, and only then redirects users and erases what it
replaced. A failure before that last step leaves the graph as it was.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from . import compat, errors
from .algebra import ClassTensor, Emit, Handle, Head, Logits, Reader
from .escape import Escape, Escaped, send_out, why_not
from .mutation import Timeline, tensors, writes
from .ops.contract import SUPPORTED_DTYPES
from .options import Options
from .passes import KEPT, compute, computes_again
from .reasons import Reason, because
from .report.records import Site
from .report.source import function_name, location, module_path
from .rules import TABLE, Call, Keep, cut_off, head_of

# Without a loss that reads it, an output is called logits when it is this many times wider than its input: more
# than a gated MLP's projection (28672 / 8192 = 3.5), less than that model's vocabulary (32000 / 8192 = 3.9).
_VOCABULARY_RATIO = 3.6


@dataclass(eq=False)
class Candidate:
    """A projection that may turn out to be a head, and what was learnt of it."""

    node: Node
    head: Head
    readers: list[tuple[Node, Reader]] = field(default_factory=list)
    derived: list[Node] = field(default_factory=list)  # described nodes, in graph order, the projection first
    escaped: list[Escaped] = field(default_factory=list)
    kept: Reason | None = None
    read: bool = False  # by a loss or the like
    shown: bool = False  # returned from the graph, or read by something that also reads other things than logits
    trail: tuple[str, ...] = ()
    class_sizes: list[Any] = field(default_factory=list)  # V, and those of selections of classes

    def keep(self, reason: Reason) -> None:
        self.kept = self.kept or reason

    @property
    def is_head(self) -> bool:
        wide = compat.hint(self.head.vocab) >= _VOCABULARY_RATIO * compat.hint(self.head.hidden)
        dense = self.kept is not None or bool(self.escaped)
        return bool(self.readers) or (dense and (self.read or (self.shown and wide)))


@dataclass
class Pass:
    """Readers that share one computation of their rows' statistics, and the node before which it is placed."""

    readers: list[tuple[Node, Reader]]
    place: Node


def _example(handle: Any) -> Any:
    return handle.meta.get("example_value") if isinstance(handle, Node) else handle


# --- analysis -------------------------------------------------------------------------------------------------


class _Dense:
    """Marks a value whose head is needed in full; followed on to the reader that the user meant to be fused."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate


class _Analysis:
    def __init__(self, graph: Graph) -> None:
        self.candidates: list[Candidate] = []
        self._values: dict[Node, ClassTensor | _Dense] = {}
        self._owner: dict[Head, Candidate] = {}
        for node in graph.nodes:
            self._visit(node)

    def _visit(self, node: Node) -> None:
        values = [self._values[n] for n in node.all_input_nodes if n in self._values]
        if node.op == "output":
            self._returned(node)
        elif values:
            self._use(node, values)
        if node.op in ("call_function", "call_method"):
            self._project(node)

    def _project(self, node: Node) -> None:
        out = _example(node)
        if not isinstance(out, Tensor):
            return
        call = Call(function_name(node), out, _example)
        head = head_of(_key(node), call, node.args, node.kwargs)
        if head is None:
            return
        candidate = Candidate(node, head, derived=[node], class_sizes=[head.vocab])
        self.candidates.append(candidate)
        reason = _unfit(candidate)
        if reason is not None:
            candidate.keep(reason)
            self._values[node] = _Dense(candidate)
            return
        self._owner[head] = candidate
        self._values[node] = Logits(
            head, tuple(out.shape), out.dim() - 1, out.dtype, out.requires_grad, trail=(call.name,)
        )

    def _owner_of(self, value: ClassTensor | _Dense) -> Candidate:
        return value.candidate if isinstance(value, _Dense) else self._owner[value.head]

    def _use(self, node: Node, values: list[ClassTensor | _Dense]) -> None:
        out, where = _example(node), location(node)
        entry = TABLE.get(_key(node))
        for value in values:
            candidate = self._owner_of(value)
            if isinstance(value, ClassTensor):
                candidate.trail = max(candidate.trail, value.trail, key=len)
            if entry is not None and entry.reads:
                candidate.read |= entry.reads == "loss"
                candidate.shown = True
                candidate.trail = (*candidate.trail, function_name(node))
            elif entry is None and not self._has_class_axis(node, candidate) and _may_hold_a_loss(node):
                candidate.shown = True
        described = [v for v in values if isinstance(v, ClassTensor)]
        if not described or len(described) < len(values):
            for value in described:
                self._owner_of(value).keep(because("unknown_reader", function_name(node), where))
            self._follow(node, self._owner_of(values[0]))
            return
        call = Call(function_name(node), out, _example, where)
        try:
            written = writes(node)
            if any(argument in self._values for argument in written.arguments):
                call.keep("mutated" if written.certain else "unknown_reader")
            if entry is None:
                call.keep("unknown_reader")
            outcome = entry(call, self._fill(node.args), {k: self._fill(v) for k, v in node.kwargs.items()})
            outcome = cut_off(call, outcome)
        except Keep as refused:
            for value in described:
                self._owner_of(value).keep(refused.reason)
            self._follow(node, self._owner_of(described[0]))
            return
        candidate = self._owner_of(described[0])
        if isinstance(outcome, Reader):
            candidate.readers.append((node, outcome))
        else:
            candidate.derived.append(node)
            self._values[node] = outcome

    def _fill(self, argument: Any) -> Any:
        """``argument`` with described nodes replaced by their descriptions."""
        if isinstance(argument, Node):
            return self._values.get(argument, argument)
        if isinstance(argument, (tuple, list)):
            return type(argument)(self._fill(a) for a in argument)
        return argument

    def _follow(self, node: Node, candidate: Candidate) -> None:
        """Mark what a dense head flows into while it still has a class axis."""
        entry, out = TABLE.get(_key(node)), _example(node)
        if entry is not None and not entry.reads and isinstance(out, Tensor) and out.dim():
            size = out.shape[-1]
            if not any(compat.same(size, known) for known in candidate.class_sizes):
                candidate.class_sizes.append(size)  # a selection of classes, perhaps
        if self._has_class_axis(node, candidate):
            self._values[node] = _Dense(candidate)

    @staticmethod
    def _has_class_axis(node: Node, candidate: Candidate) -> bool:
        sizes = (size for out in tensors(_example(node)) for size in out.shape)
        # Of every node that a dense head flows to, for the report alone: a symbol is not held against a number, which
        # would ask the solver.
        known = candidate.class_sizes
        return any(type(size) is type(other) and compat.same(size, other) for size in sizes for other in known)

    def _returned(self, node: Node) -> None:
        for source in node.all_input_nodes:
            value = self._values.get(source)
            if value is None:
                continue
            candidate = self._owner_of(value)
            candidate.shown = True
            if isinstance(value, ClassTensor):
                candidate.escaped.append(Escaped(source, value))


def _may_hold_a_loss(node: Node) -> bool:
    """Whether something without a rule that reduces the class axis may be a loss or contain one."""
    return compat.is_higher_order(node.target) or "loss" in function_name(node)


def _key(node: Node) -> Any:
    try:
        hash(node.target)
    except TypeError:
        return None
    return node.target


def _unfit(candidate: Candidate) -> Reason | None:
    """Why the operands of a projection cannot be fused at all, if so."""
    head = candidate.head
    where = location(candidate.node)
    named = (("the input", head.input), ("the weight", head.weight), ("the bias", head.bias))
    for name, handle in named:
        example = _example(handle)
        if handle is None:
            continue
        if not isinstance(example, Tensor):
            return because("internal_error", f"{name} has no example value", where)
        if compat.is_functional_wrapper(example):
            return because("functional_transform", name, where)
        if not compat.is_plain(example):
            return because("subclass", f"{name} ({type(example).__name__})", where)
        if example.device.type not in ("cpu", "cuda"):
            return because("device", str(example.device), where)
        if example.device != _example(head.input).device:
            return because("device", f"{_example(head.input).device} and {example.device}", where)
    if not isinstance(head.vocab, int) or not isinstance(head.hidden, int) or 0 in (head.vocab, head.hidden):
        return because("shape", f"the weight has a symbolic or empty shape, {head.vocab} × {head.hidden}", where)
    if head.bias is not None and tuple(_example(head.bias).shape) != (head.vocab,):
        return because("shape", f"the bias has the shape {tuple(_example(head.bias).shape)}", where)
    if head.dtype not in SUPPORTED_DTYPES:
        return because("dtype", f"the logits are {head.dtype}", where)
    return None


# --- planning -------------------------------------------------------------------------------------------------


class _Planner:
    def __init__(self, graph: Graph, options: Options, candidates: list[Candidate], may_defer: bool) -> None:
        self.timeline = Timeline(graph)
        self.options = options
        self.may_defer = may_defer
        self.readers = {node for candidate in candidates for node, _ in candidate.readers}

    def plan(self, candidate: Candidate) -> list[Pass] | None:
        """How to compute the readers of a head; None, with the reason noted, where it must be kept."""
        if candidate.kept is None:
            candidate.kept = self._obstacle(candidate)
        if candidate.kept is not None:
            return None
        passes: list[Pass] = []
        for node, reader in candidate.readers:
            for index, known in enumerate(passes):
                joined = self._joined(known, node, reader)
                if joined is not None and self._changed(candidate, joined) is None:
                    passes[index] = joined
                    break
            else:
                passes.append(Pass([(node, reader)], node))
        for one in passes:
            candidate.kept = candidate.kept or self._changed(candidate, one)
        return None if candidate.kept else passes

    def _obstacle(self, candidate: Candidate) -> Reason | None:
        head = candidate.head
        where = location(candidate.node)
        if compat.forward_ad_active():
            return because("functional_transform", "forward-mode differentiation", where)
        for node in (*candidate.derived, *(node for node, _ in candidate.readers)):
            if self.timeline.region[node].levels:
                return because("functional_transform", function_name(node), location(node))
        for node, reader in candidate.readers:
            for handle in reader.operands:
                example = _example(handle)
                if not isinstance(example, Tensor) or not compat.is_plain(example):
                    return because("subclass", f"an argument of {reader.name} ({type(example).__name__})", where)
                if example.device != _example(head.input).device:
                    return because("device", f"{_example(head.input).device} and {example.device}", location(node))
        size = _rows(candidate) * head.vocab * head.dtype.itemsize
        if size < self.options.min_logits_bytes:
            return because("too_small", f"{size:,} bytes", where)
        for escaped in candidate.escaped:
            detail = "and they are not deferred"
            if self.may_defer:
                detail = why_not(escaped, candidate.node, self.timeline)
            if detail:
                shape = " × ".join(str(size) for size in escaped.value.shape)
                return because("returned", f"as an output of shape {shape}, {detail}", location(escaped.node))
        return None

    def _joined(self, known: Pass, node: Node, reader: Reader) -> Pass | None:
        """``known`` with one more reader, or None where they cannot share a computation."""
        first_node, first = known.readers[0]
        same_rows = first.source.row_key() == reader.source.row_key()
        made_alike = (first.source.scale, first.source.transform) == (reader.source.scale, reader.source.transform)
        same_mode = self.timeline.region[first_node] == self.timeline.region[node]
        same_grad = first.source.requires_grad == reader.source.requires_grad
        if not (same_rows and made_alike and same_mode and same_grad):
            return None
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
            handle for _, r in readers for handle in (*r.operands, *r.source.sizes()) if isinstance(handle, Node)
        ]
        if any(position[handle] >= position[place] for handle in operands):
            return None
        return Pass(readers, place)

    def _changed(self, candidate: Candidate, one: Pass) -> Reason | None:
        """Why the operands are not at ``one.place`` what they were where eager reads them, if so."""
        head = candidate.head
        operands = [(handle, candidate.node) for handle in (head.input, head.weight, head.bias)]
        operands += [(handle, node) for node, reader in one.readers for handle in reader.operands]
        saves = computes_again([reader for _, reader in one.readers], self.options.memory)
        for handle, read_at in operands:
            if not isinstance(handle, Node):
                continue
            writer = self.timeline.write_between(handle, read_at, one.place)
            if writer is None and saves:
                writer = self.timeline.write_after(handle, one.place)
            if writer is not None:
                return because("operand_mutated", function_name(writer), location(writer))
            if self.timeline.unplaced_write(handle):
                return because("operand_mutated", "an operation", location(candidate.node))
        return None


def _rows(candidate: Candidate) -> int:
    rows = 1
    for size in _example(candidate.node).shape[:-1]:
        rows *= compat.hint(size)
    return rows


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
        values = torch.fx.node.map_arg((args, kwargs), _example)
        with compat.fake_mode_of(_example(self.like)):
            node.meta["example_value"] = function(*values[0], **values[1])
        return node

    def example(self, handle: Handle) -> Tensor:
        return _example(handle)


def _write(
    candidate: Candidate, one: Pass, emit: _GraphEmit, in_checkpoint: bool, memory: int
) -> tuple[str, list[Node]]:
    """Emit a pass: the variant, and what replaces each of its readers."""
    variant, results = compute(emit, candidate.head, [reader for _, reader in one.readers], in_checkpoint, memory)
    return variant, [_as_eager(emit, node, result) for (node, _), result in zip(one.readers, results, strict=True)]


def _as_eager(emit: _GraphEmit, node: Node, result: Node) -> Node:
    """``result`` with the dtype that eager returns, in memory that nothing else uses.

    Two readers may return one statistic, which the backward needs too: what the program does to what it was given
    must reach neither.
    """
    expected = _example(node)
    if emit.example(result).dtype != expected.dtype:
        result = emit(torch.Tensor.to, result, expected.dtype)
    # What eager returns of these functions is contiguous, and a view of it may rely on that.
    result = emit.anew(torch.clone, result, memory_format=torch.contiguous_format)
    made = emit.example(result)
    if made.dim() != expected.dim() or made.dtype != expected.dtype:
        raise AssertionError(f"{node.name}: {made.shape} {made.dtype} for {expected.shape} {expected.dtype}")
    return result


def _site(candidate: Candidate, variant: str) -> Site:
    head, out = candidate.head, _example(candidate.node)
    rows: Any = 1
    for size in out.shape[:-1]:
        rows = rows * size
    fused = candidate.kept is None
    chains = list(dict.fromkeys(reader.pattern for _, reader in candidate.readers)) if fused else []
    return Site(
        status="kept" if not fused else "deferred" if candidate.escaped else "fused",
        pattern=" + ".join(chains) or " → ".join(candidate.trail or (function_name(candidate.node),)),
        where=location(candidate.node) or "",
        module=module_path(candidate.node, head.weight),
        rows=_number(rows),
        hidden=_number(head.hidden),
        vocab=_number(head.vocab),
        dtype=str(head.dtype).removeprefix("torch."),
        variant=variant,
        bytes_saved=_bytes_saved(candidate, variant) if fused else 0,
        reason=candidate.kept,
    )


def _number(size: Any) -> int | str:
    return size if isinstance(size, int) else str(size)


def _bytes_saved(candidate: Candidate, variant: str) -> int:
    """Bytes of logits, of each conversion of them to another dtype, and of their gradient.

    Exponentials that are kept stand in the gradient's place.
    """
    elements = _rows(candidate) * candidate.head.vocab
    dtype = candidate.head.dtype
    size = dtype.itemsize
    converted = {reader.source.dtype for _, reader in candidate.readers} - {dtype}
    size += sum(other.itemsize for other in converted)
    if variant != KEPT and any(reader.source.requires_grad for _, reader in candidate.readers):
        size += dtype.itemsize
    return elements * size


def bodies(gm: GraphModule) -> Iterator[tuple[GraphModule, bool]]:
    """The module and the checkpointed bodies inside it, each with whether it is one."""
    yield gm, False
    for node in gm.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "tag_activation_checkpoint":
            body = getattr(gm, str(node.args[0].target), None)
            if isinstance(body, GraphModule):
                yield from ((inner, True) for inner, _ in bodies(body))


class Rewritten(NamedTuple):
    """What ``rewrite`` did: the heads, and the outputs that are now operands of logits instead of logits."""

    sites: tuple[Site, ...]
    escapes: tuple[tuple[Escape, Site], ...]


def rewrite(gm: GraphModule, options: Options) -> Rewritten:
    """Fuse every head of ``gm`` whose readers allow it, in place, and say what became of each."""
    sites: list[Site] = []
    escapes: list[tuple[Escape, Site]] = []
    for body, in_checkpoint in bodies(gm):
        for site, sent in _rewrite_graph(body, options, in_checkpoint):
            sites.append(site)
            escapes += ((escape, site) for escape in sent)
    return Rewritten(tuple(sites), tuple(escapes))


def _rewrite_graph(gm: GraphModule, options: Options, in_checkpoint: bool) -> list[tuple[Site, list[Escape]]]:
    graph = gm.graph
    candidates: list[Candidate] = []
    made: list[Node] = []
    variants: dict[Candidate, list[str]] = {}
    swaps: list[tuple[Node, Node]] = []
    sent: dict[Candidate, list[Escape]] = {}
    output = graph.output_node()
    returned = output.args
    try:
        candidates = [c for c in _Analysis(graph).candidates if c.is_head]
        may_defer = options.defer_logits and not in_checkpoint
        planner = _Planner(graph, options, candidates, may_defer) if candidates else None
        for candidate in candidates:
            assert planner is not None
            for one in planner.plan(candidate) or ():
                emit = _GraphEmit(graph, one.place, one.readers[0][0], made)
                variant, results = _write(candidate, one, emit, in_checkpoint, options.memory)
                swaps += zip((node for node, _ in one.readers), results, strict=True)
                variants.setdefault(candidate, []).append(variant)
        for candidate in candidates:
            if candidate.kept is None:
                for escaped in candidate.escaped:
                    # Where eager made them: in the same mode, before anything else happens.
                    emit = _GraphEmit(graph, escaped.node.next, escaped.node, made)
                    sent.setdefault(candidate, []).append(send_out(escaped, emit, output))
        for old, new in swaps:
            old.replace_all_uses_with(new)
        graph.lint()
    except Exception as failure:
        output.args = returned
        for old, new in swaps:
            new.replace_all_uses_with(old)
        for node in reversed(made):
            graph.erase_node(node)
        warnings.warn(errors.analysis_failed(failure), errors.FxfuseWarning, stacklevel=2)
        for candidate in candidates:
            candidate.kept = because("internal_error", f"{type(failure).__name__}: {failure}")
        return [(_site(candidate, ""), []) for candidate in candidates]
    for old, _ in swaps:
        graph.erase_node(old)
    for candidate in candidates:
        for node in reversed(candidate.derived if candidate.kept is None else ()):
            graph.erase_node(node)
    if swaps or sent:
        gm.recompile()
    return [(_site(c, "; ".join(dict.fromkeys(variants.get(c, ())))), sent.get(c, [])) for c in candidates]
