"""What became of one projection in a graph: its operands, what was made of its logits, and what keeps it dense."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Node

from . import compat
from .algebra import ClassTensor, Head
from .escape import Escaped
from .mutation import example_of
from .ops.contract import AUTOCAST_DTYPES, SUPPORTED_DEVICES, SUPPORTED_DTYPES
from .readers import Reader
from .reasons import Reason, because
from .report.source import function_name, location
from .rules.heads import VOCABULARY_RATIO


@dataclass(eq=False)
class Candidate:
    """A projection that may turn out to be a head, and what was learnt of it; several whose logits were joined.

    Attributes:
        node, head: the projection, or the first of several.
        operands: every tensor that logits are made of, with the node that reads it in eager.
        readers: the nodes that return what was read of the logits.
        derived: described nodes, in graph order, projections among them.
        projections: every projection, with its head.
        flow: every node that takes what has an entry for each class, for the report.
        escaped: the nodes that the graph returns.
        kept: why it is left as it was, if it is.
        read: by a loss or the like.
        shown: returned from the graph, or read by something that also reads other things than logits.
        trail: the functions that the logits went through, the longest way, for the report.
        class_sizes: V, and those of selections of classes.
        sizes: nodes that return how many rows there are, with what they ask, and along which axis.
        rows: of all projections, as far as is known.
        source: hidden units of what its hidden states are a projection of, if nothing lies between: an adapter of low
            rank, or a head that is factored.
        inner: taken for hidden states by another projection.
        copied: bytes of copies of the weight, and of its gradients but the first, that fusing makes, and eager not.
    """

    node: Node
    head: Head
    operands: list[tuple[Any, Node]] = field(default_factory=list)
    readers: list[tuple[Node, Reader]] = field(default_factory=list)
    derived: list[Node] = field(default_factory=list)
    projections: dict[Node, Head] = field(default_factory=dict)
    flow: list[Node] = field(default_factory=list)
    escaped: list[Escaped] = field(default_factory=list)
    kept: Reason | None = None
    read: bool = False
    shown: bool = False
    trail: tuple[str, ...] = ()
    class_sizes: list[Any] = field(default_factory=list)
    sizes: list[tuple[Node, ClassTensor, int]] = field(default_factory=list)
    rows: int = 0
    source: Any = 0
    inner: bool = False
    copied: int = 0

    def keep(self, reason: Reason) -> None:
        self.kept = self.kept or reason

    @property
    def is_head(self) -> bool:
        # Without a loss that reads it, an output is called logits when it is much wider than its input.
        hidden = max(compat.hint(self.head.hidden), compat.hint(self.source))
        wide = compat.hint(self.head.vocab) >= VOCABULARY_RATIO * hidden
        dense = self.kept is not None or bool(self.escaped)
        is_shown = self.shown and wide and (bool(self.escaped) or not self.inner)
        return (bool(self.readers) and (self.read or wide)) or (dense and (self.read or is_shown))

    def absorb(self, other: Candidate) -> None:
        """Take over what is known of ``other``, whose logits were joined to these."""
        self.operands += other.operands
        self.readers += other.readers
        self.derived += other.derived
        self.projections |= other.projections
        self.flow += other.flow
        self.escaped += other.escaped
        self.sizes += other.sizes
        self.rows += other.rows
        self.kept = self.kept or other.kept
        self.read, self.shown = self.read or other.read, self.shown or other.shown


def unfit(candidate: Candidate, autocast: bool) -> Reason | None:
    """Why the operands of a projection, under ``autocast`` or not, cannot be fused at all, if so."""
    head = candidate.head
    where = location(candidate.node)
    if head.unsupported:
        detail = f"{function_name(candidate.node)} has {head.unsupported}, which fxfuse does not support"
        return because("unsupported_argument", detail, where)
    named = (("the input", head.input), ("the weight", head.weight), ("the bias", head.bias))
    for name, handle in named:
        example = example_of(handle)
        if handle is None:
            continue
        if not isinstance(example, Tensor):
            return because("internal_error", f"{name} has no example value", where)
        if compat.is_functional_wrapper(example):
            return because("functional_transform", name, where)
        if not compat.is_plain(example):
            return because("subclass", f"{name} ({type(example).__name__})", where)
        if example.device.type not in SUPPORTED_DEVICES:
            return because("device", str(example.device), where)
        if example.device != example_of(head.input).device:
            return because("device", f"{example_of(head.input).device} and {example.device}", where)
    if not isinstance(head.vocab, int) or not isinstance(head.hidden, int) or 0 in (head.vocab, head.hidden):
        return because("shape", f"the weight has a symbolic or empty shape, {head.vocab} × {head.hidden}", where)
    if head.bias is not None and tuple(example_of(head.bias).shape) != (head.vocab,):
        return because("shape", f"the bias has the shape {tuple(example_of(head.bias).shape)}", where)
    if head.dtype not in SUPPORTED_DTYPES:
        return because("dtype", f"the logits are {head.dtype}", where)
    dtypes = {name: example_of(handle).dtype for name, handle in named if handle is not None}
    converted = autocast and AUTOCAST_DTYPES.issuperset(dtypes.values())
    if len(set(dtypes.values())) > 1 and not converted:  # eager raises, which tensors without data do not
        return because("dtype", ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items()), where)
    return None
