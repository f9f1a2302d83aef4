"""The fused functions for those who would rather call them than compile.

Each is the eager composition that its docstring names, without the ``[N, V]`` logits. Where the rules would refuse
(class-probability targets, say), and for wrong arguments, the eager composition itself runs, so results and errors
are PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .algebra import Emit, Head, Logits, Reader
from .compat import is_plain
from .ops.contract import SUPPORTED_DTYPES
from .passes import compute
from .rules import TABLE, Call, Keep


class _EagerEmit(Emit):
    """Runs functions as they come."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def example(self, handle: Any) -> Tensor:
        return handle


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, …)`` without the logits.

    Args:
        input: hidden states ``[..., D]``, float32, float16, bfloat16 or float64.
        linear_weight: ``[V, D]``, of the same dtype.
        target: class indices ``[...]``, int64 in [0, V) or ``ignore_index``. Class probabilities are accepted and
            computed with the logits in full.
        linear_bias: ``[V]``.
        weight: a weight for each class, ``[V]``.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        ignore_index: rows with this target count for nothing.
        label_smoothing: in [0, 1]; see ``torch.nn.CrossEntropyLoss``.

    Returns:
        A 0-d loss, or ``[...]`` for ``"none"``, in the dtype that eager returns.

    Raises:
        IndexError: a target out of range (on CUDA a device-side assertion).
        ValueError, RuntimeError: whatever eager raises for the arguments.
    """
    options = {
        "weight": weight,
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
    }
    rows = _rows(input)
    labels = target.reshape(-1) if input.dim() > 2 and target.shape == input.shape[:-1] else target
    fits = labels.shape == rows.shape[:-1]
    loss = _read(F.cross_entropy, rows, linear_weight, linear_bias, (labels,), options, fits)
    return loss.reshape(target.shape) if reduction == "none" else loss


def linear_log_probs(
    input: Tensor, linear_weight: Tensor, index: Tensor, *, linear_bias: Tensor | None = None
) -> Tensor:
    """``F.linear(input, linear_weight, linear_bias).log_softmax(-1).gather(-1, index)`` without the logits.

    Args:
        input: hidden states ``[..., D]``, float32, float16, bfloat16 or float64.
        linear_weight: ``[V, D]``, of the same dtype.
        index: classes in [0, V), int64: ``[...]`` for one a row, or ``[..., K]`` for several.
        linear_bias: ``[V]``.

    Returns:
        Log-probabilities in the shape of ``index``, in the dtype that eager returns.

    Raises:
        RuntimeError: whatever eager raises for the arguments, an index out of range among them (on CUDA a
            device-side assertion).
    """
    single = index.dim() == input.dim() - 1
    columns = index.unsqueeze(-1) if single else index
    fits = columns.shape[:-1] == input.shape[:-1]
    rows = _rows(input) if fits else input
    flat = columns.reshape(*rows.shape[:-1], columns.shape[-1]) if fits else columns

    def eager(logits: Tensor, index: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(-1, index)

    picked = _read(eager, rows, linear_weight, linear_bias, (flat,), {}, fits)
    return picked.reshape(index.shape)


def linear_logsumexp(input: Tensor, linear_weight: Tensor, *, linear_bias: Tensor | None = None) -> Tensor:
    """``F.linear(input, linear_weight, linear_bias).logsumexp(-1)`` without the logits.

    Args:
        input: hidden states ``[..., D]``, float32, float16, bfloat16 or float64.
        linear_weight: ``[V, D]``, of the same dtype.
        linear_bias: ``[V]``.

    Returns:
        ``[...]``, in the dtype that eager returns.

    Raises:
        RuntimeError: whatever eager raises for the arguments.
    """

    def eager(logits: Tensor) -> Tensor:
        return logits.logsumexp(-1)

    return _read(eager, _rows(input), linear_weight, linear_bias, (), {}, True).reshape(input.shape[:-1])


def _rows(input: Tensor) -> Tensor:
    return input.flatten(0, -2) if input.dim() > 2 else input


def _read(
    eager: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    args: tuple[Tensor, ...],
    options: dict[str, Any],
    fits: bool,
) -> Tensor:
    """``eager(F.linear(input, weight, bias), *args, **options)``, fused if the rules allow it."""
    dtype = _logits_dtype(input, weight, bias)
    out_dtype = dtype
    reader: Reader | None = None
    if fits and dtype is not None and _consistent(input, weight, bias, *args, options.get("weight")):
        vocab, hidden = weight.shape
        operands = (input, weight) if bias is None else (input, weight, bias)
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
        head = Head(input, weight, bias, False, hidden, vocab, dtype)
        shape = (*input.shape[:-1], vocab)
        logits = Logits(head, shape, len(shape) - 1, dtype, grad, trail=("linear",))
        if torch.is_autocast_enabled(input.device.type):
            out_dtype = torch.promote_types(dtype, torch.float32)  # autocast runs every one of these in float32
        try:
            reader = _reader(eager, logits, args, options)
        except Keep:
            reader = None
    if reader is None or out_dtype is None:
        return eager(F.linear(input, weight, bias), *args, **options)
    _, (result,) = compute(_EagerEmit(), reader.source.head, (reader,), in_checkpoint=False)
    return result.to(out_dtype)


def _reader(eager: Callable[..., Tensor], logits: Logits, args: tuple[Tensor, ...], options: dict[str, Any]) -> Reader:
    def apply(function: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        call = Call(getattr(function, "__name__", str(function)), logits_like, lambda handle: handle)
        return TABLE[function](call, (value, *args), kwargs)

    logits_like = torch.empty(0, dtype=logits.dtype, device="meta")
    if eager is F.cross_entropy:
        return apply(F.cross_entropy, logits, *args, **options)
    if args:
        return apply(torch.gather, apply(torch.log_softmax, logits, -1), -1, *args)
    return apply(torch.logsumexp, logits, -1)


def _logits_dtype(input: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The dtype of ``F.linear(input, weight, bias)``, or None where it would not be computed or fused."""
    operands = [t for t in (input, weight, bias) if t is not None]
    device = input.device.type
    dtypes = {t.dtype for t in operands}
    if torch.is_autocast_enabled(device) and torch.float64 not in dtypes:
        dtypes = {torch.get_autocast_dtype(device)}
    dtype = dtypes.pop()
    return dtype if not dtypes and dtype in SUPPORTED_DTYPES else None


def _consistent(input: Tensor, weight: Tensor, bias: Tensor | None, *others: Tensor | None) -> bool:
    """Whether the operands fit together, so that the fused ops may have them."""
    tensors = [t for t in (input, weight, bias, *others) if t is not None]
    return (
        all(is_plain(t) and t.device == input.device for t in tensors)
        and input.device.type in ("cpu", "cuda")
        and input.dim() >= 1
        and weight.dim() == 2
        and input.shape[-1] == weight.shape[1] > 0
        and (bias is None or bias.shape == weight.shape[:1])
        and all(t.dtype.is_floating_point for t in (input, weight))
    )
