"""The forms of a report beside its table and its JSON: flags of the command line, and what they show."""

from __future__ import annotations

import argparse
import os
from typing import Any, TextIO

from .records import Report, journal
from .run import writable
from .telling import is_terminal


def add_flags(parser: argparse.ArgumentParser, instead_of_json: Any) -> None:
    """Add ``--diff`` to a group that has ``--json``, ``--html`` and ``--measure`` to the parser."""
    instead_of_json.add_argument("--diff", action="store_true", help="print the graphs before and after too, as a diff")
    drawn = "also write a page to FILE, with every head drawn"
    parser.add_argument("--html", metavar="FILE", type=writable, help=drawn)
    costs = "also measure time and memory of every head that is fused or deferred"
    parser.add_argument("--measure", action="store_true", help=costs)


def watch(given: argparse.Namespace) -> None:
    """Have the journal remember what the flags show; to be called before anything is compiled."""
    if given.html is not None or given.diff:
        from .picture import Sketch

        journal.watchers.append(Sketch)
    if given.measure:
        from .cut import Cutter

        journal.watchers.append(Cutter)


def measured(report: Report, given: argparse.Namespace, inner: str | None) -> Report:
    """``report`` with what was measured, if that was asked for; ``inner`` as in ``measure.measure``."""
    if not given.measure:
        return report
    from .measure import measure

    return measure(report, journal.watched, inner)


def write(report: Report, given: argparse.Namespace, title: str) -> None:
    """Write the page, with this title, if one was asked for.

    Raises:
        OSError: it cannot be written any more.
    """
    if given.html is not None:
        from .html import page

        given.html.write_text(page(report, journal.watched, title), encoding="utf-8", errors="replace")


def show(report: Report, given: argparse.Namespace, out: TextIO) -> None:
    """Print to ``out`` what follows the table."""
    if given.measure and not given.json:
        from .measure import measurements

        print("\n" + measurements(report), file=out, flush=True)
    if given.diff:
        from .diff import diff

        colour = is_terminal(out) and "NO_COLOR" not in os.environ
        print("\n" + diff(report, journal.watched, colour), file=out, flush=True)
