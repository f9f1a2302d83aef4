"""Launches that make gradients of the operands from those of the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import tiles
from .. import products
from .operands import Classes, Described, Rows, Sum, describe, kernel_for, rows_of_warpgroup


class Products(Described):
    def input_sum(self, out: Tensor, terms: int) -> Sum:
        """d_input ``[N, D]``, to be added up of so many products."""
        return Sum(out, torch.empty_like(out, dtype=torch.int8) if _is_split(out, terms) else None)

    def weight_sum(self, out: Tensor, terms: int) -> Sum:
        """The same for d_weight, or for each of its windows if ``out [W, D]`` is the largest."""
        if not _is_split(out, terms):
            return Sum(out, None)
        tile = tiles.described("d_weight", self.input)
        if not tile.takes_turns:
            return self.input_sum(out, terms)
        piece, blocks = tiles.PIECE, tiles.cdiv(out.shape[0], tile.rows)
        pieces = blocks * (tile.rows // piece), tiles.cdiv(self.hidden, piece)
        return Sum(out, self.empty(*pieces, piece, piece, dtype=torch.int8))

    def add_input(
        self,
        rows: Rows,
        chunk: int,
        window: slice,
        dz: Tensor,
        total: Sum,
        parts: Tensor,
        first: bool,
        last: bool,
        factor: Tensor | None = None,
        undo: Tensor | None = None,
        rank_one: tuple[Tensor, Tensor] | None = None,
        own: Tensor | None = None,
    ) -> None:
        """Add ``dz @ weight[window]`` to the rows of d_input that the chunk's rows came from.

        The product's rows are multiplied by ``factor [most]`` and ``undo [1]``. Then are added ``rank_one``, a factor
        ``[N]`` a row and a row ``[D]``, and the weights of indexed classes times ``own [N, K]``.
        """
        g_class_sum, class_row = (None, None) if rank_one is None else rank_one
        tile = tiles.described("d_input", self.input)
        weight = self.weight[window]
        programs = self.programs * tile.slots
        signature = self.signature, weight.shape[0], total.out.dtype
        if self.transposed:
            w = describe(weight.t(), tile, tile.vocab, tile.hidden)
        else:
            w = describe(weight, tile, tile.hidden, tile.vocab)
        common = (
            parts,
            factor,
            undo,
            g_class_sum,
            class_row,
            own,
            self.index,
            self.weight,
            rows.order,
            rows.length,
            chunk,
            rows.most,
            weight.shape[0],
            self.hidden,
            self.index.shape[1],
            *self.weight.stride(),
            total.out.stride(0),
            programs,
            int(first),
            int(last),
        )
        options = self.launch_options(tile, flatten=False)
        self.launch(
            signature,
            products.d_input_kernel,
            (programs,),
            describe(dz, tile, tile.rows, tile.hidden),
            w,
            *total,
            *common,
            TRANSPOSED=self.transposed,
            **options,
        )
        sizes = {name: options[name] for name in ("BM", "BN", "BK", "GROUP", "ROWS")}
        strips = (programs, tile.rows // 8)
        self.launch(signature, products.d_input_rest_kernel, strips, parts, *total, *common[1:], **sizes, STRIP=8)

    def add_weight(
        self,
        rows: Rows,
        chunk: int,
        window: slice,
        dz: Tensor,
        x: Tensor,
        total: Sum,
        undo: Tensor | None = None,
        class_row: Tensor | None = None,
        classes: Classes | None = None,
        d_bias: Tensor | None = None,
        factor: Tensor | None = None,
    ) -> None:
        """Add ``dz.T @ x`` to ``total``, the rows ``window`` of d_weight; the first chunk's sum begins there.

        ``class_row [D]`` times the class weights is added once. What ``classes`` give is added by ``finish_classes``,
        after the first chunk's product and before those of others. ``d_bias`` is added to as by ``add_bias``, with
        ``factor``.
        """
        # Kernels that take turns add to sums in 16 bits and more, those of float16 operands are float32.
        tile = tiles.described("d_weight", self.input, turns=total.out.element_size() == 2)
        height = total.out.shape[0]
        programs = min(self.programs * tile.slots, tiles.cdiv(height, tile.rows) * tiles.cdiv(self.hidden, tile.vocab))
        sums: tuple[Any, ...] = tuple(total)
        if tile.takes_turns:
            sums = describe(total.out, tile, tiles.PIECE, tiles.PIECE), total.low
            beside: tuple[Any, ...] = (None, None)
            if d_bias is not None:
                beside = describe(self._factors(rows, chunk, factor), tile, tile.hidden, tiles.NARROW), d_bias[window]
            sums += beside
        elif d_bias is not None:
            self.add_bias(rows, chunk, window, dz, d_bias, factor, undo)
        self.launch(
            (self.signature, height, total.out.dtype),
            kernel_for(products.d_weight_kernel, tile),
            (programs,),
            describe(dz, tile, tile.hidden, rows_of_warpgroup(tile)),
            describe(x, tile, tile.hidden, tile.vocab),
            *sums,
            undo,
            None if self.class_weight is None else self.class_weight[window],
            class_row,
            None if classes is None else classes.rows,
            None if classes is None else classes.slots,
            rows.length,
            chunk,
            rows.most,
            height,
            self.hidden,
            programs,
            **self.launch_options(tile),
        )

    def _factors(self, rows: Rows, chunk: int, factor: Tensor | None) -> Tensor:
        """``factor [most]``, or ones, as an operand ``[most, tiles.NARROW]`` of a product."""
        parts = self.scratch(rows.most, tiles.NARROW, dtype=self.input.dtype)
        self.launch(
            self.signature,
            products.factors_kernel,
            (tiles.cdiv(rows.most, 128),),
            factor,
            parts,
            rows.length,
            chunk,
            rows.most,
            BLOCK=128,
            WIDTH=tiles.NARROW,
            ROWS=self.row_block,
        )
        return parts

    def add_bias(
        self,
        rows: Rows,
        chunk: int,
        window: slice,
        dz: Tensor,
        out: Tensor,
        factor: Tensor | None = None,
        undo: Tensor | None = None,
    ) -> None:
        """Add the column sums of ``factor[:, None] * dz``, times ``undo [1]``, to the classes ``window`` of d_bias."""
        out = out[window]
        self.launch(
            (self.signature, out.shape[0]),
            products.d_bias_kernel,
            (tiles.cdiv(out.shape[0], 128),),
            dz,
            factor,
            undo,
            out,
            rows.length,
            chunk,
            rows.most,
            out.shape[0],
            dz.stride(0),
            BLOCK_ROWS=64,
            BLOCK=128,
            ROWS=self.row_block,
            num_warps=4,
        )


def _is_split(out: Tensor, terms: int) -> bool:
    return terms > 1 and out.element_size() == 2 and out.numel() > 0
