"""What fxfuse adds to compilation: its own time, analysis and report, beside all of it, for Llamas of so many layers.

    python bench/analysis.py [--layers 8 16 32] [--json FILE]

The layers are narrow, which changes neither the number of nodes nor what is analysed. Compiles forward and backward
of one training step without any cache.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tabulate
import torch
import torch._inductor.utils
from conditions import about, told
from tqdm import tqdm

import fxfuse  # noqa: F401 (registers the ops, whose import is not part of an analysis)
from fxfuse import backend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def measure(layers: int) -> dict[str, float | int]:
    """Seconds that are fxfuse's own, and those of all of the compilation; and the size of the graph."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(DEVICE)
    ids = torch.randint(0, 32000, (2, 64), device=DEVICE)
    seen: dict[str, float | int] = {"nodes": 0, "own": 0.0}
    inner_of = backend._inner

    def timed_inner(*args: Any) -> Callable[..., Any]:
        compile_graph = inner_of(*args)

        def run(gm: torch.fx.GraphModule, *inputs: Any) -> Any:
            seen["nodes"] += len(gm.graph.nodes)
            start = time.perf_counter()
            out = compile_graph(gm, *inputs)
            seen["own"] -= time.perf_counter() - start
            return out

        return run

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        out = backend.fxfuse(*args, **kwargs)
        seen["own"] += time.perf_counter() - start
        return out

    backend._inner = timed_inner
    try:
        start = time.perf_counter()
        compiled = torch.compile(model, backend=timed, options={"fxfuse.min_logits_bytes": 0})
        with torch._inductor.utils.fresh_cache():
            compiled(input_ids=ids, labels=ids).loss.backward()
        total = time.perf_counter() - start
    finally:
        backend._inner = inner_of
    return {"layers": layers, "total": total, **seen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32], metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    results = []
    for layers in tqdm(args.layers, desc="compiling", unit="model"):
        torch._dynamo.reset()
        results.append(measure(layers))
    rows = [
        (
            r["layers"],
            r["nodes"],
            f"{1e3 * r['own']:.0f} ms",
            f"{r['total']:.1f} s",
            f"{r['own'] / r['total']:.2%}",
        )
        for r in results
    ]
    conditions = about(DEVICE, "float32")
    print(told(conditions))
    print(tabulate.tabulate(rows, ("layers", "nodes", "fxfuse", "all of compilation", "share")))
    if args.json is not None:
        args.json.write_text(json.dumps({**conditions, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
