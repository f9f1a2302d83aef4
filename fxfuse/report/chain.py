"""The way from a projection to what reads its logits, in the words of the program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_iter

from ..mutation import called, example_of, tensors
from ..replay import map_leaves
from ..rules import IN_PLACE, TABLE
from .records import Ending, Projection, Use
from .source import line_at, location, name_of
from .telling import telling
from .walk import ARROW, WHOLE, Walk
from .words import Unnamed, is_tensor, step, word

# --- steps of a graph -------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """Where logits come from, and the chain from there to what they are."""

    projection: Projection
    chain: str


@dataclass(frozen=True)
class Told:
    """How a graph uses the logits of a head.

    Attributes:
        chain: in one line.
        uses: one by one.
        projections: that make the logits, in the order of the graph.
        ways: to the nodes for which they were asked for.
    """

    chain: str = ""
    uses: tuple[Use, ...] = ()
    projections: tuple[Projection, ...] = ()
    ways: Mapping[Node, Way] = field(default_factory=dict)


def uses_of(
    projections: Mapping[Node, Projection],
    flow: Iterable[Node],
    carries: Callable[[Node], bool],
    ending: Ending | None,
    in_checkpoint: bool = False,
    returned: Iterable[Node] = (),
) -> Told:
    """How a graph uses the logits of a head.

    Args:
        projections: the nodes that make the logits, each with its name and place.
        flow: every other node that takes logits, or what has an entry for each class of them.
        carries: whether such a node returns that again.
        ending: of the graph, if known.
        in_checkpoint: whether it is a checkpointed part of the graph that is compiled.
        returned: nodes to which the way is asked for.
    """
    walk = Walk({node: made.name for node, made in projections.items()}, flow, carries)
    found = Counter((walk.steps(node), location(node) or "", False) for node in walk.ends())
    broken = ending is not None and ending.is_break
    end = "end of checkpoint" if in_checkpoint else "graph break" if broken else "return"
    for node in walk:
        if (node in projections or carries(node)) and any(user.op == "output" for user in node.users):
            found[(*walk.steps(node), end), ending.where if ending is not None else "", True] += 1
    vocab = _last_size(next(iter(projections)))
    uses = tuple(
        Use(ARROW.join(steps), where, line_at(where), count, leaves, vocab, leaves and in_checkpoint)
        for (steps, where, leaves), count in found.items()
    )
    chain = _joined([steps for steps, _, _ in found])
    ways = {node: Way(projections[walk.origin(node)], ARROW.join(walk.steps(node))) for node in returned}
    return Told(chain, uses, tuple(projections[node] for node in sorted(projections)), ways)


def _last_size(node: Node) -> int | str:
    size = next((tensor.shape[-1] for tensor in tensors(example_of(node)) if tensor.dim()), 0)
    return size if isinstance(size, int) else str(size)


def _joined(chains: Sequence[Sequence[str]]) -> str:
    """Several chains as one, with what they begin with said once: ``"lm_head → view → cross_entropy + argmax"``."""
    chains = list(dict.fromkeys(map(tuple, chains)))
    if not chains:
        return ""
    shared = 0
    while all(len(chain) > shared + 1 and chain[shared] == chains[0][shared] for chain in chains):
        shared += 1
    ends = [ARROW.join(chain[shared:]) for chain in chains]
    if len(ends) > 1:
        ends = [f"({end})" if ARROW in end else end for end in ends]
    return ARROW.join((*chains[0][:shared], " + ".join(ends)))


def losses_of_inputs(graph: Graph) -> tuple[Use, ...]:
    """The losses in a graph of what it is given, which another graph may have made."""
    losses = {node for node in graph.nodes if (row := TABLE.get(called(node))) is not None and row.reads == "loss"}
    if not losses:
        return ()
    given: dict[Node, Node] = {}  # what it is that a node is made of
    ended: dict[Node, Node] = {}  # the last loss on the way there, which is no end if it is read by another
    found: dict[Node, None] = {}
    for node in graph.nodes:
        source = node if node.op == "placeholder" and is_tensor(node) else _read_by(node)
        if source is node or source in given:
            given[node] = given.get(source, node)
        if source in ended:
            ended[node] = ended[source]
        if node in losses and node in given:
            found.pop(ended.get(node, node), None)
            ended[node] = node
            found[node] = None
    walks = {}
    for start in dict.fromkeys(given[node] for node in found):
        flow = [node for node, other in given.items() if other is start]
        walks[start] = Walk({start: name_of(start) or "logits"}, flow, lambda _: True)
    uses = []
    for node in found:
        start, where = given[node], location(node) or ""
        chain = ARROW.join(walks[start].steps(node))
        uses.append(Use(chain, where, line_at(where), vocab=_last_size(start)))
    return tuple(uses)


def _read_by(node: Node) -> Node | None:
    """What a function of the table reads: the first of the arguments that may be logits."""
    key = called(node)
    row = TABLE.get(key) or IN_PLACE.get(key)
    if row is None:
        return None
    try:
        given = row.signature.bind(*node.args, **node.kwargs).arguments
    except TypeError:
        return None
    tracked = (part for name in row.tracked for part in tree_iter(given.get(name)))
    return next((part for part in tracked if isinstance(part, Node)), None)


# --- calls at run time ------------------------------------------------------------------------------------------


# In the places of the logits and of every other tensor among the arguments of a call.
_LOGITS, _TENSOR = Unnamed("logits"), Unnamed("tensor")


class Applied(NamedTuple):
    """A function that was called with logits, without the tensors; ``key`` is equal for calls that are told alike."""

    function: Any
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: str

    @classmethod
    def of(cls, function: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], logits: Tensor) -> Applied:
        def told(leaf: Any) -> Any:
            return leaf if not isinstance(leaf, Tensor) else _LOGITS if leaf is logits else _TENSOR

        args, kwargs = map_leaves(told, args), {key: map_leaves(told, value) for key, value in kwargs.items()}
        return cls(function, name, args, kwargs, f"{name}{args!r}{kwargs!r}")

    def text(self) -> str:
        return step(self.function, self.name, self.args, self.kwargs, lambda _: None, lambda arg: arg is _LOGITS)


def chain_of(before: str, calls: Sequence[Applied], in_full: bool = True) -> str:
    """The chain to a call that reads deferred logits, the last of ``calls``; ``before`` is what the graph had done.

    Unless ``in_full``, it does not tell what was done in between.
    """
    if not in_full:
        return ARROW.join((before, "…", word(calls[-1].name)))
    steps = [word(call.name) for call in calls]
    with telling():  # for a failure is no reason to stop a training
        steps = [call.text() for call in calls]
    if len(steps) > 2 * WHOLE:
        steps[WHOLE:-WHOLE] = ["…"]
    return ARROW.join((before, *steps))
