"""Transforms of logits in Triton: see ``fxfuse.transform``, whose steps these are."""

from __future__ import annotations

import triton
import triton.language as tl


# The text of a transform, taken apart as ``fxfuse.transform.decode`` does; Triton compiles no calls of that.
@triton.constexpr_function
def _steps(transform):
    return len(transform.split())


@triton.constexpr_function
def _name(transform, i):
    return transform.split()[i].partition(":")[0]


@triton.constexpr_function
def _number(transform, i):
    return float(transform.split()[i].partition(":")[2])


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
    """(f(z), f'(z)) for the transform f that TRANSFORM names; the number 1 for the derivative of the identity."""
    slope = 1.0
    for i in tl.static_range(_steps(TRANSFORM)):
        if _name(TRANSFORM, i) == "mul":
            derivative = _number(TRANSFORM, i)
            z = z * derivative
        elif _name(TRANSFORM, i) == "add":
            derivative = 1.0
            z = z + _number(TRANSFORM, i)
        elif _name(TRANSFORM, i) == "tanh":
            z = _tanh(z)
            derivative = 1.0 - z * z
        else:
            tl.static_assert(_name(TRANSFORM, i) == "sigmoid")
            z = 1.0 / (1.0 + tl.exp(-z))
            derivative = z * (1.0 - z)
        slope = slope * derivative
    return z, slope
