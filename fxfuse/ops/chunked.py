"""The ops in chunks of rows, in plain ATen: what runs on a CPU, and where Triton does not on a GPU (see ``cuda``).

A chunk of logits is made, reduced and turned into its own gradient in one buffer, and dropped before the next.
float16 and bfloat16 operands are multiplied in float32, a block of the vocabulary at a time, so the logits are
never rounded to 16 bits.  See ``contract`` for what is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..transform import Transform, apply, apply_with_slope, decode
from .contract import (
    Coefficients,
    RowStats,
    Upstream,
    acc_dtype,
    gradient_dtypes,
    gradient_or_none,
    stash_dtype,
    total_weight,
)
from .products import add_product, product, weighted_sum

# Large enough for full-speed products. Logits that fit are one chunk, which Inductor takes as well: in quarters, 512
# and 1024 rows of 512 hidden units and 8192 classes took 2 and 1.3 times as long (a throwaway script).
CHUNK_BYTES = 32 << 20
# Where the vocabulary is so large that the bytes are fewer rows than these, or than a quarter of all: each chunk reads
# the weight and adds to its gradient, which takes as long as the products of some tens of rows.
CHUNK_ROWS = 256
LEAST_CHUNK_ROWS = 16
# Elements of the weight that are converted to float32 at a time when it is stored in 16 bits.
CAST_ELEMENTS = 4 << 20


class Head(NamedTuple):
    """The projection, read in the accumulation dtype without a full converted copy of the weight."""

    weight: Tensor
    bias: Tensor | None
    scale: float
    transform: Transform
    acc: torch.dtype

    @classmethod
    def of(cls, input: Tensor, weight: Tensor, bias: Tensor | None, scale: float, transform: str) -> Head:
        acc = acc_dtype(input.dtype)
        return cls(weight, None if bias is None else bias.to(acc), scale, decode(transform), acc)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Slices of the vocabulary with their rows of the weight in the accumulation dtype."""
        vocab, hidden = self.weight.shape
        if self.weight.dtype == self.acc:
            yield slice(0, vocab), self.weight
            return
        step = max(1, CAST_ELEMENTS // max(hidden, 1))
        for start in range(0, vocab, step):
            stop = min(start + step, vocab)
            yield slice(start, stop), self.weight[start:stop].to(self.acc)

    def logits(self, rows: Tensor, out: Tensor, want_slope: bool) -> tuple[Tensor, Tensor | None]:
        """The logits, in ``out`` where they are not transformed; and if wanted the derivative of the transform.

        ``rows`` are in the accumulation dtype, or in that of the weight.
        """
        if rows.is_cuda and rows.dtype != self.acc:
            torch.ops.aten.mm.dtype_out(rows, self.weight.t(), self.acc, out=out)
        else:
            rows = rows.to(self.acc)
            for at, block in self.blocks():
                product(rows, block.t(), out=out[:, at])
        if self.bias is not None:
            out += self.bias
        if self.scale != 1.0:
            out *= self.scale
        if want_slope:
            return apply_with_slope(self.transform, out)
        return apply(self.transform, out), None


def row_slices(rows: int, row_bytes: int, memory: int, buffers: int = 1, most: int | None = None) -> list[slice]:
    """Equal chunks of rows, of which ``buffers`` take at most ``memory`` bytes and ``most``; none where N is 0."""
    if most is None:
        most = max(CHUNK_BYTES, min(CHUNK_ROWS, rows // 4) * row_bytes)
    step = max(LEAST_CHUNK_ROWS, min(most, memory or most) // max(1, buffers * row_bytes))
    # A short last one would waste a product.
    step = max(1, math.ceil(rows / max(1, math.ceil(rows / step))))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


class Wants(NamedTuple):
    """The statistics that come only if asked for."""

    class_sum: bool = False
    log_prob_sum: bool = False
    expectation: bool = False
    entropy: bool = False
    top: bool = False


NOTHING_MORE = Wants()


class _Softmax(NamedTuple):
    exponentials: Tensor  # [C, V]: of the shifted logits, in their memory unless these are wanted too
    total: Tensor  # [C]: their sums
    shifted: Tensor | None  # [C, V]: logits less their maximum, if the entropy is wanted
    mean: Tensor | None  # [C]: of the shifted logits under the softmax


# Of the size of the logits, while a chunk with entropies is worked on: logits, exponentials, their product.
ENTROPY_BUFFERS = 3


def exponentiate(
    z: Tensor, index: Tensor, class_weight: Tensor | None, wants: Wants = NOTHING_MORE
) -> tuple[RowStats, _Softmax]:
    """The statistics of the logits ``z``, which are overwritten, and the softmax of which they are made."""
    indexed = index >= 0
    picked = torch.where(indexed, z.gather(1, index.clamp(min=0)), 0.0)

    def over_classes() -> Tensor:
        return z.sum(1) if class_weight is None else weighted_sum(z, class_weight)

    nothing = z.new_empty(0)
    class_sum = over_classes() if wants.class_sum else nothing
    top, argmax = z.max(1) if wants.top else (z.amax(1), nothing)
    # A shift by an infinite maximum would give NaN where logsumexp is plainly infinite.
    shift = torch.where(top.isinf(), 0.0, top)
    e = mean = None
    expectation = entropy = log_prob_sum = nothing
    if wants.expectation:  # of logits that are not shifted: it may be far less than their maximum
        e = (z - shift[:, None]).exp_()
        expectation = (e * z).sum(1)
    z.sub_(shift[:, None])
    if wants.log_prob_sum:
        log_prob_sum = over_classes()
    if e is None:
        e = z.exp() if wants.entropy else z.exp_()
    total = e.sum(1)
    # top - top is NaN for an infinite maximum, where log_softmax is NaN too.
    log_total = total.log() + (top - top)
    log_prob = torch.where(indexed, (picked - top[:, None]) - log_total[:, None], 0.0)
    if wants.log_prob_sum:
        log_prob_sum = log_prob_sum - log_total * total_weight(class_weight, z.shape[1], z.dtype)
    lse = shift + total.log()
    residual = (shift - lse + total.log()).nan_to_num_(0.0)
    if wants.expectation:
        expectation = expectation / total
    if wants.entropy:
        mean = (e * z).sum(1) / total
        entropy = total.log() - mean
    return (
        RowStats(lse, picked, log_prob, class_sum, log_prob_sum, residual, expectation, entropy, top, argmax),
        _Softmax(e, total, z if wants.entropy else None, mean),
    )


def _to_gradient(p: _Softmax, slope: Tensor | None, index: Tensor, class_weight: Tensor | None, up: Upstream) -> Tensor:
    """Turn exponentials into the gradient of what was transformed, in place."""
    e = p.exponentials
    if up.entropy is None:
        e.mul_((up.lse / p.total)[:, None])
    else:
        assert p.shifted is not None and p.mean is not None
        # log p + H is how far a logit lies above their mean: m and log s, which both have, are gone from it.
        # Times probabilities first: the least number of a dtype may become infinite, which 0 would make NaN.
        terms = p.shifted.sub_(p.mean[:, None]).mul_(e).mul_((-up.entropy / p.total)[:, None])
        e.mul_((up.lse / p.total)[:, None]).add_(terms)
    e.scatter_add_(1, index.clamp(min=0), torch.where(index >= 0, up.picked, 0.0))
    if up.class_sum is not None:
        c = e.new_ones(()) if class_weight is None else class_weight
        e.add_(up.class_sum[:, None] * c)
    return e if slope is None else e.mul_(slope)


class Gradients:
    """Sums of the gradients over chunks, in the accumulation dtype."""

    def __init__(self, rows: int, head: Head, need_input: bool, need_weight: bool, need_bias: bool) -> None:
        self.head = head
        vocab, hidden = head.weight.shape
        stash = stash_dtype(head.weight.dtype)
        self.input = gradient_or_none((rows, hidden), head.weight, stash, need_input)
        self.weight = gradient_or_none((vocab, hidden), head.weight, head.acc, need_weight)
        self.bias = gradient_or_none((vocab,), head.weight, head.acc, need_bias)
        self.need_input, self.need_weight, self.need_bias = need_input, need_weight, need_bias

    def any(self) -> bool:
        return self.need_input or self.need_weight or self.need_bias

    def add(self, at: Tensor | slice, rows: Tensor, dz: Tensor) -> None:
        """Add what a chunk contributes: ``rows [C, D]`` at ``at`` of the input, ``dz [C, V]`` of its raw logits."""
        if self.need_input:
            d_rows = torch.zeros_like(rows)
            for block, weight in self.head.blocks():
                add_product(d_rows, dz[:, block], weight)
            self.input[at] = d_rows.to(self.input.dtype)
        if self.need_weight:
            self.weight.addmm_(dz.t(), rows)
        if self.need_bias:
            self.bias += dz.sum(0)

    def like(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The sums in the dtypes of the operands."""
        to_input, to_weight, to_bias = gradient_dtypes(input, weight, bias)
        return self.input.to(to_input), self.weight.to(to_weight), self.bias.to(to_bias)


@dataclass(frozen=True)
class _Chunk:
    at: Tensor | slice  # which rows of the call
    rows: Tensor  # their hidden states [C, D] in the accumulation dtype
    index: Tensor  # [C, K]
    z: Tensor  # their logits [C, V], which the next chunk may overwrite
    slope: Tensor | None  # the derivative of their transform [C, V], if it was wanted and is not 1


def _chunks(
    head: Head, input: Tensor, index: Tensor, wanted: Tensor | None, want_slope: bool, memory: int, buffers: int
) -> Iterator[_Chunk]:
    """The logits of the ``wanted`` rows (a [N] mask; None for all), chunk by chunk: so many that ``buffers`` fit.

    On a CPU unwanted rows are left out. Elsewhere counting them would wait for the device: all rows come.
    """
    active = None
    if wanted is not None and wanted.device.type == "cpu" and not bool(wanted.all()):
        active = wanted.nonzero()[:, 0]
        input, index = input[active], index[active]
    rows, vocab = input.shape[0], head.weight.shape[0]
    slices = row_slices(rows, vocab * head.acc.itemsize, memory, buffers)
    buffer = input.new_empty((slices[0].stop if slices else 0, vocab), dtype=head.acc)
    for here in slices:
        part = input[here].to(head.acc)
        z, slope = head.logits(part, buffer[: part.shape[0]], want_slope)
        yield _Chunk(here if active is None else active[here], part, index[here], z, slope)
        del z, slope  # before others are made


def linear_stats(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    class_weight: Tensor | None,
    scale: float,
    want_class_sum: bool,
    skip_unindexed: bool,
    *,
    want_log_prob_sum: bool = False,
    want_expectation: bool = False,
    want_entropy: bool = False,
    want_top: bool = False,
    transform: str = "",
    memory: int = 0,
) -> tuple[Tensor, ...]:
    head = Head.of(input, weight, bias, scale, transform)
    want_entropy = want_entropy or want_expectation
    wants = Wants(want_class_sum, want_log_prob_sum, want_expectation, want_entropy, want_top)
    c = None if class_weight is None else class_weight.to(head.acc)

    def of_rows(asked: bool = True, dtype: torch.dtype = head.acc) -> Tensor:
        return gradient_or_none(input.shape[:1], input, dtype, asked)

    of_index = input.new_zeros(index.shape, dtype=head.acc)
    out = RowStats(
        lse=of_rows(),
        picked=of_index,
        log_prob=torch.zeros_like(of_index),
        class_sum=of_rows(want_class_sum),
        log_prob_sum=of_rows(want_log_prob_sum),
        residual=of_rows(),
        expectation=of_rows(want_expectation),
        entropy=of_rows(want_entropy),
        top=of_rows(want_top),
        argmax=of_rows(want_top, torch.int64),
    )
    wanted = (index >= 0).any(1) if skip_unindexed else None
    buffers = ENTROPY_BUFFERS if want_entropy else 1
    for chunk in _chunks(head, input, index, wanted, want_slope=False, memory=memory, buffers=buffers):
        stats, softmax = exponentiate(chunk.z, chunk.index, c, wants)
        for whole, part in zip(out, stats, strict=True):
            if whole.shape[0]:
                whole[chunk.at] = part
        del chunk, softmax
    if wanted is not None:
        for one in out:
            if one.shape == wanted.shape:  # not those that nobody asked for
                one.masked_fill_(~wanted, 0)
    return out


def linear_loss(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    class_weight: Tensor | None,
    scale: float,
    c_log_prob: Tensor,
    c_log_prob_sum: Tensor | None,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
    *,
    transform: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    c = Coefficients(c_log_prob, c_log_prob_sum).known(index)
    up = c.upstream(total_weight(class_weight, weight.shape[0], c_log_prob.dtype))
    head = Head.of(input, weight, bias, scale, transform)
    loss = c_log_prob.new_zeros(())

    def add_loss(at: Tensor | slice, stats: RowStats) -> None:
        here = Coefficients(*(None if each is None else each[at] for each in c))  # type: ignore[arg-type]
        loss.add_(here.loss(stats.log_prob, stats.log_prob_sum))

    grads = Gradients(input.shape[0], head, need_input, need_weight, need_bias)
    _sweep(head, input, index, class_weight, up, up.nonzero(), grads, add_loss)
    stash = stash_dtype(input.dtype)
    return loss, grads.input, grads.weight.to(stash), grads.bias.to(stash)


def linear_stats_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    class_weight: Tensor | None,
    scale: float,
    lse: Tensor,
    residual: Tensor,
    g_lse: Tensor,
    g_picked: Tensor,
    g_class_sum: Tensor | None,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
    *,
    entropy: Tensor | None = None,
    g_entropy: Tensor | None = None,
    expectation: Tensor | None = None,
    transform: str = "",
    memory: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    up = Upstream(g_lse, g_picked, g_class_sum, g_entropy)
    head = Head.of(input, weight, bias, scale, transform)
    grads = Gradients(input.shape[0], head, need_input, need_weight, need_bias)
    _sweep(head, input, index, class_weight, up, up.nonzero(), grads, None, memory)
    return grads.like(input, weight, bias)


def _sweep(
    head: Head,
    input: Tensor,
    index: Tensor,
    class_weight: Tensor | None,
    up: Upstream,
    wanted: Tensor,
    grads: Gradients,
    see: Callable[[Tensor | slice, RowStats], None] | None,
    memory: int = 0,
) -> None:
    """One pass over the wanted rows: show ``see`` their statistics, then add their gradients to ``grads``."""
    c = None if class_weight is None else class_weight.to(head.acc)
    wants = Wants(log_prob_sum=see is not None and up.class_sum is not None, entropy=up.entropy is not None)
    buffers = ENTROPY_BUFFERS if wants.entropy else 1
    for chunk in _chunks(head, input, index, wanted, want_slope=grads.any(), memory=memory, buffers=buffers):
        stats, softmax = exponentiate(chunk.z, chunk.index, c, wants)
        if see is not None:
            see(chunk.at, stats)
        if not grads.any():
            continue
        here = Upstream(*(None if g is None else g[chunk.at] * head.scale for g in up))  # type: ignore[arg-type]
        dz = _to_gradient(softmax, chunk.slope, chunk.index, c, here)
        rows = chunk.rows
        if wanted.device.type != "cpu":
            # Zero times a NaN in the hidden states of an unwanted row would still reach the weight.
            unwanted = ~wanted[chunk.at, None]
            dz, rows = dz.masked_fill_(unwanted, 0), rows.masked_fill(unwanted, 0)
        grads.add(chunk.at, rows, dz)
        del chunk, softmax, dz  # as the next are made before these names are taken again
