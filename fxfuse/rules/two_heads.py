"""What is made of two distributions over one vocabulary, of two heads or of one: mixtures of them, and comparisons."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ..algebra import (
    ClassTensor,
    Comparison,
    LogProbs,
    LogRatio,
    Mixture,
    OfTwoHeads,
    Probs,
    ShiftedLogProbs,
    WeighedLogProbs,
    become,
    derive,
)
from ..compat import same
from . import Call, rule
from .casts import converted


def of_two(
    call: Call,
    kind: type[OfTwoHeads],
    one: ClassTensor,
    other: ClassTensor,
    dtype: torch.dtype | None = None,
    **fields: Any,
) -> Any:
    """What is of ``kind``, with the logits of ``one`` for the student's and of ``other`` for the teacher's."""
    shapes = len(one.shape) == len(other.shape) and all(map(same, one.shape, other.shape))
    if not shapes or one.class_dim != other.class_dim:
        call.keep("unknown_reader", f"{call.name} of distributions that are not of the same shape")
    if one.head.dtype != other.head.dtype:
        call.keep("dtype", f"{call.name} of logits of {one.head.dtype} and {other.head.dtype}")
    if dtype is None:
        dtype = converted(call, one, call.out.dtype if call.out.dim() == len(one.shape) else one.dtype)
    flows = {"requires_grad": one.requires_grad or other.requires_grad, "student_requires_grad": one.requires_grad}
    return become(kind, one, call.name, dtype=dtype, teacher=other, **flows, **fields)


# --- mixtures ---------------------------------------------------------------------------------------------------


def shifted(call: Call, input: ClassTensor, number: float | None) -> ClassTensor:
    """Log-probabilities, or those of a mixture, plus a number: of so many times the probabilities."""
    if number == 0.0:  # with which ``sum`` begins
        return derive(input, call.name, dtype=converted(call, input, call.out.dtype))
    is_log = isinstance(input, ShiftedLogProbs) or (isinstance(input, Mixture) and input.log)
    if number is None or not (is_log or (isinstance(input, LogProbs) and input.factor == 1.0)):
        call.keep("unknown_reader")
    if not -700.0 < number < 700.0:  # or its exponential would be 0 or infinite
        call.keep("unsupported_argument", f"{call.name} adds {number} to log-probabilities")
    return weighted(call, input, math.exp(number))


def weighted(call: Call, input: ClassTensor, weight: float) -> ClassTensor:
    """The same of ``weight`` times the probabilities."""
    dtype = converted(call, input, call.out.dtype)
    if isinstance(input, Mixture):
        weights = _positive(call, *(weight * one for one in input.weights))
        return derive(input, call.name, dtype=dtype, weights=weights)
    (factor,) = _positive(call, weight * input.factor)
    return become(ShiftedLogProbs, input, call.name, dtype=dtype, factor=factor)


def _positive(call: Call, *weights: float) -> tuple[float, ...]:
    if not all(0.0 < weight < math.inf for weight in weights):
        call.keep("unsupported_argument", f"{call.name} weighs probabilities by {weights[0]}")
    return weights


def _mixed(call: Call, one: Any, other: Any, log: bool) -> Mixture:
    kinds = (LogProbs, ShiftedLogProbs) if log else (Probs,)
    if type(one) not in kinds or type(other) not in kinds:
        call.keep("unknown_reader", f"{call.name} of something other than probabilities of two heads")
    if any(isinstance(side, LogProbs) and side.factor != 1.0 for side in (one, other)):
        call.keep("unknown_reader", f"{call.name} of scaled log-probabilities")
    weights = _positive(call, one.factor, other.factor)
    return of_two(call, Mixture, one, other, factor=1.0, weights=weights, log=log)


@rule(torch.logaddexp, "logaddexp", tracked=("input", "other"))
def logaddexp(call: Call, input: Any, other: Any) -> ClassTensor:
    return _mixed(call, input, other, log=True)


def can_be_mixed(tensors: Any) -> bool:
    """Whether a stack of these may be read by ``mixed_by_logsumexp``, and not otherwise."""
    kinds = [type(tensor) for tensor in tensors]
    if len(kinds) != 2 or not set(kinds) <= {LogProbs, ShiftedLogProbs}:
        return False
    return ShiftedLogProbs in kinds or not tensors[0].head.shares_classes_with(tensors[1].head)


def mixed_by_logsumexp(call: Call, stacked: tuple[Any, ...], dim: Any, keepdim: Any) -> ClassTensor:
    """``logsumexp`` of log-probabilities that were stacked along a first axis, along that axis."""
    if dim not in (0, (0,), [0]) or keepdim or len(stacked) != 2:
        call.keep("unknown_reader", f"{call.name} of what was stacked")
    return _mixed(call, *stacked, log=True)


def summed(call: Call, one: ClassTensor, other: ClassTensor) -> ClassTensor:
    """Probabilities of two heads, or terms of two comparisons of the same, added up."""
    if isinstance(one, Probs) and isinstance(other, Probs):
        return _mixed(call, one, other, log=False)
    one, other = _as_comparisons(call, one, other)
    if not one.has_logits_of(other) or one.requires_grad != other.requires_grad:
        call.keep("unknown_reader", f"{call.name} of comparisons of different logits")
    a, b, c = (one.factor * mine + other.factor * theirs for mine, theirs in zip(one.terms, other.terms, strict=True))
    return derive(one, call.name, dtype=converted(call, one, call.out.dtype), factor=1.0, terms=(a, b, c))


def _as_comparisons(call: Call, one: ClassTensor, other: ClassTensor) -> tuple[Comparison, Comparison]:
    """Both as terms of comparisons with one mixture, where they are what every mixture has in common: p log p."""
    if isinstance(one, WeighedLogProbs) and isinstance(other, Comparison):
        one = own_terms(call, one, other.sides()[0])
    elif isinstance(other, WeighedLogProbs) and isinstance(one, Comparison):
        other = own_terms(call, other, one.sides()[0])
    if not isinstance(one, Comparison) or not isinstance(other, Comparison):
        call.keep("unknown_reader", f"{call.name} of logits to logits")
    if one.is_of_teacher_alone():
        return _with_student_of(one, other), other
    return one, _with_student_of(other, one) if other.is_of_teacher_alone() else other


def own_terms(call: Call, input: WeighedLogProbs, student: ClassTensor) -> Comparison:
    """p log p, as what a divergence from any ``student`` and its cross entropy have apart."""
    own = become(Probs, input, call.name, factor=1.0, trail=input.trail)
    return of_two(call, Comparison, student, own, terms=(1.0, -1.0, 0.0), factor=input.factor)


def _with_student_of(terms: Comparison, other: Comparison) -> Comparison:
    """``terms`` of the teacher alone beside ``other``'s student, if they are of its logits."""
    own, teacher = terms.sides()[1], other.sides()[1]
    alike = own.has_logits_of(teacher) and own.requires_grad == teacher.requires_grad
    # What is left out where the student's logits are infinite is so of one student.
    same_student = not terms.finite or terms.sides()[0].has_logits_of(other.sides()[0])
    if not alike or not same_student or terms.finite != other.finite:
        return terms
    return replace(other, terms=terms.terms, factor=terms.factor, trail=terms.trail)


# --- ratios -----------------------------------------------------------------------------------------------------


def ratio(call: Call, one: ClassTensor, other: ClassTensor) -> LogRatio:
    """Log-probabilities less others', or less those of a mixture."""
    if isinstance(one, Mixture) or isinstance(other, Mixture):
        return _ratio_to_a_mixture(call, one, other)
    sides = (one, other)
    if any(not isinstance(side, LogProbs) or side.factor != 1.0 for side in sides):
        call.keep("unknown_reader", f"{call.name} of logits by logits")
    if any(op.shifts for side in sides for op in side.class_ops):  # of masked classes eager's is not a number
        call.keep("unknown_reader", f"{call.name} of log-probabilities of masked or shifted logits")
    return of_two(call, LogRatio, one, other)


def _ratio_to_a_mixture(call: Call, one: ClassTensor, other: ClassTensor) -> LogRatio:
    """Log-probabilities less those of a mixture that they are a part of, or the other way around."""
    part, mixture, sign = (one, other, 1.0) if isinstance(other, Mixture) else (other, one, -1.0)
    if not isinstance(mixture, Mixture) or not mixture.log or not isinstance(part, LogProbs) or part.factor != 1.0:
        call.keep("unknown_reader", f"{call.name} of a mixture and something other than log-probabilities")
    of_student = _is_of_student(call, mixture, part)
    if any(op.shifts for one in mixture.sides() for op in one.class_ops):  # of masked classes eager's is not a number
        call.keep("unknown_reader", f"{call.name} of log-probabilities of masked or shifted logits")
    flows = {"requires_grad": mixture.requires_grad, "student_requires_grad": mixture.student_requires_grad}
    made = {"weights": mixture.weights, "of_student": of_student, "factor": sign}
    dtype = converted(call, mixture, call.out.dtype)
    return become(LogRatio, mixture, call.name, dtype=dtype, teacher=mixture.teacher, **flows, **made)


def _is_of_student(call: Call, mixture: Mixture, part: ClassTensor) -> bool:
    """Whether ``part``, which has the logits of one side of a mixture, has the student's."""
    student, teacher = mixture.sides()
    of_student = part.has_logits_of(student)
    side = student if of_student else teacher
    if not part.has_logits_of(side) or part.requires_grad != side.requires_grad:
        call.keep("unknown_reader", f"{call.name} of a mixture and something other than a part of it")
    return of_student


def expected(call: Call, probs: ClassTensor, ratio: LogRatio) -> Comparison:
    """Probabilities of one of both heads times their log-ratio: the terms of a divergence, ``p (log p - log q)``."""
    one, other = ratio.sides()
    if ratio.weights is not None:
        own = one if ratio.of_student else other
        if not probs.has_logits_of(own):
            call.keep("unknown_reader", f"{call.name} of a log-ratio and probabilities of another head")
        fields = {f: getattr(ratio, f) for f in OfTwoHeads.__dataclass_fields__} | {"factor": 1.0}
        terms = compared(call, Mixture(**fields, weights=ratio.weights), probs, divergence=True)
        return replace(terms, factor=terms.factor * ratio.factor)
    is_of_one = probs.has_logits_of(one)
    own, against = (one, other) if is_of_one else (other, one)
    if not probs.has_logits_of(own):
        call.keep("unknown_reader", f"{call.name} of a log-ratio and probabilities of neither")
    if probs.requires_grad != own.requires_grad and call.out.requires_grad:
        call.keep("unknown_reader", f"{call.name} of logits by detached ones")
    terms = compared(call, against, probs, divergence=True)
    return replace(terms, factor=terms.factor * (ratio.factor if is_of_one else -ratio.factor))


# --- comparisons ------------------------------------------------------------------------------------------------


def compared(call: Call, input: ClassTensor, target: ClassTensor, divergence: bool) -> Comparison:
    """What compares the distribution ``input``, or a mixture, with the probabilities ``target``."""
    if target.factor != 1.0 or (divergence and input.factor != 1.0):
        call.keep("unknown_reader", f"{call.name} of scaled probabilities")
    terms = (1.0, 0.0, 0.0) if divergence else (0.0, -1.0, 0.0)
    if not isinstance(input, Mixture):
        return of_two(call, Comparison, input, target, terms=terms)
    total = math.fsum(input.weights)
    rounding = 4 * torch.finfo(input.dtype).eps  # of the logarithms of the weights, which eager adds in that dtype
    if not input.log or abs(total - 1.0) > rounding:
        call.keep("unknown_reader", f"{call.name} of a mixture whose weights add up to {total:g}")
    student, teacher = input.sides()
    of_student = _is_of_student(call, input, target)
    if of_student and not divergence:  # the op has the cross entropy of the teacher alone
        if target.has_logits_of(teacher):
            call.keep("unknown_reader", f"{call.name} of a mixture of equal parts")
        return compared(call, input.turned(), target, divergence)
    flows = {"requires_grad": student.requires_grad or teacher.requires_grad}
    flows["student_requires_grad"] = student.requires_grad
    dtype = converted(call, input, call.out.dtype if call.out.dim() == len(input.shape) else input.dtype)
    return become(
        Comparison,
        input,
        call.name,
        dtype=dtype,
        teacher=teacher,
        share=input.weights[1] / total,
        terms=(0.0, 0.0, 1.0) if of_student else terms,
        **flows,
    )
