"""Which activations a backward may compute again: those that are made of what eager's backward would need as well.

PyTorch's partitioner, which chooses what is saved, takes all inputs of a graph for what is still there in the backward.
Eager keeps those that its formulas read, and raises where these were written to. Others (a bias, a running mean, the
weight that autocast casts) may be written to once the forward has read them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import chain

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
        readers = {user: list(_readers(user)) for user in given.users}
        if compat.is_tangent(given) or any(map(compat.is_in_backward, chain(*readers.values()))):
            continue
        again = {user: list(filter(compat.may_be_made_again, found)) for user, found in readers.items()}
        copied = [user for user, found in again.items() if found and _may_read_a_copy(user)]
        if sum(map(_size, {reader for user in copied for reader in again[user]})) > _size(given):
            with graph.inserting_before(first):
                copy = graph.call_function(ops.copied, (given,))
            copy.meta["val"] = ops.copied(given.meta["val"])
            for user in copied:
                user.replace_input_with(given, copy)
                del again[user]
        for reader in chain(*again.values()):
            compat.must_be_saved(reader)


def _readers(node: Node) -> Iterator[Node]:
    """What reads the values of a tensor through ``node``: that itself, or what reads it if it is a view."""
    if _is_view(node):
        yield from chain.from_iterable(map(_readers, node.users))
    elif next(tensors(node.meta.get("val")), None) is not None:
        yield node


def _is_view(node: Node) -> bool:
    return compat.is_view(node) or node.target is operator.getitem  # of what is split


def _may_read_a_copy(node: Node) -> bool:
    """Whether it is the same of a copy: not where memory is returned, written to or given other strides."""
    if _is_view(node):
        return not compat.has_own_strides(node) and all(map(_may_read_a_copy, node.users))
    return node.op == "call_function" and not compat.is_mutable(node)


def _size(node: Node) -> int:
    return sum(compat.hint(value.numel()) * value.itemsize for value in tensors(node.meta.get("val")))
