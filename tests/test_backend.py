"""The backend: its options and modes, the entry point, and what reaches Inductor."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled, new_sites
from programs import HIDDEN, VOCAB, World, ce
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_fw_bw_and_get_code
from torch.utils.checkpoint import checkpoint

import fxfuse
from fxfuse import backend, compat, escape
from fxfuse.options import Options

PACKAGE = Path(fxfuse.__file__).parent


def loss(s: World) -> torch.Tensor:
    return ce(s.z, s.y)


def log_probs(s: World) -> torch.Tensor:
    return F.log_softmax(s.z, -1).gather(-1, s.y[..., None]).sum()


def returned(s: World) -> Any:
    z = s.z
    return ce(z, s.y), z


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


# --- options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fxfuse.min_logit_bytes": 0}, "did you mean 'fxfuse.min_logits_bytes'"),
        ({"fxfuse.inner": "inductr"}, r"fxfuse.inner' must be one of (?!.*\bfxfuse,)"),
        ({"fxfuse.inner": "fxfuse"}, "fxfuse.inner"),
        ({"fxfuse.min_logits_bytes": -1}, "fxfuse.min_logits_bytes"),
        ({"fxfuse.memory": 2**63}, "fxfuse.memory"),
        ({"fxfuse.min_logits_bytes": "0"}, "fxfuse.min_logits_bytes"),
        ({"fxfuse.enabled": 1}, "fxfuse.enabled"),
        ({"fxfuse.strict": None}, "fxfuse.strict"),
        ({"max_autotun": True}, "did you mean 'max_autotune'"),
        ({"fxfus.strict": True}, "did you mean 'fxfuse.strict'"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        torch.compile(loss, backend="fxfuse", options=options)(World.make())


def test_own_options_are_split_from_inductors() -> None:
    own, rest = Options.parse({"fxfuse.min_logits_bytes": 3, "max_autotune": False, "fxfuse.strict": True})
    assert own == Options(min_logits_bytes=3, strict=True)
    assert rest == {"max_autotune": False}
    assert Options.parse(None) == (Options(), {})


def test_min_logits_bytes() -> None:
    size = 2 * 5 * VOCAB * 8
    for limit, status in ((0, "fused"), (size, "fused"), (size + 1, "kept")):
        torch._dynamo.reset()
        with new_sites() as sites:
            compiled(loss, min_logits_bytes=limit)(World.make())
        assert [site.status for site in sites] == [status], limit
    assert sites[0].reason is not None and sites[0].reason.code == "too_small"


def test_with_bounded_memory_gradients_are_made_in_the_backward() -> None:
    worlds = World.make(), World.make()
    with new_sites() as sites:
        found = [f(world) for f, world in zip((compiled(loss, memory=1, inner="aot_eager"), loss), worlds, strict=True)]
    torch.testing.assert_close(*found)
    grads = [torch.autograd.grad(f, (world.x, world.w)) for f, world in zip(found, worlds, strict=True)]
    torch.testing.assert_close(*grads)
    assert [site.variant for site in sites] == ["recompute in backward"]


def test_disabled() -> None:
    with new_sites() as sites:
        torch.testing.assert_close(compiled(loss, enabled=False)(World.make()), loss(World.make()))
    assert sites == []


def test_strict_raises_what_the_user_can_mend() -> None:
    with pytest.raises(fxfuse.FxfuseError, match=r"programs.py:\d+.*return only the loss"):
        compiled(returned, strict=True, defer_logits=False)(World.make())
    compiled(loss, strict=True)(World.make())
    torch._dynamo.reset()
    compiled(loss, strict=True, min_logits_bytes=1 << 30)(World.make())  # too small is no fault of the user


# --- what reaches the inner backend ---------------------------------------------------------------------------


def test_a_compiled_graph_is_called_without_a_second_wrapper_of_dynamo() -> None:
    """And nothing else that Dynamo has wrapped is unwrapped: a backend may return what is compiled by another."""
    callers: list[str] = []

    def run() -> tuple[()]:
        callers.append(sys._getframe(1).f_code.co_name)
        return ()

    call = escape.restored(torch._dynamo.disable(run), 0, (), (), least=0, memory=0)
    call()
    assert callers == [call.__name__]
    outer = torch.compile(run, backend="eager")
    assert compat.undisabled(run) is run
    assert compat.undisabled(outer) is outer


def test_inductors_mode_and_options_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def spy(name: str, mode: Any, options: Any) -> Any:
        seen.append((name, mode, options))
        return lambda gm, inputs: gm

    monkeypatch.setattr(compat, "inner_backend", spy)
    torch.compile(loss, backend="fxfuse", mode="max-autotune")(World.make())
    torch._dynamo.reset()
    torch.compile(loss, backend="fxfuse", options={"shape_padding": True, "fxfuse.enabled": True})(World.make())
    assert seen == [("inductor", "max-autotune", {}), ("inductor", None, {"shape_padding": True})]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(mode: str, device: str) -> None:
    s = World.make(torch.float32, device)
    torch.testing.assert_close(torch.compile(loss, backend="fxfuse", mode=mode)(s), loss(s))


def test_inductor_compiles_ops_without_their_formulas_of_autograd(device: str) -> None:
    """As a graph of AOTAutograd has no use for them; unless the program has a pass of its own there."""

    class Own(CustomGraphPass):
        graphs = 0

        def __call__(self, graph: torch.fx.Graph) -> None:
            self.graphs += 1

        def uuid(self) -> str:
            return "own"

    def code(program: Any = loss, everywhere: Own | None = None, **options: Any) -> str:
        torch._dynamo.reset()
        s = World.make(torch.float32, device)
        step = torch.compile(program, backend="fxfuse", options={"fxfuse.min_logits_bytes": 0, **options})
        with inductor_config.patch(force_disable_caches=True, post_grad_custom_post_pass=everywhere):
            value, sources = run_fw_bw_and_get_code(lambda: step(s))
        torch.testing.assert_close(value, program(s))
        return "".join(sources)

    without = code()
    assert "fxfuse.linear_loss.beneath_autograd(" in without and "fxfuse.linear_loss.default(" not in without
    # What the backward computes again is compiled when that is first called.
    without = code(lambda s: checkpoint(log_probs, s, use_reentrant=False))
    assert without.count("= torch.ops.fxfuse.linear_stats.beneath_autograd(") == 2, without
    assert "fxfuse.linear_stats.default(" not in without
    own, its = Own(), Own()
    assert "fxfuse.linear_loss.default(" in code(everywhere=own) and own.graphs > 0
    assert "fxfuse.linear_loss.default(" in code(post_grad_custom_post_pass=its) and its.graphs > 0


def test_gradients_are_scaled_where_they_are(device: str) -> None:
    """Those that are a backward's results, which may write to them; where more is done to one, that is fused."""

    def scaled(program: Any, factor: float = 1.0, graphs: bool = False, donated: bool = True) -> int:
        torch._dynamo.reset()
        s = World.make(torch.float32, device)
        options = {"fxfuse.min_logits_bytes": 0, "triton.cudagraphs": graphs}
        step = torch.compile(program, backend="fxfuse", dynamic=False, options=options)
        with inductor_config.patch(force_disable_caches=True), functorch_config.patch(donated_buffer=donated):
            _, (*_, backward) = run_fw_bw_and_get_code(lambda: step(s) * factor)
            # Under CUDA graphs they lie where the next backward writes.
            first = [None if leaf.grad is None else leaf.grad.clone() for leaf in s.leaves()]
            for leaf in s.leaves():
                leaf.grad = None
            value = step(s)
            for kept in (False,) if donated else (True, False):  # the last adds to what the first gave
                (value * factor).backward(retain_graph=kept)
        e = World.make(torch.float32, device)
        (program(e) * factor).backward()
        for leaf, other, gradient in zip(s.leaves(), e.leaves(), first, strict=True):
            torch.testing.assert_close(gradient, other.grad)
            if gradient is not None:
                torch.testing.assert_close(leaf.grad, other.grad * (1 if donated else 2))
        assert "fxfuse.scaled." not in backward
        return backward.count("fxfuse.scale_.default(")

    def with_bias(s: World) -> torch.Tensor:
        return ce(F.linear(s.x.sin(), s.w, s.b), s.y)

    def tied(s: World) -> torch.Tensor:
        return ce(F.linear(s.x, s.w), s.y) + s.w.square().sum()

    assert scaled(loss) == 1
    assert scaled(with_bias, 3.0) == 2
    assert scaled(tied, 3.0) == 0
    assert scaled(loss, 3.0, donated=False) == 0  # a program may keep the graph for another backward then
    assert scaled(loss, 3.0, graphs=True) == 0  # Inductor makes none of what writes to its inputs


def test_a_backward_that_writes_to_what_was_saved_is_not_cached_for_programs_that_keep_their_graph(device: str) -> None:
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        for donated in (True, False):
            torch._dynamo.reset()
            s, e = World.make(torch.float32, device), World.make(torch.float32, device)
            step = torch.compile(loss, backend="fxfuse", dynamic=False, options={"fxfuse.min_logits_bytes": 0})
            with functorch_config.patch(donated_buffer=donated):
                for run, world in ((step, s), (loss, e)):
                    value = run(world) * 3.0
                    for kept in (False,) if donated else (True, False):
                        value.backward(retain_graph=kept)
            torch.testing.assert_close([s.x.grad, s.w.grad], [e.x.grad, e.w.grad])


class Centred(torch.nn.Module):
    """Activations from which buffers and an argument are taken, none of which eager needs for the backward."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.embedding = torch.nn.Embedding(VOCAB, 8)
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
        self.head = torch.nn.Linear(8, VOCAB, bias=False)
        self.register_buffer("step", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("count", torch.zeros(200)[60:92])

    def forward(self, ids: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        a = F.gelu(self.up(x))
        h = a - self.mean - self.count.view(4, 8).flatten() + torch.sin(self.step) - shift
        if self.writes:
            self.step += 1
            shift.add_(1)
            with torch.no_grad():
                self.mean.lerp_(a.mean((0, 1)), 0.1)
                self.count.add_(1)
        return F.cross_entropy(self.head(x + self.down(h)).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize(
    ("writes", "between"),
    [(True, "nothing"), (False, "nothing"), (False, "writes"), (False, "writes behind autograd's back")],
)
def test_what_is_computed_again_is_of_inputs_as_they_were(writes: bool, between: str, device: str) -> None:
    runs = []
    for options in (None, {"fxfuse.min_logits_bytes": 0}):
        torch.manual_seed(0)
        model = Centred(writes).to(device, torch.float64)
        run = model if options is None else torch.compile(model, backend="fxfuse", options=options)
        ids, shift = torch.arange(10, device=device).view(2, 5), torch.ones(32, device=device, dtype=torch.float64)
        for _ in range(2):
            loss = run(ids, shift)
            for buffer in (*model.buffers(), shift) if between != "nothing" else ():
                with torch.no_grad():
                    (buffer if between == "writes" else buffer.data).mul_(0.5).add_(1)
            loss.backward()
        runs.append([*(p.grad for p in model.parameters()), *model.buffers(), loss])
    for ours, eager in zip(*runs, strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("behind", [False, True], ids=["a write", "a write behind autograd's back"])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_parameters_that_eagers_backward_does_not_need(autocast: bool, trained: bool, behind: bool) -> None:
    """What is only added may be written to once the forward has read it, and what autocast casts."""
    runs = []
    for compiled_ in (False, True):
        torch.manual_seed(0)
        up, down, head = torch.nn.Linear(8, 48), torch.nn.Linear(48, 8), torch.nn.Linear(8, VOCAB)
        added = torch.nn.Parameter(torch.ones(48), requires_grad=trained)
        viewed = torch.nn.Parameter(torch.ones(6, 8), requires_grad=trained)

        def loss(x: torch.Tensor, y: torch.Tensor, parts: Any = (up, down, head, added, viewed)) -> torch.Tensor:
            up, down, head, added, viewed = parts
            h = F.gelu(up(x)) + added
            return F.cross_entropy(head(down(h.sin() + viewed.view(48))), y)

        step = torch.compile(loss, backend="fxfuse", options={"fxfuse.min_logits_bytes": 0}) if compiled_ else loss
        x, y = torch.randn(64, 8), torch.arange(64) % VOCAB
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = step(x, y)
        for written in (added, viewed, up.weight, down.weight) if autocast else (added, viewed):
            with torch.no_grad():
                (written.data if behind else written).mul_(3)
        value.backward()
        runs.append([p.grad for p in (*up.parameters(), *down.parameters(), added)])
    for ours, eager in zip(*runs, strict=True):
        torch.testing.assert_close(ours, eager, **({"rtol": 3e-2, "atol": 1e-3} if autocast else {}))


def test_an_input_with_gaps_that_is_read_with_strides_of_its_own() -> None:
    """As audio models cut a signal into frames."""
    torch.manual_seed(0)
    frames, head = torch.nn.Linear(16, 8), torch.nn.Linear(8, VOCAB)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        x = x.as_strided((batch, length // 2, 2 * width), (x.stride(0), 2 * x.stride(1), x.stride(2)))
        return F.cross_entropy(head(frames(x)).flatten(0, 1), y.flatten())

    step = torch.compile(loss, backend="fxfuse", options={"fxfuse.min_logits_bytes": 0})
    x, y = torch.randn(3, 10, 8)[:, :8], torch.arange(12).view(3, 4) % VOCAB
    torch.testing.assert_close(step(x, y), loss(x, y))


def test_an_input_of_a_subclass_beside_a_fused_head() -> None:
    embed, head = torch.nn.Embedding(VOCAB, 8), torch.nn.Linear(8, VOCAB)

    def loss(nested: torch.Tensor) -> torch.Tensor:
        ids = nested.values()
        return F.cross_entropy(head(embed(ids)), ids)

    ids = torch.nested.nested_tensor([torch.arange(n) for n in (3, 5)], layout=torch.jagged)
    with new_sites() as sites:
        value = torch.compile(loss, backend="fxfuse", options={"fxfuse.min_logits_bytes": 0})(ids)
    torch.testing.assert_close(value, loss(ids))
    assert [site.status for site in sites] == ["fused"]


def test_a_pass_of_the_program_for_joint_graphs_is_kept() -> None:
    """What its backward computes again is then left to Inductor."""
    seen: list[int] = []
    ours = torch.nn.Linear(8, VOCAB)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(ours(x), y)

    with torch._inductor.config.patch(
        joint_custom_pre_pass=compat._graph_pass(lambda graph: seen.append(len(graph.nodes)), "seen")
    ):
        step = torch.compile(loss, backend="fxfuse", options={"fxfuse.min_logits_bytes": 0})
        x, y = torch.randn(6, 8), torch.arange(6)
        torch.testing.assert_close(step(x, y), loss(x, y))
    assert seen


def test_a_view_of_an_input_that_is_returned_stays_one(device: str) -> None:
    w = torch.nn.Parameter(torch.randn(VOCAB, 4, device=device))
    ids, x = torch.arange(6, device=device), torch.randn(6, 4, device=device)

    @torch.compile(backend="fxfuse", options={"fxfuse.min_logits_bytes": 0})
    def program(x: torch.Tensor, returned: bool) -> Any:
        h = x.sin() * x
        loss = F.cross_entropy(F.linear(h, w), ids)
        return (loss, x[1:]) if returned else (loss, h)

    for returned in (False, True):
        loss, view = program(x, returned)
        torch.testing.assert_close(loss, F.cross_entropy(F.linear(x.sin() * x, w), ids))
        loss.backward()
    assert view.data_ptr() == x[1:].data_ptr()


def test_a_head_beside_a_nested_graph(device: str) -> None:
    """Of which it is not known what its backward may write to."""

    @torch.compiler.nested_compile_region
    def block(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + x

    def program(s: World) -> torch.Tensor:
        return ce(F.linear(block(block(s.x)), s.w), s.y)

    runs = []
    for f in (program, torch.compile(program, backend="fxfuse", options={"fxfuse.min_logits_bytes": 0})):
        s = World.make(torch.float64, device)
        loss = f(s)
        loss.backward()
        runs.append((loss, s.x.grad, s.w.grad))
    torch.testing.assert_close(*runs)


def test_the_cache_key_is_salted_only_where_something_was_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    tags: list[str] = []

    def spy(name: str, mode: Any, options: Any) -> Any:
        return lambda gm, inputs: tags.append(torch.compiler.config.cache_key_tag) or gm

    monkeypatch.setattr(compat, "inner_backend", spy)
    step = {"fxfuse.min_logits_bytes": 0}
    torch.compile(loss, backend="fxfuse", options=step)(World.make())
    torch.compile(returned, backend="fxfuse", options=step)(World.make())
    torch.compile(lambda s: s.x.sum(), backend="fxfuse", options=step)(World.make())
    torch.compile(returned, backend="fxfuse", options=step | {"fxfuse.defer_logits": False})(World.make())
    assert tags == [backend.fingerprint(), backend.fingerprint(), "", ""]
    assert torch.compiler.config.cache_key_tag == ""


@pytest.mark.parametrize("fuses", [True, False])
def test_activations_that_products_of_the_backward_read_are_recomputed(fuses: bool) -> None:
    """A gated MLP keeps its two factors and not their product, but where nothing is fused, as Inductor alone would."""

    def step(s: World, gate: Any, up: Any, down: Any, offset: Any) -> torch.Tensor:
        gated = F.silu(s.x @ gate) * (s.x @ up) + offset  # of which a copy is smaller than this sum
        gated = gated - offset.view(2, 24).flatten()[None]  # through views as well
        body = gated @ down
        return ce(F.linear(body, s.w), s.y) if fuses else body.square().mean()

    def measured(**options: Any) -> tuple[int, torch.Tensor, tuple[torch.Tensor, ...]]:
        """How many activations of the gated MLP's size are kept, the loss and its gradients."""
        torch._dynamo.reset()
        s = World.make()
        s.x.requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        rows, hidden = s.x[..., 0].numel(), s.x.shape[-1]
        shapes = (hidden, 48), (hidden, 48), (48, hidden), (48,)
        body = [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=s.x.dtype)) for shape in shapes]
        kept = 0

        def pack(t: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += t.numel() == rows * 48
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            value = compiled(step, inner="inductor", **options)(s, *body)
        return kept, value.detach(), torch.autograd.grad(value, body)

    kept, value, grads = measured()
    kept_without, value_without, grads_without = measured(recompute=False)
    assert (kept, kept_without) == (2 if fuses else 3, 3)
    torch.testing.assert_close((value, grads), (value_without, grads_without), rtol=0, atol=0)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_numbers_of_a_module_that_is_compiled_for_all_sizes(inner: str) -> None:
    """Dynamo gives them as tensors that a graph reads with ``item``, as it does epsilons of transformers' norms."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(HIDDEN, dtype=torch.float64)
            self.eps = 0.125

        def forward(self, s: World) -> torch.Tensor:
            return ce(F.linear(self.norm(s.x) * (s.x.square().mean() + self.eps).rsqrt(), s.w), s.y)

    torch._dynamo.reset()
    s, model = World.make(), Model()
    s.x.requires_grad_(False)  # else nothing is copied
    leaves = [s.w, *model.parameters()]
    expected = torch.autograd.grad(model(s), leaves)
    value = torch.compile(
        model,
        backend="fxfuse",
        dynamic=True,
        fullgraph=True,
        options={"fxfuse.inner": inner, "fxfuse.min_logits_bytes": 0},
    )(s)
    torch.testing.assert_close(torch.autograd.grad(value, leaves), expected)


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("of", ["weight", "hidden states"])
def test_arguments_that_come_to_share_memory(of: str, inner: str) -> None:
    """The graph writes to ``v``: where that is what the logits are of, they are those of before, as in eager."""

    def program(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
        z = F.linear(x, w)
        v.add_(1)
        return z, z.logsumexp(-1)

    def run(f: Any) -> list[torch.Tensor]:
        s, results = World.make(), []
        for shares in (False, True, False):
            x, w = s.x.detach().clone(), s.w.detach().clone()
            v = (w if of == "weight" else x).view(-1)[:17]
            results += [one * 1 for one in f(x, w, v if shares else v.clone())]
        return results

    ours = compiled(program, inner=inner)
    with new_sites() as sites, pytest.warns(fxfuse.FxfuseWarning, match=r"share memory.*clone"):
        actual = run(ours)
    torch.testing.assert_close(actual, run(program))
    assert [site.status for site in sites] == ["deferred"]


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_temperature_that_changes_from_step_to_step(inner: str) -> None:
    """Dynamo makes a symbol of a number that it sees change."""

    def program(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, y: torch.Tensor, t: float) -> torch.Tensor:
        return ce(F.linear(x, w, b) / t, y) + (F.linear(x, w) * t).logsumexp(-1).mean()

    s = World.make()
    options = {"fxfuse.inner": inner, "fxfuse.min_logits_bytes": 0}
    ours = torch.compile(program, backend="fxfuse", options=options)
    with new_sites() as sites:
        for t in (0.5, 0.6, 0.7, 0.0):
            actual, expected = ours(s.x, s.w, s.b, s.y, t), program(s.x, s.w, s.b, s.y, t)
            torch.testing.assert_close(actual, expected, equal_nan=True)
            found, wanted = (torch.autograd.grad(loss, s.leaves()) for loss in (actual, expected))
            torch.testing.assert_close(found, wanted, equal_nan=True)
    statuses = [site.status for site in sites]
    assert statuses[:4] == ["fused"] * 4, "a static compilation and one for any number"
    # Under Inductor zero is a constant then, by which logits are not multiplied either.
    assert statuses[4:] == ["kept", "kept" if inner == "inductor" else "fused"], "logits are not divided by zero"


@pytest.mark.parametrize(
    "scaled",
    [
        lambda z, t: z.float() / t,
        lambda z, t: z / t.expand(z.shape[1], 1),
        lambda z, t: z / t.half(),
        lambda z, t: z.float() * t.reciprocal().expand(z.shape[-1]),
    ],
    ids=["converted", "by_rows", "float16", "by_classes"],
)
def test_a_temperature_of_float16_logits(scaled: Any) -> None:
    """It would scale the hidden states or the weight, which float16 may be too narrow for."""

    def program(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return ce(scaled(F.linear(x, w), t), y)

    s = World.make(torch.float16)
    t = torch.tensor(1e-3)
    with new_sites() as sites:
        actual = compiled(program)(s.x * 100, s.w / 100, s.y, t)
    torch.testing.assert_close(actual, program(s.x * 100, s.w / 100, s.y, t))
    assert [site.reason.code for site in sites if site.reason] == ["dtype"]


BFLOAT16 = {"rtol": 1e-2, "atol": 0.07}  # of logits of up to 16, less a bias
_DTYPES = {
    "a_wider_weight": (torch.bfloat16, torch.float32, torch.float32),
    "a_narrower_weight": (torch.float32, torch.float16, torch.float32),
    "of_16_bits_each": (torch.float16, torch.bfloat16, torch.bfloat16),
    "a_bias_alone": (torch.bfloat16, torch.bfloat16, torch.float32),
    "a_float64_weight": (torch.float32, torch.float64, torch.float64),
    "a_bias_of_numbers": (torch.float32, torch.float32, torch.int64),
}


@pytest.mark.parametrize("dtypes", _DTYPES.values(), ids=_DTYPES)
@pytest.mark.parametrize("escapes", [False, True])
def test_operands_of_different_dtypes(dtypes: tuple[torch.dtype, ...], escapes: bool) -> None:
    """Eager raises outside of autocast, which tensors without data do not; under autocast it converts all but float64
    and numbers that are no floats."""

    def program(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = F.linear(x, w, b)
        return z if escapes else ce(z, y)

    s = World.make(torch.float32)
    operands = [t.detach().to(dtype) for t, dtype in zip((s.x.flatten(0, 1), s.w, s.b), dtypes, strict=True)]
    for t in operands:
        t.requires_grad_(t.is_floating_point())
    y = s.y.flatten()
    with pytest.raises(RuntimeError, match="same dtype"):
        program(*operands, y)
    with new_sites() as sites, pytest.raises(RuntimeError, match="same dtype"):
        compiled(program)(*operands, y)
    assert [site.reason.code for site in sites if site.reason] == ["dtype"]

    converted = set(dtypes) <= {torch.float32, torch.float16, torch.bfloat16}
    with torch.autocast("cpu", dtype=torch.bfloat16), new_sites() as sites:
        if converted:
            torch.testing.assert_close(compiled(program)(*operands, y), program(*operands, y), **BFLOAT16)
        else:
            with pytest.raises(RuntimeError, match="same dtype"):
                compiled(program)(*operands, y)
    assert [site.status for site in sites] == ["kept" if not converted else "deferred" if escapes else "fused"]


@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpointed_head_under_autocast(nested: bool) -> None:
    """The graph that is checkpointed does not enter it; the one around does."""

    def loss(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        body = lambda x, w: ce(F.linear(x, w), y)  # noqa: E731
        if nested:
            return checkpoint(lambda x, w: checkpoint(body, x, w, use_reentrant=False), x, w, use_reentrant=False)
        return checkpoint(body, x, w, use_reentrant=False)

    def program(x: torch.Tensor, a: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(F.linear(x, a), w, y)  # bfloat16 and float32

    s = World.make(torch.float32)
    operands = s.x.flatten(0, 1), torch.eye(HIDDEN), s.w, s.y.flatten()
    with new_sites() as sites:
        actual = compiled(program)(*operands)
    torch.testing.assert_close(actual, program(*operands), **BFLOAT16)
    assert [site.status for site in sites] == ["fused"]


@pytest.mark.parametrize("wide", [0, 1])
def test_autocast_on_a_cpu_does_not_convert_what_mv_is_given(wide: int) -> None:
    s = World.make(torch.bfloat16)
    operands = [s.w.detach(), s.x[0, 0].detach()]
    operands[wide] = operands[wide].float()
    program = lambda w, x: torch.mv(w, x).logsumexp(-1)  # noqa: E731
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for run in (program, compiled(program)):
            with pytest.raises(RuntimeError, match=r"same dtype|scalar type"):
                run(*operands)


def test_a_view_made_under_no_grad_begins_no_gradient() -> None:
    def program(s: World) -> Any:
        z = s.z
        with torch.no_grad():
            view = z[:]
        return ce(view.reshape(1, -1, VOCAB), s.y.reshape(1, -1))

    s, expected = World.make(), World.make()
    compiled(program)(s).backward()
    program(expected).backward()
    assert all(leaf.grad is None for leaf in (*s.leaves(), *expected.leaves()))


def _divided_by_no_tokens(s: World) -> torch.Tensor:
    y = torch.full_like(s.y, -100)
    return ce(s.zb, y, reduction="sum") / (y >= 0).sum()


def _sequences_of_which_one_is_ignored(s: World) -> torch.Tensor:
    labels = torch.full_like(s.y[0], -100), s.y[1]
    losses = [F.cross_entropy(z, y, reduction="sum") / (y >= 0).sum() for z, y in zip(s.zb, labels, strict=True)]
    return torch.stack(losses).nanmean()


@pytest.mark.parametrize("loss", [_divided_by_no_tokens, _sequences_of_which_one_is_ignored])
def test_gradients_of_no_rows_are_zero_whatever_comes_back(loss: Any, device: str) -> None:
    """Eager's are, where what comes back is infinite or NaN."""
    ours, eager = World.make(device=device), World.make(device=device)
    with new_sites() as sites:
        compiled(loss)(ours).backward()
    loss(eager).backward()
    assert sites and all(site.status == "fused" for site in sites)
    for mine, theirs in zip(ours.leaves(), eager.leaves(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


# --- Inductor itself ------------------------------------------------------------------------------------------


def test_through_inductor(device: str) -> None:
    """Values and gradients of a model with Inductor on both sides of the head."""
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Embedding(300, 32), torch.nn.Linear(32, 32), torch.nn.GELU()).to(device)
    head = torch.nn.Linear(32, 300, device=device)
    params = [*body.parameters(), *head.parameters()]

    def step(ids: torch.Tensor) -> torch.Tensor:
        z = head(body(ids))[:, :-1].float()
        per_token = F.cross_entropy(z.reshape(-1, 300), ids[:, 1:].reshape(-1), reduction="none")
        return per_token.mean() + 1e-3 * z.logsumexp(-1).pow(2).mean()

    fused = torch.compile(step, backend="fxfuse", options={"fxfuse.min_logits_bytes": 0})
    for length in (9, 17, 33):  # the second length makes the sizes symbolic
        ids = torch.randint(300, (3, length), device=device)
        with new_sites() as sites:
            actual = fused(ids)
        expected = step(ids)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(torch.autograd.grad(actual, params), torch.autograd.grad(expected, params))
        assert all(site.status == "fused" for site in sites)
        assert bool(sites) == (length < 33), "one static compilation and one dynamic, no more"


SCRIPT = """
import torch
x = torch.ones(4, 8, requires_grad=True)
w = torch.nn.Parameter(torch.linspace(-1, 1, 8 * 50).view(50, 8))
def f(x):
    return torch.nn.functional.cross_entropy(x @ w.T, torch.arange(4))
torch.compile(f, backend="fxfuse", options={"fxfuse.min_logits_bytes": 0})(x).backward()
print(float(w.grad.norm()))
"""


def _run(tmp_path: Path, package_parent: Path, script: str = SCRIPT, **env: str) -> float:
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(package_parent), **env}
    (tmp_path / "script.py").write_text(script)  # which Dynamo's caches look at
    done = subprocess.run([sys.executable, "script.py"], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.slow
def test_an_edited_gradient_formula_is_not_served_stale(tmp_path: Path) -> None:
    """Three processes with one on-disk cache: as it is, again, and with another formula."""
    edited = tmp_path / "edited"
    shutil.copytree(PACKAGE, edited / "fxfuse", ignore=shutil.ignore_patterns("__pycache__"))
    source = edited / "fxfuse" / "ops" / "__init__.py"
    text = source.read_text()
    assert text.count("scaled(saved, g)") == 1
    source.write_text(text.replace("scaled(saved, g)", "scaled(saved, g * 3)"))
    first, second = _run(tmp_path, PACKAGE.parent), _run(tmp_path, PACKAGE.parent)
    assert first == second
    assert _run(tmp_path, edited) == pytest.approx(3 * first)


RETURNING = """
import torch
def f(x, w):
    return torch.nn.functional.linear(torch.tanh(x), w)
x, w = torch.ones(4, 8), torch.linspace(-1, 1, 8 * 50).view(50, 8)
z = torch.compile(f, backend="fxfuse", options={"fxfuse.min_logits_bytes": 0})(x, w)
torch.compiler.save_cache_artifacts()
assert z.shape == (4, 50), z.shape
print(float(z.sum()))
"""


@pytest.mark.slow
def test_logits_that_leave_a_graph_under_a_cache_of_all_that_was_compiled(tmp_path: Path) -> None:
    """Which does not know what the backend does beside the graph."""
    first, second = (_run(tmp_path, PACKAGE.parent, RETURNING, TORCH_CACHING_PRECOMPILE="1") for _ in range(2))
    assert first == second


def test_no_import_is_needed(tmp_path: Path) -> None:
    """The entry point alone makes the name known."""
    script = (
        "import sys, torch\n"
        "f = torch.compile(lambda x: x * 2, backend='fxfuse', options={'fxfuse.inner': 'eager'})\n"
        "assert f(torch.ones(2)).tolist() == [2, 2]\n"
        "assert 'fxfuse.backend' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
