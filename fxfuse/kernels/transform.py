"""Transforms of logits in Triton: see ``fxfuse.transform``, whose steps these are."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ..transform import decode, steepest

# How much an error of ``_softcap``'s tanh, of 4e-7, may grow: to at most a tenth of what 16 bits round of a logit of 1.
_MOST_GROWTH = 64


@functools.lru_cache(maxsize=256)
def spelled(transform: str, dtype: torch.dtype) -> str:
    """The text of a transform for kernels whose operands are of ``dtype``.

    In 16 bits with functions of fewer instructions, that err by less than rounding to these does.
    """
    words, steps = transform.split(), decode(transform)
    for i, step in enumerate(steps):
        if step.name == "tanh" and dtype.itemsize == 2 and steepest(steps[i + 1 :]) <= _MOST_GROWTH:
            is_softcap = i + 1 < len(steps) and steps[i + 1].name == "mul"
            words[i] = f"softcap:{steps[i + 1].number if is_softcap else 1.0!r}"
            if is_softcap:
                words[i + 1] = ""
    return " ".join(filter(None, words))


_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # by what knows no assembly


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


@triton.constexpr_function
def _masks(transform):
    return "masked:" in transform


@triton.constexpr_function
def _takes_scale(transform):
    # What a mask looks for is there after the scale.
    return transform.startswith("softcap:") and "masked:" not in transform


@triton.jit
def _tanh(z):
    """tanh to 3 units in the last place of float32: z P(z * z) / Q(z * z), which needs one division and no exp.

    P and Q are the weighted least-squares fit to tanh(z) / z on [-9, 9] (Lawson's iteration towards the least relative
    error, which is 2e-8 before rounding). Beyond 9, tanh is 1 in float32, and so is what grows from there.
    """
    u = tl.minimum(z * z, 81.0, propagate_nan=tl.PropagateNan.ALL)
    p = 1.3353413977921585e-08
    p = p * u + 2.0608185160773e-05
    p = p * u + 3.49553454393067e-03
    p = p * u + 1.3380981150323534e-01
    p = p * u + 9.999999796239433e-01
    q = 7.776047448746542e-07
    q = q * u + 3.285546347741446e-04
    q = q * u + 2.5876780095361374e-02
    q = q * u + 4.6714296807586797e-01
    q = q * u + 1.0
    return tl.clamp(z * p / q, -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _reciprocal(y):
    """1 / y for y of 1 or more, in one instruction. A division cares for what has a reciprocal past float32's range."""
    if _INTERPRETED:
        return 1.0 / y
    else:
        asm: tl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(asm, "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _softcap(z, rate, cap):
    """(cap tanh u, its derivative), 2 log2(e) u = rate z: cap - 2 cap r where r = 1 / (1 + exp(2 u)), to 4e-7 cap.

    Infinite exponentials make r 0. The derivative, 4 cap r (1 - r), keeps its digits where large logits saturate.
    """
    r = _reciprocal(1.0 + tl.exp2(z * rate))
    return cap - 2.0 * cap * r, 4.0 * cap * (r - r * r)


@triton.jit
def transformed(z, TRANSFORM: tl.constexpr, scale=1.0):
    """(f(u), f'(u)) for the transform f that TRANSFORM names, ``spelled`` or not, and u = scale z.

    The identity has the number 1 for a derivative. What comes first takes the scale into its own constant if it can.
    """
    if not _takes_scale(TRANSFORM):
        z = z * scale
    slope = 1.0
    masked = False
    if _masks(TRANSFORM):
        masked = z == float("-inf")
    for i in tl.static_range(_steps(TRANSFORM)):
        if _name(TRANSFORM, i) == "mul":
            derivative = _number(TRANSFORM, i)
            z = z * derivative
        elif _name(TRANSFORM, i) == "add":
            derivative = 1.0
            z = z + _number(TRANSFORM, i)
        elif _name(TRANSFORM, i) == "masked":
            derivative = tl.where(masked, 0.0, 1.0)
            z = tl.where(masked, _number(TRANSFORM, i), z)
            slope = tl.where(masked, 0.0, slope)  # which may be no number there
        elif _name(TRANSFORM, i) == "tanh":
            z = _tanh(z)
            derivative = 1.0 - z * z
        elif _name(TRANSFORM, i) == "softcap":
            rate = 2.8853900817779268  # 2 log2(e)
            if i == 0 and _takes_scale(TRANSFORM):
                rate = rate * scale
            z, derivative = _softcap(z, rate, _number(TRANSFORM, i))
        elif _name(TRANSFORM, i) == "sigmoid":
            z = 1.0 / (1.0 + tl.exp(-z))
            derivative = z * (1.0 - z)
        elif _name(TRANSFORM, i) == "clamp_min":
            derivative = tl.where(z >= _number(TRANSFORM, i), 1.0, 0.0)
            z = tl.maximum(z, _number(TRANSFORM, i), propagate_nan=tl.PropagateNan.ALL)
        elif _name(TRANSFORM, i) == "clamp_max":
            derivative = tl.where(z <= _number(TRANSFORM, i), 1.0, 0.0)
            z = tl.minimum(z, _number(TRANSFORM, i), propagate_nan=tl.PropagateNan.ALL)
        elif _name(TRANSFORM, i) == "relu":
            derivative = tl.where(z > 0.0, 1.0, 0.0)
            z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
        elif _name(TRANSFORM, i) == "softsign":
            share = 1.0 / (1.0 + tl.abs(z))
            derivative = share * share
            z = z * share
        else:
            tl.static_assert(_name(TRANSFORM, i) == "logsigmoid")
            # Of the exponential that is at most 1: log(1 + exp(z)) would overflow.
            e = tl.exp(-tl.abs(z))
            derivative = tl.where(z > 0.0, e, 1.0) / (1.0 + e)
            z = tl.minimum(z, 0.0, propagate_nan=tl.PropagateNan.ALL) - tl.log(1.0 + e)
        slope = slope * derivative
    return z, slope
