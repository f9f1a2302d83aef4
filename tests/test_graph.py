"""The graph driver beyond single programs: sharing, placement, records, what it refuses, what it leaves untouched."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import LargestTensor, assert_raises_like, compiled, new_sites
from programs import HIDDEN, VOCAB, DeferredWorld, World, ce
from torch._dynamo import register_backend
from torch.fx import GraphModule

import fxfuse
from fxfuse import compat, floats, graph
from fxfuse.backend import fxfuse as backend_of_fxfuse
from fxfuse.deferred import DeferredLogits
from fxfuse.ops.softmax import linear_softmax
from fxfuse.options import Options

IS_2_11 = torch.__version__.startswith("2.11")
BEFORE_2_13 = IS_2_11 or torch.__version__.startswith("2.12")


def captured(program: Any, *args: Any, rewrite: bool = True) -> GraphModule:
    """The graph that Dynamo hands to a backend, rewritten by fxfuse."""
    torch._dynamo.reset()
    graphs: list[GraphModule] = []
    inputs: list[Any] = []

    def backend(gm: GraphModule, example_inputs: Any) -> Any:
        inputs.append(example_inputs)
        if rewrite:
            graph.rewrite(gm, Options(min_logits_bytes=0))
        graphs.append(gm)
        return gm

    torch.compile(program, backend=backend, fullgraph=True)(*args)
    (gm,) = graphs
    gm.meta["inputs"] = inputs[0]
    return gm


def calls(gm: GraphModule) -> list[str]:
    return [node.target.__name__ for node in gm.graph.nodes if "fxfuse" in str(getattr(node.target, "_schema", ""))]


# --- weights that are made again ------------------------------------------------------------------------------


def _written_between(x: torch.Tensor, w: torch.Tensor) -> Any:
    first = F.linear(x, w.double()).logsumexp(-1)
    with torch.no_grad():
        w.mul_(2)
    return first, ce(F.linear(x, w.double()), torch.zeros(x.shape[:-1], dtype=torch.int64))


def _written_in_a_loop(x: torch.Tensor, w: torch.Tensor) -> Any:
    total = x.new_zeros(())
    for _ in range(3):
        z = F.linear(x, w.to(torch.float64))
        total = total + z.logsumexp(-1).sum()
        with torch.no_grad():
            w.add_(z.argmax(-1).sum() * 1e-3)
    return total, w * 1


def _first_used_otherwise(x: torch.Tensor, w: torch.Tensor) -> Any:
    made = w.double()
    first = F.linear(x, made).logsumexp(-1).sum()
    return made, first + F.linear(x, w.double()).logsumexp(-1).sum() * 2


@pytest.mark.parametrize("program", [_written_between, _written_in_a_loop, _first_used_otherwise])
def test_a_weight_that_is_converted_again(program: Any) -> None:
    """A copy is of the weight as it was then; and what else is made of the first has no gradient of the second."""

    def of(call: Any) -> Any:
        s = World.make()
        leaf = s.w.detach().float().requires_grad_()
        made = call(s.x, leaf * 1)
        wanted = [s.x, leaf] + [made[0]] * (program is _first_used_otherwise)
        return *made, *torch.autograd.grad(made[1].sum(), wanted, allow_unused=True)

    torch._dynamo.reset()
    with new_sites() as sites:
        torch.testing.assert_close(of(compiled(program)), of(program))
    assert {site.status for site in sites} == {"fused"}


def test_a_weight_that_an_argument_may_share_memory_with() -> None:
    def program(x: torch.Tensor, w: torch.Tensor, other: torch.Tensor) -> Any:
        first = F.linear(x, w.double()).logsumexp(-1)
        other.mul_(2)
        return first, F.linear(x, w.double()).logsumexp(-1)

    torch._dynamo.reset()
    s, ours = World.make(), compiled(program)
    for shares in (False, True):
        results = []
        for call in (program, ours):
            w = s.w.detach().float()
            results.append(call(s.x, w, w.view(w.shape) if shares else w.clone()))
        torch.testing.assert_close(*results)


# --- one pass -------------------------------------------------------------------------------------------------


def test_readers_of_one_head_share_one_pass() -> None:
    def program(s: World) -> Any:
        z, t = s.z[:, :-1], s.masked[:, 1:].reshape(-1)
        flat = z.reshape(-1, VOCAB)
        index = s.y[:, 1:, None]
        loss = F.cross_entropy(flat, t, reduction="sum")
        nll = F.nll_loss(F.log_softmax(flat, -1), t, reduction="none")
        lse, picked = z.logsumexp(-1), z.gather(-1, index)
        return loss / 2, nll.mean(), lse**2, picked * 1

    world = World.make()
    gm = captured(program, world)
    assert calls(gm).count("linear_stats.default") == 1
    assert "linear_loss.default" not in calls(gm)
    assert calls(gm).count("check_index.default") == 2  # the target once, the gathered index once


@pytest.mark.parametrize("detached", [True, False])
def test_logits_less_their_largest_that_is_detached(detached: bool) -> None:
    """Its gradient is shared among equals, of which there are, but nothing has it."""
    world = World.make()
    with torch.no_grad():
        world.w[1::2] = world.w[::2][: VOCAB // 2].clone()

    def program(s: World) -> Any:
        z = s.z
        top = z.amax(-1, keepdim=True)
        stop = top.detach() if detached else top
        lse = (z - stop).exp().sum(-1).log() + stop[..., 0]
        return (lse - z.gather(-1, s.y[..., None])[..., 0]).mean() + (0.0 if detached else top.sum())

    def outcome(f: Any) -> Any:
        loss = f(world)
        return loss, *torch.autograd.grad(loss, world.leaves()[:2])

    sites = captured_sites(program, world)
    assert {site.status for site in sites} == {"fused" if detached else "kept"}
    torch.testing.assert_close(outcome(compiled(program)), outcome(program))
    assert calls(captured(program, world)).count("linear_stats.default") == int(detached)


def _less_their_largest(s: World) -> torch.Tensor:
    z = s.z
    less = z - z.max(-1, keepdim=True)[0]
    return (less.exp().sum(-1).log() - less.gather(-1, s.y.unsqueeze(-1)).squeeze(-1)).mean()


def _entropy_first(s: World) -> torch.Tensor:
    z = s.z
    entropy = z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)
    return z.log_softmax(-1).gather(-1, s.y[..., None]).mean() - 0.1 * entropy.square().mean()


def _normalised_by_hand(s: World) -> torch.Tensor:
    z = s.z
    exps = (z - z.detach().amax(-1, keepdim=True)).exp()
    probs = exps / exps.sum(-1, keepdim=True)
    return -probs.gather(-1, s.y[..., None]).log().mean()


def _labels_in_place(s: World) -> torch.Tensor:
    z = s.z
    penalty = z.logsumexp(-1).square().mean()
    y = s.y.clone()
    y[:, 1:] = s.y[:, :-1]
    return ce(z, y) + penalty


def _labels_at_random(s: World) -> torch.Tensor:
    z = s.z
    penalty = z.logsumexp(-1).square().mean()
    before = torch.rand(s.y.shape)
    return ce(z, torch.where(torch.rand(s.y.shape) < before, s.y, 0)) + penalty


def _labels_of_logits(s: World) -> torch.Tensor:
    z = s.z
    penalty = z.logsumexp(-1).square().mean()
    return ce(z, torch.where(s.y > 3, z.argmax(-1), s.y)) + penalty


def _labels_written_to_before(s: World) -> torch.Tensor:
    z, y = s.z, s.y.clone()
    penalty = z.logsumexp(-1).square().mean()
    y.sub_(y % 2)
    return ce(z, y.view(-1)) + penalty


def _labels_under_no_grad(s: World) -> torch.Tensor:
    z = s.z
    penalty = z.logsumexp(-1).square().mean()
    with torch.no_grad():
        y = s.y.roll(1)
    return ce(z, y) + penalty


def _shifted_by_what_is_written_to(s: World) -> torch.Tensor:
    z = s.z
    m = z.detach().amax(-1, keepdim=True)
    less = z - m
    m.mul_(2)
    return less.exp().sum(-1).log().mean() + ce(z - m, s.y, reduction="none").mean()


def _labels_are_the_best(s: World) -> torch.Tensor:
    z = s.z
    best = z.log_softmax(-1).topk(1).values[..., 0]
    return (best - z.log_softmax(-1).gather(-1, z.argmax(-1, keepdim=True))[..., 0].square()).mean()


def _labels_of_a_mask(s: World) -> torch.Tensor:
    z = s.z
    penalty = z.logsumexp(-1).square().mean()
    own = (s.y != 3) & ~(s.y.long() % 5 == 0)
    return ce(z, torch.where(own, s.y, -100)) + penalty


def _labels_in_many_steps(s: World) -> torch.Tensor:
    z = s.z
    penalty = z.logsumexp(-1).square().mean()
    y = s.y
    for _ in range(2000):
        y = y.clone()
    return ce(z, y) + penalty


# Each a program, and how many passes compute it; 0 where it is kept.
BY_HAND: dict[str, tuple[Callable[[World], torch.Tensor], int]] = {
    "less their largest": (_less_their_largest, 1),
    "penalty first": (lambda s: (z := s.z).logsumexp(-1).square().mean() + ce(z[:, :-1], s.y[:, 1:].clone()), 2),
    "penalty of the same rows": (lambda s: (z := s.z[:, :-1]).logsumexp(-1).square().mean() + ce(z, s.y[:, 1:]), 1),
    "entropy first": (_entropy_first, 1),
    "normalised": (_normalised_by_hand, 1),
    "labels of a mask": (_labels_of_a_mask, 1),
    "labels in many steps": (_labels_in_many_steps, 2),
    "labels in place": (_labels_in_place, 2),
    "labels at random": (_labels_at_random, 2),
    "labels of logits": (_labels_of_logits, 2),
    "labels are the best": (_labels_are_the_best, 3),
    "labels written to before": (_labels_written_to_before, 2),
    "labels under no_grad": (_labels_under_no_grad, 2),
    "shifted by what is written to": (_shifted_by_what_is_written_to, 0),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_labels_and_shifts_that_come_later_do_not_keep_readers_apart(name: str) -> None:
    program, passes = BY_HAND[name]
    world = World.make()

    def outcome(f: Any) -> Any:
        torch.manual_seed(0)
        loss = f(world)
        return loss, *torch.autograd.grad(loss, world.leaves()[:2])

    assert sum("check_index" not in call for call in calls(captured(program, world))) == passes
    assert {site.status for site in captured_sites(program, world)} == {"fused" if passes else "kept"}
    torch.testing.assert_close(outcome(compiled(program)), outcome(program))


@pytest.mark.parametrize("shared", [False, True])
def test_no_label_is_made_before_a_write_to_what_may_be_its_memory_one_day(shared: bool) -> None:
    world = World.make()

    def program(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = F.linear(x, w)
        penalty = z.logsumexp(-1).square().mean()
        ids.clamp_(max=3)
        return ce(z, y.roll(-1)) + penalty

    def outcome(f: Any, shared: bool) -> Any:
        y = world.y.clone()
        return f(world.x, world.w, y.view(y.shape) if shared else y.clone(), y)

    f = compiled(program)
    torch.testing.assert_close(outcome(f, False), outcome(program, False))
    torch.testing.assert_close(outcome(f, shared), outcome(program, shared))


def test_another_librarys_operator_with_a_name_of_pytorchs_is_called_once() -> None:
    world, called = World.make(), []

    @torch.library.custom_op("fxfuse_tests::roll", mutates_args=())
    def roll(y: torch.Tensor) -> torch.Tensor:
        called.append(y)
        return torch.randint_like(y, VOCAB)

    roll.register_fake(torch.empty_like)

    def program(s: World) -> torch.Tensor:
        z = s.z
        penalty = z.logsumexp(-1).square().mean()
        return ce(z, torch.ops.fxfuse_tests.roll(s.y)) + penalty

    f = compiled(program)
    f(world)
    del called[:]
    f(world)
    assert len(called) == 1


def test_labels_of_a_teacher_are_not_computed_twice() -> None:
    def program(s: World) -> torch.Tensor:
        z = s.z
        penalty = z.logsumexp(-1).square().mean()
        return ce(z, (s.x.detach().sigmoid() @ s.w.detach().sin().t()).lerp(s.c, 0.1).argmax(-1)) + penalty

    nodes = captured(program, World.make()).graph.nodes
    assert sum(node.target in ("sigmoid", torch.sigmoid) for node in nodes) == 1


def test_readers_of_two_heads_share_one_pass() -> None:
    def program(s: World, mixed: bool) -> Any:
        one, other = s.zb.log_softmax(-1), F.linear(s.x, s.w.sin()).log_softmax(-1)
        m = torch.logaddexp(one + math.log(0.3), other + math.log(0.7)) if mixed else one
        kl = F.kl_div(m, other, reduction="sum", log_target=True)
        if mixed:
            return kl, F.kl_div(m, one, reduction="batchmean", log_target=True)
        return kl, -(other.exp() * one).sum(-1)

    for mixed in (False, True):
        assert calls(captured(program, World.make(), mixed)) == ["linear_divergence.default"]
        torch.testing.assert_close(compiled(program)(World.make(), mixed), program(World.make(), mixed))


def test_other_mixtures_and_gradients_do_not_share() -> None:
    def program(s: World) -> Any:
        one, other = s.zb.log_softmax(-1), F.linear(s.x, s.w.sin()).log_softmax(-1)
        kls = []
        for a, b, share in ((one, other, 0.5), (one, other, 0.4), (one, other.detach(), 0.5), (other, one, 0.5)):
            m = torch.logaddexp(a + math.log(1 - share), b + math.log(share))
            kls.append(F.kl_div(m, b, reduction="sum", log_target=True))
        return tuple(kls)

    assert calls(captured(program, World.make())) == ["linear_divergence.default"] * 4


@pytest.mark.parametrize(
    "left_out",
    [
        lambda terms, own, z, t, other: terms.masked_fill(z.isinf(), 1),
        lambda terms, own, z, t, other: terms.masked_fill(t.isinf(), 0),
        lambda terms, own, z, t, other: terms.masked_fill(other.isinf(), 0),
        lambda terms, own, z, t, other: terms.masked_fill(z.isinf() | other.isinf(), 0),
        lambda terms, own, z, t, other: terms.masked_fill((z / 2).isinf(), 0),
        lambda terms, own, z, t, other: terms.masked_fill((z + z[..., :1]).isinf(), 0),
        lambda terms, own, z, t, other: terms.masked_fill(z.isinf(), 0) - own,
        lambda terms, own, z, t, other: terms - own.masked_fill(t.isinf() | z.isinf(), 0),
        lambda terms, own, z, t, other: terms.masked_fill(t.isinf() | z.isinf(), 0) - own.masked_fill(t.isinf(), 0),
    ],
)
def test_masks_that_are_not_of_where_either_head_is_infinite(left_out: Any) -> None:
    """Of these programs the entries are needed: no comparison of the two heads is the same."""

    def program(s: World) -> Any:
        z, t, other = s.z, F.linear(s.x.cos(), s.w.detach().sin()), F.linear(s.x, s.w + 1)
        return left_out(t.softmax(-1) * z.log_softmax(-1), t.softmax(-1) * t.log_softmax(-1), z, t, other).sum(-1)

    assert "linear_divergence.default" not in calls(captured(program, World.make()))
    torch.testing.assert_close(compiled(program)(World.make()), program(World.make()))


def test_a_loss_alone_has_its_gradients_made_in_the_forward() -> None:
    assert calls(captured(lambda s: ce(s.z, s.y), World.make())) == ["check_index.default", "linear_loss.default"]


def _few_rows(s: World) -> torch.Tensor:
    """A loss of each two rows, fewer than a hidden state has numbers."""
    z = s.z
    return sum(ce(z[:, i : i + 1], s.y[:, i : i + 1]) for i in range(5))


def _many_rows(s: World) -> torch.Tensor:
    z = s.z
    return sum(ce(z[i], s.y[i]) for i in range(2))


def _other_weights(s: World) -> torch.Tensor:
    return sum(ce(F.linear(s.x[:, :1], w), s.y[:, :1]) for w in (s.w, s.w.sin()))


def _two_heads(s: World) -> torch.Tensor:
    return sum(ce(F.linear(s.x[:, i : i + 1], s.w), s.y[:, :1]) for i in range(2))


@pytest.mark.parametrize(
    ("program", "in_forward", "in_backward"),
    [(_few_rows, 1, 4), (_many_rows, 2, 0), (_other_weights, 2, 0), (_two_heads, 1, 1)],
)
def test_losses_do_not_each_keep_a_gradient_of_the_weight(program: Any, in_forward: int, in_backward: int) -> None:
    """Unless it is no larger than the log-probabilities that eager keeps of each."""
    gradients = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal gradients
        gradients += tensor.shape == s.w.shape and tensor.data_ptr() != s.w.data_ptr()
        return tensor

    s = World.make()
    found = calls(captured(program, s))
    assert (found.count("linear_loss.default"), found.count("linear_stats.default")) == (in_forward, in_backward)
    torch._dynamo.reset()
    with new_sites() as sites, torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        actual = compiled(program)(s)
    if program is not _other_weights:  # of which eager keeps one that it computes, too
        assert gradients == in_forward
    torch.testing.assert_close(actual, program(s))
    leaves = (s.x, s.w)
    torch.testing.assert_close(torch.autograd.grad(actual, leaves), torch.autograd.grad(program(s), leaves))
    told = "another loss keeps a gradient of this weight" in "".join(site.why for site in sites)
    assert told == (in_backward > 0)


def test_where_the_weight_is_frozen_every_loss_makes_its_gradients_in_the_forward() -> None:
    s = World.make()
    s.w.requires_grad_(False)
    assert calls(captured(_few_rows, s)).count("linear_loss.default") == 5


def test_hidden_states_that_are_written_to_are_not_those_of_a_loss_that_is_computed_again() -> None:
    def program(s: World, rows: int) -> Any:
        x = s.x.detach() * 1
        z = F.linear(x, s.w)
        losses = [ce(z[:, i : i + 1], s.y[:, i : i + 1]) for i in range(rows)]
        x.data.zero_()
        return sum(losses)

    for rows, status in ((1, "fused"), (2, "kept")):
        torch._dynamo.reset()
        with new_sites() as sites:
            compiled(program)(World.make(), rows)
        assert [site.status for site in sites] == [status]


def _repeat_interleaved(s: World) -> torch.Tensor:
    return ce(s.z.repeat_interleave(8, 0), s.y.repeat_interleave(8, 0))


def _temperatures(s: World) -> torch.Tensor:
    z = s.z
    return sum(ce(z / (0.5 + 0.1 * i), s.y) for i in range(5))


def _prefixes(s: World) -> torch.Tensor:
    z, y = s.z.reshape(-1, VOCAB), s.y.reshape(-1)
    return sum(ce(z[:i], y[:i]) for i in range(1, 11))


def _temperature_thrice(s: World) -> torch.Tensor:
    z = s.z
    return sum(ce(z / t, s.y) for t in (0.5, 1.0, 2.0)) + z.sum(-1).sum()


def _each_sequence(s: World) -> torch.Tensor:
    z = s.z
    return sum(ce(z[i], s.y[i]) for i in range(2))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("program", "code"),
    [
        (_repeat_interleaved, "repeated"),
        (_temperatures, "repeated"),
        (_prefixes, "repeated"),
        (_temperature_thrice, None),
        (_each_sequence, None),
    ],
)
def test_rows_are_not_multiplied_many_times_where_eager_multiplies_them_once(
    program: Any, code: str | None, dynamic: bool
) -> None:
    for least, expected in ((1, code), (0, None)):  # with 0, all that is sound is fused
        torch._dynamo.reset()
        with new_sites() as sites:
            s = World.make()
            torch.testing.assert_close(compiled(program, min_logits_bytes=least, dynamic=dynamic)(s), program(s))
        assert [site.reason and site.reason.code for site in sites] == [expected]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("rows", [2, 5])
def test_a_copy_of_the_weight_is_no_larger_than_the_logits(rows: int, grad: bool) -> None:
    """Two rows with their gradient have as many numbers as four of hidden states."""

    def program(s: World) -> torch.Tensor:
        z = F.linear(s.x[0, :rows], s.w).masked_fill(s.c > 0.9, -1.0)
        return ce(z * 2, s.y[0, :rows])

    s = World.make()
    with new_sites() as sites, torch.set_grad_enabled(grad):
        torch.testing.assert_close(compiled(program, min_logits_bytes=1)(s), program(s))
    (site,) = sites
    whole, weight = 8 * rows * VOCAB * (1 + grad), 8 * VOCAB * 4
    if whole < weight:
        assert site.reason is not None and site.reason.code == "weight_copied"
        assert (site.bytes_saved, site.copied_bytes) == (0, 0)
    else:
        assert site.status == "fused"
        assert (site.bytes_saved, site.copied_bytes) == (whole - weight, weight)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_losses_of_few_rows_are_left_dense_where_their_gradients_of_the_weight_take_more(reduction: str) -> None:
    """Of one projection, of which eager makes one gradient; not of several, of which it makes as many."""

    def loss(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ce(z, y, reduction=reduction).mean()

    def at_once(s: World) -> torch.Tensor:
        z = F.linear(s.x[:1, :3], s.w)
        return sum(loss(z[:, i], s.y[:1, i]) for i in range(3))

    def one_by_one(s: World) -> torch.Tensor:
        return sum(loss(F.linear(s.x[:1, i], s.w), s.y[:1, i]) for i in range(3))

    for program, codes in ((at_once, ["weight_copied"]), (one_by_one, [None, None, None])):
        torch._dynamo.reset()
        s, e = World.make(), World.make()
        with new_sites() as sites:
            compiled(program, min_logits_bytes=1)(s).backward()
        program(e).backward()
        torch.testing.assert_close((s.x.grad, s.w.grad), (e.x.grad, e.w.grad))
        assert [site.reason and site.reason.code for site in sites] == codes
        assert all(site.copied_bytes == 0 for site in sites)


def test_a_copy_of_the_weight_of_which_classes_are_taken_later() -> None:
    def program(s: World) -> torch.Tensor:
        return F.linear(s.x[0, :1], s.w.detach()).masked_fill(s.c > 0.9, -1.0)[..., :3].logsumexp(-1).sum()

    with new_sites() as sites:
        torch.testing.assert_close(compiled(program, min_logits_bytes=1)(World.make()), program(World.make()))
    (site,) = sites
    assert site.reason is not None and f"{8 * VOCAB * 4:,} bytes" in site.reason.sentence


def test_readers_with_other_scales_or_rows_do_not_share() -> None:
    gm = captured(lambda s: ((z := s.z).logsumexp(-1), (z / 2).logsumexp(-1), z[:, 1:].logsumexp(-1)), World.make())
    assert calls(gm) == ["linear_stats.default"] * 3


def test_labels_that_come_after_the_first_use_do_not_share() -> None:
    def program(s: World) -> Any:
        z = s.z
        lse = z.logsumexp(-1)
        labels = (lse * 7).long().abs() % VOCAB  # known only once lse is
        return lse, ce(z, labels)

    world = World.make()
    with new_sites() as sites:
        actual = compiled(program)(world)
    torch.testing.assert_close(actual, program(world))
    assert [site.status for site in sites] == ["fused"]


@pytest.mark.parametrize("name", ["fused", "unfused"])
def test_nothing_else_is_touched(name: str) -> None:
    """Statements with side effects stay, whether or not anything reads their results."""

    def program(s: World) -> Any:
        noise = s.x.detach() * 1
        noise.mul_(2).add_(1)
        noise[0, 0].fill_(7)
        out = torch.empty_like(noise)
        torch.neg(noise, out=out)
        z = s.z if name == "fused" else s.z.sin()
        return ce(z, s.y), noise, out

    world = World.make()
    torch.testing.assert_close(compiled(program)(world), program(world))
    before, after = (captured(program, world, rewrite=r) for r in (False, True))
    kept = [node.name for node in after.graph.nodes]
    gone = [node.name for node in before.graph.nodes if node.name not in kept]
    if name == "unfused":
        assert [n.format_node() for n in after.graph.nodes] == [n.format_node() for n in before.graph.nodes]
    else:
        assert set(gone) <= {"linear", "reshape", "view", "z", "cross_entropy", "loss", "linear_1"}, gone


def test_every_new_node_has_an_example_value_that_is_right() -> None:
    def program(s: World) -> Any:
        return ce(s.zb, s.masked, label_smoothing=0.1, weight=s.c), s.z.mT.logsumexp(1, keepdim=True)

    world = World.make(torch.float32)
    gm = captured(program, world)

    class Check(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            value, example = super().run_node(n), n.meta.get("example_value")
            if isinstance(value, torch.Tensor):
                assert (value.shape, value.dtype) == (example.shape, example.dtype), n.format_node()
            return value

    torch.testing.assert_close(Check(gm).run(*gm.meta["inputs"]), program(world))


# --- what must not happen -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_logits_are_never_allocated(reduction: str, device: str) -> None:
    rows, hidden, vocab = 64, 8, 512
    x = torch.randn(4, rows // 4, hidden, device=device, requires_grad=True)
    head = torch.nn.Linear(hidden, vocab, device=device)
    y = torch.randint(vocab, (4, rows // 4), device=device)

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = head(x)[:, :-1].float()
        return F.cross_entropy(z.reshape(-1, vocab), y[:, 1:].reshape(-1), reduction=reduction).sum()

    fused, eager = LargestTensor(), LargestTensor()

    def spied(gm: GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            with fused:  # Dynamo does not run compiled code under a mode of its caller
                return gm(*args)

        return run

    name = f"spied_{reduction}_{device}"
    register_backend(spied, name)
    loss = compiled(program, inner=name)(x, y)
    with fused:
        loss.backward()
    with eager:
        program(x, y).backward()
    torch.testing.assert_close(loss, program(x, y))
    assert eager.elements >= rows * vocab
    assert fused.elements <= vocab * hidden, fused.op


def _read(s: World) -> Any:
    return s.z.log_softmax(-1).sin().sum()


def _returned(s: World) -> Any:
    p = s.z.log_softmax(-1)
    return p.sin().sum(), p.mT[0]


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize(("program", "copies"), [(_read, 0), (_returned, 1)])
def test_all_probabilities_are_copied_only_where_a_write_could_reach_the_backward(
    program: Any, copies: int, inner: str
) -> None:
    """A write to all of them within the graph keeps the head; of one to what it returns the backward must not learn."""
    world = World.make()
    made = [node for node in captured(program, world).graph.nodes if node.target in (torch.clone, linear_softmax)]
    assert [node.target for node in made] == [linear_softmax, *[torch.clone] * copies]

    def gradients(f: Any, write: bool) -> Any:
        out = f(world)
        loss, *returned = out if isinstance(out, tuple) else (out,)
        with torch.no_grad():
            for one in returned if write else ():
                one.add_(1)
        return torch.autograd.grad(loss, world.leaves()[:2])

    with torch.no_grad():
        assert torch.clone not in [node.target for node in captured(program, world).graph.nodes]
        torch.testing.assert_close(compiled(program, inner=inner)(world), program(world))
    expected = gradients(program, write=False)
    try:
        torch.testing.assert_close(gradients(compiled(program, inner=inner), write=True), expected)
    except RuntimeError as error:  # as in eager
        assert copies and "modified by an inplace operation" in str(error)


def test_a_write_that_is_not_recognised_keeps_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version counter of an example value betrays a write that has an unknown name."""
    monkeypatch.setattr("fxfuse.mutation._INPLACE_OPERATORS", frozenset())

    def program(s: World) -> Any:
        x = s.x.detach() * 1
        z = F.linear(x, s.w.detach())
        x += 1
        return ce(z, s.y)

    world = World.make()
    with new_sites() as sites:
        actual = compiled(program)(world)
    torch.testing.assert_close(actual, program(world))
    assert [site.reason.code for site in sites if site.reason] == ["operand_mutated"]


def test_an_aliased_input_is_recognised() -> None:
    """Two inputs of the graph that share memory: a write to one changes the other."""

    def program(x: torch.Tensor, base: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> Any:
        z = F.linear(x, w)
        base.zero_()
        return ce(z, y)

    def run(f: Any) -> Any:
        base = torch.ones(2, 5, 4, dtype=torch.float64)
        torch._dynamo.reset()
        return f(base[:, :], base, World.make().w.detach(), World.make().y)

    with new_sites() as sites:
        actual = run(compiled(program))
    torch.testing.assert_close(actual, run(program))
    assert [site.reason.code for site in sites if site.reason] == ["operand_mutated"]


def _apart(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In one storage, side by side, as ``ZeroRedundancyOptimizer(parameters_as_bucket_view=True)`` has parameters."""
    flat = torch.cat([w.flatten(), x.flatten()])
    first, second = torch.empty_like(w), torch.empty_like(x)
    first.data, second.data = flat[: w.numel()].view_as(w), flat[w.numel() :].view_as(x)
    return first, second


def _tied_by_data(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = torch.empty_like(w), torch.empty_like(x)
    first.data, second.data = w, w.view(-1)[: x.numel()].view_as(x)
    return first, second


@pytest.mark.parametrize("weight_first", [True, False])
@pytest.mark.parametrize("share", [_apart, _tied_by_data])
def test_inputs_of_one_storage_that_nothing_writes_to(share: Callable[..., Any], weight_first: bool) -> None:
    """Dynamo's example of the second counts a write before anything ran, and a write to one is still seen for both."""
    drawn = World.make()
    assert drawn.w.numel() >= drawn.x.numel()

    def program(a: torch.Tensor, b: torch.Tensor, y: torch.Tensor, write: int) -> Any:
        z = F.linear(b, a) if weight_first else F.linear(a, b)
        if write:
            (a if write == 1 else b)[0, 0].add_(1)
        return ce(z, y)

    def run(f: Any, write: int) -> Any:
        pair = share(drawn.w.detach().clone(), drawn.x.detach().clone())
        return f(*(pair if weight_first else pair[::-1]), drawn.y, write)

    with new_sites() as sites:
        for write in range(3):
            torch._dynamo.reset()
            torch.testing.assert_close(run(compiled(program), write), run(program, write))
    assert [site.reason and site.reason.code for site in sites] == [None, "operand_mutated", "operand_mutated"]


def test_an_input_in_the_storage_of_one_that_the_graph_has_no_use_for() -> None:
    """As ``torch.func.functional_call`` with detached parameters has it: Dynamo came upon the module's own before."""
    model = torch.nn.Linear(HIDDEN, VOCAB)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        z = torch.func.functional_call(model, parameters, (x,))
        return y.numel() * F.cross_entropy(z.view(-1, VOCAB), y.detach().view(-1))

    drawn = World.make()
    x, y = drawn.x.float(), drawn.y
    torch._dynamo.reset()
    with new_sites() as sites:
        torch.testing.assert_close(compiled(program)(x, y), program(x, y))
    assert [site.status for site in sites] == ["fused"]


def test_a_weight_of_which_another_input_has_the_memory_is_not_deferred() -> None:
    """A write to that is none in the version of the weight; side by side is no matter."""
    drawn = World.make()
    found = []
    for share in (_apart, _tied_by_data):
        torch._dynamo.reset()
        w, x = share(drawn.w.detach().clone(), drawn.x.detach().clone())
        z = compiled(F.linear)(x, w)
        torch.testing.assert_close(z + 0, F.linear(x, w))
        found.append(isinstance(z, DeferredLogits))
    assert found == [True, False]


class _Turned(torch.autograd.Function):
    """Gradient reversal: of a view, so that it has no memory of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return -g


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return 3 * g


def _hooked(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda g: 2 * g)
    return x


def _checkpointed(f: Any, x: torch.Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)


def _view_without_gradient(x: torch.Tensor) -> torch.Tensor:
    """To autograd it is a leaf."""
    with torch.no_grad():
        return x[:]


def _beside(x: torch.Tensor, w: torch.Tensor, view: Any, grad: bool = True) -> Any:
    h = x * 3
    v = view(h)
    with torch.set_grad_enabled(grad):
        return F.linear(h, w), v


def _loss_too(z: torch.Tensor) -> Any:
    return z, F.cross_entropy(z, torch.arange(4))


def _two_heads_of(h: torch.Tensor, w: torch.Tensor) -> Any:
    return F.linear(h, w), F.linear(h.detach(), w)


# What each returns besides logits is the hidden states, a loss, or nothing.
HIDDEN_GRADIENTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "function of what is returned": lambda x, w: (F.linear(h := _Turned.apply(x.tanh()), w), h),
    "function of a view of what is returned": lambda x, w: (F.linear(_Turned.apply(h := x.tanh()), w), h),
    "function of an input itself": lambda x, w: (F.linear(h := _Scaled.apply(x.tanh()), w), h),
    "function of hidden states of two heads": lambda x, w: _two_heads_of(_Turned.apply(x.tanh()), w),
    "function of a weight": lambda x, w: (x.tanh() @ _Turned.apply(w).t(), None),
    "hook on a view of an input": lambda x, w: (F.linear(_hooked(x.view(2, 2, 6)), w).flatten(0, 1), None),
    "hook on a view of a weight": lambda x, w: (F.linear(x.tanh(), _hooked(w[:])), None),
    "hook on a view that is returned": lambda x, w: (F.linear(h := _hooked(x.tanh().view(2, 2, 6)), w).view(4, 37), h),
    "hook on a view of what is returned": lambda x, w: (F.linear(_hooked((h := x.tanh())[:]), w), h),
    "function in a checkpoint": lambda x, w: (
        F.linear(h := _checkpointed(lambda x: _Turned.apply(x.tanh()), x), w), h,
    ),
    "hook in a checkpoint": lambda x, w: (F.linear(h := _checkpointed(lambda x: _hooked(x.tanh()[:]), x), w), h),
    "function of hidden states beside them": lambda x, w: _beside(x, w, _Turned.apply),
    "hook on a view of hidden states beside them": lambda x, w: _beside(x, w, lambda h: _hooked(h[:])),
    "view of hidden states without a gradient beside them": lambda x, w: _beside(x, w, _view_without_gradient),
    "function beside hidden states of logits without a gradient": lambda x, w: _beside(x, w, _Turned.apply, grad=False),
    "view of an input without a gradient": lambda x, w: _loss_too(F.linear(_view_without_gradient(x), w)),
    "view of a weight without a gradient": lambda x, w: _loss_too(F.linear(x, _view_without_gradient(w))),
    "view of a view without a gradient": lambda x, w: _loss_too(
        F.linear(_view_without_gradient(x).view(2, 2, 6), w).view(4, 37)
    ),
}  # fmt: skip
SEEN_GRADIENTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "view that is returned": lambda x, w: (F.linear(h := x.tanh().view(2, 2, 6), w).view(4, 37), h),
    "view of an input": lambda x, w: (F.linear(x[:], w), None),
    "checkpoint": lambda x, w: (F.linear(h := _checkpointed(lambda x: x.tanh()[:], x), w), h),
    "hidden states with a hook": lambda x, w: (F.linear(h := _hooked(x.tanh()), w), h),
    "view of hidden states with a hook": lambda x, w: (F.linear(h := _hooked(x.tanh())[:], w), h),
    "hook on a view that is copied": lambda x, w: (F.linear(torch.cat([_hooked(x[1:]), x[:1]]), w), None),
}


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", HIDDEN_GRADIENTS | SEEN_GRADIENTS)
def test_gradients_that_change_on_their_way_to_the_operands(name: str, inner: str) -> None:
    """AOTAutograd makes what is returned of an input, or twice, anew as a view, with the gradient of a view."""

    def run(f: Any) -> Any:
        torch._dynamo.reset()
        torch.manual_seed(0)
        x, w = torch.randn(4, 6, requires_grad=True), torch.randn(37, 6, requires_grad=True)
        z, other = f(x * 1, w * 1)
        loss = F.cross_entropy(z, torch.arange(4))
        if other is not None and other.requires_grad:
            loss = loss + (other.flatten() * torch.arange(other.numel())).sum() / 100
        loss.backward()
        return loss, x.grad, w.grad, z

    program = (HIDDEN_GRADIENTS | SEEN_GRADIENTS)[name]
    if IS_2_11 and inner == "aot_eager" and name == "view of hidden states without a gradient beside them":
        with pytest.raises(RuntimeError, match="does not require grad"):  # AOTAutograd of PyTorch 2.11 alone
            run(torch.compile(program, backend=inner))
        return
    *actual, z = run(compiled(program, inner=inner))
    *expected, _ = run(program)
    torch.testing.assert_close(actual, expected)
    # To PyTorch before 2.13 a hook is a function that returns a view.
    seen = name in SEEN_GRADIENTS and ("with a hook" not in name or not BEFORE_2_13)
    assert isinstance(z, DeferredLogits) == seen


def test_several_hooks_with_symbolic_sizes() -> None:
    """Of which PyTorch 2.11 makes a graph whose placeholders come too late."""

    def program(s: World) -> Any:
        h = _hooked(_hooked(s.x * 2))
        return ce(F.linear(h, s.w), s.y)

    torch._dynamo.reset()
    worlds = World.make(), World.make()
    with new_sites() as sites:
        losses = [f(world) for f, world in zip((compiled(program, dynamic=True), program), worlds, strict=True)]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, w.x)[0] for loss, w in zip(losses, worlds, strict=True)))
    assert [site.status for site in sites] == ["fused"]


def test_placeholders_are_put_first() -> None:
    late = torch.fx.Graph()
    x = late.placeholder("x")
    y = late.call_function(torch.neg, (x,))
    sizes = [late.placeholder(name) for name in ("n", "m")]
    y.args = (sizes[0],)
    late.output((y, *sizes))
    with pytest.raises(RuntimeError, match="before it has been defined"):
        late.lint()
    compat.put_placeholders_first(late)
    late.lint()
    assert [node.name for node in late.nodes] == ["x", "n", "m", "neg", "output"]


DROPOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "not training": lambda x: F.dropout(x, 0.5, training=False),
    "none": lambda x: F.dropout(x, 0.0, training=True),
    "torch's": lambda x: torch.dropout(x, 0.5, False),
    "module": torch.nn.Dropout().eval(),
    "alpha": lambda x: F.alpha_dropout(x, 0.5, training=False),
    "channels": lambda x: F.dropout1d(x, 0.5, training=False),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_that_drops_nothing_returns_its_input(name: str) -> None:
    """Which example values do not show: a write to that input changes the hidden states."""

    def program(s: World) -> Any:
        x = s.x.detach() * 1
        first = F.linear(DROPOUTS[name](x), s.w.detach())
        x += 1
        return ce(first, s.y), ce(F.linear(x, s.w.detach()), s.y)

    world = World.make()
    torch._dynamo.reset()
    with new_sites() as sites:
        actual = compiled(program)(world)
    torch.testing.assert_close(actual, program(world))
    assert [site.reason.code for site in sites if site.reason] == ["operand_mutated"]


@pytest.mark.parametrize(("memory", "status"), [(0, "fused"), (1, "kept")])
def test_hidden_states_written_to_after_the_loss(memory: int, status: str) -> None:
    def program(s: World) -> torch.Tensor:
        x = s.x * 2
        value = ce(torch.nn.functional.linear(x, s.w.detach()), s.y)
        x.detach().zero_()  # a frozen weight's gradient is not needed, so eager has kept no hidden states
        return value

    worlds = World.make(), World.make()
    with new_sites() as sites:
        found = [f(world) for f, world in zip((compiled(program, memory=memory), program), worlds, strict=True)]
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*(torch.autograd.grad(f, w.x)[0] for f, w in zip(found, worlds, strict=True)))
    assert [site.status for site in sites] == [status]


def test_a_failure_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        made = compute(*args)
        raise RuntimeError(f"after {len(made)} results")

    compute = graph.compute
    monkeypatch.setattr(graph, "compute", broken)
    world = World.make()
    with new_sites() as sites, pytest.warns(fxfuse.FxfuseWarning, match="after 2 results"):
        actual = compiled(lambda s: ce(s.z, s.y))(world)
    torch.testing.assert_close(actual, ce(world.z, world.y))
    assert [site.reason.code for site in sites if site.reason] == ["internal_error"]


def test_a_tensor_subclass_is_left_alone() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def program(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> Any:
        return ce(F.linear(x, w), y)

    s = World.make()
    w = TwoTensor(s.w.detach(), s.w.detach())
    with new_sites() as sites:
        actual = compiled(program)(s.x.detach(), w, s.y)
    torch.testing.assert_close(actual.a, ce(s.z, s.y).detach())
    assert [site.reason.code for site in sites if site.reason] == ["subclass"]


def _divergence_of_masked(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    one, other = F.linear(x, w).log_softmax(-1), F.linear(x.cos(), w.sin()).log_softmax(-1)
    each = F.kl_div(one, other, reduction="none", log_target=True)[rows]
    return each.sum() / each.size(0)


MASKED = {
    "hidden states": lambda x, w, y, rows: ce(F.linear(x[rows], w), y[rows]),
    "logits": lambda x, w, y, rows: ce(F.linear(x, w)[rows], y[rows]),
    "joined": lambda x, w, y, rows: ce(
        torch.cat([F.linear(x, w), F.linear(x.cos(), w)]).reshape(-1, VOCAB)[rows.flatten().repeat(2)],
        y[rows].repeat(2),
    ),
    "two heads": _divergence_of_masked,
}


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MASKED)
def test_rows_that_a_mask_selects_are_fused_however_many(name: str, inner: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return MASKED[name](x, w, y, y > 2)

    s = World.make()
    torch._dynamo.reset()
    least = 1 << 20 if name == "hidden states" else 0  # of those it is not known how large the logits are
    ours = compiled(program, min_logits_bytes=least, inner=inner)
    with new_sites() as sites, torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for y in (s.y, s.y.roll(1, 0) - 1):
            actual, expected = ours(s.x, s.w, y), program(s.x, s.w, y)
            torch.testing.assert_close(actual, expected)
            torch.testing.assert_close(
                torch.autograd.grad(actual, (s.x, s.w)), torch.autograd.grad(expected, (s.x, s.w))
            )
    breaks = IS_2_11 and name == "joined"  # PyTorch 2.11 does not trace a loss of so many rows
    assert {site.status for site in sites} == {"deferred" if breaks else "fused"}
    assert not any("all entries" in site.variant for site in sites)


def test_a_mask_of_single_entries_is_no_selection_of_rows() -> None:
    def program(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> Any:
        return F.linear(x, w)[(y > 2)[..., None].expand(*y.shape, VOCAB)].exp().sum()

    s = World.make()
    torch._dynamo.reset()
    with new_sites() as sites, torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(compiled(program)(s.x, s.w, s.y), program(s.x, s.w, s.y))
    assert {site.status for site in sites} <= {"kept"}


@pytest.mark.parametrize("mark", [False, True], ids=["automatic", "mark_dynamic"])
def test_any_number_of_lengths_takes_two_compilations(mark: bool) -> None:
    torch._dynamo.reset()
    s = World.make()
    ours = torch.compile(
        lambda x, y: (ce(F.linear(x, s.w)[:, :-1] / 2, y[:, 1:]), F.linear(x, s.w).log_softmax(-1).sum(-1)),
        backend="fxfuse",
        options={"fxfuse.inner": "eager", "fxfuse.min_logits_bytes": 0},
    )
    with new_sites() as sites:
        for length in (5, 7, 11, 12, 30, 3):
            x, y = torch.randn(2, length, 4, dtype=torch.float64), torch.randint(VOCAB, (2, length))
            if mark:
                torch._dynamo.mark_dynamic(x, 1)
                torch._dynamo.mark_dynamic(y, 1)
            loss, scores = ours(x, y)
            z = F.linear(x, s.w)
            torch.testing.assert_close(loss, ce(z[:, :-1] / 2, y[:, 1:]))
            torch.testing.assert_close(scores, z.log_softmax(-1).sum(-1))
    assert {site.status for site in sites} == {"fused"}
    assert len(sites) // 2 <= (1 if mark else 2)


def test_a_view_under_no_grad_claims_what_its_base_does() -> None:
    def program(s: World) -> Any:
        z = s.z
        with torch.no_grad():
            last = z[:, -1:]
        return last, s.x * 2

    with new_sites() as sites:
        actual, _ = compiled(program)(World.make())
    expected, _ = program(World.make())
    assert (actual.requires_grad, actual.is_leaf) == (expected.requires_grad, expected.is_leaf) == (True, True)
    assert [site.reason.code for site in sites if site.reason] == ["returned"]


def test_inference_mode() -> None:
    world = World.make()
    step = compiled(lambda s: (ce(s.z, s.y), s.z.log_softmax(-1).gather(-1, s.y[..., None])))
    with torch.inference_mode(), new_sites() as sites:
        actual = step(world)
    torch.testing.assert_close(actual, (ce(world.z, world.y), world.z.log_softmax(-1).gather(-1, world.y[..., None])))
    assert {site.variant for site in sites} == {"forward only"}


def test_no_grad_then_grad_are_compiled_apart() -> None:
    world = World.make()
    step = compiled(lambda s: ce(s.z, s.y))
    with torch.no_grad():
        assert not step(world).requires_grad
    step(world).backward()
    expected = torch.autograd.grad(ce(world.z, world.y), world.w)[0]
    torch.testing.assert_close(world.w.grad, expected)


GRAD_SWITCHED_ON: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "rows moved": (lambda s: s.z, lambda s, z: z.flip(1).logsumexp(-1)),
    "classes masked before": (lambda s: s.z.masked_fill(s.allowed, -1e4), lambda s, z: z.logsumexp(-1)),
    "classes masked": (lambda s: s.z, lambda s, z: ce(z.masked_fill(s.allowed, -1e4), s.y)),
    "divided before": (lambda s: s.z / s.t, lambda s, z: ce(z, s.y)),
    "divided": (lambda s: s.z, lambda s, z: ce(z / s.t, s.y)),
    "scaled before and shifted": (lambda s: s.z * s.t, lambda s, z: ce(z + s.b, s.y)),
    "level": (lambda s: s.z - s.z.mean(-1, keepdim=True), lambda s, z: ce(z * s.t, s.y)),
    "beside a student": (
        lambda s: s.z,
        lambda s, z: F.kl_div((s.x @ s.v.t()).log_softmax(-1), z.flip(1).log_softmax(-1), None, None, "sum", True),
    ),
}


@pytest.mark.parametrize("case", GRAD_SWITCHED_ON)
@pytest.mark.parametrize("around", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_gradients_that_the_graph_switches_on(case: str, around: Any) -> None:
    """What was made before them has none, if the caller had them off."""
    torch._dynamo.reset()
    made, read = GRAD_SWITCHED_ON[case]

    def program(s: Any) -> Any:
        z = made(s)
        with torch.enable_grad():
            return read(s, z).sum()

    def run(f: Any) -> Any:
        s: Any = World.make()
        generator = torch.Generator().manual_seed(3)
        s.v = torch.randn(s.w.shape, generator=generator, dtype=s.w.dtype).requires_grad_()
        s.t = torch.tensor(1.5, dtype=s.w.dtype, requires_grad=True)
        s.allowed = torch.arange(VOCAB) > VOCAB - 4
        with around():
            result = f(s)
        given = s.x, s.w, s.b, s.v, s.t
        return result, torch.autograd.grad(result, given, allow_unused=True) if result.requires_grad else None

    expected = run(program)
    with new_sites() as sites:
        actual = run(compiled(program))
    assert {site.status for site in sites} == {"fused"}
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("outside", "read"), [(False, False), (False, True), (True, True)])
def test_inference_mode_keeps_gradients_off_whatever_grad_mode_says(outside: bool, read: bool) -> None:
    torch._dynamo.reset()

    def program(s: World) -> Any:
        z = s.z if outside else None
        with torch.inference_mode(), torch.enable_grad():
            z = s.z if z is None else z
            if not read:
                return z[:, 1:]
            with torch.inference_mode(False):
                lse = z.logsumexp(-1)
            return lse, ce(z, s.y)

    def run(f: Any) -> Any:
        made = f(World.make())
        made = made if isinstance(made, tuple) else (made,)
        return [(t.requires_grad, t.is_leaf, t.is_inference(), t.detach() + 0) for t in made]

    torch.testing.assert_close(run(compiled(program)), run(program))


INFERRED: dict[str, Callable[[World], Any]] = {
    "loss": lambda s: ce(s.z, s.y),
    "of another head": lambda s: F.linear(s.x * 2, s.w).log_softmax(-1).gather(-1, (s.y + 0)[..., None]),
    "last row": lambda s: ce(s.z[:, -1:], (s.y + 0)[:, -1:]),
    "some classes": lambda s: s.zb[..., 1:].logsumexp(-1),
    "best class": lambda s: s.zb.argmax(-1),
    "best classes": lambda s: s.z.topk(3).values,
    "all entries": lambda s: s.z.softmax(-1),
    "shifted rows": lambda s: (s.z - s.z.logsumexp(-1, keepdim=True)).amax(-1),
    "detached": lambda s: ce(s.zb.detach() / 2, s.y),
}


@pytest.mark.parametrize("case", INFERRED)
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_inference_mode_in_a_graph(inner: str, case: str) -> None:
    """Beside what is trained: of operands that were made outside AOTAutograd traces no views there."""
    if inner == "aot_eager" and BEFORE_2_13:
        pytest.skip("AOTAutograd of PyTorch before 2.13 traces no product there, whatever the backend")
    torch._dynamo.reset()

    def program(s: World) -> Any:
        with torch.inference_mode():
            found = INFERRED[case](s)
        return ce(s.z, s.y), found * 2

    def run(f: Any) -> Any:
        s = World.make()
        loss, found = f(s)
        loss.backward()
        return loss, found.clone(), s.x.grad, s.w.grad

    with new_sites() as sites:
        actual = run(compiled(program, inner=inner))
    torch.testing.assert_close(actual, run(program))
    assert {site.status for site in sites} == {"fused"}


@pytest.mark.parametrize("trained", ["x", "b"])
def test_operands_of_inference_mode_beside_those_that_are_trained(trained: str) -> None:
    """Refused where the backward needs them: eager's needs no bias, and for that of the bias nothing else."""
    torch._dynamo.reset()
    s = World.make()
    s.w = s.w.detach()  # type: ignore[assignment]
    frozen = "b" if trained == "x" else "x"
    with torch.inference_mode():
        setattr(s, frozen, getattr(s, frozen).detach().clone())

    def gradient(loss: Any) -> torch.Tensor:
        return torch.autograd.grad(loss(s), getattr(s, trained))[0]

    def lse(s: World) -> torch.Tensor:
        return s.zb.logsumexp(-1).sum()

    assert gradient(lse).isfinite().all()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        gradient(compiled(lse))
    # Its gradients are made in the forward.
    torch.testing.assert_close(gradient(compiled(lambda s: ce(s.zb, s.y))), gradient(lambda s: ce(s.zb, s.y)))


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "ambient"])
@pytest.mark.parametrize("cast", [True, False], ids=["float", "as it is"])
def test_autocast(inside: bool, cast: bool, device: str) -> None:
    """Weights and gradients stay float32; the products run in bfloat16, as in eager."""

    def program(s: World) -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=inside or torch.is_autocast_enabled(device)):
            z = s.zb
            z = z.float() if cast else z
            return ce(z, s.masked), z.log_softmax(-1).gather(-1, s.y[..., None])

    def run(f: Any) -> Any:
        s = World.make(torch.float32, device)
        with torch.autocast(device, torch.bfloat16, enabled=not inside):
            loss, scores = f(s)
        (loss + scores.sum()).backward()
        return loss, scores, s.x.grad, s.w.grad, s.b.grad

    with new_sites() as sites:
        actual = run(compiled(program))
    expected = run(program)
    assert [a.dtype for a in actual] == [e.dtype for e in expected]
    torch.testing.assert_close(actual, expected, rtol=3e-2, atol=3e-2)
    assert [(site.status, site.dtype) for site in sites] == [("fused", "bfloat16")]


# --- records --------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 4), torch.nn.Linear(4, 4))
        self.lm_head = torch.nn.Linear(4, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ce(self.lm_head(self.body(ids))[:, :-1], ids[:, 1:])


def test_a_site_says_what_and_where() -> None:
    report = fxfuse.explain(Model().bfloat16(), torch.randint(VOCAB, (2, 5)))
    (site,) = report
    assert (site.status, site.module, site.rows, site.hidden, site.vocab) == ("kept", "lm_head", 10, 4, VOCAB)
    assert site.dtype == "bfloat16"
    assert site.reason is not None and site.reason.code == "too_small"
    (site,) = captured_sites(Model(), torch.randint(VOCAB, (2, 5)))
    assert site.pattern == "linear → […] → reshape → cross_entropy"
    assert site.variant == "gradients in forward"
    # Logits and their gradient.
    assert site.bytes_saved == 2 * 10 * VOCAB * 4
    lines = [line for line in site.where.splitlines() if line]
    assert len(lines) == 1 and "test_graph.py:" in lines[0]


def captured_sites(f: Any, *args: Any, **options: Any) -> list[fxfuse.Site]:
    torch._dynamo.reset()
    with new_sites() as sites:
        compiled(f, **options)(*args)
    return sites


def test_a_weight_that_is_no_modules_output_is_named_by_its_owner() -> None:
    model = Model()
    (site,) = captured_sites(lambda ids: ce(model.body(ids) @ model.lm_head.weight.t(), ids), torch.arange(10)[None])
    assert site.module == "lm_head"


def test_projections_inside_the_model_are_no_heads() -> None:
    model = torch.nn.TransformerEncoderLayer(16, 2, 64, batch_first=True)
    assert captured_sites(model, torch.randn(2, 5, 16)) == []


@pytest.mark.parametrize(
    "program",
    [
        lambda x, a, b, other: F.linear(F.linear(x, a), b) * 2 + other,
        lambda x, a, b, other: F.linear(F.linear(torch.eye(16), a), b).T,
        lambda x, a, b, other: F.linear(
            F.rms_norm(h := F.embedding(x.argmax(-1), a.t()) @ b.t() + other, (32,)) * h.square().mean(-1, True), other
        ),
    ],
    ids=["added", "a_weight", "of_a_table"],
)
def test_adapters_of_low_rank_are_no_heads(program: Any) -> None:
    """As of PEFT's DoRA, and of its LoRA for a table."""
    x, a, b, other = torch.randn(16, 16), torch.randn(2, 16), torch.randn(32, 2), torch.randn(16, 32)
    torch.testing.assert_close(compiled(program)(x, a, b, other), program(x, a, b, other))
    assert captured_sites(program, x, a, b, other) == []


def test_a_factored_head_is_one() -> None:
    x, a, b, other = torch.randn(16, 16), torch.randn(2, 16), torch.randn(64, 2), torch.randn(16, 64)
    (site,) = captured_sites(lambda: F.mse_loss(F.linear(F.linear(x, a), b), other))
    assert (site.status, site.vocab) == ("kept", 64)


def test_logits_that_are_returned_and_projected_are_of_a_head() -> None:
    x, w, table = torch.randn(16, 4), torch.randn(32, 4), torch.randn(4, 32)

    def program() -> Any:
        z = F.linear(x, w)
        return z, F.linear(z.sin(), table)

    (site,) = captured_sites(program)
    assert site.vocab == 32


def test_probabilities_that_are_projected_are_of_a_head() -> None:
    x, w, table = torch.randn(16, 4), torch.randn(32, 4), torch.randn(4, 32)
    (site,) = captured_sites(lambda x, w, table: F.linear(F.linear(x, w).softmax(0), table), x, w, table)
    assert (site.status, site.vocab) == ("kept", 32)


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: torch.einsum("btd,vd->btv", x, w),
        lambda x, w: torch.tensordot(x, w, ([2], [1])),
        lambda x, w: torch.einsum("vd,btd->btv", w, x[..., :1].expand(-1, -1, 4)),
    ],
)
def test_a_hidden_axis_of_one_that_is_spread_is_no_heads(product: Any) -> None:
    s = World.make()
    narrow = s.w[:, :1]
    assert captured_sites(lambda: ce(product(s.x, narrow), s.y)) == []
    torch.testing.assert_close(compiled(lambda: ce(product(s.x, narrow), s.y))(), ce(product(s.x, narrow), s.y))


def test_a_selection_of_classes_by_a_list_of_unknown_length() -> None:
    s = World.make()
    program = lambda i: s.z[..., i].mean(-1).sum()  # noqa: E731
    f = compiled(program, dynamic=True)
    for length in (3, 5):
        torch.testing.assert_close(f(torch.arange(length)), program(torch.arange(length)))


@pytest.mark.parametrize(
    "name", ["shape", "size", "size from the end", "size by name", "all rows", "a selection of rows"]
)
def test_functions_that_are_given_the_number_of_rows(name: str) -> None:
    """For which Dynamo leaves a question for all sizes in the graph, where these are symbols."""
    torch._dynamo.reset()

    def program(s: World) -> torch.Tensor:
        z = s.z[:, 1:] if name == "a selection of rows" else s.z
        if name == "all rows":
            weights = torch.logspace(0, 1, z.shape[0])[:, None] * torch.linspace(0.5, 2, z.shape[1])
        else:
            sizes = {
                "size": lambda: z.size(1),
                "size from the end": lambda: z.size(-2),
                "size by name": lambda: z.size(dim=1),
            }
            weights = torch.linspace(0.5, 2, sizes[name]() if name in sizes else z.shape[-2])
        return (z.logsumexp(-1) * weights).mean()

    f = compiled(program, dynamic=True)
    with new_sites() as sites:
        actual, expected = World.make(), World.make()
        for run, world in ((f, actual), (program, expected)):
            world.loss = run(world)
            world.loss.backward()
        torch.testing.assert_close(actual.loss, expected.loss)
        torch.testing.assert_close(actual.x.grad, expected.x.grad)
        torch.testing.assert_close(actual.w.grad, expected.w.grad)
    assert {site.status for site in sites} == {"fused"}


NUMBERS: dict[str, Callable[[World, float], torch.Tensor]] = {
    "softcap": lambda s, c: ce(torch.tanh(s.z / c) * c, s.y),
    "clamp": lambda s, c: ce(s.z.clamp(-c, c), s.y),
    "added": lambda s, c: ce(c - (s.z + c), s.y),
    "in place": lambda s, c: ce((s.z * 2).sub_(c), s.y),
    "masked": lambda s, c: ce(s.z.masked_fill(torch.arange(VOCAB) > 30, -c), s.y % 30),
    "label_smoothing": lambda s, c: ce(s.z, s.y, label_smoothing=c / 10),
    "beside": lambda s, c: ce(F.linear(F.dropout(s.x, c / 10), s.w) + c, s.y),
}


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_dynamo_takes_for_inputs(name: str, inner: str) -> None:
    """One head each, also where PyTorch captures the program anew; another number is not taken for the first."""
    torch._dynamo.reset()
    floats._taken.clear()

    def program(s: World) -> torch.Tensor:
        return NUMBERS[name](s, number)

    f = compiled(program, dynamic=True, inner=inner)
    with new_sites() as sites:
        for number in (1.5, 1.5, 0.5):  # noqa: B007
            actual, expected = World.make(), World.make()
            for run, world in ((f, actual), (program, expected)):
                torch.manual_seed(0)
                world.loss = run(world)
                world.loss.backward()
            torch.testing.assert_close(actual.loss, expected.loss)
            torch.testing.assert_close(actual.x.grad, expected.x.grad)
            torch.testing.assert_close(actual.w.grad, expected.w.grad)
    assert len(sites) == 2 and sites[0].status == "fused"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["scaled", "capped"])
def test_returned_logits_of_numbers_that_dynamo_takes_for_inputs(name: str, bias: bool) -> None:
    torch._dynamo.reset()
    floats._taken.clear()

    def program(s: World) -> Any:
        z = F.linear(s.x, s.w, s.b if bias else None) / number
        z = torch.tanh(z) * number if name == "capped" else z
        return ce(z, s.y), z

    f = compiled(program, dynamic=True)
    with new_sites() as sites:
        for number in (3.0, 2.0):  # noqa: B007
            actual, expected = World.make(), World.make()
            for run, world in ((f, actual), (program, expected)):
                loss, world.z_ = run(world)
                (loss + world.z_.logsumexp(-1).mean()).backward()
            for a, b in zip((actual.z_ * 1, *actual.leaves()), (expected.z_, *expected.leaves()), strict=True):
                torch.testing.assert_close(a, b)
                torch.testing.assert_close(a.grad if a.is_leaf else None, b.grad if b.is_leaf else None)
    assert [site.status for site in sites] == (["deferred"] if name == "scaled" else ["deferred", "kept"])


def test_logits_that_nothing_reads_are_deferred_when_returned() -> None:
    (site,) = captured_sites(torch.nn.Linear(4, 1000), torch.randn(2, 5, 4))
    assert site.status == "deferred"


def test_explain_keeps_the_options_of_what_was_compiled() -> None:
    model, ids = Model(), torch.randint(VOCAB, (2, 5))
    for f in (model, lambda ids: model(ids)):
        (site,) = fxfuse.explain(compiled(f), ids)
        assert site.status == "fused"


@pytest.mark.parametrize("classes", [None, 4])
def test_a_symbolic_vocabulary(classes: int | None) -> None:
    """A weight that is no Parameter has symbolic sizes under dynamic=True."""

    def program(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = F.linear(x, w)[:, : classes or w.shape[0]]
        return F.cross_entropy(z, y)

    x, w, y = torch.randn(6, 3), torch.randn(7, 3), torch.randint(4, (6,))
    torch._dynamo.reset()
    with new_sites() as sites:
        torch.testing.assert_close(compiled(program, dynamic=True)(x, w, y), program(x, w, y))
    assert [site.reason.code for site in sites if site.reason] == ["shape"]


def test_a_selection_of_classes_is_followed_to_its_loss() -> None:
    (site,) = captured_sites(lambda s: F.cross_entropy(s.z[[0], :, [0, 2, 5]], s.y[0, :3] % 3), World.make())
    assert site.reason is not None and "a selection of classes" in site.reason.sentence


def test_explain_twice_gives_the_same_and_only_its_own() -> None:
    model, ids = Model(), torch.randint(VOCAB, (2, 5))
    first, second = fxfuse.explain(model, ids), fxfuse.explain(torch.compile(model), ids)
    assert len(first) == len(second) == 1
    assert first.sites == second.sites


@torch.library.custom_op("fxfuse_tests::scribble", mutates_args={"x"})
def scribble(x: torch.Tensor) -> None:
    x.zero_()


def test_a_custom_op_that_writes_is_recognised() -> None:
    def program(s: World) -> Any:
        x = s.x.detach() * 1
        z = F.linear(x, s.w.detach())
        torch.ops.fxfuse_tests.scribble(x)
        return ce(z, s.y)

    world = World.make()
    (site,) = captured_sites(program, world)
    assert site.reason is not None and site.reason.code == "operand_mutated"
    assert "test_graph.py:" in (site.reason.where or "")


def test_the_largest_of_no_logits_raises_as_in_eager() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w).max()

    x, w = torch.randn(0, 3), torch.randn(17, 3)
    torch._dynamo.reset()
    with new_sites() as sites:
        assert_raises_like(lambda: program(x, w), lambda: compiled(program)(x, w))
    assert [site.reason.code for site in sites if site.reason] == ["shape"]


def test_a_target_out_of_range_raises_as_in_eager() -> None:
    world = World.make()
    world.y[1, 2] = VOCAB
    with pytest.raises(IndexError, match=f"Target {VOCAB} is out of bounds"):
        compiled(lambda s: ce(s.z, s.y))(world)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=f"index {VOCAB} is out of bounds"):
        compiled(lambda s: s.z.log_softmax(-1).gather(-1, s.y[..., None]))(world)


@pytest.mark.parametrize("bad", [VOCAB, -VOCAB - 1])
def test_an_index_out_of_range_raises_as_in_eager(bad: int) -> None:
    world = World.make()
    y = world.y[0]
    y[2] = bad

    def program(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return z.log_softmax(-1)[torch.arange(len(y)), y].mean()

    with pytest.raises(IndexError) as eager:
        program(world.z[0], y)
    with pytest.raises(IndexError) as ours:
        compiled(lambda x, w, y: program(F.linear(x, w), y))(world.x[0], world.w, y)
    assert str(ours.value) == str(eager.value)


@pytest.mark.parametrize(
    "fill",
    [
        lambda z: z.masked_fill(torch.arange(VOCAB) >= 14, -1e9),
        lambda z: z.masked_fill(torch.arange(VOCAB) >= 14, torch.tensor(-1e9)),
        lambda z: z.index_fill(-1, torch.tensor([3]), -1e9),
        lambda z: z.index_fill(-1, torch.tensor([3]), torch.tensor(-1e9)),
        lambda z: z.index_fill(-1, torch.tensor([3], dtype=torch.int32), -9.0),
        lambda z: z.index_fill(-1, torch.arange(VOCAB) >= 14, -9.0),
        lambda z: z.clamp(-1e9, 1e9),
        lambda z: z.clamp_min(-1e9),
    ],
)
def test_a_fill_that_eager_refuses(fill: Any) -> None:
    """A number that float16 does not hold, and indices that are none."""

    def program(s: World) -> Any:
        return fill(s.z).logsumexp(-1)

    for f, world in ((program, World), (compiled(program), World), (program, DeferredWorld)):
        with pytest.raises((RuntimeError, IndexError), match=r"without overflow|Expected dtype int64"):
            f(world.make(torch.float16))


FLOATS = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("around", ["nothing", "all", "the head", "the loss"])
@pytest.mark.parametrize("of_logits", FLOATS)
@pytest.mark.parametrize("of_weight", [*FLOATS, torch.int64, torch.bool])
def test_class_weights_of_another_dtype(of_logits: torch.dtype, of_weight: torch.dtype, around: str) -> None:
    """Are refused as in eager, but for what autocast converts."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, w = torch.randn(6, 8, dtype=of_logits), torch.randn(33, 8, dtype=of_logits)
    y, c = torch.randint(33, (6,)), (torch.rand(33) + 1).to(of_weight)

    def autocast(where: str) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if around == where else contextlib.nullcontext()

    def whole(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with autocast("the head"):
            z = F.linear(x, w)
        with autocast("the loss"):
            return F.cross_entropy(z, y, c)

    def apart(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with autocast("the head"):
            z = compiled(F.linear)(x, w)
        with autocast("the loss"):
            return F.cross_entropy(z, y, c)

    with autocast("all"):
        try:
            expected: Any = whole(x, w)
        except RuntimeError as error:
            # A graph that raises does not leave the contexts that it entered.
            for f in (apart,) if around == "the loss" else (compiled(whole), apart):
                with pytest.raises(RuntimeError, match=re.escape(str(error))):
                    f(x, w)
        else:
            with new_sites() as sites:
                for f in (compiled(whole), apart):
                    torch.testing.assert_close(f(x, w), expected, rtol=2e-2, atol=2e-2)
            assert [site.status for site in sites] == ["fused", "deferred"]
    torch.autocast_decrement_nesting()
    assert torch.autocast_increment_nesting() == 0, "contexts of autocast that nobody left"


def test_hooks_of_saved_tensors_that_are_disabled() -> None:
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        world = World.make()
        with new_sites() as sites:
            compiled(lambda s: ce(s.z, s.y))(world).backward()
    assert [site.status for site in sites] == ["fused"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_least_numbers_after_a_scale(dtype: torch.dtype, inner: str) -> None:
    """Which no dtype holds before a scale of less than one; a mask that is added keeps what is finite so."""
    world = World.make()
    x, w, y = world.x[0].detach().to(dtype), world.w.detach().to(dtype), world.y[0] % 5
    mask = torch.arange(VOCAB) >= 14

    def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        least = torch.finfo(dtype).min
        filled = (F.linear(x, w) / 2).masked_fill(mask, least)
        added = F.linear(x, w) / 2 + torch.zeros(VOCAB, dtype=dtype).masked_fill(mask, least)
        of_masked = [z.gather(-1, y[:, None] * 0 + 15) for z in (filled, added)]
        return F.cross_entropy(filled.float(), y), F.cross_entropy(added.float(), y), *of_masked

    ours, eager = compiled(program, inner=inner)(x, w), program(x, w)
    tolerance = {} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(ours[:3], eager[:3], **tolerance)
    assert bool(ours[3].isfinite().all() and (ours[3] < torch.finfo(dtype).min / 4).all())


LEAST: dict[str, Any] = {
    "mask": lambda z, mask, least: z.masked_fill(mask, least) / 0.7,
    "mask, negative": lambda z, mask, least: z.masked_fill(mask, -least) * -1.5,
    "added": lambda z, mask, least: (z + torch.zeros(VOCAB, dtype=z.dtype).masked_fill(mask, least)) * 2,
    "after a softcap": lambda z, mask, least: (5 * torch.tanh(z / 5)).masked_fill(mask, least) * 2,
    "after a softcap, infinite": lambda z, mask, least: (5 * torch.tanh(z / 5)).masked_fill(mask, -math.inf) * 2,
    "all but one": lambda z, mask, least: z.masked_fill(torch.arange(VOCAB) > 0, least) / 0.7,
    "times little": lambda z, mask, least: z.masked_fill(mask, -math.inf) * 1e-9,
    "times very little": lambda z, mask, least: z.masked_fill(mask, -math.inf) * 1e-33,
}


@pytest.mark.parametrize("made", LEAST.values(), ids=LEAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_entropies_of_least_numbers_that_a_scale_makes_infinite(made: Any, dtype: torch.dtype) -> None:
    """Where eager's are numbers, as it clamps log-probabilities; its gradients are NaN."""
    mask = torch.arange(VOCAB) >= 14

    def program(s: Any) -> torch.Tensor:
        z = made(s.zb, mask, torch.finfo(dtype).min)
        return torch.distributions.Categorical(logits=z, validate_args=False).entropy()

    with torch.no_grad():
        expected = program(World.make(dtype))
        assert expected.isfinite().all()
        tolerance = {"rtol": 0.02, "atol": 0.05} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(compiled(program)(World.make(dtype)), expected, **tolerance)
        torch.testing.assert_close(program(DeferredWorld.make(dtype)), expected, **tolerance)


@pytest.mark.parametrize("read", [lambda z: z.softmax(-1), lambda z: z.log_softmax(-1)])
def test_the_largest_probabilities_of_rows_with_infinite_logits(read: Any) -> None:
    """Are NaN, as all of these rows are."""

    def program(s: Any) -> torch.Tensor:
        return read(s.zb).topk(3).values

    for infinity in (math.inf, -math.inf):
        worlds = World.make(), DeferredWorld.make(), World.make()
        with torch.no_grad():
            for world in worlds:
                world.b[slice(None) if infinity < 0 else 2] = infinity
        expected = program(worlds[0])
        assert expected.isnan().all()
        for actual in (program(worlds[1]), compiled(program)(worlds[2])):
            torch.testing.assert_close(actual, expected, equal_nan=True)


def test_the_gradient_of_a_temperature_that_was_expanded_to_classes() -> None:
    """Each entry has one of its own, which shows where it is a leaf, or asked for."""
    world = World.make()
    rows = torch.full((len(world.y[0]), 1), 2.0, dtype=world.x.dtype)

    def program(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, w) / t, world.y[0])

    def hooked(x: torch.Tensor, w: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        t = rows.expand(-1, VOCAB)
        t.register_hook(lambda g: g.clamp(-1e-2, 1e-2))
        return program(x, w, t)

    for make in (lambda: rows.expand(-1, VOCAB).requires_grad_(), lambda: rows.requires_grad_().expand(-1, VOCAB)):
        ours, eager = (
            torch.autograd.grad(f(world.x[0], world.w, t), t)
            for f, t in ((compiled(program), make()), (program, make()))
        )
        torch.testing.assert_close(ours, eager)
    rows.requires_grad_()
    ours, eager = (torch.autograd.grad(f(world.x[0], world.w, rows), rows) for f in (compiled(hooked), hooked))
    torch.testing.assert_close(ours, eager)


def test_a_temperature_that_item_takes() -> None:
    world = World.make()

    def program(s: World) -> Any:
        return ce(s.z / s.c[0].abs().item(), s.y), s.zb.logsumexp(-1)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        sites = captured_sites(program, world)
        torch.testing.assert_close(compiled(program)(world), program(world))
    assert {site.status for site in sites} == {"fused"} and len(sites) == 2


@pytest.mark.parametrize("width", [7, 16])
def test_a_size_that_is_also_another_projections_width(width: int) -> None:
    """What an inner projection is followed through by its width must not hide the head."""
    up, down, head = torch.nn.Linear(4, 16), torch.nn.Linear(16, 4), torch.nn.Linear(4, VOCAB)
    x, y = torch.randn(2, width, 4), torch.randint(VOCAB, (2, width))

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ce(head(x + down(up(x).tanh())), y)

    (site,) = captured_sites(program, x, y)
    assert (site.status, site.module) == ("fused", "head")


def test_forward_mode() -> None:
    """Never a silently missing tangent: left alone where it is seen in time, refused where it is not."""
    import torch.autograd.forward_ad as forward_ad

    s = World.make()
    x, w = s.x.detach(), s.w.detach()

    def program(x: torch.Tensor) -> torch.Tensor:
        return ce(F.linear(x, w), s.y)

    def tangent(f: Any) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.cos()))).tangent

    expected = tangent(program)
    torch._dynamo.reset()
    with new_sites() as sites:
        torch.testing.assert_close(tangent(compiled(program)), expected)
    assert [site.reason.code for site in sites if site.reason] == ["functional_transform"]
    torch.testing.assert_close(tangent(lambda x: fxfuse.linear_cross_entropy(x, w, s.y)), expected)
    torch._dynamo.reset()
    before = compiled(program)
    before(x)
    with pytest.raises(fxfuse.FxfuseError, match="forward-mode"):
        tangent(before)


class Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
        return z.sin()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


class OwnLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
        return z.logsumexp(-1)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g[..., None].expand(2, 5, 64)


def test_a_loss_of_the_users_own_is_reported_and_an_activation_is_not() -> None:
    up, down, x = torch.nn.Linear(4, 64), torch.nn.Linear(64, 4), torch.randn(2, 5, 4)
    assert captured_sites(lambda x: down(Activation.apply(up(x))), x) == []
    (site,) = captured_sites(lambda x: OwnLoss.apply(up(x)), x)
    assert site.reason is not None and site.reason.code == "unknown_reader"


def _edits(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, count: int) -> torch.Tensor:
    z = F.linear(x, w)
    for _ in range(count):
        z.mul_(0.99)
    return F.cross_entropy(z, y)


def _row_by_row(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, count: int) -> torch.Tensor:
    z = F.linear(x, w)
    return sum((F.cross_entropy(z[i], y[i]) for i in range(count)), torch.zeros(()))


@pytest.mark.parametrize("program", [_edits, _row_by_row])
def test_the_work_is_linear_in_the_size_of_the_graph(program: Any) -> None:
    """Counted in calls of fxfuse's own functions, which do not depend on the machine."""

    def calls(count: int) -> int:
        made, ours = 0, os.path.dirname(fxfuse.__file__)

        def profile(frame: Any, event: str, _: Any) -> None:
            nonlocal made
            made += event == "call" and frame.f_code.co_filename.startswith(ours)

        def backend(gm: GraphModule, inputs: list[torch.Tensor]) -> Any:
            sys.setprofile(profile)
            try:
                return backend_of_fxfuse(gm, inputs, options={"fxfuse.inner": "eager", "fxfuse.min_logits_bytes": 0})
            finally:
                sys.setprofile(None)

        torch._dynamo.reset()
        x, w, y = torch.randn(64, 8), torch.randn(32, 8, requires_grad=True), torch.randint(32, (64,))
        with new_sites() as sites:
            torch.compile(program, backend=backend)(x, w, y, count)
        assert [site.status for site in sites] == ["fused"]
        return made

    assert calls(64) < 5 * calls(16)


def test_a_mean_of_losses_whose_sum_overflows() -> None:
    """Each loss is divided before they are added (``docs/numerics.md``); gradients are eager's."""

    def mean(s: World) -> torch.Tensor:
        z = s.z.masked_fill(torch.arange(VOCAB, device="cpu") == 0, torch.finfo(torch.float64).min)
        return ce(z, torch.zeros_like(s.y))

    eager, fused = World.make(), World.make()
    expected, loss = mean(eager), compiled(mean, strict=True)(fused)
    assert expected.isinf()
    torch.testing.assert_close(-loss / torch.finfo(torch.float64).min, torch.ones_like(loss))
    expected.backward()
    loss.backward()
    torch.testing.assert_close(fused.x.grad, eager.x.grad)
    torch.testing.assert_close(fused.w.grad, eager.w.grad)
