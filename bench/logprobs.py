"""Log-probabilities of given tokens: time and peak memory over the number of rows and over the vocabulary.

    python bench/logprobs.py --json bench/results/logprobs-h200.json
    python bench/plots.py bench/results                     # draws what is there

``fused`` is ``fxfuse.linear_log_probs``; ``naive`` is the same with the logits in full: ``log_softmax`` and ``gather``.
Both without gradients. Memory is the peak above the operands.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from conditions import about, add_machine, told
from head import Clock, peak_mib
from tabulate import tabulate
from tqdm import tqdm

import fxfuse

HIDDEN = 4096
ROWS = [1, 16, 256, 1024, 4096, 8192, 16384]
VOCABULARIES = [8192, 16384, 32768, 65536, 131072, 262144]


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
                row[f"{name} MiB"] = peak_mib(lambda f=f: f(x, w, y))
                row[f"{name} ÷1"], row[f"{name} ms"] = clock.ratio(lambda f=f: f(x, w, y), lambda: x @ w.t())
            except torch.OutOfMemoryError:
                row[f"{name} ms"] = None
    if row["naive ms"] is not None:
        row["largest difference"] = float((fused(x, w, y) - naive(x, w, y)).abs().max())
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="with the vocabulary at 131072")
    parser.add_argument("--vocab", type=int, nargs="+", default=VOCABULARIES, help="with 4096 rows")
    add_machine(parser)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    args = parser.parse_args()
    sizes = [("rows", rows, 131072) for rows in args.rows] + [("vocab", 4096, vocab) for vocab in args.vocab]
    results = []
    for over, rows, vocab in tqdm(sizes, file=sys.stderr, unit="size"):
        results.append({"over": over, **measure(rows, args.hidden, vocab, args)})
    conditions = about(args.device, args.dtype)
    print(f"{told(conditions)}, log-probabilities without gradients")
    print(tabulate(results, headers="keys", floatfmt=".3g"))
    if args.json:
        with open(args.json, "w") as file:
            json.dump({**conditions, "results": results}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
