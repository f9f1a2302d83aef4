"""Every program of ``programs`` through both drivers: same values, gradients and effects as eager, as expected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import dense_reads
from programs import DEFERRED, FUSED, FUSED_IN_GRAPHS, KEPT, DeferredWorld, World
from torch.utils._pytree import tree_leaves

import fxfuse
from fxfuse import rules
from fxfuse.deferred import DeferredLogits

# Their strides are symbols then, which the caller does not know.
NOT_DYNAMIC = ("returned_from_another_mode", "returned_strided", "returned_some_classes")
IN_GRAPHS = FUSED | FUSED_IN_GRAPHS
OPTIONS = {"fxfuse.inner": "eager", "fxfuse.min_logits_bytes": 0}
# By driver: the programs that ran and the rules that they applied.
RAN: dict[str, set[Any]] = {"graph": set(), "run time": set()}
USED: dict[str, set[Any]] = {"graph": set(), "run time": set()}
# Of kept programs, those whose logits are of more projections than one.
PROJECTIONS = {"squared": 2}


@pytest.fixture
def driver() -> str:
    return "graph"


@pytest.fixture(autouse=True)
def _note_rules(driver: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remember which rules the programs apply."""
    call = rules.Rule.__call__

    def noted(self: rules.Rule, *args: Any) -> Any:
        out = call(self, *args)  # a refusal is no case
        USED[driver].add(self.apply)
        return out

    monkeypatch.setattr(rules.Rule, "__call__", noted)
    yield


def _flat(out: Any) -> tuple[torch.Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def _run(program: Callable[[World], Any], world: World) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
    outs = _flat(program(world))
    differentiable = [out for out in outs if out.requires_grad]
    if not differentiable:
        return outs, ()
    # Distinct upstream gradients, so that a swapped or dropped one shows.
    upstream = [torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype, device=out.device).view(out.shape) + i
                for i, out in enumerate(differentiable)]  # fmt: skip
    return outs, torch.autograd.grad(differentiable, world.leaves(), upstream, allow_unused=True)


def _assert_same(program: Callable[[World], Any], ours: Callable[[World], Any], world: World, device: str) -> None:
    """``ours`` in ``world`` does what ``program`` does in eager, to everything that the caller can see."""
    eager_world = World.make(device=device)
    expected, expected_grads = _run(program, eager_world)
    actual, grads = _run(ours, world)
    assert [a.requires_grad for a in actual] == [e.requires_grad for e in expected]
    assert [a.is_leaf for a in actual] == [e.is_leaf for e in expected]
    assert [a.stride() for a in actual] == [e.stride() for e in expected]
    torch.testing.assert_close([a * 1 for a in actual], [e * 1 for e in expected], equal_nan=True)
    torch.testing.assert_close(grads, expected_grads, equal_nan=True)
    for mine, theirs in zip(vars(world).values(), vars(eager_world).values(), strict=True):
        torch.testing.assert_close(mine, theirs)


# --- the graph driver -----------------------------------------------------------------------------------------


def _compare(program: Callable[[World], Any], device: str, dynamic: bool, memory: int = 0) -> tuple[fxfuse.Site, ...]:
    torch._dynamo.reset()
    RAN["graph"].add(program)
    before = len(fxfuse.sites())
    compiled = torch.compile(
        program, backend="fxfuse", options=OPTIONS | {"fxfuse.memory": memory}, dynamic=dynamic, fullgraph=True
    )
    _assert_same(program, compiled, World.make(device=device), device)
    return fxfuse.sites()[before:]


@pytest.mark.filterwarnings("error::fxfuse.FxfuseWarning")
@pytest.mark.parametrize(
    "dynamic", [pytest.param(False, id="static"), pytest.param(True, id="dynamic", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", IN_GRAPHS)
def test_fused(name: str, dynamic: bool, device: str) -> None:
    if (name, dynamic, device) == ("recurrent", True, "cuda"):
        pytest.skip("PyTorch does not trace gru_cell of symbolic sizes on CUDA")
    sites = _compare(IN_GRAPHS[name], device, dynamic)
    assert sites
    assert {site.status for site in sites} == {"fused"}, sites
    for site in sites:
        assert site.reason is None
        not_built = site.logits_bytes + site.converted_bytes + site.gradient_bytes
        assert site.bytes_saved == max(0, not_built - site.copied_bytes) and not_built > 0
        assert site.pattern
        assert site.variant
        assert "programs.py:" in site.where


@pytest.mark.filterwarnings("error::fxfuse.FxfuseWarning")
@pytest.mark.parametrize("name", ["smoothed_by_one_hot", "softcap_temperature", "temperatures"])
def test_fused_with_a_default_device(name: str, device: str) -> None:
    """Whose mode Dynamo traces: it writes down ``torch.rsub(x, 1)``, say, for ``1 - x``."""
    with torch.device(device):
        assert {site.status for site in _compare(IN_GRAPHS[name], device, False)} == {"fused"}


@pytest.mark.slow
@pytest.mark.filterwarnings("error::fxfuse.FxfuseWarning")
@pytest.mark.parametrize("name", IN_GRAPHS)
def test_fused_in_little_memory(name: str, device: str) -> None:
    assert {site.status for site in _compare(IN_GRAPHS[name], device, False, memory=1)} == {"fused"}


@pytest.mark.filterwarnings("error::fxfuse.FxfuseWarning")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", DEFERRED)
def test_deferred(name: str, dynamic: bool, device: str) -> None:
    sites = _compare(DEFERRED[name], device, dynamic)
    if name in NOT_DYNAMIC and dynamic:
        assert {site.reason.code for site in sites if site.reason} == {"returned"}
    else:
        assert {site.status for site in sites} <= {"deferred", "fused"}, sites
        assert "deferred" in {site.status for site in sites}


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


# --- the run-time driver --------------------------------------------------------------------------------------


def _compare_at_run_time(program: Callable[[World], Any], device: str) -> int:
    """How often deferred logits were built."""
    RAN["run time"].add(program)
    with dense_reads() as reads:
        _run(program, DeferredWorld.make(device=device))
    _assert_same(program, program, DeferredWorld.make(device=device), device)
    return len(reads)


@pytest.mark.parametrize("driver", ["run time"])
@pytest.mark.parametrize("name", FUSED)
def test_fused_at_run_time(name: str, driver: str, device: str) -> None:
    assert _compare_at_run_time(FUSED[name], device) == 0


@pytest.mark.parametrize("driver", ["run time"])
@pytest.mark.parametrize("name", FUSED)
def test_fused_at_run_time_in_inference_mode(name: str, driver: str, device: str) -> None:
    """As under no_grad; programs that take a gradient raise as in eager."""
    outcomes = []
    for mode, world in ((torch.no_grad, DeferredWorld), (torch.inference_mode, DeferredWorld), (torch.no_grad, World)):
        with mode(), dense_reads() as reads:
            try:
                results = [
                    t for t in tree_leaves(FUSED[name](world.make(device=device))) if isinstance(t, torch.Tensor)
                ]
            except RuntimeError as error:
                assert "does not require grad" in str(error)
                results = []
        outcomes.append(([t.detach() for t in results], reads))
    (of_no_grad, read), (of_inference, read_there), (expected, _) = outcomes
    assert read_there == read
    torch.testing.assert_close(of_inference, expected, equal_nan=True)
    torch.testing.assert_close(of_no_grad, expected, equal_nan=True)


@pytest.mark.parametrize("driver", ["run time"])
@pytest.mark.parametrize("name", FUSED_IN_GRAPHS)
def test_built_at_run_time(name: str, driver: str, device: str) -> None:
    assert _compare_at_run_time(FUSED_IN_GRAPHS[name], device) > 0


@pytest.mark.parametrize("driver", ["run time"])
@pytest.mark.parametrize("name", DEFERRED)
def test_deferred_at_run_time(name: str, driver: str, device: str) -> None:
    _compare_at_run_time(DEFERRED[name], device)
    with dense_reads() as reads:  # not of the backward, where tanh reads what it returned
        DEFERRED[name](DeferredWorld.make(device=device))
    assert bool(reads) == (name == "returned_written")


@pytest.mark.parametrize("driver", ["run time"])
@pytest.mark.parametrize("name", KEPT)
def test_kept_at_run_time(name: str, driver: str, device: str) -> None:
    """Right all the same; where eager builds logits, they are built, and each part of them once."""
    assert _compare_at_run_time(KEPT[name][1], device) <= PROJECTIONS.get(name, 1)


# --- both -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", RAN)
def test_every_rule_has_a_program(which: str) -> None:
    """A rule that no program applies is untested, under either driver."""
    if len(RAN[which]) < len(IN_GRAPHS) + len(KEPT) + len(DEFERRED):
        pytest.skip("runs after all programs, in the same process")
    rows = set(rules.TABLE.values())
    if which == "graph":  # at run time there is no projection, and others write by what they are without writing
        rows |= {*rules.HEADS.values(), *rules.IN_PLACE.values()}
    assert {row.apply.__name__ for row in rows if row.apply not in USED[which]} == set()


def test_the_programs_made_deferred_logits() -> None:
    assert isinstance(DeferredWorld.make().z, DeferredLogits)
