"""Products on a CPU whose sums BLAS would make term by term, as precise as those that it makes of partial sums."""

from __future__ import annotations

import torch
from torch import Tensor

# MKL's kernels for one, two or three rows, which also take the rest of some more, add a sum's terms one after the
# other, where those for more rows add a few partial sums: a gradient of one row from 32000 classes in float32 erred ten
# times as much as one of four. Fewer rows than a program has are multiplied where most of its labels are ignored, say.
FEW_ROWS = 12
# So many terms each make a partial sum. Of classes, with which errors are those of many rows from 2003 to 128256
# classes, for up to a tenth of the time; of hidden units more, as parts of the weight's rows are read more slowly.
CLASSES_OF_SUM, HIDDEN_OF_SUM = 256, 1024
# A product with a vector, by BLAS as well term by term, is made of so many classes at a time in a buffer.
CLASSES_OF_BUFFER = 1024


def product(a: Tensor, b: Tensor, terms: int) -> Tensor:
    """``a [N, K] @ b [K, M]``; of a few rows on a CPU each sum is made of partial ones of so many ``terms``."""
    first, *others = _parts(a, terms)
    return sum((a[:, part] @ b[part] for part in others), a[:, first] @ b[first])


def multiply(a: Tensor, b: Tensor, out: Tensor, terms: int) -> None:
    """``out = a @ b``, as ``product`` makes it."""
    first, *others = _parts(a, terms)
    torch.mm(a[:, first], b[first], out=out)
    for part in others:
        out += a[:, part] @ b[part]


def add_product(total: Tensor, a: Tensor, b: Tensor, terms: int) -> None:
    """``total += a @ b``, as ``product`` makes it."""
    parts = _parts(a, terms)
    if len(parts) == 1:
        total.addmm_(a, b)
        return
    for part in parts:
        total += a[:, part] @ b[part]


def weighted_sum(z: Tensor, class_weight: Tensor) -> Tensor:
    """``z [N, V] @ class_weight [V]``, each sum made of partial ones."""
    first, *others = ((z[:, part] * class_weight[part]).sum(1) for part in _slices(z.shape[1], CLASSES_OF_BUFFER))
    return sum(others, first)


def _parts(a: Tensor, terms: int) -> list[slice]:
    rows, length = a.shape
    # Partial sums of 16 bits would be rounded to them.
    cut = rows <= FEW_ROWS and a.is_cpu and a.dtype in (torch.float32, torch.float64)
    return _slices(length, terms if cut else length)


def _slices(length: int, step: int) -> list[slice]:
    """One at least."""
    return [slice(start, start + step) for start in range(0, max(length, 1), max(step, 1))]
