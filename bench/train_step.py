"""Tokens a second, peak memory and the largest batch of a training step of a transformers model, in a plain loop.

    python bench/train_step.py                                     # Llama 3.2 of 1.24 B parameters, on the GPU
    python bench/train_step.py --model qwen2.5-0.5b --largest      # also: how large a batch fits
    python bench/train_step.py --model gpt2 --set n_layer=2 --batch 4 --length 256 --device cpu --dtype float32

A step is ``out = model(input_ids=ids, labels=ids); out.loss.backward(); opt.step(); opt.zero_grad()`` with a fused
AdamW. Weights are random and the tokens too: neither changes the time. MODEL is one of the names below, a model type
of transformers (its default sizes; nothing is downloaded), or what ``AutoConfig.from_pretrained`` takes.

Each implementation runs in a process of its own. ``tok/s`` is of the median step after two that warm up, and
``spread`` the range over the median; ``first s`` the first step, compilation included; ``GiB`` the peak of allocated
memory, weights and optimizer included (on a CPU, of the whole process); the loss of the last step shows that all
compute the same (but for dropout). With --largest, batches are tried until the largest that fits is known to one part
in 16: it ran, and that much more did not.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from conditions import about, add_json, add_machine, argument_parser, device, on_gpu, positive, told, write
from tabulate import tabulate
from tqdm import tqdm

from fxfuse.report.memory import reset_resident_peak, resident_bytes

# Sizes as published in the models' own configurations, but for how many positions there may be.
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "type": "llama",
        **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True},
        **{"max_position_embeddings": 8192, "rope_theta": 500000.0},
    },
    "qwen2.5-0.5b": {
        "type": "qwen2",
        **{"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24},
        **{"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    },
    "gemma-2-2b": {
        "type": "gemma2",
        **{"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    },
    "gpt2": {"type": "gpt2"},
}
WARM_UP = 2


# --- what is measured -------------------------------------------------------------------------------------------


def liger(model: torch.nn.Module) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)


def liger_compiled(model: torch.nn.Module) -> None:
    liger(model)
    model.compile(dynamic=False)


def inductor_recomputing(model: torch.nn.Module) -> None:
    """Inductor with what ``fxfuse.recompute`` sets."""
    import torch._functorch.config

    torch._functorch.config.ban_recompute_materialized_backward = False
    model.compile(dynamic=False)


IMPLEMENTATIONS: dict[str, Callable[[torch.nn.Module], None]] = {
    "eager": lambda model: None,
    "inductor": lambda model: model.compile(dynamic=False),
    "inductor, recomputing": inductor_recomputing,
    "Liger-Kernel": liger,
    "Liger-Kernel + inductor": liger_compiled,
    "fxfuse": lambda model: model.compile(backend="fxfuse", dynamic=False),
    "fxfuse, masks kept": lambda model: model.compile(
        backend="fxfuse", dynamic=False, options={"fxfuse.causal_attention": False}
    ),
}


def installed() -> list[str]:
    """The implementations that can run here."""
    no_liger = importlib.util.find_spec("liger_kernel") is None
    return [name for name in IMPLEMENTATIONS if not (no_liger and name.startswith("Liger"))]


def setting(text: str) -> tuple[str, Any]:
    """``KEY=VALUE``: the value as JSON, or a string if it is none."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def config(name: str, settings: list[tuple[str, Any]]) -> Any:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = dict(MODELS.get(name, {}))
    kind = known.pop("type", name)
    if kind in CONFIG_MAPPING:
        return transformers.AutoConfig.for_model(kind, **{**known, **dict(settings)})
    return transformers.AutoConfig.from_pretrained(name, **dict(settings))


def make(args: argparse.Namespace) -> torch.nn.Module:
    """The model with random weights, made where it will run."""
    import transformers

    torch.manual_seed(0)
    with torch.device(args.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config(args.model, args.set), dtype=getattr(torch, args.dtype)
        )
    model.config.use_cache = False
    return model.train()


def measure(name: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row: an implementation at a batch size. ``tok/s`` is None where memory does not suffice."""
    torch._dynamo.reset()
    gc.collect()
    row: dict[str, Any] = {"implementation": name, "batch": batch, "tok/s": None}
    if on_gpu(args.device):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_resident_peak()
    with contextlib.suppress(torch.OutOfMemoryError):
        times, loss = steps(name, batch, args)
        median = statistics.median(times[WARM_UP:])
        row["tok/s"] = round(batch * args.length / median)
        row["spread"] = round((max(times[WARM_UP:]) - min(times[WARM_UP:])) / median, 3)
        row["first s"] = round(times[0], 1)
        row["loss"] = round(loss, 4)
        peak = torch.cuda.max_memory_allocated() if on_gpu(args.device) else resident_bytes("VmHWM")
        row["GiB"] = round(peak / 2**30, 1)
    return row


def steps(name: str, batch: int, args: argparse.Namespace) -> tuple[list[float], float]:
    """The seconds of each step, and the last loss."""
    model = make(args)
    IMPLEMENTATIONS[name](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    generator = torch.Generator(args.device).manual_seed(1)
    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(vocab, (batch, args.length), generator=generator, device=args.device)
    times = []
    for _ in range(WARM_UP + args.steps):
        start = time.perf_counter()
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu(args.device):
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times, float(out.loss.detach())


# --- which batches ----------------------------------------------------------------------------------------------


def rows(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What one implementation does at each batch that was asked for, and, with --largest, around the largest."""
    tried: dict[int, dict[str, Any]] = {}
    for batch in args.batch:
        tried[batch] = measure(name, batch, args)
        yield tried[batch]
    while args.largest and (batch := next_batch(tried, torch.cuda.mem_get_info()[1] / 2**30)):
        tried[batch] = measure(name, batch, args)
        yield tried[batch]


def next_batch(tried: dict[int, dict[str, Any]], total: float) -> int:
    """The batch to try next on a device of ``total`` GiB; 0 when the largest that fits is known to one part in 16."""
    fits = sorted(batch for batch, row in tried.items() if row["tok/s"] is not None)
    least_that_fails = min((batch for batch, row in tried.items() if row["tok/s"] is None), default=None)
    if not fits:
        return min(tried) // 2
    most = fits[-1]
    step = finest(most)
    if least_that_fails is not None and least_that_fails <= most + step:
        return 0
    if len(fits) < 2:
        guess = 2 * most
    else:  # memory grows linearly with the batch
        few, gib, more_gib = fits[0], tried[fits[0]]["GiB"], tried[most]["GiB"]
        each = max((more_gib - gib) / (most - few), 1e-3)
        guess = most + int((total - more_gib) / each) // step * step
    highest = 4 * most if least_that_fails is None else least_that_fails - step
    return max(most + step, min(guess, highest))


def largest(rows: list[dict[str, Any]]) -> int | None:
    """The largest batch of an implementation that ran, if one that is at most a 16th larger did not."""
    most = max((row["batch"] for row in rows if row["tok/s"] is not None), default=0)
    fails = [row["batch"] for row in rows if row["tok/s"] is None]
    return most if most and any(most < batch <= most + finest(most) for batch in fails) else None


def finest(batch: int) -> int:
    """By how much a batch is at least larger than the one that is tried before it."""
    return max(1, batch // 16)


# --- all implementations ----------------------------------------------------------------------------------------


def work(name: str, args: argparse.Namespace, results: Any) -> None:
    """Measure one implementation, in a process of its own: Liger-Kernel patches modules for good."""
    device(args.device)  # the current one of this process
    for row in rows(name, args):
        results.put(row)
    results.put(None)


def measured(args: argparse.Namespace, died: list[str]) -> Iterator[dict[str, Any]]:
    """Every row, as it comes; what is to be said of a process that ended before its time is added to ``died``."""
    context = multiprocessing.get_context("spawn")
    for name in args.only:
        results = context.SimpleQueue()
        process = context.Process(target=work, args=(name, args, results))
        process.start()
        while not (ended := results.empty() and not process.is_alive()):
            if results.empty():
                time.sleep(0.1)
            elif (row := results.get()) is None:
                break
            else:
                yield row
        process.join()
        if ended:
            died.append(f"{name} ended with exit status {process.exitcode}")


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="llama-3.2-1b", help=f"{', '.join(MODELS)}, or see above")
    parser.add_argument(
        "--set", type=setting, nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="sizes of the model, as in its config",
    )  # fmt: skip
    parser.add_argument("--batch", type=positive, nargs="+", default=[8, 16, 32], help="(default %(default)s)")
    parser.add_argument("--largest", action="store_true", help="find the largest batch that fits, too (on a GPU)")
    parser.add_argument("--length", type=positive, default=2048, help="tokens a sequence (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=6, help="steps that are measured (default %(default)s)")
    add_machine(parser)
    parser.add_argument("--only", nargs="+", action="extend", metavar="NAME", choices=IMPLEMENTATIONS,
                        help="measure these only, of: " + "; ".join(IMPLEMENTATIONS))  # fmt: skip
    add_json(parser)
    args = parser.parse_args()
    args.only = args.only or installed()
    if args.largest and not on_gpu(args.device):
        parser.error("--largest needs a GPU: memory of a CPU does not end at once")
    try:
        longest = getattr(config(args.model, args.set).get_text_config(), "max_position_embeddings", args.length)
    except Exception as error:  # transformers' configurations raise errors of many kinds
        what = "".join(f" --set {key}={json.dumps(value)}" for key, value in args.set)
        parser.error(f"--model {args.model}{what}: {' '.join(str(error).split())}")
    if args.length > longest:
        parser.error(f"--length: {args.model} has {longest} positions")
    return args


def main() -> int:
    args = parse()
    conditions = {**about(args.device, args.dtype), "model": args.model}
    found: list[dict[str, Any]] = []
    died: list[str] = []
    with tqdm(total=len(args.only) * len(args.batch), desc="batches", unit="batch") as bar:
        for row in measured(args, died):
            found.append(row)
            bar.total = max(bar.total, len(found))
            bar.set_postfix_str(f"{row['implementation']}, batch {row['batch']}")
            bar.update()
            write(args.json, conditions, found)
    print(f"{args.model}, {args.length} tokens a sequence, {told(conditions)}\n")
    found.sort(key=lambda row: (row["batch"], args.only.index(row["implementation"])))
    print(tabulate([{**row, "tok/s": row["tok/s"] or "out of memory"} for row in found], headers="keys"))
    if args.largest:
        print("\nlargest batch that fits")
        of = {name: [row for row in found if row["implementation"] == name] for name in args.only}
        print(tabulate([[name, largest(its)] for name, its in of.items()], missingval="not found"))
    for said in died:
        print(said, file=sys.stderr)
    return 1 if died else 0


if __name__ == "__main__":
    sys.exit(main())
