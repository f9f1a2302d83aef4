"""Runs a program as python would, with every ``torch.compile`` in it routed through fxfuse."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import multiprocessing.spawn
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from .. import compat
from .source import OWN
from .telling import say

# TORCH_COMPILE_OVERRIDE_BACKENDS, from torch 2.13 on, would not do: it replaces the backend of a graph whoever compiles
# it, torch itself included, and drops its options.
# torch calls torch.compile for itself too: torch.cond and flex_attention, called eagerly, do so with a backend that is
# part of how they work. Of torch's own modules only these hand on what the script asked for. fxfuse itself compiles
# what it measures, with and without itself.
_TORCH_FRONT_DOORS = ("torch.compiler", "torch.nn.modules.module")


# --- programs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """What runs as ``__main__``.

    Attributes:
        name: what the user calls it, ``train.py`` or ``-m package.train``.
        code: its compiled source.
        file: the path of the source, ``sys.argv[0]`` as python would set it.
        spec: what was found in a package, a directory or an archive; None for a script.
        root: that directory or archive, ``sys.argv[0]`` in place of ``file``; None for a script and with ``-m``.
    """

    name: str
    code: CodeType
    file: str
    spec: ModuleSpec | None = None
    root: str | None = None


def script(path: str) -> Program:
    """The program in a file, or ``__main__`` of a directory or an archive.

    Raises:
        OSError: there is no such file, or a directory has no ``__main__``.
        ImportError: that cannot be run; its ``name`` is PATH.
        SyntaxError: it is not Python.
        ValueError: it has a null byte, before Python 3.12.
    """
    spec = PathFinder.find_spec("__main__", [path])
    if spec is not None:
        return Program(path, *_code(path, spec), spec, path)
    with open(path, "rb") as file:
        source = file.read()
    # python shows absolute paths in tracebacks of a script, so that they survive os.chdir.
    return Program(path, compile(source, os.path.abspath(path), "exec", dont_inherit=True), path)


def module(name: str) -> Program:
    """The program that ``python -m NAME`` would run. Imports the packages that it is in.

    Raises:
        ImportError: there is no such module, or it cannot be run; its ``name`` is NAME.
        SyntaxError: it is not Python.
        Whatever importing the packages raises.
    """
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name}", name=name)
    return Program(f"-m {name}", *_code(name, spec), spec)


def _code(name: str, spec: ModuleSpec) -> tuple[CodeType, str]:
    """The code of what was found by a name, and its file."""
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name)
    if code is None or spec.origin is None:
        raise ImportError(f"No code object available for {name}", name=name)
    return code, spec.origin


def run(program: Program, args: Sequence[str]) -> tuple[dict[str, Any], BaseException | None]:
    """Run ``program`` as ``__main__``; return its globals and what it raised.

    It keeps ``sys.argv``, ``sys.path`` and ``sys.modules["__main__"]`` from then on. ``runpy`` would take
    them back at the end, but Dynamo looks the globals of a function up through ``sys.modules``, and the functions
    defined in the program may be compiled after it has ended (by us, by a thread, at exit).
    """
    main = ModuleType("__main__")
    main.__file__ = os.path.abspath(program.file)
    is_safe = getattr(sys.flags, "safe_path", False)  # else `python -m` had put the working directory first
    if program.spec is None:
        main.__loader__ = SourceFileLoader("__main__", main.__file__)
        if not is_safe:
            sys.path[0] = os.path.dirname(os.path.realpath(program.file))
    else:
        main.__spec__, main.__loader__, main.__package__ = program.spec, program.spec.loader, program.spec.parent
    if program.root is not None:
        sys.path[: not is_safe] = [os.path.abspath(program.root)]
    sys.modules["__main__"] = main
    sys.argv = [program.root or program.file, *args]
    try:
        exec(program.code, main.__dict__)
    except BaseException as error:  # SystemExit and KeyboardInterrupt end the program too, and have a report
        return main.__dict__, error
    return main.__dict__, None


def own_frames_dropped(error: BaseException) -> BaseException:
    """What a program raised, with no frames in its traceback but those from the program's first one on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith((OWN, "<frozen ")):
        frames = frames.tb_next
    return error.with_traceback(frames)


def imported(path: str) -> ModuleType:
    """The module in a file, imported under its own name, as part of the packages whose directory it is in.

    ``sys.argv`` holds the file alone from then on.

    Raises:
        OSError: there is no such file.
        Whatever importing it raises.
    """
    file = Path(path).resolve()
    file.stat()
    root, parts = file.parent, [file.stem]
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    sys.path.insert(0, str(root))
    sys.argv = [path]
    name = ".".join(parts)
    if len(parts) > 1:
        return importlib.import_module(name)
    while name in sys.modules:  # types.py must not become the standard library's
        name += "_"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


# --- the command line -----------------------------------------------------------------------------------------


def add_program(parser: argparse.ArgumentParser, metavar: str) -> None:
    """Let ``parser`` take a script or ``-m MODULE``, and the program's own arguments after it."""
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("program", metavar=metavar, help="the script to run, or the module after -m")
    rest = parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="its own arguments")
    rest.required = False  # only for the message when the program is missing: it would name both


def writable(name: str) -> Path:
    """The file of that name, as the ``type`` of an argument: whether it can be written is better known before a run
    that may take hours. The program may change directory, and several processes may ask at once.
    """
    file = Path(name).absolute()
    if not name:
        raise argparse.ArgumentTypeError("the name of a file is empty")
    try:
        target = Path(os.path.realpath(file))
        if target.is_file() or target.is_dir():
            target.open("a").close()
        elif not target.exists():  # a pipe is opened once
            target.open("x").close()
            target.unlink(missing_ok=True)
    except FileExistsError:
        pass  # another process did the same just now
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {name}: {error.strerror}") from None
    return file


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """``parser.parse_args``, but "--" after the program goes to the program, as with python."""
    given = parser.parse_args(argv)
    before = argv[: len(argv) - len(given.args)]
    if list(before[-2:]) == [given.program, "--"]:  # argparse takes it for its own
        given.args.insert(0, "--")
    return given


# --- routing --------------------------------------------------------------------------------------------------


def route(inner: str | None = None) -> None:
    """Replace ``torch.compile``, and so ``nn.Module.compile`` which calls it, by one that always names fxfuse.

    It is never taken back: threads and functions that run at exit compile too. So do the processes that multiprocessing
    forks, and those that it starts anew ("spawn"). ``inner`` compiles the rewritten graphs, whichever backend and
    options the caller names.
    """
    import torch

    torch.compile = routed(torch.compile, inner)
    tell = multiprocessing.spawn.get_preparation_data
    multiprocessing.spawn.get_preparation_data = lambda name: _Preparation(tell(name), inner)


class _Preparation(dict[str, Any]):
    """What a process is told that is started anew, before it imports the program. Unpickling it routes there."""

    def __init__(self, told: Mapping[str, Any], inner: str | None) -> None:
        super().__init__(told)
        self.inner = inner

    def __reduce__(self) -> Any:
        return _prepared, (dict(self), self.inner)


def _prepared(told: dict[str, Any], inner: str | None) -> dict[str, Any]:
    route(inner)
    return told


def routed(original: Callable[..., Any], inner: str | None = None) -> Callable[..., Any]:
    """``torch.compile`` with "fxfuse" in place of whichever backend the caller names."""

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] in ("torch", "fxfuse") and caller not in _TORCH_FRONT_DOORS:
            return original(*args, **kwargs)
        return original(*args, **through_fxfuse(kwargs, inner))

    return compile


def through_fxfuse(kwargs: Mapping[str, Any], inner: str | None = None) -> dict[str, Any]:
    """The keyword arguments of a ``torch.compile`` call, changed so that fxfuse compiles.

    Inductor's mode and options go with it, as do fxfuse's own. Those of another backend mean nothing to fxfuse and
    are dropped; the backend itself becomes ``fxfuse.inner``, or "eager" where it has no name to call it by. ``inner``
    is the backend to use instead of it; fxfuse's other options stay.
    """
    through = dict(kwargs, backend="fxfuse")
    options = kwargs.get("options")
    given = options if isinstance(options, Mapping) else {}
    # The one option that torch.compile itself takes, whatever the backend.
    kept = {key: given[key] for key in ("guard_filter_fn",) if given.get(key) is not None}
    if inner is not None:
        own = {key: value for key, value in given.items() if str(key).startswith("fxfuse.")}
        through.pop("mode", None)
        return {**through, "options": {**kept, **own, "fxfuse.inner": inner}}
    backend = kwargs.get("backend")
    if backend is None:
        backend = _default_backend()
    inner = backend if isinstance(backend, str) else _registered_name(backend)
    if inner in ("inductor", "fxfuse"):
        return through
    if inner is not None and inner not in compat.backends():
        return dict(kwargs)  # torch refuses it by its name
    if inner is None:
        inner = "eager"
        say(
            f"fxfuse: the backend {getattr(backend, '__qualname__', backend)!r} has no registered name: the "
            'graphs that it would compile run with "eager"'
        )
    through.pop("mode", None)
    through["options"] = {**kept, "fxfuse.inner": inner}
    return through


def _default_backend() -> Any:
    """The backend of a ``torch.compile`` call that names none."""
    import torch

    current = getattr(torch.compiler, "get_default_backend", None)  # from torch 2.13 on it can be set
    return current() if current else "inductor"


def _registered_name(backend: Callable[..., Any]) -> str | None:
    """The name of a backend that was given as the function itself, if it is one that keeps its own options."""
    return next((name for name in ("inductor", "fxfuse") if compat.backend_of(name) is backend), None)


# --- one function or module of a program ----------------------------------------------------------------------


def callable_of(scope: Mapping[str, Any], name: str) -> Callable[..., Any] | None:
    """What a program calls ``name``, dotted perhaps; None if that is nothing that can be called."""
    root, *rest = name.split(".")
    found = functools.reduce(lambda owner, part: getattr(owner, part, None), rest, scope.get(root))
    return found if callable(found) else None


def example_call(scope: Mapping[str, Any], name: str) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments to call ``name`` with: ``NAME_example_inputs``, with ``_`` for dots, or else ``example_inputs``.

    They are a tensor, a tuple or list of arguments, a dict of keyword arguments, or a function that returns one of
    these. None where a program defines neither.

    Raises:
        Whatever that function raises.
    """
    inputs = scope.get(f"{name.replace('.', '_')}_example_inputs", scope.get("example_inputs"))
    if callable(inputs):
        inputs = inputs()
    if inputs is None:
        return None
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}
