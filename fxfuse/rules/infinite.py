"""Masks of infinite logits, and terms of comparisons that such are left out of, as in MiniLLM's and DistiLLM's losses.

Entry by entry only the logits know where they are infinite. What a fused op leaves out of its sums is where those of
either head are, so a mask must say no more than that, and no less where it matters.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch

from ..algebra import ClassTensor, Comparison, Infinite, InfiniteOfEither, Logits, WeighedLogProbs, become
from . import Call, rule
from .two_heads import of_two, own_terms


@rule(torch.isinf, "isinf")
def isinf(call: Call, input: Any) -> ClassTensor:
    if not isinstance(input, Logits):
        call.keep("unknown_reader", f"{call.name} of something other than logits")
    if input.row_shifts:  # of which the statistics are taken without
        call.keep("unknown_reader", f"{call.name} of logits with a number added to each row")
    return become(Infinite, input, call.name, dtype=call.out.dtype, requires_grad=False)


@rule(operator.or_, torch.logical_or, torch.bitwise_or, "logical_or", "bitwise_or", "__or__",
      tracked=("input", "other"))  # fmt: skip
def logical_or(call: Call, input: Any, other: Any) -> ClassTensor:
    if not (is_mask(input) and is_mask(other) and isinstance(input, Infinite) and isinstance(other, Infinite)):
        call.keep("unknown_reader")
    return of_two(call, InfiniteOfEither, input, other, dtype=call.out.dtype)


def is_mask(value: Any) -> bool:
    """Whether it says where logits are infinite, and was not made a number of since."""
    return isinstance(value, (Infinite, InfiniteOfEither)) and value.dtype == torch.bool


def left_out(call: Call, input: Any, mask: Any, value: Any) -> Comparison:
    """``masked_fill`` of terms of a comparison with 0, where logits are infinite."""
    if not is_mask(mask) or call.number_in(value) != 0:
        call.keep("unknown_reader")
    masked = mask.sides() if isinstance(mask, InfiniteOfEither) else (mask,)
    if isinstance(input, WeighedLogProbs):
        input = _as_comparison(call, input, masked)
    if not isinstance(input, Comparison):
        call.keep("unknown_reader", f"{call.name} of something other than terms of a comparison")
    student, teacher = input.sides()
    # Where its own logits are infinite the probability in a term is 0, so that the term is 0 without a mask.
    of_teacher, of_student = any(input.terms[:2]), bool(input.terms[2])
    wanted = [side for side, needed in ((student, of_teacher), (teacher, of_student)) if needed]
    known = all(any(one.has_logits_of(side) for side in (student, teacher)) for one in masked)
    if not known or not all(any(side.has_logits_of(one) for one in masked) for side in wanted):
        call.keep("unknown_reader", f"{call.name} with a mask of other logits")
    return replace(input, finite=True, trail=(*input.trail, call.name))


def _as_comparison(call: Call, input: WeighedLogProbs, masked: tuple[ClassTensor, ...]) -> Comparison:
    """Log-probabilities times their probabilities, p log p, as terms of a comparison with the other head of a mask."""
    others = [one for one in masked if not one.has_logits_of(input)]
    if len(masked) != 2 or len(others) != 1:  # else 0 times -inf is left in
        call.keep("unknown_reader", f"{call.name} with a mask of other logits")
    return own_terms(call, input, others[0])
