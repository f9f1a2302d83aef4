"""Launching kernels with little work for the host.

Triton finds the compiled kernel for a call anew each time, which takes longer than some of the kernels here. This keeps
what it found, under what its choice depends on: which integers are 1 or multiples of 16, dtypes, alignment, constants.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

_compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """``kernel[grid](*args, **constants)``, where ``args`` are all the parameters that are no ``tl.constexpr``."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    key = (kernel, device, *constants.values(), *map(_specialised, args))
    found = _compiled.get(key)
    if found is not None:
        compiled, positional = found
        compiled[grid + (1,) * (3 - len(grid))](*args, *positional)
        return
    compiled = kernel[grid](*args, **constants)
    if compiled is not None:  # None from the interpreter
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])


def _specialised(value: Any) -> Any:
    """What Triton may have compiled into a kernel that was launched with this value."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return 1 if value == 1 else (value % 16 == 0, -(1 << 31) <= value < 1 << 31)
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, *value.block_shape
    return type(value)
