"""Launch shapes: tile sizes by device generation and dtype, and how a vocabulary is split over the device.

No Triton is imported here, and nothing here waits for a device.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

# Row blocks that run side by side over the same part of the vocabulary: they share the weight's tiles in L2, and
# their own hidden states (16 blocks of 128 rows by 4096 in 16 bits are 16 MiB) stay there meanwhile.
GROUP = 16


class Machine(NamedTuple):
    generation: str  # a key of TILES
    processors: int  # streaming multiprocessors
    takes_turns: bool = False  # whether it runs the kernels of ``hopper.pingpong``
    less_l2: bool = False  # whether its L2 is an H100's, which gives less in the same time than an H200's


class Tile(NamedTuple):
    """One step of a program: a ``[rows, vocab]`` tile of logits, accumulated ``hidden`` columns at a time."""

    rows: int
    vocab: int
    hidden: int
    warps: int
    stages: int
    slots: int = 1  # programs that share a processor
    group: int = GROUP
    takes_turns: bool = False  # of a kernel of ``hopper.pingpong``
    together: bool = False  # of one of those in which warpgroups share a tile


# For logits of 16-bit operands, and a generation: tiles by growing number of rows. A call takes the first that covers
# its rows, or the last. Few rows are bound by reading the weight, many by the tensor cores.
TILES: dict[str, tuple[Tile, ...]] = {
    "hopper": (Tile(16, 128, 128, 4, 4), Tile(64, 256, 64, 8, 4), Tile(128, 256, 64, 8, 4)),
    # 99 KiB of shared memory at most, which is what sm_86, sm_89 and sm_120 have.
    "ampere": (Tile(16, 128, 64, 4, 4), Tile(64, 128, 64, 8, 3), Tile(128, 128, 64, 8, 3)),
    # Where elements are loaded one by one (see `loads_vectors`), each with an address in registers: small tiles.
    "elementwise": (Tile(16, 64, 32, 4, 2), Tile(64, 128, 32, 8, 2)),
    # Small enough that small tests have many tiles and ragged edges.
    "interpreter": (Tile(16, 32, 16, 4, 1),),
}
# For logits whose product is stored: memory bounds what reads it.
STORED, INTERPRETED_STORED = Tile(8, 512, 1, 4, 1, slots=8), Tile(4, 32, 1, 4, 1, slots=2)


# Triton's own functions of these names take microseconds outside of kernels.


def cdiv(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not less than ``n``."""
    return 1 << (n - 1).bit_length()


# Where tensors without memory, on the device ``meta``, are taken to be.
meant: ContextVar[torch.device | None] = ContextVar("meant", default=None)


def machine(device: torch.device) -> Machine:
    """What ``device`` is; a CPU stands for Triton's interpreter, given enough processors to make it split."""
    stands_for = meant.get() if device.type == "meta" else None
    return _machine(stands_for or device)


@functools.cache
def _machine(device: torch.device) -> Machine:
    if device.type != "cuda":
        return Machine("interpreter", 6)
    properties = torch.cuda.get_device_properties(device)
    generation = "hopper" if properties.major in (9, 10) else "ampere"
    takes_turns, less_l2 = properties.major == 9 and _has_gluon(), properties.L2_cache_size < LESS_L2
    return Machine(generation, properties.multi_processor_count, takes_turns, less_l2)


def _has_gluon() -> bool:
    """Whether this Triton has a Gluon that ``hopper.pingpong`` is known to compile with; it is still experimental."""
    version = tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
    return (3, 6) <= version <= (3, 9)


def tile(x: Tensor, weight: Tensor) -> Tile:
    """The tile for logits of ``x [N, D]`` and ``weight [V, D]``, of 16 bits, whose product it makes."""
    generation = machine(x.device).generation
    if generation != "interpreter" and not (x.stride(1) == 1 and loads_vectors(x) and loads_vectors(weight)):
        generation = "elementwise"
    choices = TILES[generation]
    return next((choice for choice in choices if choice.rows >= x.shape[0]), choices[-1])


def stored(device: torch.device) -> Tile:
    """The tile for logits whose product is stored; nothing is multiplied, so ``hidden`` says nothing."""
    return INTERPRETED_STORED if machine(device).generation == "interpreter" else STORED


# For kernels on tensor descriptors. Large tiles spare energy, which is what limits long products; where products are
# short (few hidden units), two smaller programs share a processor: one multiplies while the other ends its tile.
DESCRIBED: dict[str, tuple[Tile, ...]] = {
    "stats": (Tile(16, 128, 128, 4, 4), Tile(64, 256, 64, 8, 4), Tile(128, 256, 64, 8, 4)),
    "exponentials": (Tile(128, 256, 64, 8, 3),),
    "dlogits": (Tile(128, 256, 64, 8, 3),),
    "d_input": (Tile(128, 256, 64, 8, 4, group=8),),
    "d_weight": (Tile(128, 256, 64, 8, 3, group=8),),
}
# Of products whose diagonals are the indexed logits: for few rows a matter of how much is loaded at a time, but
# addresses with gaps take registers. On Hopper products of 16 rows have the very bits that its own have, of 64 rows or
# more; where that is not known, they have 64 rows, unless the statistics have fewer.
LONG_PICKS, PICKS = Tile(16, 16, 512, 4, 3), (Tile(16, 16, 128, 4, 4), Tile(64, 64, 64, 4, 4))
TAKING_TURNS: dict[str, Tile] = {
    "stats": Tile(128, 128, 64, 4, 6, takes_turns=True),
    "d_weight": Tile(128, 128, 64, 4, 5, takes_turns=True),
    "stored": Tile(128, 128, 64, 4, 5, takes_turns=True),
    "exponentials": Tile(128, 128, 64, 4, 5, group=8, takes_turns=True),
    "dlogits": Tile(128, 128, 64, 4, 5, group=8, takes_turns=True),
}
# Two warpgroups share a larger tile, which asks L2 for a quarter less: an H100's gives no more than tiles of 128x128
# ask for. For statistics only if what ends a tile takes no longer than a few steps.
TOGETHER: dict[str, Tile] = {
    "stats": Tile(192, 256, 64, 4, 3, takes_turns=True, together=True),
    "exponentials": Tile(128, 256, 64, 4, 4, group=22, takes_turns=True, together=True),
    "d_input": Tile(128, 256, 64, 4, 4, group=8, takes_turns=True, together=True),
    "d_weight": Tile(128, 256, 64, 4, 4, group=8, takes_turns=True, together=True),
    "input_sums": Tile(128, 256, 64, 4, 4, group=8, takes_turns=True, together=True),
}
# The same for ``d_weight``, where wide tiles would have this many times the columns of hidden units that these have.
TALL_WEIGHT = Tile(256, 128, 64, 4, 4, group=4, takes_turns=True, together=True)
TALL_FROM = 1.05
# Hidden units from which they do. The first two multiply over these: with few the end of a tile is too much of it.
SHARED_FROM = {"stats": 1536, "exponentials": 1536, "d_input": 1536, "d_weight": 768, "input_sums": 256}
SHARED_FROM_WITH_LESS_L2 = SHARED_FROM | {"stats": 768, "exponentials": 1280}
# The same for statistics of bounded logits, as a softcap makes them, whose end has twice the instructions.
BOUNDED_SHARED_FROM = 3072
# Bytes of L2: an H100 has 50 MiB, an H200 and a GH200 60.
LESS_L2 = 56 << 20
# The most columns of d_input's wide tiles, over hidden units: with more of them they are narrow.
MOST_COLUMNS = 1.12
# Maxima and sums in shared tiles: the larger one takes some 3 % less for as many rows, as if each tile of either had
# that many rows more; but fewer may fill the device better.
MAXIMA_AND_SUMS = (TOGETHER["stats"], Tile(128, 256, 64, 4, 4, takes_turns=True, together=True))
TILE_COST = 12  # rows
# What the gathered rows of a span of statistics may take. What a span costs beside its products, as multiplications and
# additions of one processor (3e12 a second): some 30 us of small kernels and of its own beginning and end; and for each
# element of the weight, which it reads meanwhile.
STATS_BYTES, SPAN_COST, READ_COST = 12 << 20, 1e8, 1.4
SHARED = Tile(128, 128, 64, 4, 3, slots=2)
SHORT = 1536
NARROW_INPUT = Tile(128, 128, 64, 8, 4)
# Columns of the factors by which d_weight's kernels that take turns also multiply, for the gradient of the bias: the
# fewest that a tile in shared memory can have.
NARROW = 16
# Rows and columns of what these kernels add to a gradient's sums at a time, see ``hopper.products.lower_at``.
PIECE = 64
# The least number of tiles, over programs times waves, where no tile is cut to fill the last wave.
LEAST_FILL = 0.9
# The most parts that one of ``d_input``'s is cut into.
MOST_PIECES = 32
# What a chunk of exponentials costs beside its products, as multiplications and additions of one program: adding to
# d_weight's sums, for each element of the weight (two thirds of the memory's time show), and 85 us of small kernels.
SUMS_COST, CHUNK_COST = 2.3, 2e8
# A chunk's rows over those that are wanted, and what more of them cost, in whole calls: they take memory.
LEAST_CHUNK, MOST_CHUNK, STRETCH_COST = 0.6, 1.25, 0.15
INTERPRETED = Tile(16, 64, 16, 4, 1)
ROW_BLOCK = 128


def has_descriptors(input: Tensor) -> bool:
    """Whether kernels on tensor descriptors are to be used for operands like ``input``."""
    generation = machine(input.device).generation
    if generation == "interpreter":
        return input.dtype in (torch.float16, torch.float32)
    return generation == "hopper" and input.dtype in (torch.float16, torch.bfloat16)


def row_block(device: torch.device) -> int:
    """Rows are listed in whole blocks of this many, unless a tile has more: then the last tile of a chunk is cut."""
    return INTERPRETED.rows if machine(device).generation == "interpreter" else ROW_BLOCK


def padded(classes: int) -> int:
    """The length of rows of so many classes that begin on whole vectors."""
    return -(-classes // 64) * 64


def described(kernel: str, input: Tensor, turns: bool = True, short: bool = True) -> Tile:
    """The tile of a kernel on descriptors for hidden states ``input [N, D]``; without ``turns``, of a Triton one.

    ``short`` says that what ends a tile takes no longer than a few steps of its product.
    """
    if machine(input.device).generation == "interpreter":
        return INTERPRETED
    rows, hidden = input.shape
    if turns and takes_turns(kernel, input):
        if not short or hidden < shared_from(kernel, input):
            return TAKING_TURNS[kernel]
        tall = kernel == "d_weight" and _columns(hidden, 256) > TALL_FROM * _columns(hidden, 128)
        return TALL_WEIGHT if tall else TOGETHER[kernel]
    if kernel == "d_input":
        if _columns(hidden, 256) > MOST_COLUMNS * hidden:
            return NARROW_INPUT
        together = turns and takes_turns("d_weight", input) and hidden >= shared_from(kernel, input)
        return TOGETHER[kernel] if together else DESCRIBED[kernel][0]
    if hidden <= SHORT and rows > 64:
        return SHARED
    choices = DESCRIBED[kernel]
    return next((choice for choice in choices if choice.rows >= rows), choices[-1])


def picks(input: Tensor, weight: Tensor) -> Tile:
    """The tile of products whose diagonals are the indexed logits."""
    if machine(input.device).generation == "interpreter":
        return INTERPRETED
    few = input.shape[0] <= PICKS[0].rows
    without_gaps = all(matrix.stride(1) == 1 and loads_vectors(matrix) for matrix in (input, weight))
    if without_gaps and (few or machine(input.device).takes_turns):
        return LONG_PICKS
    return PICKS[0] if few else PICKS[1]


def shared_from(kernel: str, input: Tensor) -> float:
    """The hidden units from which warpgroups share a tile of this kernel, on the device of ``input``."""
    table = SHARED_FROM_WITH_LESS_L2 if machine(input.device).less_l2 else SHARED_FROM
    return table.get(kernel, math.inf)


def _columns(hidden: int, width: int) -> int:
    """Columns of all tiles of this width."""
    return cdiv(hidden, width) * width


def adds_class_sums(input: Tensor) -> bool:
    """Whether what class sums give is added to the exponentials, rather than made of sums of the operands.

    A pass over the exponentials reads and writes them, one over the weight reads that: with half as many rows as
    hidden units they take the same time.
    """
    rows, hidden = input.shape
    return 2 * rows <= hidden


def of_input_sums(input: Tensor, most: int) -> Tile | None:
    """The tile in which warpgroups that share it add to d_input's sums of chunks of ``most`` rows.

    None where there are no such kernels, where columns of tiles would have much past the hidden units, or where the
    programs would have too little to do in the last wave for so few rows: nothing is cut there as in ``d_input``'s.
    """
    tile = TOGETHER["input_sums"]
    hidden = input.shape[1]
    wide = hidden >= shared_from("input_sums", input) and _columns(hidden, 256) <= MOST_COLUMNS * hidden
    if not (wide and takes_turns("d_weight", input)):
        return None
    count, processors = cdiv(most, tile.rows) * cdiv(hidden, tile.vocab), machine(input.device).processors
    return tile if count >= LEAST_FILL * cdiv(count, processors) * processors else None


@functools.lru_cache(maxsize=1024)
def chunks_of_exponentials(
    row_blocks: int, wanted: float, most: int, hidden: int, vocab: int, tile: Tile, programs: int
) -> int:
    """How many chunks of at most ``most`` row blocks to cut rows into, or somewhat less or more than ``wanted``.

    That is as many as take the least time, by and large: d_input has one column of ``tile`` for some hidden units, and
    few tiles a chunk, which may leave nearly half of the programs without work.
    """
    columns = cdiv(hidden, tile.vocab)
    beside = (SUMS_COST * hidden + CHUNK_COST / vocab) / (tile.rows * tile.vocab)  # waves

    def waves(row_blocks: int) -> float:
        whole, rest = divmod(row_blocks * columns, programs)
        return whole + (1 / min(programs // rest, MOST_PIECES) if rest else 0)

    def time(chunks: int) -> float:
        each, larger = divmod(row_blocks, chunks)
        d_input = larger * waves(each + 1) + (chunks - larger) * waves(each)
        others = 2 * row_blocks * columns / programs  # products that leave nobody without work
        return (others + d_input + chunks * beside) * (1 + STRETCH_COST * max(0, cdiv(row_blocks, chunks) / wanted - 1))

    least = cdiv(row_blocks, min(most, max(1, int(MOST_CHUNK * wanted))))
    largest = max(least, cdiv(row_blocks, max(1, int(LEAST_CHUNK * wanted))))
    return min(range(least, largest + 1), key=time)


@functools.lru_cache(maxsize=1024)
def spans_of_stats(
    choices: tuple[Tile, ...], rows: int, hidden: int, element_bytes: int, vocab: int, processors: int
) -> tuple[tuple[Tile, int], ...]:
    """The spans, as (tile, rows), in which statistics of so many rows of logits take the least time, by and large.

    A span has as many programs for each block of its rows as there are, each with a lane of the vocabulary, and waits
    for the longest: so some numbers of blocks leave fewer without work than others. Many rows begin with the span that
    is best for its own rows; those that are best together are looked for among the rest.
    """
    unit = math.gcd(*(tile.rows for tile in choices))
    spans = []
    for tile in choices:
        programs, most = processors * tile.slots, max(1, STATS_BYTES // (hidden * element_bytes * tile.rows))
        # As many blocks as may have so many lanes each.
        for blocks in sorted({min(programs // lanes, most) for lanes in range(1, programs + 1)}):
            time = _time_of_stats(tile, blocks, hidden, vocab, processors)
            spans.append(_Span(time, blocks * tile.rows // unit, tile))
    best = min(spans, key=lambda span: span.time / span.units)
    units = cdiv(rows, unit)
    cut = [best] * max(0, cdiv(units, best.units) - 3)
    units -= len(cut) * best.units
    # What the last so many units take, and the first span of these.
    times, first = [0.0], [best]
    for rest in range(1, units + 1):
        span = min(spans, key=lambda span: span.time + times[max(0, rest - span.units)])
        times.append(span.time + times[max(0, rest - span.units)])
        first.append(span)
    while units > 0:
        cut.append(first[units])
        units -= first[units].units
    # The largest first: of fewer rows than these, as only the device may know, the first spans have as many as fit.
    cut.sort(key=lambda span: -span.units)
    return tuple((span.tile, span.units * unit) for span in cut)


class _Span(NamedTuple):
    time: float
    units: int  # of rows
    tile: Tile


def _time_of_stats(tile: Tile, blocks: int, hidden: int, vocab: int, processors: int) -> float:
    """What a span of so many blocks of rows takes, as multiplications and additions of one processor."""
    lanes = max(1, processors * tile.slots // blocks)
    width = tile.vocab * (2 if tile.takes_turns and not tile.together else 1)  # what two warpgroups have
    waves = cdiv(cdiv(vocab, width), lanes) * tile.slots
    return math.hypot(waves * (tile.rows + TILE_COST) * width * hidden, READ_COST * vocab * hidden) + SPAN_COST


def takes_turns(kernel: str, input: Tensor) -> bool:
    """Whether a kernel is used for such hidden states in which warpgroups take turns."""
    return machine(input.device).takes_turns and kernel in TAKING_TURNS and input.shape[0] > 64


def loads_vectors(matrix: Tensor) -> bool:
    """Whether Triton can tell that ``matrix`` may be read 16 bytes at a time: it knows multiples of 16, or nothing."""
    along = 1 if matrix.stride(1) == 1 else 0
    multiples = (matrix.data_ptr(), matrix.shape[along], matrix.stride(1 - along))
    return matrix.stride(along) == 1 and all(number % 16 == 0 for number in multiples)


@functools.lru_cache(maxsize=1024)
def tiles_per_split(row_blocks: int, vocab_tiles: int, processors: int) -> int:
    """How many vocabulary tiles one program walks, so that ``row_blocks * splits`` programs fill the device evenly.

    At least so many splits that a wave of programs is about ``GROUP`` row blocks wide, which keeps both operands in
    L2; among those, the count that leaves the last wave fullest.
    """
    least = min(vocab_tiles, max(1, processors // min(row_blocks, GROUP)))

    def length(splits: int) -> tuple[int, int]:
        # In tiles, one after the other; one more a program for its start and end.
        each = -(-vocab_tiles // splits)
        waves = -(-row_blocks * -(-vocab_tiles // each) // processors)
        return waves * (each + 1), splits

    best = min(range(least, min(vocab_tiles, 4 * least) + 1), key=length)
    return -(-vocab_tiles // best)


@functools.lru_cache(maxsize=1024)
def window(vocab: int, most: int, columns: int, block: int, programs: int) -> int:
    """Classes in a window of the vocabulary: at most ``most`` or 256, and fewer if that keeps the programs busier.

    A window makes ``columns`` tiles for each ``block`` of its classes, in waves of ``programs``. What it takes beside
    is counted as half a wave.
    """

    def waves(classes: int) -> int:
        return cdiv(cdiv(classes, block) * columns, programs)

    def time(classes: int) -> float:
        whole, rest = divmod(vocab, classes)
        return whole * waves(classes) + waves(rest) + cdiv(vocab, classes) / 2

    if most >= vocab:
        return cdiv(vocab, 256) * 256
    most = max(256, most // 256 * 256)
    return min(range(most, max(256, most // 2) - 1, -256), key=time)


def dot_precision(dtype: torch.dtype) -> str:
    """``tf32`` for float32 operands where PyTorch's own products may use it, else ``ieee``."""
    if dtype != torch.float32:
        return "ieee"
    matmul = torch.backends.cuda.matmul
    # The older switch raises once the newer one has been used, so ask the newer one where there is one.
    if hasattr(matmul, "fp32_precision"):
        return "tf32" if matmul.fp32_precision == "tf32" else "ieee"
    return "tf32" if matmul.allow_tf32 else "ieee"
