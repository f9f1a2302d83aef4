"""Launches for row statistics, and for a loss of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ....ops.contract import Upstream
from ... import launcher, tiles
from ..rows import loss_kernel
from ..stats import merge_kernel, stats_kernel
from .lists import Lists, list_block
from .operands import Listed, Rows, Stats, describe, kernel_for

# What the gathered rows of a chunk of statistics may take.
STATS_BYTES = 12 << 20


class Statistics(Lists):
    def stats_chunk(self) -> int:
        """Rows in a chunk of statistics: as many as fit the bytes, in a number of blocks that divides the programs."""
        tile = tiles.described("stats", self.input)
        programs = self.programs * tile.slots
        blocks = max(1, STATS_BYTES // (self.hidden * self.input.element_size() * tile.rows))
        needed = tiles.cdiv(self.rows, tile.rows)
        even = next(b for b in range(min(blocks, programs), 0, -1) if programs % b == 0)
        return self.whole_blocks(min(even, needed) * tile.rows)

    def stats(self, listed: Listed, out: Stats) -> None:
        """The statistics of the listed rows."""
        rows = self.cut(listed, self.stats_chunk())
        self.pick(listed, out.picked)
        gathered = self.empty(rows.most, self.hidden, dtype=self.input.dtype)
        for chunk in range(rows.chunks):
            self.gather(rows, chunk, gathered)
            self.stats_of(rows, chunk, gathered, out)

    def stats_of(self, rows: Rows, chunk: int, gathered: Tensor, out: Stats) -> None:
        tile = tiles.described("stats", self.input)
        most = rows.most
        programs = max(self.programs * tile.slots, most // tile.rows)
        each = 2 if tile.takes_turns else 1  # parts that a program makes
        optional = class_sum, entropy, top = [t if t.numel() else None for t in (out.class_sum, out.entropy, out.top)]
        parts = iter(self.empty(2 + 3 - optional.count(None), programs * each * tile.rows))
        part_max, part_sum = next(parts), next(parts)
        part_class_sum, part_moment, part_argmax = (None if t is None else next(parts) for t in optional)
        options = self.launch_options(tile)
        del options["GROUP"]
        launcher.launch(
            self.signature,
            kernel_for(stats_kernel, tile),
            (programs,),
            describe(gathered, tile, tile.rows, tile.hidden),
            self.described_weight(self.weight, tile, tile.vocab, tile.hidden),
            self.bias,
            rows.length,
            self.class_weight,
            part_max,
            part_sum,
            part_class_sum,
            part_moment,
            None if part_argmax is None else part_argmax.view(torch.int32),
            self.scale,
            chunk,
            most,
            self.vocab,
            self.hidden,
            programs,
            **self.logits_options(),
            EVEN_VOCAB=self.vocab % tile.vocab == 0,
            **options,
        )
        launcher.launch(
            self.signature,
            merge_kernel,
            (tiles.cdiv(most, 16),),
            part_max,
            part_sum,
            part_class_sum,
            part_moment,
            None if part_argmax is None else part_argmax.view(torch.int32),
            self.index,
            rows.order,
            rows.length,
            out.lse,
            out.residual,
            out.picked,
            out.log_prob,
            class_sum,
            entropy,
            top,
            None if top is None else out.argmax,
            chunk,
            most,
            self.vocab,
            self.index.shape[1],
            programs,
            PARTS=each,
            BM=tile.rows,
            BLOCK_LANES=64,
            BLOCK_ROWS=16,
            ROWS=self.row_block,
        )

    def loss(self, stats: Stats, c: Upstream) -> Tensor:
        """``c.lse * lse + c.picked * log_prob + c.class_sum * class_sum``, summed."""
        loss = self.empty()
        class_sum = None if c.class_sum is None else stats.class_sum
        launcher.launch(
            self.signature,
            loss_kernel,
            (1,),
            stats.lse, stats.log_prob, class_sum, self.index, c.lse, c.picked, c.class_sum, loss, self.rows,
            self.index.shape[1], BLOCK=list_block(self.rows), num_warps=16,
        )  # fmt: skip
        return loss
