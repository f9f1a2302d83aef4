"""What is changed in AOTAutograd's forwards and backwards before Inductor compiles them."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from . import ops


def lower(graph: Graph, writable: set[Node]) -> None:
    """Ops that have a formula of autograd become those without; gradients are scaled in the way that is best for each.

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
