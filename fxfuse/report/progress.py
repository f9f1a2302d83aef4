"""A line on a terminal that says for how long something has been going on."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from .telling import is_terminal, say

_PATIENCE = 1.0  # seconds before the line is shown, and between two of its states


class Progress:
    """Between ``start`` and ``end``, or inside of ``with``: a line on standard error if that is a terminal.

    Not longer, as what a program prints would be mixed up with it.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if is_terminal(sys.stderr) and self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._count, daemon=True)
            self._thread.start()

    def end(self) -> None:
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None

    def __enter__(self) -> None:
        self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.end()

    def _count(self) -> None:
        began, shown = time.monotonic(), False
        while not self._ended.wait(_PATIENCE):
            say(f"\rfxfuse.report: capturing, {time.monotonic() - began:.0f} s\x1b[K", end="")
            shown = True
        if shown:
            say("\r\x1b[K", end="")
