"""The general way on a GPU, for what ``hopper`` does not take: all of it on Ampere, and float32 anywhere.

Triton makes the statistics and the gradient of the logits, cuBLAS the products with it; in float32 cuBLAS makes the
product of the logits as well, see ``kernels.logits``.

Statistics take one sweep over the vocabulary and store no logits, or in float32 a chunk of rows of them. Gradients go
window by window: the gradient of the logits of a window of rows and classes is made in a buffer, multiplied with the
weight and with the hidden states, and overwritten by the next. Of a loss in float32 they are made chunk by chunk, where
the chunk's product was.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..kernels import tiles
from ..transform import decode, steepest
from .contract import RowStats, normalisation
from .gpu import GpuOperands, GpuUpstream, contiguous, current
from .windows import Gradients, chunks_of, multiply, of_products, split_rest, windows_of

# Of a chunk of stored products. With fewer rows a product is slow, or adding it to the sums for the weight shows, on
# tensor cores.
ROWS_OF_STATS, ROWS_OF_GRADIENTS = 512, 2048
LEAST_PRODUCT_BYTES, MOST_PRODUCT_BYTES = 64 << 20, 1 << 30

_EVERYTHING = slice(None)


def _cat(parts: list[RowStats]) -> RowStats:
    """Of all rows, from those of their chunks."""
    return RowStats(*map(torch.cat, zip(*parts, strict=True)))


def stores_products(head: GpuOperands) -> bool:
    """Whether the product of the logits is stored, and not made by the kernels that need logits."""
    return head.input.dtype == torch.float32 and head.input.shape[0] > 0


def stats(
    head: GpuOperands,
    want_class_sum: bool,
    want_log_prob_sum: bool,
    wanted: Tensor | None,
    want_expectation: bool = False,
    want_entropy: bool = False,
    want_top: bool = False,
    memory: int = 0,
) -> RowStats:
    """The row statistics of the contract; zeros in rows outside the mask ``wanted [N]``."""
    wants = want_class_sum, want_log_prob_sum, wanted, want_expectation, want_entropy, want_top
    with current(head.input.device):
        if not stores_products(head):
            return _row_stats(head, _EVERYTHING, *wants)
        chunks = _chunks(head, ROWS_OF_STATS, memory)
        return _cat([_row_stats(head, here, *wants, product) for here, product in _products(head, chunks)])


def stats_and_gradients(
    head: GpuOperands,
    up: GpuUpstream,
    want_log_prob_sum: bool,
    needs: tuple[bool, bool, bool],
    dtypes: tuple[torch.dtype, ...],
) -> tuple[RowStats, tuple[Tensor, Tensor, Tensor]]:
    """``stats`` of the rows with upstream gradients, and ``gradients``, of one product that is stored."""
    up, wanted = up.contiguous(), up.nonzero()
    chunks = _chunks(head, ROWS_OF_GRADIENTS if any(needs) else ROWS_OF_STATS)
    whole, parts = slice(0, head.weight.shape[0]), []
    at_classes = _split_rest(head, [whole])
    with current(head.input.device):
        grads = _gradients(head, up, needs, (chunks, at_classes), None, dtypes)
        for here, product in _products(head, chunks):
            parts.append(part := _row_stats(head, here, False, want_log_prob_sum, wanted, product=product))
            if any(needs):
                _write_dlogits(head, product, here, whole, part.lse, part.residual, up, product=product)
                for at in at_classes:
                    grads.add(here, at, product[:, at])
        return _cat(parts), grads.result()


def gradients(
    head: GpuOperands,
    lse: Tensor,
    residual: Tensor,
    up: GpuUpstream,
    needs: tuple[bool, bool, bool],
    dtypes: tuple[torch.dtype, ...],
    memory: int = 0,
    entropy: Tensor | None = None,
    expectation: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias in ``dtypes``; an empty tensor for one that is not needed.

    ``entropy [N]`` is the statistic, where ``up`` has a gradient for it, and so is ``expectation [N]``, if known.
    The window of the gradient of the logits takes at most ``memory`` bytes, if that is not 0.
    """
    (rows, hidden), vocab = head.input.shape, head.weight.shape[0]
    if rows == 0 or not any(needs):
        return tuple(  # type: ignore[return-value]
            head.input.new_zeros(shape if need else (0,), dtype=dtype)
            for shape, need, dtype in zip(((rows, hidden), (vocab, hidden), (vocab,)), needs, dtypes, strict=True)
        )
    lse, residual, up = lse.contiguous(), residual.contiguous(), up.contiguous()
    entropy, expectation = contiguous(entropy), contiguous(expectation)
    factor = undo = None
    if head.input.dtype == torch.float16:
        steep = abs(head.scale) * steepest(decode(head.transform))
        factor, undo = normalisation(up, head.class_weight, steep, entropy)
    if stores_products(head):
        memory = of_products(memory)
    at_rows, at_classes = windows_of(rows, vocab, head.input.dtype.itemsize, memory)
    at_classes = _split_rest(head, at_classes)
    buffer = _buffer(head, at_rows[0].stop, at_classes[0].stop)
    with current(head.input.device):
        grads = _gradients(head, up, needs, (at_rows, at_classes), undo, dtypes)
        for here in at_rows:
            for at in at_classes:
                dz = buffer[: here.stop - here.start, : at.stop - at.start]
                if stores_products(head):
                    multiply(head.input[here], head.weight[at].t(), dz)
                _write_dlogits(
                    head, dz, here, at, lse[here], residual[here], up,
                    None if entropy is None else entropy[here],
                    None if expectation is None else expectation[here],
                    factor, dz if stores_products(head) else None,
                )  # fmt: skip
                grads.add(here, at, dz)
    # Before the sums are converted, which needs about as much memory again.
    del buffer, dz
    return grads.result()


def _row_stats(
    head: GpuOperands,
    here: slice,
    want_class_sum: bool,
    want_log_prob_sum: bool,
    wanted: Tensor | None,
    want_expectation: bool = False,
    want_entropy: bool = False,
    want_top: bool = False,
    product: Tensor | None = None,
) -> RowStats:
    from ..kernels.stats import row_stats

    return RowStats(*row_stats(
        head.input[here], head.weight, head.bias, head.index[here], head.class_weight, head.scale, head.transform,
        want_class_sum, want_log_prob_sum, None if wanted is None else wanted[here], want_expectation, want_entropy,
        want_top, product,
    ))  # fmt: skip


def _write_dlogits(
    head: GpuOperands,
    dz: Tensor,
    here: slice,
    at: slice,
    lse: Tensor,
    residual: Tensor,
    up: GpuUpstream,
    entropy: Tensor | None = None,
    expectation: Tensor | None = None,
    factor: Tensor | None = None,
    product: Tensor | None = None,
) -> None:
    """Of a window of rows and classes; ``lse`` to ``expectation`` are those of the rows."""
    from ..kernels.dlogits import write_dlogits

    bias, c = (None if t is None else t[at] for t in (head.bias, head.class_weight))
    write_dlogits(
        dz, head.input[here], head.weight[at], bias, head.index[here], at.start, c, head.scale, head.transform, lse,
        residual, *up.at(here), entropy, expectation, factor, product,
    )  # fmt: skip


def _gradients(
    head: GpuOperands,
    up: GpuUpstream,
    needs: tuple[bool, bool, bool],
    cut: tuple[list[slice], list[slice]],
    undo: Tensor | None,
    dtypes: tuple[torch.dtype, ...],
) -> Gradients:
    # An idle row's gradient is zero, but zero times a NaN in its hidden states would still reach the weight.
    counted = torch.where(up.nonzero()[:, None], head.input, 0.0) if needs[1] else head.input
    return Gradients(head.input, head.weight, head.bias, counted, needs, cut, undo, dtypes)


def _chunks(head: GpuOperands, rows: int, memory: int = 0) -> list[slice]:
    """Chunks of so many rows, or of more or fewer within the bytes."""
    row_bytes = tiles.padded(head.weight.shape[0]) * head.input.element_size()
    most = min(max(rows * row_bytes, LEAST_PRODUCT_BYTES), MOST_PRODUCT_BYTES)
    return chunks_of(head.input.shape[0], row_bytes, min(most, of_products(memory) or most))


def _products(head: GpuOperands, chunks: list[slice]) -> Iterator[tuple[slice, Tensor]]:
    """``input @ weight.T`` of each chunk of rows, in the memory of the one before."""
    vocab = head.weight.shape[0]
    buffer = _buffer(head, chunks[0].stop, vocab)
    for here in chunks:
        product = buffer[: here.stop - here.start, :vocab]
        for at in _split_rest(head, [slice(0, vocab)]):
            multiply(head.input[here], head.weight[at].t(), product[:, at])
        yield here, product


def _split_rest(head: GpuOperands, classes: list[slice]) -> list[slice]:
    return split_rest(classes) if tiles.dot_precision(head.input.dtype) == "tf32" else classes


def _buffer(head: GpuOperands, rows: int, classes: int) -> Tensor:
    return head.input.new_empty((rows, tiles.padded(classes)))
