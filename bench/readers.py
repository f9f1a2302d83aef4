"""Time and memory of what programs read besides a loss: entropies, masks, metrics, distillation, all probabilities.

    python bench/readers.py --json bench/results/readers-h200.json
    python bench/readers.py --device cpu --dtype float32 --shape 512x256x8000

Values and all gradients, in eager, under Inductor and under fxfuse, in turns with the bare product of the same
operands: ``÷1`` is the time over that of one product (of the student's and the teacher's, for distillation). ``extra``
is the peak of memory above the operands, in MiB, gradients included.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from conditions import SHAPES, about, add_json, add_machine, add_repeats, argument_parser, sizes, told, write
from head import Clock, peak_mib
from tabulate import tabulate
from tqdm import tqdm

Tensors = tuple[torch.Tensor, ...]
Program = Callable[..., torch.Tensor]


def policy(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, *_: Any) -> torch.Tensor:
    """Log-probabilities and entropies, both with gradients."""
    lp = F.linear(x, w).float().log_softmax(-1)
    return lp.gather(-1, y[:, None]).mean() + 0.01 * (lp.exp() * lp).sum(-1).mean()


def masked(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, *_: Any) -> torch.Tensor:
    """A loss without some classes, over a temperature for each row."""
    t = 1 + y.remainder(3)[:, None].to(x.dtype)
    return F.cross_entropy((F.linear(x, w) / t).float().masked_fill(mask, -torch.inf), y)


def accuracy(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, *_: Any) -> torch.Tensor:
    """The loss, and how often it is right."""
    z = F.linear(x, w).float()
    return F.cross_entropy(z, y) + 0 * (z.argmax(-1) == y).float().mean()


def penalised(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, *_: Any) -> torch.Tensor:
    """The z-loss of PaLM and, after it, the loss."""
    z = F.linear(x, w).float()
    penalty = 1e-4 * z.logsumexp(-1).square().mean()
    return penalty + F.cross_entropy(z, y.view(-1))


def by_hand(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, *_: Any) -> torch.Tensor:
    """The loss of logits less their largest."""
    z = F.linear(x, w).float()
    z = z - z.max(-1, keepdim=True).values
    return (z.exp().sum(-1).log() - z.gather(-1, y.unsqueeze(-1)).squeeze(-1)).mean()


def distilled(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, teacher: Tensors) -> torch.Tensor:
    """The divergence from a frozen teacher of half the width."""
    target = F.linear(*teacher).float().softmax(-1)
    return F.kl_div(F.linear(x, w).float().log_softmax(-1), target, reduction="batchmean")


def jensen_shannon(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, teacher: Tensors
) -> torch.Tensor:
    """The generalised Jensen-Shannon divergence from it, as TRL's GKDTrainer has it."""
    with torch.no_grad():
        log_p = F.linear(*teacher).float().log_softmax(-1)
    log_q = F.linear(x, w).float().log_softmax(-1)
    log_m = torch.logsumexp(torch.stack([log_q + math.log(0.5), log_p + math.log(0.5)]), 0)
    kls = (F.kl_div(log_m, log, reduction="none", log_target=True) for log in (log_p, log_q))
    return sum(0.5 * kl for kl in kls).sum() / len(x)


def finite(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, teacher: Tensors) -> torch.Tensor:
    """The divergence the other way around, without infinite logits, as in MiniLLM's and DistiLLM's code."""
    with torch.no_grad():
        of_teacher = F.linear(*teacher)
        log_p = of_teacher.float().log_softmax(-1)
    z = F.linear(x, w)
    q, log_q = z.float().softmax(-1), z.float().log_softmax(-1)
    infinite = z.isinf() | of_teacher.isinf()
    terms = (q * log_p).masked_fill(infinite, 0)
    terms -= (q * log_q).masked_fill(infinite, 0)
    return -terms.sum(-1).mean()


def everything(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, *_: Any) -> torch.Tensor:
    """All log-probabilities, returned; without gradients."""
    return F.linear(x, w).log_softmax(-1)


PROGRAMS: dict[str, Program] = {
    "log-probability and entropy": policy,
    "mask and temperatures": masked,
    "loss and accuracy": accuracy,
    "z-loss and loss": penalised,
    "loss by hand": by_hand,
    "distillation": distilled,
    "Jensen-Shannon": jensen_shannon,
    "reverse, finite": finite,
    "all log-probabilities": everything,
}


OF_TWO = ("distillation", "Jensen-Shannon", "reverse, finite")


def measure(name: str, rows: int, hidden: int, vocab: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    torch.manual_seed(0)
    x = torch.randn(rows, hidden, device=device, dtype=dtype).requires_grad_()
    w = (torch.randn(vocab, hidden, device=device) / hidden**0.5).to(dtype).requires_grad_()
    mask = torch.rand(vocab, device=device) < 0.25
    classes = (~mask).nonzero()[:, 0]  # of which the labels are, so that each has a loss
    y = classes[torch.randint(len(classes), (rows,), device=device)]
    teacher = (x.detach()[:, : hidden // 2].contiguous(), w.detach()[:, : hidden // 2].contiguous())
    program, clock, found = PROGRAMS[name], Clock(device, args.repeats), []

    def product() -> Any:
        with torch.no_grad():
            return F.linear(x, w), F.linear(*teacher) if name in OF_TWO else None

    compilers = {
        "eager": lambda f: f,
        "inductor": lambda f: torch.compile(f, dynamic=False),
        "fxfuse": lambda f: torch.compile(f, backend="fxfuse", dynamic=False, options={"fxfuse.min_logits_bytes": 0}),
    }
    for compiler, make in compilers.items():
        torch._dynamo.reset()
        f = make(program)

        def step(f: Program = f) -> Any:
            with torch.set_grad_enabled(name != "all log-probabilities"):
                out = f(x, w, y, mask, teacher)
            return torch.autograd.grad(out, (x, w)) if out.requires_grad else out

        row: dict[str, Any] = {"program": name, "shape": f"{rows}×{hidden}×{vocab}", "compiler": compiler}
        try:
            row["÷1"], row["ms"] = clock.ratio(step, product)
            row["extra"] = peak_mib(step, device)
        except torch.OutOfMemoryError:
            row["÷1"], row["ms"], row["extra"] = None, None, None
        found.append(row)
    return found


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", type=sizes, default="8192x4096x128256", metavar="NxDxV", help="rows x hidden x "
                        "vocabulary, or a name: " + ", ".join(SHAPES))  # fmt: skip
    add_machine(parser)
    add_repeats(parser)
    parser.add_argument("--only", choices=PROGRAMS, nargs="+", action="extend", metavar="NAME",
                        help="measure these only, of: " + "; ".join(PROGRAMS))  # fmt: skip
    add_json(parser)
    args = parser.parse_args()
    conditions = about(args.device, args.dtype)
    results: list[dict[str, Any]] = []
    for name in tqdm(args.only or PROGRAMS, unit="program"):
        results += measure(name, *args.shape, args)
        write(args.json, conditions, results)
    print(f"{told(conditions)}, {results[0]['shape']}")
    columns = ("program", "compiler", "÷1", "ms", "extra")
    print(tabulate([[r[c] for c in columns] for r in results], columns, floatfmt=("", "", ".2f", ".2f", ".0f")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
