"""What a head takes in eager, and what fusing it takes in the place of that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import compat
from .algebra import ClassTensor
from .candidate import Candidate
from .mutation import example_of, tensors
from .passes import KEPT, multiplied
from .readers import Reader
from .reasons import Reason, because
from .report.source import location

# How many times the rows of a projection its passes may multiply by the weight, where eager does so once in the forward
# and in the backward: more time than that is not worth the memory of the logits.
MOST_REPEATED = 4


def too_dear(candidate: Candidate, passes: Sequence[Sequence[Reader]]) -> Reason | None:
    """Why a head takes less time or memory as it is than by these passes, if so; None where sizes are not known."""
    sources = [source for readers in passes for source in multiplied(readers)]
    if not all(map(has_known_size, (*map(example_of, candidate.projections), *sources))):
        return None
    where = location(candidate.node)
    rows, vocab = candidate.rows, candidate.head.vocab
    entries = sum(map(elements_of, sources))
    if entries > MOST_REPEATED * rows * vocab:
        return because("repeated", f"{entries // vocab:,} rows, where the program has {rows:,}", where)
    saved = total(*eager_bytes(candidate, set())) or 0
    if candidate.copied > saved:
        return because("weight_copied", f"{candidate.copied:,} bytes for {saved:,} of logits", where)
    return None


def copied(passes: Sequence[Sequence[Reader]]) -> int:
    """Bytes of copies of the weight that passes for one head make, and of its gradients but the first.

    Eager makes one gradient of a projection. Inductor makes those of all passes before it adds them up.
    """
    sources = [multiplied(readers) for readers in passes]
    copies = {
        (id(source.head), tuple(op.key() for op in source.class_ops)): _size_of_copy(source)
        for some in sources
        for source in some
    }
    trained = [some[0] for some in sources if some and makes_gradient(some[0])]
    return sum(copies.values()) + sum(_size_of_weight(source, source.vocab) for source in trained[1:])


def makes_gradient(source: ClassTensor) -> bool:
    """Whether a gradient of these logits makes one of their weight."""
    return source.requires_grad and bool(example_of(source.head.weight).requires_grad)


def _size_of_copy(source: ClassTensor) -> int:
    """Bytes of the largest copy of a weight that its class operations make."""
    vocab, most = source.head.vocab, 0
    for op in source.class_ops:
        vocab = vocab if op.count is None else op.count
        most = max(most, _size_of_weight(source, vocab) if op.copies_weight else 0)
    return most


def _size_of_weight(source: ClassTensor, vocab: Any) -> int:
    """Bytes of so many rows of the weight of some logits, or of its gradient."""
    return compat.hint(vocab) * source.hidden * source.head.dtype.itemsize


def eager_bytes(candidate: Candidate, variants: set[str]) -> tuple[int | None, int | None, int | None]:
    """Bytes of logits, of each conversion of them to another dtype, and of their gradient; None where a size depends
    on values.

    Exponentials that are kept stand in the gradient's place.
    """
    if not all(has_known_size(example_of(node)) for node in candidate.projections):
        return None, None, None
    elements = candidate.rows * compat.hint(candidate.head.vocab)
    dtype = candidate.head.dtype
    if candidate.kept is None:
        sources = [reader.source for _, reader in candidate.readers]
        dtypes = {source.dtype for source in sources}
        differentiated = variants != {KEPT} and any(source.requires_grad for source in sources)
    else:
        outs = [out for node in candidate.flow for out in tensors(example_of(node))]
        whole = [out for out in outs if out.is_floating_point() and elements_of(out) == elements]
        dtypes, differentiated = {out.dtype for out in whole}, example_of(candidate.node).requires_grad
    converted = sum(other.itemsize for other in dtypes - {dtype})
    return elements * dtype.itemsize, elements * converted, elements * dtype.itemsize * differentiated


def total(*sizes: int | None) -> int | None:
    """Their sum; None where one is not known."""
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def has_known_size(out: Tensor | ClassTensor) -> bool:
    """Whether all sizes of ``out`` have hints."""
    return all(map(compat.is_known, out.shape))


def elements_of(out: Tensor | ClassTensor) -> int:
    """How many numbers it has, by the hints of its sizes."""
    return math.prod(map(compat.hint, out.shape))
