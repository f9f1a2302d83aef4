"""What is only said must not change what is done."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from .. import errors


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Whatever fails in this block was for the report alone: it warns, and the program goes on behind it."""
    try:
        yield
    except Exception as failure:
        warnings.warn(errors.not_told(failure), stacklevel=3)
