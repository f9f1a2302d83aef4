"""Show what fxfuse does with every head of a program.

Runs SCRIPT with every torch.compile in it routed through fxfuse, and prints
what became of every projection to a vocabulary. A script that compiles nothing
but defines `model` and `example_inputs` (a tensor, a tuple or list of
arguments, or a dict of keyword arguments) has that model compiled and called
once. With --json, standard output holds one JSON object and whatever the script
and its children write goes to standard error. torch is imported before the
script runs, and what other processes compile is not seen.

--html draws the graph around every head, before and after, on one page that
needs no network; --diff prints the same as code. --measure runs every fused
head twice when the script is done, alone, with random operands of the same
shapes: as the inner backend compiles it, and as fxfuse does.

exit status:
  0  the script ran, or exited with status 0
  1  the script or its model raised, or it exited with another status; what was
     compiled until then is printed
  2  wrong usage, no such file, or a syntax error in it; nothing was run and
     nothing is printed on standard output
  3  the script compiled nothing, and does not define `model` and
     `example_inputs` either
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, TextIO

from . import forms
from .records import Report, journal
from .run import example_call, load, run

RAN, RAISED, NOT_RUN, NOTHING_COMPILED = range(4)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status. Meant to be the last thing that its process does."""
    given = _parse(sys.argv[1:] if argv is None else list(argv))
    try:
        code = load(given.script)
    except OSError as error:
        return _say(NOT_RUN, f"cannot read {given.script}: {error.strerror}")
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte, before Python 3.12
        traceback.print_exception(type(error), error, None)
        return _say(NOT_RUN, f"{given.script} is not a Python script")
    try:
        forms.watch(given)
    except OSError as error:
        return _say(NOT_RUN, f"cannot write {error.filename}: {error.strerror}")
    out = _claim_stdout(for_us_alone=given.json)

    scope, raised = run(code, given.script, given.args)
    report = journal.report()
    status = _ended(given.script, raised)
    inner = None
    if status == RAN and not report.graphs:
        status, report = _compile_example(given.script, scope)
        inner = "inductor"  # what it will be compiled with, where we did without
    report = forms.measured(report, given, inner)

    _flush()
    print(json.dumps(report.to_dict()) if given.json else report, file=out, flush=True)
    forms.show(report, given, out, " ".join([given.script, *given.args]))
    return status


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fxfuse.report",
        usage="%(prog)s [-h] [--json | --diff] [--html FILE] [--measure] SCRIPT [ARGS ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON object instead of a table")
    forms.add_flags(parser, form)
    parser.add_argument("script", metavar="SCRIPT", help="the script to run")
    rest = parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments")
    rest.required = False  # only for the message when SCRIPT is missing: it would name both
    given = parser.parse_args(argv)
    before = argv[: len(argv) - len(given.args)]
    if before[-2:] == [given.script, "--"]:  # argparse takes it for its own, but python hands it to the script
        given.args.insert(0, "--")
    return given


def _claim_stdout(for_us_alone: bool) -> TextIO:
    """Standard output for the report, which the script can neither close nor replace.

    ``for_us_alone`` hands the file descriptor that everyone else calls standard output to standard error: C++ code and
    child processes write there too. It is never taken back, as some of them may outlive the script.
    """
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
    if for_us_alone:
        os.dup2(2, 1)
    return out


def _ended(script: str, error: BaseException | None) -> int:
    if error is None:
        return RAN
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return RAN
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr)  # python does so for sys.exit("message")
            return _say(RAISED, f"{script} exited with a message; what follows was compiled until then")
        return _say(RAISED, f"{script} exited with status {error.code}; what follows was compiled until then")
    _print_traceback(error)
    return _say(RAISED, f"{script} raised {type(error).__name__}; what follows was compiled until then")


def _compile_example(script: str, scope: dict[str, Any]) -> tuple[int, Report]:
    call = example_call(scope)
    if call is None:
        sentence = f"{script} compiled nothing, and does not define a callable `model` and `example_inputs` either"
        return _say(NOTHING_COMPILED, sentence), Report()
    import fxfuse

    model, args, kwargs = call
    try:
        return RAN, fxfuse.explain(model, *args, **kwargs)
    except Exception as error:
        _print_traceback(error)
        sentence = f"`model` of {script} raised {type(error).__name__} when called with its `example_inputs`"
        return _say(RAISED, sentence), journal.report()


def _print_traceback(error: BaseException) -> None:
    frames = error.__traceback__
    error = error.with_traceback(frames.tb_next if frames else None)  # the first frame is ours
    sys.excepthook(type(error), error, error.__traceback__)


def _say(status: int, sentence: str) -> int:
    _flush()
    print(f"fxfuse.report: {sentence}", file=sys.stderr, flush=True)
    return status


def _flush() -> None:
    """Let what the script has printed come before what we print."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # the script may have closed or replaced it
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
