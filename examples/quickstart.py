"""Train a small Llama with fxfuse, and the same one with plain Inductor beside it.

    python examples/quickstart.py

The whole of what a program needs for fxfuse is in ``train``: ``torch.compile(..., backend="fxfuse")``.  The rest of
this file measures.  Every backend trains in a process of its own, from the same seed on the same batches, so that
neither inherits the other's memory.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import corpus
import torch
import torch.nn.functional as F
from tabulate import tabulate
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

BACKENDS = ("fxfuse", "inductor", "eager")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MB = 1 << 20
HEAD = 64  # size of an attention head
WARM_UP = 2  # steps in which the compiler works and the optimizer makes its state


# --- the program ------------------------------------------------------------------------------------------------


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """The mean loss of predicting every token from those before it; the logits never leave this function."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def train(model: nn.Module, batches: Tensor, backend: str, lr: float, meter: Meter) -> list[float]:
    """An ordinary training loop; returns the loss of every step."""
    loss_fn = torch.compile(next_token_loss, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for ids in meter.steps(batches):
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
            loss = loss_fn(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 5 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // HEAD,
        num_key_value_heads=args.hidden // HEAD,
        max_position_embeddings=args.length,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(args.seed)
    return LlamaForCausalLM(config).to(args.device)


# --- measuring --------------------------------------------------------------------------------------------------


class Meter:
    """Times the steps of a loop, and the memory that they take above what is held between them.

    Memory that the model, the optimizer and the compiler hold throughout is not counted: what is compared is what
    a step itself needs.
    """

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, torch.device(device)
        self.seconds: list[float] = []
        self.peak: int | None = None

    def steps(self, batches: Tensor) -> Iterator[Tensor]:
        held = None
        for number, ids in enumerate(tqdm(batches, desc=self.name, unit="step")):
            if number == WARM_UP:
                held = self._forget_peak()
            start = time.perf_counter()
            yield ids.to(self.device)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            if number >= WARM_UP:
                self.seconds.append(time.perf_counter() - start)
        self.peak = None if held is None else self._highest() - held

    def _forget_peak(self) -> int | None:
        """Start the peak anew; returns the bytes now in use, or None where that cannot be done."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        try:
            # What the compiler freed must not lie there for the steps to reuse uncounted.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            return resident("VmRSS")
        except (OSError, AttributeError):  # not Linux, or not glibc
            return None

    def _highest(self) -> int:
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else resident("VmHWM")


def resident(field: str) -> int:
    """``VmRSS``, the bytes of this process in memory, or ``VmHWM``, the highest that has been."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0]) * 1024


# --- one backend, in a process of its own -------------------------------------------------------------------------


def work(args: argparse.Namespace, directory: Path) -> None:
    """Train with ``args.backend`` on the tokens in ``directory``; leave there what was measured."""
    data = corpus.batches(torch.load(directory / "tokens.pt"), args.batch, args.length, WARM_UP + args.steps, args.seed)
    model, meter = build_model(args), Meter(args.backend, args.device)
    losses = train(model, data, args.backend, args.lr, meter)
    found: dict[str, Any] = {"losses": losses, "seconds": median(meter.seconds), "peak": meter.peak}
    if args.backend == "fxfuse":
        import fxfuse

        found["report"] = str(fxfuse.explain(next_token_loss, model, data[0].to(args.device)))
    (directory / f"{args.backend}.json").write_text(json.dumps(found))
    if args.save:
        logging.disable_progress_bar()
        model.save_pretrained(directory / args.backend)


def run(backend: str, directory: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--backend", backend, "--work", str(directory)]
    if code := subprocess.run(command).returncode:
        raise SystemExit(f"training with backend {backend!r} failed with exit status {code}")
    found: dict[str, Any] = json.loads((directory / f"{backend}.json").read_text())
    return found


# --- all of them, side by side ------------------------------------------------------------------------------------


def compare(args: argparse.Namespace, backends: list[str], directory: Path) -> None:
    text = corpus.build(args.vocab, args.seed, args.text)
    torch.save(text.tokens, directory / "tokens.pt")
    rows = args.batch * args.length
    print(
        f"A Llama of {args.layers} layers, hidden size {args.hidden} and vocabulary {args.vocab:,} on {args.device}: "
        f"{args.batch} x {args.length} tokens a step, whose logits are {rows * args.vocab * 4 / MB:,.0f} MB in float32",
        flush=True,
    )
    found = {backend: run(backend, directory) for backend in backends}

    print("\nLoss (mean over the steps)")
    print(tabulate(list(falling([found[b]["losses"] for b in backends])), ["steps", *backends], floatfmt=".4f"))
    print(f"\nA step (median time of {args.steps}; peak memory above what is held between the steps)")
    print(tabulate([cost(b, found[b]) for b in backends], ["", "time, ms", "peak memory, MB"], floatfmt=".0f"))
    for backend in backends:
        if "report" in found[backend]:
            print(f"\nWhat {backend} did\n{found[backend]['report']}")
    if args.save:
        shutil.copytree(directory / backends[0], args.save, dirs_exist_ok=True)
        as_pretrained(text.tokenizer, args.length).save_pretrained(args.save)
        print(f"\nSaved the model that {backends[0]} trained, and its tokenizer, in {args.save}")


def falling(losses: list[list[float]], lines: int = 8) -> Iterator[list[Any]]:
    """The losses in about ``lines`` runs of steps, and a first line with the first step alone."""
    count = len(losses[0])
    size = -(-count // lines)
    for start, stop in [(0, 1), *((at, min(at + size, count)) for at in range(1, count, size))]:
        yield [f"{start + 1}-{stop}" if stop - start > 1 else f"{stop}", *(fmean(run[start:stop]) for run in losses)]


def cost(backend: str, found: dict[str, Any]) -> list[Any]:
    peak = found["peak"]
    return [backend, found["seconds"] * 1e3, "not measured here" if peak is None else peak / MB]


def as_pretrained(tokenizer: Tokenizer, length: int) -> PreTrainedTokenizerFast:
    end = corpus.END_OF_TEXT
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, model_max_length=length)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama with fxfuse, and with plain Inductor beside it.")
    parser.add_argument("--steps", type=positive, default=40, help="measured steps (default %(default)s)")
    parser.add_argument("--backend", choices=["both", *BACKENDS], default="both", help="both: fxfuse and inductor")
    parser.add_argument("--device", type=device, default=DEVICE)
    parser.add_argument("--text", type=positive, default=6, help="millions of characters of it (default %(default)s)")
    parser.add_argument("--batch", type=positive, help="sequences a step (default 16; 64 on a GPU)")
    parser.add_argument("--length", type=positive, default=256, help="tokens a sequence (default %(default)s)")
    parser.add_argument("--vocab", type=positive, default=16384, help="tokens of vocabulary (default %(default)s)")
    parser.add_argument("--hidden", type=positive, default=192, help="hidden size (default %(default)s)")
    parser.add_argument("--layers", type=positive, default=2, help="decoder layers (default %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, metavar="DIR", help="save model and tokenizer, for score_text.py --model")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.hidden % HEAD:
        parser.error(f"--hidden must be a multiple of {HEAD}, the size of an attention head")
    if args.save:
        try:
            args.save.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"cannot save in {args.save}: {error.strerror}")
    if args.batch is None:
        args.batch = 64 if torch.device(args.device).type == "cuda" else 16
    return args


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def device(text: str) -> str:
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be used here: {str(error).splitlines()[0]}") from error
    return text


def main() -> None:
    args = parse()
    if args.work:
        work(args, args.work)
        return
    with tempfile.TemporaryDirectory(prefix="fxfuse-quickstart-") as directory:
        compare(args, ["fxfuse", "inductor"] if args.backend == "both" else [args.backend], Path(directory))


if __name__ == "__main__":
    main()
