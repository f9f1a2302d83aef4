"""The ops on a GPU: which way they take, and the general one.

What ``hopper`` takes goes there. Otherwise Triton makes the statistics and the gradient of the logits, cuBLAS its
products; in float32 cuBLAS makes the product of the logits as well, see ``kernels.logits``.

Statistics take one sweep over the vocabulary and store no logits, or in float32 a chunk of rows of them. Gradients go
window by window: the gradient of the logits of a window of rows and classes is made in a buffer, multiplied with the
weight and with the hidden states, and overwritten by the next. Of a loss in float32 they are made chunk by chunk, where
the chunk's product was. Nothing waits for the device, and nothing is added atomically.

Triton is imported on the first call. Without it, on GPUs before Ampere and for float64, ``chunked`` does the work.
On CPU tensors the same code runs under Triton's interpreter (``TRITON_INTERPRET=1``), which is how it is tested where
there is no GPU. See ``contract`` for what is computed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import tiles
from ..transform import decode, steepest
from . import chunked
from .contract import Coefficients, Operands, Upstream, normalisation, stash_dtype
from .windows import Gradients, chunks_of, multiply, split_rest, windows_of

# Of a chunk of stored products. With fewer rows a product is slow, or adding it to the sums for the weight shows, on
# tensor cores.
ROWS_OF_STATS, ROWS_OF_GRADIENTS = 512, 2048
LEAST_PRODUCT_BYTES, MOST_PRODUCT_BYTES = 64 << 20, 1 << 30


def linear_stats(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    class_weight: Tensor | None,
    scale: float,
    want_class_sum: bool,
    skip_unindexed: bool,
    *,
    want_entropy: bool = False,
    want_top: bool = False,
    transform: str = "",
    memory: int = 0,
) -> tuple[Tensor, ...]:
    if not has_kernels(input, weight):
        return chunked.linear_stats(
            input,
            weight,
            bias,
            index,
            class_weight,
            scale,
            want_class_sum,
            skip_unindexed,
            want_entropy=want_entropy,
            want_top=want_top,
            transform=transform,
            memory=memory,
        )
    head = GpuOperands.of(input, weight, bias, index, class_weight, scale, transform)
    if head.is_described():
        with current(input.device):
            out = hopper().linear_stats(head.call(), want_class_sum, want_entropy, want_top, skip_unindexed)
        return out.lse, out.picked, out.log_prob, out.class_sum, out.residual, out.entropy, out.top, out.argmax
    wanted = (index >= 0).any(1) if skip_unindexed else None
    return head.stats(want_class_sum, wanted, want_entropy, want_top, memory)


def linear_stats_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    class_weight: Tensor | None,
    scale: float,
    lse: Tensor,
    residual: Tensor,
    g_lse: Tensor,
    g_picked: Tensor,
    g_class_sum: Tensor | None,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
    *,
    entropy: Tensor | None = None,
    g_entropy: Tensor | None = None,
    transform: str = "",
    memory: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    needs = (need_input, need_weight, need_bias)
    if not has_kernels(input, weight):
        return chunked.linear_stats_backward(
            input, weight, bias, index, class_weight, scale, lse, residual, g_lse, g_picked, g_class_sum, *needs,
            entropy=entropy, g_entropy=g_entropy, transform=transform, memory=memory,
        )  # fmt: skip
    head = GpuOperands.of(input, weight, bias, index, class_weight, scale, transform)
    dtypes = (input.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
    up = _Upstream(g_lse, g_picked, g_class_sum, g_entropy).contiguous()
    if head.is_described():
        with current(input.device):
            return hopper().linear_stats_backward(
                head.call(), contiguous(lse), contiguous(residual), up, needs, dtypes, memory, contiguous(entropy)
            )
    return head.gradients(lse, residual, up, needs, dtypes, memory, entropy)


def linear_loss(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    class_weight: Tensor | None,
    scale: float,
    c_lse: Tensor | None,
    c_log_prob: Tensor,
    c_class_sum: Tensor | None,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
    *,
    transform: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    needs = (need_input, need_weight, need_bias)
    if not has_kernels(input, weight):
        return chunked.linear_loss(
            input, weight, bias, index, class_weight, scale, c_lse, c_log_prob, c_class_sum, *needs, transform=transform
        )
    head = GpuOperands.of(input, weight, bias, index, class_weight, scale, transform)
    if head.is_described():
        with current(input.device):
            c = Coefficients(*map(contiguous, (c_lse, c_log_prob, c_class_sum)))  # type: ignore[arg-type]
            loss, grads = hopper().linear_loss(head.call(), c, needs)
        return loss, *grads
    c = Coefficients(c_lse, c_log_prob, c_class_sum).known(index)
    up, dtypes = _Upstream(*c.upstream()), (stash_dtype(input.dtype),) * 3
    if head.stores_products():
        stats, grads = head.stats_and_gradients(up, c_class_sum is not None, needs, dtypes)
    else:
        stats = head.stats(c_class_sum is not None, up.nonzero())
        grads = head.gradients(stats.lse, stats.residual, up, needs, dtypes)
    return c.loss(stats.lse, stats.log_prob, stats.class_sum), *grads


def keeps_exponentials(input: Tensor, weight: Tensor, indexed: int, want_class_sum: bool, transform: str) -> bool:
    """Whether a loss should keep its exponentials for the backward, rather than gradients that are scaled there.

    With no more rows than hidden units they take no more memory than d_weight, and the pass that scales it is spared.
    Only sizes and layouts are looked at, which are known when a program is compiled; symbolic sizes are left alone.
    """
    if torch.compiler.is_dynamo_compiling():  # which traces its callers, and could not trace this
        return False
    (rows, hidden), vocab = input.shape, weight.shape[0]
    if not all(isinstance(size, int) for size in (rows, hidden, vocab)):
        return False
    if input.device.type != "cuda" or not has_kernels(input, weight) or not 0 < rows <= hidden:
        return False
    return (
        tiles.has_descriptors(input)
        and hopper().fits(input, weight)
        and hopper().suits_exponentials(input.dtype, indexed, want_class_sum, transform)
        and rows * vocab * input.dtype.itemsize <= hopper().MOST_EXPONENTIALS_BYTES
    )


def clean_index(index: Tensor, vocab: int, ignore_index: int | None) -> Tensor:
    """``index`` with -1 for what is ignored; the device asserts that the rest are classes."""
    from ..kernels.index import clean

    with current(index.device):
        return clean(index, vocab, ignore_index)


def linear_loss_exponentials(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    class_weight: Tensor | None,
    scale: float,
    c_lse: Tensor | None,
    c_log_prob: Tensor,
    c_class_sum: Tensor | None,
    *,
    transform: str = "",
) -> tuple[Tensor, ...]:
    call = GpuOperands.of(input, _on_vectors(weight), bias, index, class_weight, scale, transform).call()
    with current(input.device):
        c = Coefficients(*map(contiguous, (c_lse, c_log_prob, c_class_sum)))  # type: ignore[arg-type]
        loss, kept = hopper().loss_and_exponentials(call, c)
    return loss, *kept


def linear_loss_exponentials_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    class_weight: Tensor | None,
    scale: float,
    c_class_sum: Tensor | None,
    g: Tensor,
    e: Tensor,
    gathered: Tensor,
    factor: Tensor,
    own: Tensor,
    order: Tensor,
    length: Tensor,
    row_sum: Tensor,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    call = GpuOperands.of(input, _on_vectors(weight), bias, index, class_weight, scale, "").call()
    kept = hopper().Kept(e, gathered, factor, own, order, length, row_sum)
    dtypes = (input.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
    needs = (need_input, need_weight, need_bias)
    with current(input.device):
        return hopper().kept_gradients(call, kept, c_class_sum, g.contiguous(), needs, dtypes)


def _on_vectors(weight: Tensor) -> Tensor:
    """The weight on 16 bytes: whether it lies there was not known when it was chosen to keep exponentials."""
    return weight if weight.data_ptr() % 16 == 0 else weight.clone()


# --- the head and its gradients -------------------------------------------------------------------------------


class _Upstream(Upstream):
    """The same, with what only the kernels ask of it."""

    def contiguous(self) -> _Upstream:
        return _Upstream(*map(contiguous, self))  # type: ignore[arg-type]

    def at(self, rows: slice) -> _Upstream:
        return _Upstream(*(None if g is None else g[rows] for g in self))  # type: ignore[arg-type]


class RowStats(NamedTuple):
    """The statistics of the contract, in its order; empty where not asked for."""

    lse: Tensor
    picked: Tensor
    log_prob: Tensor
    class_sum: Tensor
    residual: Tensor
    entropy: Tensor
    top: Tensor
    argmax: Tensor

    @classmethod
    def cat(cls, parts: list[RowStats]) -> RowStats:
        """Of all rows, from those of their chunks."""
        return cls(*map(torch.cat, zip(*parts, strict=True)))


_EVERYTHING = slice(None)


class GpuOperands(Operands):
    """The operands as the kernels take them: all contiguous but ``input`` and ``weight``."""

    @classmethod
    def of(
        cls,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        index: Tensor,
        class_weight: Tensor | None,
        scale: float,
        transform: str,
    ) -> GpuOperands:
        decode(transform)  # which raises where it is none
        index = contiguous(index)  # type: ignore[assignment]
        return cls(input, weight, contiguous(bias), index, contiguous(class_weight), float(scale), transform)

    def is_described(self) -> bool:
        """Whether ``hopper`` takes these operands."""
        return tiles.has_descriptors(self.input) and hopper().takes(self.input, self.weight)

    def call(self) -> Any:
        return hopper().Call(*self.leaves)

    def stores_products(self) -> bool:
        """Whether the product of the logits is stored, and not made by the kernels that need logits."""
        return self.input.dtype == torch.float32 and self.input.shape[0] > 0

    def stats(
        self,
        want_class_sum: bool,
        wanted: Tensor | None,
        want_entropy: bool = False,
        want_top: bool = False,
        memory: int = 0,
    ) -> RowStats:
        """The row statistics of the contract; zeros in rows outside the mask ``wanted [N]``."""
        wants = want_class_sum, want_entropy, want_top
        with current(self.input.device):
            if not self.stores_products():
                return self._row_stats(_EVERYTHING, wanted, *wants)
            chunks = self._chunks(ROWS_OF_STATS, memory)
            return RowStats.cat(
                [self._row_stats(here, wanted, *wants, product) for here, product in self._products(chunks)]
            )

    def stats_and_gradients(
        self, up: _Upstream, want_class_sum: bool, needs: tuple[bool, bool, bool], dtypes: tuple[torch.dtype, ...]
    ) -> tuple[RowStats, tuple[Tensor, Tensor, Tensor]]:
        """``stats`` of the rows with upstream gradients, and ``gradients``, of one product that is stored."""
        up, wanted, chunks = up.contiguous(), up.nonzero(), self._chunks(ROWS_OF_GRADIENTS)
        whole, parts = slice(0, self.weight.shape[0]), []
        at_classes = self._split_rest([whole])
        with current(self.input.device):
            grads = self._gradients(up, needs, (chunks, at_classes), None, dtypes)
            for here, product in self._products(chunks):
                parts.append(part := self._row_stats(here, wanted, want_class_sum, product=product))
                if any(needs):
                    self._write_dlogits(product, here, whole, part.lse, part.residual, up, product=product)
                    for at in at_classes:
                        grads.add(here, at, product[:, at])
            return RowStats.cat(parts), grads.result()

    def gradients(
        self,
        lse: Tensor,
        residual: Tensor,
        up: _Upstream,
        needs: tuple[bool, bool, bool],
        dtypes: tuple[torch.dtype, ...],
        memory: int = 0,
        entropy: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of input, weight and bias in ``dtypes``; an empty tensor for one that is not needed.

        ``entropy [N]`` is the statistic, where ``up`` has a gradient for it.
        The window of the gradient of the logits takes at most ``memory`` bytes, if that is not 0.
        """
        (rows, hidden), vocab = self.input.shape, self.weight.shape[0]
        if rows == 0 or not any(needs):
            return tuple(  # type: ignore[return-value]
                self.input.new_zeros(shape if need else (0,), dtype=dtype)
                for shape, need, dtype in zip(((rows, hidden), (vocab, hidden), (vocab,)), needs, dtypes, strict=True)
            )
        lse, residual, up = lse.contiguous(), residual.contiguous(), up.contiguous()
        entropy = contiguous(entropy)
        factor = undo = None
        if self.input.dtype == torch.float16:
            steep = abs(self.scale) * steepest(decode(self.transform))
            factor, undo = normalisation(up, self.class_weight, steep, entropy)
        at_rows, at_classes = windows_of(rows, vocab, self.input.dtype.itemsize, memory)
        at_classes = self._split_rest(at_classes)
        buffer = self._buffer(at_rows[0].stop, at_classes[0].stop)
        with current(self.input.device):
            grads = self._gradients(up, needs, (at_rows, at_classes), undo, dtypes)
            for here in at_rows:
                for at in at_classes:
                    dz = buffer[: here.stop - here.start, : at.stop - at.start]
                    if self.stores_products():
                        multiply(self.input[here], self.weight[at].t(), dz)
                    self._write_dlogits(
                        dz, here, at, lse[here], residual[here], up, None if entropy is None else entropy[here], factor,
                        product=dz if self.stores_products() else None,
                    )  # fmt: skip
                    grads.add(here, at, dz)
        # Before the sums are converted, which needs about as much memory again.
        del buffer, dz
        return grads.result()

    def _row_stats(
        self,
        here: slice,
        wanted: Tensor | None,
        want_class_sum: bool,
        want_entropy: bool = False,
        want_top: bool = False,
        product: Tensor | None = None,
    ) -> RowStats:
        from ..kernels.stats import row_stats

        return RowStats(*row_stats(
            self.input[here], self.weight, self.bias, self.index[here], self.class_weight, self.scale, self.transform,
            want_class_sum, None if wanted is None else wanted[here], want_entropy, want_top, product,
        ))  # fmt: skip

    def _write_dlogits(
        self,
        dz: Tensor,
        here: slice,
        at: slice,
        lse: Tensor,
        residual: Tensor,
        up: _Upstream,
        entropy: Tensor | None = None,
        factor: Tensor | None = None,
        product: Tensor | None = None,
    ) -> None:
        """Of a window of rows and classes; ``lse``, ``residual`` and ``entropy`` are those of the rows."""
        from ..kernels.dlogits import write_dlogits

        bias, c = (None if t is None else t[at] for t in (self.bias, self.class_weight))
        write_dlogits(
            dz, self.input[here], self.weight[at], bias, self.index[here], at.start, c, self.scale, self.transform, lse,
            residual, *up.at(here), entropy, factor, product,
        )  # fmt: skip

    def _gradients(
        self,
        up: _Upstream,
        needs: tuple[bool, bool, bool],
        cut: tuple[list[slice], list[slice]],
        undo: Tensor | None,
        dtypes: tuple[torch.dtype, ...],
    ) -> Gradients:
        # An idle row's gradient is zero, but zero times a NaN in its hidden states would still reach the weight.
        counted = torch.where(up.nonzero()[:, None], self.input, 0.0) if needs[1] else self.input
        return Gradients(self.input, self.weight, self.bias, counted, needs, cut, undo, dtypes)

    def _chunks(self, rows: int, memory: int = 0) -> list[slice]:
        """Chunks of so many rows, or of more or fewer within the bytes."""
        row_bytes = tiles.padded(self.weight.shape[0]) * self.input.element_size()
        most = min(max(rows * row_bytes, LEAST_PRODUCT_BYTES), MOST_PRODUCT_BYTES)
        return chunks_of(self.input.shape[0], row_bytes, min(most, memory or most))

    def _products(self, chunks: list[slice]) -> Iterator[tuple[slice, Tensor]]:
        """``input @ weight.T`` of each chunk of rows, in the memory of the one before."""
        vocab = self.weight.shape[0]
        buffer = self._buffer(chunks[0].stop, vocab)
        for here in chunks:
            product = buffer[: here.stop - here.start, :vocab]
            for at in self._split_rest([slice(0, vocab)]):
                multiply(self.input[here], self.weight[at].t(), product[:, at])
            yield here, product

    def _split_rest(self, classes: list[slice]) -> list[slice]:
        return split_rest(classes) if tiles.dot_precision(self.input.dtype) == "tf32" else classes

    def _buffer(self, rows: int, classes: int) -> Tensor:
        return self.input.new_empty((rows, tiles.padded(classes)))


# --- whether and where ----------------------------------------------------------------------------------------


@functools.cache
def has_triton(device: torch.device) -> bool:
    """Whether Triton is there and compiles for ``device``; a CPU stands for its interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def has_kernels(input: Tensor, weight: Tensor) -> bool:
    if input.dtype not in (torch.float16, torch.bfloat16, torch.float32) or weight.dtype != input.dtype:
        return False
    return has_triton(input.device)


def where_described(op: Callable[..., Any]) -> Callable[..., None]:
    """``op``, which only acts if ``hopper`` takes its operands: the general way launches what it likes."""

    @functools.wraps(op)
    def run(*args: Any, **kwargs: Any) -> None:
        input, weight, bias, index, class_weight, scale, *_ = args  # of all these ops
        head = GpuOperands.of(input, weight, bias, index, class_weight, scale, transform="")
        if has_kernels(input, weight) and head.is_described():
            op(*args, **kwargs)

    return run


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """Without gaps, and on 16 bytes, as a new tensor is."""
    if tensor is None or (tensor.is_contiguous() and tensor.data_ptr() % 16 == 0):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@functools.cache
def hopper() -> Any:
    from . import hopper as ops  # imports Triton

    return ops


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():  # which is known sooner than it is set
        return _AS_IT_IS
    return torch.cuda.device(device)


_AS_IT_IS = contextlib.nullcontext()
