"""Arguments of a graph that must not share memory, because they did not when it was captured.

What a graph writes to is known by the memory of its arguments then. Dynamo compiles nothing anew when other arguments
of the same shapes come to share memory, and what fxfuse reads later than eager would be read after a write.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from . import compat, errors
from .analysis import Candidate, example_of
from .deferred import DeferredLogits
from .mutation import Timeline, storages


@dataclass(frozen=True, eq=False)
class Apart:
    """Positions of arguments that must lie apart, and the graph as it was captured, for calls where they do not."""

    positions: tuple[int, ...]
    captured: GraphModule

    @classmethod
    def of(cls, gm: GraphModule, timeline: Timeline, heads: Sequence[Candidate]) -> Apart | None:
        """What the graph writes to, and what its heads and their readers are of; None if it writes to no argument."""
        arguments = [n for n in gm.graph.nodes if n.op == "placeholder"]
        written = [n for n in arguments if isinstance(example_of(n), Tensor) and timeline.is_written(n)]
        if not written or not heads:
            return None
        handles = [handle for head in heads for handle, _ in head.operands]
        handles += [handle for head in heads for _, reader in head.readers for handle in reader.operands]
        read = {key for handle in handles if isinstance(handle, Node) for key in storages(handle)}
        positions: dict[int, int] = {}  # by the memory: arguments that shared it then may do so
        for i, node in enumerate(arguments):
            for key in storages(node):
                if key in read or node in written:
                    positions.setdefault(key, i)
        if len(positions) < 2:
            return None
        return cls(tuple(positions.values()), GraphModule(gm, copy.deepcopy(gm.graph)))

    def guard(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, which is compiled from the rewritten graph, or the captured one where arguments share memory."""

        def call(*args: Any) -> Any:
            if not self._are_shared(args):
                return run(*args)
            warnings.warn(errors.arguments_share_memory(), stacklevel=2)
            return self.captured.forward(*args)

        return call

    def _are_shared(self, args: Sequence[Any]) -> bool:
        seen: set[int] = set()
        for i in self.positions:
            address = 0 if isinstance(args[i], DeferredLogits) else compat.address(args[i])
            if address and address in seen:
                return True
            seen.add(address)
        return False
