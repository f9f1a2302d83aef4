"""Which activations a backward may compute again: those that are made of what eager's backward would need as well.

PyTorch's partitioner, which chooses what is saved, takes all inputs of a graph for what is still there in the backward.
Eager keeps those that its formulas read, and raises where these were written to. Others (a bias, a running mean, the
weight that autocast casts) may be written to once the forward has read them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import Tensor
from torch.fx import Graph, Node

from . import compat, ops
from .mutation import tensors


def keep_what_is_read(graph: Graph) -> None:
    """Save what the forward of AOTAutograd's joint ``graph`` makes of inputs that no formula of the backward reads.

    Where that is more than the input itself, a copy of the input is saved instead.
    """
    inputs = [node for node in graph.find_nodes(op="placeholder") if isinstance(node.meta.get("val"), Tensor)]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for given in inputs:
        reads = list(_reads(given))
        if compat.is_tangent(given) or any(compat.is_in_backward(reader) for reader, _ in reads):
            continue
        again = [(reader, read) for reader, read in reads if compat.may_be_made_again(reader)]
        copy = None
        if sum(_size(reader) for reader, read in again if read is given) > _size(given):
            with graph.inserting_before(first):
                copy = graph.call_function(ops.copied, (given,))
            copy.meta["val"] = ops.copied(given.meta["val"])
        for reader, read in again:
            if copy is not None and read is given:
                reader.replace_input_with(given, copy)
            else:
                compat.must_be_saved(reader)


def _reads(node: Node) -> Iterator[tuple[Node, Node]]:
    """What reads the values of a tensor, each with what it reads: the tensor or a view of it."""
    for user in node.users:
        if compat.is_view(user) or user.target is operator.getitem:  # of what is split
            yield from _reads(user)
        elif next(tensors(user.meta.get("val")), None) is not None:
            yield user, node


def _size(node: Node) -> int:
    return sum(compat.hint(value.numel()) * value.itemsize for value in tensors(node.meta.get("val")))
