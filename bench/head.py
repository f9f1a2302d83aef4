"""Time and memory of one head with its loss: fxfuse beside what else is installed, in ratio to the bare products.

    python bench/head.py                                  # the shapes of real models, on the GPU
    python bench/head.py --shape 2048x512x32000 --dtype float32 --json head.json
    python bench/head.py --ignored 0.75                   # three quarters of the labels are ignore_index

``÷3`` is the time of loss and gradients over three bare products of the same operands (logits, dX, dW; for an odd
vocabulary, of a padded one); ``fwd ÷1`` the loss alone over one product; ``rows ÷4`` the gradients of per-row losses
(``reduction="none"``) over four. Each is measured in turns with its products, in one process, several times: medians.
A turn is some calls one after the other, as in a loop; what the host takes for one shows only where the device takes
less (``--host`` measures it). The card is warm and its power is limited, for both. ``extra`` is the peak of memory
above the operands, in MiB, beside dX and dW themselves; ``fwd extra`` and ``rows extra`` those of the loss alone and of
per-row losses. ``first call s`` is the first step, compilation included. The errors are relative L2 errors of the
gradients against float64, and ``same bits`` tells whether ten steps gave the same gradients. With ignored labels, ``of
dense`` is the time over that of the same implementation with none ignored. ``softcap`` and the like are the time with
that over the time without. Of 16 rows or fewer, ``fwd of copy bandwidth`` is how fast the loss reads the weight, over
how fast a copy moves it; ``in a CUDA graph`` the same, replayed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from conditions import (
    SHAPES,
    about,
    add_json,
    add_machine,
    add_repeats,
    argument_parser,
    on_gpu,
    seconds,
    sizes,
    told,
    write,
)
from tabulate import tabulate
from tqdm import tqdm

from fxfuse.report.memory import peak_bytes

Loss = Callable[..., torch.Tensor]
SECONDS = 0.3  # of a turn: some calls, of the largest step too


def plain(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """The loss as most programs compute it: logits in the model's dtype, cross entropy in float32."""
    return F.cross_entropy(F.linear(x, w).float(), y, reduction=reduction)


def with_options(bias: torch.Tensor, class_weight: torch.Tensor) -> dict[str, Loss]:
    """The loss with one thing more each."""

    def capped(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((torch.tanh(F.linear(x, w) / 30) * 30).float(), y)

    return {
        "softcap": capped,
        "scale": lambda x, w, y: F.cross_entropy((F.linear(x, w) / 1.3).float(), y),
        "bias": lambda x, w, y: F.cross_entropy(F.linear(x, w, bias).float(), y),
        "class weight": lambda x, w, y: F.cross_entropy(F.linear(x, w).float(), y, weight=class_weight),
        "label smoothing": lambda x, w, y: F.cross_entropy(F.linear(x, w).float(), y, label_smoothing=0.1),
    }


def fused(loss: Loss, memory: int = 0) -> Loss:
    options = {"fxfuse.min_logits_bytes": 0, "fxfuse.memory": memory}
    return torch.compile(loss, backend="fxfuse", dynamic=False, options=options)


def peers() -> dict[str, Loss]:
    """Other implementations of the mean loss, of those that are installed here."""
    found: dict[str, Loss] = {}
    if hasattr(F, "linear_cross_entropy"):
        found["torch linear_cross_entropy"] = lambda x, w, y: F.linear_cross_entropy(x, w, y)
        chunked = torch.nn.LinearCrossEntropyOptions()
        found["torch linear_cross_entropy, chunked"] = lambda x, w, y: F.linear_cross_entropy(x, w, y, options=chunked)
    with contextlib.suppress(ImportError):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        found["Liger-Kernel"] = lambda x, w, y: liger(w, x, y)
    with contextlib.suppress(ImportError):
        from cut_cross_entropy import linear_cross_entropy

        found["Cut Cross-Entropy"] = lambda x, w, y: linear_cross_entropy(x, w, y)
    with contextlib.suppress(ImportError):
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        found["QuACK"] = lambda x, w, y: chunked_linear_cross_entropy(x, w, y, reduction="mean")
    with contextlib.suppress(ImportError):
        from fla.modules import FusedLinearCrossEntropyLoss

        fla = FusedLinearCrossEntropyLoss()
        found["fla-core"] = lambda x, w, y: fla(x, y, w)
    return found


@functools.cache
def implementations() -> dict[str, Loss]:
    return {
        "eager": plain,
        "inductor": torch.compile(plain, dynamic=False),
        "inductor, auto_chunker": torch.compile(plain, dynamic=False, options={"auto_chunker.enable": True}),
        "fxfuse": fused(plain),
        "fxfuse in 256 MiB": fused(plain, 256 << 20),
        **peers(),
    }


class Clock:
    """Times on the device, each in turns with what it is compared to."""

    def __init__(self, device: torch.device, repeats: int, seconds: float = SECONDS) -> None:
        self.device, self.repeats, self.seconds = device, repeats, seconds

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def once(self, f: Callable[[], Any], calls: int) -> float:
        """Seconds a call. On a GPU one more comes first: as in a loop, the device is busy when the host begins."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            for _ in range(calls):
                f()
            return (time.perf_counter() - start) / calls
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        f()
        before.record()
        for _ in range(calls):
            f()
        after.record()
        self.sync()
        return before.elapsed_time(after) / 1e3 / calls

    def ratio(self, f: Callable[[], Any], base: Callable[[], Any]) -> tuple[float, float]:
        """(time of f over time of base, milliseconds of f), medians of turns."""
        for _ in range(3):  # the first may compile, and the second write down what later ones play (kernels.recorder)
            f(), base()
        calls = [max(1, min(1000, int(self.seconds / max(self.once(g, 1), 1e-6)))) for g in (f, base)]
        turns = [(self.once(base, calls[1]), self.once(f, calls[0])) for _ in range(self.repeats)]
        bases, times = (statistics.median(column) for column in zip(*turns, strict=True))
        return times / bases, times * 1e3

    def host(self, f: Callable[[], Any], calls: int = 10) -> float:
        """Microseconds that the host takes for a call, the device being busy: the median of a few turns.

        One more comes first, as in ``once``: after a wait the host takes three times as long.
        """
        for _ in range(3):  # as above
            f()
        turns = []
        for _ in range(self.repeats):  # of fewer launches than CUDA lets wait, some 1000
            self.sync()
            torch.cuda._sleep(100_000_000)  # cycles, some 50 ms
            f()
            start = time.perf_counter()
            for _ in range(calls):
                f()
            turns.append((time.perf_counter() - start) / calls)
        self.sync()
        return statistics.median(turns) * 1e6


def peak_mib(f: Callable[[], Any], device: torch.device) -> float | None:
    """Peak of memory during ``f`` above what was in use before, in MiB: CUDA's, or for a CPU the process's."""
    peak = peak_bytes(f, device)
    return None if peak is None else peak / 2**20


def exact_gradients(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the mean loss in float64, in chunks of rows."""
    wide = w.double()
    dx, dw = torch.zeros_like(x, dtype=torch.float64), torch.zeros_like(wide)
    counted = (y >= 0).nonzero()[:, 0]
    for rows in counted.split(1024):
        p = (x[rows].double() @ wide.t()).softmax(-1)
        p[torch.arange(len(rows), device=x.device), y[rows]] -= 1
        p /= len(counted)
        dx[rows] = p @ wide
        dw.addmm_(p.t(), x[rows].double())
    return dx, dw


def captured(run: Callable[[], Any]) -> Callable[[], None]:
    """The same as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay  # type: ignore[no-any-return]


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm())


class Case:
    """One shape's operands, its bare products, and the measurements of an implementation on them."""

    def __init__(self, shape: tuple[int, int, int], args: argparse.Namespace) -> None:
        self.args, self.shape = args, shape
        rows, hidden, vocab = shape
        self.device = device = torch.device(args.device)
        dtype = getattr(torch, args.dtype)
        self.clock = Clock(device, args.repeats, args.seconds)
        torch.manual_seed(0)
        self.x = torch.randn(rows, hidden, device=device, dtype=dtype)
        self.w = (torch.randn(vocab, hidden, device=device) / hidden**0.5).to(dtype)
        self.dense = torch.randint(vocab, (rows,), device=device)
        self.y = torch.where(torch.rand(rows, device=device) < args.ignored, -100, self.dense)
        self.exact = exact_gradients(self.x, self.w, self.y) if args.errors else None
        self.hidden = self.x.detach()  # as a model makes them under no_grad
        self.x.requires_grad_()
        self.w.requires_grad_()

    def products(self, count: int) -> Callable[[], None]:
        """So many products: one for the logits; three, dX and dW too; four, the logits twice."""
        x, w = self.x.detach(), self.w.detach()
        padding = -w.shape[0] % 64
        if padding:
            w = F.pad(w, (0, 0, 0, padding))

        def one() -> torch.Tensor:
            return x @ w.t()

        def all_of_them() -> None:
            for _ in range(count - 2):
                z = one()
            _ = z @ w, z.t() @ x

        return one if count == 1 else all_of_them  # type: ignore[return-value]

    def no_gradients(self, *others: torch.Tensor) -> None:
        for leaf in (self.x, self.w, *others):
            leaf.grad = None

    def step(self, f: Loss, labels: torch.Tensor, *others: torch.Tensor) -> None:
        """A step, with gradients of ``others`` too, if they have any."""
        self.no_gradients(*others)
        f(self.x, self.w, labels).backward()

    def per_row(self, f: Loss, g: torch.Tensor) -> None:
        self.no_gradients()
        f(self.x, self.w, self.y, reduction="none").backward(g)

    def forward(self, f: Loss, labels: torch.Tensor) -> None:
        with torch.no_grad():
            f(self.hidden, self.w, labels)

    def measure(self, name: str, f: Loss) -> dict[str, Any]:
        """The row of the table. What fails says so in its column, and of a peer it does not end the rest."""
        row: dict[str, Any] = {"shape": "×".join(map(str, self.shape)), "implementation": name}
        torch._dynamo.reset()
        for column, measured in self.parts(name, f):
            try:
                row |= measured()
            except torch.OutOfMemoryError:
                row[column] = "out of memory"
            except Exception as failure:
                if name == "fxfuse":
                    raise
                row[column] = type(failure).__name__
                said = str(failure).strip().splitlines() or [""]
                tqdm.write(f"{name}, {row['shape']}, {column}: {row[column]}: {said[0]}", file=sys.stderr)
            finally:
                self.no_gradients()
        return row

    def parts(self, name: str, f: Loss) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """The columns that are asked for, each with what measures it, and perhaps others beside it."""
        step, loss = (lambda: self.step(f, self.y)), (lambda: self.forward(f, self.y))
        yield "first call s", lambda: self.first_call(step)
        if self.exact is not None:
            yield "dX error", lambda: self.errors(step)
        yield "÷3", lambda: self.over(step, self.products(3), "÷3", "ms")
        yield "extra", lambda: {"extra": self.beside_gradients(step)}
        yield "fwd ÷1", lambda: self.over(loss, self.products(1), "fwd ÷1", "fwd ms")
        yield "fwd extra", lambda: {"fwd extra": peak_mib(loss, self.device)}
        if self.args.ignored:
            yield "of dense", lambda: self.over(step, lambda: self.step(f, self.dense), "of dense")
            yield "fwd of dense", lambda: self.over(loss, lambda: self.forward(f, self.dense), "fwd of dense")
        if self.args.per_row and name in ("eager", "inductor", "fxfuse"):
            g = torch.randn(len(self.y), device=self.device) / len(self.y)
            yield "rows ÷4", lambda: self.over(lambda: self.per_row(f, g), self.products(4), "rows ÷4")
            yield "rows extra", lambda: {"rows extra": self.beside_gradients(lambda: self.per_row(f, g))}
        if self.args.host:
            yield "host µs", lambda: {"host µs": self.clock.host(step)}
            yield "fwd host µs", lambda: {"fwd host µs": self.clock.host(loss)}
        if self.args.options and name == "fxfuse":
            yield from self.options(step, loss)
        if self.shape[0] <= 16:
            # The weight is read once; a copy reads and writes it.
            copy, weight = torch.empty_like(self.w), self.w.detach()

            def over_copy(run: Callable[[], Any], column: str) -> dict[str, Any]:
                return {column: 0.5 / self.clock.ratio(run, lambda: copy.copy_(weight))[0]}

            yield "fwd of copy bandwidth", lambda: over_copy(loss, "fwd of copy bandwidth")
            if name == "fxfuse" and self.x.is_cuda:  # which waits for nothing, so it can be captured
                yield "in a CUDA graph", lambda: over_copy(captured(loss), "in a CUDA graph")

    def options(
        self, step: Callable[[], Any], loss: Callable[[], Any]
    ) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        vocab = self.shape[2]
        bias = torch.randn(vocab, device=self.w.device, dtype=self.w.dtype).requires_grad_()
        for option, more in with_options(bias, torch.rand(vocab, device=self.w.device)).items():
            compiled = fused(more)
            its_step = functools.partial(self.step, compiled, self.y, bias)
            its_loss = functools.partial(self.forward, compiled, self.y)
            yield option, functools.partial(self.over, its_step, step, option)
            yield f"fwd {option}", functools.partial(self.over, its_loss, loss, f"fwd {option}")

    def over(
        self, run: Callable[[], Any], base: Callable[[], Any], ratio: str, milliseconds: str | None = None
    ) -> dict[str, Any]:
        """The time of ``run`` over that of ``base`` as the column ``ratio``, and perhaps the time itself."""
        times, ms = self.clock.ratio(run, base)
        return {ratio: times} if milliseconds is None else {ratio: times, milliseconds: ms}

    def first_call(self, step: Callable[[], Any]) -> dict[str, Any]:
        start = time.perf_counter()
        step()
        self.clock.sync()
        return {"first call s": time.perf_counter() - start}

    def errors(self, step: Callable[[], Any]) -> dict[str, Any]:
        assert self.exact is not None
        step()
        first = self.x.grad, self.w.grad
        errors = {f"{of} error": error(g, exact) for of, g, exact in zip(("dX", "dW"), first, self.exact, strict=True)}
        return {**errors, "same bits": self.repeats_itself(step, first)}

    def repeats_itself(self, step: Callable[[], Any], first: tuple[torch.Tensor, torch.Tensor]) -> bool:
        """Whether nine more steps give the same gradients."""
        for _ in range(9):
            step()
            if not (torch.equal(self.x.grad, first[0]) and torch.equal(self.w.grad, first[1])):
                return False
        return True

    def beside_gradients(self, run: Callable[[], Any]) -> float | None:
        """The peak of memory of what leaves dX and dW, in MiB, without these."""
        self.no_gradients()
        peak = peak_mib(run, self.device)
        own = (self.x.numel() + self.w.numel()) * self.x.element_size() / 2**20
        return None if peak is None else peak - own


def measurements(shapes: list[tuple[int, int, int]], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    chosen = {n: f for n, f in implementations().items() if not args.only or n in args.only}
    for shape in shapes:
        case = Case(shape, args)
        for name, f in chosen.items():
            yield case.measure(name, f)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        del case


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", type=sizes, action="append", metavar="NxDxV", help="rows x hidden x vocabulary, or "
                        "a name: " + ", ".join(SHAPES))  # fmt: skip
    add_machine(parser)
    parser.add_argument(
        "--tf32", action="store_true", help="let PyTorch multiply float32 in TF32, the bare products too"
    )
    parser.add_argument("--ignored", type=float, default=0.0, help="fraction of the labels that are ignored")
    add_repeats(parser)
    parser.add_argument("--seconds", type=seconds, default=SECONDS, help="of a turn, about; long ones leave the card "
                        "at the clock that its power allows for long (default %(default)s)")  # fmt: skip
    parser.add_argument("--errors", action="store_true", help="also compare the gradients with float64, and with those "
                        "of nine more steps")  # fmt: skip
    parser.add_argument("--per-row", action="store_true", help="also time the gradients of per-row losses")
    parser.add_argument("--host", action="store_true", help="also time the host, with a busy device (CUDA only)")
    parser.add_argument("--options", action="store_true", help="also time fxfuse with a softcap, a scale, a bias, "
                        "class weights and label smoothing, each over the plain loss")  # fmt: skip
    known = implementations()
    parser.add_argument("--only", nargs="+", action="extend", metavar="NAME", choices=list(known),
                        help="measure these only, of: " + "; ".join(known))  # fmt: skip
    add_json(parser)
    args = parser.parse_args()
    shapes = args.shape or list(SHAPES.values())
    if not 0 <= args.ignored < 1:
        parser.error("--ignored: a fraction from 0 to below 1 is needed")
    if args.host and not on_gpu(args.device):
        parser.error("--host: a CUDA device is needed")
    if args.tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
    count = len(set(args.only or known))
    conditions = {**about(args.device, args.dtype), "ignored": args.ignored, "seconds of a turn": args.seconds}
    results: list[dict[str, Any]] = []
    for row in tqdm(measurements(shapes, args), total=len(shapes) * count, file=sys.stderr, unit="run"):
        results.append(row)
        write(args.json, conditions, results)
    print(f"{told(conditions)}, mean cross entropy, {args.ignored:.0%} ignored")
    print(tabulate(results, headers="keys", floatfmt=".3g"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
