"""The operands of one call, and what all launches ask of them.

``input [N, D]`` may have any strides. ``weight [V, D]`` is one that ``takes`` accepts. The rest is contiguous and on 16
bytes: ``bias [V]`` or None, ``index [N, K]`` int64, ``class_weight [V]`` float32 or None.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ....ops.contract import Operands
from ... import launcher, tiles
from ...transform import spelled


class Listed(NamedTuple):
    """A list of rows, in device memory: ``order [N]`` int32 and its ``length [1]`` int32; without them, every row."""

    order: Tensor | None
    length: Tensor | None


EVERY_ROW = Listed(None, None)


class Rows(NamedTuple):
    """A list of rows cut into chunks, evenly, of ``most`` rows at most: so many chunks that all N rows would fit."""

    order: Tensor
    length: Tensor
    most: int  # a multiple of the row block, as is what every chunk but the last has, and the last is filled up to
    chunks: int


class Span(NamedTuple):
    """The rows of a list from the ``first`` on, ``most`` or those that there are, in tiles of one kind."""

    order: Tensor | None
    length: Tensor | None
    first: int
    most: int  # of a list, a multiple of the tile's rows
    tile: tiles.Tile


class Stats(NamedTuple):
    """The statistics of the contract, which kernels fill in row by row; of no rows those that are not asked for."""

    lse: Tensor
    residual: Tensor
    picked: Tensor
    log_prob: Tensor
    class_sum: Tensor
    expectation: Tensor
    entropy: Tensor
    top: Tensor
    argmax: Tensor


class Bad(NamedTuple):
    """The rows of a chunk whose offset proved bad."""

    order: Tensor  # [most] int32: as rows of N
    lengths: tuple[Tensor, ...]  # for each chunk a counter: how many, in its first
    row: Tensor  # [most] int32: as rows of the chunk
    gathered: Tensor  # [most, D]


class Classes(NamedTuple):
    """The classes that the listed rows are indexed with, whose sums for d_weight are finished apart."""

    keys: Tensor  # [N] int32 or int64: chunk and class of the listed rows, sorted
    sources: Tensor  # [N] int32: the row of N that each is of
    rows: Tensor  # [most, D] float32: the first chunk's sums of its classes
    slots: Tensor  # [V] int32: the rows of those, or -1


class Sum(NamedTuple):
    """A gradient while it is added up; ``low`` holds further bits of its sums, see ``products``: 4-D if in pieces."""

    out: Tensor
    low: Tensor | None

    @property
    def in_pieces(self) -> bool:
        """Whether the further bits lie in pieces, as kernels that take turns have them."""
        return self.low is not None and self.low.dim() == 4


COUNTERS = 64  # that are set to zero at a time

_signatures: dict[tuple[object, ...], int] = {}
_numbers = itertools.count()  # whose next two threads never share


class Described(Operands):
    """Operands that ``takes`` accepts."""

    @functools.cached_property
    def signature(self) -> int:
        """A number for what kernels are compiled for, but for windows, gradients, constants, and what is None."""
        told_apart = (
            self.input.device,
            *((t.dtype, t.shape, t.stride(), t.data_ptr() % 16 == 0) for t in (self.input, self.weight)),
            *(None if t is None else t.dtype for t in (self.bias, self.class_weight)),
        )
        return _signatures.setdefault(told_apart, next(_numbers))

    def slopes(self) -> Tensor | None:
        """Where to put the derivative of the transform at the indexed logits."""
        return torch.zeros(self.index.shape, dtype=torch.float32, device=self.input.device) if self.transform else None

    def launch(self, signature: Hashable, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """``launcher.launch`` of a kernel that begins with ``schedule.begin``."""
        overlaps = self.input.device.type != "cpu"
        launcher.launch(signature, kernel, grid, *args, **constants, PDL=overlaps, launch_pdl=overlaps)

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

    @functools.cached_property
    def programs(self) -> int:
        return tiles.machine(self.input.device).processors

    @functools.cached_property
    def total_weight(self) -> Tensor | None:
        """What the weights of all classes add up to, ``[]`` float32; None if each is 1."""
        return None if self.class_weight is None else self.class_weight.sum()

    @functools.cached_property
    def row_block(self) -> int:
        return tiles.row_block(self.input.device)

    @functools.cached_property
    def input_is_described(self) -> bool:
        """Whether a descriptor can describe the input as it is, not only its rows as they are gathered."""
        vectors = self.input.stride(0) * self.input.element_size() % 16 == 0 and self.input.data_ptr() % 16 == 0
        return vectors and self.input.stride(1) == 1 and self.input.stride(0) >= self.hidden

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.input.device)

    @functools.cached_property
    def _scratch(self) -> dict[tuple[Any, ...], Tensor]:
        return {}

    def scratch(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """``empty``, once for the whole call: for launches that follow each other, as what it held before is lost."""
        key = (*shape, dtype)
        if key not in self._scratch:
            self._scratch[key] = self.empty(*shape, dtype=dtype)
        return self._scratch[key]

    def counter(self, tile: tiles.Tile) -> tuple[Tensor, ...]:
        """A counter for a launch, if the programs of such tiles meet; or nothing."""
        return (next(self._counters),) if tile.together else ()

    @functools.cached_property
    def _counters(self) -> Iterator[Tensor]:
        """Zeros, ``[4]`` int32 each, of which the first counts and the rest is there for alignment."""

        def zeros() -> Iterator[Tensor]:
            while True:
                yield from torch.zeros((COUNTERS, 4), dtype=torch.int32, device=self.input.device)

        return zeros()

    def whole_blocks(self, rows: int) -> int:
        return max(1, tiles.cdiv(rows, self.row_block)) * self.row_block

    def windows(self, most: int) -> list[slice]:
        """The vocabulary in windows of at most ``most`` classes, such as keep all programs busy."""
        tile = tiles.described("d_weight", self.input)
        columns = tiles.cdiv(self.hidden, tile.vocab)
        each = tiles.window(self.vocab, most, columns, tile.rows, self.programs * tile.slots)
        return [slice(at, min(at + each, self.vocab)) for at in range(0, self.vocab, each)]

    def no_stats(self, *wants: bool, every_row: bool = False) -> Stats:
        """Zeros, which is what rows that are not listed have; ``wants`` are of ``class_sum`` and those after it.

        With ``every_row`` none is left out, and kernels write all of what is anything until then.
        """
        optional = [(self.rows if wanted else 0,) for wanted in wants]
        shapes = (self.rows,), (self.rows,), self.index.shape, self.index.shape, *optional
        make = torch.empty if every_row else torch.zeros
        statistics = [make(shape, dtype=torch.float32, device=self.input.device) for shape in shapes]
        return Stats(*[*statistics, make(optional[-1], dtype=torch.int64, device=self.input.device)])

    def unset_stats(self, want_class_sum: bool) -> Stats:
        """The same for what never leaves an op, in one allocation: rows that are not listed have anything."""
        rows, indexed = self.index.shape
        each = tiles.cdiv(rows, 64) * 64
        memory = self.empty(each * (2 + 2 * indexed + want_class_sum))
        nothing = memory[:0]

        def of_rows(at: int) -> Tensor:
            return memory.as_strided((rows,), (1,), at * each)

        def of_index(at: int) -> Tensor:
            return memory.as_strided((rows, indexed), (indexed, 1), at * each)

        class_sum = of_rows(2 + 2 * indexed) if want_class_sum else nothing
        return Stats(of_rows(0), of_rows(1), of_index(2), of_index(2 + indexed), class_sum, *[nothing] * 4)

    def no_bad(self, rows: Rows, gathered: Tensor) -> Bad:
        return Bad(
            self.empty(rows.most, dtype=torch.int32),
            tuple(itertools.islice(self._counters, rows.chunks)),
            self.empty(rows.most, dtype=torch.int32),
            gathered,
        )

    def exponentials_buffer(self, rows: int, classes: int) -> Tensor:
        """``[rows, classes]`` whose rows begin on whole vectors."""
        return self.empty(rows, tiles.padded(classes), dtype=self.input.dtype)[:, :classes]

    def sums_size(self, most: int) -> int:
        """Numbers that ``exponentials_of`` needs beside its results."""
        return tiles.cdiv(self.vocab, tiles.described("exponentials", self.input).vocab) * most

    def parts_size(self) -> int:
        """Numbers that ``add_input`` needs beside its results."""
        tile = tiles.described("d_input", self.input)
        return self.programs * tile.slots * tile.rows * tile.vocab

    def cut(self, listed: Listed, most: int) -> Rows:
        """The listed rows in chunks of at most ``most``."""
        assert listed.order is not None and listed.length is not None
        chunks = max(1, tiles.cdiv(self.rows, most))
        return Rows(listed.order, listed.length, self.whole_blocks(tiles.cdiv(self.rows, chunks)), chunks)

    # --- descriptors ------------------------------------------------------------------------------------------

    @property
    def transposed(self) -> bool:
        return self.weight.stride(1) != 1

    def described_weight(self, weight: Tensor, tile: tiles.Tile, classes: int, hidden: int) -> Any:
        """``weight [W, D]`` in blocks of ``[classes, hidden]``, or transposed if that is how it is stored."""
        if self.transposed:
            return describe(weight.t(), tile, hidden, classes)
        return describe(weight, tile, classes, hidden)

    def logits_options(self) -> dict[str, object]:
        """Of every kernel that makes logits from described operands."""
        return {**self.pointwise_options(), "TRANSPOSED": self.transposed}

    def pointwise_options(self) -> dict[str, object]:
        """Of every kernel that makes logits from products."""
        return {"SCALED": self.scale != 1.0, "TRANSFORM": spelled(self.transform, self.input.dtype)}

    def launch_options(self, tile: tiles.Tile, flatten: bool = True) -> dict[str, object]:
        if tile.takes_turns:
            return {
                "BK": tile.hidden,
                "GROUP": tile.group,
                "STAGES": tile.stages,
                "ROWS": self.row_block,
                "num_warps": tile.warps,
            }
        options: dict[str, object] = {
            "BM": tile.rows,
            "BN": tile.vocab,
            "BK": tile.hidden,
            "GROUP": tile.group,
            "ROWS": self.row_block,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
        return options | {"FLATTEN": True} if flatten else options


def takes(input: Tensor, weight: Tensor) -> bool:
    """Whether these kernels compute with such operands: the weight must also lie on 16 bytes."""
    return fits(input, weight) and weight.data_ptr() % 16 == 0


def fits(input: Tensor, weight: Tensor) -> bool:
    """Whether these kernels compute with operands of such shapes and strides, where ``tiles.has_descriptors(input)``.

    The weight must have one unit stride. The input may have any, as it is gathered where no descriptor describes it.
    """
    (rows, hidden), strides = input.shape, weight.stride()
    along = 1 if strides[1] == 1 else 0
    vector = 16  # elements, twice what a descriptor wants: fewer have not been tried
    return (
        rows > 0
        and hidden % vector == 0
        and strides[along] == 1
        and strides[1 - along] % vector == 0
        and strides[1 - along] >= weight.shape[along]
    )


def kernel_for(kernel: Any, tile: tiles.Tile) -> Any:
    """The kernel for such tiles: its namesake in ``pingpong`` where warpgroups take turns, or share a tile."""
    if not tile.takes_turns:
        return kernel
    name = kernel.__name__
    return getattr(pingpong(), name.replace("_kernel", "_together_kernel") if tile.together else name)


def rows_at_a_time(tile: tiles.Tile) -> int:
    """Rows of a tile that are loaded, or stored, at a time; a tall one's operand comes by its columns."""
    return tiles.PIECE if tile.together else tile.rows


@functools.cache
def pingpong() -> Any:
    from .. import pingpong  # imports Gluon

    return pingpong


def describe(matrix: Tensor, tile: tiles.Tile, *block: int) -> Any:
    """A descriptor of ``matrix`` in such blocks, for a kernel with such tiles."""
    arguments = matrix, list(matrix.shape), list(matrix.stride()), list(block)
    return pingpong().describe(*arguments) if tile.takes_turns else TensorDescriptor(*arguments)


def describe_stored(matrix: Tensor, tile: tiles.Tile) -> Any:
    """A descriptor of ``matrix`` in the parts of tiles that a kernel stores at a time."""
    return describe(matrix, tile, rows_at_a_time(tile), tile.vocab // (4 if tile.together else 2))
