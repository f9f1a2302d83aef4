"""Kernels are compiled while Inductor compiles the rest.

Triton takes seconds for those of a loss and its gradients. Which ones an op launches follows from what its operands
look like, and that is known as soon as AOTAutograd has a graph of forward and backward, before Inductor begins with
either. So the ops of that graph are rehearsed then, on tensors without memory, and threads compile what they ask for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.node import map_arg

from . import ops
from .ops import cuda


class Rehearsals(contextlib.ExitStack):
    """Of the ops in graphs that are compiled until this is left, which waits for their kernels."""

    def begin(self, graph: Graph) -> None:
        """Begin to compile what the ops of ``graph`` will launch, of those whose sizes are known."""
        # Those of the backward take longest, so they come first.
        calls = [*_calls(graph)][::-1]
        for device in {call.device for call in calls if cuda.has_triton(call.device)}:
            from .kernels.launcher import rehearse  # imports Triton

            self.callback(rehearse(device, [call.rehearsed for call in calls if call.device == device]))


class _Looks(NamedTuple):
    """What a tensor looks like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Call(NamedTuple):
    device: torch.device
    op: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def rehearsed(self) -> None:
        self.op(*map(_without_memory, self.args), **{name: _without_memory(arg) for name, arg in self.kwargs.items()})


def _calls(graph: Graph) -> Iterator[_Call]:
    for node in graph.nodes:
        op = ops.rehearsed.get(node.target)
        given = [argument.meta.get("val") for argument in node.all_input_nodes]
        if op is not None and all(map(_is_known, given)) and given[0].is_cuda:
            args, kwargs = map_arg((node.args, node.kwargs), lambda argument: _looks(argument.meta["val"]))
            yield _Call(given[0].device, op, args, kwargs)


def _is_known(value: Any) -> bool:
    return isinstance(value, Tensor) and all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def _looks(tensor: Tensor) -> _Looks:
    return _Looks(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _without_memory(value: Any) -> Any:
    if isinstance(value, _Looks):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
    return value
