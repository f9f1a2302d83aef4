"""Launches for the gradient of the logits: scaled exponentials, or made anew from statistics."""

from __future__ import annotations

from torch import Tensor

from ....ops.contract import Upstream
from ... import tiles
from ..dlogits import correct_kernel, dlogits_kernel, scattered_dlogits_kernel
from ..exponentials import add_class_sums_kernel, exponentials_kernel, finish_kernel
from .operands import Bad, Listed, Rows, Stats, describe, describe_stored, kernel_for, rows_at_a_time
from .statistics import Statistics


class GradientsOfLogits(Statistics):
    def exponentials_of(
        self,
        rows: Rows,
        chunk: int,
        gathered: Tensor,
        offset: Tensor,
        e: Tensor,
        scratch: Tensor,
        up: Upstream,
        out: Stats,
        slope: Tensor | None,
        factor: Tensor,
        own: Tensor,
        bad: Bad,
        with_class_sums: bool,
    ) -> None:
        """Write exponentials to ``e`` and statistics to ``out``, and scale ``gathered`` by ``factor``.

        After it ``factor[:, None] * e`` is the gradient of the chunk's logits but for that of indexed logits, which is
        in ``own [N, K]`` instead, and, unless ``with_class_sums``, for what class sums give; nor are these made then.
        There is one index a row, or none.
        """
        index = self.index if self.index.shape[1] else None
        tile = tiles.described("exponentials", self.input)
        columns = tiles.cdiv(self.vocab, tile.vocab)
        programs = min(self.programs * tile.slots, rows.most // tile.rows * columns)
        part_class_sum = self.scratch(columns, rows.most) if with_class_sums else None
        self.launch(
            self.signature,
            kernel_for(exponentials_kernel, tile),
            (programs,),
            describe(gathered, tile, rows_at_a_time(tile), tile.hidden),
            self.described_weight(self.weight, tile, tile.vocab, tile.hidden),
            describe_stored(e, tile),
            self.bias,
            offset,
            rows.length,
            self.class_weight,
            scratch,
            part_class_sum,
            self.scale,
            chunk,
            rows.most,
            self.vocab,
            self.hidden,
            programs,
            *self.counter(tile),
            **self.logits_options(),
            EVEN_VOCAB=self.vocab % tile.vocab == 0,
            **self.launch_options(tile),
        )
        self.launch(
            self.signature,
            finish_kernel,
            (tiles.cdiv(rows.most, 8),),
            scratch,
            part_class_sum,
            offset,
            index,
            rows.order,
            rows.length,
            up.lse,
            up.picked,
            up.class_sum if with_class_sums else None,
            out.picked,
            slope,
            e,
            own,
            gathered,
            factor,
            out.lse,
            out.log_prob,
            out.class_sum if with_class_sums else None,
            bad.order,
            bad.lengths[chunk],
            bad.row,
            bad.gathered,
            self.scale,
            chunk,
            rows.most,
            self.vocab,
            self.hidden,
            columns,
            e.stride(0),
            BLOCK_TILES=512,
            BLOCK_ROWS=8,
            BLOCK_HIDDEN=1024,
            ROWS=self.row_block,
            num_warps=8,
        )
        # Where there are no bad rows, these launches find that out.
        again = Listed(bad.order, bad.lengths[chunk])
        # Class sums do not depend on offsets.
        statistics = out._replace(class_sum=self.empty(0))
        self.stats_of(self.stats_span(again, rows.most, statistics), bad.gathered, statistics)
        tile = tiles.described("dlogits", self.input, turns=False)
        self.launch(
            self.signature,
            scattered_dlogits_kernel,
            (self.programs,),
            describe(bad.gathered, tile, tile.rows, tile.hidden),
            self.described_weight(self.weight, tile, tile.vocab, tile.hidden),
            e,
            bad.row,
            self.bias,
            index,
            again.order,
            again.length,
            out.lse,
            out.residual,
            up.lse,
            up.picked,
            self.scale,
            rows.most,
            self.vocab,
            self.hidden,
            e.stride(0),
            self.programs,
            **self.logits_options(),
            **self.launch_options(tile, flatten=False),
        )
        if with_class_sums:
            self.launch(
                self.signature,
                add_class_sums_kernel,
                (tiles.cdiv(self.vocab, 1024), tiles.cdiv(rows.most, 16)),
                e,
                factor,
                up.lse,
                up.class_sum,
                self.class_weight,
                rows.order,
                rows.length,
                self.scale,
                chunk,
                rows.most,
                self.vocab,
                e.stride(0),
                BLOCK_ROWS=16,
                BLOCK=1024,
                ROWS=self.row_block,
                num_warps=8,
            )

    def dlogits_of(
        self,
        rows: Rows,
        chunk: int,
        window: slice,
        gathered: Tensor,
        dz: Tensor,
        stats: Stats,
        slope: Tensor | None,
        up: Upstream,
        normalise: Tensor | None,
    ) -> None:
        """Write the gradient of the logits of a chunk and a window, times ``normalise [1]``, to ``dz``."""
        tile = tiles.described("dlogits", self.input)
        weight = self.weight[window]
        class_weight = None if self.class_weight is None else self.class_weight[window]
        programs = min(self.programs * tile.slots, rows.most // tile.rows * tiles.cdiv(weight.shape[0], tile.vocab))
        self.launch(
            (self.signature, weight.shape[0]),
            kernel_for(dlogits_kernel, tile),
            (programs,),
            describe(gathered, tile, tile.rows, tile.hidden),
            self.described_weight(weight, tile, tile.vocab, tile.hidden),
            describe_stored(dz, tile),
            None if self.bias is None else self.bias[window],
            rows.order,
            rows.length,
            class_weight,
            stats.lse,
            stats.residual,
            up.lse,
            up.class_sum,
            up.entropy,
            stats.entropy if up.entropy is not None else None,
            normalise,
            self.scale,
            chunk,
            rows.most,
            weight.shape[0],
            self.hidden,
            programs,
            **self.logits_options(),
            **self.launch_options(tile),
        )
        if self.index.shape[1] > 0:
            self.launch(
                (self.signature, weight.shape[0]),
                correct_kernel,
                (tiles.cdiv(rows.most, 128),),
                dz,
                self.index,
                rows.order,
                rows.length,
                class_weight,
                stats.picked,
                slope,
                stats.lse,
                stats.residual,
                up.lse,
                up.picked,
                up.class_sum,
                up.entropy,
                stats.entropy if up.entropy is not None else None,
                normalise,
                self.scale,
                chunk,
                rows.most,
                weight.shape[0],
                self.index.shape[1],
                window.start,
                dz.stride(0),
                BLOCK=128,
                ROWS=self.row_block,
            )
