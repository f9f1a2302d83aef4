"""Launches that order the classes of a call's rows, and finish what these give to d_weight."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import tiles
from .. import classes as kernels
from .operands import Classes, Described, Rows, Sum

# Rows of a chunk up to which each is compared with all: 5504 rows of 16384 take 37 us so, and 58 if they are sorted.
MOST_RANKED = 8192


class OrderedClasses(Described):
    def classes(self, rows: Rows) -> Classes:
        """The classes of the listed rows, sorted by chunk and class; those of the first chunk have their slots."""
        dtype = torch.int32 if rows.chunks * (self.vocab + 1) < 2**31 else torch.int64
        keys = self.empty(self.rows, dtype=dtype)
        self.launch(
            (self.signature, dtype), kernels.keys_kernel, (tiles.cdiv(self.rows, 256),), self.index, rows.order,
            rows.length, keys, self.rows, rows.most, self.vocab, LARGEST=torch.iinfo(dtype).max, BLOCK=256,
            ROWS=self.row_block,
        )  # fmt: skip
        if rows.most <= MOST_RANKED:
            ranked, sources = torch.empty_like(keys), torch.empty_like(rows.order)
            self.launch(
                (self.signature, dtype), kernels.ranks_kernel, (tiles.cdiv(self.rows, 16),), keys, rows.order,
                rows.length, ranked, sources, rows.most, BLOCK=16, WIDE=256, ROWS=self.row_block,
            )  # fmt: skip
        else:
            ranked, position = keys.sort(stable=True)
            sources = rows.order.index_select(0, position)
        slots = torch.full((self.vocab,), -1, dtype=torch.int32, device=self.input.device)
        self.launch(
            (self.signature, dtype), kernels.slots_kernel, (tiles.cdiv(rows.most, 256),), ranked, rows.length, slots,
            rows.most, self.vocab, BLOCK=256, ROWS=self.row_block,
        )  # fmt: skip
        return Classes(ranked, sources, self.empty(rows.most, self.hidden), slots)

    def finish_classes(
        self, rows: Rows, chunk: int, own: Tensor, classes: Classes, total: Sum | None, d_bias: Tensor | None
    ) -> None:
        """Add what gradients ``own [N, 1]`` of indexed logits give to d_weight and d_bias.

        After the first chunk's product, and before those of later chunks. They are the large entries, and where a model
        is sure of them they nearly cancel the rest: what is added up is rounded to the gradient's dtype after that.
        """
        block = min(1024, tiles.next_power_of_2(self.hidden))
        out, low = (None, None) if total is None else total
        self.launch(
            (self.signature, classes.keys.dtype, None if out is None else out.dtype),
            kernels.own_classes_kernel,
            (rows.most, tiles.cdiv(self.hidden, block)),
            classes.keys,
            classes.sources,
            rows.length,
            own,
            self.input,
            classes.rows,
            out,
            low,
            d_bias,
            chunk,
            rows.most,
            self.vocab,
            self.hidden,
            *self.input.stride(),
            IN_PIECES=total is not None and total.in_pieces,
            BLOCK_ENTRIES=4,
            BLOCK=block,
            ROWS=self.row_block,
        )
