"""Tokens a second and peak memory of a whole training step of a transformers model, in an unmodified loop.

    python bench/train_step.py                                     # a Llama of 1.24 B parameters on the GPU
    python bench/train_step.py --batch 16 32 --only inductor fxfuse --json step.json
    python bench/train_step.py --model gpt2 --set n_layer=2 --batch 4 --length 256 --device cpu --dtype float32

A step is ``out = model(input_ids=ids, labels=ids); out.loss.backward(); opt.step(); opt.zero_grad()`` with a fused
AdamW. Weights are random and the tokens too: neither changes the time. ``tok/s`` is of the median step after two that
warm up; ``first`` is the first step, compilation included; ``GiB`` is the peak of allocated memory, weights and
optimizer included; the loss of the last step shows that all compute the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from head import command
from tabulate import tabulate
from tqdm import tqdm

from fxfuse.report.measure import reset_resident_peak, resident_bytes

LLAMA = {
    **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True},
    **{"max_position_embeddings": 8192, "rope_theta": 500000.0},
}
COMPILERS: dict[str, Callable[[torch.nn.Module], None]] = {
    "eager": lambda model: None,
    "inductor": lambda model: model.compile(dynamic=False),
    "fxfuse": lambda model: model.compile(backend="fxfuse", dynamic=False),
}


def make(args: argparse.Namespace) -> torch.nn.Module:
    """The model with random weights, made where it will run."""
    sizes: dict[str, Any] = dict(LLAMA) if args.model == "llama" else {}
    sizes |= {key: json.loads(value) for key, _, value in (item.partition("=") for item in args.set)}
    config = transformers.AutoConfig.for_model(args.model, **sizes)
    torch.manual_seed(0)
    with torch.device(args.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
    model.config.use_cache = False
    return model.train()


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(name: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row: an implementation at a batch size."""
    torch._dynamo.reset()
    gc.collect()
    row: dict[str, Any] = {"implementation": name, "batch": batch}
    if args.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_resident_peak()
    try:
        model = make(args)
        COMPILERS[name](model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        generator = torch.Generator(args.device).manual_seed(1)
        vocab = model.config.get_text_config().vocab_size
        ids = torch.randint(vocab, (batch, args.length), generator=generator, device=args.device)
        times = []
        for _ in range(args.steps + 2):
            start = time.perf_counter()
            out = model(input_ids=ids, labels=ids)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sync(args.device)
            times.append(time.perf_counter() - start)
        row["tok/s"] = round(batch * args.length / statistics.median(times[2:]))
        row["spread"] = round((max(times[2:]) - min(times[2:])) / statistics.median(times[2:]), 3)
        row["first s"] = round(times[0], 1)
        row["loss"] = round(float(out.loss), 4)
        row["GiB"] = round(
            torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else resident_bytes("VmHWM") / 2**30, 1
        )
    except torch.OutOfMemoryError:
        row["tok/s"] = "out of memory"
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama", help="a model type of transformers; llama is of 1.24 B parameters")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="sizes of the model, as in its config"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--length", type=int, default=2048, help="tokens a sequence")
    parser.add_argument("--steps", type=int, default=6, help="steps that are measured")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", nargs="*", choices=COMPILERS, default=list(COMPILERS))
    parser.add_argument("--json", metavar="FILE", help="write the rows there, as they come")
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    rows: list[dict[str, Any]] = []
    for name, batch in tqdm([(n, b) for b in args.batch for n in args.only], desc="steps", file=sys.stderr):
        rows.append(measure(name, batch, args))
        if args.json:
            with open(args.json, "w") as file:
                about = {"command": command(), "device": device, "torch": torch.__version__}
                json.dump({**about, "rows": rows}, file, indent=1)
    print(f"{args.model}, {args.length} tokens a sequence, {args.dtype}, {device}, torch {torch.__version__}\n")
    print(tabulate(rows, headers="keys"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
