"""Every program that is fused, in float32 and 16 bits: it errs no more than eager does, against eager in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import FLOORS, compiled
from programs import FUSED, FUSED_IN_GRAPHS, World
from torch import Tensor

pytestmark = pytest.mark.slow
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SEEDS = range(16)  # together: one small world's roundings are luck


def _everything(program: Callable[[World], Any], world: World) -> list[Tensor]:
    """What a program returns and the gradients of its operands, in float64."""
    outs = program(world)
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    differentiable = [out for out in outs if out.requires_grad]
    grads: tuple[Tensor | None, ...] = ()
    if differentiable:
        upstream = [torch.linspace(1 / 3, 1.5, o.numel(), device=o.device).view(o.shape).to(o) for o in differentiable]
        grads = torch.autograd.grad(differentiable, world.leaves(), upstream, allow_unused=True)
    values = [out.detach() for out in outs] + [g for g in grads if g is not None]
    return [value.double() for value in values if value.is_floating_point()]


def _exact(world: World) -> World:
    """The same numbers in float64."""
    return World(
        *(t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t.clone()
          for t in vars(world).values())
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", sorted(FUSED | FUSED_IN_GRAPHS))
def test_errs_no_more_than_eager(name: str, dtype: torch.dtype, device: str) -> None:
    program = (FUSED | FUSED_IN_GRAPHS)[name]
    torch._dynamo.reset()
    ours = compiled(program)
    runs = []
    for seed in SEEDS:
        worlds = [World.make(dtype, device, seed) for _ in range(3)]
        worlds[2] = _exact(worlds[2])
        runs.append([_everything(f, world) for f, world in zip((ours, program, program), worlds, strict=True)])
    for which in range(len(runs[0][0])):
        mine, eager, exact = (torch.cat([run[i][which].flatten() for run in runs]) for i in range(3))
        finite = exact.isfinite() & eager.isfinite()
        assert bool(mine[finite].isfinite().all())
        norm = float(exact[finite].norm()) or 1.0
        error, theirs = (float((a - exact)[finite].norm()) / norm for a in (mine, eager))
        assert error <= max(1.5 * theirs, 2 * FLOORS[dtype]), f"tensor {which}: {error:.3g}, eager's {theirs:.3g}"
