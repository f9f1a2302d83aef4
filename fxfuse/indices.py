"""Indices as programs write them in brackets, taken apart: masks, and one class of some rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_mask(entry: Any) -> bool:
    """Whether it is a tensor of booleans. (One without axes selects all or nothing, which a mask does not.)"""
    return type(entry) is Tensor and entry.dtype == torch.bool and entry.dim() > 0


def has_fitting_mask(shape: Sequence[int], index: Any) -> bool:
    """Whether there is a mask in an index, and each has the shape of the axes that it is for: eager raises if not."""
    entries = _entries_of(index)
    widths = [_axes_of(entry) for entry in entries]
    axis, found = 0, False
    for entry, width in zip(entries, widths, strict=True):
        if is_mask(entry):
            found = True
            if tuple(shape[axis : axis + width]) != tuple(entry.shape):
                return False
        axis += len(shape) - sum(widths) if entry is ... else width
    return found


def without_masks(index: Any) -> tuple[Any, ...]:
    """An index with the positions of what masks select in their place: how many these are decides the shape."""
    positions: list[Any] = []
    for entry in _entries_of(index):
        positions += entry.nonzero(as_tuple=True) if is_mask(entry) else [entry]
    return tuple(positions)


def rows_and_class(dims: int, vocab: int, index: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """An index of some rows, and one of a class of these, which are ``index`` together; None if it is no such.

    Args:
        dims: how many axes the tensor has, of which the last has ``vocab`` classes.
    """
    entries = _entries_of(index)
    known = all(entry is ... or isinstance(entry, slice) or _is_position(entry) for entry in entries)
    taken = sum(entry is not ... for entry in entries)
    if not known or taken != dims or not _is_position(entries[-1]) or all(map(_is_all, entries[:-1])):
        return None
    *rows, of_class = (int(entry) if isinstance(entry, Tensor) else entry for entry in entries)  # as eager does it
    if not -vocab <= of_class < vocab:  # eager says of which dimension
        return None
    return (*rows, slice(None)), (..., of_class)


def _entries_of(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _axes_of(entry: Any) -> int:
    """How many axes an entry of an index is for; 0 for an ellipsis, which is for the rest."""
    if is_mask(entry):
        return int(entry.dim())
    return 0 if entry is None or entry is ... or isinstance(entry, bool) else 1


def _is_all(entry: Any) -> bool:
    return entry is ... or (isinstance(entry, slice) and entry == slice(None))


def _is_position(entry: Any) -> bool:
    return type(entry) is int or (type(entry) is Tensor and entry.dtype == torch.int64 and entry.dim() == 0)
