"""Analysis of a graph: which nodes are heads, what is made of their logits, and how these are read.

Nothing is changed here. A value that no rule covers is followed on as dense, so that the report can name the reader
that was meant to be fused.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from . import compat, floats
from .algebra import ClassTensor, Head, Logits, LogProbs, Probs
from .candidate import Candidate, unfit
from .entries import Contents
from .escape import Escaped, chain_between
from .mutation import Region, Timeline, called, example_of, is_one_of_several, storages, tensors, writes
from .readers import Beside, Reader, Whole
from .reasons import Reason, because
from .replay import RowOp
from .report.source import function_name, location
from .rules import IN_PLACE, TABLE, Call, Keep, Rule, casts, heads_of, outcomes_of, views

# Functions whose arguments say where they write.
_AT_AN_INDEX = frozenset((operator.setitem, "index_fill_"))
_EXPANDS = frozenset((Tensor.expand, Tensor.expand_as, torch.broadcast_to, "expand", "expand_as", "broadcast_to"))

# Rules of functions that return what they are given in another order or dtype.
_MADE_AGAIN = (casts.cast, views.attribute, views.movedim, views.permute, views.t, views.transpose)


class _Dense:
    """Marks a value whose head is needed in full; followed on to the reader that the user meant to be fused."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate


# What a node is: one value, or what each of the several that it returns is.
_Value = ClassTensor | _Dense | tuple[ClassTensor | Reader, ...]


class Analysis:
    """What the projections of a graph turned out to be: ``candidates``, in the order of the graph."""

    def __init__(
        self,
        graph: Graph,
        outside: Region | None = None,
        whole: Mapping[Node, Reason] | None = None,
        turned: Set[Node] = frozenset(),
    ) -> None:
        """
        Args:
            graph: what Dynamo captured, each node with its ``example_value``.
            outside: the region of the node that calls the graph, if another graph does.
            whole: nodes whose probabilities are needed in full, and why; those that are found are in ``needed``.
            turned: products of two matrices of which the less likely is the weight; ``turnable`` has those that may be.
        """
        self.graph = graph
        self.outside = outside
        self.whole = whole or {}
        self.turned = turned
        self.turnable: set[Node] = set()
        self.needed: dict[Node, Reason] = {}
        self.candidates: list[Candidate] = []
        self._values: dict[Node, _Value] = {}
        self._made: dict[Node, Node] = {}  # where a value became what it is, if it was written to
        self._results: dict[Node, Reader] = {}
        self._weights: dict[Hashable, Node] = {}
        self._owner: dict[Head, Candidate] = {}
        for node in graph.nodes:
            self._visit(node)

    def carries(self, node: Node) -> bool:
        """Whether a node returns what has an entry for each class."""
        value = self._values.get(node)
        return value is not None and not (isinstance(value, tuple) and all(isinstance(v, Reader) for v in value))

    @functools.cached_property
    def timeline(self) -> Timeline:
        return Timeline(self.graph, self.outside)

    @functools.cached_property
    def _contents(self) -> Contents:
        return Contents(self.timeline)

    def _visit(self, node: Node) -> None:
        values = [self._values[n] for n in node.all_input_nodes if n in self._values]
        if node.op == "output":
            self._returned(node)
        elif len(values) == 1 and isinstance(values[0], ClassTensor) and (asked := _row_sizes(node, values[0])):
            owner = self._owner_of(values[0])
            owner.sizes += ((size, values[0], axis) for size, axis in asked)
            if node not in dict(asked):
                owner.derived += (node, *(user for user in node.users if not user.users))
        elif len(values) == 1 and _is_unused_question(node):
            self._owner_of(values[0]).derived += (node, *node.users)
        elif values:
            self._use(node, values)
        if node.op in ("call_function", "call_method"):
            self._project(node)

    def _project(self, node: Node) -> None:
        out = example_of(node)
        if not isinstance(out, Tensor):
            return
        call = Call(function_name(node), out, example_of)
        heads = heads_of(called(node), call, node.args, node.kwargs)
        if not heads:
            return
        known = [head for head in heads if isinstance(head.vocab, int)] or heads  # as a weight's sizes are
        head = known[-1 if node in self.turned else 0]
        if isinstance(head.vocab, int) and head.vocab == 1:  # a number for each row, such as a temperature
            return
        head = head.of(weight=self._first_alike(head.weight))
        if len(known) > 1:
            self.turnable.add(node)
        # Dynamo's example of what is made in inference mode may claim a gradient.
        requires_grad = out.requires_grad and self.timeline.region[node].makes_gradients
        if not requires_grad and self.timeline.switches:
            head = replace(head, cut_off=True)
        operands = [(handle, node) for handle in (head.input, head.weight, head.bias)]
        axis = example_of(head.input).dim() + head.axis
        ops: tuple[RowOp, ...] = ()
        if head.order is not None:
            rows_after = [i for i in head.order if i != axis]
            ops = (RowOp(torch.permute, (head.order,), keeps_order=rows_after == sorted(rows_after)),)
            axis = head.order.index(axis)
        rows = math.prod(compat.hint(size) for i, size in enumerate(out.shape) if i != axis)
        candidate = Candidate(
            node,
            head,
            operands,
            derived=[node],
            projections={node: head},
            class_sizes=[head.vocab],
            rows=rows,
        )
        self.candidates.append(candidate)
        projected = self._values.get(head.input)
        if isinstance(projected, _Dense) and "softmax" not in projected.candidate.trail:
            projected.candidate.inner = True
        elif isinstance(projected, Logits) and not projected.transform:
            candidate.source = projected.head.hidden
        reason = unfit(candidate, self.timeline.region[node].has_autocast(out.device.type))
        if reason is not None:
            candidate.keep(reason)
            self._values[node] = _Dense(candidate)
            return
        self._owner[head] = candidate
        self._values[node] = Logits(
            head, tuple(out.shape), axis, out.dtype, requires_grad, row_ops=ops, trail=(call.name,)
        )

    def _first_alike(self, weight: Any) -> Any:
        """The first node that makes the same weight of the same, as a program does that transposes it in a loop.

        Nothing is written to in between, as it may be a copy; nothing else uses either, so nobody asks for a gradient.
        """
        entry = TABLE.get(called(weight)) if isinstance(weight, Node) and weight.args else None
        if entry is None or entry.apply not in _MADE_AGAIN or self.timeline.is_written(weight):
            return weight
        of, *rest = weight.args
        region = self.timeline.region[weight]
        modes = region.makes_gradients, region.inference
        key = entry, self._first_alike(of), str(rest), str(weight.kwargs), modes
        first = self._weights.setdefault(key, weight)
        alone = len(first.users) == len(weight.users) == 1
        if alone and not self.timeline.any_write_between(first, weight):
            return first
        self._weights[key] = weight
        return weight

    def _owner_of(self, value: _Value) -> Candidate:
        if isinstance(value, _Dense):
            return value.candidate
        first = value[0] if isinstance(value, tuple) else value
        return self._owner[(first.source if isinstance(first, Reader) else first).head]

    def _use(self, node: Node, values: list[_Value]) -> None:
        where = location(node)
        entry = TABLE.get(called(node))
        for candidate in dict.fromkeys(map(self._owner_of, values)):
            candidate.flow.append(node)
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
        described = [v for v in values if not isinstance(v, _Dense)]
        if not described or len(described) < len(values):
            for value in described:
                self._owner_of(value).keep(because("unknown_reader", function_name(node), where))
            self._follow(node, self._owner_of(values[0]))
            return
        try:
            self._describe(node, described)
        except Keep as refused:
            for value in described:
                self._owner_of(value).keep(refused.reason)
            for argument in node.all_input_nodes:
                self._need(argument, refused.reason)
            self._follow(node, self._owner_of(described[0]))

    def _describe(self, node: Node, values: Sequence[_Value]) -> None:
        """Note what the rules make of a node.

        Raises:
            Keep: they refuse it.
        """
        key = called(node)
        if isinstance(values[0], tuple) and is_one_of_several(node):
            self._note(node, values[0][node.args[1]], values)  # type: ignore[index]
            return
        written = writes(node)
        if key in IN_PLACE and written.certain and node.args and node.args[0] in self._values:
            self._write(node, values)
            return
        call = self._call(node, example_of(node))
        if any(argument in self._values for argument in written.arguments):
            call.keep("mutated" if written.certain else "unknown_reader")
        if key not in TABLE or (any(isinstance(value, tuple) for value in values) and not TABLE[key].takes_parts):
            call.keep("unknown_reader")
        result = self._apply(TABLE[key], call, node.args, node.kwargs)
        given = tuple(value for value in values if isinstance(value, ClassTensor))
        outcomes = tuple(outcome for outcome, _ in outcomes_of(call, result, given))
        if node in self.whole:
            (outcome,) = outcomes
            assert isinstance(outcome, ClassTensor)
            if outcome.requires_grad and self.timeline.is_written(node):
                # Eager's gradient is of what is written there, if autograd does not see the write.
                if self.timeline.write_after(node, node) is None:  # for certain
                    writer = next(iter(self.timeline.writers(node, self.graph.output_node())), node)
                    call.keep("unknown_reader", function_name(writer))
                call.keep("mutated", f"a write to what {call.name} returned")
            reader = Whole(outcome, outcome.trail[-1], lambda *_: None, reason=self.whole[node])
            self._note(node, replace(reader, source=replace(outcome, trail=outcome.trail[:-1])), values)
            return
        self._note(node, outcomes if isinstance(result, tuple) else outcomes[0], values)

    def _apply(self, rule: Rule, call: Call, *arguments: Any) -> Any:
        """What a rule makes of a call; of numbers as they are now, where it needs to know them.

        Raises:
            Keep: it refuses.
        """
        try:
            return rule(call, *map(self._fill, arguments))
        except Keep:
            now, found = floats.as_they_are(arguments)
            if not found:
                raise
        result = rule(call, *map(self._fill, now))
        return result if floats.stay(found) else call.keep("changing_number")

    def _need(self, node: Node, reason: Reason) -> None:
        """Note that all of what ``node`` is made of is needed, if that is probabilities."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if isinstance(self._values.get(node), (Logits, _Dense, type(None))):
                continue
            sources = [n for n in node.all_input_nodes if n in self._values]
            if not any(isinstance(self._values[n], Logits) for n in sources):
                waiting += sources
            elif isinstance(self._values[node], (LogProbs, Probs)):
                self.needed.setdefault(node, reason)

    def _call(self, node: Node, out: Any) -> Call:
        entries = functools.partial(self._contents.of, place=node)
        grad = any(one.requires_grad for one in tensors(out)) and not _is_only_detached(node)
        device = next((one.device.type for one in tensors(out)), "cpu")
        autocast = self.timeline.region[node].has_autocast(device)
        name, where = function_name(node), location(node)
        return Call(name, out, example_of, where, self._reader_of, entries, _unexpanded, grad, autocast)

    def _note(self, node: Node, outcome: Any, values: Sequence[_Value]) -> None:
        """Remember that ``node``, which is made of ``values``, is ``outcome``."""
        owners = dict.fromkeys(map(self._owner_of, values))
        candidate, *others = sorted(owners, key=self.candidates.index) if len(owners) > 1 else owners
        for other in others:
            candidate.absorb(other)
            self.candidates.remove(other)
            self._owner.update({head: candidate for head, owner in self._owner.items() if owner is other})
        if isinstance(outcome, Beside) and candidate.flow[-1] is node:
            candidate.flow.pop()  # nothing of the logits is in it
        if isinstance(outcome, Reader):
            is_view = self._are_in(storages(node), node.all_input_nodes)
            if is_view and self.timeline.is_written(node):
                self._call(node, example_of(node)).keep("mutated", f"a write, beside {function_name(node)},")
            candidate.readers.append((node, outcome))
            self._results[node] = outcome
            return
        candidate.derived.append(node)
        self._values[node] = outcome
        known = {handle for handle, _ in candidate.operands}
        for one in outcome if isinstance(outcome, tuple) else (outcome,):
            source = one.source if isinstance(one, Reader) else one
            new = (h for h in source.handles() if isinstance(h, Node) and h not in known)
            candidate.operands += ((handle, node) for handle in new)

    def _write(self, node: Node, values: Sequence[_Value]) -> None:
        """Note what logits become, and every view of them, that are written to as a whole.

        Raises:
            Keep: they are not, or not so that every view becomes what a rule can tell.
        """
        target = node.args[0]
        assert isinstance(target, Node)
        call = self._call(node, example_of(node))
        memory = storages(target)
        # What nothing uses from here on may stay what it was: each edit leaves a view that the next need not tell.
        used = (known for known in self._values if self.timeline.is_used_after(known, node))
        views = list(dict.fromkeys(known for known in (target, *used) if storages(known) & memory))
        # A part of memory may be written to as a whole if nothing else is seen of the rest.
        # Under another grad mode values change and gradients do not.
        same_mode = all(self.timeline.region[node] == self.timeline.region[view] for view in views)
        alone = views == [target]
        if not (_fills_memory(target) or alone) or not same_mode or (len(values) > 1 and not alone):
            call.keep("mutated")
        if _is_expanded(target):  # eager raises
            call.keep("mutated", f"{call.name}, through an expanded view,")
        operands = [example_of(n) for n in node.all_input_nodes if n is not target]
        # An index means other classes to another view, a number the same to all.
        anywhere = called(node) not in _AT_AN_INDEX and not operands
        become: dict[Node, Any] = {}
        whole: Any = self._values[target]
        for view in views:
            value = self._values[view]
            if not isinstance(value, ClassTensor) or not (anywhere or self._alike(value, whole, operands)):
                call.keep("mutated", f"{call.name}, through a view,")
            if value.requires_grad != whole.requires_grad:  # the values of one change, but not its gradients
                call.keep("mutated", f"{call.name}, through a detached view,")
            viewed = self._call(node, example_of(view))
            made = self._apply(IN_PLACE[called(node)], viewed, (view, *node.args[1:]), node.kwargs)
            ((become[view], _),) = outcomes_of(viewed, made)
        self._note(node, become[target], values)
        for view, value in become.items():
            self._values[view] = value
            self._made[view] = node

    @staticmethod
    def _alike(value: ClassTensor, other: Any, operands: Sequence[Any]) -> bool:
        """Whether ``operands`` mean the same to two views of one memory: their entries lie alike, or matter alike."""
        if value.class_dim != other.class_dim or not _same_shape(value.shape, other.shape):
            return False
        behind = len(value.shape) - value.class_dim  # the class axis, counted from the end
        by_class = (
            compat.same(size, 1)
            for like in operands
            if isinstance(like, Tensor)
            for axis, size in enumerate(like.shape, -like.dim())
            if axis != -behind
        )
        return value.row_key(whole=True) == other.row_key(whole=True) or all(by_class)

    def _reader_of(self, handle: Any) -> Reader | None:
        node = handle
        while isinstance(node, Node) and node not in self._results and _adds_axes(node):
            node = node.args[0]
        reader = self._results.get(node)
        if reader is None or self.timeline.is_written(node):
            return None
        expected = list(reader.source.shape)
        expected[reader.source.class_dim] = 1
        return reader if _same_shape(example_of(handle).shape, expected) else None

    def _fill(self, argument: Any) -> Any:
        """``argument`` with described nodes replaced by their descriptions."""
        if isinstance(argument, Node):
            return self._values.get(argument, argument)
        if isinstance(argument, (tuple, list)):
            return type(argument)(self._fill(a) for a in argument)
        if isinstance(argument, dict):
            return {name: self._fill(a) for name, a in argument.items()}
        return argument

    def _follow(self, node: Node, candidate: Candidate) -> None:
        """Mark what a dense head flows into while it still has a class axis."""
        entry, out = TABLE.get(called(node)), example_of(node)
        if entry is not None and not entry.reads and isinstance(out, Tensor) and out.dim():
            size = out.shape[-1]
            if not any(compat.same(size, known) for known in candidate.class_sizes):
                candidate.class_sizes.append(size)  # a selection of classes, perhaps
        if self._has_class_axis(node, candidate):
            self._values[node] = _Dense(candidate)

    @staticmethod
    def _has_class_axis(node: Node, candidate: Candidate) -> bool:
        sizes = (size for out in tensors(example_of(node)) for size in out.shape)
        # Of every node that a dense head flows to, for the report alone: a symbol is not held against a number, which
        # would ask the solver.
        known = candidate.class_sizes
        return any(type(size) is type(other) and compat.same(size, other) for size in sizes for other in known)

    def _returned(self, node: Node) -> None:
        for source in node.all_input_nodes:
            value = self._values.get(source)
            if value is None:
                self._keep_those_in(source)
                continue
            candidate = self._owner_of(value)
            candidate.shown = True
            if isinstance(value, ClassTensor):
                candidate.escaped.append(Escaped(source, value, self._made.get(source, source)))
                self._need(source, because("returned", "normalised", location(source)))
            elif isinstance(value, tuple):
                candidate.keep(because("returned", "as one of several parts", location(source)))
                self._need(source, because("returned", "normalised", location(source)))
        for candidate in self.candidates:
            candidate.escaped = self._with_views(candidate)

    def _keep_those_in(self, source: Node) -> None:
        """Keep the logits of which a view is returned that is not described: the caller may write to them there."""
        memory = storages(source)
        for candidate in self.candidates:
            if self._are_in(memory, candidate.derived):
                detail = f"{function_name(source)}, a view that is returned,"
                candidate.keep(because("unknown_reader", detail, location(source)))

    def _are_in(self, memory: Set[int], nodes: Iterable[Node]) -> bool:
        """Whether anything that has an entry for each class, of what ``nodes`` return, has some of the ``memory``."""
        return any(memory & storages(node) for node in nodes if isinstance(self._values.get(node), ClassTensor))

    def _with_views(self, candidate: Candidate) -> list[Escaped]:
        """What escapes of a candidate, with views of one memory put together where it is known how to make them."""
        groups: dict[frozenset[int], list[Escaped]] = {}
        for escaped in candidate.escaped:
            groups.setdefault(frozenset(storages(escaped.node)), []).append(escaped)
        together: list[Escaped] = []
        for memory, group in groups.items():
            base = next((n for n in candidate.derived if storages(n) == memory and _fills_memory(n)), None)
            value = self._values.get(base) if base is not None else None
            chains = [chain_between(base, e.node) if base is not None else None for e in group]
            known = [chain for chain in chains if chain is not None]
            alike = isinstance(value, ClassTensor) and all(e.value.requires_grad == value.requires_grad for e in group)
            if len(group) == 1 or len(known) < len(group) or not alike:
                together += group
            else:
                assert base is not None and isinstance(value, ClassTensor)
                views = tuple((e.node, chain) for e, chain in zip(group, known, strict=True) if e.node is not base)
                together.append(Escaped(base, value, self._made.get(base, base), views))
        return together


def analyse(graph: Graph, outside: Region | None = None) -> Analysis:
    """The analysis of a graph in which probabilities that are needed in full are what is read of their logits.

    Of a product of two matrices that cannot be fused, as what is read along its rows, the other may be the weight.
    """
    analysis = Analysis(graph, outside)
    if turned := analysis.turnable & _kept(analysis):
        turned -= _kept(Analysis(graph, outside, turned=turned))
        analysis = Analysis(graph, outside, turned=turned)
    while analysis.needed:
        whole = {**analysis.whole, **analysis.needed}
        analysis = Analysis(graph, outside, whole, analysis.turned)
    return analysis


def _kept(analysis: Analysis) -> set[Node]:
    return {node for c in analysis.candidates if c.kept for node in c.projections}


def _may_hold_a_loss(node: Node) -> bool:
    """Whether something without a rule that reduces the class axis may be a loss or contain one."""
    name = function_name(node)
    return compat.is_higher_order(node.target) or "loss" in name or "cross_entropy" in name


def _fills_memory(node: Node) -> bool:
    """Whether the tensor that a node returns has all of its memory."""
    example = example_of(node)
    if not isinstance(example, Tensor):
        return False
    return compat.same(example.untyped_storage().nbytes(), example.numel() * example.element_size())


def _is_expanded(node: Node) -> bool:
    """Whether several entries of the tensor that a node returns may lie in one place."""
    example = example_of(node)
    sizes = zip(example.shape, example.stride(), strict=True)
    return any(compat.same(stride, 0) and not compat.same(size, 1) for size, stride in sizes)


def _row_sizes(node: Node, value: ClassTensor) -> list[tuple[Node, int]]:
    """The numbers of rows of ``value`` that a node is, or that the program takes of it, each with its axis.

    Dynamo asks for them where a mask has selected rows, and where ``linspace``, say, is given a symbolic one. None are
    found if anything else is asked for too.
    """
    if node.target is torch.ops.aten.sym_size.int:
        asked = [(node, node.args[1])]
    elif node.op == "call_method" and node.target == "size" and len(node.args) == 1 and not node.kwargs:
        if any(user.target is not operator.getitem for user in node.users):
            return []
        asked = [(user, user.args[1]) for user in node.users if user.users]
    elif node.op == "call_method" and node.target == "size":
        asked = [(node, node.args[1] if len(node.args) == 2 else node.kwargs.get("dim"))]
    else:
        return []
    axes = range(len(value.shape))
    if any(axis not in (*axes, *(i - len(axes) for i in axes)) for _, axis in asked):
        return []
    found = [(size, int(axis) % len(axes)) for size, axis in asked]  # type: ignore[arg-type]
    return [] if any(axis == value.class_dim for _, axis in found) else found


def _is_unused_question(node: Node) -> bool:
    """Whether a node asks what a tensor is, not what it holds, and nothing takes the answer.

    Dynamo puts numbers and symbols in their place, but leaves some questions: all of sizes in checkpointed bodies.
    """
    unused = all(user.target is operator.getitem and not user.users for user in node.users)
    asks = called(node) is getattr and not isinstance(example_of(node), Tensor)
    return unused and (asks or (node.op == "call_method" and node.target in ("size", "dim_order")))


def _is_only_detached(node: Node) -> bool:
    """Whether all that use a node take it without its gradient, which nothing has then."""
    return bool(node.users) and all(called(user) in ("detach", torch.detach) for user in node.users)


def _unexpanded(handle: Any) -> Any:
    """What a node expands, if one node uses the result: a hook, or a gradient with respect to it, would be a second."""
    expands = isinstance(handle, Node) and called(handle) in _EXPANDS
    return handle.args[0] if expands and handle.args and len(handle.users) == 1 else None


def _adds_axes(node: Node) -> bool:
    """Whether a node is its first argument with axes of size one added."""
    if function_name(node) == "unsqueeze":
        return True
    entries = node.args[1] if node.target is operator.getitem else ()
    return isinstance(entries, tuple) and all(e in (None, Ellipsis, slice(None)) for e in entries) and bool(entries)


def _same_shape(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(compat.same, a, b))
