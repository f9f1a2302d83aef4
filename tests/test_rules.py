"""Every program of ``programs`` through the graph driver: same values, gradients and effects as eager, as expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import FUSED, KEPT, World

import fxfuse
from fxfuse import rules

OPTIONS = {"fxfuse.inner": "eager", "fxfuse.min_logits_bytes": 0}
USED: set[Any] = set()
RAN: set[Any] = set()


@pytest.fixture(autouse=True)
def _note_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember which rules the programs apply."""
    call = rules.Rule.__call__

    def noted(self: rules.Rule, *args: Any) -> Any:
        USED.add(self.apply)
        return call(self, *args)

    monkeypatch.setattr(rules.Rule, "__call__", noted)


def _flat(out: Any) -> tuple[torch.Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def _run(program: Callable[[World], Any], world: World) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
    outs = _flat(program(world))
    differentiable = [out for out in outs if out.requires_grad]
    if not differentiable:
        return outs, ()
    # Distinct upstream gradients, so that a swapped or dropped one shows.
    upstream = [torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype, device=out.device).view_as(out) + i
                for i, out in enumerate(differentiable)]  # fmt: skip
    return outs, torch.autograd.grad(differentiable, world.leaves(), upstream, allow_unused=True)


def _compare(program: Callable[[World], Any], device: str, dynamic: bool, memory: int = 0) -> tuple[fxfuse.Site, ...]:
    torch._dynamo.reset()
    RAN.add(program)
    eager_world, world = World.make(device=device), World.make(device=device)
    expected, expected_grads = _run(program, eager_world)
    before = len(fxfuse.sites())
    compiled = torch.compile(
        program, backend="fxfuse", options=OPTIONS | {"fxfuse.memory": memory}, dynamic=dynamic, fullgraph=True
    )
    actual, grads = _run(compiled, world)
    assert [a.requires_grad for a in actual] == [e.requires_grad for e in expected]
    torch.testing.assert_close(actual, expected, equal_nan=True)
    torch.testing.assert_close(grads, expected_grads, equal_nan=True)
    for mine, theirs in zip(vars(world).values(), vars(eager_world).values(), strict=True):
        torch.testing.assert_close(mine, theirs)
    return fxfuse.sites()[before:]


@pytest.mark.filterwarnings("error::fxfuse.FxfuseWarning")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", FUSED)
def test_fused(name: str, dynamic: bool, device: str) -> None:
    sites = _compare(FUSED[name], device, dynamic)
    assert sites
    assert {site.status for site in sites} == {"fused"}, sites
    for site in sites:
        assert site.reason is None
        assert site.bytes_saved > 0
        assert site.pattern
        assert site.variant
        assert "programs.py:" in site.where


@pytest.mark.filterwarnings("error::fxfuse.FxfuseWarning")
@pytest.mark.parametrize("name", FUSED)
def test_fused_in_little_memory(name: str, device: str) -> None:
    assert {site.status for site in _compare(FUSED[name], device, False, memory=1)} == {"fused"}


@pytest.mark.filterwarnings("error::fxfuse.FxfuseWarning")
@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str, device: str) -> None:
    code, program = KEPT[name]
    sites = _compare(program, device, dynamic=False)
    assert [site.reason.code for site in sites if site.reason] == [code] * len(sites)
    for site in sites:
        assert site.status == "kept"
        assert site.bytes_saved == 0
        assert site.reason is not None and site.reason.sentence and site.reason.remedy


def test_every_rule_has_a_program() -> None:
    """A rule that no program applies is untested."""
    if len(RAN) < len(FUSED) + len(KEPT):
        pytest.skip("runs after all programs, in the same process")
    rows = {row.apply for row in (*rules.TABLE.values(), *rules.HEADS.values())}
    assert {apply.__name__ for apply in rows - USED} == set()
