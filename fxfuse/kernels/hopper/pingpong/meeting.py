"""Programs that stay in step: the warps that load wait for each other now and then.

What several processors ask L2 for at about the same time it reads once. Programs that share an operand's tile ask for
it in the same step, but drift apart as they go. So after every few steps they meet: each adds one to a counter in
device memory, which was zero at the launch, and waits until all have. Nothing but time depends on it, and nobody waits
for long: programs may not all run at the same time, and who has waited in vain a few times does not wait any more.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

EVERY = gl.constexpr(2)  # steps
TRIES = gl.constexpr(12)  # of reading the counter, which takes some 700 cycles
MISSES = gl.constexpr(4)  # meetings that were waited for in vain


@gluon.jit
def arrivals(tile, tiles, programs, steps):
    """(how many arrive before this tile's first meeting, how many at each of its meetings).

    The tiles, of so many steps each, are taken in rounds by so many programs.
    """
    before = tile // programs * programs
    return before * gl.cdiv(steps, EVERY), gl.minimum(programs, tiles - before)


@gluon.jit
def meet(counter, expected, misses):
    """Arrive, and wait for the rest of ``expected``; return how often that was in vain so far."""
    gl.atomic_add(counter, 1, sem="relaxed")
    tries = gl.where(misses < MISSES, 0, TRIES + 1)
    while tries < TRIES:
        tries = gl.where(gl.load(counter, volatile=True) < expected, tries + 1, TRIES + 1)
    return misses + (tries == TRIES).to(gl.int32)
