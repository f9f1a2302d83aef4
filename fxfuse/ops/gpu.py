"""Which operands the kernels take, as they take them, and where they are launched."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from ..kernels import tiles
from ..transform import decode
from .contract import Operands, Upstream


@functools.cache
def has_triton(device: torch.device) -> bool:
    """Whether Triton is there and the kernels are made for ``device``; a CPU stands for Triton's interpreter.

    They are for NVIDIA's GPUs: tiles and instructions are chosen by compute capability, and AMD's have numbers of that
    kind too.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def has_kernels(input: Tensor, weight: Tensor) -> bool:
    if input.dtype not in (torch.float16, torch.bfloat16, torch.float32) or weight.dtype != input.dtype:
        return False
    return has_triton(input.device)


def is_described(input: Tensor, weight: Tensor) -> bool:
    """Whether ``hopper`` takes such operands."""
    return has_kernels(input, weight) and tiles.has_descriptors(input) and bool(hopper().takes(input, weight))


class GpuOperands(Operands):
    """The operands as the kernels take them: all contiguous but ``input`` and ``weight``."""

    @classmethod
    def of(
        cls,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        index: Tensor,
        class_weight: Tensor | None,
        scale: float,
        transform: str,
    ) -> GpuOperands:
        decode(transform)  # which raises where it is none
        index = contiguous(index)  # type: ignore[assignment]
        return cls(input, weight, contiguous(bias), index, contiguous(class_weight), float(scale), transform)

    def is_described(self) -> bool:
        return is_described(self.input, self.weight)

    def call(self) -> Any:
        return hopper().Call(*self.leaves)


class GpuUpstream(Upstream):
    """The same, with what only the kernels ask of it."""

    def contiguous(self) -> GpuUpstream:
        return GpuUpstream(*map(contiguous, self))  # type: ignore[arg-type]

    def at(self, rows: slice) -> GpuUpstream:
        return GpuUpstream(*(None if g is None else g[rows] for g in self))  # type: ignore[arg-type]


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """Without gaps, and on 16 bytes, as a new tensor is."""
    if tensor is None or (tensor.is_contiguous() and tensor.data_ptr() % 16 == 0):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@functools.cache
def hopper() -> Any:
    from . import hopper as ops  # imports Triton

    return ops


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():  # which is known sooner than it is set
        return _AS_IT_IS
    return torch.cuda.device(device)


_AS_IT_IS = contextlib.nullcontext()
