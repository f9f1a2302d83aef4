"""The kernels of a loss one by one, each in turns with the bare product that it contains: where the time goes.

    python bench/kernels.py                       # the shapes of head.py, on a GPU with the kernels of kernels/hopper
    python bench/kernels.py --shape gpt2 --json kernels.json

Each column is the time of a kernel, with the small ones that belong to it, over the product of the same operands at the
size in which the loss uses it (a chunk of rows; for an odd vocabulary, of a padded product). ``products in chunks`` is
the three bare products chunk by chunk over the same at once: what chunks alone cost, with nothing done in them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from conditions import SHAPES, about, add_json, add_repeats, argument_parser, seconds, sizes, told, write
from head import SECONDS, Clock
from tabulate import tabulate
from tqdm import tqdm

from fxfuse.kernels import tiles
from fxfuse.kernels.hopper.launch import Call
from fxfuse.ops import hopper
from fxfuse.ops.contract import Upstream


class Kernels:
    """A call of a loss whose first chunk has been made, and its parts."""

    def __init__(self, shape: tuple[int, int, int], device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        rows, hidden, vocab = shape
        x = torch.randn(rows, hidden, device=device, dtype=dtype)
        w = (torch.randn(vocab, hidden, device=device) / hidden**0.5).to(dtype)
        index = torch.randint(vocab, (rows, 1), device=device)
        self.call = call = Call(x, w, None, index, None, 1.0, "")
        self.everything = slice(0, vocab)
        c = torch.full((rows,), 1 / rows, device=device)
        self.up = Upstream(c, -c[:, None], None)
        listed = call.listed(self.up)
        most = rows if rows <= hidden else hopper.rows_of_exponentials(call)
        self.rows = call.cut(listed, most)
        self.middle = min(1, self.rows.chunks - 1)  # a chunk that has one before it, if any has
        self.classes = call.classes(self.rows)
        self.stats = call.no_stats(False, False, False, False)
        self.made = hopper.Exponentials.begin(call, self.rows, self.stats, self.up)
        self.scratch = call.empty(max(call.parts_size(), call.sums_size(self.rows.most)))
        self.made.make(0, self.scratch)
        self.e = self.made.kept.e[:, :vocab]
        self.d_input = call.input_sum(torch.zeros_like(x), 1, self.rows.most)
        self.d_weight = call.weight_sum(torch.zeros_like(w), self.rows.chunks)
        self.span = call.stats_spans(listed, self.stats)[0]
        self.gathered = call.empty(self.span.most, hidden, dtype=x.dtype)
        call.gather(self.span, 0, self.gathered)

    def chunks(self) -> list[slice]:
        """The rows of each chunk, as ``kernels.hopper.schedule.chunk_bounds`` has them."""
        each, larger = divmod(tiles.cdiv(self.call.rows, self.call.row_block), self.rows.chunks)
        starts = [(chunk * each + min(chunk, larger)) * self.call.row_block for chunk in range(self.rows.chunks + 1)]
        return [slice(start, min(stop, self.call.rows)) for start, stop in itertools.pairwise(starts)]

    def statistics(self) -> None:
        self.call.stats_of(self.span, self.gathered, self.stats)

    def exponentials(self) -> None:
        self.made.make(0, self.scratch)

    def input_product(self) -> None:
        kept = self.made.kept
        self.call.add_input(
            self.rows, 0, self.everything, self.e, self.d_input, self.scratch, True, True, kept.factor, own=kept.own
        )

    def weight_product(self) -> None:
        """In the middle of the chunks, where there are several: with old sums and new ones."""
        chunk, kept = self.middle, self.made.kept
        classes = self.rows, chunk, kept.own, self.classes, self.d_weight, None
        if chunk > 0:
            self.call.finish_classes(*classes)
        self.call.add_weight(
            self.rows, chunk, self.everything, self.e, kept.gathered, self.d_weight, classes=self.classes
        )
        if chunk == 0:
            self.call.finish_classes(*classes)


def measure(shape: tuple[int, int, int], clock: Clock) -> dict[str, Any]:
    k = Kernels(shape)
    call = k.call
    x, w = call.input, F.pad(call.weight, (0, 0, 0, -call.vocab % 64))
    z = torch.empty(call.rows, w.shape[0], device="cuda", dtype=x.dtype)
    d_x, d_w = torch.empty_like(x), torch.empty_like(w)

    def products(here: slice) -> list[Callable[[], Any]]:
        z_here = z[: here.stop - here.start]
        return [
            lambda: torch.mm(x[here], w.t(), out=z_here),
            lambda: torch.mm(z_here, w, out=d_x[here]),
            lambda: torch.mm(z_here.t(), x[here], out=d_w),
        ]

    def run(parts: list[Callable[[], Any]]) -> None:
        for part in parts:
            part()

    chunks = [products(rows) for rows in k.chunks()]
    at_once, in_chunks = products(slice(0, call.rows)), list(itertools.chain(*chunks))
    row: dict[str, Any] = {"shape": "×".join(map(str, shape)), "rows": k.rows.most, "chunks": k.rows.chunks}
    row["statistics"] = clock.ratio(k.statistics, products(slice(0, min(k.span.most, call.rows)))[0])[0]
    row["exponentials"] = clock.ratio(k.exponentials, chunks[0][0])[0]
    row["dX"] = clock.ratio(k.input_product, chunks[0][1])[0]
    row["dW"] = clock.ratio(k.weight_product, chunks[k.middle][2])[0]
    row["products in chunks"] = clock.ratio(lambda: run(in_chunks), lambda: run(at_once))[0]
    return row


def measurements(shapes: list[tuple[int, int, int]], clock: Clock) -> Iterator[dict[str, Any]]:
    for shape in shapes:
        yield measure(shape, clock)
        torch.cuda.empty_cache()


def main() -> int:
    parser = argument_parser(__doc__)
    many = [name for name, shape in SHAPES.items() if shape[0] > 64]
    parser.add_argument("--shape", type=sizes, action="append", metavar="NxDxV", help="rows x hidden x vocabulary, or "
                        "a name: " + ", ".join(many))  # fmt: skip
    add_repeats(parser)
    parser.add_argument("--seconds", type=seconds, default=SECONDS, help="of a turn, about (default %(default)s)")
    add_json(parser)
    args = parser.parse_args()
    example = torch.empty(0, 16, dtype=torch.bfloat16, device="cuda" if torch.cuda.is_available() else "cpu")
    if not (example.is_cuda and tiles.has_descriptors(example)):
        parser.error("a GPU of compute capability 9.0 or 10.0 is needed")
    shapes = args.shape or [SHAPES[name] for name in many]
    if any(rows <= 64 for rows, _, _ in shapes):
        parser.error("--shape: more than 64 rows are needed")
    clock = Clock(torch.device("cuda"), args.repeats, args.seconds)
    conditions = about("cuda", "bfloat16")
    results: list[dict[str, Any]] = []
    for row in tqdm(measurements(shapes, clock), total=len(shapes), file=sys.stderr, unit="shape"):
        results.append(row)
        write(args.json, conditions, results)
    print(f"{told(conditions)}: time over the bare product's")
    print(tabulate(results, headers="keys", floatfmt=".3f"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
