"""What fxfuse's analysis and report take of a compilation, for Llamas of so many layers; not its kernels on a GPU.

    python bench/analysis.py [--layers 8 16 32] [--json FILE]

The layers are narrow, which changes neither the number of nodes nor what is analysed. Compiles forward and backward
of one training step without any cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import tabulate
import torch
import torch._inductor.utils
from conditions import about, add_device, add_json, argument_parser, positive, told, write
from tqdm import tqdm

from fxfuse import backend


def measure(layers: int, device: str) -> dict[str, float | int]:
    """Seconds that are fxfuse's own, and those of all of the compilation; and the size of the graph."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    ids = torch.randint(0, 32000, (2, 64), device=device)
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
    parser = argument_parser(__doc__)
    parser.add_argument("--layers", type=positive, nargs="+", default=[8, 16, 32], metavar="N")
    add_device(parser)
    add_json(parser)
    args = parser.parse_args()
    conditions = about(args.device, "float32")
    results: list[dict[str, Any]] = []
    for layers in tqdm(args.layers, desc="compiling", unit="model"):
        torch._dynamo.reset()
        results.append(measure(layers, args.device))
        write(args.json, conditions, results)
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
    print(told(conditions))
    print(tabulate.tabulate(rows, ("layers", "nodes", "fxfuse", "all of compilation", "share")))


if __name__ == "__main__":
    main()
