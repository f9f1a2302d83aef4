"""What is only said must not change what is done."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import TextIO

from .. import errors


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Whatever fails in this block was for the report alone: it warns, and the program goes on behind it."""
    try:
        yield
    except Exception as failure:
        warnings.warn(errors.not_told(failure), stacklevel=3)


def say(text: str, end: str = "\n") -> None:
    """Print on standard error as the program has left it, or else as it was; nowhere if both are gone."""
    for stream in (sys.stderr, sys.__stderr__):
        if stream is None:  # print would take standard output
            continue
        with contextlib.suppress(Exception):  # closed, full, or a class of the program's own
            print(text, end=end, file=stream)
            return


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream says that it is a terminal."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, OSError, ValueError):  # a class of the program's own; or closed
        return False
