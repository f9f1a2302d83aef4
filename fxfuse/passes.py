"""One pass over the logits of a head for one or more readers: which op computes it, and with what."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from . import compat, ops
from .algebra import ClassTensor, Comparison, Exponentials, Logits, LogProbs, Targeted, WeighedLogits
from .ops.contract import RowStats, acc_dtype, stash_dtype
from .ops.cuda import keeps_exponentials
from .readers import Beside, Coefficients, Reader, Statistics, Whole, with_offset
from .replay import Emit, Handle
from .transform import encode

IN_FORWARD = "gradients in forward"
KEPT = "exponentials kept for the backward"
RECOMPUTED = "recompute in backward"
FORWARD_ONLY = "forward only"
WHOLE = "all entries, normalised in place"
WITHOUT_LOGITS = "without a product"
BESIDE = "not of logits"


def leading(readers: Sequence[Reader]) -> ClassTensor:
    """The source by which one pass for ``readers`` is computed: one with gradients, if any has."""
    return next((reader.source for reader in readers if reader.source.requires_grad), readers[0].source)


def computes_again(readers: Sequence[Reader], memory: int, room: bool = True) -> bool:
    """Whether the backward of ``readers`` in one pass reads the operands again."""
    return leading(readers).requires_grad and not (room and _may_make_gradients_in_forward(readers, memory))


def _may_make_gradients_in_forward(readers: Sequence[Reader], memory: int) -> bool:
    """Whether what they return is one number, so that one pass can make its gradients too."""
    return len(readers) == 1 and readers[0].coefficients is not None and memory == 0


def keeps_much(readers: Sequence[Reader], memory: int) -> bool:
    """Whether a gradient of the weight that they make in the forward is larger than what eager keeps of their loss.

    That is its log-probabilities. A gradient stays until the backward, so each weight may have one such only.
    """
    source = leading(readers)
    if not _may_make_gradients_in_forward(readers, memory) or not all(map(compat.is_known, source.shape)):
        return False
    vocab, elements = compat.hint(source.vocab), math.prod(map(compat.hint, source.shape))
    return vocab * source.hidden * stash_dtype(source.head.dtype).itemsize > elements * source.dtype.itemsize


def compute(
    emit: Emit,
    readers: Sequence[Reader],
    in_checkpoint: bool,
    memory: int,
    room: bool = True,
    own: Sequence[Emit] = (),
) -> tuple[str, list[Handle]]:
    """Emit what ``readers``, which read the same rows of a head, return; by ``own``, what is for each of them alone.

    A single scalar reader gets its gradients in the forward pass, or from what that keeps. Under activation
    checkpointing the forward runs twice, so there they are computed in the backward; and where ``memory`` bounds the
    bytes of their buffers, or there is no ``room`` for a gradient of the weight between forward and backward.

    Returns:
        The variant, and one handle a reader, in shape as in eager, in the accumulation dtype.
    """
    source = leading(readers)
    own = own or [emit] * len(readers)
    if isinstance(readers[0], Beside):
        return BESIDE, [readers[0].finish(emit, Statistics(), None)]
    if isinstance(readers[0], Whole):
        return WHOLE, [_whole(emit, readers[0], _level(emit, source), memory)]
    if isinstance(source, Comparison):
        return _comparison(emit, readers, source, memory, own)
    prepared = operands_of(emit, source)
    if readers[0].chosen is not None:
        trained = source.requires_grad and any(h is not None and emit.example(h).requires_grad for h in prepared)
        return (RECOMPUTED if trained else FORWARD_ONLY), _chosen(emit, readers, prepared, memory, own)
    if all(map(_only_sums, readers)) and not source.transform:
        stats = with_sums(emit, Statistics(), prepared, source)
        return WITHOUT_LOGITS, [
            _finished_of(emit, r, stats, None, source) for emit, r in zip(own, readers, strict=True)
        ]
    # A shift may require what the rows do not.
    level = _level(emit, source) if source.row_shifts and len(readers) == 1 else prepared
    needs = [source.requires_grad and h is not None and bool(emit.example(h).requires_grad) for h in level]
    if _may_make_gradients_in_forward(readers, memory if any(needs) else 0) and not (in_checkpoint and any(needs)):
        loss = _loss(emit, readers[0], level, needs, room)
        if loss is not None:
            return loss[0], [loss[1]]
    return (RECOMPUTED if any(needs) else FORWARD_ONLY), statistics(emit, readers, prepared, memory, own)[0]


def multiplied(readers: Sequence[Reader]) -> tuple[ClassTensor, ...]:
    """The logits that one pass for ``readers`` computes, by a product each."""
    source = leading(readers)
    if isinstance(readers[0], Beside) or (all(map(_only_sums, readers)) and not source.transform):
        return ()
    return source.sides() if isinstance(source, Comparison) else (source,)


def why(variant: str, readers: Sequence[Reader], trained: bool, in_checkpoint: bool, memory: int) -> str:
    """Why ``compute`` chose ``variant``, in words; ``trained``: the hidden states or the weight require a gradient."""
    first = readers[0]
    name = first.name.partition("(")[0]
    if variant == WHOLE:
        return f"every entry of {name} is needed, and takes the place of its logits in memory"
    if variant == WITHOUT_LOGITS:
        return "the sum of a row's logits is its hidden state times the sum of the weight's rows"
    if variant == FORWARD_ONLY:
        if trained:
            return f"{name} has no gradient, or gradients are off here (torch.no_grad)"
        return "neither the hidden states nor the weight requires a gradient"
    if variant == IN_FORWARD:
        return f"{name} is one number, so its gradients are made beside it"
    if variant == KEPT:
        return f"{name} is one number, so its gradients are made of what the forward keeps"
    if isinstance(first.source, Comparison):
        return f"{name} compares two distributions, of which the backward computes the logits again, a chunk at a time"
    if len(readers) > 1:
        return f"{len(readers)} readers share one pass, and only the backward knows the gradient of each"
    if first.coefficients is None:
        return "what is read is a number for each row, the gradient of which only the backward knows"
    if in_checkpoint:
        return "the forward of a checkpointed function runs twice, so its gradients are made in the backward"
    if memory:
        return f"fxfuse.memory bounds the buffers for gradients to {memory:,} bytes"
    return f"another loss keeps a gradient of this weight, and one more is larger than what eager keeps of {name}"


def _only_sums(reader: Reader) -> bool:
    """Whether it returns sums of logits over the vocabulary, and nothing else."""
    more = reader.index is not None or reader.class_weight is not None
    return type(reader.source) is Logits and reader.want_class_sum and not more


def with_sums(emit: Emit, known: Statistics, operands: tuple[Handle, ...], source: ClassTensor) -> Statistics:
    """With the sums of logits that are linear in the operands, and of log-probabilities where a log-sum-exp is known.

    They take no logits, x · sum_j w_j. Not by a product, whose precision autocast would lower, but in float64 for
    float32, as far as it takes no copy of the weight: what all logits of a row have in common is in the log-sum-exp
    too, and what is left of their difference may be far less. The scale is rounded as it is for logits.
    """
    x, w, b = operands
    acc = acc_dtype(source.head.dtype)
    wide = torch.float64 if source.head.dtype == torch.float32 else acc
    column = emit(torch.sum, w, 0, dtype=acc)
    if wide == acc:
        total = emit(torch.sum, emit(torch.mul, emit(torch.Tensor.to, x, acc), column), 1)
    else:  # in which autocast leaves products alone
        total = emit(torch.mv, emit(torch.Tensor.to, x, wide), emit(torch.Tensor.to, column, wide))
    if b is not None:
        total = emit(torch.add, total, emit(torch.sum, b, dtype=wide))
    if source.scale != 1.0:
        total = emit(torch.mul, total, source.scale if acc == torch.float64 else ctypes.c_float(source.scale).value)
    less = None
    if known.lse is not None:
        lse = emit(torch.add, emit(torch.Tensor.to, known.lse, torch.float64), known.residual)
        less = emit(torch.Tensor.to, emit(torch.sub, total, lse, alpha=source.vocab), acc)
    return replace(known, class_sum=emit(torch.Tensor.to, total, acc), log_prob_sum=less)


def _whole(emit: Emit, reader: Whole, operands: tuple[Handle, ...], memory: int) -> Handle:
    source = reader.source
    log, dtype = isinstance(source, LogProbs), source.dtype
    out = emit(
        ops.linear_softmax,
        *operands,
        source.scale,
        log,
        dtype,
        **_options(source, memory),
    )
    # In the shape of the hidden states but for the last axis, which may be symbolic everywhere else.
    rows = source.to_last(emit, source.hidden_states(emit))
    sizes = [emit(torch.Tensor.size, rows, i) for i in range(len(source.shape) - 1)]
    out = emit(torch.reshape, out, (*sizes, source.vocab))
    return source.from_last(emit, out)


def _chosen(
    emit: Emit, readers: Sequence[Reader], operands: tuple[Handle, ...], memory: int, own: Sequence[Emit]
) -> list[Handle]:
    """What readers of the largest or smallest logits of each row return."""
    source, chosen = readers[0].source, readers[0].chosen
    assert chosen is not None
    options = _options(source, memory)
    out = emit(ops.linear_topk, *operands, source.scale, *chosen, **options)
    values, index, lse, residual = (emit(operator.getitem, out, i) for i in range(4))
    log_prob = values
    # Of an infinite log-sum-exp all log-probabilities are NaN.
    for one in (lse, residual, emit(torch.sub, lse, lse)):
        log_prob = emit(torch.sub, log_prob, emit(torch.unsqueeze, one, 1))
    stats = Statistics(lse=lse, picked=values, log_prob=log_prob)
    return [finished(emit, reader, stats, index) for emit, reader in zip(own, readers, strict=True)]


def _comparison(
    emit: Emit, readers: Sequence[Reader], source: Comparison, memory: int, own: Sequence[Emit]
) -> tuple[str, list[Handle]]:
    student, teacher = source.sides()
    operands, others = _level(emit, student), _level(emit, teacher)
    options = {
        "share": source.share,
        "finite": source.finite,
        "transform": encode(student.transform),
        "teacher_transform": encode(teacher.transform),
        "memory": memory,
    }
    options = {name: value for name, value in options.items() if value}
    out = emit(ops.linear_divergence, *operands, student.scale, *others, teacher.scale, **options)
    kl, cross_entropy, student_kl = (emit(operator.getitem, out, i) for i in range(3))
    stats = Statistics(kl=kl, cross_entropy=cross_entropy, student_kl=student_kl)
    needs = any(h is not None and bool(emit.example(h).requires_grad) for h in (*operands, *others))
    results = [reader.finish(emit, stats, None) for emit, reader in zip(own, readers, strict=True)]
    return (RECOMPUTED if needs else FORWARD_ONLY), results


def operands_of(emit: Emit, source: ClassTensor) -> tuple[Handle, Handle, Handle]:
    """Hidden states ``[N, D]``, weight ``[V, D]`` and bias ``[V]`` in the dtype of the logits.

    A bias that the program added to the logits keeps its precision.
    """
    head = source.head

    def ready(handle: Handle, dtype: torch.dtype) -> Handle:
        if handle is None:
            return None
        if not source.requires_grad and (head.cut_off or emit.example(handle).requires_grad):
            handle = emit(torch.detach, handle)
        if emit.example(handle).dtype != dtype:
            handle = emit(torch.Tensor.to, handle, dtype)
        return handle

    rows = source.to_last(emit, source.hidden_states(emit))
    weight, bias = source.classes(emit)
    return (
        ready(emit(torch.reshape, rows, (-1, source.hidden)), head.dtype),
        ready(weight, head.dtype),
        ready(bias, acc_dtype(head.dtype) if source.adds_to_classes else head.dtype),
    )


def _row_shift(emit: Emit, source: ClassTensor) -> Handle | None:
    """What is added to all logits of each row in the end, ``[N]`` in the accumulation dtype; None if nothing is."""
    shift = source.row_shift(emit)
    if shift is None:
        return None
    shift = emit(torch.Tensor.to, emit(torch.reshape, source.to_last(emit, shift), (-1,)), acc_dtype(source.head.dtype))
    return shift if source.requires_grad else emit(torch.detach, shift)


def _level(emit: Emit, source: ClassTensor) -> tuple[Handle, Handle, Handle]:
    """The operands of what a shift of all logits of a row does not change.

    Where that is not finite everything of the row is NaN, and its gradient is zero, as nothing of it is there.
    """
    input, weight, bias = operands_of(emit, source)
    shift = _row_shift(emit, source)
    if shift is not None:
        nothing = emit(torch.unsqueeze, emit(torch.sub, shift, shift), 1)
        input = emit(torch.add, input, emit(torch.Tensor.to, nothing, source.head.dtype))
    return input, weight, bias


def finished(emit: Emit, reader: Reader, stats: Statistics, index: Handle | None) -> Handle:
    """What ``reader`` returns, from the statistics of its logits without the shift of rows."""
    source = reader.source
    shift = _row_shift(emit, source)
    if shift is None:
        return reader.finish(emit, stats, index)
    nothing = emit(torch.sub, shift, shift)  # not a number where normalising what was shifted gives none
    kind = source.of if isinstance(source, Targeted) else type(source)
    kept = kind in (Logits, Exponentials, WeighedLogits)
    level = shift if kept else nothing

    def plus(statistic: Handle, more: Handle) -> Handle:
        if statistic is None or more is None:
            return statistic
        return emit(
            torch.add, statistic, emit(torch.unsqueeze, more, 1) if emit.example(statistic).dim() == 2 else more
        )

    # What is left of a log-sum-exp after its shift may be as small as what rounding took from it.
    lse = plus(plus(stats.lse, level), stats.residual if kept else None)
    of_all = emit(torch.mul, level, source.vocab) if reader.want_class_sum else None
    return reader.finish(
        emit,
        replace(
            stats,
            lse=lse,
            picked=plus(stats.picked, level),
            log_prob=plus(stats.log_prob, nothing),
            class_sum=plus(stats.class_sum, of_all),
            log_prob_sum=plus(stats.log_prob_sum, nothing) if reader.want_log_prob_sum else None,
            expectation=plus(stats.expectation, level) if reader.want_expectation else None,
            entropy=plus(stats.entropy, nothing) if reader.want_entropy else None,
            top=plus(stats.top, level) if reader.want_top else None,
        ),
        index,
    )


def _finished_of(emit: Emit, reader: Reader, stats: Statistics, index: Handle | None, source: ClassTensor) -> Handle:
    """The same from statistics of ``source``, that may have gradients where the reader's own source has none."""
    result = finished(emit, reader, stats, index)
    return result if reader.source.requires_grad == source.requires_grad else emit(torch.detach, result)


def _class_weight(emit: Emit, reader: Reader) -> Handle | None:
    if reader.class_weight is None:
        return None
    return emit(torch.Tensor.to, reader.class_weight, acc_dtype(reader.source.head.dtype))


def _options(source: ClassTensor, memory: int = 0) -> dict[str, Any]:
    options = {"transform": encode(source.transform), "memory": memory}
    return {name: value for name, value in options.items() if value}


def _loss(
    emit: Emit, reader: Reader, operands: tuple[Handle, ...], needs: list[bool], room: bool
) -> tuple[str, Handle] | None:
    """The variant and the loss; None where its gradient of the weight would be kept and there is no ``room`` for it."""
    assert reader.index is not None and reader.coefficients is not None
    index = reader.index.make(emit)
    c = reader.coefficients(emit, index)
    weight, scale, options = _class_weight(emit, reader), reader.source.scale, _options(reader.source)
    arguments = *operands, index, weight, scale, c.log_prob, c.log_prob_sum
    # Its backward reads input and weight, which eager's does too only where both need gradients.
    if needs[0] and needs[1] and _keeps_exponentials(emit, operands, index, c, options):
        variant, out = KEPT, emit(ops.linear_loss_exponentials, *arguments, **options)
    elif needs[1] and not room:
        return None
    else:
        variant = IN_FORWARD if any(needs) else FORWARD_ONLY
        out = emit(ops.linear_loss, *arguments, *needs, **options)
    return variant, with_offset(emit, emit(operator.getitem, out, 0), c)


def _keeps_exponentials(
    emit: Emit, operands: tuple[Handle, ...], index: Handle, c: Coefficients, options: dict[str, Any]
) -> bool:
    input, weight = (emit.example(handle) for handle in operands[:2])
    indexed = emit.example(index).shape[1]
    return keeps_exponentials(input, weight, indexed, c.log_prob_sum is not None, options.get("transform", ""))


def statistics(
    emit: Emit, readers: Sequence[Reader], operands: tuple[Handle, ...], memory: int, own: Sequence[Emit] = ()
) -> tuple[list[Handle], Statistics]:
    """What each reader returns, computed from the statistics of one pass; and the log-sum-exp of the rows.

    That is of rows without their shift, which each reader adds by an emit of its ``own``: a shift may be made of what
    another of them returns.
    """
    source = leading(readers)
    columns: dict[Any, slice] = {}  # of each distinct index in the one that the op is given
    parts: list[Handle] = []
    width = 0
    for reader in readers:
        if reader.index is not None and reader.index.key not in columns:
            parts.append(reader.index.make(emit))
            end = width + int(emit.example(parts[-1]).shape[1])
            columns[reader.index.key] = slice(width, end)
            width = end
    if parts:
        index = parts[0] if len(parts) == 1 else emit(torch.cat, parts, 1)
    else:
        index = emit(torch.Tensor.to, emit(torch.narrow, operands[0], 1, 0, 0), torch.int64)
    summing = [reader for reader in readers if reader.sums_classes]
    weight = _class_weight(emit, summing[0]) if summing else None
    skip = all(reader.skip_unindexed for reader in readers)
    scale, options = source.scale, _options(source, memory)
    options |= {name: True for name in ops.OPTIONAL if any(getattr(reader, name) for reader in readers)}
    class_sums = any(reader.want_class_sum for reader in readers)
    out = emit(ops.linear_stats, *operands, index, weight, scale, class_sums, skip, **options)
    found = Statistics(**{name: emit(operator.getitem, out, i) for i, name in enumerate(RowStats._fields)})

    def part(emit: Emit, handle: Handle, reader: Reader) -> Handle:
        if reader.index is None:
            return None
        at = columns[reader.index.key]
        if at.stop - at.start == width:
            return handle
        return emit(torch.narrow, handle, 1, at.start, at.stop - at.start)

    results = []
    for its, reader in zip(own or [emit] * len(readers), readers, strict=True):
        its_picked, its_log_prob, its_index = (
            part(its, of_all, reader) for of_all in (found.picked, found.log_prob, index)
        )
        stats = replace(found, picked=its_picked, log_prob=its_log_prob)
        results.append(_finished_of(its, reader, stats, its_index, source))
    return results, Statistics(lse=found.lse, residual=found.residual)
