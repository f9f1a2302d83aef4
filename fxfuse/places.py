"""Where the values of tensors that share a memory are in it, told from tensors without data."""

from __future__ import annotations

import torch
from torch import Tensor

from . import compat

MOST_RUNS = 1 << 18  # that are compared one by one


def write(values: Tensor, place: Tensor) -> None:
    """Copy ``values`` to ``place``, which may be expanded."""
    for axis, (size, stride) in enumerate(zip(place.shape, place.stride(), strict=True)):
        if stride == 0 and size > 1:
            values, place = values.narrow(axis, 0, 1), place.narrow(axis, 0, 1)
    place.copy_(values)


def have_one_memory(a: Tensor, b: Tensor) -> bool:
    return compat.storage(a) == compat.storage(b)


def in_common(a: Tensor, b: Tensor) -> tuple[Tensor, ...] | None:
    """Which runs of neighbours two parts of one memory have in common: their numbers in either, or () for none.

    None if they have parts of runs in common, or that cannot be told. The tensors have no data.
    """
    if not have_one_memory(a, b):
        return None
    if not a.numel() or not b.numel() or _end(a) <= b.storage_offset() or _end(b) <= a.storage_offset():
        return ()
    length, width = (1 if (axis := along(t)) is None else t.shape[axis] for t in (a, b))
    if max(a.numel() // length, b.numel() // width) > MOST_RUNS:
        return None
    mine, (its, order) = _begins(a), _begins(b).sort()
    first, after = torch.searchsorted(its, mine), torch.searchsorted(its, mine, right=True)
    meet = torch.searchsorted(its, mine + length) - torch.searchsorted(its, mine - width, right=True)
    same = after - first if length == width else torch.zeros_like(meet)
    if bool((meet > same).any()):
        return None
    numbers = same.nonzero()[:, 0]
    return (numbers, order[first[numbers]]) if len(numbers) else ()


def _end(of: Tensor) -> int:
    last = (int(size - 1) * stride for size, stride in zip(of.shape, of.stride(), strict=True))
    return int(of.storage_offset()) + 1 + sum(last)


def along(of: Tensor) -> int | None:
    """The axis along which elements are neighbours in memory."""
    return next((axis for axis in range(of.dim()) if of.stride()[axis] == 1 and of.shape[axis] > 1), None)


def _begins(of: Tensor) -> Tensor:
    """Where the runs of neighbours that a tensor consists of begin in its memory, in elements."""
    run, begins = along(of), torch.tensor([of.storage_offset()], device="cpu")
    for axis, (size, stride) in enumerate(zip(of.shape, of.stride(), strict=True)):
        if axis != run:
            begins = (begins[:, None] + stride * torch.arange(size, device="cpu")).flatten()
    return begins


def take_runs(values: Tensor, like: Tensor, numbers: Tensor) -> Tensor:
    """A copy ``[n, …]`` of the runs of so many ``numbers`` in the values of what ``like`` stands for."""
    rows, at = _runs(values, like, numbers)
    return rows[at]


def put_runs(values: Tensor, like: Tensor, numbers: Tensor, runs: Tensor) -> None:
    """The reverse."""
    rows, at = _runs(values, like, numbers)
    rows[at] = runs


def _runs(values: Tensor, like: Tensor, numbers: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    run = along(like)
    rows = (values.unsqueeze(-1) if run is None else values.movedim(run, -1)).unsqueeze(0)
    return rows, torch.unravel_index(numbers, rows.shape[:-1])


def laid_out(values: Tensor, like: Tensor) -> Tensor:
    """``values`` with their axes in memory in the order of those of ``like``, and no gaps.

    An expanded axis has no place in that order and keeps its own, as in what PyTorch makes of such tensors.
    """
    strides = like.stride()
    others = iter(sorted((axis for axis in range(like.dim()) if strides[axis]), key=lambda axis: -strides[axis]))
    order = [next(others) if stride else axis for axis, stride in enumerate(strides)]
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return values.permute(order).contiguous().permute(inverse)


def placed(values: Tensor, like: Tensor) -> Tensor:
    """``values``, so laid out, where those of ``like`` are: with gaps where eager took a part of more."""
    where = like.size(), like.stride(), like.storage_offset()
    steps = [(size, mine, its) for size, mine, its in zip(*where[:2], values.stride(), strict=True) if size > 1]
    if values.numel() == 0 or any(mine == 0 for _, mine, _ in steps):
        return values
    if all(mine == its for _, mine, its in steps) and where[2] == values.storage_offset():
        return values.as_strided(*where)  # of an axis with one element, the stride
    extent = 1 + sum((size - 1) * mine for size, mine, _ in steps)
    return values.new_empty(where[2] + extent).as_strided(*where).copy_(values)
