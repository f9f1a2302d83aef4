"""Arithmetic on logits that leaves them logits, and on log-probabilities that scales them."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from ..algebra import ClassTensor, Logits, LogProbs, derive
from ..transform import Step, then
from . import Call, rule


def _then(call: Call, input: Any, step: Step) -> ClassTensor:
    if not isinstance(input, Logits):
        call.keep("unknown_reader")
    transform = then(input.transform, step)
    number = transform[-1].number
    if not math.isfinite(number) or (number == 0.0 and step.name == "mul"):
        call.keep("unsupported_argument", f"{call.name} with {number}")
    return derive(input, call.name, transform=transform)


def _scaled(call: Call, input: Any, factor: float) -> ClassTensor:
    if not math.isfinite(factor) or factor == 0.0:
        call.keep("unsupported_argument", f"{call.name} scales the logits by {factor}")
    if isinstance(input, LogProbs):
        if not math.isfinite(input.factor * factor) or input.factor * factor == 0.0:
            call.keep("unsupported_argument", f"{call.name} scales log-probabilities by {input.factor * factor}")
        return derive(input, call.name, factor=input.factor * factor)
    if input.transform:
        return _then(call, input, Step("mul", factor))
    scale = input.scale * factor
    if not math.isfinite(scale) or scale == 0.0:
        call.keep("unsupported_argument", f"{call.name} scales the logits by {scale}")
    return derive(input, call.name, scale=scale)


def _number(call: Call, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        call.keep("unknown_reader", f"{call.name} by something other than a number")
    return float(value)


@rule(operator.mul, torch.mul, torch.multiply, "mul", "multiply", "__mul__", "__rmul__", tracked=("input", "other"))
def mul(call: Call, input: Any, other: Any) -> ClassTensor:
    if not isinstance(input, ClassTensor):
        input, other = other, input
    return _scaled(call, input, _number(call, other))


@rule(operator.truediv, "__truediv__")
@rule(torch.div, torch.divide, torch.true_divide, "div", "divide", "true_divide",
      like=lambda input, other, *, rounding_mode=None: None)  # fmt: skip
def div(call: Call, input: Any, other: Any) -> ClassTensor:
    divisor = _number(call, other)
    if divisor == 0.0:
        call.keep("unsupported_argument", f"{call.name} divides the logits by zero")
    return _scaled(call, input, 1.0 / divisor)


@rule(operator.neg, torch.neg, torch.negative, "neg", "negative", "__neg__")
def neg(call: Call, input: Any) -> ClassTensor:
    return _scaled(call, input, -1.0)


@rule(operator.add, "__add__", "__radd__", tracked=("input", "other"))
@rule(torch.add, "add", like=lambda input, other, *, alpha=1: None, tracked=("input", "other"))
def add(call: Call, input: Any, other: Any) -> ClassTensor:
    if not isinstance(input, ClassTensor):
        input, other = other, input
    return _then(call, input, Step("add", _number(call, other)))


@rule(operator.sub, "__sub__")
@rule(torch.sub, torch.subtract, "sub", "subtract", like=lambda input, other, *, alpha=1: None)
def sub(call: Call, input: Any, other: Any) -> ClassTensor:
    return _then(call, input, Step("add", -_number(call, other)))


@rule(torch.tanh, "tanh")
def tanh(call: Call, input: Any) -> ClassTensor:
    return _then(call, input, Step("tanh"))


@rule(torch.sigmoid, torch.special.expit, "sigmoid")
def sigmoid(call: Call, input: Any) -> ClassTensor:
    return _then(call, input, Step("sigmoid"))
