"""The exponential to the precision of eager's, where single probabilities are stored or differentiated."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# log(2) in two parts (Cody & Waite 1980): the first has so few bits that its products with whole numbers are exact.
LN2_HIGH, LN2_LOW = tl.constexpr(0.693359375), tl.constexpr(-2.12194440054690583e-4)


@triton.jit
def exponential(x):
    """exp to 2 units in the last place of float32.

    ``tl.exp`` rounds x log2(e) before it raises 2 to that, and so errs by a further |x| units: in the sum of a softmax
    small terms have no weight, but a probability of 1e-9 would have 5 digits. 7 instructions more.
    """
    # Beyond, the result is 0 or infinite in float32 anyway; infinities would give NaN below.
    x = tl.clamp(x, -150.0, 150.0, propagate_nan=tl.PropagateNan.ALL)
    whole = tl.floor(x * LOG2E + 0.5)
    rest = (x - whole * LN2_HIGH) - whole * LN2_LOW
    return tl.exp2(rest * LOG2E) * tl.exp2(whole)
