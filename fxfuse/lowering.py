"""What is changed in AOTAutograd's forwards and backwards before Inductor compiles them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from . import compat, ops


def lower(graph: Graph, writable: set[Node]) -> None:
    """Ops that have a formula of autograd become those without; gradients are scaled in the way that is best for each.

    ``writable`` are the inputs that the graph may write to. A gradient among them that is a result once it is scaled is
    scaled where it is; anywhere else Inductor fuses the product with what comes next. Gradients of a weight by several
    passes are added up in place: Inductor would make all of them first, to add them in one go.
    """
    _add_in_place(graph)
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


def _add_in_place(graph: Graph) -> None:
    """Write sums of gradients that fxfuse's ops have just made over one of these."""
    made: set[Node] = set()
    for node in list(graph.nodes):
        if _is_gradient(node, made):
            made.add(node)
        elif node.target is torch.ops.aten.add.Tensor and made.issuperset(node.args) and not node.kwargs:
            total: Any
            total, more = node.args
            taken = any(user is not node and user.target is not ops.add_ for user in total.users)
            if taken or total is more or not _same_kind(total.meta["val"], node.meta["val"]):
                continue
            with graph.inserting_before(node):
                graph.call_function(ops.add_, (total, more))
            node.replace_all_uses_with(total)
            graph.erase_node(node)


def _same_kind(one: torch.Tensor, other: torch.Tensor) -> bool:
    same_shape = one.dim() == other.dim() and all(map(compat.same, one.shape, other.shape))
    return same_shape and one.dtype == other.dtype


def _is_gradient(node: Node, made: set[Node]) -> bool:
    """Whether a node is a result of a backward of fxfuse, or of what ``made`` has, in memory that nothing else uses."""
    of: Any = node.args[0] if node.args else None
    if node.target is operator.getitem:
        return of.target in _BACKWARDS
    return node.target in _KEEPS_NUMBERS and of in made and len(of.users) == 1


_BACKWARDS = {beneath for op in ops.backwards for beneath in (op, ops.beneath_autograd.get(op, op))}
_KEEPS_NUMBERS = {torch.ops.prims.convert_element_type.default, torch.ops.aten.permute.default}
