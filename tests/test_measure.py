"""Heads that are cut out of a graph and run alone, with and without fxfuse."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fxfuse.report import Report, measure, memory
from fxfuse.report.cut import Cut, Cutter, Operand
from fxfuse.report.measure import measurements
from fxfuse.report.records import Journal, Measured

pytest.importorskip("tqdm")

SMALL = {"fxfuse.min_logits_bytes": 0, "fxfuse.inner": "eager"}
ROWS, HIDDEN, VOCAB = 24, 8, 160


@pytest.fixture(autouse=True)
def mine(monkeypatch: pytest.MonkeyPatch) -> Journal:
    """A journal of the test's own; measurements that take no time."""
    journal = Journal()
    monkeypatch.setattr("fxfuse.backend.journal", journal)
    monkeypatch.setattr(measure, "journal", journal)
    monkeypatch.setattr(measure, "_SECONDS", 0.0)
    monkeypatch.setattr(measure, "_REPEATS", 1)
    return journal


def operands() -> tuple[Tensor, Tensor, Tensor]:
    x, w = torch.randn(ROWS, HIDDEN, requires_grad=True), torch.randn(VOCAB, HIDDEN, requires_grad=True)
    return x, w, torch.randint(VOCAB, (ROWS,))


def compiled(journal: Journal, function: Any, args: Any = None, *, dynamic: bool = False, **options: Any) -> Report:
    """What became of the heads of ``function``, which are cut out while it is compiled."""
    journal.watchers.append(Cutter)
    torch._dynamo.reset()
    run = torch.compile(function, backend="fxfuse", options=SMALL | options, dynamic=dynamic, fullgraph=True)
    run(*(args or operands()))
    return journal.report()


def cuts(journal: Journal) -> list[Cut | None]:
    cutter = journal.watched[0].by(Cutter)
    assert cutter is not None
    return cutter.cuts


def measured(journal: Journal, report: Report) -> list[Measured | None]:
    return [site.measured for site in measure.measure(report, journal.watched).sites]


def plain(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), y)


def in_autocast(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(F.linear(x, w), y)


def projected_in_autocast(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        z = F.linear(x.relu(), w)
    return F.cross_entropy(z.float(), y)


def in_no_grad(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return F.cross_entropy(F.linear(x, w), y)


def in_inference_mode(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    with torch.inference_mode():
        return F.cross_entropy(F.linear(x, w), y)


def one_hot(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return -(F.one_hot(y, VOCAB).float() * F.linear(x, w).log_softmax(-1)).sum(-1).mean()


def indexed(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.linear(x, w).log_softmax(-1)[torch.arange(ROWS), y].sum()


def tempered(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w) / (1 + x.detach().abs().sum(-1, keepdim=True)), y)


def in_place(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    z = F.linear(x, w)
    z /= 0.7
    return F.cross_entropy(z, y)


def masked(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    z = F.linear(x, w).masked_fill(torch.arange(VOCAB) > VOCAB - 9, -1e9)
    return F.cross_entropy(z, y) + 0.1 * z.logsumexp(-1).mean()


def two_readers(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    log_p = F.linear(x, w).log_softmax(-1)
    return log_p.gather(-1, y[:, None]).mean(), -(log_p.exp() * log_p).sum(-1)


def by_hand(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    z = F.linear(x, w)
    return (z.logsumexp(-1, keepdim=True) - z.gather(-1, y[:, None])).mean()


def distilled(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    teacher = F.linear(x.detach() * 2, w.detach()).softmax(-1)
    return F.kl_div(F.linear(x, w).log_softmax(-1), teacher, reduction="batchmean")


def some_rows(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w)[y[:10] % ROWS], y[:10])


def all_entries(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.linear(x, w).softmax(-1)


def weighted(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w, w.sum(1)), y, weight=w[:, 0].detach().abs(), label_smoothing=0.1)


def fewer_classes(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w)[:, :100], y % 100)


def strided(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x[:1].expand(ROWS, HIDDEN) @ w.t(), y)


def checkpointed(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return checkpoint(plain, x, w, y, use_reentrant=False)


def deferred_too(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = F.linear(x.relu(), w)
    return F.cross_entropy(z, y), z


PROGRAMS = [
    *(plain, projected_in_autocast, checkpointed, deferred_too),
    *(
        in_autocast,
        in_no_grad,
        in_inference_mode,
        one_hot,
        indexed,
        tempered,
        in_place,
        masked,
        two_readers,
        by_hand,
        distilled,
    ),
    *(some_rows, all_entries, weighted, fewer_classes, strided),
]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_heads_run_alone_as_they_ran_there(program: Callable[..., Any], mine: Journal) -> None:
    """Fused by the same variant, or there would be a note."""
    report = compiled(mine, program)
    assert [site.status for site in report.sites] == ["deferred" if program is deferred_too else "fused"]
    (found,) = measured(mine, report)
    assert found is not None
    assert found.note == ""
    assert found.device == "cpu"
    for cost in (found.without, found.fused):
        assert cost is not None
        assert cost.ms > 0
        assert cost.bytes is None or cost.bytes >= 0


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_is_cut_out_returns_what_the_program_did(program: Callable[..., Any], mine: Journal) -> None:
    compiled(mine, program)
    (cut,) = cuts(mine)
    assert cut is not None
    results = cut.program(*(operand.make() for operand in cut.operands))
    expected = program(*operands())
    expected = expected if isinstance(expected, tuple) else (expected,)
    modes = in_autocast, in_no_grad, in_inference_mode
    if program in (plain, *modes, in_place, weighted, fewer_classes, checkpointed, deferred_too):
        # These return what their readers do, and nothing that is made of it.
        described = [(result.shape, result.dtype, result.requires_grad) for result in expected]
        assert [(result.shape, result.dtype, result.requires_grad) for result in results] == described
    assert all(bool(result.isfinite().all()) for result in results)
    assert not any("example_value" in node.meta for node in _nodes(cut.program))


def _nodes(program: torch.nn.Module) -> list[Any]:
    return [node for part in program.modules() for node in getattr(getattr(part, "graph", None), "nodes", ())]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad(), torch.autocast("cpu", torch.bfloat16)], ids=["no_grad", "autocast"])
def test_modes_around_the_graph(mode: Any, mine: Journal) -> None:
    with mode:
        report = compiled(mine, plain)
    (found,) = measured(mine, report)
    assert found is not None
    assert found.note == ""
    assert found.fused is not None


@pytest.mark.slow
def test_dynamic_sizes_are_measured_at_their_hints(mine: Journal) -> None:
    x, w, y = operands()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(w)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return plain(x.view(-1, HIDDEN), self.weight, y.view(-1))

    report = compiled(mine, Model(), (x.view(4, -1, HIDDEN), y.view(4, -1)), dynamic=True)
    (site,) = report.sites
    assert isinstance(site.rows, str)
    (cut,) = cuts(mine)
    assert cut is not None
    assert {operand.shape for operand in cut.operands} >= {(VOCAB, HIDDEN), (ROWS, HIDDEN)}
    (found,) = measured(mine, report)
    assert found is not None
    assert found.note == ""


@pytest.mark.slow
def test_two_heads_are_measured_each(mine: Journal) -> None:
    def program(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return plain(x, w, y) + plain(x.relu(), w.flip(0), y)

    assert [bool(found and found.fused) for found in measured(mine, compiled(mine, program))] == [True, True]


def test_a_kept_head_is_not_measured(mine: Journal) -> None:
    def program(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = F.linear(x, w)
        return F.cross_entropy(z, y), z.sort().indices

    assert measured(mine, compiled(mine, program)) == [None]


def test_a_deferred_head_that_nothing_reads(mine: Journal) -> None:
    report = compiled(mine, lambda x, w, y: F.linear(x.relu(), w))
    assert [site.status for site in report.sites] == ["deferred"]
    assert measured(mine, report) == [Measured(note="nothing in this graph reads the logits")]


def test_a_device_that_is_not_there(mine: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    report = compiled(mine, plain)
    cutter = mine.watched[0].by(Cutter)
    assert cutter is not None
    (cut,) = cutter.cuts
    assert cut is not None
    elsewhere = tuple(replace(operand, device=torch.device("cuda:0")) for operand in cut.operands)
    cutter.cuts[0] = replace(cut, operands=elsewhere)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measured(mine, report) == [Measured(note="this machine has no cuda:0")]


def test_too_large_without_fxfuse(mine: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits with fxfuse alone is measured with it alone."""
    report = compiled(mine, plain)
    (site,) = report.sites

    def check(device: torch.device, needed: int) -> None:
        if needed >= site.bytes_saved:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(measure, "check_room", check)
    (found,) = measured(mine, report)
    assert found is not None
    assert found.without is None
    assert found.fused is not None
    assert found.note == "without fxfuse, it is too large for what is free of cpu's memory"


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux tells what is free")
def test_room_on_a_cpu() -> None:
    memory.check_room(torch.device("cpu"), 1)
    with pytest.raises(MemoryError):
        memory.check_room(torch.device("cpu"), 1 << 60)
    memory.check_room(torch.device("cuda"), 1 << 60)  # whose allocator says so itself


def test_a_head_that_fails_alone_is_noted(mine: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise ZeroDivisionError("of mine\nand more")

    report = compiled(mine, plain)
    monkeypatch.setattr(measure, "_cost", fail)
    (found,) = measured(mine, report)
    assert found is not None
    assert "with fxfuse, it could not be run alone (ZeroDivisionError: of mine)" in found.note


def test_differences_are_noted(mine: Journal) -> None:
    (site,) = compiled(mine, plain).sites
    assert measure._differences(site, [site]) == []
    assert measure._differences(site, []) == ["alone, it was taken for 0 heads"]
    other = replace(site, variant="forward only")
    assert measure._differences(site, [other]) == ["alone, it was computed with forward only"]


@pytest.mark.slow
def test_the_users_options_and_backend(mine: Journal) -> None:
    seen: list[str] = []

    def inner(gm: Any, inputs: Any) -> Any:
        seen.append(" ".join(str(node.target) for node in gm.graph.nodes))
        return gm

    torch._dynamo.register_backend(inner, name="of_the_test")
    try:
        report = compiled(mine, plain, **{"fxfuse.inner": "of_the_test", "fxfuse.memory": 1 << 20})
        assert report.sites[0].variant == "recompute in backward"
        del seen[:]
        (found,) = measured(mine, report)
    finally:
        torch._dynamo.backends.registry._COMPILER_FNS.pop("of_the_test", None)
        torch._dynamo.backends.registry._BACKENDS.pop("of_the_test", None)
    assert found is not None
    assert found.note == ""  # which it would be, had the memory been forgotten
    without, fused = seen
    assert "fxfuse" not in without
    assert "fxfuse.linear_stats" in fused


def test_operands_are_as_they_were() -> None:
    def made(
        dtype: torch.dtype, shape: Any = (4, 6), strides: Any = (1, 4), grad: bool = False, below: int = 0
    ) -> Tensor:
        return Operand(shape, strides, dtype, torch.device("cpu"), grad, below).make()

    weight = made(torch.bfloat16, grad=True)
    assert (weight.shape, weight.stride(), weight.dtype) == ((4, 6), (1, 4), torch.bfloat16)
    assert weight.is_leaf
    assert weight.requires_grad
    labels = made(torch.int64, (50,), (1,), below=7)
    assert 0 <= int(labels.min()) <= int(labels.max()) < 7
    assert made(torch.bool).dtype == torch.bool
    assert bool((made(torch.float32, (9,), (1,)) > 0).all())
    assert made(torch.float32, (4, 6), (0, 1)).stride() == (0, 1)
    assert made(torch.float32, (0, 6), (6, 1)).shape == (0, 6)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_peak_of_memory() -> None:
    kept: list[Tensor] = []
    peak = measure.peak_bytes(lambda: kept.append(torch.ones(16 << 20)), torch.device("cpu"))
    assert peak is not None
    assert 60 << 20 < peak < 120 << 20
    assert (measure.peak_bytes(lambda: None, torch.device("cpu")) or 0) < 8 << 20


def test_the_table(mine: Journal) -> None:
    report = measure.measure(compiled(mine, plain), mine.watched)
    lines = measurements(report).splitlines()
    assert max(map(len, lines)) <= 100
    (row,) = [line for line in lines if line.startswith("test_measure.py:")]
    assert row.count(" ms ") == 2
    nothing = Measured(note="nothing in this graph reads the logits")
    noted = replace(report, graphs=(replace(report.graphs[0], sites=(replace(report.sites[0], measured=nothing),)),))
    assert measurements(noted).splitlines()[-1].endswith(": not measured: nothing in this graph reads the logits")
    assert measurements(Report()) == "No head was fused or deferred: nothing to measure."


# The command line


SCRIPT = """\
import torch
import torch.nn.functional as F

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ModuleDict({"<b>&": torch.nn.Linear(8, 16000)})

    def forward(self, x, y):
        return F.cross_entropy(self.heads["<b>&"](x), y)

options = {"fxfuse.min_logits_bytes": 0, "fxfuse.inner": "eager"}
torch.compile(Model(), options=options)(torch.randn(2000, 8), torch.randint(16000, (2000,))).backward()
"""


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--diff",), ("--json",)])
def test_a_script(flags: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "fxfuse.report", *flags, "--html", "page.html", "--measure", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2
    assert "with fxfuse" in page
    assert "<b>" not in page
    if flags == ("--json",):
        (graph,) = json.loads(done.stdout)["graphs"]
        measured = graph["sites"][0]["measured"]
        assert measured["fused"]["ms"] > 0
        # Logits and their gradient, 128 MB each, are there only without fxfuse: what routes the script leaves us alone.
        assert measured["without"]["bytes"] > measured["fused"]["bytes"] + 100_000_000
    else:
        assert "+++ graph 0, by fxfuse" in done.stdout
        assert "Each head alone" in done.stdout
        assert "\33" not in done.stdout


@pytest.mark.slow
def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ran')")
    command = [sys.executable, "-m", "fxfuse.report", "--html", "nowhere/page.html", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "nowhere/page.html: No such file or directory" in done.stderr
