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
from .candidate import Candidate
from .deferred import DeferredLogits
from .mutation import Timeline, example_of, storages


@dataclass(frozen=True, eq=False)
class Apart:
    """Arguments that must lie apart, and the graph as it was captured, for calls where they do not.

    Attributes:
        arguments: the position of each, and the memory that it had: those that shared it then may do so.
    """

    arguments: tuple[tuple[int, int], ...]
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
        found = [
            (i, key) for i, node in enumerate(arguments) for key in storages(node) if key in read or node in written
        ]
        if len({key for _, key in found}) < 2:
            return None
        return cls(tuple(found), GraphModule(gm, copy.deepcopy(gm.graph)))

    def guard(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, which is compiled from the rewritten graph, or the captured one where arguments share memory."""

        def call(*args: Any) -> Any:
            if not self._are_shared(args):
                return run(*args)
            warnings.warn(errors.arguments_share_memory(), stacklevel=2)
            return self.captured.forward(*args)

        return call

    def _are_shared(self, args: Sequence[Any]) -> bool:
        plain = ((args[i], key) for i, key in self.arguments if not isinstance(args[i], DeferredLogits))
        end, last = 0, 0
        for (start, stop), key in sorted((compat.memory_of(arg), key) for arg, key in plain):
            if start < end and key != last:
                return True
            if stop > end:
                end, last = stop, key
        return False
