"""Time and memory of single heads, with and without fxfuse: ``--measure``.

When the script is done, each head that was cut out of its graph runs alone, forward and backward, with random operands.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..options import PREFIX
from .cut import Cut, Cutter
from .memory import check_room, peak_bytes
from .records import Cost, GraphRecord, Measured, Report, Site, Watched, journal
from .telling import is_terminal
from .text import human_bytes

_REPEATS, _SECONDS = 5, 0.5  # of each measurement, at least


def measure(report: Report, watched: Mapping[int, Watched], inner: str | None = None) -> Report:
    """``report`` with ``measured`` filled in for every head that ``watched`` has; shows progress on a terminal.

    ``inner``: the backend to compare with, instead of the one that the graphs were compiled with.
    """
    from tqdm import tqdm

    journal.watchers.clear()  # what is compiled from now on is not the user's
    cuts = {graph.id: _cuts(graph, watched) for graph in report.graphs}
    total = 2 * sum(cut is not None for of_graph in cuts.values() for cut in of_graph)
    graphs = []
    quiet = not is_terminal(sys.stderr)
    with tqdm(total=total, desc="measuring", unit="run", file=sys.stderr, disable=quiet, leave=False) as bar:
        for graph in report.graphs:
            sites = (
                replace(site, measured=_measured(site, cut, watched[graph.id], inner, bar))
                for site, cut in zip(graph.sites, cuts[graph.id], strict=False)
            )
            graphs.append(replace(graph, sites=tuple(sites)) if cuts[graph.id] else graph)
    return replace(report, graphs=tuple(graphs))


def _cuts(graph: GraphRecord, watched: Mapping[int, Watched]) -> list[Cut | None]:
    cutter = watched[graph.id].by(Cutter) if graph.id in watched else None
    cuts = cutter.cuts if cutter else []
    return cuts if len(cuts) == len(graph.sites) else []  # one could not be made, of which a warning has told


def _measured(site: Site, cut: Cut | None, graph: Watched, inner: str | None, bar: Any) -> Measured | None:
    if site.status == "kept":
        return None
    if cut is None:
        return Measured(note="nothing in this graph reads the logits")
    device = cut.operands[0].device
    if device.type == "cuda" and not torch.cuda.is_available():
        bar.update(2)
        return Measured(note=f"this machine has no {device}")
    options = dict(graph.options)
    if inner is not None:
        options[f"{PREFIX}inner"] = inner
    costs: list[Cost | None] = []
    notes = []
    for enabled, name in ((False, "without fxfuse"), (True, "with fxfuse")):
        bar.set_postfix_str(f"{site.module or site.where} {name}")
        try:
            built = 0 if enabled else site.bytes_saved or 0
            check_room(device, 2 * sum(operand.bytes for operand in cut.operands) + built)
            run = _compiled(cut, graph.mode, {**options, f"{PREFIX}enabled": enabled})
            since = len(journal)
            costs.append(_cost(cut, run, device))
            if enabled:
                notes += _differences(site, journal.report(since).sites)
        except (torch.OutOfMemoryError, MemoryError):
            costs.append(None)
            notes.append(f"{name}, it is too large for what is free of {device}'s memory")
        except Exception as failure:
            costs.append(None)
            what = str(failure).partition("\n")[0]
            notes.append(f"{name}, it could not be run alone ({type(failure).__name__}: {what})")
        _clear(device)
        bar.update()
    return Measured(costs[0], costs[1], str(device), "; ".join(notes))


def _differences(site: Site, alone: Sequence[Site]) -> list[str]:
    """How the head alone was compiled differently from where it was cut out of."""
    if len(alone) != 1:
        return [f"alone, it was taken for {len(alone)} heads"]
    (other,) = alone
    if other.reason is not None:
        return [f"alone, it was kept: {other.reason.sentence}"]
    return [] if other.variant == site.variant else [f"alone, it was computed with {other.variant}"]


def _compiled(cut: Cut, mode: str | None, options: Mapping[str, Any]) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint

    from ..backend import fxfuse

    def backend(gm: GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        return fxfuse(gm, example_inputs, mode=mode, options=options)

    def program(*operands: Tensor) -> Any:  # Dynamo looks into a GraphModule only where something else calls it
        if cut.in_checkpoint:
            return checkpoint(cut.program, *operands, use_reentrant=False)
        return cut.program(*operands)

    torch._dynamo.reset()
    return torch.compile(program, backend=backend, dynamic=False, fullgraph=True)


def _cost(cut: Cut, run: Callable[..., Any], device: torch.device) -> Cost:
    with torch.device(device), torch.random.fork_rng():
        torch.manual_seed(0)
        operands = [operand.make() for operand in cut.operands]

    def step() -> None:
        results = run(*operands)[: cut.readers]
        read = [result for result in results if result.requires_grad]
        if read:
            torch.autograd.backward(read, [torch.ones_like(result) for result in read])
        for operand in operands:
            operand.grad = None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):  # which compiles, and fills what allocators keep
            step()
        times: list[float] = []
        while len(times) < _REPEATS or sum(times) < _SECONDS:
            times.append(_timed(step, device))
        return Cost(ms=1e3 * statistics.median(times), bytes=peak_bytes(step, device))


def _timed(step: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _clear(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- showing it -----------------------------------------------------------------------------------------------


def measurements(report: Report) -> str:
    """A table of what was measured, a row for every head, and notes."""
    from tabulate import tabulate

    rows, notes = [], []
    for site in report.sites:
        if site.measured is None:
            continue
        without, fused = site.measured.without, site.measured.fused
        where = os.path.basename(site.where)
        if without or fused:
            costs = [f"{cost.ms:.4g} ms" if cost else "–" for cost in (without, fused)]
            costs += [human_bytes(cost.bytes) if cost and cost.bytes is not None else "–" for cost in (without, fused)]
            rows.append((where, site.module, site.measured.device, *costs))
        if site.measured.note:
            notes.append(f"{where}: {'' if without or fused else 'not measured: '}{site.measured.note}")
    headers = ("where", "module", "device", "time", "with fxfuse", "peak memory", "with fxfuse")
    aligned = ("left",) * 3 + ("right",) * 4
    grid = [tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=aligned)] if rows else []
    return (
        "\n".join([_MEASURED, "", *grid, *dict.fromkeys(notes)])
        if rows or notes
        else "No head was fused or deferred: nothing to measure."
    )


_MEASURED = "Each head alone, forward and backward, with random operands; memory above these, with gradients:"
