"""Launches for row statistics, and for a loss of them."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from ....ops.contract import Coefficients
from ....transform import bound, decode
from ... import tiles
from ..products import weighted_sum_kernel
from ..rows import loss_kernel
from ..stats import merge_kernel, stats_kernel
from .lists import Lists
from .operands import EVERY_ROW, Listed, Span, Stats, describe, describe_stored, kernel_for, rows_at_a_time

# Of logits that are no larger, exponentials relative to any of them, and sums of up to 2^24 of these, are numbers of
# float32 that have all digits.
MOST_BOUND = 35.0
# Rows whose parts a program merges.
MERGED = 16


class OfLoss(NamedTuple):
    """What makes a loss of the statistics, as kernels take it."""

    total: Tensor | None
    c_log_prob: Tensor
    c_log_prob_sum: Tensor | None
    loss: Tensor  # [] float32, out


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
        spans = [Span(*listed, first, most, tile) for first, (tile, most) in zip(starts, cuts, strict=False)]
        if listed.length is None:
            spans = [span._replace(most=min(span.most, self.rows - span.first)) for span in spans]
        return spans

    def are_one_block(self, out: Stats) -> bool:
        """Whether all rows are in one block of a tile, so that to leave out some, but not all, would spare nothing."""
        return self.rows <= self._stats_tiles(out)[0].rows

    def _sums_weight(self, out: Stats) -> bool:
        """Whether class sums are made of the sum of the weight.

        Without a transform they are linear: to sum it once takes the time of about 150 rows, and to do so in every tile
        about 180 / hidden of the product.
        """
        return out.class_sum.numel() > 0 and not self.transform and self.rows >= max(self.hidden, MERGED + 1)

    def stats(self, listed: Listed, out: Stats, stored: Tensor | None = None, of_loss: OfLoss | None = None) -> None:
        """The statistics of the listed rows; see ``stats_of``."""
        row_sum = bias_sum = None
        in_tiles = out
        if self._sums_weight(out):
            row_sum, bias_sum = self.weighted_sum(self.weight, self.class_weight), self.bias_sum()
            in_tiles = out._replace(class_sum=self.empty(0))
        spans = self.stats_spans(listed, in_tiles, stored)
        self.pick(listed, out.picked)
        if listed.order is None and self.input_is_described and row_sum is None and not self._has_offsets(in_tiles):
            for span in spans:
                self.stats_of(span, self.input[span.first : span.first + span.most], in_tiles, stored, None, of_loss)
            return
        most = max(tiles.cdiv(span.most, span.tile.rows) * span.tile.rows for span in spans)
        gathered = self.empty(most, self.hidden, dtype=self.input.dtype)
        offset = self.empty(most) if self._has_offsets(in_tiles) else None
        for span in spans:
            self.gather(span, 0, gathered, out.picked, offset, row_sum, bias_sum, out.class_sum)
            self.stats_of(span, gathered, in_tiles, stored, offset, of_loss)

    def stats_of(
        self,
        span: Span,
        gathered: Tensor,
        out: Stats,
        stored: Tensor | None = None,
        offset: Tensor | None = None,
        of_loss: OfLoss | None = None,
    ) -> None:
        """The statistics of a span of ``gathered`` rows and, with ``of_loss``, their loss if one program merges.

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
            (tiles.cdiv(most, MERGED),),
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
            *([None] * 4 if of_loss is None else of_loss),
            span.first,
            most,
            self.vocab,
            self.index.shape[1],
            programs,
            PARTS=each,
            BM=tile.rows,
            BLOCK_LANES=64 if most > MERGED else 256,  # a single program has many lanes to wait for
            BLOCK_ROWS=MERGED,
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

    def loss_of_every_row(self, stats: Stats, c: Coefficients) -> Tensor:
        """The statistics of all rows, and their ``loss``: of few rows by the program that merges what they have."""
        if self.rows > MERGED:
            self.stats(EVERY_ROW, stats)
            return self.loss(stats, c)
        of_loss = self._of_loss(c)
        self.stats(EVERY_ROW, stats, of_loss=of_loss)
        return of_loss.loss

    def loss(self, stats: Stats, c: Coefficients) -> Tensor:
        """``c.log_prob * log_prob + c.log_prob_sum * log_prob_sum``, summed; the last is made of ``class_sum``."""
        of_loss = self._of_loss(c)
        self.launch(
            self.signature,
            loss_kernel,
            (1,),
            stats.lse, stats.log_prob, None if c.log_prob_sum is None else stats.class_sum, self.index, *of_loss,
            self.rows, self.vocab, self.index.shape[1],
            BLOCK=min(4096, max(256, tiles.next_power_of_2(self.rows))), num_warps=16,
        )  # fmt: skip
        return of_loss.loss

    def _of_loss(self, c: Coefficients) -> OfLoss:
        return OfLoss(None if c.log_prob_sum is None else self.total_weight, *c, self.empty())
