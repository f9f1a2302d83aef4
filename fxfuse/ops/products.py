"""Products on a CPU whose sums BLAS would make term by term, as precise as those that it makes of partial sums."""

from __future__ import annotations

import torch
from torch import Tensor

# MKL's kernels for one, two or three rows, which also take the rest of some more, add a sum's terms one after the
# other, where those for more rows add a few partial sums: a gradient of one row from 32000 classes in float32 erred ten
# times as much as one of four. Fewer rows than a program has are multiplied where most of its labels are ignored, say.
FEW_ROWS = 12
# So many terms make a partial sum. For so many columns a batched product makes partial sums of so many elements, which
# a cache has room for. It took 0.3 to 1.2 times as long as the product itself, of 1, 2, 4 and 12 rows at 64 to 4096
# hidden units and 32000 or 50257 classes (a throwaway script).
TERMS, COLUMNS, ELEMENTS = 256, 1024, 1 << 18


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``torch.mm``: ``a [N, K] @ b [K, M]``; of a few rows on a CPU each sum is made of partial ones."""
    if not _is_of_few_rows(a):
        return torch.mm(a, b, out=out)
    total = a.new_zeros((a.shape[0], b.shape[1])) if out is None else out.zero_()
    return _add_parts(total, a, b)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, as ``product`` makes it."""
    if not _is_of_few_rows(a):
        total.addmm_(a, b)
    else:
        _add_parts(total, a, b)


def weighted_sum(z: Tensor, class_weight: Tensor) -> Tensor:
    """``z [N, V] @ class_weight [V]``, each sum made of partial ones."""
    total = z.new_zeros(z.shape[:1])
    for at in _slices(z.shape[1], COLUMNS):
        total += (z[:, at] * class_weight[at]).sum(1)
    return total


def _is_of_few_rows(a: Tensor) -> bool:
    """Whether BLAS adds what these rows multiply term by term, and more than make a partial sum."""
    rows, length = a.shape
    # Partial sums of 16 bits would be rounded to them.
    return rows <= FEW_ROWS and length > TERMS and a.is_cpu and a.dtype in (torch.float32, torch.float64)


def _add_parts(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    length, columns = b.shape
    whole = length // TERMS * TERMS
    group = max(1, ELEMENTS // max(1, a.shape[0] * min(columns, COLUMNS))) * TERMS
    for there in _slices(columns, COLUMNS):
        for at in _slices(whole, group):
            parts = a[:, at].unflatten(1, (-1, TERMS)).transpose(0, 1), b[at, there].unflatten(0, (-1, TERMS))
            total[:, there] += torch.bmm(*parts).sum(0)
        if whole < length:
            total[:, there] += a[:, whole:] @ b[whole:, there]
    return total


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]
