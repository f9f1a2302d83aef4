"""Time and memory of one head with its loss: fxfuse beside eager and Inductor, in ratio to the bare products.

    python bench/head.py                                  # the shapes of real models, on the GPU
    python bench/head.py --shape 2048x512x32000 --dtype float32 --json head.json

``÷3`` is the time of loss and gradients over three products of the same operands (logits, dX, dW) measured in the
same process; ``fwd ÷1`` the loss alone over one. ``MiB`` is the peak of memory above the operands, dX and dW
included; the errors are relative L2 errors of the gradients against float64.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from tqdm import tqdm

import fxfuse

SHAPES = {
    "llama3-4k": (4096, 4096, 128256),
    "llama3-8b": (16384, 4096, 128256),
    "qwen-0.5b": (16384, 896, 151936),
    "gemma2-2b": (8192, 2304, 256000),
    "gpt2": (16384, 768, 50257),
}


def plain(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss as most programs compute it: logits in the model's dtype, cross entropy in float32."""
    return F.cross_entropy(F.linear(x, w).float(), y)


def implementations() -> dict[str, Callable[..., torch.Tensor]]:
    return {
        "eager": plain,
        "inductor": torch.compile(plain, dynamic=False),
        "fxfuse": torch.compile(plain, backend="fxfuse", dynamic=False, options={"fxfuse.min_logits_bytes": 0}),
        "fxfuse (function)": fxfuse.linear_cross_entropy,
    }


class Clock:
    """Median time of a function, on the device, in milliseconds."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def __call__(self, f: Callable[[], Any]) -> float:
        times = []
        for _ in range(2):
            f()
        for _ in range(self.repeats):
            self.sync()
            start = time.perf_counter()
            f()
            self.sync()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times)


def peak_mib(f: Callable[[], Any]) -> float | None:
    """Peak of CUDA memory during ``f`` above what was in use before, in MiB."""
    if not torch.cuda.is_available():
        f()
        return None
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    f()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def exact_gradients(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the mean loss in float64, in chunks of rows."""
    wide = w.double()
    dx, dw = torch.empty_like(x, dtype=torch.float64), torch.zeros_like(wide)
    for rows in torch.arange(x.shape[0], device=x.device).split(1024):
        p = (x[rows].double() @ wide.t()).softmax(-1)
        p[torch.arange(len(rows), device=x.device), y[rows]] -= 1
        p /= x.shape[0]
        dx[rows] = p @ wide
        dw.addmm_(p.t(), x[rows].double())
    return dx, dw


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm())


def measure(shape: tuple[int, int, int], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    rows, hidden, vocab = shape
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    torch.manual_seed(0)
    x = torch.randn(rows, hidden, device=device, dtype=dtype)
    w = (torch.randn(vocab, hidden, device=device) / hidden**0.5).to(dtype)
    y = torch.randint(vocab, (rows,), device=device)
    y[: int(rows * args.ignored)] = -100
    clock = Clock(device, args.repeats)

    def products() -> None:
        z = x @ w.t()
        _ = z @ w, z.t() @ x

    three, one = clock(products), clock(lambda: x @ w.t())
    exact = exact_gradients(x, w, y) if args.errors and not args.ignored else None
    x.requires_grad_()
    w.requires_grad_()
    for name, f in implementations().items():
        torch._dynamo.reset()

        def forward(f: Callable[..., torch.Tensor] = f) -> torch.Tensor:
            with torch.no_grad():
                return f(x, w, y)

        def step(f: Callable[..., torch.Tensor] = f) -> None:
            x.grad = w.grad = None
            f(x, w, y).backward()

        row: dict[str, Any] = {"shape": "×".join(map(str, shape)), "implementation": name}
        try:
            start = time.perf_counter()
            step()
            clock.sync()
            row["first call s"] = time.perf_counter() - start
            row["÷3"] = clock(step) / three
            row["fwd ÷1"] = clock(forward) / one
            x.grad = w.grad = None
            row["MiB"] = peak_mib(step)
            if exact is not None:
                row["dX error"], row["dW error"] = error(x.grad, exact[0]), error(w.grad, exact[1])
            row["fwd MiB"] = peak_mib(forward)
        except torch.OutOfMemoryError:
            row["÷3"] = "out of memory"
        x.grad = w.grad = None
        yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", metavar="NxDxV", help="rows x hidden x vocabulary, or a name: "
                        + ", ".join(SHAPES))  # fmt: skip
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ignored", type=float, default=0.0, help="fraction of the labels that are ignored")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--errors", action="store_true", help="also compare the gradients with float64")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    args = parser.parse_args()
    try:
        shapes = [SHAPES.get(s) or tuple(int(n) for n in s.split("x")) for s in args.shape or SHAPES]
        if any(len(shape) != 3 or min(shape) < 1 for shape in shapes):
            raise ValueError("three sizes of one or more are needed")
    except ValueError as wrong:
        parser.error(f"--shape: {wrong}; give NxDxV or one of {', '.join(SHAPES)}")
    results = []
    with tqdm(total=len(shapes) * len(implementations()), file=sys.stderr, unit="run") as progress:
        for shape in shapes:
            for row in measure(shape, args):  # type: ignore[arg-type]
                results.append(row)
                progress.update()
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    print(f"{name}, torch {torch.__version__}, {args.dtype}, mean cross entropy, {args.ignored:.0%} ignored")
    print(tabulate(results, headers="keys", floatfmt=".3g"))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"device": name, "torch": torch.__version__, "dtype": args.dtype, "results": results}, file, indent=1
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
