"""Whether a backward may compute activations again: only from what is still what it was in the forward.

PyTorch's partitioner, which chooses what is saved, takes all inputs of a graph for that. Eager, too, needs parameters
as they were; but not a step counter or a running mean, which the forward or the caller may have written to by then.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from . import compat, ops
from .mutation import called, storages, writes

# Elements of an input that is copied for the backward; a graph with larger ones is left to Inductor.
MOST_COPIED = 1 << 22


def reads_copies(gm: GraphModule) -> bool:
    """Let a Dynamo graph read its inputs, but for parameters, through copies, which are saved and not made again.

    Returns:
        False, and nothing is changed, where there is no backward, where the graph writes to an input or returns a view
        of one, where one is large or has a gradient, and where there are graphs in the graph, which are parted on their
        own.
    """
    if not torch.is_grad_enabled() or compat.is_nested(gm):
        return False
    inputs = {
        n: value for n in gm.graph.nodes if n.op in ("placeholder", "get_attr") and (value := _value(n)) is not None
    }
    memory = set().union(*map(storages, inputs))
    written = [argument for node in gm.graph.nodes for argument in writes(node).arguments]
    returned = [node for node in gm.graph.output_node().all_input_nodes if node not in inputs]
    if any(storages(node) & memory for node in (*written, *returned)):
        return False
    copied = {node: value for node, value in inputs.items() if not isinstance(value, torch.nn.Parameter)}
    if any(value.requires_grad or compat.hint(value.numel()) > MOST_COPIED for value in copied.values()):
        return False
    arguments = gm.graph.find_nodes(op="placeholder")
    for node in copied:
        # Dynamo gives numbers as tensors whose values it knows; those of a copy it would not.
        readers = [user for user in node.users if user.op != "output" and called(user) != "item"]
        if readers:
            with gm.graph.inserting_after(arguments[-1] if node.op == "placeholder" else node):
                copy = gm.graph.call_function(ops.copied, (node,))
            copy.meta = dict(node.meta)
            for reader in readers:
                reader.replace_input_with(node, copy)
    gm.recompile()
    return True


def _value(node: Node) -> torch.Tensor | None:
    value = node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) else None
