"""Programs that read logits, each with what fxfuse should make of it.

One list for every driver and device: a program takes a ``World`` and computes what a user's code would. In those of
``FUSED`` and ``FUSED_IN_GRAPHS`` every head must be fused; those of ``KEPT`` must be left alone, for the reason named;
of ``DEFERRED`` the logits leave the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from fxfuse.algebra import Head, Logits
from fxfuse.defer import defer
from fxfuse.report.records import Site, journal

BATCH, TIME, HIDDEN, VOCAB = 2, 5, 4, 17
SITE = Site("deferred", "linear", "programs.py:1", "", BATCH * TIME, HIDDEN, VOCAB, "float64")
journal.add([SITE])  # what reads the logits of a ``DeferredWorld`` is told of it


@dataclass
class World:
    """Operands: hidden states ``x [B, T, D]``, weight ``w [V, D]``, bias ``b [V]``, labels ``y [B, T]`` in [0, V)."""

    x: torch.Tensor
    w: torch.Tensor
    b: torch.Tensor
    y: torch.Tensor
    c: torch.Tensor  # class weights [V]

    @classmethod
    def make(cls, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0) -> World:
        g = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> torch.Tensor:
            made = torch.randn(*shape, generator=g, dtype=torch.float64, device="cpu")
            return made.to(device, dtype).requires_grad_()

        return cls(
            randn(BATCH, TIME, HIDDEN),
            torch.nn.Parameter(randn(VOCAB, HIDDEN)),
            torch.nn.Parameter(randn(VOCAB)),
            torch.randint(0, VOCAB, (BATCH, TIME), generator=g, device="cpu").to(device),
            torch.rand(VOCAB, generator=g, dtype=torch.float64, device="cpu").to(device, dtype),
        )

    def leaves(self) -> list[torch.Tensor]:
        return [self.x, self.w, self.b]

    @property
    def masked(self) -> torch.Tensor:
        """Labels with every third one ignored."""
        flat = torch.arange(self.y.numel(), device=self.y.device).view_as(self.y)
        return torch.where(flat % 3 == 1, -100, self.y)

    @property
    def z(self) -> torch.Tensor:
        return self.project(self.x, self.w)

    @property
    def zb(self) -> torch.Tensor:
        return self.project(self.x, self.w, self.b)

    def project(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, w, b)


class DeferredWorld(World):
    """A world whose projections are deferred, as if compiled models had returned them."""

    def project(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        head = Head(x, w, b, False, w.shape[1], w.shape[0], x.dtype)
        shape = (*x.shape[:-1], head.vocab)
        bare = replace(head, input=None, weight=None, bias=None)
        z = Logits(bare, shape, len(shape) - 1, head.dtype, torch.is_grad_enabled(), trail=("linear",))
        return defer(z, head, SITE, least=0, memory=0)


def ce(z: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(z.reshape(-1, VOCAB), y.reshape(-1), **options)


def _rows(lp: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return lp.gather(-1, y.unsqueeze(-1)).squeeze(-1)


def _two_readers(z: torch.Tensor, y: torch.Tensor) -> Any:
    return ce(z, y), z.logsumexp(-1), z.gather(-1, y[..., None])


def _detached_scores(s: World) -> Any:
    lp = F.log_softmax(s.z, dim=-1)
    return _rows(lp, s.y).detach() + 1


def _learned_rows_over_detached_rows(s: World) -> Any:
    """What came before gets no gradient, a shift and a bias among it; what comes after does."""
    with torch.no_grad():
        z = s.zb - s.x[..., :1]
    z = z - s.b[:TIME, None] * 2
    return _rows((z / s.b[TIME : 2 * TIME, None].exp()).log_softmax(-1), s.y), (z * s.b[0]).logsumexp(-1)


def _normaliser_under_no_grad(s: World) -> Any:
    """No gradient goes through it, and the loss is that of log-probabilities all the same."""
    z = s.zb / 2
    with torch.no_grad():
        lse = z.logsumexp(-1, keepdim=True)
        total = z.exp().sum(-1, keepdim=True)
    return (z - lse).gather(-1, s.y[..., None]), z.exp().gather(-1, s.y[..., None]) / total, ce(z, s.y)


def _shifted_rows_of_frozen_hidden_states(s: World) -> Any:
    z = s.project(s.x.detach(), s.w)
    return ce(z - z.max(-1, keepdim=True).values, s.y), ce(s.b[:TIME, None] - z, s.y, reduction="sum")


def _largest_under_no_grad(s: World) -> Any:
    z = s.z
    with torch.no_grad():
        largest = z.max(), z.amax()
    return ce(z, s.y), *largest


def _normaliser_written_behind_autograd(s: World) -> Any:
    with torch.no_grad():  # eager's gradient would be of what was written
        z = s.z
        lse = z.logsumexp(-1, keepdim=True)
        lse.data.add_(1)
        return (z - lse).gather(-1, s.y[..., None])


def _returned_beside_a_view_of_the_weight(s: World) -> Any:
    w = s.w * 2
    return F.linear(torch.cat([s.x, s.x, s.x]), w), w.view(-1)


def _frozen(s: World) -> torch.Tensor:
    """Logits without a gradient: gradients begin at what programs do to them."""
    return s.project(s.x.detach(), s.w.detach())


def _learned_with_a_frozen_head(s: World) -> Any:
    """A bias and a temperature, and accuracy of the logits before."""
    z = _frozen(s)
    calibrated = (z + s.b) / s.b[:1].exp()
    return ce(calibrated, s.y), (z.argmax(-1) == s.y).sum()


def _calibrated_beside_a_detached_head(s: World) -> Any:
    with torch.no_grad():
        z = s.z
    return ce(z / s.b[:1].exp(), s.y)


def _no_grad_head(s: World) -> Any:
    with torch.no_grad():
        z = s.z
    return z.logsumexp(-1)


def _no_grad_reader(s: World) -> Any:
    z = s.z
    with torch.no_grad():
        loss = ce(z, s.y)
    return loss, ce(z, s.y)


def _labels_mutated(s: World) -> Any:
    y, other = s.y.clone(), s.y.clone()
    z = s.z
    y[0, 0] = 3
    first = ce(z, y)
    other[0, 1] = -100
    return first, ce(z, other)


def _reader_result_mutated(s: World) -> Any:
    lp = s.z.log_softmax(-1)
    a, b = _rows(lp, s.y), _rows(lp, s.y)
    a += 1
    return a, b, ce(s.z, s.y).mul_(2)


def _result_written_into_labels(s: World) -> Any:
    y, other = s.y.flatten(), s.y.flatten().clone()
    z = s.z.view(-1, VOCAB)
    loss = F.cross_entropy(z, y)
    other[0] = loss.detach()
    return loss, F.cross_entropy(z, other)


def _result_as_class_weight(s: World) -> Any:
    with torch.no_grad():
        z = F.linear(s.w, s.w)
        lse = z.logsumexp(-1)
        return lse, F.cross_entropy(z, torch.arange(VOCAB, device=z.device), weight=lse)


def _late_size(s: World) -> Any:
    z = s.z
    total = z.logsumexp(-1).sum()
    rows = s.x.shape[0] * s.x.shape[1]
    return total, z.view(rows, VOCAB).logsumexp(-1)


def _no_grad_contiguous(s: World) -> Any:
    z = s.z
    with torch.no_grad():
        same = z.contiguous().to(z.dtype)  # z itself
    return ce(same, s.y)


def _smoothed_by_hand(s: World) -> Any:
    """What transformers' ``LabelSmoother`` does."""
    log_probs = -F.log_softmax(s.z[..., :-1, :].contiguous(), dim=-1)
    labels = s.masked[..., 1:].contiguous().unsqueeze(-1)
    ignored = labels.eq(-100)
    nll = log_probs.gather(dim=-1, index=torch.clamp(labels, min=0))
    smoothed = log_probs.sum(dim=-1, keepdim=True, dtype=s.x.dtype)
    nll.masked_fill_(ignored, 0.0)
    smoothed.masked_fill_(ignored, 0.0)
    active = ignored.numel() - ignored.long().sum()
    return 0.9 * nll.sum() / active + 0.1 * smoothed.sum() / (active * log_probs.shape[-1])


def _olmo_z_loss(s: World) -> Any:
    z = s.z[..., :-1, :].contiguous().view(-1, VOCAB)
    t = s.y[:, 1:].reshape(-1)
    loss = F.cross_entropy(z, t, reduction="sum")
    return loss / t.numel() + 1e-2 * (z.logsumexp(-1).pow(2) * t.ne(-100)).sum()


def _weight_first(s: World) -> Any:
    x, y = s.x.view(-1, HIDDEN), s.y.view(-1)
    rows = s.w @ s.x.mT  # [B, V, T]
    a = F.cross_entropy(rows, s.y), rows[:, :, 1:].logsumexp(1), _rows(rows.mT.log_softmax(-1), s.y)
    z = torch.mm(s.w, x.t())  # [V, N]
    b = F.cross_entropy(z.t(), y), (z / 2 + s.b[:, None])[:, 1:].logsumexp(0)
    return *a, *b, F.cross_entropy(s.w @ x[0], y[0]), torch.mv(s.w, x[1]).logsumexp(0)


def _einsum_classes_not_last(s: World) -> Any:
    x = s.x.view(-1, HIDDEN)
    a = torch.einsum("vd,nd->vn", s.w, x).T.log_softmax(-1).gather(-1, s.y.view(-1, 1))
    b = F.cross_entropy(torch.einsum("bsd,vd->bvs", s.x, s.w), s.y)
    c = torch.einsum("dv,bsd->vsb", s.w.t(), s.x)[:, 1:].logsumexp(0)
    return a, b, c, torch.einsum("vd,bds->bvs", s.w, s.x.mT).softmax(1).amax(1).detach()


def _einsum_in_short(s: World) -> Any:
    a = ce(torch.einsum("...d,vd->...v", s.x, s.w), s.y)
    b = torch.einsum("btd,vd", s.x, s.w).logsumexp(-1)
    c = torch.einsum("dv, ...d", s.w.t(), s.x).log_softmax(-1).gather(-1, s.y[..., None])
    return a, b, c, torch.einsum("v...,b...->bv", s.w, s.x[:, 0]).logsumexp(-1)


def _tensordot(s: World) -> Any:
    z = torch.tensordot(s.x, s.w, ([-1], [1]))
    return ce(z, s.y), torch.tensordot(s.x, s.w.t(), 1).logsumexp(-1), torch.inner(s.x, s.w).max(-1).values


def _one_axis_with_the_weight_first(s: World) -> Any:
    x = s.x.view(-1, HIDDEN)
    a = F.cross_entropy(torch.inner(s.w, x).t(), s.y.view(-1)), torch.inner(s.w, s.x).logsumexp(0)
    b = torch.tensordot(s.w, s.x, ([1], [-1])).movedim(0, -1).log_softmax(-1).gather(-1, s.y[..., None])
    c = torch.tensordot(s.w, s.x.mT, ([1], [1])).logsumexp(0), torch.tensordot(s.w, x.T, 1)[:, 1:].logsumexp(0)
    return *a, b, *c, F.cross_entropy(torch.inner(s.w, x[0]), s.y[0, 0])


def _weight_made_again_for_each_chunk(s: World) -> Any:
    x, y = s.x.view(-1, HIDDEN), s.y.view(-1)
    chunks = x.chunk(3)
    views = torch.cat([c @ s.w.t() for c in chunks]), torch.cat([torch.mm(c, s.w.transpose(0, 1)) for c in chunks])
    casts = torch.cat([F.linear(c.float(), s.w.float()) for c in chunks]), torch.cat([(s.w @ c.T).T for c in chunks])
    return *(F.cross_entropy(z, y) for z in (*views, *casts)), torch.stack([c @ s.w.T for c in x]).logsumexp(-1)


def _two_heads(s: World) -> Any:
    return ce(s.z, s.y) + ce(F.linear(s.x, s.w * 2), s.y)


def _same_head_twice(s: World) -> Any:
    return ce(F.linear(s.x, s.w), s.y) + ce(F.linear(s.x, s.w) * 2, s.masked)


def _scales_apart(s: World) -> Any:
    z = s.z
    return ce(z, s.y), ce(z / 2, s.y), (z * 3).logsumexp(-1)


def _checkpointed(s: World) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda x, w, y: ce(F.linear(x, w), y), s.x, s.w, s.y, use_reentrant=False)


def _checkpointed_sizes(s: World) -> Any:
    """Whose sizes Dynamo asks for even if it knows symbols for them."""
    from torch.utils.checkpoint import checkpoint

    def flat(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = F.linear(x, w)
        batch, time, vocab = z.shape
        return F.cross_entropy(z.view(-1, z.shape[-1]), y.view(-1)) + z.view(batch * time, vocab).logsumexp(-1).mean()

    return checkpoint(flat, s.x, s.w, s.y, use_reentrant=False)


def _checkpointed_distillation(s: World) -> Any:
    from torch.utils.checkpoint import checkpoint

    def divergence(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        target = F.linear(x, w, b).softmax(-1)
        return F.kl_div(F.linear(x, w).log_softmax(-1), target, reduction="batchmean")

    return checkpoint(divergence, s.x, s.w, s.b, use_reentrant=False)


def _tied(s: World) -> Any:
    return ce(F.linear(F.embedding(s.y, s.w), s.w), s.y)


def _module_loss(s: World) -> Any:
    loss = torch.nn.CrossEntropyLoss(weight=s.c, label_smoothing=0.1, ignore_index=3)
    return loss(s.zb.flatten(0, 1), s.y.flatten())


def _no_grad_entropy(s: World) -> Any:
    z = s.z
    with torch.no_grad():
        entropy = torch.distributions.Categorical(logits=z, validate_args=False).entropy()
        lp = z - z.logsumexp(-1, keepdim=True)
    return ce(z, s.y), entropy, _rows(lp, s.y)


def _no_grad_dropout(s: World) -> Any:
    with torch.no_grad():
        h = F.dropout(s.x, 0.0)  # s.x itself, which its example value does not tell
        z = F.linear(h, s.w, s.b)
    return ce(z, s.y, reduction="none")


def _in_place(s: World) -> Any:
    z = s.z
    z /= 2
    before = ce(z, s.y)
    z.mul_(3)
    return before, ce(z, s.y)


def _in_place_through_views(s: World) -> Any:
    z = s.z
    flat = z.view(-1, VOCAB)
    z.div_(2.5)
    flat.mul_(3).add_(1)
    return F.cross_entropy(flat, s.y.view(-1)), z.logsumexp(-1)


def _in_place_by_tensors(s: World) -> Any:
    z = s.z
    z *= s.x[..., :1].exp()
    z += s.b
    z.masked_fill_(s.c > 0.6, -1e4)
    return ce(z, s.y, reduction="none"), z.logsumexp(-1)


def _assigned_classes(s: World) -> Any:
    """Padding of the vocabulary, and forbidden tokens in a list and in a tensor."""
    z, w, v = s.z, s.zb / 2, s.z.mT + s.b[:, None]
    z[..., VOCAB - 3 :] = -1e4
    w[:, :, [1, 3, -2]] = float("-inf")
    v[:, s.y[0]] = -30.0
    return ce(z, s.y), w.logsumexp(-1), w.softmax(-1).gather(-1, 0 * s.y[..., None]), F.cross_entropy(v, s.masked)


def _assigned_one_by_one(s: World) -> Any:
    z, w, v, u = s.z, s.zb, s.z * 2, s.zb.mT
    z[:, :, 3] = float("-inf")
    w[..., s.c > 0.6] = -1e4
    v.index_fill_(-1, s.y[0], -20.0)
    u = u.index_fill(1, s.y[0, 0], 5.0)
    u[:, -2] = -3.0
    return z.logsumexp(-1), ce(w, s.y), ce(v, s.masked), F.cross_entropy(u, s.y)


def _less_logits(s: World) -> Any:
    """What is not logits less logits."""
    z = s.z
    a = ce(1.0 - z, s.y), (s.b - 2 * z).logsumexp(-1), torch.rsub(z, s.x[..., :1]).logsumexp(-1)
    return *a, _rows(z.logsumexp(-1, keepdim=True) - z, s.y), 2 - z.log_softmax(-1).sum(-1)


def _in_place_on_a_part(s: World) -> Any:
    """Of memory of which nothing else is read."""
    z, v = s.z[:, :-1], s.zb[..., 1:-3]
    z /= 0.7
    z.mul_(s.b[0])
    v *= 2
    return ce(z, s.y[:, 1:]), v.logsumexp(-1)


def _temperatures(s: World) -> Any:
    """A parameter, one for each row, one for each sequence."""
    z, t = s.z, s.b[0].exp()
    a = ce(s.zb / t, s.y) + ce(z * t, s.masked)
    b = _rows((z / s.x[..., :1].exp()).log_softmax(-1), s.y)
    return a, b, (z * s.b[:BATCH].view(-1, 1, 1)).logsumexp(-1)


def _temperature_of_each_row(s: World) -> Any:
    """Projected to one class of its own."""
    t, u = F.linear(s.x, s.w[:1]), F.softplus(F.linear(s.x, s.w[1:2], s.b[:1]))
    return ce(s.z * t, s.y), (s.z / u).logsumexp(-1), ce(s.zb / u, s.masked, label_smoothing=0.1)


def _temperatures_over_biases(s: World) -> Any:
    """Every one of the row's temperatures is also the bias's, but not of what is added after it."""
    t, u = s.x[..., :1].exp(), s.b[:BATCH].exp().view(-1, 1, 1)
    a = ce((s.zb / t)[:, 1:] / 2, s.y[:, 1:]) + ce((s.zb * s.c * t + s.b) / u, s.masked, reduction="sum")
    z = s.zb.mT / t.mT
    return a, (torch.cat([z, z.flip(2)], 2).contiguous() - 1).logsumexp(1), (s.zb / u).sum(-1)


def _temperature_over_a_mask(s: World) -> Any:
    z = (s.zb.masked_fill(s.c > 0.6, -50.0) + s.b) / (s.y + 1)[..., None]
    return ce(z, s.y, label_smoothing=0.1), z.max(-1)[0], z[..., 3:].softmax(-1).gather(-1, s.y[..., None] % 9)


def _row_shifts(s: World) -> Any:
    z, r = s.zb, s.x[..., :1].sin()
    up = z + r
    a = up.logsumexp(-1), up.gather(-1, s.y[..., None]), up.sum(-1), (up * 2).mean(-1), up.max(-1)[0]
    lp = (z - r[:, :1]).log_softmax(-1)
    p = up.softmax(-1)
    b = _rows(lp, s.y), lp.sum(-1), -(p * up.log_softmax(-1)).sum(-1), (p * up).sum(-1)
    return *a, *b, ce(up, s.masked), ce(up / 3, s.y, label_smoothing=0.1, weight=s.c), up.argmax(-1)


def _row_shifts_further(s: World) -> Any:
    """What is done to rows after the shift is done to the shift."""
    r = s.x[..., 0]
    z = (s.z.mT + r[:, None] - s.b[0]).masked_fill((s.c > 0.6)[:, None], float("-inf")) / r.detach().exp()[:, None]
    a = z[1:].transpose(0, 2)[..., None].logsumexp(1, keepdim=True)
    b = (2 * torch.tanh(s.z / 2) - r[..., None]) * 1.5 + 1
    return a, b.view(-1, VOCAB)[2:].logsumexp(-1), ((s.zb + r[0, :, None]) * r[:, :1, None]).roll(1, 0).sum(-1)


def _row_shifts_of_infinity(s: World) -> Any:
    z = s.z.detach() + torch.where(s.y % 3 == 0, float("-inf"), 0.0)[..., None].to(s.x.dtype)
    return z.logsumexp(-1), z.sum(-1), _rows(z.log_softmax(-1), s.y), ce(z[:, 1:], s.y[:, 1:], reduction="none")


def _less_their_largest(s: World) -> Any:
    z = s.zb
    shifted = z - z.max(-1, keepdim=True).values
    lp = shifted - shifted.logsumexp(-1, keepdim=True)
    return _rows(lp, s.y), ce(z - z.detach().amax(-1, keepdim=True), s.y), _rows(shifted, s.y)


def _largest_of_the_certain(s: World) -> Any:
    """Where one class is nearly certain, a log-probability is much less than the log-sum-exp that it is made with."""
    z = s.project(s.x * 16, s.w).to(torch.promote_types(s.x.dtype, torch.float32))
    lp, less = z.log_softmax(-1), z - z.max(-1, keepdim=True).values
    exps = less.exp()
    return lp.max(-1).values, exps.max(-1).values / exps.sum(-1) - 1, less.logsumexp(-1)


def _weight_first_then_rows(s: World) -> Any:
    z = (s.w.repeat(3, 1) @ s.x.flatten(0, 1).T).T
    rows = z.view(*s.y.shape, -1)
    return F.cross_entropy(rows.flatten(0, 1), s.y.flatten()), F.cross_entropy(z.unflatten(0, s.y.shape).mT, s.y)


def _shifted_in_place(s: World) -> Any:
    z = s.z
    z -= s.x[..., :1]
    return ce(z, s.y), z.logsumexp(-1)


def _log_sum_exp_mutated(s: World) -> Any:
    z = s.z.detach()
    lse = z.logsumexp(-1, keepdim=True)
    lse += 1
    return _rows(z - lse, s.y)


def _bias_of_the_program(s: World) -> Any:
    z = s.z / 2 + s.b
    return ce(z * 3, s.y) + ce(s.c + s.zb, s.y, reduction="sum"), (s.z - s.b.view(1, 1, -1)).logsumexp(-1)


def _selected_classes(s: World) -> Any:
    """A few candidates, in a list and in a tensor, one of them twice."""
    z, ids = s.zb, torch.tensor([4, 1, 4], device=s.y.device)
    a = F.cross_entropy(z[:, :, [3, 7, -1]].flatten(0, 1), s.y.flatten() % 3)
    return a, z[..., ids].logsumexp(-1), (z.mT / 2)[:, ids, 1:].softmax(1).gather(1, s.y[:, None, 1:] % 3)


def _vocabulary_mask(s: World) -> Any:
    mask = s.c > 0.6
    y = torch.where(mask[s.y], 0, s.y) + 0 * s.y
    a = ce(s.zb.masked_fill(mask, float("-inf")), y) + ce(torch.where(mask[None, None], -30.0, s.z * 2), s.y)
    b = torch.where(~mask, s.z, torch.tensor(-20.0, dtype=s.x.dtype)).logsumexp(-1)
    return a, b, (s.z + torch.zeros_like(s.c).masked_fill(mask, -50.0)).log_softmax(-1).gather(-1, s.y[..., None])


def _vocabulary_slice(s: World) -> Any:
    z = s.zb
    a = F.cross_entropy(z[..., :11].reshape(-1, 11), s.y.view(-1) % 11)
    b = F.cross_entropy(3 * torch.tanh(z[:, 1:, 2:13].float().to(s.x.dtype) / 3).mT, s.y[:, 1:] % 11)
    return a, b, z.narrow(-1, -5, 4).logsumexp(-1), (z[..., ::2] * s.c[::2]).logsumexp(-1)


def _loop_over_sequences(s: World) -> Any:
    losses = [F.cross_entropy(z[:-1], y[1:]) for z, y in zip(s.z, s.y, strict=True)]
    return torch.stack(losses).mean() + sum(F.cross_entropy(z, y) for z, y in zip(s.zb.unbind(0), s.y, strict=True))


def _split_rows(s: World) -> Any:
    parts = s.z.view(-1, VOCAB).split(4)
    labels = s.y.view(-1).split(4)
    first = sum(F.cross_entropy(z, y, reduction="sum") for z, y in zip(parts, labels, strict=True))
    a, b = s.z.split([2, 3], dim=1)
    c, d = s.z.chunk(2, dim=1)
    e, f = torch.tensor_split(s.zb, 2, dim=0)
    return (
        first,
        a.logsumexp(-1),
        ce(b, s.y[:, 2:]),
        d.logsumexp(-1),
        c.logsumexp(-1),
        (e - 1).logsumexp(-1) + f.sum(-1),
    )


def _recurrent(s: World) -> Any:
    """Hidden states of a function that writes to what it returns, before it does."""
    of_gates = s.b.repeat(3)[: 3 * HIDDEN].view(-1, 1).expand(-1, HIDDEN)
    hidden, heads = s.x[:, 0], []
    for t in range(TIME):
        hidden = torch.gru_cell(s.x[:, t], hidden, of_gates, of_gates.sin())
        heads.append(s.project(hidden, s.w))
    return F.cross_entropy(torch.stack(heads, 1).flatten(0, 1), s.y.flatten())


def _questions(s: World) -> Any:
    """That Dynamo leaves in the graph, with the answers in their place."""
    z = s.z
    told = z.is_meta, z.is_cpu, z.is_mps, z.is_leaf, z.itemsize, z.retains_grad, z.output_nr, z.dim_order()
    return ce(z, s.y) * (sum(told[:-1]) + len(told[-1]))


def _chunked_heads(s: World) -> Any:
    chunks = [F.linear(x, s.w) for x in s.x.split(2, dim=1)]
    alone = (chunk.logsumexp(-1) for chunk in chunks)
    return ce(torch.cat(chunks, dim=1), s.y) + torch.stack(chunks[:2]).logsumexp(-1).sum(), *alone


def _joined_rows(s: World) -> Any:
    z = s.z
    rows = torch.cat([z[:, :2], z[:, 3:]], 1)
    return ce(rows, torch.cat([s.y[:, :2], s.y[:, 3:]], 1)), torch.stack([z[0, 1:], z[1, :-1]]).log_softmax(-1).sum(-1)


def _selected_rows(s: World) -> Any:
    z, at = s.z, s.y[0] % TIME
    a = ce(z[:, at], s.y)
    b = z.index_select(1, at)[:, :2].logsumexp(-1)
    c = z[torch.arange(BATCH, device=at.device), at[:BATCH]].log_softmax(-1).gather(-1, s.y[:, :1])
    return a, b, c, torch.roll(z, 1, 1).flip(0).logsumexp(-1), z[:, -1:].expand(-1, 3, -1).logsumexp(-1)


def _entries_of_log_probs(s: World) -> Any:
    lp, flat = s.z.log_softmax(-1), s.z.view(-1, VOCAB).log_softmax(-1)
    rows = torch.arange(BATCH, device=s.y.device).unsqueeze(1)
    return lp[rows, s.y[:, :3] % TIME, s.y[:, :3] - VOCAB], flat[
        torch.arange(BATCH * TIME, device=s.y.device), s.y.view(-1)
    ]


def _entropies(s: World) -> Any:
    z = s.zb
    p, lp = z.softmax(-1), z.log_softmax(-1)
    a = z.logsumexp(-1) - (p * z).sum(-1)
    b = -(p * lp).sum(-1)
    c = -(lp.exp() * lp).sum(-1, keepdim=True)
    return a, b, c, _rows(lp, s.y)


def _entropy_as_a_metric(s: World) -> Any:
    z = s.z
    with torch.no_grad():
        entropy = z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)
    return ce(z, s.y), entropy


def _normalised_by_hand(s: World) -> Any:
    z = s.z
    lp = z - z.logsumexp(-1, keepdim=True)
    zb = s.zb
    other = zb - torch.logsumexp(zb, -1).unsqueeze(-1)
    return _rows(lp, s.y), -(lp.exp() * lp).sum(-1), _rows(zb - zb.logsumexp(-1)[..., None], s.y), other.sum(-1)


def _normalised_in_steps(s: World) -> Any:
    """Softmax and log-softmax as the textbook has them."""
    z = s.zb
    z = z - z.max(-1, keepdim=True).values
    e = z.exp()
    total = e.sum(-1, keepdim=True)
    lp = z - total.log()
    return _rows(lp, s.y), lp.sum(-1), _rows(e / total, s.y), (e * 2).max(-1).values, _rows(e, s.y), e.mean(-1)


def _exponentials(s: World) -> Any:
    return torch.log(torch.exp(s.z).sum(-1)), _rows(s.zb.exp(), s.y), -_rows(s.z, s.y) + s.z.exp().sum(2).log()


def _categorical(s: World) -> Any:
    d = torch.distributions.Categorical(logits=s.zb, validate_args=False)
    return d.log_prob(s.y), d.entropy()


def _categorical_of_a_mask(s: World) -> Any:
    """A class that has no probability adds nothing to the entropy."""
    mask = s.c > 0.6
    z = -2 * (s.z + s.b).masked_fill(mask, float("inf"))
    d = torch.distributions.Categorical(logits=z, validate_args=False)
    return d.log_prob(torch.where(mask[s.y], mask.long().argmin(), s.y)), d.entropy().mean()


def _categorical_of_a_mask_after_a_softcap(s: World) -> Any:
    capped, mask = 2 * torch.tanh(s.zb / 2), s.c > 0.6
    masked = (capped.masked_fill(mask, value) for value in (-1e4, float("-inf")))
    return tuple(torch.distributions.Categorical(logits=z, validate_args=False).entropy().mean() for z in masked)


def _teacher(s: World) -> torch.Tensor:
    with torch.no_grad():
        return s.project(s.x.cos(), s.w.sin())


def _distillation(s: World) -> Any:
    student, teacher = s.zb / 2, _teacher(s) / 2
    a = F.kl_div(F.log_softmax(student, -1), F.softmax(teacher, -1), reduction="batchmean") * 4
    student = s.z
    targets = torch.log_softmax(_teacher(s), -1)
    return a, F.kl_div(student.log_softmax(-1), targets, reduction="sum", log_target=True)


def _compared_with_what_is_kept(s: World) -> Any:
    student, teacher = s.z, s.project(s.x.sin(), s.w.cos())
    teacher = teacher / teacher.std(-1, keepdim=True)
    return F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="sum", log_target=True)


def _distillation_by_rows(s: World) -> Any:
    """Gradients of both; rows chosen after, as with masks over prompts."""
    student, teacher = s.zb.log_softmax(-1), s.project(s.x.sin(), s.w.cos(), s.b).log_softmax(-1)
    each = F.kl_div(student[:, :-1], teacher[:, :-1], reduction="none", log_target=True)
    return each.transpose(0, 1)[1:].sum(-1), F.kl_div(s.z.log_softmax(-1), s.project(s.x, s.w * 2).softmax(-1))


def _jensen_shannon(s: World, beta: float, device: Any) -> Any:
    """As TRL's GKDTrainer has it, but for the mask over prompts."""
    student, teacher = (s.zb / 0.7).log_softmax(-1), (_teacher(s) / 0.7).log_softmax(-1)
    b = torch.tensor(beta, dtype=student.dtype, device=device)
    mixture = torch.logsumexp(torch.stack([student + torch.log1p(-b), teacher + torch.log(b)]), dim=0)
    of_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
    of_student = F.kl_div(mixture, student, reduction="none", log_target=True)
    return b * of_teacher + (1 - b) * of_student


def _jensen_shannon_by_logaddexp(s: World) -> Any:
    """Of probabilities, the gradients of both; and each half with a reduction of its own, from one pass."""
    one, other = s.zb.log_softmax(-1), s.project(s.x.sin(), s.w.cos(), s.b).log_softmax(-1)
    m = torch.logaddexp(one - math.log(4), other + math.log(0.75))
    p, q = other.exp(), one.exp()
    return (
        F.kl_div(m, p, reduction="batchmean") * 0.75 + F.kl_div(m, q, reduction="batchmean") / 4,
        F.kl_div(m[:, 1:], other[:, 1:], log_target=True),
    )


def _jensen_shannon_of_probabilities(s: World) -> Any:
    p, q = _teacher(s).softmax(-1), s.z.softmax(-1)
    m = (0.5 * (p + q)).log()
    kls = sum(0.5 * F.kl_div(m, side, reduction="none") for side in (p, q))
    return kls.sum(-1).mean(), F.kl_div((0.1 * q + 0.9 * p).log(), q, reduction="sum")


def _skewed_divergence(s: World) -> Any:
    """As DistiLLM has them, and the cross entropy with such a mixture."""
    student, teacher = s.z.log_softmax(-1), s.project(s.x.cos(), s.w.sin()).log_softmax(-1)
    mixed = torch.logsumexp(torch.stack((teacher + math.log(0.1), student + math.log(0.9))), 0)
    again = torch.logaddexp(teacher.detach() + math.log(0.1), student + math.log(0.9))
    return F.kl_div(mixed, teacher, log_target=True), -(student.exp() * again).transpose(0, 1).sum(-1)


def _reverse_divergence(s: World) -> Any:
    """The student's probabilities are those by which terms are weighed."""
    student, teacher = s.zb.log_softmax(-1), _teacher(s).log_softmax(-1)
    return F.kl_div(teacher, student, reduction="none", log_target=True).sum(), F.kl_div(
        _teacher(s).log_softmax(-1), s.z.softmax(-1), reduction="batchmean"
    )


def _divergence_by_hand(s: World) -> Any:
    """As penalties of the distance to a reference model are written, either way around."""
    policy, reference = s.zb.log_softmax(-1), _teacher(s).log_softmax(-1)
    forward = (policy.exp() * (policy - reference)).sum(-1)
    other = s.project(s.x.sin(), s.w.cos()).log_softmax(-1)
    reverse = ((policy - other)[:, 1:] * 2 * other[:, 1:].exp()).sum(-1)
    return forward.mean(), reverse, torch.sum((other - policy) * other.exp(), -1).square()


def _divergence_by_detached_probabilities(s: World) -> Any:
    policy, reference = s.zb.log_softmax(-1), _teacher(s).log_softmax(-1)
    return (policy.detach().exp() * (policy - reference)).sum(-1)


def _divergence_by_hand_of_masked_classes(s: World) -> Any:
    """Not a number, as log-probabilities of -inf less such are."""
    masked = torch.arange(VOCAB, device=s.x.device) > 14
    policy, reference = (z.masked_fill(masked, -math.inf).log_softmax(-1) for z in (s.z, _teacher(s)))
    return (policy.exp() * (policy - reference)).sum(-1)


def _mixture_of_detached(s: World) -> Any:
    student, teacher = s.z.log_softmax(-1), _teacher(s).log_softmax(-1)
    mixture = torch.logaddexp(student.detach() + math.log(0.5), teacher + math.log(0.5))
    return F.kl_div(mixture, student, log_target=True)


def _stack_of_log_probs(s: World) -> Any:
    both = torch.stack([s.z.log_softmax(-1) - 1, _teacher(s).log_softmax(-1) - 1])
    return _rows(both[0], s.y), both[1].sum(-1), both.logsumexp(0, keepdim=True).sum(-1)


def _mixture_under_no_grad(s: World) -> Any:
    student, teacher = s.z.log_softmax(-1), _teacher(s).log_softmax(-1)
    with torch.no_grad():
        m = torch.stack([student - math.log(2), teacher - math.log(2)]).logsumexp(0)
    return F.kl_div(m, teacher, log_target=True), F.kl_div(m, student, log_target=True)


def _mixture_by_a_written_number(s: World) -> Any:
    """The number that the program made a tensor of is not the one that it weighs by."""
    share = torch.tensor(0.5, dtype=s.x.dtype)
    share.mul_(0.5)
    student, teacher = s.z.log_softmax(-1), _teacher(s).log_softmax(-1)
    m = torch.logaddexp(student + torch.log1p(-share), teacher + share.log())
    return F.kl_div(m, teacher, log_target=True)


def _mixture_by_a_parameter(s: World) -> Any:
    student, teacher, share = s.z.log_softmax(-1), _teacher(s).log_softmax(-1), s.b[0].sigmoid()
    m = torch.logaddexp(student + torch.log1p(-share), teacher + share.log())
    return F.kl_div(m, teacher, log_target=True)


def _halves_of_a_batch(s: World) -> Any:
    """R-Drop (Liang et al. 2021, arXiv:2106.14448), and a Jensen-Shannon divergence of them."""
    z = s.zb
    p, q = (half.log_softmax(-1) for half in z.view(-1, VOCAB)[:8].chunk(2))
    both = F.kl_div(p, q, log_target=True, reduction="sum") + F.kl_div(q, p, log_target=True, reduction="sum")
    mean = (p[:3].exp() + q[:3].exp()) / 2
    return ce(z, s.y) + both, F.kl_div(mean.log(), q[:3].exp(), reduction="none").sum(-1)


def _parts_of_mixtures(s: World) -> Any:
    """A Jensen-Shannon divergence by hand, and skewed ones as DistiLLM has them (Ko et al. 2024, arXiv:2402.03898)."""
    p, q = s.z.softmax(-1), _teacher(s).softmax(-1)
    m, skewed = (0.5 * (p + q)).log(), (0.1 * q + 0.9 * p).log()
    a = 0.5 * (p * (p.log() - m)).sum(-1) + 0.5 * (q * (q.log() - m)).sum(-1)
    b = -(q * skewed).sum(-1), (p * skewed).sum(-1), (q * (q.log() - skewed)).mean(-1)
    z = s.zb
    first, second = (part.log_softmax(-1) for part in (z[:, 1:] / 2, z[:, :-1].detach()))
    both = torch.logaddexp(first + math.log(0.3), second + math.log(0.7))
    return a, *b, (second.exp() * (both - second)).sum(), (first.exp() * (both - first)).sum(-1)


def _distillation_of_finite_logits(s: World) -> Any:
    """Divergences as MiniLLM and DistiLLM have them (Gu et al. 2024, arXiv:2306.08543; Ko et al. 2024,
    arXiv:2402.03898), with what their code puts in the place of terms with infinite logits."""
    student, teacher = s.zb, _teacher(s)
    p, q = F.softmax(teacher, dim=-1), F.softmax(student, dim=-1)
    log_p, log_q = F.log_softmax(teacher, dim=-1), F.log_softmax(student, dim=-1)
    of_student, infinite = torch.isinf(student), torch.isinf(student) | torch.isinf(teacher)
    forward = torch.masked_fill(p * log_q, of_student, 0).sum(-1)
    terms = torch.masked_fill(q * log_p, infinite, 0)
    terms -= torch.masked_fill(q * log_q, infinite, 0)
    of_q, of_p = (0.1 * p + 0.9 * q).log(), torch.log(0.9 * p + 0.1 * q)
    skewed = (q * of_q).masked_fill(infinite, 0)
    skewed -= (q * log_q).masked_fill(infinite, 0)
    other = (p * of_p).masked_fill(infinite, 0.0)
    other = other - (p * log_p).masked_fill(torch.logical_or(teacher.isinf(), student.isinf()), 0.0)
    alone = torch.masked_fill(p * of_p, infinite, 0).sum(-1)
    return -forward, -terms.sum(-1), -skewed.sum(-1).mean(), (2 * other).sum(dim=-1), alone


def _finite_logits_of_masked_classes(s: World) -> Any:
    """Where classes are ruled out, by either or by both, only what is finite is left."""
    student, teacher = s.z.masked_fill(s.c > 0.7, -math.inf), _teacher(s).masked_fill(s.c < 0.2, -math.inf)
    p, log_q = teacher.softmax(-1), student.log_softmax(-1)
    a = (p * log_q).masked_fill(student.isinf(), 0).sum(-1)
    return a, F.kl_div(log_q, p, reduction="none").masked_fill(student.isinf() | teacher.isinf(), 0).mean(-1)


def _entropies_and_cross_entropies(s: World) -> Any:
    """Sums of p log p and of p log q, added up entry by entry."""
    student, teacher = s.zb, _teacher(s)
    p, q, log_q = teacher.softmax(-1), student.softmax(-1), student.log_softmax(-1)
    a = (p * p.log() - p * log_q).sum(-1), (q * teacher.log_softmax(-1) + -(q * log_q)).mean()
    return *a, (3 * q * log_q - 2 * (q * p.log())).sum()


def _its_own_teacher(s: World) -> Any:
    z, zb = s.z, s.zb
    a = F.kl_div((z / 2).log_softmax(-1), z.detach().softmax(-1), reduction="batchmean")
    b = F.kl_div(z.log_softmax(-1), (z / 3).softmax(-1), reduction="none").sum(-1)
    c = -(z.detach().softmax(-1) * z.log_softmax(-1)).sum(-1), F.cross_entropy(z.mT, (z.mT / 0.5).softmax(1))
    d = (zb.softmax(-1) * (zb.log_softmax(-1) - zb.flip(0).log_softmax(-1))).sum(-1)
    with torch.no_grad():
        e = F.kl_div(z[1:].log_softmax(-1), z[:-1].softmax(-1), reduction="sum")
    return a, b, *c, d, e, F.kl_div(z.log_softmax(-1), z.softmax(-1), reduction="mean")


def _probabilities_of_a_teacher(s: World) -> Any:
    p = _teacher(s).softmax(-1)
    a = F.cross_entropy(s.zb.view(-1, VOCAB), p.view(-1, VOCAB))
    b = -(_teacher(s).softmax(-1) * s.zb.log_softmax(-1)).sum(-1)
    return a, b, F.cross_entropy(s.z.mT, F.softmax(_teacher(s), -1).mT, reduction="none")


def _all_log_probs_written(s: World) -> Any:
    lp = s.z.log_softmax(-1)
    lp = lp.masked_fill(s.x[..., :1] > s.c, -5.0)
    other = s.zb.detach().softmax(-1)
    other[0] *= 2
    return lp, other


def _parts_of_the_vocabulary(s: World) -> Any:
    a, b = s.zb.split([6, VOCAB - 6], -1)
    c, d = s.z.chunk(2, dim=2)
    e = s.zb.mT.tensor_split((4, 9), 1)
    losses = F.cross_entropy(a.mT, s.y % 6) + F.cross_entropy(b.mT, s.y % 8)
    return losses, c.logsumexp(-1) - d.logsumexp(-1), *(part.logsumexp(1) for part in e)


def _masked_after_a_softcap(s: World) -> Any:
    """By every form of mask, over biases of which one entry is -inf itself, and with more done to the logits after."""
    mask = s.c > 0.6
    mask[:2] = False
    y = s.y % 2
    z = 2 * torch.tanh(s.z / 2)
    below = 3 * torch.sigmoid(-s.z + s.b.masked_fill(s.c < 0.1, -math.inf))
    capped = (2 * torch.tanh(s.zb / -2)).masked_fill(mask, -math.inf)
    capped = capped.masked_fill(s.c > 0.9, -math.inf) / 0.7
    assigned = torch.tanh(s.zb) * 1
    assigned[..., 3:5] = -4.0
    return (
        ce(torch.where(mask, -1e4, z), s.y),
        F.cross_entropy(below.masked_fill(mask, -5.0)[..., 1:].mT, y),
        ce(capped, y),
        (assigned * 2).mean(-1),
    )


def _log_probs_written_behind_autograd(s: World) -> Any:
    """Of which eager makes its gradient."""
    lp = s.z.log_softmax(-1)
    lp.data.mul_(2)
    return _rows(lp, s.y)


def _least_number_after_a_scale(s: World) -> Any:
    """Which would be infinite before it."""
    mask, least = s.c > 0.6, torch.finfo(s.x.dtype).min
    mask[:3], mask[3:6] = False, True
    b = s.z * 0.7
    b[..., 3:5] = least
    c = torch.where(mask, least, s.z * 1.3) / 1.1
    return ce((s.z / 2).masked_fill(mask, least), s.y % 3), _rows(b.log_softmax(-1), s.y % 3), c.logsumexp(-1)


def _entropy_of_least_numbers(s: World) -> Any:
    """Each times its probability of 0, and then by what would make it infinite."""
    z = (s.z / 0.7).masked_fill(s.c > 0.6, torch.finfo(s.x.dtype).min)
    return -(z.softmax(-1) * z.log_softmax(-1)).sum(-1) / 2, ce(z, s.y * 0 + s.c.argmin())


def _rows_without_a_batch(s: World) -> Any:
    """The mean of one that is ignored is NaN on a CPU, and 0 on CUDA."""
    losses = [F.cross_entropy(z, y) for z, y in zip(s.z[0], s.masked[0], strict=True)]
    return losses[-1], sum(losses)


def _rows_at(s: World) -> Any:
    at = s.y[:, :3] % TIME
    labels = s.y.gather(1, at)
    picked = s.zb.gather(1, at[..., None].expand(-1, -1, VOCAB))
    taken = s.z.log_softmax(-1).take_along_dim(at[..., None] - TIME, 1)
    classes_first = s.z.mT.gather(2, at[:, None].expand(-1, VOCAB, -1))
    return ce(picked, labels), _rows(taken, labels), classes_first.logsumexp(1), ce(s.z[:, [0, -1]], labels[:, 1:])


def _repeated_rows(s: World) -> Any:
    more = s.z[0].repeat(2, 3, 1) / 2
    each = torch.repeat_interleave(s.zb, 2, dim=1)
    return (
        more.logsumexp(-1),
        ce(each, s.y.repeat_interleave(2, 1)),
        s.z.repeat_interleave(3, 0).log_softmax(-1).sum(-1),
    )


def _smoothed_by_scatter(s: World) -> Any:
    """As tutorials and many repositories have it."""
    log_probs = s.zb.flatten(0, 1).log_softmax(-1)
    y = s.y.flatten()[:, None]
    with torch.no_grad():
        targets = torch.zeros_like(log_probs)
        targets.fill_(0.1 / (VOCAB - 1))
        targets.scatter_(1, y, 0.9)
    once = torch.full_like(log_probs, 0.2 / (VOCAB - 1)).scatter(1, y, 1 - 0.2)
    hot = torch.zeros(BATCH * TIME, VOCAB, dtype=s.x.dtype, device=s.x.device).scatter_(-1, index=y, value=1)
    hot *= 2
    return (
        torch.mean(torch.sum(-targets * log_probs, dim=-1)),
        -(once * log_probs).sum(1),
        (s.z.flatten(0, 1) * hot).sum(-1),
    )


def _smoothed_by_one_hot(s: World) -> Any:
    z = s.z
    hot = F.one_hot(s.y, VOCAB).float().to(z.dtype)
    smooth = hot * (1 - 0.1) + (1 - hot) * 0.1 / (VOCAB - 1)
    by_ones = torch.zeros_like(z).scatter_(2, s.y[..., None], torch.ones_like(s.y[..., None], dtype=z.dtype))
    cold = torch.ones_like(z).scatter_(2, s.y[..., None], torch.empty_like(z[..., :1]).fill_(-1.0))
    eighth = F.one_hot(s.y, VOCAB) / 8 + torch.tensor(0.5, dtype=z.dtype, device=z.device)
    return (
        -(smooth * z.log_softmax(-1)).sum(-1).mean(),
        (z * eighth)[:, 1:].mean(-1, keepdim=True),
        (by_ones.sub_(0.25) * z).sum(),
        (z * cold).sum(-1),
        (z * (2 / (1 + hot))).sum(-1) + (z * hot.mul(3).add(1).reciprocal()).sum(-1),
    )


def _smoothed_divergence(s: World) -> Any:
    log_probs = s.zb.log_softmax(-1)
    targets = torch.full_like(log_probs, 0.1 / (VOCAB - 1)).scatter_(-1, s.y.unsqueeze(-1), 0.9)
    hot = F.one_hot(s.y, VOCAB).to(s.x.dtype)
    return (
        F.kl_div(log_probs, targets, reduction="sum"),
        F.kl_div(log_probs * 0.5, targets),
        F.kl_div(s.z.log_softmax(-1), hot, reduction="batchmean"),
        torch.nn.KLDivLoss(reduction="batchmean")(s.z[0].log_softmax(-1), hot[0] * 0.8 + 0.2 / VOCAB),
        F.kl_div(s.zb[0, 0].log_softmax(-1), F.one_hot(s.y[0, 0], VOCAB) * 0.5 + 0.1, reduction="batchmean"),
    )


def _smoothed_over_no_rows(s: World) -> Any:
    """Of no rows means are NaN."""
    z, hot = s.z[:, :0].reshape(-1, VOCAB), F.one_hot(s.y[:, :0].reshape(-1), VOCAB).to(s.x.dtype)
    log_probs = z.log_softmax(-1)
    return (
        F.cross_entropy(z, hot),
        F.kl_div(log_probs, hot),
        F.kl_div(log_probs, hot, reduction="batchmean"),
        F.kl_div(s.z[:, :0].log_softmax(-1), F.one_hot(s.y[:, :0], VOCAB).to(s.x.dtype), reduction="batchmean"),
    )


def _targets_of_masked_classes(s: World) -> Any:
    """Eager multiplies -inf by zero, and by positive numbers."""
    z = s.zb.masked_fill(s.c > 0.7, -math.inf)
    hot = F.one_hot(s.y, VOCAB).to(z.dtype)
    log_probs = z.log_softmax(-1)
    return (hot * log_probs).sum(-1), (log_probs * (0.3 - 0.2 * hot)).sum(-1), (log_probs * (hot + 0.1)).sum(-1)


def _targets_in_other_dtypes(s: World) -> Any:
    """``float32(0.7) - 0.7`` is 0, and so is what is not 0 but cut off."""
    log_probs = s.z.log_softmax(-1)
    none, cut = F.one_hot(s.y, VOCAB) * 0.7 - 0.7, torch.clone(input=F.one_hot(s.y, VOCAB) * 1.9).long()
    return (none.bool() * log_probs).sum(-1), (cut * log_probs).sum(-1), (none.half() * log_probs).sum(-1)


def _smoothed_targets_of_cross_entropy(s: World) -> Any:
    z, hot = s.zb.view(-1, VOCAB), F.one_hot(s.y.view(-1), VOCAB).to(s.x.dtype)
    return (
        F.cross_entropy(z, hot * 0.9 + 0.1 / VOCAB),
        F.cross_entropy(z, hot, label_smoothing=0.2, reduction="sum"),
        F.cross_entropy(s.z.view(-1, VOCAB), hot + 0.25, reduction="none"),
    )


def _targets_written_on(s: World) -> Any:
    """Targets that are written to between their readers, and through a view, of which nothing is known then."""
    log_probs, y = s.z.detach().log_softmax(-1), s.y[..., None]
    targets = torch.zeros_like(log_probs).scatter_(2, y, 1.0)
    before = (log_probs * targets).sum(-1)
    targets.mul_(3)
    after = (log_probs * targets).sum(-1)
    targets[:, 1:].zero_()
    viewed = (log_probs * targets).sum(-1)
    return before, after, viewed, targets


def _targets_of_some_rows(s: World) -> Any:
    """An index with fewer rows than there are, and one whose classes are written to afterwards."""
    log_probs = s.z.log_softmax(-1)
    some = torch.zeros_like(log_probs).scatter_(2, s.y[:, :3, None], 1.0)
    y = s.y[..., None] * 1
    written = torch.zeros_like(log_probs).scatter_(2, y, 1.0)
    y.zero_()
    return (some * log_probs).sum(-1), (written * log_probs).sum(-1)


def _largest(s: World) -> Any:
    z = s.zb
    values, classes = z.max(-1)
    confidence = z.softmax(-1).max(-1, keepdim=True).values
    best = z.log_softmax(-1).topk(1, dim=-1)
    return values, classes, confidence, best[0], best.indices, z.detach().amax(-1)


def _several_of_the_largest(s: World) -> Any:
    z = s.zb
    values, classes = z.topk(3)
    lowest = torch.topk(z / s.x[..., :1].exp(), 2, largest=False)
    p = (2 * z.mT.softmax(1)).topk(4, dim=1, sorted=True).values
    lp = z[:, 1:].log_softmax(-1).topk(3)
    return values, classes, lowest.values, lowest[1], p, *lp, (z - s.x[..., :1]).topk(2)[0], z[0, 0].topk(2, 0)[0]


def _hits_among_the_largest(s: World) -> Any:
    z = s.z
    with torch.no_grad():
        hits = (z.topk(5).indices == s.y[..., None]).any(-1)
        capped = torch.tanh(z.flatten(0, 1)).topk(VOCAB)
        lowest = z.topk(1, largest=False)
    return ce(z, s.y), hits, capped.values, capped.indices, lowest.values, lowest.indices


def _accuracy_beside(s: World) -> Any:
    z = s.z
    with torch.no_grad():
        hits = (z.argmax(-1) == s.y).float().mean()
    return ce(z, s.y), z.argmax(-1), hits


FUSED: dict[str, Callable[[World], Any]] = {
    # heads
    "linear": lambda s: ce(s.z, s.y),
    "linear_bias": lambda s: ce(s.zb, s.y),
    "matmul_t": lambda s: ce(s.x @ s.w.t(), s.y),
    "matmul_T": lambda s: ce(s.x @ s.w.T, s.y),
    "torch_matmul_transpose": lambda s: ce(torch.matmul(s.x, s.w.transpose(0, 1)), s.y),
    "mm": lambda s: ce(torch.mm(s.x.reshape(-1, HIDDEN), s.w.t()), s.y),
    "addmm": lambda s: ce(torch.addmm(s.b, s.x.reshape(-1, HIDDEN), s.w.t()), s.y),
    "contiguous_transposed_weight": lambda s: ce(s.x @ s.w.t().contiguous(), s.y),
    "frozen_weight": lambda s: ce(F.linear(s.x, s.w.detach()), s.y),
    "frozen_input": lambda s: ce(F.linear(s.x.detach(), s.w, s.b), s.y),
    "learned_with_a_frozen_head": _learned_with_a_frozen_head,
    "learned_over_what_was_cut_off": _calibrated_beside_a_detached_head,
    "learned_over_detached_logits": lambda s: ce(s.z.detach() + s.b, s.y),
    "learned_rows_over_detached_rows": _learned_rows_over_detached_rows,
    "fixed_temperature_expanded_to_classes": lambda s: ce(s.zb / s.b[:1].detach().expand(BATCH, TIME, VOCAB), s.y),
    "entropy_of_least_numbers": _entropy_of_least_numbers,
    "rows_without_a_batch": _rows_without_a_batch,
    "least_number_after_a_scale": _least_number_after_a_scale,
    "normaliser_under_no_grad": _normaliser_under_no_grad,
    "shifted_rows_of_frozen_hidden_states": _shifted_rows_of_frozen_hidden_states,
    "largest_under_no_grad": _largest_under_no_grad,
    "learned_rows_of_a_frozen_head": lambda s: _rows((_frozen(s) * s.b[:TIME, None].exp()).log_softmax(-1), s.y),
    "learned_class_scale_of_a_frozen_head": lambda s: ce(3 * torch.tanh(_frozen(s) * s.b.exp() / 3), s.y),
    "frozen_head_masked_then_learned": lambda s: ce(_frozen(s).masked_fill(s.b.detach() > 1, -1e4) - s.b, s.y),
    "tied": _tied,
    "two_heads": _two_heads,
    "same_head_twice": _same_head_twice,
    "one_row": lambda s: F.cross_entropy(F.linear(s.x[0, 0], s.w), s.y[0, 0]),
    "einsum": lambda s: ce(torch.einsum("btd,vd->btv", s.x, s.w), s.y),
    "einsum_weight_first": lambda s: ce(torch.einsum("dv, btd -> btv", s.w.t(), s.x), s.y),
    "einsum_in_short": _einsum_in_short,
    "tensordot": _tensordot,
    "one_axis_with_the_weight_first": _one_axis_with_the_weight_first,
    "weight_made_again_for_each_chunk": _weight_made_again_for_each_chunk,
    "weight_first": _weight_first,
    "einsum_classes_not_last": _einsum_classes_not_last,
    "computed_weight": lambda s: ce(
        F.linear(F.normalize(s.x, dim=-1), F.normalize(s.w + s.b[:, None] * 0.1, dim=-1)), s.y
    ),
    "chunked_heads": _chunked_heads,
    # between head and reader
    "joined_rows": _joined_rows,
    "loop_over_sequences": _loop_over_sequences,
    "split_rows": _split_rows,
    "selected_rows": _selected_rows,
    "squeeze_all": lambda s: F.cross_entropy(s.z[:1, :, None].squeeze(), s.y[0]),
    "vocabulary_slice": _vocabulary_slice,
    "vocabulary_mask": _vocabulary_mask,
    "selected_classes": _selected_classes,
    "assigned_classes": _assigned_classes,
    "assigned_one_by_one": _assigned_one_by_one,
    "parts_of_the_vocabulary": _parts_of_the_vocabulary,
    "masked_after_a_softcap": _masked_after_a_softcap,
    "rows_at": _rows_at,
    "repeated_rows": _repeated_rows,
    "one_index_for_rows_and_classes": lambda s: (lambda z, i: z.logsumexp(-1)[i] - z[i, i])(
        s.zb.flatten(0, 1), torch.arange(7, device=s.x.device)
    ),
    "classes_of_some_rows": lambda s: (
        s.z[:, -1, [3, 7]].logsumexp(-1),
        F.cross_entropy(s.zb[0, :, torch.arange(4, device=s.y.device)], s.y[0] % 4),
        s.z[None, 1:, 2, [5, 6, 7]].logsumexp(-1),
    ),
    "new_axis_behind_the_classes": lambda s: (
        s.z[0][[0, 1], :, None].logsumexp(1),
        s.zb[s.y[:, 0] % 2, :, :, None].sum(2),
        s.z[[1, 0], None, :3].log_softmax(-1)[..., None].mean(3),
    ),
    "less_logits": _less_logits,
    "bias_of_the_program": _bias_of_the_program,
    "temperatures": _temperatures,
    "temperature_of_each_row": _temperature_of_each_row,
    "questions": _questions,
    "best_class_of_one_row": lambda s: (s.z[0, -1].argmax(), s.zb[1, 2].argmax(keepdim=True), s.z[0, 0].max(0).indices),
    "temperatures_over_biases": _temperatures_over_biases,
    "temperature_over_a_mask": _temperature_over_a_mask,
    "row_shifts": _row_shifts,
    "row_shifts_further": _row_shifts_further,
    "row_shifts_of_infinity": _row_shifts_of_infinity,
    "less_their_largest": _less_their_largest,
    "largest_of_the_certain": _largest_of_the_certain,
    "unflattened": lambda s: (
        ce(s.z.flatten(0, 1).unflatten(0, s.y.shape), s.y),
        torch.unflatten(s.zb.mT, 0, (-1, 1)).logsumexp(2),
        s.z.movedim(-1, 0).unflatten(-1, (1, TIME)).log_softmax(0).gather(0, s.y[None, :, None])[0],
    ),
    "weight_first_then_rows": _weight_first_then_rows,
    "shifted_in_place": _shifted_in_place,
    "temperatures_in_class_dim_1": lambda s: (s.z.mT / s.x[..., 0].exp()[:, None]).logsumexp(1),
    "slice_and_bias_in_class_dim_1": lambda s: (s.z.mT[:, 2:9] * 2 + s.b[2:9, None]).logsumexp(1),
    "stacked_behind_the_classes": lambda s: (lambda z: torch.stack([z, z[:, :]], -1).logsumexp(2))(s.z),
    "in_place": _in_place,
    "in_place_by_tensors": _in_place_by_tensors,
    "clamped": lambda s: ce(s.z.clamp(min=-1, max=1.5), s.y) + ce(torch.clamp_min(s.z, 0.1).clamp_max(2), s.y),
    "rectified": lambda s: ce(torch.relu(s.z) * 2, s.y) + ce(F.relu(s.z), s.y),
    "softsign": lambda s: ce(3 * F.softsign(s.z), s.y) + ce(F.logsigmoid(s.z), s.y),
    "float": lambda s: ce(s.z.to(s.x.dtype), s.y),
    "view": lambda s: F.cross_entropy(s.z.view(-1, VOCAB), s.y.view(-1)),
    "view_inferred_vocab": lambda s: F.cross_entropy(s.z.view(BATCH * TIME, -1), s.y.view(-1)),
    "torch_reshape": lambda s: F.cross_entropy(torch.reshape(s.z, (-1, VOCAB)), s.y.view(-1)),
    "flatten": lambda s: F.cross_entropy(s.z.flatten(0, 1), s.y.flatten()),
    "flatten_end_dim": lambda s: F.cross_entropy(torch.flatten(s.z, end_dim=-2), s.y.flatten()),
    "contiguous_clone": lambda s: ce(s.z[:, 1:].contiguous().clone(), s.y[:, 1:]),
    "shift": lambda s: ce(s.z[..., :-1, :], s.y[..., 1:]),
    "last_rows": lambda s: ce(s.z[:, -2:], s.y[:, -2:]),
    "strided_rows": lambda s: ce(s.z[:, ::2], s.y[:, ::2]),
    "leading_index": lambda s: F.cross_entropy(s.z[0], s.y[0]),
    "last_token": lambda s: F.cross_entropy(s.z[:, -1], s.y[:, -1]),
    "new_axis": lambda s: F.cross_entropy(s.z[None, 0, :, :].squeeze(0), s.y[0]),
    "transpose": lambda s: F.cross_entropy(s.z.transpose(1, 2), s.y),
    "transpose_back": lambda s: ce(s.z.transpose(1, 2).transpose(-1, -2), s.y),
    "permute": lambda s: F.cross_entropy(s.z.permute(0, 2, 1), s.y),
    "permute_rows": lambda s: ce(s.z.permute((1, 0, 2)), s.y.t()),
    "torch_permute": lambda s: F.cross_entropy(torch.permute(s.z, (0, 2, 1)), s.y),
    "movedim": lambda s: F.cross_entropy(s.z.movedim(-1, 1), s.y),
    "mT": lambda s: F.cross_entropy(s.z.mT, s.y),
    "T": lambda s: F.cross_entropy(s.z[0].T.T, s.y[0]),
    "t": lambda s: F.cross_entropy(s.z[1].t().t(), s.y[1]),
    "unsqueeze": lambda s: F.cross_entropy(s.z.transpose(1, 2).unsqueeze(-1), s.y.unsqueeze(-1)),
    "squeeze": lambda s: ce(s.z.unsqueeze(1).squeeze(1), s.y),
    "slice_in_class_dim_1": lambda s: F.cross_entropy(s.z.transpose(1, 2)[:, :, 1:], s.y[:, 1:]),
    "flatten_rows_in_class_dim_1": lambda s: F.cross_entropy(
        s.z.transpose(1, 2).unsqueeze(-1).flatten(2, 3), s.y, reduction="none"
    ),
    "select": lambda s: F.cross_entropy(s.z.select(1, 2), s.y[:, 2]),
    "narrow": lambda s: ce(s.z.narrow(1, 1, 3), s.y[:, 1:4]),
    "divide": lambda s: ce(s.z / 2.5, s.y),
    "multiply": lambda s: ce(0.5 * s.z * 3, s.y),
    "torch_div": lambda s: ce(torch.div(s.z, 2), s.y),
    "negate": lambda s: ce(-s.z, s.y),
    "add": lambda s: ce(1 + s.z - 0.5, s.y) + torch.add(s.z, 2).logsumexp(-1).sum(),
    "softcap": lambda s: ce(torch.tanh(s.zb / 1.5) * 1.5, s.masked),
    "softcap_rows": lambda s: ce((s.z[:, 1:] / 2).tanh().float().to(s.x.dtype) * 2, s.y[:, 1:], reduction="none"),
    "softcap_smooth": lambda s: ce(3 * torch.tanh(s.z / 3), s.masked, label_smoothing=0.2, weight=s.c),
    "softcap_temperature": lambda s: _rows((3 * torch.tanh(s.zb / 3) / 0.7).log_softmax(-1), s.y),
    "softcap_scores": lambda s: _two_readers(3 * torch.tanh(s.z / 3), s.y),
    "sigmoid_cap": lambda s: ce(2.3 * torch.sigmoid((s.z + 0.5) / 0.75), s.y),
    "detach": lambda s: ce(s.z.detach(), s.y) + ce(s.z, s.y),
    "detached_scores": _detached_scores,
    # readers
    "sum": lambda s: ce(s.zb, s.masked, reduction="sum"),
    "none": lambda s: ce(s.zb, s.masked, reduction="none"),
    "none_class_dim_1": lambda s: F.cross_entropy(s.z.transpose(1, 2), s.masked, reduction="none"),
    "masked": lambda s: ce(s.zb, s.masked),
    "ignore_index": lambda s: ce(s.z, s.y, ignore_index=3),
    "ignore_index_1": lambda s: ce(s.z, torch.where(s.masked < 0, -1, s.masked), ignore_index=-1),
    "new_of_their_kind": lambda s: (
        lambda z: (
            z.new_zeros(()) + ce(z.float(), s.y) * z.new_ones(1, 2).sum(),
            z.new_full((2, 3), 0.5),
            z.new_empty(0),
        )
    )(s.z),
    "new_of_another_kind": lambda s: (
        lambda z: (
            ce(z, s.y)
            + z.new_zeros([2], dtype=torch.int64).sum()
            + z.new_empty(z.shape[:2], device=z.device).fill_(2.0).sum()
        )
    )(s.z),
    "all_ignored_mean": lambda s: ce(s.z, torch.full_like(s.y, -100)),
    "all_ignored_sum": lambda s: ce(s.z, torch.full_like(s.y, -100), reduction="sum"),
    "all_ignored_smooth": lambda s: ce(s.z, torch.full_like(s.y, -100), label_smoothing=0.1),
    "class_weight": lambda s: ce(s.z, s.masked, weight=s.c),
    "class_weight_none": lambda s: ce(s.z, s.masked, weight=s.c, reduction="none"),
    "label_smoothing": lambda s: ce(s.z, s.masked, label_smoothing=0.2),
    "label_smoothing_only": lambda s: ce(s.z, s.y, label_smoothing=1.0),
    "label_smoothing_none": lambda s: ce(s.z / 2, s.masked, label_smoothing=0.2, reduction="none"),
    "label_smoothing_weight": lambda s: ce(s.z, s.masked, label_smoothing=0.2, weight=s.c),
    "label_smoothing_weight_sum": lambda s: ce(s.zb, s.masked, label_smoothing=0.2, weight=s.c, reduction="sum"),
    "module_loss": _module_loss,
    "log_softmax_cross_entropy": lambda s: (
        ce(s.z.log_softmax(-1), s.masked, label_smoothing=0.2, weight=s.c)
        + ce(s.zb - s.zb.logsumexp(-1, keepdim=True), s.y)
    ),
    "log_softmax_nll": lambda s: F.nll_loss(F.log_softmax(s.z.flatten(0, 1), -1), s.masked.flatten()),
    "log_softmax_nll_class_dim_1": lambda s: F.nll_loss(
        torch.log_softmax(s.z, -1).transpose(1, 2), s.masked, weight=s.c, reduction="sum"
    ),
    "log_softmax_gather": lambda s: _rows(s.z.log_softmax(-1), s.y),
    "log_softmax_module": lambda s: _rows(torch.nn.LogSoftmax(dim=-1)(s.z), s.y),
    "log_softmax_take_along_dim": lambda s: torch.take_along_dim(s.z.log_softmax(2), s.y[..., None], -1),
    "log_softmax_sliced_after": lambda s: _rows(s.z.log_softmax(-1)[:, :-1], s.y[:, 1:]),
    "gather_columns": lambda s: s.z.log_softmax(-1).gather(-1, torch.stack([s.y, s.y * 0, s.y], -1)),
    "gather_in_class_dim_1": lambda s: s.z.mT.log_softmax(1).gather(1, s.y[:, None, :].expand(-1, 2, -1)),
    "gather_logits": lambda s: torch.gather(s.z, 2, s.y.unsqueeze(2)),
    "logsumexp": lambda s: torch.logsumexp(s.z, -1),
    "logsumexp_keepdim": lambda s: s.zb.logsumexp(dim=2, keepdim=True),
    "logsumexp_class_dim_1": lambda s: s.z.transpose(1, 2).logsumexp(1, keepdim=True),
    "logsumexp_minus_gather": lambda s: s.z.logsumexp(-1) - s.z.gather(-1, s.y[..., None])[..., 0],
    "sum_of_logits": lambda s: (s.zb.sum(-1), s.z[:, 1:].sum((-1,), keepdim=True)),
    "mean_of_logits": lambda s: (2 * torch.tanh(s.zb / 2)).mean(dim=-1) + torch.mean(s.z / 3, -1),
    "sum_of_log_probs": lambda s: s.zb.log_softmax(-1).sum(-1, keepdim=True),
    "mean_of_log_probs": lambda s: torch.mean(3 * s.z.mT.log_softmax(1), 1),
    "scaled_log_probs": lambda s: _rows(s.z.log_softmax(-1) * 2 / -0.5, s.y),
    "negative_log_probs_nll": lambda s: F.nll_loss(-F.log_softmax(s.z.flatten(0, 1), -1), s.masked.flatten()),
    "label_smoothing_by_hand": _smoothed_by_hand,
    "olmo_z_loss": _olmo_z_loss,
    "scales_apart": _scales_apart,
    "loss_and_scores": lambda s: (ce(s.z, s.y), _rows(s.z.log_softmax(-1), s.y)),
    "take_along_dim_from_the_end": lambda s: s.z.log_softmax(-1).take_along_dim(s.y[..., None] - 3 * VOCAB, -1),
    "entries_of_log_probs": _entries_of_log_probs,
    "probabilities_gather_log": lambda s: (
        torch.log(_rows(torch.softmax(s.z, -1), s.y)) + _rows(s.z.softmax(-1).log(), s.y)
    ),
    "entropies": _entropies,
    "entropy_as_a_metric": _entropy_as_a_metric,
    "mean_of_one_class": lambda s: -s.z[..., -1:].mean(),
    "metrics_of_all": lambda s: (lambda z: (z.mean(), z.detach().sum(), (z.softmax(-1) * z).sum(), ce(z, s.y)))(s.zb),
    "largest": _largest,
    "largest_of_all": lambda s: (lambda z: (ce(z, s.y), z.detach().max(), z.detach().log_softmax(-1).amax()))(s.zb),
    "several_of_the_largest": _several_of_the_largest,
    "hits_among_the_largest": _hits_among_the_largest,
    "accuracy_beside": _accuracy_beside,
    "normalised_twice": lambda s: (
        _rows(s.z.log_softmax(-1).log_softmax(-1), s.y) + _rows(s.z.log_softmax(-1).softmax(-1), s.y)
    ),
    "normalised_by_hand": _normalised_by_hand,
    "normalised_in_steps": _normalised_in_steps,
    "exponentials": _exponentials,
    "categorical": _categorical,
    "categorical_of_a_mask": _categorical_of_a_mask,
    "categorical_of_a_mask_after_a_softcap": _categorical_of_a_mask_after_a_softcap,
    # two heads
    "distillation": _distillation,
    "distillation_by_rows": _distillation_by_rows,
    "distillation_in_class_dim_0": lambda s: F.kl_div(
        s.z[0].t().log_softmax(0), _teacher(s)[0].t().softmax(0), reduction="batchmean"
    ),
    "distillation_of_all": lambda s: F.kl_div(
        s.z.mT.log_softmax(1), _teacher(s).mT.softmax(1), reduction="none"
    ).mean(),
    "distillation_of_one_row": lambda s: F.kl_div(
        s.zb[0, 0].log_softmax(-1), _teacher(s)[0, 0].softmax(-1), reduction="batchmean"
    ),
    "distillation_of_deferred_logits": lambda s: F.kl_div(s.z.log_softmax(-1), s.zb.softmax(-1), reduction="none").sum(
        -1
    ),
    "probabilities_of_a_teacher": _probabilities_of_a_teacher,
    "mixture_by_a_written_number": _mixture_by_a_written_number,
    "jensen_shannon": lambda s: (_jensen_shannon(s, 0.1, "cpu").sum(-1), _jensen_shannon(s, 0.5, s.x.device).mean()),
    "jensen_shannon_by_logaddexp": _jensen_shannon_by_logaddexp,
    "jensen_shannon_of_probabilities": _jensen_shannon_of_probabilities,
    "skewed_divergence": _skewed_divergence,
    "distillation_of_finite_logits": _distillation_of_finite_logits,
    "finite_logits_of_masked_classes": _finite_logits_of_masked_classes,
    "entropies_and_cross_entropies": _entropies_and_cross_entropies,
    "reverse_divergence": _reverse_divergence,
    "divergence_by_hand": _divergence_by_hand,
    "halves_of_a_batch": _halves_of_a_batch,
    "its_own_teacher": _its_own_teacher,
    "parts_of_mixtures": _parts_of_mixtures,
    "weighed_by_another": lambda s: (s.z.softmax(-1) * s.zb.log_softmax(-1)).sum(-1),
    # surroundings
    "no_grad_head": _no_grad_head,
    "no_grad_entropy": _no_grad_entropy,
    "no_grad_dropout": _no_grad_dropout,
    "no_grad_reader": _no_grad_reader,
    "labels_mutated": _labels_mutated,
    "reader_result_mutated": _reader_result_mutated,
    "checkpointed": _checkpointed,
    "checkpointed_sizes": _checkpointed_sizes,
    "checkpointed_distillation": _checkpointed_distillation,
    "result_written_into_labels": _result_written_into_labels,
    "result_as_class_weight": _result_as_class_weight,
    "late_size": _late_size,
    "no_grad_contiguous": _no_grad_contiguous,
    "whole_vocabulary_slice": lambda s: ce(s.z[..., :VOCAB], s.y),
    "results_lie_in_memory_as_in_eager": lambda s: (
        s.z.mT.log_softmax(1).gather(1, s.y[:, None, :].expand(-1, 2, -1)).view(-1),
        s.z.permute(1, 0, 2).logsumexp(-1).view(-1),
    ),
}


# Fused too, but only in a graph: at run time, where values are written or needed in full, they are built.
FUSED_IN_GRAPHS: dict[str, Callable[[World], Any]] = {
    "probabilities_of_labels": lambda s: (lambda z, own: (ce(z, s.y), ((1 - own) ** 2 * -own.log()).mean()))(
        s.z, (F.one_hot(s.y, VOCAB).to(s.x.dtype) * s.z.softmax(-1)).sum(-1)
    ),
    "probabilities_of_labels_beside_others": lambda s: (
        lambda z: (
            ce(z, s.y) + (1 - torch.sum(F.one_hot(s.y, VOCAB) * F.softmax(z, -1), -1)).mean(),  # PolyLoss
            (
                z.masked_fill(s.c < 0.3, -math.inf).softmax(-1) * torch.zeros_like(z).scatter(-1, s.y[..., None], 2.0)
            ).mean(),
        )
    )(s.zb),
    "one_class": lambda s: (
        torch.stack([s.z[:, -1, 3], s.z[:, -1, -2]], 1).log_softmax(1)[:, 1].exp(),  # as rerankers have it
        s.zb.log_softmax(-1)[..., 5].sum() + s.zb.mT.softmax(1)[0, 5].prod(),
        (torch.tanh((s.z + s.b) / 3) * 3).select(-1, 4) * s.x[..., 0],
        (s.z - s.z.logsumexp(-1, keepdim=True))[0, :, 7].exp(),
        s.zb[s.y[:, 0] % 2, 1, 2, None] * 2,
        s.z[..., 2:9][:, :, 3].cos(),
    ),
    "recurrent": _recurrent,
    "temperature_expanded_to_classes": lambda s: ce(s.zb / s.b[:1].exp().expand(BATCH, TIME, VOCAB), s.y),
    "temperature_of_rows_expanded_to_classes": lambda s: ce(s.z * s.x[..., :1].exp().expand(-1, -1, VOCAB), s.y),
    "divergence_by_detached_probabilities": _divergence_by_detached_probabilities,
    "divergence_by_hand_of_masked_classes": _divergence_by_hand_of_masked_classes,
    "in_place_through_views": _in_place_through_views,
    "in_place_on_a_part": _in_place_on_a_part,
    "one_hot": lambda s: -(F.one_hot(s.y, VOCAB) * s.z.log_softmax(-1)).sum(-1),
    "smoothed_by_scatter": _smoothed_by_scatter,
    "smoothed_by_one_hot": _smoothed_by_one_hot,
    "smoothed_divergence": _smoothed_divergence,
    "smoothed_over_no_rows": _smoothed_over_no_rows,
    "smoothed_targets_of_cross_entropy": _smoothed_targets_of_cross_entropy,
    "targets_written_on": _targets_written_on,
    "targets_of_some_rows": _targets_of_some_rows,
    "targets_of_masked_classes": _targets_of_masked_classes,
    "targets_in_other_dtypes": _targets_in_other_dtypes,
    "mask_by_a_full_tensor": lambda s: (lambda z: ce(torch.where(s.c > 0.6, torch.full_like(z, -9.0), z), s.y))(s.z),
    "clamped_log_probs": lambda s: _rows(s.zb.log_softmax(-1).clamp(min=torch.finfo(s.x.dtype).min), s.y),
    "one_hot_of_all": lambda s: -(s.zb.log_softmax(-1) * F.one_hot(s.y, VOCAB).to(s.x.dtype))[:, 1:].flip(1).sum(),
    "one_hot_logits": lambda s: (s.z * F.one_hot(s.y, num_classes=VOCAB)).transpose(0, 1).sum(dim=-1, keepdim=True),
    "mixture_of_deferred_logits": lambda s: F.kl_div(
        torch.logaddexp(s.z.log_softmax(-1) - math.log(2), s.zb.log_softmax(-1) - math.log(2)), s.zb.softmax(-1)
    ),
    # All entries of both, as where the mixture's gradient is not that which its part would have.
    "stack_of_log_probs": _stack_of_log_probs,
    "mixture_under_no_grad": _mixture_under_no_grad,
    "mixture_by_a_parameter": _mixture_by_a_parameter,
    "largest_of_a_comparison": lambda s: (
        F.kl_div(s.z.log_softmax(-1), _teacher(s).softmax(-1), reduction="none").max(-1).values
    ),
    "mixture_of_detached": _mixture_of_detached,
    "mixture_with_other_weights": lambda s: F.kl_div(
        torch.logaddexp(s.z.log_softmax(-1), _teacher(s).log_softmax(-1) - 1), s.z.log_softmax(-1), log_target=True
    ),
    "all_log_probs": lambda s: s.zb.log_softmax(-1),
    "all_probabilities": lambda s: F.softmax(s.z.mT / 2, dim=1)[:, 1:],
    "all_log_probs_written": _all_log_probs_written,
    "mutated_log_probs": lambda s: _mutated_log_probs(s),
    "capped_log_probs": lambda s: _rows(s.z.log_softmax(-1).tanh(), s.y),
    "cross_entropy_of_scaled_log_probs": lambda s: ce(2 * s.z.log_softmax(-1), s.y),
    "shifted_log_probs": lambda s: _rows(s.z.log_softmax(-1) + 2, s.y),
    "log_probs_times_zero": lambda s: _rows(s.z.log_softmax(-1) * 1e-200 * 1e-200, s.y),
    "one_hot_of_written_labels": lambda s: _one_hot_of_written_labels(s),
    "one_hot_in_class_dim_1": lambda s: (s.z.mT.log_softmax(1) * F.one_hot(s.y, VOCAB).mT).sum(1),
    "slice_of_log_probs": lambda s: s.z.log_softmax(-1)[..., :5].sum(-1),
    "sum_of_probabilities": lambda s: s.z.softmax(-1).sum(-1),
    "all_entries_read": lambda s: (torch.softmax(s.z, -1).pow(2).sum(-1), (s.zb.log_softmax(-1) * s.c).mean(-1)),
}


def _mutated_in_another_mode(s: World) -> Any:
    z = s.z
    with torch.no_grad():
        z /= 2
    return ce(z, s.y)


def _no_grad_view_then_write(s: World) -> Any:
    z = s.z
    with torch.no_grad():
        loss = ce(z, s.y)
    z.neg_()
    return loss, z.logsumexp(-1)


def _detached_view_written(s: World) -> Any:
    z = s.z
    z.detach().mul_(2)
    return F.cross_entropy(z.view(-1, VOCAB), s.y.view(-1))


def _mutated_rows(s: World) -> Any:
    z = s.z
    z[:, 1:] /= 2
    return ce(z, s.y)


def _written_beside_rows_in_another_order(s: World) -> Any:
    """With as many rows along one axis as along the other, so that shapes do not tell them apart."""
    z = F.linear(s.x[:, :BATCH], s.w)
    turned = z.transpose(0, 1)
    z *= s.x[:, :BATCH, :1].exp()
    return turned.logsumexp(-1)


def _written_by_keyword_beside_a_transposed_view(s: World) -> Any:
    z = F.linear(s.x[0, :3], s.w[:3])
    turned = z.t()
    z.add_(other=s.x[0, :3, :1])
    return turned.logsumexp(0), z.logsumexp(-1)


def _class_written_beside_a_slice(s: World) -> Any:
    z = F.linear(s.x[0, 0], s.w)
    rest = z[2:]
    z[3] = -5.0
    return rest.logsumexp(-1)


def _classes_filled_beside_a_slice(s: World) -> Any:
    z = s.z
    rest = z[..., 2:]
    z.index_fill_(dim=2, index=torch.tensor([2, 5], device=z.device), value=-9.0)
    return rest.logsumexp(-1)


def _mutated_by_rows_through_a_view(s: World) -> Any:
    z = s.z
    flat = z.view(-1, VOCAB)
    z *= s.x[..., :1].exp()
    return F.cross_entropy(flat, s.y.view(-1))


def _temperature_mutated(s: World) -> Any:
    t = s.c[:1].clone()
    z = s.z.detach() * t
    t.add_(1)
    return z.logsumexp(-1)


def _row_shift_mutated(s: World) -> Any:
    r = s.x.detach()[..., :1] * 1
    z = s.z.detach() - r
    r.add_(1)
    return z.logsumexp(-1)


def _one_hot_of_written_labels(s: World) -> Any:
    y = s.y.clone()
    hot = F.one_hot(y, VOCAB)
    y[0] = 1
    return (s.z.log_softmax(-1) * hot).sum(-1)


def _mutated_through_view(s: World) -> Any:
    z = s.z
    flat = z.view(-1, VOCAB)
    z[0, 0].zero_()
    return ce(flat, s.y)


def _hidden_mutated(s: World) -> Any:
    x, w = s.x.detach() * 1, s.w.detach()
    z = F.linear(x, w)
    x.mul_(2)
    return ce(z, s.y)


def _hidden_mutated_through_base(s: World) -> Any:
    x = s.x.detach() * 1
    z = F.linear(x[:, 1:], s.w.detach())
    x[:, 2] = 0
    return ce(z, s.y[:, 1:])


def _weight_mutated_by_embedding(s: World) -> Any:
    w = s.w.detach() * 3
    z = F.linear(s.x.detach(), w)
    h = F.embedding(s.y, w, max_norm=1.0)
    return ce(z, s.y) + h.sum()


def _hidden_mutated_by_relu(s: World) -> Any:
    x = s.x.detach() * 1
    z = F.linear(x, s.w.detach())
    F.relu(x, True)
    return ce(z, s.y)


def _hidden_mutated_by_out(s: World) -> Any:
    x = s.x.detach() * 1
    z = F.linear(x, s.w.detach())
    torch.neg(x.detach(), out=x)
    return ce(z, s.y)


def _frozen_then_hidden_mutated(s: World) -> Any:
    x = s.x * 1  # a frozen weight does not make eager keep x for the backward
    scores = _rows(F.linear(x, s.w.detach()).log_softmax(-1), s.y)
    x.mul_(2)
    return scores, x


def _no_grad_view(s: World) -> Any:
    z = s.z
    with torch.no_grad():
        rows = z.view(-1, VOCAB)
    return F.cross_entropy(rows, s.y.view(-1)) + s.x.sum()


def _hidden_mutated_by_dunder(s: World) -> Any:
    x = s.x.detach() * 1
    x.add_(1)
    z = F.linear(x, s.w.detach())
    x.__imul__(2)
    return ce(z, s.y)


def _hidden_mutated_by_numpy(s: World) -> Any:
    x = s.x.detach().cpu() * 1
    x.add_(1)
    z = F.linear(x, s.w.detach().cpu())
    x.numpy()[0] = 5
    return ce(z, s.y.cpu())


@torch._dynamo.allow_in_graph
def _scores(log_probs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of which fxfuse does not know that it writes to nothing."""
    return log_probs.gather(-1, y[..., None])


@torch._dynamo.allow_in_graph
def _opaque(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x.sum()


def _hidden_mutated_by_user_function(s: World) -> Any:
    x = s.x.detach() * 1
    x.add_(1)
    z = F.linear(x, s.w.detach())
    return _opaque(x), ce(z, s.y)


def _bias_mutated_by_batch_norm(s: World) -> Any:
    mean = s.b.detach() * 1
    z = F.linear(s.x, s.w, mean)
    rows = torch.full((3, VOCAB), 7.0, dtype=s.x.dtype, device=s.x.device)
    F.batch_norm(rows, mean, torch.ones_like(mean), training=True, momentum=1.0)
    return ce(z, s.y)


def _selected_by_tensor(s: World) -> Any:
    at = torch.tensor(1) + 0
    z = s.z.select(1, at)
    at.add_(1)
    return z.logsumexp(-1)


def _functional_outside(s: World) -> Any:
    z = s.z
    return torch.func.grad(lambda q: (z.logsumexp(-1).sum() * q).sum())(s.c)


def _functional_around(s: World) -> Any:
    return torch.func.grad(lambda q: (s.z.logsumexp(-1).sum() * q).sum())(s.c)


def _vmapped(s: World) -> Any:
    z = s.z.view(-1, VOCAB)
    labels = torch.stack([s.y.view(-1), (s.y.view(-1) + 1) % VOCAB])
    return torch.func.vmap(lambda y: F.cross_entropy(z, y))(labels)


def _hooked(s: World) -> Any:
    z = s.z
    z.register_hook(lambda g: g * 2)
    return ce(z, s.y)


def _mutated_log_probs(s: World) -> Any:
    lp = s.z.detach().log_softmax(-1)
    lp[0] *= 2
    return _rows(lp, s.y)


def _logits_as_argument(s: World) -> Any:
    z = s.z
    return ce(z, s.y) + s.b.type_as(z).sum()


def _functional(s: World) -> Any:
    return torch.func.grad(lambda x: ce(F.linear(x, s.w.detach()), s.y))(s.x.detach())


def _returned(s: World) -> Any:
    z = s.z
    return ce(z, s.y), z


def _no_grad_returned(s: World) -> Any:
    with torch.no_grad():
        z = s.z
    return z, s.x * 2


def _returned_scores(s: World) -> Any:
    z = s.z
    return z.log_softmax(-1), z.logsumexp(-1)


def _returned_twice(s: World) -> Any:
    z = s.z
    return z, z.view(-1, VOCAB)


def _returned_as_parts(s: World) -> Any:
    z = s.zb
    return z[:, 0], z[:, 1:], z.view(-1, VOCAB)[2:], F.cross_entropy(z.mT, s.y)


def _returned_written(s: World) -> Any:
    z = s.z
    rows = z[:, 1:]
    z /= 2
    return ce(z, s.y), z, rows


def _returned_after_write(s: World) -> Any:
    x = s.x.detach() * 1
    z = F.linear(x, s.w.detach())
    x.mul_(2)
    return z, x


def _returned_after_data(s: World) -> Any:
    z = F.linear(s.x.detach(), s.w.detach())
    s.x.data = s.x.data * 2
    return z, s.x.sum()


def _grad_mode_inside(s: World) -> Any:
    with torch.no_grad():
        with torch.enable_grad():
            z = s.z[:, 1:]
        return z, s.x.detach() * 2


def _returned_after_an_assignment(s: World) -> Any:
    z = s.z
    z[..., VOCAB - 3 :] = -1e4
    z[..., [1, -5]] = 0.5
    return ce(z, s.y), z


# Logits that a graph returns, and what else it does with them is fused.
DEFERRED: dict[str, Callable[[World], Any]] = {
    "parts_of_hidden_states": lambda s: (
        *(s.project(x, s.w) for x in (s.x * 2).chunk(2, dim=1)),
        s.project((s.x * 3).unbind(1)[-1], s.w),
    ),
    "returned": _returned,
    "returned_alone": lambda s: s.zb,
    "returned_rows": lambda s: s.z[:, 1:].contiguous(),
    "returned_capped": lambda s: 2 * torch.tanh(s.zb / 2),
    "returned_detached": lambda s: (ce(s.z, s.y), s.z.detach()),
    "returned_of_a_transposed_weight": lambda s: s.x @ s.w.t(),
    "returned_of_a_computed_weight": lambda s: F.linear(s.x, s.w * 2),
    "returned_under_no_grad": _no_grad_returned,
    "returned_from_another_mode": _grad_mode_inside,
    "returned_twice": _returned_twice,
    "returned_as_parts": _returned_as_parts,
    "returned_split": lambda s: s.z.split(2, dim=1),
    "returned_written": _returned_written,
    "returned_shifted_by_a_bias": lambda s: (s.zb + s.c, (s.z * s.b[0].exp()).contiguous()),
    "returned_beside_log_probs": lambda s: (lambda z: (z, z.log_softmax(-1)))(s.z),
    "returned_some_classes": lambda s: (s.zb[..., :11], ce(s.z, s.y)),
    "returned_after_an_assignment": _returned_after_an_assignment,
    "returned_strided": lambda s: (s.z[:, :-1], s.zb.transpose(0, 1), s.z[:, 1]),
}

KEPT: dict[str, tuple[str, Callable[[World], Any]]] = {
    "mask_of_infinite_logits": ("unknown_reader", lambda s: (lambda z: (z.isinf().any(), ce(z, s.y)))(s.z)),
    "number_of_infinite_logits": ("unknown_reader", lambda s: (lambda z: (z.isinf().float().sum(-1), ce(z, s.y)))(s.z)),
    "entropy_of_finite_logits": (
        "unknown_reader",
        lambda s: (lambda z: (z.softmax(-1) * z.log_softmax(-1)).masked_fill(z.isinf(), 0).sum(-1))(s.z),
    ),
    "infinite_logits_in_brackets": ("unknown_reader", lambda s: (lambda z: (z[z.isinf()].sum(), ce(z, s.y)))(s.z)),
    "class_of_an_infinite_logit": (
        "unknown_reader",
        lambda s: (lambda z: (z.isinf().max(-1).indices, ce(z, s.y)))(s.z),
    ),
    "infinite_logits_picked": (
        "unknown_reader",
        lambda s: (lambda z: (z.isinf().gather(-1, s.y[..., None]), ce(z, s.y)))(s.z),
    ),
    "returned_beside_scores": ("returned", _returned_scores),
    "normaliser_written_behind_autograd": ("operand_mutated", _normaliser_written_behind_autograd),
    "multi_label": ("unknown_reader", lambda s: F.binary_cross_entropy_with_logits(s.z, s.c.expand(s.z.shape) * 0.1)),
    "a_product_of_constants_underflows": (
        "unsupported_argument",
        lambda s: ce(torch.tanh(s.z) * 1e-200 * 1e-200, s.y),
    ),
    "returned_transposed": ("returned", lambda s: s.z.mT),
    "returned_after_write": ("returned", _returned_after_write),
    "returned_after_data": ("returned", _returned_after_data),
    "returned_of_the_data_of_a_weight": ("returned", lambda s: F.linear(s.x, s.w.data)),
    "returned_beside_a_view_of_the_weight": ("returned", _returned_beside_a_view_of_the_weight),
    "returned_of_a_larger_weight": ("returned", lambda s: F.linear(s.x[0, :1], s.w * 2)),
    "probability_targets": (
        "probability_targets",
        lambda s: F.cross_entropy(s.z.transpose(1, 2), F.one_hot(s.y, VOCAB).transpose(1, 2).to(s.x.dtype)),
    ),
    "roll_of_all_entries": ("unknown_reader", lambda s: s.z.roll(1, ()).logsumexp(-1)),
    "no_classes_by_an_index": ("unknown_reader", lambda s: s.z[..., s.y.new_zeros(0)].sum(-1)),
    "parts_of_the_vocabulary_that_overlap": (
        "unknown_reader",
        lambda s: torch.stack([part.logsumexp(-1) for part in s.z.tensor_split([5, 3], -1)]),
    ),
    "several_vocabularies": (
        "vocabulary_split",
        lambda s: F.cross_entropy(s.z[..., :16].reshape(-1, 4), s.y.flatten().repeat_interleave(4) % 4),
    ),
    "class_dim": ("class_dim", lambda s: s.z.log_softmax(1).gather(-1, s.y[..., None])),
    "class_dim_of_loss": ("class_dim", lambda s: F.cross_entropy(s.z[:, :VOCAB], s.y.new_zeros(BATCH, VOCAB))),
    "class_dim_of_logsumexp": ("class_dim", lambda s: s.z.logsumexp((1, 2))),
    "unknown_reader": ("unknown_reader", lambda s: ce(torch.sin(s.z), s.y)),
    "vocabulary_split": (
        "unknown_reader",
        lambda s: F.cross_entropy(s.z.view(-1, 1), s.y.new_zeros(BATCH * TIME * VOCAB)),
    ),
    "divided_number": ("unknown_reader", lambda s: ce(2 / s.z, s.y)),
    "compared_with_what_is_kept": ("unknown_reader", _compared_with_what_is_kept),
    "squared": ("unknown_reader", lambda s: ce(s.z * s.z, s.y)),
    "nll_of_logits": ("unknown_reader", lambda s: F.nll_loss(s.z.flatten(0, 1), s.y.flatten())),
    "sum_over_rows": ("class_dim", lambda s: s.z.sum(1)),
    "logits_as_argument": ("unknown_reader", _logits_as_argument),
    "log_probs_read_by_what_is_not_known": ("unknown_reader", lambda s: _scores(s.z.log_softmax(-1), s.y)),
    "log_probs_written_behind_autograd": ("mutated", _log_probs_written_behind_autograd),
    "rounded_division": ("unsupported_argument", lambda s: ce(torch.div(s.z, 2, rounding_mode="floor"), s.y)),
    "scaled_by_zero": ("unsupported_argument", lambda s: ce(s.z * 0.0, s.y)),
    "scaled_addmm": (
        "unsupported_argument",
        lambda s: ce(torch.addmm(s.b, s.x.reshape(-1, HIDDEN), s.w.t(), alpha=2), s.y),
    ),
    "legacy_reduction": ("unsupported_argument", lambda s: ce(s.z, s.y, size_average=False)),
    "smaller_index": ("shape", lambda s: s.z.gather(-1, s.y[:, :3, None])),
    "broadcast_index": ("shape", lambda s: torch.take_along_dim(s.z, s.y[:1, :, None], -1)),
    "many_columns": ("unsupported_argument", lambda s: s.z.gather(-1, s.y[..., None].expand(-1, -1, 100))),
    "mutated_in_another_mode": ("mutated", _mutated_in_another_mode),
    "no_grad_view_then_write": ("mutated", _no_grad_view_then_write),
    "detached_view_written": ("mutated", _detached_view_written),
    "mutated_rows": ("mutated", _mutated_rows),
    "mutated_by_rows_through_a_view": ("mutated", _mutated_by_rows_through_a_view),
    "temperature_mutated": ("operand_mutated", _temperature_mutated),
    "log_sum_exp_mutated": ("operand_mutated", _log_sum_exp_mutated),
    "row_shift_mutated": ("operand_mutated", _row_shift_mutated),
    "row_temperature_over_another_s_bias": (
        "unknown_reader",
        lambda s: ce((F.linear(s.x.bfloat16(), s.w.bfloat16()) + s.c.bfloat16()) / s.x[..., :1].bfloat16(), s.y),
    ),
    "softcap_of_a_row_shift": ("unknown_reader", lambda s: ce(torch.tanh(s.z + s.x[..., :1]), s.y)),
    "mask_of_a_row_shift": ("unknown_reader", lambda s: (s.z + s.x[..., :1]).masked_fill(s.c > 0.6, 2.0).sum(-1)),
    "class_factor_of_a_row_shift": ("unknown_reader", lambda s: ((s.z + s.x[..., :1]) * s.b).logsumexp(-1)),
    "joined_row_shifts": ("unknown_reader", lambda s: torch.stack([s.z + s.x[..., :1]] * 2).logsumexp(-1)),
    "one_row_shift_joined": (
        "unknown_reader",
        lambda s: (lambda z: ce(torch.cat([z - z.max(-1, keepdim=True).values]), s.y[0, :1]))(s.zb[0, :1]),
    ),
    "one_row_shift_stacked": (
        "unknown_reader",
        lambda s: torch.stack((s.z[:1, :1] - s.x[:1, :1, :1]).unbind(1), 1).logsumexp(-1),
    ),
    "mask_after_shifts_around_a_temperature": (
        "unknown_reader",
        lambda s: ((s.z + s.b) / s.x[..., :1].exp() + s.c).tanh().masked_fill(s.c > 0.6, -1e4).logsumexp(-1),
    ),
    "entropy_after_shifts_around_a_temperature": (
        "unknown_reader",
        lambda s: torch.distributions.Categorical(
            logits=(s.z + s.b) / s.x[..., :1].exp() + s.c, validate_args=False
        ).entropy(),
    ),
    "all_of_row_shifts_returned": ("returned", lambda s: s.z - s.x[..., :1]),
    "all_of_a_temperature_over_a_mask_returned": (
        "returned",
        lambda s: s.z.masked_fill(s.c > 0.6, -50.0) / s.x[..., :1].exp(),
    ),
    "masks_around_a_function": (
        "unknown_reader",
        lambda s: ((s.z.tanh().masked_fill(s.c > 0.6, -2.0)) * 2).masked_fill(s.c < 0.2, 1.0).logsumexp(-1),
    ),
    "mask_after_a_shift_of_a_bias": ("unknown_reader", lambda s: (s.zb + 1).masked_fill(s.c > 0.6, 2.0).logsumexp(-1)),
    "written_beside_rows_in_another_order": ("mutated", _written_beside_rows_in_another_order),
    "written_by_keyword_beside_a_transposed_view": ("mutated", _written_by_keyword_beside_a_transposed_view),
    "class_written_beside_a_slice": ("mutated", _class_written_beside_a_slice),
    "classes_filled_beside_a_slice": ("mutated", _classes_filled_beside_a_slice),
    "temperature_expanded_to_classes_and_read": (
        "unknown_reader",
        lambda s: (lambda t: (ce(s.zb / t, s.y), t[..., 3]))(s.b[:1].exp().expand(BATCH, TIME, VOCAB)),
    ),
    "least_number_after_a_scaled_bias": (
        "unknown_reader",
        lambda s: (s.zb / 2).masked_fill(s.c > 0.6, torch.finfo(s.x.dtype).min).logsumexp(-1),
    ),
    "tensor_after_a_scale_of_least_numbers": (
        "unknown_reader",
        lambda s: (s.z.masked_fill(s.c > 0.6, torch.finfo(s.x.dtype).min) / 2 / s.c[0]).softmax(-1).amax(-1).detach(),
    ),
    "expanded_class": ("unknown_reader", lambda s: s.z[..., 3:4].expand(-1, -1, 7).logsumexp(-1)),
    "sum_of_all_in_its_dimensions": ("unknown_reader", lambda s: s.z.sum(None, keepdim=True)),
    "repeated_vocabulary": ("unknown_reader", lambda s: s.z.repeat(1, 1, 2).logsumexp(-1)),
    "single_entries_along_rows": (
        "class_dim",
        lambda s: s.z.gather(1, (s.y[:, :2, None] + torch.zeros_like(s.c, dtype=torch.int64)) % TIME).logsumexp(-1),
    ),
    "tensor_after_a_softcap": ("unknown_reader", lambda s: ce(torch.tanh(s.z) * s.b[0], s.y)),
    "mask_of_entries": ("unknown_reader", lambda s: ce(s.z.masked_fill(s.x[..., :1] > s.c, -5.0), s.y)),
    "broadcast_logits": (
        "unknown_reader",
        lambda s: torch.broadcast_tensors(s.z, s.y[None, ..., None])[0].logsumexp(-1),
    ),
    "sum_over_either_axis": ("class_dim", lambda s: (lambda z: (z.logsumexp(0), z.logsumexp(1)))(s.w @ s.x[0].T)),
    "clamped_over_a_temperature": (
        "unknown_reader",
        lambda s: torch.distributions.Categorical(logits=s.zb / s.x[..., :1].exp(), validate_args=False).entropy(),
    ),
    "one_class_returned": ("unknown_reader", lambda s: s.z[..., 3]),
    "one_class_returned_beside": ("unknown_reader", lambda s: (lambda z: (z[..., 3].detach(), z.view(-1, VOCAB)))(s.z)),
    "one_class_written_to": ("mutated", lambda s: (lambda z: (z[..., 3].mul_(2), z.logsumexp(-1))[1])(s.z)),
    "one_class_of_what_is_written_to": ("mutated", lambda s: (lambda z: (z[..., 3], z.mul_(2))[0] * 1)(s.z * 1)),
    "empty_slice": ("unknown_reader", lambda s: s.z[..., :0].sum(-1)),
    "most_of_the_largest": ("unsupported_argument", lambda s: F.linear(s.x, s.w.repeat(4, 1)).topk(65)[0]),
    "gradient_of_amax": ("unknown_reader", lambda s: s.z.amax(-1)),
    "joined_with_others": ("unknown_reader", lambda s: ce(torch.cat([s.z, s.x @ s.w.t() * 2], 1), s.y.repeat(1, 2))),
    "wider_by_a_tensor": ("unknown_reader", lambda s: (s.z[:, :1] * s.x[..., :1]).logsumexp(-1)),
    "mutated_through_view": ("mutated", _mutated_through_view),
    "hidden_mutated": ("operand_mutated", _hidden_mutated),
    "hidden_mutated_through_base": ("operand_mutated", _hidden_mutated_through_base),
    "hidden_mutated_by_relu": ("operand_mutated", _hidden_mutated_by_relu),
    "hidden_mutated_by_out": ("operand_mutated", _hidden_mutated_by_out),
    "weight_mutated_by_embedding": ("operand_mutated", _weight_mutated_by_embedding),
    "integer_logits": ("dtype", lambda s: ce(s.z.to(torch.int64).to(s.x.dtype), s.y)),
    "functional_transform": ("functional_transform", _functional),
    "functional_outside": ("functional_transform", _functional_outside),
    "functional_around": ("functional_transform", _functional_around),
    "vmapped": ("functional_transform", _vmapped),
    "no_grad_view": ("unknown_reader", _no_grad_view),
    "selected_by_tensor": ("unknown_reader", _selected_by_tensor),
    "hooked": ("unknown_reader", _hooked),
    "frozen_then_hidden_mutated": ("operand_mutated", _frozen_then_hidden_mutated),
    "hidden_mutated_by_dunder": ("operand_mutated", _hidden_mutated_by_dunder),
    "hidden_mutated_by_numpy": ("operand_mutated", _hidden_mutated_by_numpy),
    "hidden_mutated_by_user_function": ("operand_mutated", _hidden_mutated_by_user_function),
    "bias_mutated_by_batch_norm": ("operand_mutated", _bias_mutated_by_batch_norm),
    "bias_by_row": ("shape", lambda s: ce(F.linear(s.x[0], s.w, s.y[0, :, None] * s.b[0]), s.y[0])),
    "no_vocabulary": ("shape", lambda s: F.linear(s.x, s.w[:0]).logsumexp(-1)),
}
