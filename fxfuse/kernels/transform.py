"""Transforms of logits in Triton: see ``fxfuse.transform``, whose steps these are."""

from __future__ import annotations

import triton
import triton.language as tl

from ..transform import decode


def steps(transform: str) -> tuple[tuple[str, float], ...]:
    """The steps of a transform as kernels take them."""
    return tuple((step.name, step.number) for step in decode(transform))


@triton.jit
def _tanh(z):
    a = tl.abs(z)
    # Each form where it does not cancel; the series ends below float32's precision.
    t = tl.exp(-2.0 * a)
    large = (1.0 - t) / (1.0 + t)
    q = a * a
    small = a + a * q * (-1.0 / 3 + q * (2.0 / 15 + q * (-17.0 / 315 + q * (62.0 / 2835))))
    value = tl.where(a < 0.25, small, large)
    return tl.where(z < 0, -value, value)


@triton.jit
def transformed(z, TRANSFORM: tl.constexpr):
    """(f(z), f'(z)) for the steps TRANSFORM of f; the number 1 for the derivative where there are none."""
    slope = 1.0
    for i in tl.static_range(len(TRANSFORM)):
        if TRANSFORM[i][0] == "mul":
            derivative = TRANSFORM[i][1]
            z = z * derivative
        elif TRANSFORM[i][0] == "add":
            derivative = 1.0
            z = z + TRANSFORM[i][1]
        elif TRANSFORM[i][0] == "tanh":
            z = _tanh(z)
            derivative = 1.0 - z * z
        else:
            tl.static_assert(TRANSFORM[i][0] == "sigmoid")
            z = 1.0 / (1.0 + tl.exp(-z))
            derivative = z * (1.0 - z)
        slope = slope * derivative
    return z, slope
