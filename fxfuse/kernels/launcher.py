"""Launching kernels with little work for the host, and compiling those of a first call together.

Triton finds the compiled kernel for a call anew each time, by all its arguments, which takes longer than some of the
kernels here. This keeps what it found, under the call's constants and a signature from which all else follows.

A kernel takes Triton one to three seconds to compile. Of a call that launches a dozen new ones, ``compiled_together``
makes a rehearsal that launches nothing: Triton is asked for each kernel and compiles them in threads, which also make
them ready to be launched: Triton 3.6 has a C compiler make a function for each, which it would ask for one by one.
``rehearse`` does that before there is such a call.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver

from .. import compat
from . import tiles
from .prepared import Prepared, prepare

try:
    from triton.runtime._async_compile import AsyncCompileMode, FutureKernel
except ImportError:  # a Triton that does not have it compiles kernels as they come
    AsyncCompileMode = FutureKernel = None

R = TypeVar("R")
T = TypeVar("T")

MOST_THREADS = 16

_compiled: dict[Any, _Compiled] = {}
# "ask": raise _NotCompiled instead of compiling; "rehearse": compile, and launch nothing; "launch" and "": both.
_mode: ContextVar[str] = ContextVar("mode", default="")
# The kernels that Triton was asked for while it compiles in threads.
_asked: ContextVar[list[Any] | None] = ContextVar("asked", default=None)
# Is told of each launch, and of each kernel that was compiled.
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


class _NotCompiled(Exception):
    """A kernel is to be launched that this process has not compiled."""


class Launchable(Protocol):
    def launch(self, grid: tuple[int, ...], args: Sequence[Any], on: int | None = None) -> None:
        """Launch it with such arguments, tensors as ``place`` has them; ``on`` is what ``stream`` gives."""

    def place(self, tensor: Tensor) -> Any:
        """What stands for a tensor among the arguments: its address, if ``by_address``."""

    def prepare(self, grid: tuple[int, ...], args: Sequence[Any]) -> Prepared | None:
        """The launch for CUDA's driver, see ``prepared``; None if it cannot be launched so."""

    @property
    def by_address(self) -> bool:
        """Whether the address is all that a kernel knows of a tensor."""


class _Compiled(NamedTuple):
    kernel: Any  # Triton's CompiledKernel
    run: Callable[..., None]  # of a grid, a stream, what follows here, and the kernel's arguments
    function: int
    metadata: Any
    constants: tuple[Any, ...]  # the arguments for the kernel's constants, which are last
    by_address: bool = True

    def launch(self, grid: tuple[int, ...], args: Sequence[Any], on: int | None = None) -> None:
        grid += (1,) * (3 - len(grid))
        on = stream() if on is None else on
        if on is None:
            self.kernel[grid](*args, *self.constants)
        else:
            self.run(*grid, on, self.function, self.metadata, None, None, None, *args, *self.constants)

    def prepare(self, grid: tuple[int, ...], args: Sequence[Any]) -> Prepared | None:
        return prepare(self.kernel, grid, args)

    def place(self, tensor: Tensor) -> int:
        return tensor.data_ptr()  # of a tensor itself Triton would ask CUDA whether it has the memory


class _Interpreted(NamedTuple):
    kernel: Any
    constants: dict[str, Any]
    by_address: bool = False

    def launch(self, grid: tuple[int, ...], args: Sequence[Any], on: int | None = None) -> None:
        with compat.disable_dispatch_modes():  # the interpreter calls PyTorch
            self.kernel[grid](*args, **self.constants)

    def prepare(self, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        return None

    def place(self, tensor: Tensor) -> Tensor:
        return tensor


def launch(signature: Hashable, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """``kernel[grid](*args, **constants)``, where ``args`` are all the parameters that are no ``tl.constexpr``.

    ``signature`` must tell apart what else Triton compiles into a kernel: devices, dtypes, alignment, and for integers
    that the kernel specialises whether they are 1, multiples of 16 or wider than 32 bits. Constants, from which the
    blocks of descriptors must follow, and which arguments are None, are seen here.
    """
    key = _key(signature, kernel, args, constants)
    found: Launchable | None = _compiled.get(key)
    mode, listener = _mode.get(), _listener.get()
    if mode == "rehearse":
        if found is None:
            if (asked := _asked.get()) is not None:
                asked.append(kernel)
            kernel.warmup(*args, grid=grid, **constants)
        return
    if found is None:
        if isinstance(kernel, JITFunction):
            if listener is not None:
                listener.compiled()
            if mode == "ask":
                raise _NotCompiled
            compiled = kernel[grid](*args, **constants)
            if FutureKernel is not None and isinstance(compiled, FutureKernel):  # another thread asked for it
                compiled = compiled.result()
            last = tuple(constants[name] for name in kernel.arg_names[len(args) :])
            _compiled[key] = _Compiled(compiled, compiled.run, compiled.function, compiled.packed_metadata, last)
            return
        found = _Interpreted(kernel, constants)
    found.launch(grid, [found.place(value) if isinstance(value, Tensor) else value for value in args])
    if listener is not None:
        listener.launched(found, grid, args)


def _key(signature: Hashable, kernel: Any, args: Sequence[Any], constants: dict[str, Any]) -> Hashable:
    # A kernel's own hash takes longer.
    return id(kernel), signature, *constants.values(), *[value is None for value in args]


class Listener(Protocol):
    def launched(self, kernel: Launchable, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """``kernel.launch(grid, args)`` was called."""

    def compiled(self) -> None:
        """A kernel is new."""


def listening(listener: Listener) -> contextlib.AbstractContextManager[None]:
    """Tell ``listener`` of what ``launch`` does meanwhile."""
    return _set(_listener, listener)


@contextlib.contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def is_nested() -> bool:
    """Whether somebody listens, or an op is compiled together."""
    return _listener.get() is not None or _mode.get() != ""


def undisturbed(op: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """``op(*args, **kwargs)``, as if nothing listened and nothing was compiled together.

    No op calls another, so what comes while one is recorded or rehearsed is of somebody else: a finaliser may run
    anywhere.
    """
    with compat.disable_dispatch_modes():
        return contextvars.Context().run(functools.partial(op, *args, **kwargs))


def stream() -> int | None:
    """The current stream; None if somebody, a profiler say, has asked Triton to be told of launches."""
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if getattr(before, "calls", before) or getattr(after, "calls", after):
        return None
    device = driver.active
    return device.get_current_stream(device.get_current_device())


def compiled_together(op: Callable[..., R]) -> Callable[..., R]:
    """``op``, whose kernels are compiled together when it comes upon the first that is new.

    It is then begun anew, so all that it writes to are tensors of its own, or written to as a whole; and while it is
    rehearsed these hold anything, so nothing but kernels may take indices from them. What calls it while another is,
    as a finaliser may, comes by ``recorder.replayed``, which sees to that.
    """

    @functools.wraps(op)
    def begun_anew(*args: Any, **kwargs: Any) -> R:
        if AsyncCompileMode is None or _mode.get():
            return op(*args, **kwargs)
        with contextlib.suppress(_NotCompiled):
            return _in_mode("ask", op, *args, **kwargs)
        # A rehearsal has no place in a CUDA graph.
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            with _in_threads():
                _in_mode("rehearse", op, *args, **kwargs)
        return _in_mode("launch", op, *args, **kwargs)

    return begun_anew


def rehearse(device: torch.device, ops: Iterable[Callable[[], object]]) -> Callable[[bool], None]:
    """Begin to compile what ops would launch on ``device``.

    The ops are of tensors without memory, on the device ``meta``. Each launches by ``launch`` alone, as those do that
    are ``compiled_together``: anything else would launch a kernel on memory that is not there.

    Returns:
        what waits until all is compiled; or, given True, until what has been begun is.
    """
    if AsyncCompileMode is None:
        return lambda stop: None
    context = contextvars.copy_context()  # Triton's mode is for these alone, not for what comes until it is left

    def begin() -> Callable[[bool], None]:
        with contextlib.ExitStack() as stack:
            with torch.cuda.device(device), _set(tiles.meant, device), compat.disable_dispatch_modes():
                threads = stack.enter_context(_in_threads())
                for op in ops:
                    with contextlib.suppress(Exception):  # it says so when it is called
                        _in_mode("rehearse", op)
            rest = stack.pop_all()

        def end(stop: bool) -> None:
            threads.stopped = stop
            rest.close()

        return end

    end = context.run(begin)
    return lambda stop: context.run(end, stop)


@contextlib.contextmanager
def _in_threads() -> Iterator[_Compilers]:
    """What Triton is asked for meanwhile is compiled in threads, and is at the end.

    What does not compile or load says so where it is launched: here it would leave Triton in this mode.
    """
    with _set(_asked, []):
        try:
            with _Compilers() as threads, AsyncCompileMode(threads, ignore_errors=True):
                yield threads
        finally:
            _forget_failures()


def _forget_failures() -> None:
    """Of what was asked for: Triton before 3.9 keeps its error, and raises that whenever it is asked again."""
    for kernel in _asked.get() or ():
        for cache, *_ in getattr(kernel, "device_caches", {}).values():
            for key, found in list(cache.items()):
                if isinstance(found, FutureKernel) and found.kernel is None and found.future.done():
                    cache.pop(key, None)


class _Compilers(ThreadPoolExecutor):
    """Threads in which kernels are compiled and loaded, for the device that is current where this is made."""

    def __init__(self) -> None:
        super().__init__(min(os.cpu_count() or 1, MOST_THREADS))
        self.device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self.stopped = False

    def submit(self, compile: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        def compile_and_load() -> T:
            if self.stopped:
                raise CancelledError
            kernel = compile(*args, **kwargs)
            if self.device is not None:
                torch.cuda.set_device(self.device)  # of this thread
            kernel.run  # type: ignore[attr-defined]  # noqa: B018 (a property that loads it)
            return kernel

        return super().submit(compile_and_load)


def _in_mode(mode: str, op: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    with _set(_mode, mode):
        return op(*args, **kwargs)
