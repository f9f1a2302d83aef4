"""``fxfuse.kernels.launcher``: launches for which it takes the same compiled kernel are the same to Triton.

The ops run on meta tensors, of which nothing is computed, and each launch is compared with what Triton would specialise
a kernel for.
"""

from __future__ import annotations

import os
import random
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

from fxfuse.kernels import index as index_kernels  # noqa: E402
from fxfuse.kernels import launcher, recorder, tiles  # noqa: E402
from fxfuse.kernels import scale as scale_kernels  # noqa: E402
from fxfuse.ops import cuda, gpu, hopper  # noqa: E402

pytestmark = pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="kernels are interpreted")

SIZES = [(144, 2048, 512), (1100, 512, 1100), (64, 512, 256), (16, 512, 16)]


class Launches:
    """What Triton specialised each key's kernel for."""

    def __init__(self) -> None:
        self.seen: dict[Hashable, Any] = {}
        self.count = 0
        self.binders: dict[Any, Any] = {}

    def launch(self, signature: Hashable, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if kernel not in self.binders:
            backend = make_backend(GPUTarget("cuda", 90, 32))
            self.binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialisation, _ = self.binders[kernel](*args, **constants)
        key = launcher._key(signature, kernel, args, constants)
        self.count += 1
        assert self.seen.setdefault(key, specialisation) == specialisation, kernel.__name__


def meta(*shape: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> Tensor:
    """So many elements after where memory may begin."""
    count = torch.Size(shape).numel()
    return torch.empty(count + offset, dtype=dtype, device="meta")[offset:].view(shape)


def run_any(pick: random.Random) -> None:
    """One op, of operands and options that may be any."""
    rows, hidden, vocab = pick.choice(SIZES)
    dtype = pick.choice([torch.bfloat16, torch.float16])
    x = meta(rows, hidden, dtype=dtype, offset=pick.choice([0, 3]))
    if pick.random() < 0.2:
        x = meta(rows, hidden + 6, dtype=dtype)[:, :hidden]
    w = meta(vocab, hidden, dtype=dtype) if pick.random() < 0.7 else meta(hidden, vocab, dtype=dtype).t()
    bias = meta(vocab, dtype=pick.choice([dtype, torch.float32]), offset=pick.choice([0, 1]))
    bias = pick.choice([None, bias])
    class_weight = pick.choice([None, meta(vocab, offset=pick.choice([0, 1]))])
    index = meta(rows, pick.choice([0, 1, 1, 2, 16]), dtype=torch.int64)
    scale, transform = pick.choice([1.0, 1.0, 0.5, 16.0]), pick.choice(["", "", "tanh mul:30.0", "masked:-inf"])
    operands = x, w, bias, index, class_weight, scale
    if not gpu.GpuOperands.of(*operands, transform).is_described():
        return
    g_class_sum = meta(rows) if pick.random() < 0.5 else None
    upstream = meta(rows, offset=pick.choice([0, 1])), meta(*index.shape), g_class_sum
    coefficients = upstream[1:]
    need_input, need_weight, need_bias = (pick.random() < 0.7 for _ in range(3))
    needs = need_input, need_weight, need_bias and bias is not None
    match pick.choice(["statistics", "backward", "loss", "exponentials", "stored", "index", "scaled"]):
        case "index":
            labels = meta(pick.choice([1, 16, 1500, 5000]), dtype=torch.int64, offset=pick.choice([0, 1]))
            index_kernels.clean(labels, pick.choice([vocab, 1 << 33]), pick.choice([None, -100, 1, 2**40]))
        case "scaled":
            values = meta(pick.choice([1, 16, 5000, 1 << 33]), dtype=dtype, offset=pick.choice([0, 1]))
            scale_kernels.scaled(values, meta(offset=pick.choice([0, 1])))
            scale_kernels.scale_(values, meta(offset=pick.choice([0, 1])))
        case "statistics":
            names = "want_log_prob_sum", "want_expectation", "want_entropy", "want_top"
            wanted = {name: pick.random() < 0.4 for name in names}
            cuda.linear_stats(*operands, g_class_sum is not None, pick.random() < 0.5, **wanted, transform=transform)
        case "backward":
            wants_entropy = pick.random() < 0.3
            cuda.linear_stats_backward(
                *operands, meta(rows), meta(rows), *upstream, *needs, transform=transform,
                entropy=meta(rows) if wants_entropy else None, g_entropy=meta(rows) if wants_entropy else None,
                memory=pick.choice([0, 8 << 20]),
            )  # fmt: skip
        case "loss":
            cuda.linear_loss(*operands, *coefficients, *needs, transform=transform)
        case "exponentials" if dtype == torch.bfloat16 and index.shape[1] < 2 and not transform and rows <= hidden:
            _, *kept = cuda.linear_loss_exponentials(*operands, *coefficients)
            cuda.linear_loss_exponentials_backward(*operands, g_class_sum, meta(), *kept, *needs)
        case "stored" if tiles.takes_turns("stored", x):
            call = gpu.GpuOperands.of(*operands, transform).call()
            hopper.products(call, meta(rows, tiles.padded(vocab), dtype=dtype)[:, :vocab])


@pytest.mark.parametrize("takes_turns", [True, False])
def test_equal_keys_are_equal_to_triton(takes_turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    machine = tiles.Machine("hopper", 132, takes_turns)
    monkeypatch.setattr(tiles, "machine", lambda device: machine)
    for module in (launcher, index_kernels, scale_kernels):
        monkeypatch.setattr(module, "launch", launches.launch)
    monkeypatch.setattr(recorder, "_tapes", {})
    monkeypatch.setattr(recorder, "MOST_STEPS", -1)  # nothing is put on tape
    monkeypatch.setattr(hopper, "MOST_EXPONENTIALS_BYTES", 6 << 20)  # several chunks
    monkeypatch.setattr(tiles, "LEAST_FILL", 0.5)
    pick = random.Random(0)
    for _ in range(5000):
        run_any(pick)
    assert launches.count > 2 * len(launches.seen) > 2000
