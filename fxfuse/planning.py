"""How to compute the readers of a head: which of them share a pass over the vocabulary, and where in the graph that is.

A pass comes before anything that uses what one of its readers returns. So labels that the graph makes later are made
once more, and what is added to all logits of a row, perhaps made of what another reader of the pass returns, is added
to their statistics afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from . import compat
from .algebra import OfTwoHeads
from .candidate import Candidate
from .costs import copied, has_known_size, makes_gradient, too_dear
from .escape import why_not
from .mutation import Timeline, example_of, is_repeatable, storages
from .options import Options
from .passes import computes_again, keeps_much, leading
from .readers import Reader, Whole
from .reasons import Reason, because
from .report.source import function_name, location

MOST_STEPS = 16  # by which labels are made anew, of which few take more than a shift, a view and a mask


@dataclass
class Pass:
    """Readers that share one computation of their rows' statistics, in graph order.

    Attributes:
        place: the node before which it is placed.
        early: labels and the like that the graph makes later, in order, and the computation anew.
        room: whether it may keep a gradient of the weight between forward and backward.
    """

    readers: list[tuple[Node, Reader]]
    place: Node
    early: tuple[Node, ...] = ()
    room: bool = True

    @property
    def of(self) -> list[Reader]:
        return [reader for _, reader in self.readers]


class Planner:
    """Plans the heads of one graph."""

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
        # Readers with gradients first: others join them.
        for node, reader in sorted(candidate.readers, key=lambda one: not one[1].source.requires_grad):
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
        source = leading(one.of)
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
        return id(source.head), source.row_key(), source.logits_key(shifted=False), mode, reader.chosen

    def _joined(self, known: Pass, node: Node, reader: Reader) -> Pass | None:
        """``known`` with one more reader of its kind, or None where they cannot share a computation."""
        weights = {r.class_weight for _, r in known.readers if r.sums_classes}
        if reader.sums_classes and weights and weights != {reader.class_weight}:
            return None
        if leading(known.of).requires_grad != reader.source.requires_grad:
            # A loss whose gradients are made in the forward is best left alone.
            of_rows = reader.chosen is None and not isinstance(reader.source, OfTwoHeads)
            if not of_rows or not computes_again(known.of, self.options.memory):
                return None
        position = self.timeline.position
        readers = sorted([*known.readers, (node, reader)], key=lambda one: position[one[0]])
        # Where one reader is an operand of another, of this head or not, each is best left where it is.
        if any(user in self.readers for n, _ in readers for user in n.users):
            return None
        # As late as possible, so that every reader's labels exist: before anything uses what a reader returns.
        users = [user for n, _ in readers for user in n.users]
        end = self.timeline.end_of_region(node)
        place = min((*users, *([end] if end else [])), key=position.__getitem__, default=node)
        early: dict[Node, None] = {}
        for _, r in readers:
            for handle in (*r.operands, *r.source.handles(shifted=False)):
                if isinstance(handle, Node) and not self._is_there(handle, place, early):
                    return None
        return Pass(readers, place, tuple(early))

    def _is_there(self, node: Node, place: Node, early: dict[Node, None], steps: int = MOST_STEPS) -> bool:
        """Whether a node comes before ``place``, or can be made anew there: then it is added to ``early``.

        Not if it is more ``steps`` away from what comes before, or if anything is written to before it: where arguments
        come to share memory, that may be what it is made of.
        """
        timeline = self.timeline
        if node in early or timeline.position[node] < timeline.position[place]:
            return True
        if steps == 0 or node in self.readers or timeline.region[node] != timeline.region[place]:
            return False
        if not is_repeatable(node) or example_of(node).requires_grad or timeline.any_write_between(place, node):
            return False
        for one in node.all_input_nodes:
            # What a reader returns comes where its own pass is, which may be later.
            if timeline.unplaced_write(one) or one in self.readers or not self._is_there(one, place, early, steps - 1):
                return False
        early[node] = None
        return True

    def finishes_before(self, one: Pass, node: Node) -> Node:
        """Where what a reader of ``one`` makes of the statistics is placed: its logits may be shifted by another's."""
        return max(one.place, node, key=self.timeline.position.__getitem__)

    def _changed(self, candidate: Candidate, one: Pass) -> Reason | None:
        """Why the operands are not at ``one.place`` what they were where eager reads them, if so."""
        operands = [*candidate.operands]
        operands += [(handle, node) for node, reader in one.readers for handle in reader.operands]
        saves = computes_again(one.of, self.options.memory, one.room)
        places = {one.place, *(self.finishes_before(one, node) for node, _ in one.readers)}
        for handle, read_at in operands:
            if not isinstance(handle, Node):
                continue
            writers = (self.timeline.write_between(handle, read_at, place) for place in places)
            writer = next(filter(None, writers), None)
            if writer is None and saves:
                writer = self.timeline.write_after(handle, one.place)
            if writer is not None:
                return because("operand_mutated", function_name(writer), location(writer))
            if self.timeline.unplaced_write(handle):
                return because("operand_mutated", "an operation", location(read_at))
        return None
