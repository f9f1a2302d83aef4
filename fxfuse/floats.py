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
    """``arguments`` with what such numbers are now, and those of them that may be others later."""
    free: list[torch.SymFloat] = []

    def now(node: Node) -> Any:
        number = example_of(node)
        value = compat.value_now(number) if isinstance(number, torch.SymFloat) else None
        if value is None:
            return node
        free.extend([] if compat.is_guarded(number) else [number])
        return value

    return map_arg(arguments, now), free


def stay(numbers: Sequence[torch.SymFloat]) -> bool:
    """Guard that numbers stay what they are, unless one is known to change."""
    frame = compat.captured_frame()
    if frame is None or compat.numbers_have_changed():
        return False
    taken = _taken.setdefault(frame[0], {})
    values = [compat.value_now(number) for number in numbers]
    if any(taken.setdefault(str(number), now) != now for number, now in zip(numbers, values, strict=True)):
        return False
    for number in numbers:
        compat.guard(number)
    return True
