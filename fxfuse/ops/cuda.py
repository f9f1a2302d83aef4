"""The ops on a GPU: which way they take.

What ``hopper`` takes goes there, and is played from tapes (``kernels.recorder``); the rest goes the ``general`` way.
Neither waits for the device, and no numbers but counts are added atomically. Triton is imported on the first call.
Without it, on GPUs before Ampere and for float64, ``chunked`` does the work. On CPU tensors the same code runs under
Triton's interpreter (``TRITON_INTERPRET=1``), which is how it is tested where there is no GPU. See ``contract`` for
what is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels import tiles
from . import chunked, general
from .contract import Coefficients, RowStats, gradient_dtypes, stash_dtype, total_weight
from .gpu import GpuOperands, GpuUpstream, contiguous, current, has_kernels, hopper, is_described

Op = Callable[..., Any]


def _is_described(input: Tensor, weight: Tensor, *_: Any, **__: Any) -> bool:
    """Of the arguments of any of these ops: whether ``hopper`` takes the operands."""
    return is_described(input, weight)


def _on_gpu(without_kernels: Op | None = None, suits: Op | None = None) -> Callable[[Op], Op]:
    """The op on the device of its operands, played from a tape if its arguments are such as ``suits`` accepts.

    What its kernels do not take, ``without_kernels`` does. Both are None for an op that is given nothing else.
    """

    def decorate(op: Op) -> Op:
        @functools.cache
        def played() -> Op:
            from ..kernels.recorder import replayed  # imports Triton

            return replayed(op, suits)

        @functools.wraps(op)
        def run(input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Any:
            if without_kernels is not None and not has_kernels(input, weight):
                return without_kernels(input, weight, *args, **options)
            with current(input.device):
                return played()(input, weight, *args, **options)

        return run

    return decorate


@_on_gpu(chunked.linear_stats, _is_described)
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
    want_log_prob_sum: bool = False,
    want_expectation: bool = False,
    want_entropy: bool = False,
    want_top: bool = False,
    transform: str = "",
    memory: int = 0,
) -> tuple[Tensor, ...]:
    head = GpuOperands.of(input, weight, bias, index, class_weight, scale, transform)
    others = want_expectation, want_entropy or want_expectation, want_top
    if not head.is_described():
        wanted = (index >= 0).any(1) if skip_unindexed else None
        return general.stats(head, want_class_sum, want_log_prob_sum, wanted, *others, memory)
    out = hopper().linear_stats(head.call(), skip_unindexed, want_class_sum or want_log_prob_sum, *others)
    if want_log_prob_sum:
        # In float64: what all logits of a row have in common may be far larger than what is left of the difference.
        total = total_weight(head.class_weight, weight.shape[0], torch.float64)
        log_prob_sum = (out.class_sum - total * (out.lse.double() + out.residual)).float()
    else:
        log_prob_sum = _nothing(input.device)
    return RowStats(
        lse=out.lse,
        picked=out.picked,
        log_prob=out.log_prob,
        class_sum=out.class_sum if want_class_sum else _nothing(input.device),
        log_prob_sum=log_prob_sum,
        residual=out.residual,
        expectation=out.expectation,
        entropy=out.entropy,
        top=out.top,
        argmax=out.argmax,
    )


def _nothing(device: torch.device) -> Tensor:
    """What was not asked for: a new one each time, as one result of an op may not be another."""
    return torch.empty(0, dtype=torch.float32, device=device)


@_on_gpu(chunked.linear_stats_backward, _is_described)
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
    expectation: Tensor | None = None,
    transform: str = "",
    memory: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    head = GpuOperands.of(input, weight, bias, index, class_weight, scale, transform)
    needs = (need_input, need_weight, need_bias)
    dtypes = gradient_dtypes(input, weight, bias)
    up = GpuUpstream(g_lse, g_picked, g_class_sum, g_entropy).contiguous()
    if head.is_described():
        return hopper().linear_stats_backward(
            head.call(), contiguous(lse), contiguous(residual), up, needs, dtypes, memory, contiguous(entropy)
        )
    return general.gradients(head, lse, residual, up, needs, dtypes, memory, entropy, expectation)


@_on_gpu(chunked.linear_loss, _is_described)
def linear_loss(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    class_weight: Tensor | None,
    scale: float,
    c_log_prob: Tensor,
    c_log_prob_sum: Tensor | None,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
    *,
    transform: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    head = GpuOperands.of(input, weight, bias, index, class_weight, scale, transform)
    needs = (need_input, need_weight, need_bias)
    if head.is_described():
        c = Coefficients(*map(contiguous, (c_log_prob, c_log_prob_sum)))  # type: ignore[arg-type]
        loss, grads = hopper().linear_loss(head.call(), c, needs)
        return loss, *grads
    c, want_sums = Coefficients(c_log_prob, c_log_prob_sum).known(index), c_log_prob_sum is not None
    up = GpuUpstream(*c.upstream(total_weight(head.class_weight, weight.shape[0], torch.float32)))
    dtypes = (stash_dtype(input.dtype),) * 3
    if general.stores_products(head):
        stats, grads = general.stats_and_gradients(head, up, want_sums, needs, dtypes)
    else:
        stats = general.stats(head, False, want_sums, up.nonzero())
        grads = general.gradients(head, stats.lse, stats.residual, up, needs, dtypes)
    return c.loss(stats.log_prob, stats.log_prob_sum), *grads


def keeps_exponentials(input: Tensor, weight: Tensor, indexed: int, want_class_sum: bool, transform: str) -> bool:
    """Whether a loss should keep its exponentials for the backward, rather than gradients that are scaled there.

    With no more rows than hidden units they take no more memory than d_weight, and the pass that scales it is spared.
    Only sizes and layouts are looked at, which are known when a program is compiled; symbolic sizes are left alone.
    """
    if torch.compiler.is_dynamo_compiling():  # which traces its callers, and could not trace this
        return False
    if not all(isinstance(size, int) for size in (*input.shape, *weight.shape)):
        return False
    if input.device.type != "cuda" or not has_kernels(input, weight) or not tiles.has_descriptors(input):
        return False
    return bool(hopper().keeps_exponentials(input, weight, indexed, want_class_sum, transform))


def clean_index(index: Tensor, vocab: int, ignore_index: int | None) -> Tensor:
    """``index`` with -1 for what is ignored; the device asserts that the rest are classes."""
    from ..kernels.index import clean

    with current(index.device):
        return clean(index, vocab, ignore_index)


@_on_gpu()
def linear_loss_exponentials(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    class_weight: Tensor | None,
    scale: float,
    c_log_prob: Tensor,
    c_log_prob_sum: Tensor | None,
    *,
    transform: str = "",
) -> tuple[Tensor, ...]:
    call = GpuOperands.of(input, _on_vectors(weight), bias, index, class_weight, scale, transform).call()
    c = Coefficients(*map(contiguous, (c_log_prob, c_log_prob_sum)))  # type: ignore[arg-type]
    loss, kept = hopper().loss_and_exponentials(call, c)
    return loss, *kept


@_on_gpu()
def linear_loss_exponentials_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    class_weight: Tensor | None,
    scale: float,
    c_log_prob_sum: Tensor | None,
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
    dtypes = gradient_dtypes(input, weight, bias)
    needs = (need_input, need_weight, need_bias)
    return hopper().kept_gradients(call, kept, c_log_prob_sum, g.contiguous(), needs, dtypes)


def _on_vectors(weight: Tensor) -> Tensor:
    """The weight on 16 bytes: whether it lies there was not known when it was chosen to keep exponentials."""
    return weight if weight.data_ptr() % 16 == 0 else weight.clone()


def where_described(op: Op) -> Callable[..., None]:
    """``op``, which only acts if ``hopper`` takes its operands: the general way launches what it likes."""

    @functools.wraps(op)
    def run(*args: Any, **options: Any) -> None:
        if _is_described(*args, **options):
            op(*args, **options)

    return run
