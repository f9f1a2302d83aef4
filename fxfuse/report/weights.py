"""Which parameter is the weight of a head: modules of one class may share compiled code."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch

from ..compat import given_value
from .source import given

# By identity. Nothing refers to a parameter, not even weakly: PyTorch would not swap it for another
# (``torch.utils.swap_tensors``, as ``Module.to`` may do). One that takes the place of another that is gone may have its
# number, which only tells lines of a report apart.
_numbers: dict[int, int] = {}
_next = itertools.count()
_lock = threading.RLock()  # a finaliser that reads logits may run anywhere


def number_of(weight: Any) -> int | None:
    """The number of a parameter, which count from 0 in the order in which they are seen; None for anything else."""
    if not isinstance(weight, torch.nn.Parameter):
        return None
    number = _numbers.get(id(weight))
    if number is None:
        with _lock:
            number = _numbers.setdefault(id(weight), next(_next))
    return number


def captured_with(weight: Any) -> tuple[int, ...]:
    """The number of the parameter that a node ``weight`` was captured with; nothing if it is made of none."""
    number = number_of(given_value(given(weight)))
    return () if number is None else (number,)
