"""The gradients of a head on a GPU, from the gradient of its logits window by window; products by cuBLAS."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import tiles
from .contract import gradient_dtypes

# The buffer for the gradient of the logits: one part of so many within these bounds, of whole tiles. Less costs
# speed in short products, more costs memory that the fused ops are there to save.
WINDOW_SHARE = 8
LEAST_WINDOW_BYTES, MOST_WINDOW_BYTES = 64 << 20, 512 << 20
LEAST_WINDOW = 256
# Rows of a chunk are a multiple of this where they fit: whole tiles of a product.
CHUNK_ROWS = 128


def windows_of(rows: int, vocab: int, itemsize: int, memory: int) -> tuple[list[slice], list[slice]]:
    """Cut [rows, vocab] along one axis into equal windows of a bounded size: (slices of rows, of classes).

    Windows over the vocabulary finish their part of the weight's gradient and add to the input's, in float32; windows
    over rows do the reverse. The longer axis is cut, so that the smaller gradient is the one accumulated.
    """
    long, short = max(rows, vocab), min(rows, vocab)
    most = max(1, window_bytes(rows * vocab * itemsize, memory) // (short * itemsize * LEAST_WINDOW)) * LEAST_WINDOW
    count = -(-long // most)
    # Equal windows, but for whole tiles: a short last one would waste a product.
    step = -(-long // (count * LEAST_WINDOW)) * LEAST_WINDOW
    cut = [slice(start, min(start + step, long)) for start in range(0, long, step)]
    return (cut, [slice(0, vocab)]) if rows > vocab else ([slice(0, rows)], cut)


def of_products(memory: int) -> int:
    """``memory`` for products in float32 that are made once for statistics and once more for gradients.

    It is not less than some hundred tiles take. With fewer, where cuBLAS seems to cut the sums over the hidden units,
    logits are rounded differently, and by that the gradients err: up to 3.6 times as much as eager's
    (``docs/kernels-log.md``).
    """
    return memory and max(memory, LEAST_WINDOW_BYTES)


def window_bytes(whole: int, memory: int) -> int:
    """What a window may take of so many bytes, given ``memory`` or 0."""
    window = min(max(whole // WINDOW_SHARE, LEAST_WINDOW_BYTES), MOST_WINDOW_BYTES)
    return min(window, memory or window)


def chunks_of(rows: int, row_bytes: int, most: int) -> list[slice]:
    """Equal chunks of rows, of which there is one at least, in at most so many bytes, or of one row.

    They are of whole tiles where they are larger than one, so perhaps larger by as much.
    """
    step = max(1, most // row_bytes)
    step = tiles.cdiv(rows, tiles.cdiv(rows, step))
    if step > CHUNK_ROWS:
        step = tiles.cdiv(step, CHUNK_ROWS) * CHUNK_ROWS
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def split_rest(classes: list[slice]) -> list[slice]:
    """The windows of classes, the last one in two where it is not a multiple of 16 elements.

    For such a number cuBLAS does without the fast kernels on tensor cores, even if all rows begin on whole vectors.
    """
    *most, last = classes
    whole = last.start + (last.stop - last.start) // 16 * 16
    cut = [slice(last.start, whole), slice(whole, last.stop)]
    return [*most, *(at for at in cut if at.start < at.stop)]


class Gradients:
    """Sums over windows of products with the gradient of the logits, in float32.

    ``rows [N, D]`` is what the weight's gradient is made of: the hidden states, perhaps with zeros in some rows.
    ``cut`` has the windows, as ``windows_of`` makes them; ``undo`` is a one-element factor of the results, which are in
    ``dtypes`` (those of the operands, if none are given).
    """

    def __init__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor,
        needs: tuple[bool, ...],
        cut: tuple[list[slice], list[slice]],
        undo: Tensor | None,
        dtypes: tuple[torch.dtype, ...] | None = None,
    ) -> None:
        self.weight, self.rows, self.undo, self.needs = weight, rows, undo, needs
        self.dtypes = dtypes or gradient_dtypes(input, weight, bias)
        at_rows, at_classes = cut
        self.d_input = self.d_weight = None
        if needs[0]:
            self.d_input = _ProductSum(input.shape, input, self.dtypes[0], len(at_classes), undo)
        if needs[1]:
            self.d_weight = _ProductSum(weight.shape, weight, self.dtypes[1], len(at_rows), undo)
        self.d_bias = weight.new_zeros((weight.shape[0] if needs[2] else 0,), dtype=torch.float32)

    def add(self, at_rows: slice, at_classes: slice, dz: Tensor) -> None:
        """Add what the window ``dz`` of the gradient gives, in the operands' dtype."""
        if self.d_input is not None:
            self.d_input.add(at_rows, dz, self.weight[at_classes])
        if self.d_weight is not None:
            self.d_weight.add(at_classes, dz.t(), self.rows[at_rows])
        if self.needs[2]:
            self.d_bias[at_classes] += dz.sum(0, dtype=torch.float32)

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of input, weight and bias in their dtypes; empty where not needed."""
        if self.undo is not None:
            self.d_bias *= self.undo
        d_input, d_weight = (
            self.weight.new_empty((0,), dtype=dtype) if total is None else total.result()
            for total, dtype in zip((self.d_input, self.d_weight), self.dtypes, strict=False)
        )
        return d_input, d_weight, self.d_bias.to(self.dtypes[2])


class _ProductSum:
    """A gradient ``[M, D]`` whose row slices are each a sum of ``terms`` products, accumulated in float32.

    ``undo`` is a one-element float32 factor of the result. A single product goes straight into ``dtype``.
    """

    def __init__(
        self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype, terms: int, undo: Tensor | None
    ) -> None:
        self.dtype, self.undo = dtype, undo
        direct = terms == 1 and undo is None
        self.total = like.new_empty(shape, dtype=dtype if direct else torch.float32)
        self.begun: set[int] = set()

    def add(self, at: slice, a: Tensor, b: Tensor) -> None:
        """Add ``a @ b`` to the rows ``at``."""
        if at.start in self.begun:
            _add_product(a, b, self.total[at])
        else:
            multiply(a, b, self.total[at])
            self.begun.add(at.start)

    def result(self) -> Tensor:
        if self.undo is not None:
            self.total *= self.undo
        return self.total.to(self.dtype)


# The overloads with a dtype are named: they alone leave products of 16 bits unrounded, in a float32 result or sum.


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``out = a @ b``; ``out`` has the operands' dtype, or is float32 and gets the unrounded product."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.ops.aten.mm.dtype_out(a, b, torch.float32, out=out)
    else:  # the interpreter's tensors: ATen has no such product on a CPU
        torch.mm(a.float(), b.float(), out=out)


def _add_product(a: Tensor, b: Tensor, total: Tensor) -> None:
    """``total += a @ b`` in float32."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())
