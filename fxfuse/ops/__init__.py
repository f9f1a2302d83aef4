"""The ops ``torch.ops.fxfuse.*``: schemas, fake implementations, autograd, and which code runs on which device.

``contract`` says what they compute.  ``linear_stats`` is the general op; its backward recomputes the softmax
from the saved log-sum-exp.  ``linear_loss`` is for a scalar that is linear in the statistics with coefficients
known beforehand: its gradients are made in the forward pass, where the exponentials are at hand, and only scaled
in the backward.  ``linear_loss_exponentials`` is the same but keeps the exponentials and makes the gradients in the
backward: for few rows on some GPUs, where ``cuda.keeps_exponentials`` says so, and nowhere else.  ``memory``, where
an op has it, bounds its buffers in bytes; 0 leaves them to the implementation.  ``check_index``
validates class indices the way ``nll_loss`` and ``gather`` do.  ``softmax``, ``divergence`` and ``topk`` have ops of
their own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import errors
from ..compat import OpOverload
from ..kernels.tiles import adds_class_sums, padded, row_block
from . import chunked, cuda, divergence_cuda, gpu, softmax_cuda
from .contract import RowStats, acc_dtype, stash_dtype, total_weight
from .divergence import linear_divergence as linear_divergence
from .divergence import linear_divergence_backward
from .library import (
    NEEDS,
    backward_fake,
    differentiable,
    gradients_fake,
    if_needed,
    implement,
    lib,
    refuse_second_order,
)
from .library import beneath_autograd as beneath_autograd
from .scaling import scale_ as scale_
from .scaling import scale_cuda_
from .scaling import scaled as scaled
from .softmax import linear_softmax as linear_softmax
from .softmax import linear_softmax_backward
from .topk import linear_topk as linear_topk

_OPERANDS = "Tensor input, Tensor weight, Tensor? bias, Tensor index, Tensor? class_weight, float scale"

for _schema in (
    "check_index(Tensor index, SymInt vocab, int? ignore_index, bool wraps=False) -> Tensor",
    f"linear_stats({_OPERANDS}, bool want_class_sum, bool skip_unindexed, *, bool want_log_prob_sum=False,"
    " bool want_expectation=False, bool want_entropy=False, bool want_top=False, str transform='', int memory=0)"
    f" -> ({', '.join(['Tensor'] * len(RowStats._fields))})",
    f"linear_stats_backward({_OPERANDS}, Tensor lse, Tensor residual, Tensor g_lse, Tensor g_picked,"
    f" Tensor? g_class_sum, {NEEDS}, *, Tensor? entropy=None, Tensor? g_entropy=None, Tensor? expectation=None,"
    " str transform='', int memory=0) -> (Tensor, Tensor, Tensor)",
    f"linear_loss({_OPERANDS}, Tensor c_log_prob, Tensor? c_log_prob_sum, {NEEDS},"
    " *, str transform='') -> (Tensor, Tensor, Tensor, Tensor)",
    f"linear_loss_exponentials({_OPERANDS}, Tensor c_log_prob, Tensor? c_log_prob_sum, *,"
    " str transform='') -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    f"linear_loss_exponentials_backward({_OPERANDS}, Tensor? c_log_prob_sum, Tensor g, Tensor e, Tensor gathered,"
    f" Tensor factor, Tensor own, Tensor order, Tensor length, Tensor row_sum, {NEEDS}) -> (Tensor, Tensor, Tensor)",
):
    lib.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

lib.define("copied(Tensor input) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
lib.impl("copied", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("fxfuse::copied", torch.clone, lib=lib)

check_index = torch.ops.fxfuse.check_index.default
copied = torch.ops.fxfuse.copied.default  # which no compiler takes for something that is made again for nothing
linear_stats = torch.ops.fxfuse.linear_stats.default
linear_stats_backward = torch.ops.fxfuse.linear_stats_backward.default
linear_loss = torch.ops.fxfuse.linear_loss.default
linear_loss_exponentials = torch.ops.fxfuse.linear_loss_exponentials.default
linear_loss_exponentials_backward = torch.ops.fxfuse.linear_loss_exponentials_backward.default

# The statistics of ``linear_stats`` that come only if asked for, beside ``want_class_sum``.
OPTIONAL = ("want_log_prob_sum", "want_expectation", "want_entropy", "want_top")


# --- class indices --------------------------------------------------------------------------------------------


def _is_index(index: Tensor, vocab: int, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """The cleaned index, and which of its entries are neither classes nor ignored."""
    index = index.contiguous()
    foreign = (index < 0) | (index >= vocab)
    if ignore_index is None:
        return index.clone(), foreign
    ignored = index == ignore_index
    return torch.where(ignored, -1, index), foreign & ~ignored


def _wrapped(index: Tensor, vocab: int) -> Tensor:
    return torch.where(index < 0, index + vocab, index)


def _check_index_cpu(index: Tensor, vocab: int, ignore_index: int | None, wraps: bool = False) -> Tensor:
    clean, foreign = _is_index(_wrapped(index, vocab) if wraps else index, vocab, ignore_index)
    if bool(foreign.any()):
        first = int(index[foreign][0])
        if wraps:
            raise errors.index_out_of_range(first, vocab, "indexing")
        raise errors.index_out_of_range(first, vocab, "gather" if ignore_index is None else "nll_loss")
    return clean


def _check_index_cuda(index: Tensor, vocab: int, ignore_index: int | None, wraps: bool = False) -> Tensor:
    if wraps:
        index = _wrapped(index, vocab)
    if gpu.has_triton(index.device) and index.numel() > 0:
        return cuda.clean_index(index.contiguous(), vocab, ignore_index)
    clean, foreign = _is_index(index, vocab, ignore_index)
    torch._assert_async(~foreign.any(), errors.INDEX_OUT_OF_RANGE)
    return clean


lib.impl("check_index", _check_index_cpu, "CPU")
lib.impl("check_index", _check_index_cuda, "CUDA")


# --- shapes ---------------------------------------------------------------------------------------------------


@torch.library.register_fake("fxfuse::check_index", lib=lib)
def _check_index_fake(index: Tensor, vocab: int, ignore_index: int | None, wraps: bool = False) -> Tensor:
    return torch.empty_like(index, memory_format=torch.contiguous_format)


@torch.library.register_fake("fxfuse::linear_stats", lib=lib)
def _linear_stats_fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    *rest: Any,
    want_log_prob_sum: bool = False,
    want_expectation: bool = False,
    want_entropy: bool = False,
    want_top: bool = False,
    **_: Any,
) -> tuple[Tensor, ...]:
    acc, want_class_sum = acc_dtype(input.dtype), rest[2]

    def of_rows(want: bool = True, dtype: torch.dtype = acc) -> Tensor:
        return input.new_empty(input.shape[:1] if want else (0,), dtype=dtype)

    return RowStats(
        lse=of_rows(),
        picked=input.new_empty(index.shape, dtype=acc),
        log_prob=input.new_empty(index.shape, dtype=acc),
        class_sum=of_rows(want_class_sum),
        log_prob_sum=of_rows(want_log_prob_sum),
        residual=of_rows(),
        expectation=of_rows(want_expectation),
        entropy=of_rows(want_entropy or want_expectation),
        top=of_rows(want_top),
        argmax=of_rows(want_top, torch.int64),
    )


for _name in ("linear_stats_backward", "linear_loss_exponentials_backward"):
    torch.library.register_fake(f"fxfuse::{_name}", backward_fake, lib=lib)


@torch.library.register_fake("fxfuse::linear_loss", lib=lib)
def _linear_loss_fake(input: Tensor, weight: Tensor, *rest: Any, **_: Any) -> tuple[Tensor, ...]:
    loss = input.new_empty((), dtype=acc_dtype(input.dtype))
    return loss, *gradients_fake(input, weight, rest[-3:], (stash_dtype(input.dtype),) * 3)


@torch.library.register_fake("fxfuse::linear_loss_exponentials", lib=lib)
def _linear_loss_exponentials_fake(
    input: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, *rest: Any, **_: Any
) -> tuple[Tensor, ...]:
    c_log_prob_sum = rest[-1]
    (rows, hidden), vocab, acc = input.shape, weight.shape[0], acc_dtype(input.dtype)
    block = row_block(input.device)
    most = -(-rows // block) * block
    sizes = (((), acc), ((most, padded(vocab)), input.dtype), ((most, hidden), input.dtype), ((most,), acc))
    lists = ((tuple(index.shape), acc), ((rows,), torch.int32), ((1,), torch.int32))
    row_sum = ((0 if c_log_prob_sum is None or adds_class_sums(input) else hidden,), acc)
    return tuple(input.new_empty(shape, dtype=dtype) for shape, dtype in (*sizes, *lists, row_sum))


# --- autograd -------------------------------------------------------------------------------------------------


def _refuse_differentiable(ctx: Any, constants: dict[int, str], op: str) -> None:
    for position, name in constants.items():
        if ctx.needs_input_grad[position]:
            raise errors.not_differentiable(op, name)


def _stats_setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    input, weight, bias, index, class_weight, scale, want_class_sum, _ = inputs
    _refuse_differentiable(ctx, {4: "class_weight"}, "linear_stats")
    ctx.set_materialize_grads(False)
    ctx.scale, ctx.want_class_sum, ctx.options = scale, want_class_sum, dict(keyword_only_inputs)
    for want in OPTIONAL:
        setattr(ctx, want, ctx.options.pop(want))
    of = RowStats(*output)
    operands = input, weight, bias, index, class_weight
    saved = of.lse, of.residual, of.expectation, of.entropy, of.argmax
    ctx.save_for_backward(*operands, *map(_without_node, saved))
    ctx.mark_non_differentiable(of.residual, of.argmax)


def _without_node(output: Tensor) -> Tensor:
    """An output that is saved: a hook that keeps it as it is would keep the node, until a backward comes to that.

    None does where it is taken for what normalises logits, through which no gradient flows.
    """
    return output.detach() if type(output) is Tensor else output  # which is traced


def _stats_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    refuse_second_order("linear_stats")
    input, weight, bias, index, class_weight, lse, residual, expectation, entropy, argmax = ctx.saved_tensors
    nothing = (None,) * 5
    given = RowStats(*gradients)  # type: ignore[arg-type]  # None for what was not used
    g_lse, g_picked, g_log_prob = given.lse, given.picked, given.log_prob
    g_class_sum = given.class_sum if ctx.want_class_sum else None
    g_log_prob_sum = given.log_prob_sum if ctx.want_log_prob_sum else None
    g_expectation = given.expectation if ctx.want_expectation else None
    g_entropy = given.entropy if ctx.want_entropy or ctx.want_expectation else None
    g_top = given.top if ctx.want_top else None
    wanted = g_lse, g_picked, g_log_prob, g_class_sum, g_log_prob_sum, g_expectation, g_entropy, g_top
    if all(g is None for g in wanted):
        return None, None, None, *nothing
    g_lse = torch.zeros_like(lse) if g_lse is None else g_lse
    g_picked = torch.zeros(index.shape, dtype=lse.dtype, device=lse.device) if g_picked is None else g_picked
    if g_log_prob is not None:  # log_prob = picked - lse wherever there is an index
        g_log_prob = torch.where(index >= 0, g_log_prob, 0.0)
        g_lse = g_lse - g_log_prob.sum(1)
        g_picked = g_picked + g_log_prob
    if g_log_prob_sum is not None:  # log_prob_sum = class_sum - lse, so many times
        total = total_weight(class_weight, weight.shape[0], lse.dtype)
        g_lse = g_lse - torch.where(g_log_prob_sum == 0, 0.0, g_log_prob_sum * total)
        g_class_sum = g_log_prob_sum if g_class_sum is None else g_class_sum + g_log_prob_sum
    if g_expectation is not None:  # expectation = lse - entropy
        g_lse = g_lse + g_expectation
        g_entropy = -g_expectation if g_entropy is None else g_entropy - g_expectation
    if g_top is not None:  # top is the logit at argmax
        index = torch.cat((index, argmax[:, None]), 1)
        g_picked = torch.cat((g_picked, g_top[:, None]), 1)
    needs = ctx.needs_input_grad[:3]
    grads = linear_stats_backward(
        input, weight, bias, index, class_weight, ctx.scale, lse, residual, g_lse, g_picked, g_class_sum, *needs,
        entropy=None if g_entropy is None else entropy, g_entropy=g_entropy,
        expectation=None if g_expectation is None else expectation, **ctx.options,
    )  # fmt: skip
    return *if_needed(grads, needs), *nothing


# The arguments of both losses that have no gradient.
_CONSTANTS = {4: "class_weight", 6: "c_log_prob", 7: "c_log_prob_sum"}


def _loss_setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    input, weight, bias = inputs[:3]
    _refuse_differentiable(ctx, _CONSTANTS, "linear_loss")
    made = inputs[8:]
    if any(need and not have for need, have in zip(ctx.needs_input_grad[:3], made, strict=True)):
        raise errors.gradient_not_made("linear_loss")
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.dtypes = (input.dtype, weight.dtype, None if bias is None else bias.dtype)
    ctx.save_for_backward(*output[1:], *inputs[6:8])


def _of_rows(g: Tensor, *coefficients: Tensor | None) -> Tensor:
    """``g``, or 0 if no row has a coefficient: it may be infinite then, or NaN, and gradients are 0 all the same."""
    counted = functools.reduce(torch.logical_or, (c.any() for c in coefficients if c is not None))
    return torch.where(counted, g, 0.0)


def _loss_backward(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Any, ...]:
    refuse_second_order("linear_loss")
    if g is None:
        return (None,) * 11
    *made, c_log_prob, c_log_prob_sum = ctx.saved_tensors
    g = _of_rows(g, c_log_prob, c_log_prob_sum)
    # Out of place: the saved gradients must survive for a second backward through a retained graph.
    grads = (
        scaled(saved, g).to(dtype) if need else None
        for saved, dtype, need in zip(made, ctx.dtypes, ctx.needs_input_grad[:3], strict=True)
    )
    return *grads, *(None,) * 8


def _exponentials_setup(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]
) -> None:
    _refuse_differentiable(ctx, _CONSTANTS, "linear_loss_exponentials")
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.scale = inputs[5]
    ctx.save_for_backward(*inputs[:5], *inputs[6:8], *output[1:])


def _exponentials_backward(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Any, ...]:
    refuse_second_order("linear_loss_exponentials")
    nothing = (None,) * 5
    if g is None:
        return None, None, None, *nothing
    *saved, e, gathered, factor, own, order, length, row_sum = ctx.saved_tensors
    operands, coefficients = saved[:5], saved[5:]
    kept = e, gathered, factor, own, order, length, row_sum
    needs = ctx.needs_input_grad[:3]
    g = _of_rows(g, *coefficients)
    grads = linear_loss_exponentials_backward(*operands, ctx.scale, coefficients[1], g, *kept, *needs)
    return *if_needed(grads, needs), *nothing


differentiable(linear_stats, _stats_backward, _stats_setup)
differentiable(linear_loss, _loss_backward, _loss_setup)
differentiable(linear_loss_exponentials, _exponentials_backward, _exponentials_setup)


# --- which code runs where ------------------------------------------------------------------------------------

_on_both: tuple[tuple[OpOverload, Any, Any], ...] = (
    (linear_stats, chunked.linear_stats, cuda.linear_stats),
    (linear_stats_backward, chunked.linear_stats_backward, cuda.linear_stats_backward),
    (linear_loss, chunked.linear_loss, cuda.linear_loss),
)
_on_gpus: tuple[tuple[OpOverload, Any], ...] = (
    (linear_loss_exponentials, cuda.linear_loss_exponentials),
    (linear_loss_exponentials_backward, cuda.linear_loss_exponentials_backward),
    (linear_softmax, softmax_cuda.linear_softmax),
    (linear_softmax_backward, softmax_cuda.linear_softmax_backward),
    (linear_divergence, divergence_cuda.linear_divergence),
    (linear_divergence_backward, divergence_cuda.linear_divergence_backward),
)
for _op, _cpu, _cuda in _on_both:
    implement(_op, "cpu", _cpu)
    implement(_op, "cuda", _cuda)
for _op, _cuda in _on_gpus:
    implement(_op, "cuda", _cuda)

# What can be rehearsed (``kernels.launcher.rehearse``), by the op: ``scaled`` becomes ``scale_`` where it can.
_by_op = {op: on_cuda for op, *_, on_cuda in (*_on_both, *_on_gpus)}
_together = (
    linear_stats,
    linear_stats_backward,
    linear_loss,
    linear_loss_exponentials,
    linear_loss_exponentials_backward,
)
can_be_rehearsed: dict[OpOverload, Any] = {
    check_index: _check_index_cuda,
    scaled: scale_cuda_,
    **{op: cuda.where_described(_by_op[op]) for op in _together},
}
