"""Show what fxfuse does with every head of a program.

Runs SCRIPT, or the module after -m, with every torch.compile in it routed
through fxfuse, and prints what became of every projection to a vocabulary. A
script that compiles nothing but defines `model` and `example_inputs` has that
model compiled and called once.

FILE.py:NAME imports FILE.py and does so with the function or module NAME
(`decoder.head` too) and `NAME_example_inputs`, or else `example_inputs`: a
tensor, a tuple or list of arguments, a dict of keyword arguments, or a function
that returns one of these.

With --fake, which is what FILE.py:NAME does unless you say --no-fake, tensors
have shapes but no data: no weight is allocated, nothing is compiled or computed,
and a model of any size is reported on any machine. Integers of up to 1 MiB are
real, and a float that is read from a tensor is NaN. Where the script needs
another value, or calls torch.save, it ends, and what was compiled until then is
printed; other ways to write a checkpoint may raise instead. The devices that the
script names must exist; meta counts as cpu.

With --json, standard output holds one JSON object and whatever the script
and its children write goes to standard error. torch is imported before the
script runs, and what other processes compile is not seen.

--html draws the graph around every head, before and after, on one page that
needs no network; --diff prints the same as code. --measure runs every head
that is fused or deferred twice when the script is done, alone, with random
operands of the same shapes: as the inner backend compiles it, and as fxfuse
does. It needs real tensors, so that FILE.py:NAME is not fake with it.

exit status:
  0  the script ran, or exited with status 0, and at least one head was seen
  1  the script or its model raised, or it exited with another status; what was
     compiled until then is printed
  2  wrong usage; FILE.py has no NAME that can be called
  3  nothing was compiled, with or without `model` and `example_inputs`
  4  graphs were compiled, but none has a projection to a vocabulary
  5  no such file or module, or it cannot be read
  6  it is not Python: a syntax error
  7  --check: a required head was kept, or no head matches a pattern
  8  all of that is well, but the report could not be written
After 2, 5 and 6 nothing was run, but for what importing FILE.py runs, and
nothing is printed on standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any, TextIO

from .. import compat
from . import forms
from .check import failures
from .fake import NO_VALUE, asked_by, fake
from .progress import Progress
from .records import Report, journal
from .run import add_program, callable_of, example_call, imported, module, own_frames_dropped, parse, route, run, script
from .telling import say
from .text import for_stream

RAN, RAISED, USAGE, NOTHING_COMPILED, NO_HEAD, NOT_FOUND, NOT_PYTHON, CHECK_FAILED, UNWRITTEN = range(9)


class _Ended(Exception):
    """The command ends before anything is reported: an exit status, a sentence."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status. Meant to be the last thing that its process does."""
    given = _parse(sys.argv[1:] if argv is None else list(argv))
    try:
        return _report(given)
    except _Ended as end:
        return _say(*end.args)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fxfuse.report",
        usage="%(prog)s [options] SCRIPT [ARGS ...]\n       %(prog)s [options] -m MODULE [ARGS ...]\n"
        "       %(prog)s [options] FILE.py:NAME",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON object instead of a table")
    forms.add_flags(parser, form)
    parser.add_argument(
        "--fake", action=argparse.BooleanOptionalAction, help="use tensors without data, or not (see above)"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with status 7 if a required head was neither fused nor deferred"
    )
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="PATTERN",
        help="the heads that --check requires: a glob on the module path, on file.py:line or on the chain of "
        "operations; may be repeated, and implies --check; every head if not given",
    )
    add_program(parser, "SCRIPT")
    given = parse(parser, argv)
    given.name = None
    target = re.fullmatch(r"(.+\.py):([\w.]+)", given.program)
    if target and not given.is_module and not os.path.exists(given.program):
        given.program, given.name = target.groups()
        if given.args:
            parser.error(f"FILE.py:NAME takes no arguments, but {given.args[0]!r} was given")
    if given.fake and given.measure:
        parser.error("--measure needs real tensors, and --fake has none")
    if given.fake is None:
        given.fake = given.name is not None and not given.measure
    given.check = given.check or bool(given.require)
    return given


def _report(given: argparse.Namespace) -> int:
    if not given.is_module:
        loaded = _load(given)  # before anything is run
    forms.watch(given)
    out = _claim_stdout(for_us_alone=given.json)
    route(inner="eager" if given.fake else None)
    progress = Progress()
    compat.around_compilations(progress.start, progress.end)
    with fake() if given.fake else contextlib.nullcontext():
        if given.is_module:
            loaded = _load(given)  # which imports the packages that it is in
        if given.name is None:
            scope, raised = run(loaded, given.args)
        else:
            scope, raised = _import(given.program)
        status = _ended(given, raised)
        report = journal.report()
        explained = status == RAN and (given.name is not None or not report.graphs)
        if explained:
            with progress:
                status, report = _call_example(given, scope)
    if status == RAN and not report.sites:
        status = NO_HEAD if report.graphs else NOTHING_COMPILED
        if given.json:  # otherwise the table says so
            what = "has no projection to a vocabulary" if report.graphs else "compiled nothing"
            _say(status, f"{_called(given)} {what}")
    # Where we compiled, it was without Inductor, and users will have it.
    report = forms.measured(report, given, "inductor" if explained else None)
    lines = failures(report, given.require) if given.check else []
    if lines and status in (RAN, NO_HEAD):
        status = CHECK_FAILED

    _flush()
    try:
        forms.write(report, given, " ".join([_called(given), *given.args]))
    except OSError as error:  # the script may have taken the directory away
        status = _say(status or UNWRITTEN, f"cannot write {given.html}: {error.strerror}")
    try:
        print(json.dumps(report.to_dict()) if given.json else for_stream(report, out), file=out, flush=True)
        forms.show(report, given, out)
    except OSError as error:  # a full disk, or a reader that has gone
        shared = sys.__stdout__ is not None and not given.json  # else 1 is standard error's, or something else's
        _abandon(out.fileno(), *((1,) if shared else ()))
        status = _say(status or UNWRITTEN, f"cannot write standard output: {error.strerror}")
    for line in lines:
        _say(status, line)
    return status


def _load(given: argparse.Namespace) -> Any:
    try:
        return module(given.program) if given.is_module else script(given.program)
    except OSError as error:
        raise _Ended(NOT_FOUND, f"cannot read {given.program}: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte, before Python 3.12
        say("".join(traceback.format_exception(type(error), error, None)), end="")
        raise _Ended(NOT_PYTHON, f"{given.program} is not a Python script") from None
    except ImportError as error:
        if error.name != given.program:
            raise
        raise _Ended(NOT_FOUND, str(error)) from None


def _import(path: str) -> tuple[dict[str, Any], BaseException | None]:
    try:
        return vars(imported(path)), None
    except BaseException as error:
        return {}, error


def _claim_stdout(for_us_alone: bool) -> TextIO:
    """Standard output for the report, which the script can neither close nor replace.

    ``for_us_alone`` hands the file descriptor that everyone else calls standard output to standard error: C++ code and
    child processes write there too. It is never taken back, as some of them may outlive the script.
    """
    if sys.stdout is None:  # it was closed, and something else may have its number: what we write fails, as it should
        return os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
    if for_us_alone and sys.stderr is not None:
        os.dup2(2, 1)
    elif for_us_alone:
        _abandon(1)
    return out


def _ended(given: argparse.Namespace, error: BaseException | None) -> int:
    """The status of a program, or of its model, that ended with ``error``; says so."""
    until_then = "what follows was compiled until then"
    name = _called(given)
    if error is None:
        return RAN
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return RAN
        if not isinstance(error.code, int):
            say(str(error.code))  # python does so for sys.exit("message")
            return _say(RAISED, f"{name} exited with a message; {until_then}")
        return _say(RAISED, f"{name} exited with status {error.code}; {until_then}")
    if isinstance(error, NO_VALUE):
        sentence = f"{name} needs values at {asked_by(error)}, which fake tensors do not have"
        return _say(RAN if len(journal) else RAISED, f"{sentence}; {until_then}")
    sys.excepthook(type(error), own_frames_dropped(error), error.__traceback__)
    return _say(RAISED, f"{name} raised {type(error).__name__}; {until_then}")


def _call_example(given: argparse.Namespace, scope: dict[str, Any]) -> tuple[int, Report]:
    import fxfuse

    since, name = len(journal), given.name or "model"
    called = callable_of(scope, name)
    if called is None and given.name is not None:
        raise _Ended(USAGE, f"{given.program} has no {name} that can be called")
    try:
        call = example_call(scope, name)
        if called is not None and call is not None:
            args, kwargs = call
            return RAN, fxfuse.explain(called, *args, **kwargs)
    except BaseException as error:
        return _ended(given, error), journal.report(since)
    if given.name is not None:
        sentence = f"{given.program} defines no `example_inputs` to call {name} with"
    else:
        sentence = (
            f"{_called(given)} compiled nothing, and does not define a callable `model` and `example_inputs` either"
        )
    return _say(NOTHING_COMPILED, sentence), Report()


def _called(given: argparse.Namespace) -> str:
    """What the user calls the program."""
    if given.name is not None:
        return f"{given.program}:{given.name}"
    return f"-m {given.program}" if given.is_module else given.program


def _say(status: int, sentence: str) -> int:
    _flush()
    say(f"fxfuse.report: {sentence}")
    return status


def _abandon(*descriptors: int) -> None:
    """Let what is still to be written there go nowhere: Python would try once more when it ends, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)


def _flush() -> None:
    """Let what the script has printed come before what we print."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # the script may have closed or replaced it
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
