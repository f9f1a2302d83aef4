"""Pointwise functions of one logit: what a program does to logits between their projection and their readers.

A transform is a chain of steps, each a function of one number with at most one constant. It is written as text, in
which form the ops take it, ``"tanh mul:30.0"``. Softcap as in Gemma 2 is that after a scale of 1/30.

A step more, ``"masked:-inf"``, is what a mask of the vocabulary leaves of classes after other functions: logits that
were -inf to begin with, as a bias makes them, become its number.

To add a function: here, its Triton twin in ``kernels/transform.py``, and a rule for what programs call it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import errors


class Step(NamedTuple):
    """One function: ``name`` is a key of ``FUNCTIONS``, ``number`` its constant where it has one."""

    name: str
    number: float = 0.0


Transform = tuple[Step, ...]


def _tanh(z: Tensor, _: float) -> tuple[Tensor, Callable[[], Tensor]]:
    value = z.tanh()
    return value, lambda: (value * value).neg_().add_(1)  # in one tensor


def _sigmoid(z: Tensor, _: float) -> tuple[Tensor, Callable[[], Tensor]]:
    value = z.sigmoid()
    return value, lambda: value * (1 - value)


def _clamp_min(z: Tensor, least: float) -> tuple[Tensor, Callable[[], Tensor]]:
    return z.clamp(min=least), lambda: (z >= least).to(z.dtype)


def _clamp_max(z: Tensor, most: float) -> tuple[Tensor, Callable[[], Tensor]]:
    return z.clamp(max=most), lambda: (z <= most).to(z.dtype)


def _relu(z: Tensor, _: float) -> tuple[Tensor, Callable[[], Tensor]]:
    return z.relu(), lambda: (z > 0).to(z.dtype)


def _softsign(z: Tensor, _: float) -> tuple[Tensor, Callable[[], Tensor]]:
    scale = 1 / (1 + z.abs())
    return z * scale, lambda: scale * scale


def _masked(z: Tensor, _: float) -> tuple[Tensor, Callable[[], Tensor]]:
    return z, lambda: z.new_ones(())


def _logsigmoid(z: Tensor, _: float) -> tuple[Tensor, Callable[[], Tensor]]:
    return torch.nn.functional.logsigmoid(z), lambda: (-z).sigmoid()


MASKED = "masked"


def _masks(transform: Transform, z: Tensor) -> Tensor | None:
    """Where a mask is, if the transform has one."""
    return z == -math.inf if any(step.name == MASKED for step in transform) else None


class Function(NamedTuple):
    """What is known of a function of one number."""

    of: Callable[[Tensor, float], tuple[Tensor, Callable[[], Tensor]]]  # the value, and what makes the derivative
    steepest: Callable[[float], float]  # a bound of the absolute value of the derivative
    bound: Callable[[float, float], float]  # a bound of the absolute value, of one of that of what it is a function of
    has_constant: bool


FUNCTIONS = {
    "mul": Function(
        lambda z, number: (z * number, lambda: z.new_full((), number)),
        abs,
        lambda size, number: size * abs(number),
        True,
    ),
    "add": Function(
        lambda z, number: (z + number, lambda: z.new_ones(())),
        lambda _: 1.0,
        lambda size, number: size + abs(number),
        True,
    ),
    "tanh": Function(_tanh, lambda _: 1.0, lambda *_: 1.0, False),
    "sigmoid": Function(_sigmoid, lambda _: 0.25, lambda *_: 1.0, False),
    "clamp_min": Function(_clamp_min, lambda _: 1.0, lambda size, least: max(size, abs(least)), True),
    "clamp_max": Function(_clamp_max, lambda _: 1.0, lambda size, most: max(size, abs(most)), True),
    "relu": Function(_relu, lambda _: 1.0, lambda size, _: size, False),
    "softsign": Function(_softsign, lambda _: 1.0, lambda *_: 1.0, False),
    "logsigmoid": Function(_logsigmoid, lambda _: 1.0, lambda size, _: size + math.log(2), False),
    # Of other numbers than -inf; see _masks.
    MASKED: Function(_masked, lambda _: 1.0, lambda size, number: max(size, abs(number)), True),
}


def encode(transform: Transform) -> str:
    """The transform as text, which ``decode`` reads back exactly."""
    return " ".join(
        f"{step.name}:{step.number!r}" if FUNCTIONS[step.name].has_constant else step.name for step in transform
    )


@functools.lru_cache(maxsize=256)
def decode(text: str) -> Transform:
    """The transform that ``text`` names.

    Raises:
        ValueError: a function that is not known, or a constant missing, superfluous or not a number.
    """
    steps = []
    for word in text.split():
        name, colon, number = word.partition(":")
        try:
            constant = float(number) if colon else 0.0
        except ValueError:
            constant = None
        if name not in FUNCTIONS or bool(colon) != FUNCTIONS[name].has_constant or constant is None:
            raise errors.unknown_transform(word, FUNCTIONS)
        steps.append(Step(name, constant))
    return tuple(steps)


def then(transform: Transform, step: Step) -> Transform:
    """``transform`` followed by ``step``; products with numbers that meet become one."""
    if step.name == "mul" and transform and transform[-1].name == "mul":
        return (*transform[:-1], Step("mul", transform[-1].number * step.number))
    return (*transform, step)


def steepest(transform: Transform) -> float:
    """A bound of the absolute value of the derivative."""
    return math.prod(FUNCTIONS[step.name].steepest(step.number) for step in transform)


def bound(transform: Transform) -> float:
    """A bound of the absolute value."""
    return functools.reduce(lambda size, step: FUNCTIONS[step.name].bound(size, step.number), transform, math.inf)


def apply(transform: Transform, z: Tensor) -> Tensor:
    """The transform of each element of ``z``."""
    masked = _masks(transform, z)
    for step in transform:
        z, _ = FUNCTIONS[step.name].of(z, step.number)
        if masked is not None and step.name == MASKED:
            z = z.masked_fill(masked, step.number)
    return z


def apply_with_slope(transform: Transform, z: Tensor) -> tuple[Tensor, Tensor | None]:
    """The same, and its derivative there: of the shape of ``z``, or None for the identity."""
    slope, masked = None, _masks(transform, z)
    for step in transform:
        z, derivative = FUNCTIONS[step.name].of(z, step.number)
        slope = derivative() if slope is None else derivative() * slope
        if masked is not None and step.name == MASKED:
            z, slope = z.masked_fill(masked, step.number), slope.expand(z.shape).masked_fill(masked, 0.0)
    return z, None if slope is None else slope.expand(z.shape)
