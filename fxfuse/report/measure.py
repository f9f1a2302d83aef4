"""Time and memory of single heads, with and without fxfuse: ``--measure``.

A head is cut out of the graph while that is compiled: its projection, what is derived of the logits and what reads
them. When the script is done, it runs alone, forward and backward, with random operands.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.split_module import split_module

from .. import compat
from ..options import PREFIX
from .records import Cost, GraphRecord, Measured, Report, Site, Watched, journal
from .source import function_name
from .text import human_bytes

if TYPE_CHECKING:
    from ..analysis import Candidate

_REPEATS, _SECONDS = 5, 0.5  # of each measurement, at least
_CASTS = ("to", "float", "type", "double", "half", "bfloat16")


# --- cutting a head out ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """A tensor that a head is given, as it was when the graph was captured. Dynamic sizes are their hints.

    ``below``: what its values must be smaller than, if it holds indices.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    below: int = 0

    def make(self) -> Tensor:
        """Random values: class indices in range, or numbers that a program can divide by and take logarithms of."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        made = torch.empty(last + 1, dtype=self.dtype, device=self.device)  # of which several elements may be one
        if self.dtype == torch.bool:
            made.bernoulli_()
        elif not self.dtype.is_floating_point:
            made.random_(0, max(self.below, 1))
        elif len(self.shape) > 1:
            made.normal_(std=self.shape[-1] ** -0.25)  # so that logits are of the size of one
        else:
            made.uniform_(0.5, 1.5)
        return made.as_strided(self.shape, self.strides).requires_grad_(self.requires_grad)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Cut:
    """One head alone.

    Attributes:
        program: from the operands to what reads the logits, then to the logits that the graph returns.
        readers: how many of the results are the former; gradients flow back from them.
        in_checkpoint: whether activation checkpointing is around it.
    """

    program: torch.nn.Module
    operands: tuple[Operand, ...]
    readers: int
    in_checkpoint: bool


class Mode(NamedTuple):
    """Grad mode, and the arguments of the ``torch.autocast`` around."""

    grad: bool
    autocast: tuple[Any, ...]


class _InMode(torch.nn.Module):
    """``part`` in a mode."""

    def __init__(self, part: torch.nn.Module, mode: Mode) -> None:
        super().__init__()
        self.part, self.mode = part, mode

    def forward(self, *args: Any) -> Any:
        with torch.set_grad_enabled(self.mode.grad), torch.autocast(*self.mode.autocast):
            return self.part(*args)


class Cutter:
    """Cuts the heads of one graph out: a ``records.Watcher``.

    Attributes:
        cuts: for each head, in the order of the sites; None where it was kept, or where nothing reads its logits.
    """

    def __init__(self) -> None:
        self.cuts: list[Cut | None] = []

    def analysed(self, graph: Graph, candidates: Sequence[Candidate], in_checkpoint: bool) -> None:
        self._in_checkpoint = in_checkpoint
        self._start = len(self.cuts)

    def planned(self, candidates: Sequence[Candidate]) -> None:
        self.cuts[self._start :] = [
            None if candidate.kept or not candidate.readers else _cut(candidate, self._in_checkpoint)
            for candidate in candidates
        ]

    def rewritten(self, graph: Graph, made: Mapping[Candidate, Sequence[Node]]) -> None:
        pass


def _cut(candidate: Candidate, in_checkpoint: bool) -> Cut:
    graph = candidate.node.graph
    readers = list(dict.fromkeys(node for node, _ in candidate.readers))
    results = list(dict.fromkeys([*readers, *(escaped.node for escaped in candidate.escaped)]))
    inside = _inside(graph, {*candidate.derived, *readers})
    classes = min(compat.hint(reader.source.vocab) for _, reader in candidate.readers)
    own = Graph()
    copies: dict[Node, Any] = {}
    operands: list[Operand] = []
    for node in graph.nodes:
        users = [user for user in node.users if user in inside]
        if node in inside or not users:
            continue
        example = node.meta.get("example_value")
        if isinstance(example, Tensor):
            copies[node] = own.placeholder(f"operand_{len(operands)}")
            operands.append(_operand(example, users, classes))
        else:
            copies[node] = compat.hint(example) if isinstance(example, torch.SymInt) else example
    modes: list[Mode] = []
    parts: dict[Node, int] = {}
    for node, mode in _with_modes(graph, operands[0].device.type):
        if node in inside:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            # Without its meta, which holds the example values of all of the graph.
            copies[node] = own.create_node(node.op, node.target, args, kwargs)
            if not modes or mode != modes[-1]:
                modes.append(mode)
            parts[copies[node]] = len(modes) - 1
    own.output(tuple(copies[node] for node in results))
    program = GraphModule(torch.nn.Module(), own)
    if modes != [Mode(True, (operands[0].device.type, None, False, None))]:
        split = split_module(program, program, parts.__getitem__)
        for number, mode in enumerate(modes):
            part = getattr(split, f"submod_{number}")
            # Made anew, as Dynamo does not look into one that writes its code when it is first called.
            setattr(split, f"submod_{number}", _InMode(GraphModule(part, part.graph), mode))
        program = GraphModule(split, split.graph)
    return Cut(program, tuple(operands), len(readers), in_checkpoint)


def _inside(graph: Graph, wanted: set[Node]) -> set[Node]:
    """``wanted``, what is between them, and what reads them cannot do without the making of: one-hot rows, ranges."""
    later: set[Node] = set()
    for node in graph.nodes:
        if later.intersection(node.all_input_nodes) or node in wanted:
            later.add(node)
    inside: set[Node] = set()
    for node in reversed(graph.nodes):
        used = any(user in inside for user in node.users)
        if node in wanted or (used and (node in later or _is_made_here(node))):
            inside.add(node)
    return inside


def _is_made_here(node: Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    if function_name(node) in _CASTS:
        return isinstance(node.args[0], Node) and _is_made_here(node.args[0])
    one_hot = node.target is torch.nn.functional.one_hot
    return one_hot or not any(isinstance(n.meta.get("example_value"), Tensor) for n in node.all_input_nodes)


def _operand(example: Tensor, users: Sequence[Node], classes: int) -> Operand:
    below = classes
    for user in users:
        if function_name(user) in ("getitem", "index_select", "index"):  # of classes or of rows: fits both
            indexed = user.args[0]
            sizes = indexed.meta["example_value"].shape if isinstance(indexed, Node) else ()
            below = min([below, *map(compat.hint, sizes)])
    return Operand(
        tuple(map(compat.hint, example.shape)),
        tuple(map(compat.hint, example.stride())),
        example.dtype,
        example.device,
        example.requires_grad,
        below,
    )


def _with_modes(graph: Graph, device: str) -> Iterator[tuple[Node, Mode]]:
    """Every node, in order, with the mode that it runs in on such a device."""
    on = torch.is_autocast_enabled(device)
    autocasts = [(device, torch.get_autocast_dtype(device) if on else None, on, None)]
    grad = [torch.is_grad_enabled()]
    for node in graph.nodes:
        name = function_name(node)
        if name == "_enter_autocast":
            autocasts.append(node.args if node.args[0] == device else autocasts[-1])
        elif name == "_exit_autocast":
            autocasts.pop()
        elif name == "_set_grad_enabled":
            grad[-1] = bool(node.args[0])
        elif name == "_enter_inference_mode":
            grad.append(grad[-1] and not node.args[0])
        elif name == "_exit_inference_mode":
            grad.pop()
        yield node, Mode(grad[-1], autocasts[-1])


# --- running it -----------------------------------------------------------------------------------------------


def measure(report: Report, watched: Mapping[int, Watched], inner: str | None = None) -> Report:
    """``report`` with ``measured`` filled in for every head that ``watched`` has; shows progress on a terminal.

    ``inner``: the backend to compare with, instead of the one that the graphs were compiled with.
    """
    from tqdm import tqdm

    journal.watchers.clear()  # what is compiled from now on is not the user's
    cuts = {graph.id: _cuts(graph, watched) for graph in report.graphs}
    total = 2 * sum(cut is not None for of_graph in cuts.values() for cut in of_graph)
    graphs = []
    with tqdm(total=total, desc="measuring", unit="run", file=sys.stderr, disable=None, leave=False) as bar:
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
            _check_room(
                device, 2 * sum(operand.bytes for operand in cut.operands) + (not enabled) * (site.bytes_saved or 0)
            )
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


def _check_room(device: torch.device, needed: int) -> None:
    """Raise MemoryError where it is known that a CPU has not so many bytes: nothing else stops it in time."""
    if device.type != "cpu":
        return
    try:
        with open("/proc/meminfo") as info:
            free = next(int(line.split()[1]) for line in info if line.startswith("MemAvailable:")) << 10
    except (OSError, StopIteration):
        return
    if needed > free:
        raise MemoryError


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
        else "No head was fused: nothing to measure."
    )


_MEASURED = "Each head alone, forward and backward, with random operands; memory above these, with gradients:"


# --- memory ---------------------------------------------------------------------------------------------------


def resident_bytes(field: str) -> int:
    """``VmRSS``, the memory of this process, or ``VmHWM``, the most since that was last reset; on Linux."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(f"{field}:")) << 10


def reset_resident_peak() -> None:
    """Let ``VmHWM`` start anew."""
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps would hide what is taken next
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")


def peak_bytes(f: Callable[[], Any], device: torch.device) -> int | None:
    """Peak of memory during ``f`` above what was in use before: the CUDA allocator's, or of the process for a CPU.

    None where that cannot be told: on neither Linux nor glibc.
    """
    gc.collect()
    if device.type != "cuda":
        try:
            reset_resident_peak()
            before = resident_bytes("VmRSS")
            f()
            return resident_bytes("VmHWM") - before
        except (OSError, AttributeError):
            return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    f()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
