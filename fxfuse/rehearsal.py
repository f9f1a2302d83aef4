"""Kernels are compiled while Inductor compiles the rest.

Triton takes seconds for those of a loss and its gradients. Which ones an op launches follows from what its operands
look like, and that is known as soon as AOTAutograd has a graph of forward and backward, before Inductor begins with
either. So the ops of that graph are rehearsed then, on tensors without memory, and threads compile what they ask for.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.node import map_arg

from . import ops
from .ops import gpu

log = logging.getLogger("fxfuse")


class Rehearsals:
    """Of the ops in graphs that are compiled until this is left, which waits for their kernels.

    Nothing depends on it: a kernel that could not be compiled says so where it is launched.
    """

    def __init__(self) -> None:
        self._waits: list[Callable[[bool], None]] = []

    def __enter__(self) -> Rehearsals:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for wait in self._waits:
            with _best_effort():
                wait(error is not None)

    def begin(self, graph: Graph) -> None:
        """Begin to compile what the ops of ``graph`` will launch, of those whose sizes are known."""
        with _best_effort():
            # Those of the backward take longest, so they come first.
            calls = [*_calls(graph)][::-1]
            for device in {call.device for call in calls if gpu.has_triton(call.device)}:
                from .kernels.launcher import rehearse  # imports Triton

                self._waits.append(rehearse(device, [call.rehearse for call in calls if call.device == device]))


@contextlib.contextmanager
def _best_effort() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        log.debug("kernels are not compiled beforehand: %s: %s", type(error).__name__, error)


class _Layout(NamedTuple):
    """All that is known of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Call(NamedTuple):
    device: torch.device
    op: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def rehearse(self) -> None:
        self.op(*map(_without_memory, self.args), **{name: _without_memory(arg) for name, arg in self.kwargs.items()})


def _calls(graph: Graph) -> Iterator[_Call]:
    for node in graph.nodes:
        op = ops.can_be_rehearsed.get(node.target)
        if op is None:
            continue
        given = [argument.meta.get("val") for argument in node.all_input_nodes]
        if all(map(_is_known, given)) and given[0].is_cuda:
            args, kwargs = map_arg((node.args, node.kwargs), lambda argument: _layout_of(argument.meta["val"]))
            yield _Call(given[0].device, op, args, kwargs)


def _is_known(value: Any) -> bool:
    return isinstance(value, Tensor) and all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def _layout_of(tensor: Tensor) -> _Layout:
    return _Layout(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _without_memory(value: Any) -> Any:
    if isinstance(value, _Layout):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
    return value
