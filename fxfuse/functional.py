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

from . import errors
from .algebra import Head, Logits
from .compat import forward_ad_active, is_autocast_enabled, is_plain, transform_active
from .eager import EMIT
from .ops.contract import AUTOCAST_DTYPES, SUPPORTED_DEVICES, SUPPORTED_DTYPES
from .originals import original_or_itself
from .passes import compute
from .rules import TABLE, Call, Keep

# A torch function with its arguments after the first.
_Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_linear, _cross_entropy = original_or_itself(F.linear), original_or_itself(F.cross_entropy)
_log_softmax, _gather = original_or_itself(torch.log_softmax), original_or_itself(torch.gather)
_logsumexp = original_or_itself(torch.logsumexp)


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

    Unlike there, ``input`` may have any number of leading dimensions, which ``target`` repeats.

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
        A 0-d loss, or ``[...]`` for ``"none"``, in the dtype that eager returns (autocast included).

    Raises:
        IndexError: a target out of range (on CUDA a device-side assertion).
        TypeError: an argument that should be a tensor is none.
        ValueError, RuntimeError: whatever eager raises for the arguments.
        FxfuseError: from the backward, for a second derivative (``create_graph=True``).

    The logits z are made a chunk of rows at a time, in float32 (float64 for float64), and reduced at once to
    ``log Σⱼ exp zⱼ`` by an online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867), ``z[target]`` and, for label
    smoothing (Szegedy et al. 2016, arXiv:1512.00567), ``Σⱼ zⱼ``. For a scalar loss the gradients are made in the same
    pass, as Liger-Kernel does (Hsu et al. 2024, arXiv:2410.10989). ``docs/kernels.md`` has what GPUs do.
    """
    options = {
        "weight": weight,
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
    }
    optional = {"linear_bias": linear_bias, "weight": weight}
    _check_tensors("linear_cross_entropy", optional, input=input, linear_weight=linear_weight, target=target)
    leading, labels, flat = input.shape[:-1], target, input.dim() > 2
    fits = target.shape == leading
    if flat:
        if target.shape[: len(leading)] != leading:
            raise errors.target_of_another_shape(target.shape, leading)
        labels = target.flatten(0, len(leading) - 1)  # class indices or class probabilities
    steps = [(_cross_entropy, (labels,), options)]
    loss = _read(input, linear_weight, linear_bias, steps, fits, flat)
    return loss.reshape(leading) if reduction == "none" else loss


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
        Log-probabilities, in nats, in the shape of ``index``, in the dtype that eager returns.

    Raises:
        RuntimeError: whatever eager raises for the arguments, an index out of range among them (on CUDA a
            device-side assertion).
        TypeError: an argument that should be a tensor is none.
        FxfuseError: from the backward, for a second derivative (``create_graph=True``).

    Each is ``(z - m) - log Σⱼ exp(zⱼ - m)`` with m the largest logit of the row, which does not cancel where the
    probability is near one. The backward makes the logits once more, from the log-sum-exp that was kept.
    """
    _check_tensors(
        "linear_log_probs", {"linear_bias": linear_bias}, input=input, linear_weight=linear_weight, index=index
    )
    single = index.dim() == input.dim() - 1
    columns = index.unsqueeze(-1) if single else index
    fits = input.dim() > 0 and columns.shape[:-1] == input.shape[:-1]
    flat = fits and input.dim() > 2
    classes = columns.flatten(0, -2) if flat else columns

    steps: list[_Step] = [(_log_softmax, (-1,), {}), (_gather, (-1, classes), {})]
    return _read(input, linear_weight, linear_bias, steps, fits, flat).reshape(index.shape)


def linear_logsumexp(input: Tensor, linear_weight: Tensor, *, linear_bias: Tensor | None = None) -> Tensor:
    """``F.linear(input, linear_weight, linear_bias).logsumexp(-1)`` without the logits.

    Args:
        input: hidden states ``[..., D]``, float32, float16, bfloat16 or float64.
        linear_weight: ``[V, D]``, of the same dtype.
        linear_bias: ``[V]``.

    Returns:
        ``[...]``, in nats, in the dtype that eager returns.

    Raises:
        RuntimeError: whatever eager raises for the arguments.
        TypeError: an argument that should be a tensor is none.
        FxfuseError: from the backward, for a second derivative (``create_graph=True``).

    By an online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867). Its gradient is the softmax, made from the
    log-sum-exp in the backward.
    """
    _check_tensors("linear_logsumexp", {"linear_bias": linear_bias}, input=input, linear_weight=linear_weight)
    steps: list[_Step] = [(_logsumexp, (-1,), {})]
    if linear_weight.dim() != 2:
        return _eager(_linear(input, linear_weight, linear_bias), steps)
    return _read(input, linear_weight, linear_bias, steps, True, input.dim() > 2).reshape(input.shape[:-1])


def _check_tensors(function: str, optional: dict[str, Any], **arguments: Any) -> None:
    given = {name: value for name, value in optional.items() if value is not None}
    for name, value in (arguments | given).items():
        if not isinstance(value, Tensor):
            raise errors.not_a_tensor(function, name, value)


def _read(input: Tensor, weight: Tensor, bias: Tensor | None, steps: list[_Step], fits: bool, flat: bool) -> Tensor:
    """``F.linear(input, weight, bias)``, its rows on one axis if ``flat``, through ``steps``; fused if what is given
    ``fits`` and the rules allow it.
    """

    def in_eager() -> Tensor:
        logits = _linear(input, weight, bias)
        return _eager(logits.flatten(0, -2) if flat else logits, steps)

    rows = input.flatten(0, -2) if flat else input
    dtype = _logits_dtype(input, weight, bias)
    others = [t for _, args, options in steps for t in (*args, *options.values()) if isinstance(t, Tensor)]
    if not fits or dtype is None or not _consistent(input, weight, bias, others):
        return in_eager()
    vocab, hidden = weight.shape
    head = Head(rows, weight, bias, False, hidden, vocab, dtype)
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (input, weight, bias))
    shape = (*rows.shape[:-1], vocab)
    value: Any = Logits(head, shape, len(shape) - 1, dtype, grad, trail=("linear",))
    try:
        out = torch.empty(0, dtype=_out_dtype(dtype, rows, steps), device="meta")
        autocast = is_autocast_enabled(input.device.type)
        for function, args, options in steps:
            call = Call(function.__name__, out, lambda handle: handle, autocast=autocast)
            value = TABLE[function](call, (value, *args), options)
    except Keep:
        return in_eager()
    _, (result,) = compute(EMIT, (value,), in_checkpoint=False, memory=0)
    return result.to(out.dtype)


def _out_dtype(dtype: torch.dtype, input: Tensor, steps: list[_Step]) -> torch.dtype:
    """The dtype that ``steps`` turn logits of ``dtype`` into."""
    if not is_autocast_enabled(input.device.type):
        return dtype

    def single(t: Any) -> Any:
        return t.new_zeros((1,) * t.dim()) if isinstance(t, Tensor) else t

    # Which functions autocast converts depends on the device and the version: ask it, with one class and one row.
    small = [(f, tuple(map(single, args)), {k: single(v) for k, v in options.items()}) for f, args, options in steps]
    with torch.no_grad():
        return _eager(input.new_zeros((1,) * input.dim(), dtype=dtype), small).dtype


def _eager(value: Tensor, steps: list[_Step]) -> Tensor:
    for function, args, options in steps:
        value = function(value, *args, **options)
    return value


def _logits_dtype(input: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The dtype of ``F.linear(input, weight, bias)``, or None where it would not be computed or fused."""
    operands = [t for t in (input, weight, bias) if t is not None]
    device = input.device.type
    dtypes = {t.dtype for t in operands}
    if is_autocast_enabled(device) and dtypes <= AUTOCAST_DTYPES:
        dtypes = {torch.get_autocast_dtype(device)}
    dtype = dtypes.pop()
    return dtype if not dtypes and dtype in SUPPORTED_DTYPES else None


def _consistent(input: Tensor, weight: Tensor, bias: Tensor | None, others: list[Tensor]) -> bool:
    """Whether the operands fit together, so that the fused ops may have them."""
    tensors = [t for t in (input, weight, bias) if t is not None] + others
    return (
        not forward_ad_active()
        and not transform_active()
        and all(is_plain(t) and t.device == input.device for t in tensors)
        and input.device.type in SUPPORTED_DEVICES
        and input.dim() >= 1
        and weight.dim() == 2
        and input.shape[-1] == weight.shape[1] > 0 < weight.shape[0]
        and (bias is None or bias.shape == weight.shape[:1])
    )
