"""The ops on Hopper and later GPUs, for operands in 16 bits that a tensor descriptor can describe.

Rows without work are left out, where that spares anything: a list of the others is made on the device, and everything
that follows reads its length there. A chunk of listed rows is gathered and meets the whole vocabulary before the next.
Nothing waits for the device, nothing is added atomically but counts, of rows and of meetings, and every sum has a fixed
order.

A loss whose coefficients are known beforehand takes three products: scaled exponentials (see
``kernels.hopper.exponentials``), then dX and dW from them. Rows whose offset proves bad, and everything else, take
four: the statistics, the gradient of the logits from logits made anew, dX and dW.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import tiles
from ..kernels.hopper.launch import EVERY_ROW, Bad, Call, Classes, Listed, Rows, Stats, Sum, fits, takes
from ..kernels.launcher import compiled_together
from ..kernels.recorder import replayed
from ..transform import decode, steepest
from .contract import Coefficients, Upstream, normalisation, stash_dtype
from .windows import WINDOW_SHARE

__all__ = [
    "Call",
    "Exponentials",
    "Kept",
    "keeps_exponentials",
    "kept_gradients",
    "linear_loss",
    "linear_stats",
    "linear_stats_backward",
    "loss_and_exponentials",
    "products",
    "rows_of_exponentials",
    "suits_products",
    "takes",
]

# A chunk of exponentials: so many rows that adding it to dW costs little beside its product, within these bytes.
MOST_EXPONENTIALS_BYTES = 1536 << 20
# A window of gradients of logits that are made anew: one part of ``WINDOW_SHARE``, as each window reads and writes
# d_input's sums once more, where that and all beside it stay within so many bytes; but no less than so many.
WINDOWED_BYTES, LEAST_WINDOW_BYTES = 600 << 20, 256 << 20
# Within little memory: classes of a window that rows are not cut for, and sizes that no bound goes below.
WIDE_WINDOW, LEAST_CLASSES, LEAST_ROWS = 4096, 1024, 1024
SMALL_BYTES = 4 << 20
# Of each row: its place in the list, statistics and upstream gradients; and of each index, its logit and the like.
BYTES_OF_A_ROW, BYTES_OF_AN_INDEX = 24, 12
# Entries of products from which on storing them ourselves costs a host that is waited for no more than a pass over them
# for their statistics costs the device.
LEAST_STORED = 1 << 29


# --- gradients ------------------------------------------------------------------------------------------------


class _Gradients:
    """The gradients of one call while they are made: d_input of the listed rows (zero elsewhere), d_weight, d_bias."""

    def __init__(self, call: Call, needs: tuple[bool, bool, bool], dtypes: tuple[torch.dtype, ...]) -> None:
        self.call, self.dtypes = call, dtypes
        self.need_input, self.need_weight, self.need_bias = needs
        self.d_input = call.input.new_zeros((call.rows, call.hidden) if self.need_input else (0,), dtype=dtypes[0])
        self.d_weight = call.empty(*((call.vocab, call.hidden) if self.need_weight else (0,)), dtype=dtypes[1])
        self.d_bias = call.bias_parts(self.d_weight, self.need_weight) if self.need_bias else None

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        dtype = self.dtypes[2]
        d_bias = self.call.empty(0, dtype=dtype) if self.d_bias is None else self.d_bias.sum(0).to(dtype)
        return self.d_input, self.d_weight, d_bias

    def recompute(
        self, listed: Listed, stats: Stats, up: Upstream, factors: tuple[Tensor | None, Tensor | None], memory: int = 0
    ) -> None:
        """From known statistics, window by window of the gradient of the logits, see ``_windows``."""
        call = self.call
        # The parts of d_bias, and their sum.
        beside = 0 if self.d_bias is None else self.d_bias.nbytes + 4 * call.vocab
        most, classes = _windows(call, memory, beside)
        rows, windows = call.cut(listed, most), call.windows(classes)
        d_input = call.input_sum(self.d_input, len(windows), rows.most)
        low = call.weight_sum(self.d_weight[windows[0]], rows.chunks).low
        gathered = call.empty(rows.most, call.hidden, dtype=call.input.dtype)
        dz = call.exponentials_buffer(rows.most, windows[0].stop)
        parts = call.empty(call.parts_size() if self.need_input and not d_input.in_pieces else 0)
        normalise, undo = factors
        slope = call.slopes()
        call.pick(listed, stats.picked, slope)
        for i, window in enumerate(windows):
            width = window.stop - window.start
            here = dz[:, :width]
            d_weight = Sum(self.d_weight[window], low)
            for chunk in range(rows.chunks):
                if i == 0 or rows.chunks > 1:
                    call.gather(rows, chunk, gathered)
                call.dlogits_of(rows, chunk, window, gathered, here, stats, slope, up, normalise)
                if self.need_input and d_input.in_pieces:
                    call.add_listed_input(rows, chunk, window, here, d_input, i, len(windows), undo)
                elif self.need_input:
                    ends = i == 0, i == len(windows) - 1
                    call.add_input(rows, chunk, window, here, d_input, parts, *ends, undo=undo)
                if self.need_weight:
                    call.add_weight(rows, chunk, window, here, gathered, d_weight, undo=undo, d_bias=self.d_bias)
                elif self.d_bias is not None:
                    call.add_bias(rows, chunk, window, here, self.d_bias[0], None, undo)
        if d_input.in_pieces:
            call.unlist(rows, self.d_input, gathered)

    def from_exponentials(
        self, made: Exponentials, chunk: int, sums: tuple[Sum, Sum], classes: Classes | None, parts: Tensor
    ) -> None:
        """The products of a chunk that has just been made."""
        call, rows, k, everything = self.call, made.rows, made.kept, slice(0, self.call.vocab)
        e = k.e[:, : call.vocab]
        d_bias = None if self.d_bias is None else self.d_bias[0]
        if self.need_input:
            call.add_input(
                rows, chunk, everything, e, sums[0], parts, True, True, k.factor, made.undo, made.rank_one, k.own
            )
        total = sums[1] if self.need_weight else None
        if classes is not None and chunk > 0:
            call.finish_classes(rows, chunk, k.own, classes, total, d_bias)
        if total is not None:
            call.add_weight(
                rows, chunk, everything, e, k.gathered, total, made.undo, made.weight_row, classes, self.d_bias,
                k.factor,
            )  # fmt: skip
        elif d_bias is not None:
            call.add_bias(rows, chunk, everything, e, d_bias, k.factor, made.undo)
        if classes is not None and chunk == 0:
            call.finish_classes(rows, chunk, k.own, classes, total, d_bias)

    def exponentials(self, listed: Listed, stats: Stats, up: Upstream) -> None:
        """The statistics and the gradients together, from scaled exponentials."""
        call = self.call
        rows = call.cut(listed, rows_of_exponentials(call))
        sums = Sum(self.d_input, None), call.weight_sum(self.d_weight, rows.chunks)
        classes = call.classes(rows) if call.index.shape[1] and (self.need_weight or self.need_bias) else None
        made = Exponentials.begin(call, rows, stats, up, None if classes is None else classes.rows)
        made.class_sums(self.need_weight)
        # The sums of the tiles are read before the parts of d_input are written.
        scratch = call.empty(max(call.parts_size(), call.sums_size(rows.most)))
        for chunk in range(rows.chunks):
            made.make(chunk, scratch)
            self.from_exponentials(made, chunk, sums, classes, scratch)
        self.finish_class_sums(made)

    def finish_class_sums(self, made: Exponentials) -> None:
        if self.d_bias is not None and made.rank_one is not None:
            c = 1.0 if self.call.class_weight is None else self.call.class_weight
            self.d_bias[0] += made.rank_one[0].sum() * self.call.scale * c


class Kept(NamedTuple):
    """Exponentials of a chunk, and what their products need beside them."""

    e: Tensor  # [most, at least V]
    gathered: Tensor  # [most, D]: hidden states times their factors
    factor: Tensor  # [most] float32
    own: Tensor  # [N, K] float32
    order: Tensor  # [N] int32
    length: Tensor  # [1] int32
    row_sum: Tensor  # [D] float32: the sum of the classes' weights; empty if e has what class sums give


@dataclasses.dataclass
class Exponentials:
    """Scaled exponentials of one chunk after the other."""

    call: Call
    rows: Rows
    kept: Kept
    stats: Stats
    up: Upstream
    # Before the products: the offsets, the derivatives of the transform at the indexed logits, the bad rows.
    offset: Tensor | None = None
    slope: Tensor | None = None
    bad: Bad | None = None
    # What class sums give, if it is not added to the exponentials: a matrix of rank one, as they are linear.
    bias_sum: Tensor | None = None
    rank_one: tuple[Tensor, Tensor] | None = None
    weight_row: Tensor | None = None
    # A factor of the products, [1].
    undo: Tensor | None = None

    @classmethod
    def begin(cls, call: Call, rows: Rows, stats: Stats, up: Upstream, shared: Tensor | None = None) -> Exponentials:
        """``shared [most, D]`` float32 is memory that ``make`` may use for bad rows: what it holds is lost."""
        gathered = call.empty(rows.most, call.hidden, dtype=call.input.dtype)
        e = call.empty(rows.most, tiles.padded(call.vocab), dtype=call.input.dtype)
        row_sum = call.empty(0)
        if up.class_sum is not None and not tiles.adds_class_sums(call.input):
            row_sum = call.weighted_sum(call.weight, call.class_weight)
        own = torch.zeros_like(up.picked)
        kept = Kept(e, gathered, call.empty(rows.most), own, rows.order, rows.length, row_sum)
        bad_rows = torch.empty_like(gathered)
        if shared is not None:
            bad_rows = shared.view(-1).view(e.dtype)[: gathered.numel()].view_as(gathered)
        slope = call.slopes()
        call.pick(Listed(rows.order, rows.length), stats.picked, slope)
        return cls(call, rows, kept, stats, up, call.empty(rows.most), slope, call.no_bad(rows, bad_rows))

    def class_sums(self, need_weight: bool) -> None:
        """Prepare what class sums give, to their statistic and to the gradients, if exponentials do not have it."""
        of_sums = self.up.class_sum
        if of_sums is None or not self.kept.row_sum.numel():
            return
        call = self.call
        self.rank_one = of_sums, self.kept.row_sum * call.scale
        self.bias_sum = call.bias_sum()
        if need_weight:
            self.weight_row = call.weighted_sum(call.input, of_sums) * call.scale

    def make(self, chunk: int, scratch: Tensor) -> None:
        call, k = self.call, self.kept
        assert self.offset is not None and self.bad is not None
        row_sum = k.row_sum if k.row_sum.numel() else None
        call.gather(
            self.rows, chunk, k.gathered, self.stats.picked, self.offset, row_sum, self.bias_sum,
            self.stats.class_sum,
        )  # fmt: skip
        call.exponentials_of(
            self.rows, chunk, k.gathered, self.offset, k.e[:, : call.vocab], scratch, self.up, self.stats, self.slope,
            k.factor, k.own, self.bad, self.up.class_sum is not None and row_sum is None,
        )  # fmt: skip


def rows_of_exponentials(call: Call) -> int:
    """How many rows a chunk of exponentials has.

    About a seventh of all, or so many that adding the chunk to d_weight costs little beside its product, which is a
    matter of rows over hidden units; within the bytes.
    """
    # Of the exponentials, of the rows gathered, and of the float32 rows that classes are given.
    each = (call.vocab + call.hidden) * call.input.element_size() + 4 * call.hidden
    bound = max(1, MOST_EXPONENTIALS_BYTES // each // call.row_block)
    wanted = max(7 * call.hidden / 5, call.rows / 7, 1024) / call.row_block
    blocks, tile = tiles.cdiv(call.rows, call.row_block), tiles.described("d_input", call.input)
    chunks = tiles.chunks_of_exponentials(
        blocks, wanted, bound, call.hidden, call.vocab, tile, call.programs * tile.slots
    )
    return tiles.cdiv(blocks, chunks) * call.row_block


def _windows(call: Call, memory: int, beside: int) -> tuple[int, int]:
    """Rows of a chunk and classes of a window of the gradient of the logits, that is made anew from statistics.

    All rows or all classes if no ``memory`` is given: windows run along the longer axis, so that the smaller of d_input
    and d_weight is the one that is added up. Within ``memory`` bytes windows are cut along both: each window of
    d_weight is then added up by itself. ``beside`` are bytes that something else has.
    """
    size = call.input.element_size()
    most, cuts = call.whole_blocks(call.rows), 1

    def left(memory: int) -> int:
        # Beside further bits of d_input, its cut tiles, the rows gathered, and what there is of each row.
        low, parts = call.low_of_input(most), 4 * call.parts_size()
        sums = max(low, parts) if tiles.of_input_sums(call.input, most) else low + parts
        of_rows = (BYTES_OF_A_ROW + BYTES_OF_AN_INDEX * call.index.shape[1]) * call.rows
        return max(0, memory - sums - beside - of_rows - SMALL_BYTES - most * call.hidden * size)

    if memory == 0:
        if call.rows > call.vocab:
            return max(call.row_block, LEAST_WINDOW_BYTES // (call.vocab * size)), call.vocab
        window = max(LEAST_WINDOW_BYTES, min(most * call.vocab * size // WINDOW_SHARE, left(WINDOWED_BYTES)))
        return call.rows, max(1, window // (most * size))
    while True:
        each = most * size + (call.low_of_weight(LEAST_CLASSES) // LEAST_CLASSES if cuts > 1 else 0)
        classes = min(left(memory) // each, LEAST_WINDOW_BYTES // (most * size))
        if classes >= WIDE_WINDOW or most <= LEAST_ROWS:
            return most, max(classes, LEAST_CLASSES)
        cuts *= 2
        most = call.whole_blocks(-(-call.rows // cuts))


# --- products -------------------------------------------------------------------------------------------------


def suits_products(call: Call, out: Tensor) -> bool:
    """Whether ``products`` can write to ``out [N, V]``, and takes less time than cuBLAS and a pass for statistics."""
    on_vectors = out.data_ptr() % 16 == 0 and out.stride(0) * out.element_size() % 16 == 0
    faster = out.device.type == "cpu" or (tiles.takes_turns("stored", call.input) and out.numel() >= LEAST_STORED)
    return on_vectors and faster and out.dtype == call.input.dtype


@replayed
@compiled_together
def products(call: Call, out: Tensor) -> tuple[Tensor, Tensor]:
    """Write ``input @ weight.T`` to ``out``; return ``lse`` and ``residual [N]`` of logits that are made of that."""
    stats = call.unset_stats(False)
    call.stats(EVERY_ROW, stats, stored=out)
    return stats.lse, stats.residual


# --- the ops --------------------------------------------------------------------------------------------------


@compiled_together
def linear_stats(call: Call, skip_unindexed: bool, *wants: bool) -> Stats:
    """``wants`` are of ``class_sum``, ``expectation``, ``entropy`` and ``top``."""
    listed = call.listed_by_flags((call.index >= 0).any(1).view(torch.int8)) if skip_unindexed else EVERY_ROW
    out = call.no_stats(*wants, every_row=not skip_unindexed)
    call.stats(listed, out)
    return out


@compiled_together
def linear_stats_backward(
    call: Call,
    lse: Tensor,
    residual: Tensor,
    up: Upstream,
    needs: tuple[bool, bool, bool],
    dtypes: tuple[torch.dtype, ...],
    memory: int,
    entropy: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    nothing = call.empty(0)
    picked, entropy_or_none = torch.zeros_like(up.picked), nothing if entropy is None else entropy
    stats = Stats(lse, residual, picked, nothing, nothing, nothing, entropy_or_none, nothing, nothing)
    factors = _factors(call, up, entropy)
    grads = _Gradients(call, needs, dtypes)
    grads.recompute(call.listed(up), stats, up, factors, memory)
    return grads.results()


@compiled_together
def linear_loss(
    call: Call, c: Coefficients, needs: tuple[bool, bool, bool]
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    want_class_sum = c.log_prob_sum is not None
    stats = call.unset_stats(want_class_sum)
    grads = _Gradients(call, needs, (stash_dtype(call.input.dtype),) * 3)
    if not any(needs) and call.are_one_block(stats):
        return call.loss_of_every_row(stats, c), grads.results()
    listed, up = call.listed_by_coefficients(c)
    if any(needs) and suits_exponentials(call.input.dtype, call.index.shape[1], want_class_sum, call.transform):
        grads.exponentials(listed, stats, up)
    else:
        call.stats(listed, stats)
        if any(needs):
            grads.recompute(listed, stats, up, _factors(call, up))
    return call.loss(stats, c), grads.results()


@compiled_together
def loss_and_exponentials(call: Call, c: Coefficients) -> tuple[Tensor, Kept]:
    """The loss, and the exponentials of all rows as one chunk, from which ``kept_gradients`` makes the gradients."""
    listed, up = call.listed_by_coefficients(c)
    stats = call.unset_stats(c.log_prob_sum is not None)
    made = Exponentials.begin(call, call.cut(listed, call.rows), stats, up)
    made.class_sums(need_weight=False)
    made.make(0, call.empty(call.sums_size(made.rows.most)))
    return call.loss(stats, c), made.kept


@compiled_together
def kept_gradients(
    call: Call,
    kept: Kept,
    c_log_prob_sum: Tensor | None,
    g: Tensor,
    needs: tuple[bool, bool, bool],
    dtypes: tuple[torch.dtype, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """``g []`` float32 is the gradient of the loss. ``kept`` is left as it is."""
    nothing = call.empty(0)
    of_sums = None if c_log_prob_sum is None or not kept.row_sum.numel() else c_log_prob_sum * g
    up = Upstream(nothing, nothing, of_sums)
    rows = call.cut(Listed(kept.order, kept.length), call.rows)
    made = Exponentials(call, rows, kept._replace(own=kept.own * g), Stats(*[nothing] * 9), up, undo=g.view(1))
    made.class_sums(needs[1])
    grads = _Gradients(call, needs, dtypes)
    classes = call.classes(rows) if call.index.shape[1] and (needs[1] or needs[2]) else None
    sums = Sum(grads.d_input, None), Sum(grads.d_weight, None)
    grads.from_exponentials(made, 0, sums, classes, call.empty(call.parts_size()))
    grads.finish_class_sums(made)
    return grads.results()


def suits_exponentials(dtype: torch.dtype, indexed: int, want_class_sum: bool, transform: str) -> bool:
    """Whether gradients can be made from scaled exponentials.

    float16 has too narrow a range for them. More classes a row than one would need as many rows of sums. What class
    sums give is of rank one only where logits are not transformed.
    """
    return dtype != torch.float16 and indexed <= 1 and not (want_class_sum and transform)


def keeps_exponentials(input: Tensor, weight: Tensor, indexed: int, want_class_sum: bool, transform: str) -> bool:
    """Whether a loss of such operands, where ``tiles.has_descriptors``, should keep its exponentials."""
    (rows, hidden), vocab = input.shape, weight.shape[0]
    return (
        0 < rows <= hidden
        and fits(input, weight)
        and suits_exponentials(input.dtype, indexed, want_class_sum, transform)
        and rows * vocab * input.dtype.itemsize <= MOST_EXPONENTIALS_BYTES
    )


def _factors(call: Call, up: Upstream, entropy: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
    if call.input.dtype != torch.float16:
        return None, None
    return normalisation(up, call.class_weight, abs(call.scale) * steepest(decode(call.transform)), entropy)
