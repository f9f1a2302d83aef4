"""Every language model of transformers, one tiny training step each, in eager and under fxfuse.

    python tests/zoo.py                        # all of them, into docs/zoo.md
    python tests/zoo.py LlamaForCausalLM …     # these, printed

A class is one that transformers' own auto-classes map for a task of ``TASKS``. It is built from its configuration,
made tiny by rules on the names of its fields, with random weights; the step is what people write:
``out = model(**inputs, labels=labels); out.loss.backward()``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import linecache
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
import transformers
from helpers import compiled, dense_reads, new_sites
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm
from zoo_models import HIDDEN, LAYERS, TASKS, VOCAB, build, classes, inputs_of

# Every verdict, in the table's order, with what it says.
VERDICTS = {
    "fused": "the head and its loss are one, and nothing else reads the logits",
    "deferred": "the loss is fused; the logits that the model returns wait, and nothing in the step reads them",
    "read": "deferred, and then computed in full, because something in the step reads them",
    "kept": "left as it was, with fxfuse's reason",
    "not seen": "eager multiplies by a parameter and gets a vocabulary's width; fxfuse reports no head there",
    "not right": "the loss or a gradient errs more than allowed",
    "PyTorch's own": 'the same, and it errs as much under `backend="eager"`, which is without fxfuse',
    "fails": 'an exception or a crash that `backend="eager"` does not have',
    "does not compile": 'an exception that `backend="eager"` has as well',
    "no vocabulary head": "nothing in eager's forward multiplies by a parameter and gets a vocabulary's width",
    "does not run in eager": "with the inputs that the zoo makes",
    "not buildable": "with the configuration that the zoo makes",
}
GOOD = ("fused", "deferred")
HEADED = (*GOOD, "read", "kept", "not seen", "not right", "PyTorch's own", "fails")
TIME_LIMIT = 300  # seconds a class


@dataclass
class Row:
    """What became of one class.

    Attributes:
        note: why, in a line.
        where: ``file.py:line`` that the note is about.
        error: the largest error of the loss and the gradients against float64, over what is allowed.
        breaks: graph breaks.
    """

    name: str
    verdict: str = ""
    note: str = ""
    where: str = ""
    pattern: str = ""
    error: float = 0.0
    breaks: int = 0
    seconds: float = 0.0
    more: str = field(default="", repr=False)  # a traceback


# --- one step -------------------------------------------------------------------------------------------------


def is_vocabulary(size: Any) -> bool:
    """Whether it is a vocabulary's size, padded perhaps, or that of several in one: ``VOCAB`` is a prime number."""
    return isinstance(size, int) and size >= VOCAB and (size % VOCAB == 0 or size < VOCAB + 128)


class Products(TorchDispatchMode):
    """Notes the products with a parameter whose last dimension is a vocabulary's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.found: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        product = func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm")
        if product and is_vocabulary(out.shape[-1]) and any(self.is_parameter(a) for a in args):
            self.found.append((str(func), caller()))
        return out

    def is_parameter(self, argument: Any) -> bool:
        """Whether it is one or a view of one."""
        return isinstance(argument, Tensor) and argument.untyped_storage().data_ptr() in self.parameters


def caller() -> str:
    """The innermost line of transformers that is on the stack."""
    frame: Any = sys._getframe()
    while frame is not None:
        if "/transformers/models/" in frame.f_code.co_filename:
            return relative(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return ""


def relative(where: str | None) -> str:
    return re.sub(r"^.*site-packages/", "", where or "")


def step(call: Any, model: nn.Module, inputs: dict[str, Tensor], spy: Any = None) -> dict[str, Tensor | None]:
    """The loss and every parameter's gradient of a training step; ``spy`` is on during the forward."""
    torch.manual_seed(2)
    with spy or contextlib.nullcontext():
        out = call(**inputs)
    loss = out.loss
    if loss is None:  # the class makes none
        loss = F.cross_entropy(out.logits.flatten(0, -2), inputs["labels"].flatten())
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def all_finite(values: dict[str, Tensor | None]) -> bool:
    return all(value is None or bool(value.isfinite().all()) for value in values.values())


def doubled(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def compare(ours: dict[str, Any], eager: dict[str, Any], exact: dict[str, Any]) -> tuple[float, str]:
    """The largest error over what is allowed, and what has it. Eager is the judge where float64 cannot be.

    Allowed are 1.5 times eager's error, and what rounding makes: 2e-6 of a tensor's own norm, 1e-7 of the norm of
    all gradients together (the gradient of an attention's key bias is zero but for rounding). Eager's are finite.
    """
    worst, what = 0.0, ""
    whole, off = norm_of_gradients(exact), norm_of_gradients(exact, eager)
    if not off <= 1e-2 * whole:  # float64 is not finite, or took another way: other experts, say
        exact = {name: None if value is None else value.double() for name, value in eager.items()}
        whole = norm_of_gradients(exact)
    for name, truth in exact.items():
        a, e = ours[name], eager[name]
        if a is None or e is None or truth is None:
            if (a is None) != (e is None):
                return math.inf, f"{name} has {'no' if a is None else 'a'} gradient, unlike eager's"
            continue
        norm, theirs = float(truth.norm()), float((e - truth).norm())
        rounding = 2e-6 * norm + (1e-7 * whole if name != "loss" else 0.0)
        error = float((a - truth).norm())
        ratio = error / max(1.5 * theirs, rounding, 1e-30) if math.isfinite(error) else math.inf
        if ratio > worst:
            worst, what = ratio, f"{name}: error {error:.2g}, eager's {theirs:.2g}, norm {norm:.2g}"
    return worst, what


def norm_of_gradients(of: dict[str, Any], less: dict[str, Any] | None = None) -> float:
    """The norm of all gradients together, or of their difference to ``less``."""
    pairs = [(x, None if less is None else less[name]) for name, x in of.items() if name != "loss" and x is not None]
    return math.sqrt(sum(float((x if y is None else x - y).norm()) ** 2 for x, y in pairs))


def first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"[:200]


def origin(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/transformers/models/" in f.filename]
    return relative(f"{frames[-1].filename}:{frames[-1].lineno}") if frames else ""


def check(name: str, device: str = "cpu") -> Row:
    """Build, run and compare one class."""
    row = Row(name)

    def failed(verdict: str, error: BaseException) -> Row:
        row.verdict, row.note, row.where = verdict, first_line(error), origin(error)
        row.more = "".join(traceback.format_exception(error))[-6000:]
        return row

    try:
        model = build(name).to(device)
    except Exception as error:
        return failed("not buildable", error)
    models = {key: copy.deepcopy(model) for key in ("eager", "exact", "compiled")}
    try:
        inputs = {key: value.to(device) for key, value in inputs_of(model).items()}
        spy = Products(models["eager"])
        eager = step(models["eager"], models["eager"], inputs, spy)
        if not all_finite(eager):
            raise ArithmeticError("the loss or a gradient is not finite")
    except Exception as error:
        return failed("does not run in eager", error)
    exact = eager
    with contextlib.suppress(Exception):  # not every class runs in float64
        exact = step(models["exact"].double(), models["exact"], doubled(inputs))
    exact = {key: None if value is None else value.double() for key, value in exact.items()}
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        with new_sites() as sites, dense_reads() as reads:
            ours = step(compiled(model), model, inputs)
    except Exception as error:
        torch._dynamo.reset()
        try:
            step(torch.compile(models["compiled"], backend="eager"), models["compiled"], inputs)
        except Exception:
            return failed("does not compile", error)
        return failed("fails", error)
    row.breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    row.error, what = compare(ours, eager, exact)
    sites = [s for s in sites if is_vocabulary(s.vocab)]
    kept = [s for s in sites if s.reason is not None]
    row.pattern = "; ".join(dict.fromkeys(s.pattern for s in sites))
    if row.error > 1:
        row.verdict, row.note = "not right", what
        torch._dynamo.reset()
        with contextlib.suppress(Exception):
            other = step(torch.compile(models["compiled"], backend="eager"), models["compiled"], inputs)
            error, _ = compare(other, eager, exact)
            row.note += f" (backend='eager': {error:.2g}× allowed)"
            if row.error <= 1.5 * error < math.inf:
                row.verdict = "PyTorch's own"
    elif kept:
        reason = kept[0].reason
        assert reason is not None
        row.verdict, row.where = "kept", relative(reason.where or kept[0].where)
        row.note = f"{reason.code}: {reason.sentence}"
        if len(kept) < len(sites):
            row.note += f" ({len(kept)} of {len(sites)} heads)"
    elif reads:
        row.verdict, row.note, row.where = "read", f"{len(reads)}×", relative(reads[0])
    elif sites:
        row.verdict = "deferred" if any(s.status == "deferred" for s in sites) else "fused"
        row.where = relative(sites[0].where)
    elif spy.found:
        row.verdict, row.note, row.where = "not seen", spy.found[0][0], spy.found[0][1]
    else:
        row.verdict = "no vocabulary head"
    return row


# --- all of them ----------------------------------------------------------------------------------------------


def work(name: str, device: str, sink: Any) -> None:
    """``check`` in a process of its own."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    if device == "cpu":  # CUDA maps far more than it takes
        resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    start = time.time()
    row = check(name, device)
    row.seconds = time.time() - start
    sink.send(row)


def run(names: Iterable[str], workers: int = 2, device: str = "cpu") -> Iterator[Row]:
    """A row for each name, as they come. Every class has a process of its own."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(names)[::-1], {}
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop()
            source, sink = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(name, device, sink), daemon=True)
            process.start()
            sink.close()
            running[source] = (name, process, time.time())
        for source in multiprocessing.connection.wait(list(running), timeout=1):
            name, process, _ = running.pop(source)
            try:
                yield source.recv()
            except EOFError:
                process.join()
                yield Row(name, "fails", f"the process ended with status {process.exitcode}")
            process.join()
        for source, (name, process, start) in list(running.items()):
            if time.time() - start > TIME_LIMIT:
                process.kill()
                del running[source]
                yield Row(name, "fails", f"not done after {TIME_LIMIT} s")


def totals(rows: Sequence[Row]) -> str:
    count = Counter(row.verdict for row in rows)
    good, headed = (sum(count[v] for v in verdicts) for verdicts in (GOOD, HEADED))
    table = tabulate(
        [(verdict, count[verdict], says) for verdict, says in VERDICTS.items() if count[verdict]],
        headers=["verdict", "classes", ""],
        tablefmt="github",
    )
    share = f"{good} of the {headed} classes that run and have a vocabulary head are fused or deferred: "
    return f"{table}\n\n{share}{good / max(headed, 1):.1%}."


def short(where: str) -> str:
    return where.removeprefix("transformers/models/")


def source(where: str) -> str:
    """The line of code at ``file.py:line`` of a package."""
    file, _, line = where.rpartition(":")
    root = Path(transformers.__file__).parents[1]
    return linecache.getline(str(root / file), int(line)).strip() if file else ""


def reasons(rows: Sequence[Row]) -> str:
    """Why heads are kept or read, the most frequent first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.verdict in HEADED and row.verdict not in GOOD:
            groups.setdefault(re.sub(r"[\d×. ]*\d+ ", "", row.note), []).append(row)
    cells = [
        (len(group), group[0].verdict, f"`{group[0].note}`", short(group[0].where), f"`{source(group[0].where)}`")
        for group in sorted(groups.values(), key=lambda group: -len(group))
    ]
    return tabulate(cells, headers=["classes", "verdict", "reason", "for example", ""], tablefmt="github")


def document(rows: Sequence[Row]) -> str:
    """``docs/zoo.md``."""
    order = list(VERDICTS)
    rows = sorted(rows, key=lambda row: (order.index(row.verdict), row.name))
    lines = ["| class | verdict | pattern | where | note | graph breaks |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = (
            row.name,
            row.verdict,
            row.pattern,
            short(row.where),
            row.note.replace("|", "\\|"),
            str(row.breaks or ""),
        )
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join(lines)
    return f"""# The zoo

Written by `make zoo` (`python tests/zoo.py`): PyTorch {torch.__version__}, transformers {transformers.__version__}.

Every class that transformers' auto-classes map for `{"`, `".join(TASKS)}`,
built tiny ({LAYERS} layers, hidden size {HIDDEN}, vocabulary {VOCAB}) from its own configuration with random weights,
and one training step of it on the CPU, in float32 and training mode, with every dropout probability 0:
`out = model(**inputs, labels=labels); out.loss.backward()`, unmodified, in eager and under
`torch.compile(model, backend="fxfuse", options={{"fxfuse.inner": "eager", "fxfuse.min_logits_bytes": 0}})`. Models that
take pictures or sound get text alone where they accept that. The loss and every parameter's gradient are compared with
eager in float64, and may err 1.5 times as much as eager in float32, or what rounding makes.

{totals(rows)}

## Not fused

{reasons(rows)}

## Every class

Files are below `transformers/models`; a pattern leads from the projection to what reads it.

{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="classes; all by default, which writes docs/zoo.md")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time (default: 2)")
    parser.add_argument("--device", default="cpu", help="another than the CPU is printed, not written")
    parser.add_argument("--json", type=Path, help="where to write what is known of every class")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names, rows = arguments.names or list(classes()), []
    for row in (bar := tqdm(run(names, arguments.workers, arguments.device), total=len(names), smoothing=0)):
        rows.append(row)
        bar.set_postfix_str(row.name)
        if arguments.names or row.verdict in ("not right", "fails"):
            tqdm.write(f"{row.name}: {row.verdict}. {row.note} {row.where}")
        if arguments.json:  # every time: the rows so far are of use if the run is stopped
            arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(f"\n{reasons(rows)}\n\n{totals(rows)}")
    if not arguments.names and arguments.device == "cpu":
        (Path(__file__).parents[1] / "docs" / "zoo.md").write_text(document(rows))


if __name__ == "__main__":
    main()
