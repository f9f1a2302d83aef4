"""Launching kernels with little work for the host.

Triton finds the compiled kernel for a call anew each time, by all its arguments, which takes longer than some of the
kernels here. This keeps what it found, under a signature of the call from which all those arguments follow.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

_compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def launch(signature: Hashable, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """``kernel[grid](*args, **constants)``, where ``args`` are all the parameters that are no ``tl.constexpr``.

    ``signature`` must tell apart all that Triton compiles into a kernel: devices, dtypes, alignment, constants, and for
    integers that the kernel specialises whether they are 1 or multiples of 16. Which arguments are None is seen here.
    """
    key = (id(kernel), signature, *[value is None for value in args])  # a kernel's own hash takes longer
    found = _compiled.get(key)
    if found is not None:
        compiled, positional = found
        compiled[grid + (1,) * (3 - len(grid))](*args, *positional)
        return
    compiled = kernel[grid](*args, **constants)
    if compiled is not None:  # None from the interpreter
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])
