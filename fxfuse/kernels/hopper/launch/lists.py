"""Launches that list rows, gather them and pick their indexed logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ....ops.contract import Coefficients, Upstream
from ... import tiles
from ..rows import gather_kernel, list_flagged_kernel, list_kernel, pick_kernel
from .operands import Described, Listed, Rows, Span

# Rows that a program lists, and rows before them that it counts at a time.
LISTED, COUNTED = 1024, 4096


class Lists(Described):
    def listed(self, up: Upstream) -> Listed:
        """The rows that have upstream gradients."""
        return self._list(*up)

    def listed_by_coefficients(self, c: Coefficients) -> tuple[Listed, Upstream]:
        """The same for coefficients, and the upstream gradients that they make."""
        up = Upstream(self.empty(self.rows), torch.empty_like(c.log_prob), c.log_prob_sum)
        return self._list(None, *c, made=up), up

    def _list(
        self,
        lse: Tensor | None,
        picked: Tensor,
        class_sum: Tensor | None,
        entropy: Tensor | None = None,
        *,
        made: Upstream | None = None,
    ) -> Listed:
        listed = Listed(self.empty(self.rows, dtype=torch.int32), self.empty(1, dtype=torch.int32))
        g_lse, g_picked = (None, None) if made is None else made[:2]
        total = None if made is None or class_sum is None else self.total_weight
        self.launch(
            self.signature,
            list_kernel,
            (tiles.cdiv(self.rows, LISTED),),
            lse, picked, class_sum, entropy, self.index, total, g_lse, g_picked, *listed,
            self.rows, self.vocab, self.index.shape[1], BLOCK=LISTED, WIDE=COUNTED, num_warps=16,
        )  # fmt: skip
        return listed

    def listed_by_flags(self, flags: Tensor) -> Listed:
        """The rows whose flag (``[N]`` int8) is set."""
        listed = Listed(self.empty(self.rows, dtype=torch.int32), self.empty(1, dtype=torch.int32))
        self.launch(
            self.signature,
            list_flagged_kernel,
            (tiles.cdiv(self.rows, LISTED),),
            flags,
            *listed,
            self.rows,
            BLOCK=LISTED,
            WIDE=COUNTED,
            num_warps=16,
        )
        return listed

    def gather(
        self,
        rows: Rows | Span,
        chunk: int,
        gathered: Tensor,
        picked: Tensor | None = None,
        offset: Tensor | None = None,
        row_sum: Tensor | None = None,
        bias_sum: Tensor | None = None,
        class_sum: Tensor | None = None,
    ) -> None:
        """Copy a chunk's rows of the input to ``gathered``; their offsets and class sums, where these are given.

        A span is one chunk, 0.
        """
        at, block = (rows.first, rows.tile.rows) if isinstance(rows, Span) else (chunk, self.row_block)
        self.launch(
            self.signature,
            gather_kernel,
            (tiles.cdiv(rows.most, block) * block,),
            self.input,
            self.index,
            picked,
            rows.order,
            rows.length,
            gathered,
            offset,
            row_sum,
            bias_sum,
            class_sum if row_sum is not None else None,
            self.scale,
            at,
            rows.most,
            self.vocab,
            self.hidden,
            self.index.shape[1],
            *self.input.stride(),
            BLOCK=min(tiles.next_power_of_2(self.hidden), 4096),
            ROWS=block,
            SPAN=isinstance(rows, Span),
            num_warps=4,
        )

    def pick(self, listed: Listed, picked: Tensor, slope: Tensor | None = None) -> None:
        """The logits at ``index`` of the listed rows; and if wanted the derivative of the transform there."""
        indexed = self.index.shape[1]
        if indexed == 0:
            return
        tile = tiles.picks(self.input, self.weight)
        self.launch(
            self.signature,
            pick_kernel,
            (tiles.cdiv(self.rows, tile.rows), indexed),
            self.input,
            self.weight,
            self.bias,
            self.index,
            *listed,
            picked,
            slope,
            self.scale,
            self.vocab,
            self.hidden,
            indexed,
            self.rows,
            *self.input.stride(),
            *self.weight.stride(),
            tile.hidden * self.input.stride(1),
            tile.hidden * self.weight.stride(1),
            **self.pointwise_options(),
            BM=tile.rows,
            BK=tile.hidden,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
