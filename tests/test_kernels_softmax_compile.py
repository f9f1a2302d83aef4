"""The kernels of ``softmax_cuda`` and ``divergence_cuda`` compile ahead of time, as in ``test_kernels_compile``."""

from __future__ import annotations

import itertools
import os
import pathlib

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from test_kernels_compile import TARGETS, Launch, Recorder, compile_ahead, spills_in_product

from fxfuse.kernels import divergence, softmax, tiles
from fxfuse.ops import divergence_cuda, softmax_cuda

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="kernels are interpreted"),
]

KERNELS = {
    softmax: ("stats_kernel", "merge_kernel", "normalise_kernel", "sums_kernel", "gradient_kernel"),
    divergence: ("divergence_kernel", "gradients_kernel"),
}


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def record(
    monkeypatch: pytest.MonkeyPatch, machine: tiles.Machine, dtype: torch.dtype, rows: int, plain: bool
) -> list[Launch]:
    """The launches of both ops and their backwards: ``plain`` ones of even sizes, or with every option and odd ones."""
    launches: list[Launch] = []
    monkeypatch.setattr(tiles, "machine", lambda device: machine)
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), launches))
    vocab, hidden, transform = (128256, 4096, "") if plain else (50257, 4095, "tanh mul:30.0")
    head = (
        meta(rows, hidden, dtype=dtype),
        meta(vocab, hidden, dtype=dtype),
        None if plain else meta(vocab, dtype=dtype),
    )
    needs, options = (True, True, not plain), {"transform": transform}
    for log in (False, True):
        out = softmax_cuda.linear_softmax(*head, 0.5, log, dtype, **options)
        g = meta(rows, vocab, dtype=dtype) if plain else meta(vocab, rows, dtype=dtype).t()
        softmax_cuda.linear_softmax_backward(*head, 0.5, log, out, g, *needs, **options)
    heads = (*head, 0.5, *head, 2.0)
    for share, finite in itertools.product((0.0, 0.3), (False, True)):
        options = {"transform": transform, "teacher_transform": transform, "share": share, "finite": finite}
        statistics = divergence_cuda.linear_divergence(*heads, **options)
        g = meta(rows), meta(rows), *needs, False, not plain, False
        options["g_student_kl"] = meta(rows) if share else None
        divergence_cuda.linear_divergence_backward(*heads, *statistics, *g, **options)
    # Further windows launch the same kernels again.
    variants = {(one.kernel.__name__, one.options.get("LOG"), *_mixes(one)): one for one in launches}
    assert len(variants) == len([name for names in KERNELS.values() for name in names]) + 9
    return list(variants.values())


def _mixes(launch: Launch) -> tuple[bool, bool]:
    """Whether a kernel of divergences compares with a mixture, and whether it leaves infinite logits out."""
    given = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
    kinds = ("part_student_kl", "student_kl"), ("part_counted", "counted")
    mixes, counts = (given.get(forward, given.get(backward)) is not None for forward, backward in kinds)
    return mixes, counts


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "every option"])
@pytest.mark.parametrize(
    ("capability", "dtype", "rows"),
    [
        (80, BF16, 1),
        (80, BF16, 4096),
        (80, FP32, 4096),
        (90, BF16, 64),
        (90, BF16, 4096),
        (90, FP16, 4096),
        (100, BF16, 1),
    ],
    ids=str,
)
def test_compiles(
    capability: int,
    dtype: torch.dtype,
    rows: int,
    plain: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    machine, shared_memory = TARGETS[capability]
    launches = record(monkeypatch, machine, dtype, rows, plain)
    assert {one.kernel.__name__ for one in launches} == {name for names in KERNELS.values() for name in names}
    for launch in launches:
        compiled = compile_ahead(launch, capability)
        assert compiled.asm["cubin"][:4] == b"\x7fELF"
        assert compiled.metadata.shared <= shared_memory
        if "tt.dot" in compiled.asm["ttir"] and capability < 100:
            assert spills_in_product(compiled.asm["cubin"], tmp_path) == 0, launch.kernel.__name__
