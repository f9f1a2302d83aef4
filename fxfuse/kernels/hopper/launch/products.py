"""Launches that make gradients of the operands from those of the logits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ... import tiles
from .. import products
from ..rows import put_kernel, take_kernel
from .operands import Classes, Described, Rows, Sum, describe, kernel_for, pingpong, rows_at_a_time


class Products(Described):
    def input_sum(self, out: Tensor, terms: int, most: int) -> Sum:
        """d_input ``[N, D]``, to be added up of so many products for each chunk of at most ``most`` rows.

        If the sum is ``in_pieces``, ``add_listed_input`` adds to it, and ``unlist`` ends it; otherwise ``add_input``.
        """
        return self._sum(out, terms, tiles.of_input_sums(self.input, most))

    def weight_sum(self, out: Tensor, terms: int) -> Sum:
        """d_weight, or each of its windows if ``out [W, D]`` is the largest, to be added up of so many products."""
        return self._sum(out, terms, self._tile_of_weight_sums())

    def _tile_of_weight_sums(self) -> tiles.Tile | None:
        tile = tiles.described("d_weight", self.input)
        return tile if tile.takes_turns else None

    def _sum(self, out: Tensor, terms: int, tile: tiles.Tile | None) -> Sum:
        """A sum that is ``in_pieces`` if it is to be added to in such tiles."""
        if terms == 1 or out.element_size() != 2 or out.numel() == 0:
            return Sum(out, None)
        return Sum(out, self.empty(*self._low_shape(out.shape[0], tile), dtype=torch.int8))

    def _low_shape(self, rows: int, tile: tiles.Tile | None) -> tuple[int, ...]:
        """The shape of a sum's further bits, a byte each."""
        if tile is None:
            return rows, self.hidden
        piece, blocks = tiles.PIECE, tiles.cdiv(rows, tile.rows)
        return blocks * (tile.rows // piece), tiles.cdiv(self.hidden, piece), piece, piece

    def low_of_input(self, most: int) -> int:
        """Bytes of the further bits of ``input_sum``."""
        return math.prod(self._low_shape(self.rows, tiles.of_input_sums(self.input, most)))

    def low_of_weight(self, classes: int) -> int:
        """Bytes of those of ``weight_sum`` for so many classes."""
        return math.prod(self._low_shape(classes, self._tile_of_weight_sums()))

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
        ``[N]`` a row and a row ``[D]``, and the weights of indexed classes times ``own [N, K]``, for K of 0 or 1.
        """
        g_class_sum, class_row = (None, None) if rank_one is None else rank_one
        tile = tiles.described("d_input", self.input)
        weight = self.weight[window]
        programs = self.programs * tile.slots
        signature = self.signature, weight.shape[0], total.out.dtype
        common = (
            parts,
            factor,
            undo,
            g_class_sum,
            class_row,
            own if own is not None and own.shape[1] else None,
            self.index,
            self.weight,
            rows.order,
            rows.length,
            chunk,
            rows.most,
            weight.shape[0],
            self.hidden,
            *self.weight.stride(),
            total.out.stride(0),
            programs,
            int(first),
            int(last),
        )
        options = self.launch_options(tile, flatten=False)
        self.launch(
            signature,
            kernel_for(products.d_input_kernel, tile),
            (programs,),
            describe(dz, tile, rows_at_a_time(tile), tile.hidden),
            self.described_weight(weight, tile, tile.hidden, tile.vocab),
            *total,
            *common,
            *self.counter(tile),
            TRANSPOSED=self.transposed,
            **options,
        )
        sizes = {"BM": tile.rows, "BN": tile.vocab, "BK": tile.hidden, "GROUP": tile.group, "ROWS": self.row_block}
        strips = (programs, tile.rows // 8)
        self.launch(signature, products.d_input_rest_kernel, strips, parts, *total, *common[1:], **sizes, STRIP=8)

    def add_listed_input(
        self, rows: Rows, chunk: int, window: slice, dz: Tensor, total: Sum, term: int, terms: int, undo: Tensor | None
    ) -> None:
        """Add ``dz @ weight[window]``, times ``undo [1]``, to the chunk's rows of d_input, in the order of the list."""
        tile = tiles.of_input_sums(self.input, rows.most)
        assert tile is not None
        weight = self.weight[window]
        programs = min(self.programs, tiles.cdiv(rows.most, tile.rows) * tiles.cdiv(self.hidden, tile.vocab))
        self.launch(
            (self.signature, weight.shape[0], total.out.dtype),
            pingpong().input_sums_together_kernel,
            (programs,),
            describe(dz, tile, rows_at_a_time(tile), tile.hidden),
            self.described_weight(weight, tile, tile.hidden, tile.vocab),
            describe(total.out, tile, tiles.PIECE, tiles.PIECE),
            total.low,
            undo,
            rows.length,
            chunk,
            rows.most,
            weight.shape[0],
            self.hidden,
            programs,
            term,
            terms - 1,
            *self.counter(tile),
            TRANSPOSED=self.transposed,
            **self.launch_options(tile),
        )

    def unlist(self, rows: Rows, d_input: Tensor, taken: Tensor) -> None:
        """Move the rows of ``d_input [N, D]`` from the order of the list to where they are from; zeros elsewhere.

        ``taken [most, D]`` loses what it held. The list is ascending, so rows move towards the end if at all: the last
        ones go first, and nothing is written over that has not been read.
        """
        for first in reversed(range(0, self.rows, rows.most)):
            for kernel in (take_kernel, put_kernel):
                self.launch(
                    (self.signature, d_input.dtype),
                    kernel,
                    (tiles.cdiv(rows.most, 16),),
                    d_input,
                    taken,
                    rows.order,
                    rows.length,
                    first,
                    rows.most,
                    self.rows,
                    self.hidden,
                    BLOCK_ROWS=16,
                    BLOCK=min(tiles.next_power_of_2(self.hidden), 512),
                    num_warps=8,
                )

    def bias_parts(self, d_weight: Tensor, need_weight: bool) -> Tensor:
        """Zeros ``[parts, V]`` float32, to be added to: d_bias is the sum of the parts."""
        tile = self._tile_of_weight(d_weight)
        beside = need_weight and tile.takes_turns
        return self.empty(tiles.cdiv(self.hidden, tile.vocab) if beside else 1, self.vocab).zero_()

    def _tile_of_weight(self, d_weight: Tensor) -> tiles.Tile:
        # Kernels that take turns add to sums in 16 bits and more, those of float16 operands are float32.
        return tiles.described("d_weight", self.input, turns=d_weight.element_size() == 2)

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
        after the first chunk's product and before those of others. To ``d_bias``, see ``bias_parts``, are added the
        column sums of ``factor[:, None] * dz``, times ``undo``.
        """
        tile = self._tile_of_weight(total.out)
        height = total.out.shape[0]
        programs = min(self.programs * tile.slots, tiles.cdiv(height, tile.rows) * tiles.cdiv(self.hidden, tile.vocab))
        sums: tuple[Any, ...] = tuple(total)
        if tile.takes_turns:
            sums = describe(total.out, tile, tiles.PIECE, tiles.PIECE), total.low
            beside: tuple[Any, ...] = (None, None, 0)
            if d_bias is not None:
                factors = describe(self._factors(rows, chunk, factor), tile, tile.hidden, tiles.NARROW)
                beside = factors, d_bias[:, window], d_bias.stride(0)
            sums += beside
        elif d_bias is not None:
            self.add_bias(rows, chunk, window, dz, d_bias[0], factor, undo)
        self.launch(
            (self.signature, height, total.out.dtype),
            kernel_for(products.d_weight_kernel, tile),
            (programs,),
            describe(dz, tile, tile.hidden, tile.rows // 2 if tile.together else tile.rows),
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
            *self.counter(tile),
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
        factor: Tensor | None,
        undo: Tensor | None,
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
