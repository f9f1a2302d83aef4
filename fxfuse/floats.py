"""Numbers of a program that its graph has as inputs: floats under ``dynamic=True``, and those that have changed.

Where a rule needs to know one, it is taken to be what it is now. That is a guard: if it is another one later, the
program is compiled again. What has been another before is left as it is, or each would be compiled for.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from . import compat
from .mutation import example_of

# By the code that was captured, what numbers were when they were taken, under the graph's names for them.
_taken: weakref.WeakKeyDictionary[types.CodeType, dict[str, float | None]] = weakref.WeakKeyDictionary()


def as_they_are(arguments: Any) -> tuple[Any, list[torch.SymFloat]]:
    """``arguments`` with what such numbers are now, and which these were."""
    found: list[torch.SymFloat] = []

    def now(node: Node) -> Any:
        number = example_of(node)
        value = compat.value_now(number) if isinstance(number, torch.SymFloat) else None
        if value is None:
            return node
        found.append(number)
        return value

    return map_arg(arguments, now), found


def stay(numbers: Sequence[torch.SymFloat]) -> bool:
    """Guard that numbers stay what they are, unless one is known to change."""
    free = [number for number in numbers if not compat.is_guarded(number)]
    frame = compat.captured_frame()
    if free and (frame is None or compat.numbers_have_changed()):
        return False
    taken = _taken.setdefault(frame[0], {}) if frame is not None else {}
    values = [compat.value_now(number) for number in free]
    if any(taken.setdefault(str(number), now) != now for number, now in zip(free, values, strict=True)):
        return False
    for number in free:
        compat.guard(number)
    return True
