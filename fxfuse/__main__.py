"""Run a program with every torch.compile in it routed to fxfuse.

`python -m fxfuse train.py ...` runs what `python train.py ...` runs, and
`python -m fxfuse -m package.train ...` what `python -m package.train ...` runs:
same arguments, output, tracebacks and exit status. Whichever backend it names
(torch.compile, model.compile(), TrainingArguments(torch_compile=True),
accelerate's dynamo plugins and variables), fxfuse compiles; a backend other than
Inductor compiles what fxfuse has rewritten. It is a module, so that launchers
take it: `torchrun -m fxfuse train.py`, `accelerate launch -m fxfuse train.py`.

A program that compiles nothing runs as it always did, and a sentence at its end
says so. The processes that it starts with multiprocessing are routed too, but
are not in its report; those that it starts with subprocess are not routed. torch
is imported before the program runs. Of several processes of torchrun, that of
rank 0 reports; one that SIGTERM or os._exit ends does not.

exit status: that of the program; 2 for wrong usage or a script that cannot be
read, as python has it.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from .report.records import journal
from .report.run import Program, add_program, module, own_frames_dropped, parse, route, run, script, writable
from .report.telling import say
from .report.text import for_stream

HOW_TO_COMPILE = (
    "compiled nothing in this process (what processes that it started compiled is fused, but not known here). Compile "
    "the model where it is made, with `model = torch.compile(model)`, `model.compile()` or "
    "`TrainingArguments(torch_compile=True)`, and call it"
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. Ends as the program ends: returns, or raises what it raised."""
    given = _parse(sys.argv[1:] if argv is None else list(argv))
    route()
    ended: list[BaseException | None] = []
    try:
        program = _load(given)
        atexit.register(_at_exit, given, program, os.getpid(), ended)  # first, so that it runs after the program's own
        _, raised = run(program, given.args)
        ended.append(raised)
        if raised is not None:
            raise raised
    except BaseException:
        sys.excepthook = _without_own_frames(sys.excepthook)
        raise


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fxfuse",
        usage="%(prog)s [--report] [--report-json FILE] train.py [ARGS ...]\n"
        "       %(prog)s [--report] [--report-json FILE] -m MODULE [ARGS ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="print what became of every head on standard error at exit, also after an exception",
    )
    parser.add_argument("--report-json", metavar="FILE", type=writable, help="write the report there as a JSON object")
    add_program(parser, "SCRIPT")
    return parse(parser, argv)


def _load(given: argparse.Namespace) -> Program:
    try:
        return module(given.program) if given.is_module else script(given.program)
    except OSError as error:
        say(f"fxfuse: cannot read {given.program}: {error.strerror}")
        raise SystemExit(2) from None
    except ImportError as error:
        if error.name != given.program:
            raise
        say(f"fxfuse: {error}")
        raise SystemExit(1) from None


def _at_exit(given: argparse.Namespace, program: Program, process: int, ended: Sequence[BaseException | None]) -> None:
    several = os.environ.get("WORLD_SIZE", "1") != "1"  # else RANK may be left from something else
    if os.getpid() != process or (several and os.environ.get("RANK", "0") != "0"):  # a forked child, or one of them
        return
    report = journal.report()
    if given.report_json is not None:  # first, as nothing may take what is said
        try:
            given.report_json.write_text(json.dumps(report.to_dict()) + "\n", encoding="utf-8")
        except OSError as error:  # the program may have taken the directory away
            say(f"fxfuse: cannot write {given.report_json}: {error.strerror}")
    well = [error for error in ended if error is None or (isinstance(error, SystemExit) and not error.code)]
    if well and not report.graphs:
        say(f"fxfuse: {program.name} {HOW_TO_COMPILE}")
    elif given.report:
        say(for_stream(report, sys.stderr))


def _without_own_frames(hook: Callable[..., Any]) -> Callable[..., Any]:
    def show(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> Any:
        return hook(kind, own_frames_dropped(error), error.__traceback__)

    return show


if __name__ == "__main__":
    main()
