"""Launches for row statistics, and for a loss of them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ....ops.contract import Coefficients
from ....transform import bound, decode
from ... import tiles
from ..products import weighted_sum_kernel
from ..rows import loss_kernel
from ..stats import merge_kernel, stats_kernel
from .lists import Lists
from .operands import Listed, Span, Stats, describe, describe_stored, kernel_for, rows_at_a_time

# Of logits that are no larger, exponentials relative to any of them, and sums of up to 2^24 of these, are numbers of
# float32 that have all digits.
MOST_BOUND = 35.0


def _sums_alone(out: Stats) -> bool:
    """Whether nothing but log-sum-exps and indexed logits is wanted."""
    return not any(t.numel() for t in (out.class_sum, out.entropy, out.top))


class Statistics(Lists):
    def _stats_tiles(self, out: Stats, stored: Tensor | None = None) -> tuple[tiles.Tile, ...]:
        """The tiles that ``stats_of`` may have for such statistics."""
        bounded = self._has_offsets(out)
        short = _sums_alone(out) and (not self.transform or (bounded and self.hidden >= tiles.BOUNDED_SHARED_FROM))
        tile = tiles.described("stats" if stored is None else "stored", self.input, short=short)
        return tiles.MAXIMA_AND_SUMS if tile.together else (tile,)

    def _has_offsets(self, out: Stats) -> bool:
        """Whether exponents are taken relative to any logit of a row: sums of these are numbers of float32 too."""
        return _sums_alone(out) and bound(decode(self.transform)) <= MOST_BOUND

    def stats_span(self, listed: Listed, most: int, out: Stats) -> Span:
        """All listed rows as one span, of so many at most."""
        tile = self._stats_tiles(out)[0]
        return Span(*listed, 0, tiles.cdiv(most, tile.rows) * tile.rows, tile)

    def stats_spans(self, listed: Listed, out: Stats, stored: Tensor | None = None) -> list[Span]:
        """The listed rows in spans for ``stats_of``."""
        cuts = tiles.spans_of_stats(
            self._stats_tiles(out, stored), self.rows, self.hidden, self.input.element_size(), self.vocab, self.programs
        )
        starts = itertools.accumulate((most for _, most in cuts), initial=0)
        return [Span(*listed, first, most, tile) for first, (tile, most) in zip(starts, cuts, strict=False)]

    def stats(self, listed: Listed, out: Stats, stored: Tensor | None = None) -> None:
        """The statistics of the listed rows; see ``stats_of``."""
        row_sum = bias_sum = None
        in_tiles = out
        # Without a transform class sums are linear: the weight can be summed once, which takes the time of about 150
        # rows, instead of every tile, which takes about 180 / hidden of the product.
        if out.class_sum.numel() and not self.transform and self.rows >= self.hidden:
            row_sum, bias_sum = self.weighted_sum(self.weight, self.class_weight), self.bias_sum()
            in_tiles = out._replace(class_sum=self.empty(0))
        spans = self.stats_spans(listed, in_tiles, stored)
        self.pick(listed, out.picked)
        gathered = self.empty(max(span.most for span in spans), self.hidden, dtype=self.input.dtype)
        offset = self.empty(len(gathered)) if self._has_offsets(in_tiles) else None
        for span in spans:
            self.gather(span, 0, gathered, out.picked, offset, row_sum, bias_sum, out.class_sum)
            self.stats_of(span, gathered, in_tiles, stored, offset)

    def stats_of(
        self, span: Span, gathered: Tensor, out: Stats, stored: Tensor | None = None, offset: Tensor | None = None
    ) -> None:
        """The statistics of a span, whose rows were gathered.

        Its products are written to ``stored [N, V]``, if that is given: in the dtype of the operands, each row on 16
        bytes, and every row must be listed, in order. Logits are then made of what is written there.
        """
        optional = class_sum, entropy, top = [t if t.numel() else None for t in (out.class_sum, out.entropy, out.top)]
        tile, most = span.tile, span.most
        programs = max(self.programs * tile.slots, tiles.cdiv(most, tile.rows))
        each = 2 if tile.takes_turns else 1  # parts that a program makes
        parts = iter(self.scratch(2 + 3 - optional.count(None), programs * each * tile.rows))
        part_max, part_sum = next(parts), next(parts)
        part_class_sum, part_moment, part_argmax = (None if t is None else next(parts) for t in optional)
        options = self.launch_options(tile)
        del options["GROUP"]
        del options["ROWS"]
        options |= {**self.logits_options(), "EVEN_VOCAB": self.vocab % tile.vocab == 0}
        x = describe(gathered, tile, rows_at_a_time(tile), tile.hidden)
        sizes = self.scale, span.first, most, self.vocab, self.hidden, programs
        if tile.together:
            w = self.described_weight(self.weight, tile, tile.vocab // 2, tile.hidden)
            self.launch(
                self.signature,
                kernel_for(stats_kernel, tile),
                (programs,),
                x,
                w,
                self.bias,
                span.length,
                offset,
                part_max,
                part_sum,
                *sizes,
                *self.counter(tile),
                **options,
                PARTS=tile.rows // rows_at_a_time(tile),
            )
        else:
            w = self.described_weight(self.weight, tile, tile.vocab, tile.hidden)
            self.launch(
                self.signature,
                kernel_for(stats_kernel, tile),
                (programs,),
                x,
                w,
                None if stored is None else describe_stored(stored, tile),
                self.bias,
                span.length,
                offset,
                self.class_weight,
                part_max,
                part_sum,
                part_class_sum,
                part_moment,
                None if part_argmax is None else part_argmax.view(torch.int32),
                *sizes,
                **options,
            )
        self.launch(
            self.signature,
            merge_kernel,
            (tiles.cdiv(most, 16),),
            part_max,
            part_sum,
            part_class_sum,
            part_moment,
            None if part_argmax is None else part_argmax.view(torch.int32),
            self.index,
            span.order,
            span.length,
            out.lse,
            out.residual,
            out.picked,
            out.log_prob,
            class_sum,
            out.expectation if out.expectation.numel() else None,
            entropy,
            top,
            None if top is None else out.argmax,
            span.first,
            most,
            self.vocab,
            self.index.shape[1],
            programs,
            PARTS=each,
            BM=tile.rows,
            BLOCK_LANES=64,
            BLOCK_ROWS=16,
        )

    def bias_sum(self) -> Tensor | None:
        """``sum_j c_j bias_j``, float32."""
        if self.bias is None:
            return None
        return (self.bias.float() * (1.0 if self.class_weight is None else self.class_weight)).sum()

    def weighted_sum(self, matrix: Tensor, weights: Tensor | None) -> Tensor:
        """``sum_i weights_i matrix_i``, ``[D]`` float32; a weight of 0 silences whatever its row holds."""
        rows, hidden = matrix.shape
        strips = max(1, min(64, rows // 64))
        parts = self.empty(strips, hidden)
        self.launch(
            (self.signature, matrix.shape, matrix.stride(), matrix.data_ptr() % 16 == 0),
            weighted_sum_kernel,
            (tiles.cdiv(hidden, 128), strips),
            matrix,
            weights,
            parts,
            rows,
            tiles.cdiv(rows, strips),
            hidden,
            *matrix.stride(),
            BLOCK_ROWS=32,
            BLOCK=128,
        )
        return parts.sum(0)

    def loss(self, stats: Stats, c: Coefficients) -> Tensor:
        """``c.log_prob * log_prob + c.log_prob_sum * log_prob_sum``, summed; the last is made of ``class_sum``."""
        loss = self.empty()
        class_sum, total = (None, None) if c.log_prob_sum is None else (stats.class_sum, self.total_weight)
        self.launch(
            self.signature,
            loss_kernel,
            (1,),
            stats.lse, stats.log_prob, class_sum, self.index, total, *c, loss, self.rows, self.vocab,
            self.index.shape[1], BLOCK=min(4096, max(256, tiles.next_power_of_2(self.rows))), num_warps=16,
        )  # fmt: skip
        return loss
