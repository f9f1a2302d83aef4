"""The launches of these kernels for the operands of one call.

``input [N, D]`` may have any strides. ``weight [V, D]`` is one that ``takes`` accepts. The rest is contiguous and on 16
bytes: ``bias [V]`` or None, ``index [N, K]`` int64, ``class_weight [V]`` float32 or None.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...ops.contract import Upstream
from .. import tiles
from ..launcher import launch
from . import products
from .dlogits import correct_kernel, dlogits_kernel, scattered_dlogits_kernel
from .exponentials import exponentials_kernel, finish_kernel
from .rows import gather_kernel, list_flagged_kernel, list_kernel, loss_kernel, pick_kernel
from .stats import merge_kernel, stats_kernel

# What the gathered rows of a chunk of statistics may take.
STATS_BYTES = 12 << 20


class Listed(NamedTuple):
    """A list of rows, in device memory: ``order [N]`` int32 and its ``length [1]`` int32."""

    order: Tensor
    length: Tensor


class Rows(NamedTuple):
    """A list of rows cut into chunks, evenly, of ``most`` rows at most: so many chunks that all N rows would fit."""

    order: Tensor
    length: Tensor
    most: int  # a multiple of the row block
    chunks: int


@dataclasses.dataclass
class Stats:
    """The statistics of the contract, which kernels fill in row by row."""

    lse: Tensor
    residual: Tensor
    picked: Tensor
    log_prob: Tensor
    class_sum: Tensor


class Bad(NamedTuple):
    """The rows of a chunk whose offset proved bad."""

    order: Tensor  # [most] int32: as rows of N
    length: Tensor  # [chunks, 4] int32: how many, in column 0; the rest is there for alignment
    row: Tensor  # [most] int32: as rows of the chunk
    gathered: Tensor  # [most, D]


class Classes(NamedTuple):
    """The classes that the listed rows are indexed with, whose sums for d_weight are finished apart."""

    keys: Tensor  # [N] int32 or int64: chunk and class of the listed rows, sorted
    position: Tensor  # [N] int64: where in the list each is
    rows: Tensor  # [most, D] float32: sums of a chunk's classes
    slots: Tensor  # [V] int32: chunk * most + row


class Sum(NamedTuple):
    """A gradient while it is added up; ``low`` holds further bits of its sums, see ``products``."""

    out: Tensor
    low: Tensor | None


@dataclasses.dataclass(frozen=True)
class Call:
    """The operands of one call, and the launches on them."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    index: Tensor
    class_weight: Tensor | None
    scale: float
    transform: str

    @functools.cached_property
    def signature(self) -> tuple[object, ...]:
        """What the choice of compiled kernels depends on, but for windows, gradients, and arguments that are None."""
        return (
            self.input.device,
            *((t.dtype, t.shape, t.stride(), t.data_ptr() % 16 == 0) for t in (self.input, self.weight)),
            *(None if t is None else t.dtype for t in (self.bias, self.class_weight)),
            self.scale != 1.0,
            self.transform,
            tiles.dot_precision(self.input.dtype),
        )

    def slopes(self) -> Tensor | None:
        """Where to put the derivative of the transform at the indexed logits."""
        return torch.zeros(self.index.shape, dtype=torch.float32, device=self.input.device) if self.transform else None

    # --- sizes ------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        return self.input.shape[0]

    @property
    def hidden(self) -> int:
        return self.input.shape[1]

    @property
    def vocab(self) -> int:
        return self.weight.shape[0]

    @property
    def programs(self) -> int:
        return tiles.machine(self.input.device).processors

    @property
    def row_block(self) -> int:
        return tiles.row_block(self.input.device)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.input.device)

    def whole_blocks(self, rows: int) -> int:
        return max(1, -(-rows // self.row_block)) * self.row_block

    def windows(self, most: int) -> list[slice]:
        """The vocabulary in windows of at most ``most`` classes, such as keep all programs busy."""
        tile = tiles.described("d_weight", self.input)
        columns = triton.cdiv(self.hidden, tile.vocab)
        each = tiles.window(self.vocab, most, columns, tile.rows, self.programs * tile.slots)
        return [slice(at, min(at + each, self.vocab)) for at in range(0, self.vocab, each)]

    def no_stats(self, want_class_sum: bool, together: bool = False) -> Stats:
        """Zeros, which is what rows that are not listed have; ``together`` in one allocation."""
        shapes = [(self.rows,), (self.rows,), self.index.shape, self.index.shape, (self.rows if want_class_sum else 0,)]
        if not together:
            return Stats(*(torch.zeros(shape, dtype=torch.float32, device=self.input.device) for shape in shapes))
        sizes = [-(-math.prod(shape) // 64) * 64 for shape in shapes]
        parts = torch.zeros(sum(sizes), dtype=torch.float32, device=self.input.device).split(sizes)
        return Stats(*(p[: math.prod(shape)].view(shape) for p, shape in zip(parts, shapes, strict=True)))

    def no_bad(self, rows: Rows, gathered: Tensor) -> Bad:
        return Bad(
            self.empty(rows.most, dtype=torch.int32),
            torch.zeros((rows.chunks, 4), dtype=torch.int32, device=self.input.device),
            self.empty(rows.most, dtype=torch.int32),
            gathered,
        )

    def exponentials_buffer(self, rows: int, classes: int) -> Tensor:
        """``[rows, classes]`` whose rows begin on whole vectors."""
        return self.empty(rows, tiles.padded(classes), dtype=self.input.dtype)[:, :classes]

    def sums_size(self, most: int) -> int:
        """Numbers that ``exponentials_of`` needs beside its results."""
        return -(-self.vocab // tiles.described("exponentials", self.input).vocab) * most

    def parts_size(self) -> int:
        """Numbers that ``add_input`` needs beside its results."""
        tile = tiles.described("d_input", self.input)
        return self.programs * tile.slots * tile.rows * tile.vocab

    def parts(self) -> Tensor:
        return self.empty(self.parts_size())

    def cut(self, listed: Listed, most: int) -> Rows:
        """The listed rows in chunks of at most ``most``."""
        chunks = max(1, -(-self.rows // most))
        return Rows(*listed, self.whole_blocks(-(-self.rows // chunks)), chunks)

    # --- lists of rows ----------------------------------------------------------------------------------------

    def listed(self, up: Upstream) -> Listed:
        """The rows that have upstream gradients."""
        return self._list(up, None)

    def listed_by_coefficients(self, c: Upstream) -> tuple[Listed, Upstream]:
        """The same for coefficients of lse, log_prob and class_sum, and the upstream gradients that they make."""
        up = Upstream(torch.empty_like(c.lse), torch.empty_like(c.picked), c.class_sum)
        return self._list(c, up), up

    def _list(self, given: Upstream, made: Upstream | None) -> Listed:
        # Zeros past the end of the list: it may be an op's result, which should be the same every time.
        order = torch.zeros(self.rows, dtype=torch.int32, device=self.input.device)
        listed = Listed(order, self.empty(1, dtype=torch.int32))
        made = Upstream(None, None, None) if made is None else made  # type: ignore[arg-type]
        launch(
            self.signature,
            list_kernel,
            (1,),
            given.lse, given.picked, given.class_sum, self.index, made.lse, made.picked, *listed,
            self.rows, self.index.shape[1], BLOCK=_list_block(self.rows), num_warps=16,
        )  # fmt: skip
        return listed

    def listed_by_flags(self, flags: Tensor) -> Listed:
        """The rows whose flag (``[N]`` int8) is set."""
        listed = Listed(self.empty(self.rows, dtype=torch.int32), self.empty(1, dtype=torch.int32))
        launch(
            self.signature,
            list_flagged_kernel,
            (1,),
            flags,
            *listed,
            self.rows,
            BLOCK=_list_block(self.rows),
            num_warps=16,
        )
        return listed

    def every_row(self) -> Listed:
        order = torch.arange(self.rows, dtype=torch.int32, device=self.input.device)
        return Listed(order, torch.full((1,), self.rows, dtype=torch.int32, device=self.input.device))

    def gather(
        self,
        rows: Rows,
        chunk: int,
        gathered: Tensor,
        picked: Tensor | None = None,
        offset: Tensor | None = None,
        row_sum: Tensor | None = None,
        bias_sum: Tensor | None = None,
        class_sum: Tensor | None = None,
    ) -> None:
        """Copy a chunk's rows of the input to ``gathered``; their offsets and class sums, where these are given."""
        launch(
            self.signature,
            gather_kernel,
            (rows.most,),
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
            chunk,
            rows.most,
            self.vocab,
            self.hidden,
            self.index.shape[1],
            *self.input.stride(),
            BLOCK=min(triton.next_power_of_2(self.hidden), 4096),
            ROWS=self.row_block,
            num_warps=4,
        )

    def pick(self, listed: Listed, picked: Tensor, slope: Tensor | None = None) -> None:
        """The logits at ``index`` of the listed rows; and if wanted the derivative of the transform there."""
        indexed = self.index.shape[1]
        if indexed == 0:
            return
        # At least the rows that Hopper's own products have, so that these are of the same kind; fewer where theirs are.
        tile = tiles.described("stats", self.input)
        size = min(tile.rows, 64)
        launch(
            self.signature,
            pick_kernel,
            (triton.cdiv(self.rows, size), indexed),
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
            *self.input.stride(),
            *self.weight.stride(),
            tile.hidden * self.input.stride(1),
            tile.hidden * self.weight.stride(1),
            SCALED=self.scale != 1.0,
            TRANSFORM=self.transform,
            PRECISION=tiles.dot_precision(self.input.dtype),
            BM=size,
            BK=tile.hidden,
            num_warps=4,
            num_stages=4,
        )

    # --- descriptors ------------------------------------------------------------------------------------------

    @property
    def transposed(self) -> bool:
        return self.weight.stride(1) != 1

    def described_weight(self, weight: Tensor, tile: tiles.Tile, classes: int, hidden: int) -> Any:
        """``weight [W, D]`` in blocks of ``[classes, hidden]``, or transposed if that is how it is stored."""
        if self.transposed:
            return _describe(weight.t(), tile, hidden, classes)
        return _describe(weight, tile, classes, hidden)

    def launch_options(self, tile: tiles.Tile, flatten: bool = True) -> dict[str, object]:
        if tile.takes_turns:
            return {
                "BK": tile.hidden,
                "GROUP": tile.group,
                "STAGES": tile.stages,
                "ROWS": self.row_block,
                "num_warps": tile.warps,
            }
        options = {
            "PRECISION": tiles.dot_precision(self.input.dtype),
            "BM": tile.rows,
            "BN": tile.vocab,
            "BK": tile.hidden,
            "GROUP": tile.group,
            "ROWS": self.row_block,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
        return options | {"FLATTEN": True} if flatten else options

    # --- statistics -------------------------------------------------------------------------------------------

    def stats_chunk(self) -> int:
        """Rows in a chunk of statistics: as many as fit the bytes, in a number of blocks that divides the programs."""
        tile = tiles.described("stats", self.input)
        programs = self.programs * tile.slots
        blocks = max(1, STATS_BYTES // (self.hidden * self.input.element_size() * tile.rows))
        needed = -(-self.rows // tile.rows)
        even = next(b for b in range(min(blocks, programs), 0, -1) if programs % b == 0)
        return self.whole_blocks(min(even, needed) * tile.rows)

    def stats(self, listed: Listed, out: Stats, want_class_sum: bool) -> None:
        """The statistics of the listed rows."""
        rows = self.cut(listed, self.stats_chunk())
        self.pick(listed, out.picked)
        gathered = self.empty(rows.most, self.hidden, dtype=self.input.dtype)
        for chunk in range(rows.chunks):
            self.gather(rows, chunk, gathered)
            self.stats_of(rows, chunk, gathered, out, want_class_sum)

    def stats_of(self, rows: Rows, chunk: int, gathered: Tensor, out: Stats, want_class_sum: bool) -> None:
        tile = tiles.described("stats", self.input)
        most = rows.most
        programs = max(self.programs * tile.slots, most // tile.rows)
        each = 2 if tile.takes_turns else 1  # parts that a program makes
        parts = self.empty(3 if want_class_sum else 2, programs * each * tile.rows)
        part_class_sum = parts[2] if want_class_sum else None
        options = self.launch_options(tile)
        del options["GROUP"]
        launch(
            self.signature,
            _kernel(stats_kernel, tile),
            (programs,),
            _describe(gathered, tile, tile.rows, tile.hidden),
            self.described_weight(self.weight, tile, tile.vocab, tile.hidden),
            self.bias,
            rows.length,
            self.class_weight,
            parts[0],
            parts[1],
            part_class_sum,
            self.scale,
            chunk,
            most,
            self.vocab,
            self.hidden,
            programs,
            SCALED=self.scale != 1.0,
            TRANSFORM=self.transform,
            TRANSPOSED=self.transposed,
            EVEN_VOCAB=self.vocab % tile.vocab == 0,
            **options,
        )
        launch(
            self.signature,
            merge_kernel,
            (triton.cdiv(most, 16),),
            parts[0],
            parts[1],
            part_class_sum,
            self.index,
            rows.order,
            rows.length,
            out.lse,
            out.residual,
            out.picked,
            out.log_prob,
            out.class_sum if want_class_sum else None,
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
        launch(
            self.signature,
            loss_kernel,
            (1,),
            stats.lse, stats.log_prob, class_sum, self.index, c.lse, c.picked, c.class_sum, loss, self.rows,
            self.index.shape[1], BLOCK=_list_block(self.rows), num_warps=16,
        )  # fmt: skip
        return loss

    # --- exponentials and gradients of logits -----------------------------------------------------------------

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
    ) -> None:
        """Write exponentials to ``e`` and statistics to ``out``, and scale ``gathered`` by ``factor``.

        After it ``factor[:, None] * e`` is the gradient of the chunk's logits but for what class sums give, and for
        that of indexed logits, which is in ``own [N, K]`` instead.
        """
        tile = tiles.described("exponentials", self.input)
        columns = -(-self.vocab // tile.vocab)
        programs = min(self.programs * tile.slots, rows.most // tile.rows * columns)
        launch(
            self.signature,
            _kernel(exponentials_kernel, tile),
            (programs,),
            _describe(gathered, tile, tile.rows, tile.hidden),
            self.described_weight(self.weight, tile, tile.vocab, tile.hidden),
            _describe(e, tile, tile.rows, tile.vocab // 2),
            self.bias,
            offset,
            rows.length,
            scratch,
            self.scale,
            chunk,
            rows.most,
            self.vocab,
            self.hidden,
            programs,
            SCALED=self.scale != 1.0,
            TRANSFORM=self.transform,
            TRANSPOSED=self.transposed,
            EVEN_VOCAB=self.vocab % tile.vocab == 0,
            **self.launch_options(tile),
        )
        launch(
            self.signature,
            finish_kernel,
            (triton.cdiv(rows.most, 16),),
            scratch,
            offset,
            self.index,
            rows.order,
            rows.length,
            up.lse,
            up.picked,
            out.picked,
            slope,
            e,
            own,
            gathered,
            factor,
            out.lse,
            out.log_prob,
            bad.order,
            bad.length[chunk],
            bad.row,
            bad.gathered,
            self.scale,
            chunk,
            rows.most,
            self.vocab,
            self.hidden,
            self.index.shape[1],
            columns,
            e.stride(0),
            BLOCK_TILES=256,
            BLOCK_ROWS=16,
            BLOCK_HIDDEN=512,
            ROWS=self.row_block,
            num_warps=8,
        )
        # Where there are no bad rows, these launches find that out.
        again = Rows(bad.order, bad.length[chunk], rows.most, 1)
        self.stats_of(again, 0, bad.gathered, out, False)
        tile = tiles.described("dlogits", self.input)
        launch(
            self.signature,
            scattered_dlogits_kernel,
            (self.programs,),
            _describe(bad.gathered, tile, tile.rows, tile.hidden),
            self.described_weight(self.weight, tile, tile.vocab, tile.hidden),
            e,
            bad.row,
            self.bias,
            self.index,
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
            self.index.shape[1],
            e.stride(0),
            self.programs,
            SCALED=self.scale != 1.0,
            TRANSFORM=self.transform,
            TRANSPOSED=self.transposed,
            **self.launch_options(tile, flatten=False),
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
        normalise: Tensor | None = None,
    ) -> None:
        """Write the gradient of the logits of a chunk and a window, times ``normalise [1]``, to ``dz``."""
        tile = tiles.described("dlogits", self.input)
        weight = self.weight[window]
        class_weight = None if self.class_weight is None else self.class_weight[window]
        programs = min(self.programs * tile.slots, rows.most // tile.rows * -(-weight.shape[0] // tile.vocab))
        launch(
            (self.signature, weight.shape[0]),
            dlogits_kernel,
            (programs,),
            _describe(gathered, tile, tile.rows, tile.hidden),
            self.described_weight(weight, tile, tile.vocab, tile.hidden),
            _describe(dz, tile, tile.rows, tile.vocab // 2),
            None if self.bias is None else self.bias[window],
            rows.order,
            rows.length,
            class_weight,
            stats.lse,
            stats.residual,
            up.lse,
            up.class_sum,
            normalise,
            self.scale,
            chunk,
            rows.most,
            weight.shape[0],
            self.hidden,
            programs,
            SCALED=self.scale != 1.0,
            TRANSFORM=self.transform,
            TRANSPOSED=self.transposed,
            **self.launch_options(tile),
        )
        if self.index.shape[1] > 0:
            launch(
                (self.signature, weight.shape[0]),
                correct_kernel,
                (triton.cdiv(rows.most, 128),),
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

    # --- products ---------------------------------------------------------------------------------------------

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
            w = _describe(weight.t(), tile, tile.vocab, tile.hidden)
        else:
            w = _describe(weight, tile, tile.hidden, tile.vocab)
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
        launch(
            signature,
            products.d_input_kernel,
            (programs,),
            _describe(dz, tile, tile.rows, tile.hidden),
            w,
            *total,
            *common,
            TRANSPOSED=self.transposed,
            **options,
        )
        sizes = {name: options[name] for name in ("BM", "BN", "BK", "GROUP", "ROWS")}
        strips = (programs, tile.rows // 8)
        launch(signature, products.d_input_rest_kernel, strips, parts, *total, *common[1:], **sizes, STRIP=8)

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
    ) -> None:
        """Add ``dz.T @ x`` to ``total``, the rows ``window`` of d_weight; the first chunk's sum begins there.

        ``class_row [D]`` times the class weights is added once. The sums of this chunk's ``classes`` are to be finished
        by ``finish_classes``.
        """
        # Kernels that take turns add to sums in 16 bits and more, those of float16 operands are float32.
        tile = tiles.described("d_weight", self.input, turns=total.out.element_size() == 2)
        height = total.out.shape[0]
        programs = min(self.programs * tile.slots, -(-height // tile.rows) * -(-self.hidden // tile.vocab))
        kernel, half, sums = products.d_weight_kernel, 1, tuple(total)
        if tile.takes_turns:
            pingpong = _pingpong()
            kernel = pingpong.d_weight_kernel
            if tile.vocab == 256:
                kernel, half = pingpong.d_weight_together_kernel, 2
            sums = tuple(None if s is None else _describe(s, tile, 64, 64) for s in sums)
        launch(
            (self.signature, height, total.out.dtype),
            kernel,
            (programs,),
            _describe(dz, tile, tile.hidden, tile.rows // half),
            _describe(x, tile, tile.hidden, tile.vocab),
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

    def add_bias(
        self, rows: Rows, chunk: int, window: slice, dz: Tensor, out: Tensor, factor: Tensor | None = None
    ) -> None:
        """Add the column sums of ``factor[:, None] * dz`` to the classes ``window`` of d_bias, float32."""
        out = out[window]
        launch(
            (self.signature, out.shape[0]),
            products.d_bias_kernel,
            (triton.cdiv(out.shape[0], 256),),
            dz,
            factor,
            out,
            rows.length,
            chunk,
            rows.most,
            out.shape[0],
            dz.stride(0),
            BLOCK_ROWS=32,
            BLOCK=256,
            ROWS=self.row_block,
            num_warps=8,
        )

    def classes(self, rows: Rows) -> Classes:
        """The classes of the listed rows, sorted by chunk and class."""
        dtype = torch.int32 if rows.chunks * (self.vocab + 1) < 2**31 else torch.int64
        keys = self.empty(self.rows, dtype=dtype)
        launch(
            (self.signature, dtype), products.keys_kernel, (triton.cdiv(self.rows, 256),), self.index, rows.order,
            rows.length, keys, self.rows, rows.most, self.vocab, LARGEST=torch.iinfo(dtype).max, BLOCK=256,
            ROWS=self.row_block,
        )  # fmt: skip
        keys, position = keys.sort(stable=True)
        slots = torch.full((self.vocab,), -1, dtype=torch.int32, device=self.input.device)
        return Classes(keys, position, self.empty(rows.most, self.hidden), slots)

    def place_classes(self, rows: Rows, chunk: int, classes: Classes) -> None:
        """Give the classes of a chunk their slots."""
        launch(
            (self.signature, classes.keys.dtype), products.slots_kernel, (triton.cdiv(rows.most, 256),), classes.keys,
            rows.length, classes.slots, chunk, rows.most, self.vocab, BLOCK=256, ROWS=self.row_block,
        )  # fmt: skip

    def finish_classes(
        self, rows: Rows, chunk: int, own: Tensor, classes: Classes, total: Sum | None, d_bias: Tensor | None
    ) -> None:
        """Add what gradients ``own [N, 1]`` of indexed logits give to d_weight, after the chunk's product, and d_bias.

        They are the large entries, and where a model is sure of them they nearly cancel the rest: what is added up is
        rounded after that.
        """
        block = min(1024, triton.next_power_of_2(self.hidden))
        out, low = (None, None) if total is None else total
        launch(
            (self.signature, classes.keys.dtype, None if out is None else out.dtype),
            products.own_classes_kernel,
            (rows.most, triton.cdiv(self.hidden, block)),
            classes.keys,
            classes.position,
            rows.order,
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
            BLOCK_ENTRIES=4,
            BLOCK=block,
            ROWS=self.row_block,
        )

    def weighted_sum(self, matrix: Tensor, weights: Tensor | None) -> Tensor:
        """``sum_i weights_i matrix_i``, ``[D]`` float32; a weight of 0 silences whatever its row holds."""
        rows, hidden = matrix.shape
        strips = max(1, min(64, rows // 64))
        parts = self.empty(strips, hidden)
        launch(
            (self.signature, matrix.shape, matrix.stride()),
            products.weighted_sum_kernel,
            (triton.cdiv(hidden, 128), strips),
            matrix,
            weights,
            parts,
            rows,
            -(-rows // strips),
            hidden,
            *matrix.stride(),
            BLOCK_ROWS=32,
            BLOCK=128,
        )
        return parts.sum(0)


def takes(input: Tensor, weight: Tensor) -> bool:
    """Whether these kernels compute with such operands: the weight must also lie on 16 bytes."""
    return fits(input, weight) and weight.data_ptr() % 16 == 0


def fits(input: Tensor, weight: Tensor) -> bool:
    """Whether these kernels compute with operands of such shapes, strides and dtypes.

    The weight must have one unit stride. The input is gathered, so its strides do not matter.
    """
    if input.shape[0] == 0 or not tiles.has_descriptors(input):
        return False
    along = 1 if weight.stride(1) == 1 else 0
    vector = 16  # elements: sums are kept in single bytes too
    return (
        input.shape[1] % vector == 0
        and weight.stride(along) == 1
        and weight.stride(1 - along) % vector == 0
        and weight.stride(1 - along) >= weight.shape[along]
    )


def _list_block(rows: int) -> int:
    return min(4096, max(256, triton.next_power_of_2(rows)))


def _kernel(kernel: Any, tile: tiles.Tile) -> Any:
    """The kernel for such tiles: its namesake in ``pingpong`` where warpgroups take turns."""
    return getattr(_pingpong(), kernel.__name__) if tile.takes_turns else kernel


@functools.cache
def _pingpong() -> Any:
    from . import pingpong  # imports Gluon

    return pingpong


def _describe(matrix: Tensor, tile: tiles.Tile, *block: int) -> Any:
    """A descriptor of ``matrix`` in such blocks, for a kernel with such tiles."""
    arguments = matrix, list(matrix.shape), list(matrix.stride()), list(block)
    return _pingpong().describe(*arguments) if tile.takes_turns else TensorDescriptor(*arguments)
