"""Runs a script as ``python SCRIPT`` would, with every ``torch.compile`` in it routed through fxfuse."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

# torch calls torch.compile for itself too: torch.cond and flex_attention, called eagerly, do so with a backend that is
# part of how they work. Of torch's own modules only these hand on what the script asked for.
_TORCH_FRONT_DOORS = ("torch.compiler", "torch.nn.modules.module")


def load(script: str) -> CodeType:
    """The compiled source of ``script``.

    Raises:
        OSError: there is no such file.
        SyntaxError: it is not Python.
    """
    # python shows absolute paths in tracebacks of a script, so that they survive os.chdir.
    return compile(Path(script).read_bytes(), os.path.abspath(script), "exec", dont_inherit=True)


def run(code: CodeType, script: str, args: list[str]) -> tuple[dict[str, Any], BaseException | None]:
    """Run ``code`` as ``__main__``; return its globals and what it raised.

    The script keeps ``sys.argv``, ``sys.path`` and ``sys.modules["__main__"]`` from then on. ``runpy`` would take
    them back at the end, but Dynamo looks the globals of a function up through ``sys.modules``, and the functions
    defined in the script may be compiled after it has ended (by us, by a thread, at exit).
    """
    main = ModuleType("__main__")
    main.__file__ = os.path.abspath(script)
    sys.modules["__main__"] = main
    sys.argv = [script, *args]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))  # `python -m` had put the working directory there
    with routing():
        try:
            exec(code, main.__dict__)
        except BaseException as error:  # SystemExit and KeyboardInterrupt end the script too, and have a report
            return main.__dict__, error
    return main.__dict__, None


@contextlib.contextmanager
def routing() -> Iterator[None]:
    """Replace ``torch.compile``, and so ``nn.Module.compile`` which calls it, by one that always names fxfuse."""
    import torch

    original = torch.compile
    torch.compile = routed(original)
    try:
        yield
    finally:
        torch.compile = original


def routed(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` with "fxfuse" in place of whichever backend the caller names."""

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] == "torch" and caller not in _TORCH_FRONT_DOORS:
            return original(*args, **kwargs)
        return original(*args, **through_fxfuse(kwargs))

    return compile


def through_fxfuse(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a ``torch.compile`` call, changed so that fxfuse compiles.

    Inductor's mode and options go with it, as do fxfuse's own. Those of another backend mean nothing to fxfuse and
    are dropped; the backend itself becomes ``fxfuse.inner``, or "eager" where it has no name to call it by.
    """
    through = dict(kwargs, backend="fxfuse")
    backend = kwargs.get("backend")
    if backend is None:
        backend = _default_backend()
    inner = backend if isinstance(backend, str) else _registered_name(backend)
    if inner in ("inductor", "fxfuse"):
        return through
    if inner is None:
        inner = "eager"
        print(
            f"fxfuse.report: the backend {getattr(backend, '__qualname__', backend)!r} has no registered name: the "
            'graphs that it would compile run with "eager"',
            file=sys.stderr,
        )
    through.pop("mode", None)
    through["options"] = {"fxfuse.inner": inner}
    guard_filter = (kwargs.get("options") or {}).get("guard_filter_fn")
    if guard_filter is not None:  # the one option that torch.compile itself takes, whatever the backend
        through["options"]["guard_filter_fn"] = guard_filter
    return through


def _default_backend() -> Any:
    """The backend of a ``torch.compile`` call that names none."""
    import torch

    current = getattr(torch.compiler, "get_default_backend", None)  # from torch 2.13 on it can be set
    return current() if current else "inductor"


def _registered_name(backend: Callable[..., Any]) -> str | None:
    """The name of a backend that was given as the function itself, if it is one that keeps its own options."""
    from torch._dynamo import lookup_backend

    return next((name for name in ("inductor", "fxfuse") if lookup_backend(name) is backend), None)


def example_call(scope: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The model and the arguments that a script's ``model`` and ``example_inputs`` ask to call it with."""
    if not callable(scope.get("model")) or "example_inputs" not in scope:
        return None
    model, inputs = scope["model"], scope["example_inputs"]
    if isinstance(inputs, Mapping):
        return model, (), dict(inputs)
    return model, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}
