"""What is changed in AOTAutograd's graphs before Inductor compiles them."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from . import compat, ops

_WRITE = torch.ops.aten.copy_.default


def keep_overwritten(graph: Graph) -> None:
    """Let a joint graph read each input that it writes to through a copy, which the backward is given if it needs it.

    PyTorch's partitioner, which chooses what is saved and what is computed again, does not see such writes: what is
    computed again from such an input, a step counter or a running mean, say, would be of what was written.
    """
    inputs = list(graph.find_nodes(op="placeholder"))
    if not any(map(compat.is_tangent, inputs)):
        return
    for write in graph.find_nodes(op="call_function", target=_WRITE):
        (written, *_) = write.args
        # Of a copy, as_strided would be something else.
        readers = [user for user in written.users if user.target not in (_WRITE, torch.ops.aten.as_strided.default)]
        if written.op == "placeholder" and readers:
            with graph.inserting_after(inputs[-1]), compat.fake_mode_of(written.meta["val"]):
                copy = graph.call_function(torch.ops.aten.clone.default, (written,))
                copy.meta = {"val": written.meta["val"].clone(), "recompute": CheckpointPolicy.MUST_SAVE}
            for reader in readers:
                reader.replace_input_with(written, copy)


def lower(graph: Graph, writable: set[Node]) -> None:
    """Of a forward or a backward: ops that have a formula of autograd become those without, and gradients are scaled.

    ``writable`` are the inputs that the graph may write to. A gradient among them that is a result once it is scaled is
    scaled where it is; anywhere else Inductor fuses the product with what comes next.
    """
    for op, beneath in ops.beneath_autograd.items():
        for node in graph.find_nodes(op="call_function", target=op):
            node.target = beneath
    for node in graph.find_nodes(op="call_function", target=ops.scaled):
        gradient, factor = node.args
        is_last = len(gradient.users) == 1 and all(user.op == "output" for user in node.users)
        if gradient in writable and is_last:
            with graph.inserting_before(node):
                graph.call_function(ops.scale_, (gradient, factor))
            node.replace_all_uses_with(gradient)
            graph.erase_node(node)
        else:
            node.target = torch.ops.aten.mul.Tensor
