"""Log-probabilities of given tokens: time and peak memory over the number of rows and over the vocabulary.

    python bench/logprobs.py --json bench/results/logprobs-h200.json
    python bench/plots.py bench/results                     # draws what is there

``fused`` is ``fxfuse.linear_log_probs``; ``naive`` is the same with the logits in full: ``log_softmax`` and ``gather``.
Both without gradients. Memory is the peak above the operands.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from conditions import about, add_json, add_machine, add_repeats, argument_parser, positive, told, write
from head import Clock, peak_mib
from tabulate import tabulate
from tqdm import tqdm

import fxfuse

HIDDEN = 4096
# What varies, and what the other is meanwhile.
ROWS = [1, 16, 256, 1024, 4096, 8192, 16384]
VOCABULARIES = [8192, 16384, 32768, 65536, 131072, 262144]
VOCABULARY, SAME_ROWS = 131072, 4096


def naive(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x @ w.t()).float().log_softmax(-1).gather(-1, y[:, None])[:, 0]


def fused(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return fxfuse.linear_log_probs(x, w, y)


def measure(rows: int, hidden: int, vocab: int, args: argparse.Namespace) -> dict[str, Any]:
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    torch.manual_seed(0)
    x = torch.randn(rows, hidden, device=device, dtype=dtype)
    w = (torch.randn(vocab, hidden, device=device) / hidden**0.5).to(dtype)
    y = torch.randint(vocab, (rows,), device=device)
    clock = Clock(device, args.repeats)
    row: dict[str, Any] = {"rows": rows, "hidden": hidden, "vocab": vocab}
    with torch.no_grad():
        for name, f in (("fused", fused), ("naive", naive)):
            try:
                peak = peak_mib(lambda f=f: f(x, w, y), device)
                ratio, time = clock.ratio(lambda f=f: f(x, w, y), lambda: x @ w.t())
            except torch.OutOfMemoryError:
                peak = ratio = time = None
            row |= {f"{name} MiB": peak, f"{name} ÷1": ratio, f"{name} ms": time}
    if row["fused ms"] is not None and row["naive ms"] is not None:
        row["largest difference"] = float((fused(x, w, y) - naive(x, w, y)).abs().max())
    return row


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--hidden", type=positive, default=HIDDEN, help="hidden units (default %(default)s)")
    parser.add_argument("--rows", type=positive, nargs="+", default=ROWS, help=f"with the vocabulary at {VOCABULARY}")
    parser.add_argument("--vocab", type=positive, nargs="+", default=VOCABULARIES, help=f"with {SAME_ROWS} rows")
    add_machine(parser)
    add_repeats(parser)
    add_json(parser)
    args = parser.parse_args()
    sizes = [("rows", rows, VOCABULARY) for rows in args.rows] + [("vocab", SAME_ROWS, vocab) for vocab in args.vocab]
    conditions = about(args.device, args.dtype)
    results: list[dict[str, Any]] = []
    for over, rows, vocab in tqdm(sizes, file=sys.stderr, unit="size"):
        results.append({"over": over, **measure(rows, args.hidden, vocab, args)})
        write(args.json, conditions, results)
    print(f"{told(conditions)}, log-probabilities without gradients")
    print(tabulate(results, headers="keys", floatfmt=".3g"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
