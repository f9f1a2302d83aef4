"""Which parameter is the weight of a head: modules of one class may share compiled code."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..compat import given_value
from .source import given

_numbers: Any = WeakIdKeyDictionary()
_next = itertools.count()
_lock = threading.Lock()
# Of one parameter, as most programs have: every call asks for it, and the dictionary takes longer.
_last: tuple[Any, int | None] = (lambda: None, None)


def number_of(weight: Any) -> int | None:
    """The number of a parameter, which count from 0 in the order in which they are seen; None for anything else."""
    global _last
    if not isinstance(weight, torch.nn.Parameter):
        return None
    last, number = _last
    if last() is weight:
        return number
    number = _numbers.get(weight)
    if number is None:
        with _lock:
            number = _numbers.setdefault(weight, next(_next))
    _last = weakref.ref(weight), number
    return number


def captured_with(weight: Any) -> tuple[int, ...]:
    """The number of the parameter that a node ``weight`` was captured with; nothing if it is made of none."""
    number = number_of(given_value(given(weight)))
    return () if number is None else (number,)
