"""Readers of deferred logits, computed by fused ops from the operands, without the logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import compat
from .algebra import Head, OfTwoHeads, quickly_replace
from .eager import EMIT
from .lazy import State
from .origin import Given, Identity, Origin
from .passes import compute, finished, keeps_much, operands_of, statistics, with_sums
from .readers import Beside, Reader, Statistics
from .rules import Call

Found = dict[Head, tuple[Origin, Head]]
MOST_KEPT = 64  # selections of rows whose log-sum-exp an output remembers


def heads_for(states: list[State], call: Call, readers: tuple[Reader, ...]) -> Found:
    """For each head that readers are of, its origin and the head to compute them from, the readers' own first.

    Refused where they cannot be computed from the operands.

    Raises:
        StaleLogitsError: as ``Operands.as_they_were``.
    """
    source = readers[0].source
    requires_grad = wants_gradients(call, readers)
    origins = {origin.operands.head: origin for state in states for origin in state.origins}
    others = [operand for reader in readers for operand in reader.operands]
    for operand in (*others, *(head.input for head in source.heads())):
        if not compat.is_plain(operand) or operand.device != source.head.input.device:
            call.keep("subclass")
    found: Found = {}
    for head, trained in source.heads().items():
        if isinstance(readers[0], Beside):  # which takes only sizes of it
            found[head] = origins[head], head
            continue
        operands = origins[head].operands
        trained &= requires_grad
        as_they_were = operands.as_they_were()
        if trained and operands.are_copied():
            call.keep("operand_mutated", "an optimizer's step")  # as in eager, the backward must complain
        now = operands.for_gradients() if trained else as_they_were
        if now is None:
            call.keep("operand_mutated", "a change of what requires a gradient")
        found[head] = origins[head], _saveable(now) if requires_grad else now
    return found


def _saveable(head: Head) -> Head:
    """The same with operands that a backward may keep: what eager keeps are the logits, which it can."""
    parts = {name: getattr(head, name) for name in ("input", "weight", "bias")}
    made = {name: part.clone() for name, part in parts.items() if part is not None and part.is_inference()}
    return replace(head, **made) if made else head


def _noting(reader: Reader, given: list[Given]) -> Reader:
    """The same, which adds to ``given`` what it returns that are entries of its source."""
    if reader.entries is None:
        return reader

    def finish(emit: Any, stats: Statistics, index: Any) -> Any:
        given.append(Given.by(reader, stats, index))
        return reader.finish(emit, stats, index)

    return replace(reader, finish=finish)


def _has_room(origin: Origin, readers: tuple[Reader, ...]) -> bool:
    """Whether they may keep a gradient of the weight until the backward: the first loss of an output may.

    None after that may, though that gradient may be gone.
    """
    if not readers[0].source.head.weight.requires_grad or not keeps_much(readers, origin.memory):
        return True
    first = not origin.keeps_gradient
    origin.keeps_gradient = True
    return first


def wants_gradients(call: Call, readers: tuple[Reader, ...]) -> bool:
    """Whether gradients may come back to what is read; to the best class, which is a whole number, none do."""
    outs = call.out if isinstance(call.out, tuple) else (call.out,)
    values = readers[0].source.requires_grad and not isinstance(readers[0], Beside)
    return values and torch.is_grad_enabled() and any(out.dtype.is_floating_point for out in outs)


def read(call: Call, readers: tuple[Reader, ...], found: Found) -> list[Tensor]:
    """What ``readers`` of the same logits return, by a fused op from operands of the heads that were ``found``.

    The caller holds the locks of their origins.
    """
    source = readers[0].source
    origin, _ = found[source.head]
    grad = wants_gradients(call, readers)
    level = quickly_replace(source, row_shifts=())  # what is added to a row is added to its log-sum-exp
    key = (level.row_key(), level.logits_key(), grad)
    source = quickly_replace(source.with_heads(lambda head: found[head][1]), requires_grad=grad)
    given: list[Given] = []
    sums: Statistics | None = None
    computed = tuple(quickly_replace(_noting(reader, given), source=source) for reader in readers)
    reader = computed[0]
    # What readers of the same rows could share.
    shares = not reader.is_alone and not isinstance(source, OfTwoHeads)
    # But eager keeps nothing for the gradient of what is added to the classes, so that a backward for that alone frees
    # nothing that others need: not with what the program added, nor with a bias that alone requires a gradient.
    added = [handle for op in source.class_ops if op.shifts for handle in op.handles if isinstance(handle, Tensor)]
    shares &= not grad or not any(handle.requires_grad for handle in added)
    shares &= not grad or any(head.input.requires_grad or head.weight.requires_grad for head in source.heads())
    kept = origin.log_sum_exps_of(grad) if shares and not compat.saving_is_watched() else {}
    known, made_with = kept.get(key, (None, None))
    if made_with is not None and not made_with.is_alive():
        known = None
    more = reader.index is not None or reader.want_top or reader.chosen is not None
    more |= reader.want_expectation or reader.want_entropy
    if known is not None and not more and not (reader.sums_classes and source.transform):
        stats = with_sums(EMIT, known, operands_of(EMIT, source), source) if reader.sums_classes else known
        results = [finished(EMIT, reader, stats, None)]
    elif shares and reader.coefficients is None and reader.chosen is None:
        results, sums = statistics(EMIT, computed, operands_of(EMIT, source), origin.memory)
    else:
        room = not grad or _has_room(origin, computed)
        _, results = compute(EMIT, computed, in_checkpoint=False, memory=origin.memory, room=room)
    # In memory of its own: the backward may need what it was made of.
    outs = call.out if isinstance(call.out, tuple) else (call.out,)
    results = [
        result.to(out.dtype, copy=True, memory_format=torch.contiguous_format)
        for result, out in zip(results, outs, strict=True)
    ]
    if not isinstance(reader, Beside):
        for one, _ in found.values():
            one.operands.were_not_written_to()
    # Else it would be that of some of the rows.
    if sums is not None and not reader.skip_unindexed and not (grad and origin.may_lead_back(level)):
        kept[key] = sums, Identity.of(level, key)
        if len(kept) > MOST_KEPT:
            del kept[next(iter(kept))]  # the oldest
    origin.note(given)
    for one, _ in found.values():
        one.bypassed |= grad
        for result in results:
            for hook in (*one.signals, *one.factors) if result.requires_grad else ():
                result.register_hook(hook)
    origin.remember(readers, results, grad)
    return results
