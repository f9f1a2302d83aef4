"""Windows of the gradient of the logits: how large they are, and the memory that gradients take by them.

The ops run on meta tensors, as if on an H200.
"""

from __future__ import annotations

import itertools
import os
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from fxfuse.kernels import launcher, recorder, tiles
from fxfuse.ops import cuda, hopper, windows

pytestmark = pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="kernels are interpreted")


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("vocab", [300, 32000, 32001, 50257, 151936])
def test_windows_of_the_vocabulary(vocab: int) -> None:
    """One where all fits; else at most that large, of whole tiles, in no more waves than the largest would take."""

    def waves(window: int) -> int:
        sizes = [min(window, vocab - at) for at in range(0, vocab, window)]
        return sum(-(-(-(-size // 128) * 7) // 132) for size in sizes)

    assert vocab <= tiles.window(vocab, vocab, 7, 128, 132) < vocab + 256
    for most in (200, 5000, 20000):
        window = tiles.window(vocab, most, 7, 128, 132)
        assert window <= max(most, 256) or most >= vocab
        assert window % 256 == 0 and waves(window) <= waves(max(256, most // 256 * 256))


@pytest.mark.parametrize("rows", [1, 100, 129, 2048, 5000])
@pytest.mark.parametrize("most", [1, 1000, 200_000, 1 << 30])
def test_chunks_of_rows(rows: int, most: int) -> None:
    """They are all rows in order, within the bytes (or one row each) but for whole blocks of large ones."""
    chunks = windows.chunks_of(rows, 1000, most)
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    assert [chunk.start for chunk in chunks] == list(itertools.accumulate(sizes, initial=0))[:-1] and sum(sizes) == rows
    assert (
        sizes[0] == max(sizes) <= max(1, most // 1000 + (windows.CHUNK_ROWS if most > 1000 * windows.CHUNK_ROWS else 0))
    )


@pytest.mark.parametrize(("memory", "bytes"), [(0, 0), (1, 64 << 20), (64 << 20, 64 << 20), (1 << 30, 1 << 30)])
def test_memory_of_products_that_are_made_twice(memory: int, bytes: int) -> None:
    assert windows.of_products(memory) == bytes


@pytest.mark.parametrize(
    ("ends", "cut"),
    [((64, 128), (64, 128)), ((64, 100), (64, 96, 100)), ((7,), (7,)), ((256, 263), (256, 263)), ((41,), (32, 41))],
)
def test_the_rest_of_the_classes(ends: tuple[int, ...], cut: tuple[int, ...]) -> None:
    """The last window is cut where its classes are not a multiple of 16."""

    def slices(ends: tuple[int, ...]) -> list[slice]:
        return [slice(start, end) for start, end in itertools.pairwise((0, *ends))]

    assert windows.split_rest(slices(ends)) == slices(cut)


@pytest.mark.parametrize("rows", [1, 65, 512, 1100, 4096, 16384, 16385, 100_000])
@pytest.mark.parametrize(
    ("hidden", "vocab"), [(768, 50257), (2048, 32000), (4096, 128256), (2304, 256000), (16384, 100)]
)
@pytest.mark.parametrize("choices", [tiles.MAXIMA_AND_SUMS, (tiles.TAKING_TURNS["stats"],), (tiles.SHARED,)])
def test_spans_of_statistics(rows: int, hidden: int, vocab: int, choices: tuple[tiles.Tile, ...]) -> None:
    """All rows, within the bytes, the largest first; in no more time than the same span over and over again."""

    def time(tile: tiles.Tile, blocks: int) -> float:
        return tiles._time_of_stats(tile, blocks, hidden, vocab, processors)

    processors, most = 132, tiles.STATS_BYTES // (2 * hidden)
    spans = [(tile, size // tile.rows) for tile, size in tiles.spans_of_stats(choices, rows, hidden, 2, vocab, 132)]
    sizes = [blocks * tile.rows for tile, blocks in spans]
    assert sizes == sorted(sizes, reverse=True)
    assert all(blocks == 1 or blocks * tile.rows <= most for tile, blocks in spans)
    assert sum(sizes) >= rows and sum(sizes[:-1]) < rows
    total = sum(time(*span) for span in spans)
    for tile in choices:
        for blocks in range(1, max(1, most // tile.rows) + 1):
            whole, rest = divmod(tiles.cdiv(rows, tile.rows), blocks)
            assert total <= (whole * time(tile, blocks) + (time(tile, rest) if rest else 0)) * 1.01


@pytest.mark.parametrize(
    ("wanted", "rows", "hidden", "vocab", "dtype", "options"),
    [
        (True, 128, 128, 2048, torch.bfloat16, (1, False, "")),
        (True, 128, 128, 2048, torch.bfloat16, (0, True, "")),
        (True, 1, 128, 2048, torch.bfloat16, (1, False, "tanh")),
        (False, 129, 128, 2048, torch.bfloat16, (1, False, "")),  # more rows than hidden units
        (False, 0, 128, 2048, torch.bfloat16, (1, False, "")),
        (False, 128, 136, 2048, torch.bfloat16, (1, False, "")),  # no descriptor describes the weight
        (False, 128, 128, 2048, torch.bfloat16, (2, False, "")),
        (False, 128, 128, 2048, torch.bfloat16, (1, True, "tanh")),
        (False, 128, 128, 2048, torch.float16, (1, False, "")),
        (True, 4096, 4096, 196608, torch.bfloat16, (1, False, "")),  # 1.5 GiB
        (False, 4096, 4096, 196609, torch.bfloat16, (1, False, "")),
    ],
)
def test_what_keeps_its_exponentials(
    wanted: bool,
    rows: int,
    hidden: int,
    vocab: int,
    dtype: torch.dtype,
    options: tuple[int, bool, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiles, "machine", lambda device: tiles.Machine("hopper", 132, True))
    assert (
        hopper.keeps_exponentials(meta(rows, hidden, dtype=dtype), meta(vocab, hidden, dtype=dtype), *options) == wanted
    )


@pytest.mark.parametrize("rows", [65, 2432, 4096, 16384, 16385, 32768])
@pytest.mark.parametrize("hidden", [512, 768, 896, 1024, 1152, 1280, 1536, 2048, 2304, 4096])
@pytest.mark.parametrize("most", [1, 20, 44, 300])
def test_chunks_of_exponentials(rows: int, hidden: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of about as many rows as are wanted, and never more than may be; tiles of d_input leave few without work."""
    processors, blocks = 132, tiles.cdiv(rows, 128)
    monkeypatch.setattr(tiles, "machine", lambda device: tiles.Machine("hopper", processors, True))
    tile = tiles.described("d_input", meta(rows, hidden, dtype=torch.bfloat16))
    columns, wanted = tiles.cdiv(hidden, tile.vocab), max(1.4 * hidden, rows / 7, 1024) / 128

    def work(chunks: int) -> float:
        """Tiles that there are, over those that all programs could make in the same time."""
        at = [blocks * chunk // chunks for chunk in range(chunks + 1)]
        took = 0.0
        for start, end in itertools.pairwise(at):
            whole, rest = divmod((end - start) * columns, processors)
            took += whole + (1 / min(processors // rest, tiles.MOST_PIECES) if rest else 0)
        return blocks * columns / processors / took

    chunks = tiles.chunks_of_exponentials(blocks, wanted, most, hidden, 128256, tile, processors)
    largest = tiles.cdiv(blocks, chunks)
    assert largest <= most and (largest <= 1.25 * wanted or largest == 1)
    assert largest >= 0.5 * min(wanted, most, blocks)
    usual = tiles.cdiv(blocks, max(1, min(most, int(wanted))))
    assert work(chunks) >= 0.97 * work(usual) or chunks < usual
    if rows >= 16384 and most >= 44:
        assert work(chunks) > 0.88


H100, H200, A100 = (9, 50 << 20), (9, 60 << 20), (8, 40 << 20)


@pytest.mark.parametrize(
    ("device", "shared"),
    [
        (H100, {"stats": 768, "exponentials": 1280, "d_input": 1536, "d_weight": 768}),
        (H200, {"stats": 1536, "exponentials": 1536, "d_input": 1536, "d_weight": 768}),
        (A100, {}),
    ],
    ids=["H100", "H200", "A100"],
)
def test_shared_tiles_by_device(
    device: tuple[int, int], shared: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    major, l2 = device
    properties = types.SimpleNamespace(major=major, multi_processor_count=132, L2_cache_size=l2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    machine = tiles._machine.__wrapped__(torch.device("cuda"))
    monkeypatch.setattr(tiles, "machine", lambda device: machine)
    for kernel in ("stats", "exponentials", "d_input", "d_weight"):
        hidden = range(64, 4096, 64)
        share = [n for n in hidden if tiles.described(kernel, meta(16384, n, dtype=torch.bfloat16)).together]
        assert min(share, default=None) == shared.get(kernel)


class Allocated(TorchDispatchMode):
    """Adds up what is allocated, whether or not it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view and not func._schema.is_mutable:
            self.bytes += result.nbytes
        return result


FEW_ROWS = (2048, 4096, 32000), (1024, 4096, 128256), (8192, 2304, 256000), (4096, 2048, 50257), (16384, 896, 151936)
MANY_ROWS = (
    ((262144, 464, 32000), 400), ((262144, 512, 32000), 400), ((262144, 976, 32000), 400), ((262144, 2000, 32000), 600),
    ((131072, 976, 128256), 256), ((131072, 2000, 128256), 400), ((131072, 2064, 128256), 600),
)  # fmt: skip


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("shape", "mebibytes"), [*itertools.product(FEW_ROWS, (140, 153, 256, 267, 600)), *MANY_ROWS], ids=str
)
def test_gradients_within_memory(
    shape: tuple[int, int, int], mebibytes: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "machine", lambda device: tiles.Machine("hopper", 132, True))
    monkeypatch.setattr(launcher, "launch", lambda *args, **options: None)
    monkeypatch.setattr(recorder, "MOST_STEPS", -1)
    rows, hidden, vocab = shape
    x, w = meta(rows, hidden, dtype=torch.bfloat16), meta(vocab, hidden, dtype=torch.bfloat16)
    b = meta(vocab, dtype=torch.bfloat16) if bias else None
    operands = x, w, b, meta(rows, 1, dtype=torch.int64), None, 1.0
    upstream = meta(rows), meta(rows, 1), None
    with Allocated() as allocated:
        arguments = *operands, meta(rows), meta(rows), *upstream, True, True, bias
        grads = cuda.linear_stats_backward(*arguments, memory=mebibytes << 20)
    assert allocated.bytes - sum(grad.nbytes for grad in grads) <= mebibytes << 20
