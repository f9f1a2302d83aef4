"""The ops on a GPU: which way they take, and the general one.

What ``hopper`` takes goes there. Otherwise Triton makes the statistics and the gradient of the logits, cuBLAS its
products.

Statistics take one sweep over the vocabulary and store no logits. Gradients go window by window: the gradient of
the logits of a window of rows and classes is made in a buffer, multiplied with the weight and with the hidden states,
and overwritten by the next. Nothing waits for the device, and nothing is added atomically.

Triton is imported on the first call. Without it, on GPUs before Ampere and for float64, ``chunked`` does the work.
On CPU tensors the same code runs under Triton's interpreter (``TRITON_INTERPRET=1``), which is how it is tested where
there is no GPU. See ``contract`` for what is computed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels import tiles
from ..transform import decode, steepest
from . import chunked
from .contract import Coefficients, Operands, Upstream, normalisation, stash_dtype

# The buffer for the gradient of the logits: an eighth of the logits within these bounds, of whole tiles. Less costs
# speed in short products, more costs memory that the fused ops are there to save.
WINDOW_SHARE = 8
LEAST_WINDOW_BYTES, MOST_WINDOW_BYTES = 64 << 20, 512 << 20
LEAST_WINDOW = 256


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
    return head.stats(want_class_sum, wanted, want_entropy, want_top)


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
    up = _Upstream(*c.upstream())
    lse, _, log_prob, class_sum, residual, *_ = head.stats(c_class_sum is not None, up.nonzero())
    loss = c.loss(lse, log_prob, class_sum)
    return loss, *head.gradients(lse, residual, up, needs, (stash_dtype(input.dtype),) * 3)


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

    def stats(
        self, want_class_sum: bool, wanted: Tensor | None, want_entropy: bool = False, want_top: bool = False
    ) -> tuple[Tensor, ...]:
        """The row statistics of the contract; zeros in rows outside the mask ``wanted [N]``."""
        from ..kernels.stats import row_stats

        with current(self.input.device):
            return row_stats(
                self.input,
                self.weight,
                self.bias,
                self.index,
                self.class_weight,
                self.scale,
                self.transform,
                want_class_sum,
                wanted,
                want_entropy,
                want_top,
            )

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
        from ..kernels.dlogits import PAD, write_dlogits

        (rows, hidden), vocab = self.input.shape, self.weight.shape[0]
        shapes = ((rows, hidden), (vocab, hidden), (vocab,))
        new = self.input.new_zeros if rows == 0 else self.input.new_empty
        if rows == 0 or not any(needs):
            return tuple(  # type: ignore[return-value]
                new(shape if need else (0,), dtype=dtype)
                for shape, need, dtype in zip(shapes, needs, dtypes, strict=True)
            )
        lse, residual, up = lse.contiguous(), residual.contiguous(), up.contiguous()
        entropy = contiguous(entropy)
        factor = undo = None
        if self.input.dtype == torch.float16:
            steep = abs(self.scale) * steepest(decode(self.transform))
            factor, undo = normalisation(up, self.class_weight, steep, entropy)
        # An idle row's gradient is zero, but zero times a NaN in its hidden states would still reach the weight.
        x_for_weight = torch.where(up.nonzero()[:, None], self.input, 0.0) if needs[1] else self.input
        row_windows, vocab_windows = windows_of(rows, vocab, self.input.dtype.itemsize, memory)
        widest = -(-vocab_windows[0].stop // PAD) * PAD
        buffer = new((row_windows[0].stop, widest))
        d_input = ProductSum(shapes[0], self.input, dtypes[0], len(vocab_windows), undo) if needs[0] else None
        d_weight = ProductSum(shapes[1], self.input, dtypes[1], len(row_windows), undo) if needs[1] else None
        d_bias = self.input.new_zeros(shapes[2] if needs[2] else (0,), dtype=torch.float32)
        with current(self.input.device):
            for at_rows in row_windows:
                here = _Upstream(*(None if g is None else g[at_rows] for g in up))  # type: ignore[arg-type]
                x, index = self.input[at_rows], self.index[at_rows]
                row_entropy = None if entropy is None else entropy[at_rows]
                for at in vocab_windows:
                    w, bias, c = (None if t is None else t[at] for t in (self.weight, self.bias, self.class_weight))
                    assert w is not None
                    dz = buffer[: x.shape[0], : w.shape[0]]
                    write_dlogits(
                        dz, x, w, bias, index, at.start, c, self.scale, self.transform, lse[at_rows],
                        residual[at_rows], *here, row_entropy, factor,
                    )  # fmt: skip
                    if d_input is not None:
                        d_input.add(at_rows, dz, w)
                    if d_weight is not None:
                        d_weight.add(at, dz.t(), x_for_weight[at_rows])
                    if needs[2]:
                        d_bias[at] += dz.sum(0, dtype=torch.float32)
        # Before the sums are converted, which needs about as much memory again.
        del buffer, dz
        if undo is not None:
            d_bias *= undo
        return (
            new((0,), dtype=dtypes[0]) if d_input is None else d_input.result(),
            new((0,), dtype=dtypes[1]) if d_weight is None else d_weight.result(),
            d_bias.to(dtypes[2]),
        )


def windows_of(rows: int, vocab: int, itemsize: int, memory: int) -> tuple[list[slice], list[slice]]:
    """Cut [rows, vocab] along one axis into equal windows of a bounded size: (slices of rows, of classes).

    Windows over the vocabulary finish their part of the weight's gradient and add to the input's, in float32; windows
    over rows do the reverse. The longer axis is cut, so that the smaller gradient is the one accumulated.
    """
    long, short = max(rows, vocab), min(rows, vocab)
    window = min(max(rows * vocab * itemsize // WINDOW_SHARE, LEAST_WINDOW_BYTES), MOST_WINDOW_BYTES)
    window = min(window, memory or window)
    most = max(1, window // (short * itemsize * LEAST_WINDOW)) * LEAST_WINDOW
    count = -(-long // most)
    # Equal windows, but for whole tiles: a short last one would waste a product.
    step = -(-long // (count * LEAST_WINDOW)) * LEAST_WINDOW
    cut = [slice(start, min(start + step, long)) for start in range(0, long, step)]
    return (cut, [slice(0, vocab)]) if rows > vocab else ([slice(0, rows)], cut)


class ProductSum:
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


# --- products -------------------------------------------------------------------------------------------------
# The overloads are named, so that a PyTorch without them raises instead of choosing another. An addmm with a float32
# sum beside 16-bit factors is PyTorch 2.11's; before, the sum had to have the factors' dtype.


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
