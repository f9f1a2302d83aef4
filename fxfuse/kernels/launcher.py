"""Launching kernels with little work for the host, and compiling those of a first call together.

Triton finds the compiled kernel for a call anew each time, by all its arguments, which takes longer than some of the
kernels here. This keeps what it found, under a signature of the call from which all those arguments follow.

A kernel takes Triton one to three seconds to compile. Of a call that launches a dozen new ones, ``compiled_together``
makes a rehearsal that launches nothing: Triton is asked for each kernel and compiles them in threads.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from triton.runtime import JITFunction

try:
    from triton.runtime._async_compile import AsyncCompileMode
except ImportError:  # a Triton that does not have it compiles kernels as they come
    AsyncCompileMode = None

R = TypeVar("R")

MOST_THREADS = 16

_compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
# "ask": raise _NotCompiled instead of compiling; "rehearse": compile, and launch nothing; "launch" and "": both.
_mode: ContextVar[str] = ContextVar("mode", default="")


class _NotCompiled(Exception):
    """A kernel is to be launched that this process has not compiled."""


def launch(signature: Hashable, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """``kernel[grid](*args, **constants)``, where ``args`` are all the parameters that are no ``tl.constexpr``.

    ``signature`` must tell apart all that Triton compiles into a kernel: devices, dtypes, alignment, constants, and for
    integers that the kernel specialises whether they are 1 or multiples of 16. Which arguments are None is seen here.
    """
    key = (id(kernel), signature, *[value is None for value in args])  # a kernel's own hash takes longer
    found = _compiled.get(key)
    mode = _mode.get()
    if mode == "rehearse":
        if found is None:
            kernel.warmup(*args, grid=grid, **constants)
        return
    if found is not None:
        compiled, positional = found
        compiled[grid + (1,) * (3 - len(grid))](*args, *positional)
        return
    if mode == "ask" and isinstance(kernel, JITFunction):  # and no function of the interpreter
        raise _NotCompiled
    compiled = kernel[grid](*args, **constants)
    if compiled is not None:  # None from the interpreter
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])


def compiled_together(op: Callable[..., R]) -> Callable[..., R]:
    """``op``, whose kernels are compiled together when it comes upon the first that is new.

    It is then begun anew, so all that it writes to are tensors of its own, or written to as a whole; and while it is
    rehearsed these hold anything, so nothing but kernels may take indices from them.
    """

    @functools.wraps(op)
    def begun_anew(*args: Any, **kwargs: Any) -> R:
        if AsyncCompileMode is None or _mode.get():
            return op(*args, **kwargs)
        with contextlib.suppress(_NotCompiled):
            return _in_mode("ask", op, *args, **kwargs)
        # A rehearsal has no place in a CUDA graph.
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            # What does not compile says so where it is launched. Raised in here, it would leave Triton in this mode.
            threads = ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS))
            with threads, AsyncCompileMode(threads, ignore_errors=True):
                _in_mode("rehearse", op, *args, **kwargs)
        return _in_mode("launch", op, *args, **kwargs)

    return begun_anew


def _in_mode(mode: str, op: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    token = _mode.set(mode)
    try:
        return op(*args, **kwargs)
    finally:
        _mode.reset(token)
