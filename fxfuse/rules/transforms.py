"""Pointwise arithmetic that leaves logits logits, and products that leave what is made of them such."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ..algebra import (
    ClampedLogProbs,
    ClassTensor,
    Comparison,
    Entries,
    Exponentials,
    Logits,
    LogProbs,
    LogRatio,
    Mixture,
    Probs,
    ShiftedLogProbs,
    Targeted,
    WeighedLogits,
    WeighedLogProbs,
    become,
    derive,
    of_classes,
)
from ..compat import hint, is_known, same
from ..ops.contract import acc_dtype
from ..replay import LOW, ByColumn, ClassOp, Extension, RowOp, RowShift
from ..transform import MASKED, Step, apply, then
from . import Call, rule
from .casts import converted
from .infinite import left_out
from .targets import are_targets_of, can_weigh
from .two_heads import compared, expected, ratio, shifted, summed, weighted

# --- by a number ------------------------------------------------------------------------------------------------


def _then(call: Call, input: Any, *steps: Step) -> ClassTensor:
    if not isinstance(input, Logits):
        call.keep("unknown_reader")
    transform = input.transform
    for step in steps:
        if input.row_shifts and step.name != "add":
            call.keep("unknown_reader", f"{call.name}, after a shift by a number for each row,")
        transform = then(transform, step)
        number = transform[-1].number
        if not math.isfinite(number) or (number == 0.0 and step.name == "mul"):
            call.keep("unsupported_argument", f"{call.name} with {number}")
    return derive(input, call.name, transform=transform)


def _scaled(call: Call, input: Any, factor: float) -> ClassTensor:
    if not math.isfinite(factor) or factor == 0.0:
        call.keep("unsupported_argument", f"{call.name} scales the logits by {factor}")
    if isinstance(input, ShiftedLogProbs) or (isinstance(input, Mixture) and input.log):
        call.keep("unknown_reader", f"{call.name} of shifted log-probabilities")
    if isinstance(input, Mixture):
        return weighted(call, input, factor)
    if not isinstance(input, Logits):
        if not math.isfinite(input.factor * factor) or input.factor * factor == 0.0:
            call.keep("unsupported_argument", f"{call.name} scales log-probabilities by {input.factor * factor}")
        return derive(input, call.name, factor=input.factor * factor)
    shifts = tuple(replace(shift, factor=shift.factor * factor) for shift in input.row_shifts)
    if input.transform:
        return replace(_then(call, replace(input, row_shifts=()), Step("mul", factor)), row_shifts=shifts)
    scale = input.scale * factor
    if not math.isfinite(scale) or scale == 0.0:
        call.keep("unsupported_argument", f"{call.name} scales the logits by {scale}")
    return derive(input, call.name, scale=scale, row_shifts=shifts)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _known(call: Call, input: Any, value: Any) -> float | None:
    """The number that ``value`` is or, beside something other than logits, certainly holds."""
    if _is_number(value):
        return float(value)
    return None if isinstance(input, Logits) else call.constant(value)


def _number(call: Call, value: Any) -> float:
    if not _is_number(value):
        call.keep("unknown_reader", f"{call.name} by something other than a number")
    return float(value)


# --- by a tensor ------------------------------------------------------------------------------------------------


def _like(call: Call, input: ClassTensor, other: Any) -> torch.Tensor:
    """An example of the tensor ``other``, with which ``input`` keeps its shape."""
    example = call.example(other)
    if not isinstance(example, torch.Tensor):
        call.keep("unknown_reader", f"{call.name} with something that is neither a number nor a tensor")
    shape = tuple(call.out.shape)
    if len(shape) != len(input.shape) or not all(same(a, b) for a, b in zip(shape, input.shape, strict=True)):
        call.keep("unknown_reader", f"{call.name} with a tensor of shape {tuple(example.shape)}, which adds rows,")
    return example


def _class_axis(input: ClassTensor, like: torch.Tensor) -> int:
    """The axis of ``like`` that meets the classes of ``input``; negative if there is none."""
    return like.dim() - (len(input.shape) - input.class_dim)


def _is_one_a_row(input: ClassTensor, like: torch.Tensor) -> bool:
    axis = _class_axis(input, like)
    # Of a vocabulary of one, one for each row may be one for each class.
    return axis < 0 or (isinstance(like.shape[axis], int) and like.shape[axis] == 1 and input.vocab != 1)


def _is_spread(input: ClassTensor, like: torch.Tensor) -> bool:
    """Whether it has a number for each row that was expanded to all classes."""
    axis = _class_axis(input, like)
    return axis >= 0 and same(like.stride(axis), 0) and same(like.shape[axis], input.vocab)


def _is_one_a_class(input: ClassTensor, like: torch.Tensor) -> bool:
    axis = _class_axis(input, like)
    others = (size for i, size in enumerate(like.shape) if i != axis)
    return axis >= 0 and same(like.shape[axis], input.vocab) and all(same(size, 1) for size in others)


def _scaled_by_tensor(call: Call, input: Any, function: Any, other: Any) -> ClassTensor:
    example = call.example(other)
    symbolic = isinstance(example, (torch.SymFloat, torch.SymInt))  # a number that differs between calls
    if symbolic and function is torch.div and is_known(example) and example == 0:  # which is now a guard
        call.keep("unsupported_argument", f"{call.name} divides the logits by zero")
    like = torch.empty((), device="meta") if symbolic else _like(call, input, other)
    if not isinstance(input, Logits):
        call.keep("unknown_reader", f"{call.name} of what is made of the logits by a tensor")
    if input.transform:
        call.keep("unknown_reader", f"{call.name} by a tensor, after another function of the logits,")
    if like.is_complex():
        call.keep("dtype", f"{call.name} by a complex tensor")
    if input.head.dtype == torch.float16:
        # What is scaled are hidden states or the weight, in their own dtype, which may be too narrow for it.
        call.keep("dtype", f"{call.name} by a tensor, of float16 logits,")
    if input.scale != 1.0 and any(op.name in ("fill", "assign") and _is_least(op.args[1]) for op in input.class_ops):
        call.keep("unknown_reader", f"{call.name} by a tensor, of scaled logits with the least number of a dtype,")
    dtype = converted(call, input, call.out.dtype)
    if _is_spread(input, like) and (column := call.unexpanded(other)) is not None:
        other, like = column, call.example(column)
    spread = _is_spread(input, like) and not like.requires_grad
    if spread or _is_one_a_row(input, like):
        op = ByColumn(function, (other, input.class_dim - len(input.shape))) if spread else RowOp(function, (other,))
        if not input.has_bias:
            return derive(input, call.name, op, dtype=dtype)
        if like.dim() == 0:
            classes = (*input.class_ops, ClassOp("scale_bias", (function, other)))
            return derive(input, call.name, op, dtype=dtype, class_ops=classes)
        if input.head.dtype.itemsize == 2 and input.adds_to_classes:
            # Which may not fit the dtype of the weight.
            call.keep("unknown_reader", f"{call.name} by a tensor, of 16-bit logits that another was added to,")
        classes = (*input.class_ops, ClassOp("extend", ()))
        extension = Extension(F.pad, (input.class_dim - len(input.shape),))
        return derive(input, call.name, extension, op, dtype=dtype, class_ops=classes)
    if _is_one_a_class(input, like) and not input.row_shifts:
        return of_classes(input, call.name, ClassOp("scale", (function, other)), dtype=dtype)
    call.keep("unknown_reader", f"{call.name} by a tensor of shape {tuple(like.shape)}")


def _is_least(number: float) -> bool:
    """Whether a finite number is so large that it may be infinite after one factor, and finite after the next."""
    return 1e30 < abs(number) < math.inf


def _shifted_by_tensor(call: Call, input: Any, other: Any, sign: float) -> ClassTensor:
    like = _like(call, input, other)
    by_row = _is_one_a_row(input, like)
    if not isinstance(input, Logits) or not (by_row or (_is_one_a_class(input, like) and not input.transform)):
        call.keep("unknown_reader", f"{call.name} with a tensor of shape {tuple(like.shape)}")
    if not like.is_floating_point():
        call.keep("unknown_reader", f"{call.name} with {like.dtype}")
    if by_row:
        shift = RowShift(other, sign, input.class_dim, len(input.row_ops))
        dtype = converted(call, input, call.out.dtype)
        return derive(input, call.name, row_shifts=(*input.row_shifts, shift), dtype=dtype)
    op = ClassOp("shift", (other, sign / input.scale), shifts=True)
    return of_classes(input, call.name, op, dtype=converted(call, input, call.out.dtype))


_WEIGHED: dict[type[ClassTensor], type[ClassTensor]] = {
    Logits: WeighedLogits,
    LogProbs: WeighedLogProbs,
    ClampedLogProbs: WeighedLogProbs,
}


def _weighed(call: Call, a: ClassTensor, b: ClassTensor) -> ClassTensor:
    """Probabilities times the logits that they are of."""
    probs, other = (a, b) if isinstance(a, Probs) else (b, a)
    if isinstance(probs, Probs) and isinstance(other, LogRatio):
        return expected(call, probs, other)
    alike, detached = a.has_logits_of(b), a.requires_grad != b.requires_grad and call.out.requires_grad
    if isinstance(probs, Probs) and isinstance(other, (LogProbs, Mixture)) and (detached or not alike):
        return compared(call, other, probs, divergence=False)
    kind = _WEIGHED.get(type(other))
    if not isinstance(probs, Probs) or kind is None or not alike:
        call.keep("unknown_reader", f"{call.name} of logits by logits")
    if detached:
        call.keep("unknown_reader", f"{call.name} of logits by detached ones")
    factor = a.factor * b.factor
    if isinstance(other, ClampedLogProbs):
        other = _without_infinities(call, other)
    return become(kind, other, call.name, dtype=converted(call, other, call.out.dtype), factor=factor)


def _without_infinities(call: Call, input: ClassTensor) -> ClassTensor:
    """The same with a low number in place of logits of -inf, which come of a bias, or of a mask after a function."""
    if input.is_extended:
        call.keep("unknown_reader", f"{call.name} of clamped log-probabilities, with a temperature for each row,")
    masks = [i for i, step in enumerate(input.transform) if step.name == MASKED]
    if masks:
        # The mask's bias of -inf is its mark, and must stay.
        steps = list(input.transform)
        for i in masks:
            if _after(steps[i + 1 :], steps[i].number, input) == -math.inf:
                steps[i] = Step(MASKED, LOW)
                if math.isinf(_after(steps[i + 1 :], LOW, input)):
                    call.keep("unknown_reader", f"{call.name}, after a mask and a scale of the logits,")
        return replace(input, transform=tuple(steps))
    return _floored(call, input) if input.has_bias else input


def _after(steps: Sequence[Step], number: float, input: ClassTensor) -> float:
    """What functions make of a number, in the accumulation dtype."""
    return apply(tuple(steps), torch.tensor(number, dtype=acc_dtype(input.head.dtype), device="cpu")).item()


def _floored(call: Call, input: ClassTensor) -> ClassTensor:
    """The same with a low number in place of logits that are -inf after the scale."""
    if abs(input.scale) < _LEAST_SCALE:  # of which no number that the bias can have makes a low one
        call.keep("unknown_reader", f"{call.name} of logits times {input.scale:g}")
    return replace(input, class_ops=(*input.class_ops, ClassOp("floor", (input.scale,), shifts=True)))


_LEAST_SCALE = 1e-30


@rule(operator.mul, torch.mul, torch.multiply, "mul", "multiply", "__mul__", "__rmul__", tracked=("input", "other"),
      in_place=(operator.imul, "mul_", "multiply_", "__imul__"))  # fmt: skip
def mul(call: Call, input: Any, other: Any) -> ClassTensor:
    if isinstance(input, ClassTensor) and isinstance(other, ClassTensor):
        return _weighed(call, input, other)
    if not isinstance(input, ClassTensor):
        input, other = other, input
    number = _known(call, input, other)
    if number is not None:
        return _scaled(call, input, number)
    targets = call.targets_in(other)
    if targets is not None:
        return _targeted(call, input, other, targets)
    return _scaled_by_tensor(call, input, torch.mul, other)


def _targeted(call: Call, input: Any, other: Any, targets: Entries) -> ClassTensor:
    """Times a tensor ``other`` that holds ``targets``."""
    known = type(input) in (Logits, LogProbs) or (type(input) is Probs and targets.off == 0.0)
    if not known or not are_targets_of(call, input, other) or not can_weigh(input, targets):
        call.keep("unknown_reader", f"{call.name} by targets")
    dtype = converted(call, input, call.out.dtype)
    made = {"of": type(input), "targets": targets, "axis": input.class_dim, "since": len(input.row_ops)}
    return become(Targeted, input, call.name, dtype=dtype, **made)


@rule(operator.truediv, "__truediv__", in_place=(operator.itruediv, "__itruediv__"))
@rule(torch.div, torch.divide, torch.true_divide, "div", "divide", "true_divide",
      in_place=("div_", "divide_", "true_divide_"), like=lambda input, other, *, rounding_mode=None: None)  # fmt: skip
def div(call: Call, input: Any, other: Any) -> ClassTensor:
    number = _known(call, input, other)
    read = call.reader_of(other) if number is None else None
    if isinstance(input, Exponentials) and read is not None and read.is_normaliser_of(input, call.out):
        dtype = converted(call, input, call.out.dtype)
        return become(Probs, input, call.name, dtype=dtype, factor=1.0)
    if number is None:
        return _scaled_by_tensor(call, input, torch.div, other)
    if number == 0:
        call.keep("unsupported_argument", f"{call.name} divides the logits by zero")
    return _scaled(call, input, 1.0 / number)


@rule(operator.neg, torch.neg, torch.negative, "neg", "negative", "__neg__", in_place=("neg_", "negative_"))
def neg(call: Call, input: Any) -> ClassTensor:
    return _scaled(call, input, -1.0)


@rule(operator.add, "__add__", "__radd__", tracked=("input", "other"), in_place=(operator.iadd, "__iadd__"))
@rule(torch.add, "add", like=lambda input, other, *, alpha=1: None, tracked=("input", "other"), in_place=("add_",))
def add(call: Call, input: Any, other: Any) -> ClassTensor:
    if not isinstance(input, ClassTensor):
        input, other = other, input
    if isinstance(other, ClassTensor):
        return summed(call, input, other)
    if not isinstance(input, Logits):
        return shifted(call, input, _known(call, input, other))
    if _is_number(other):
        return _then(call, input, Step("add", float(other)))
    return _shifted_by_tensor(call, input, other, 1.0)


@rule(operator.sub, "__sub__", tracked=("input", "other"), in_place=(operator.isub, "__isub__"))
@rule(torch.sub, torch.subtract, "sub", "subtract", like=lambda input, other, *, alpha=1: None,
      tracked=("input", "other"), in_place=("sub_", "subtract_"))  # fmt: skip
def sub(call: Call, input: Any, other: Any) -> ClassTensor:
    if isinstance(other, ClassTensor):
        return _subtracted(call, input, other)
    if not isinstance(input, Logits):
        number = _known(call, input, other)
        return shifted(call, input, None if number is None else -number)
    if _is_number(other):
        return _then(call, input, Step("add", -float(other)))
    read = call.reader_of(other)
    if read is not None and read.is_normaliser_of(input, call.out):
        return become(LogProbs, input, call.name, dtype=converted(call, input, call.out.dtype))
    return _shifted_by_tensor(call, input, other, -1.0)


@rule(torch.rsub, "__rsub__", like=lambda input, other, *, alpha=1: None)
def rsub(call: Call, input: Any, other: Any) -> ClassTensor:
    return _subtracted(call, other, input)


def _subtracted(call: Call, minuend: Any, input: ClassTensor) -> ClassTensor:
    """A number or a tensor less logits: these negated, and it added."""
    if isinstance(minuend, ClassTensor):
        if isinstance(minuend, Comparison) or isinstance(input, Comparison):
            return summed(call, minuend, replace(input, factor=-input.factor))
        return ratio(call, minuend, input)
    read = call.reader_of(minuend)
    if isinstance(input, Logits) and read is not None and read.is_normaliser_of(input, call.out):
        return become(LogProbs, input, call.name, dtype=converted(call, input, call.out.dtype), factor=-1.0)
    negative = replace(_scaled(call, input, -1.0), trail=input.trail)
    return add(call, negative, minuend)


# --- functions of one logit -------------------------------------------------------------------------------------


@rule(torch.tanh, F.tanh, "tanh", in_place=("tanh_", torch.tanh_))
def tanh(call: Call, input: Any) -> ClassTensor:
    return _then(call, input, Step("tanh"))


@rule(torch.sigmoid, torch.special.expit, F.sigmoid, "sigmoid", in_place=("sigmoid_", torch.sigmoid_))
def sigmoid(call: Call, input: Any) -> ClassTensor:
    return _then(call, input, Step("sigmoid"))


@rule(torch.relu, "relu", in_place=("relu_", torch.relu_))
@rule(F.relu, like=lambda input, inplace=False: None)
def relu(call: Call, input: Any) -> ClassTensor:
    return _then(call, input, Step("relu"))


@rule(F.softsign)
def softsign(call: Call, input: Any) -> ClassTensor:
    return _then(call, input, Step("softsign"))


@rule(F.logsigmoid)
def logsigmoid(call: Call, input: Any) -> ClassTensor:
    return _then(call, input, Step("logsigmoid"))


@rule(torch.clamp, torch.clip, "clamp", "clip", in_place=("clamp_", "clip_", torch.clamp_))
def clamp(call: Call, input: Any, min: Any = None, max: Any = None) -> ClassTensor:
    least = max is None and _is_number(min) and min == torch.finfo(input.dtype).min
    if isinstance(input, LogProbs) and input.factor == 1.0 and least:
        return become(ClampedLogProbs, input, call.name)
    if min is not None and max is not None and _number(call, min) > _number(call, max):
        call.keep("unsupported_argument", f"{call.name} has min={min} above max={max}")
    bounds = [
        (name, _number(call, bound)) for name, bound in (("clamp_min", min), ("clamp_max", max)) if bound is not None
    ]
    if any(math.isfinite(bound) and abs(bound) > torch.finfo(call.out.dtype).max for _, bound in bounds):
        call.keep("unsupported_argument", f"{call.name} has a bound that {call.out.dtype} does not hold")
    return _then(call, input, *(Step(name, bound) for name, bound in bounds))


@rule(torch.clamp_min, "clamp_min", in_place=("clamp_min_",))
def clamp_min(call: Call, input: Any, min: Any) -> ClassTensor:
    return clamp(call, input, min=min)


@rule(torch.clamp_max, "clamp_max", in_place=("clamp_max_",))
def clamp_max(call: Call, input: Any, max: Any) -> ClassTensor:
    return clamp(call, input, max=max)


# --- masks of the vocabulary ------------------------------------------------------------------------------------


def _masked(call: Call, input: Any, mask: Any, value: Any, elsewhere: bool = False) -> ClassTensor:
    like = _like(call, input, mask)
    if like.dtype != torch.bool or not _is_one_a_class(input, like):
        call.keep("unknown_reader", f"{call.name} with a mask of {like.dtype} and shape {tuple(like.shape)}")
    return _filled(call, input, value, lambda number: ClassOp("fill", (mask, number, elsewhere), shifts=True))


def _filled(call: Call, input: Any, value: Any, op: Callable[[float], ClassOp]) -> ClassTensor:
    """Logits of which ``op`` sets some classes to ``value``; it is given the number before the scale."""
    value = call.number_in(value)
    if value is None:
        call.keep("unknown_reader", f"{call.name} with something other than a number")
    value = torch.tensor(value, dtype=call.out.dtype, device="cpu").item()  # as it is stored
    if not isinstance(input, Logits) or (input.row_shifts and not math.isinf(value)):
        call.keep("unknown_reader", f"{call.name}, after another function of the logits,")
    dtype = converted(call, input, call.out.dtype)
    if not input.transform and _fits(input, value):
        return of_classes(input, call.name, op(value / input.scale), dtype=dtype)
    # Before the functions, or before a scale that would make too much of it, it is -inf that marks these classes.
    step, mark = Step(MASKED, value), op(math.copysign(math.inf, -input.scale))
    if input.transform[-1:] == (step,):
        return of_classes(input, call.name, mark, dtype=dtype)
    bounded = any(known.name in ("tanh", "sigmoid") for known in input.transform)
    known_bias = not input.has_bias or bounded
    if any(known.name == MASKED for known in input.transform) or input.is_extended or not known_bias:
        before_it = "another function" if input.transform else "a scale and a bias"
        call.keep("unknown_reader", f"{call.name}, after {before_it} of the logits,")
    # A bias may hold -inf itself; of a number so low a bounded function makes the same.
    before = _floored(call, input) if input.has_bias else input
    return of_classes(before, call.name, mark, dtype=dtype, transform=(*input.transform, step))


def _fits(input: Logits, value: float) -> bool:
    """Whether the bias of a class can be such that its logits are ``value`` after the scale."""
    if input.scale == 1.0 or math.isinf(value):
        return True
    most = torch.finfo(torch.float64 if input.head.dtype == torch.float64 else torch.float32).max
    return max(abs(value), abs(value / input.scale)) < most / 2


@rule(in_place=(operator.setitem,))
def setitem(call: Call, input: Any, index: Any, value: Any) -> ClassTensor:
    classes = listed_classes(index, input.class_dim, input.shape, call.example)
    if classes is None:
        call.keep("mutated", f"{call.name} of anything but some classes of every row")
    like = call.example(value)
    if isinstance(like, torch.Tensor) and _is_mask(call, classes):
        _refuse_overflow(call, call.number_in(value), call.out.dtype)  # as masked_fill does
    elif isinstance(like, torch.Tensor) and not isinstance(classes, slice) and like.dtype != call.out.dtype:
        call.keep("dtype", f"{call.name} of {like.dtype} in {call.out.dtype}")  # eager raises
    return _assigned(replace(call, name="[…] = …"), input, classes, value)


@rule(torch.index_fill, "index_fill", in_place=("index_fill_",))
def index_fill(call: Call, input: Any, dim: Any, index: Any, value: Any) -> ClassTensor:
    if dim % len(input.shape) != input.class_dim:
        call.keep("class_dim", f"{call.name} along dim={dim}")
    if call.example(index).dtype != torch.int64:
        call.keep("dtype", f"{call.name} at an index of {call.example(index).dtype}")
    _refuse_overflow(call, call.number_in(value), call.out.dtype)
    return _assigned(call, input, index, value)


def _refuse_overflow(call: Call, value: Any, dtype: torch.dtype) -> None:
    """Refuse a number that ``dtype`` does not hold, of which eager says so; assignments make it infinite."""
    if not _is_number(value) or not math.isfinite(value):
        return
    if abs(value) > torch.finfo(dtype).max or (isinstance(value, int) and not -(1 << 63) <= value < 1 << 64):
        call.keep("unsupported_argument", f"{call.name} with {value}, which {dtype} does not hold,")


def _is_mask(call: Call, classes: Any) -> bool:
    """Whether classes are those of a mask, rather than of a slice or an index."""
    return getattr(call.example(classes), "dtype", None) == torch.bool


def _assigned(call: Call, input: Any, classes: Any, value: Any) -> ClassTensor:
    if _is_mask(call, classes):
        return _filled(call, input, value, lambda number: ClassOp("fill", (classes, number, False), shifts=True))
    return _filled(call, input, value, lambda number: ClassOp("assign", (classes, number), shifts=True))


def listed_classes(index: Any, class_dim: int, shape: Sequence[Any], example: Callable[[Any], Any]) -> Any:
    """What ``index`` selects of the class axis, if it takes all of the others: a slice, a list of numbers, a tensor of
    them or a mask. Else None.
    """
    dims, vocab = len(shape), shape[class_dim]
    entries = list(index) if isinstance(index, tuple) else [index]
    ellipses = [i for i, entry in enumerate(entries) if entry is Ellipsis]
    if len(ellipses) == 1:
        entries[ellipses[0] : ellipses[0] + 1] = [slice(None)] * (dims - len(entries) + 1)
    if not class_dim < len(entries) <= dims:
        return None
    classes = entries.pop(class_dim)
    if any(not isinstance(entry, slice) or entry != slice(None) for entry in entries):
        return None
    if isinstance(classes, slice):
        parts = (classes.start, classes.stop, classes.step)
        return classes if all(part is None or type(part) is int for part in parts) else None
    if type(classes) is int and isinstance(vocab, int) and -vocab <= classes < vocab:
        return slice(classes % vocab, classes % vocab + 1)
    if isinstance(classes, list):
        known = isinstance(vocab, int) and all(type(one) is int and -vocab <= one < vocab for one in classes)
        return classes if known else None
    like = example(classes)
    if not isinstance(like, torch.Tensor) or like.dim() != 1:
        return None
    # A mask of another length is an error, so that two symbols need not be known to be equal.
    fits = like.dtype == torch.bool and hint(like.shape[0]) == hint(vocab)
    return classes if like.dtype == torch.int64 or fits else None


@rule(torch.masked_fill, "masked_fill", tracked=("input", "mask"), in_place=("masked_fill_",))
def masked_fill(call: Call, input: Any, mask: Any, value: Any) -> ClassTensor:
    if isinstance(mask, ClassTensor):
        return left_out(call, input, mask, value)
    _refuse_overflow(call, call.number_in(value), call.out.dtype)
    return _masked(call, input, mask, value)


@rule(torch.where, like=lambda condition, input, other: None, tracked=("input", "other"))
def where(call: Call, condition: Any, input: Any, other: Any) -> ClassTensor:
    if isinstance(input, ClassTensor) and isinstance(other, ClassTensor):
        call.keep("unknown_reader", "where with logits on both sides")
    # Eager refuses what float32 does not hold for float32 alone; to 16 bits it is converted, and infinite.
    held = torch.float32 if call.out.dtype == torch.float32 else torch.float64
    _refuse_overflow(call, other if isinstance(input, ClassTensor) else input, held)
    if isinstance(input, ClassTensor):
        return _masked(call, input, condition, other, elsewhere=True)
    return _masked(call, other, condition, input)
