"""What a report counts and adds up, of real programs: heads, what read their logits, and bytes that were not built."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scripts import python, write
from torch._dynamo.backends.distributed import DDPOptimizer

import fxfuse
from fxfuse.backend import fxfuse as backend
from fxfuse.report import Report
from fxfuse.report.heads import heads_of, totals
from fxfuse.report.html import page
from fxfuse.report.records import journal
from fxfuse.report.text import table

OPTIONS = {"fxfuse.inner": "eager", "fxfuse.min_logits_bytes": 0}
DOCUMENT = Path(__file__).parent.parent / "docs" / "report.md"
V, D = 320, 16
BYTES = 4 * V  # of a row of logits


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(torch.nn.Module):
    def __init__(self, vocab: int = V, hidden: int = D) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, hidden)
        self.lm_head = torch.nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.embed(ids))


def compiled(f: Any, **options: Any) -> Any:
    own = {f"fxfuse.{name}": value for name, value in options.items()}
    return torch.compile(f, backend="fxfuse", options={**OPTIONS, **own})


def ids(rows: int = 8) -> torch.Tensor:
    return torch.randint(V, (rows,))


def report_of(run: Callable[[], Any]) -> Report:
    since = len(journal)
    run()
    return journal.report(since)


def told(report: Report) -> str:
    return " ".join(table(report).split())


def test_modules_that_share_compiled_code_are_told_apart() -> None:
    student, teacher = Model(), Model()

    def run() -> None:
        y = ids()
        z, t = compiled(student)(y), compiled(teacher)(y)
        F.cross_entropy(z, y).backward()
        t.sort()

    report = report_of(run)
    (graph,) = report.graphs
    (read,), (fused,) = report.reads, report.fused_reads
    assert (read.graph, read.site) == (fused.graph, fused.site) == (graph.id, 0)
    assert graph.sites[0].weights == (fused.weight, read.weight)
    of_student, of_teacher = heads_of(report)
    assert (of_student.fused_reads, of_student.reads) == ((fused,), ())
    assert (of_teacher.fused_reads, of_teacher.reads) == ((), (read,))
    assert (of_student.bytes_saved, of_teacher.bytes_saved) == (8 * BYTES, 0)
    assert "2 heads: 2 deferred; 10 KiB not built; 10 KiB deferred, and built at least in part" in told(report)


def test_a_weight_can_be_swapped() -> None:
    """As ``Module.to`` and ``load_state_dict`` do if they are told to: only what nothing refers to weakly can be."""
    model = Model()
    F.cross_entropy(compiled(model)(y := ids()), y).backward()
    model.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(p.dtype == torch.float64 for p in model.parameters())


def test_modules_that_are_read_alike_are_one_row() -> None:
    models = [Model() for _ in range(3)]

    def run() -> None:
        for model in models:
            F.cross_entropy(compiled(model)(y := ids()), y)

    (head,) = heads_of(report_of(run))
    assert (head.count, head.graphs, head.bytes_saved) == (3, 1, 3 * 8 * BYTES)
    assert [read.count for read in head.fused_reads] == [3]


@pytest.mark.parametrize("read", [False, True])
def test_modules_with_different_rows_have_what_each_needs_most(read: bool) -> None:
    def run() -> None:
        for rows in (4, 6, 32):
            torch._dynamo.reset()  # else the next would run what the first has compiled
            model = compiled(Model())
            for some in (rows, rows // 2):
                z = model(y := ids(some))
                z.sort() if read else F.cross_entropy(z, y)

    (head,) = heads_of(report_of(run))
    assert (head.count, head.bytes) == (3, (4 + 6 + 32) * BYTES)
    sums = totals([head])
    assert (sums.saved, sums.computed) == ((0, head.bytes) if read else (head.bytes, 0))


@pytest.mark.parametrize("form", ["forward", "module", "alias"])
def test_a_head_that_is_compiled_on_its_own_has_its_name_in_the_model(form: str) -> None:
    model = Model()
    if form == "forward":
        model.lm_head.forward = compiled(model.lm_head.forward)
    else:
        f = compiled(model.lm_head)
        model.lm_head = f if form == "module" else model.lm_head
    call = model if form != "alias" else lambda y: f(model.embed(y))

    def run() -> None:
        call(ids(8))
        call(ids(6))

    report = report_of(run)
    (head,) = heads_of(report)
    assert (head.site.module, head.site.chain) == ("lm_head", "linear(weight) → return")
    assert head.site.where.startswith(f"{__file__}:")
    assert {graph.function for graph in report.graphs} == {"Linear.forward"}
    assert "compiled again: Linear.forward (torch/nn/modules/linear.py:" in table(report)


def test_what_dynamo_wraps_is_told_apart() -> None:
    def project(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x @ w.t()

    class Callable:
        def __init__(self) -> None:
            self.w = torch.randn(V, D)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w.t()

    def run() -> None:
        sequence = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Linear(D, V))
        for f in (functools.partial(project, torch.randn(V, D)), Callable(), sequence):
            compiled(f)(torch.randn(6, D))

    report = report_of(run)
    names = [graph.function.rpartition("<locals>.")[2] for graph in report.graphs]
    assert names == ["project", "Callable.__call__", "Sequential.forward"]
    assert [site.chain for site in report.sites] == ["matmul(w) → return", "matmul(w) → return", "1 → return"]
    assert "compiled again" not in table(report)


def test_the_paragraph_of_a_head_has_the_bytes_of_the_totals() -> None:
    f = compiled(Model())

    def run() -> None:
        for rows in (16, 12, 8):
            f(ids(rows)).sort()

    text = told(report_of(run))
    assert "built at least in part: logits 20 KiB" in text
    assert "20 KiB deferred, and built at least in part" in text


@pytest.mark.parametrize("sizes", [[2, 2, 2], [1, 5]])
def test_rows_of_chunks_that_are_joined_are_counted_together(sizes: list[int]) -> None:
    def loss(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.cat([F.linear(chunk, w) for chunk in x.split(sizes)]), y)

    (site,) = report_of(lambda: compiled(loss)(torch.randn(6, D), torch.randn(V, D), ids(6)))
    assert (site.status, site.rows, site.rows_hint, site.logits_bytes) == ("fused", 6, 6, 6 * BYTES)


@pytest.mark.parametrize("shapes", [[(V, D), (2 * V, D)], [(2 * V, D), (V, D)], [(V, D), (V, 2 * D)]])
def test_heads_of_different_sizes_are_not_alike(shapes: list[tuple[int, int]]) -> None:
    def run() -> None:
        for vocab, hidden in shapes:
            F.cross_entropy(compiled(Model(vocab, hidden))(y := ids()), y)

    report = report_of(run)
    assert [(h.site.vocab, h.site.hidden, h.count, h.bytes) for h in heads_of(report)] == [
        (vocab, hidden, 1, 8 * 4 * vocab) for vocab, hidden in shapes
    ]
    assert "alike" not in told(report) and all(f"8 x {hidden} → {vocab}" in told(report) for vocab, hidden in shapes)


def test_a_weight_that_is_computed_is_no_other_head_in_every_call() -> None:
    w = torch.nn.Parameter(torch.randn(V, D))
    f = compiled(lambda x, w: x @ w.t())

    def run() -> None:
        for _ in range(3):
            f(torch.randn(8, D), w * 2).sort()

    (head,) = heads_of(report_of(run))
    assert (head.count, [read.count for read in head.reads]) == (1, [3])


def test_a_function_that_is_compiled_again_has_its_heads_once() -> None:
    lin = torch.nn.Linear(D, V)
    f = torch.compile(lambda x, y: F.cross_entropy(lin(x), y), backend="fxfuse", dynamic=False, options=OPTIONS)

    def run() -> None:
        for rows in (6, 7, 8):
            f(torch.randn(rows, D), ids(rows))

    report = report_of(run)
    (head,) = heads_of(report)
    assert (head.graphs, head.count, head.graph.id) == (3, 1, report.graphs[-1].id)
    sums = totals([head])
    assert (sums.counts["fused"], sums.saved) == (1, 2 * 8 * BYTES)
    assert "1 head: 1 fused; 20 KiB not built" in told(report)
    assert [re.sub(r"<[^>]+>", "", number) for number in _numbers(report)] == ["1", "0", "0", "20 KiB"]


def _numbers(report: Report) -> list[str]:
    """The numbers on top of the page."""
    (summary,) = re.findall(r'<ul class="numbers".*?</ul>', page(report, {}, "train.py"), re.DOTALL)
    return re.findall(r"<strong>(.*?)</strong>", summary)


def test_two_functions_that_call_one_module_have_one_head() -> None:
    model = Model()
    loss = compiled(lambda y: F.cross_entropy(model(y), y))
    twice = compiled(lambda y: 2 * F.cross_entropy(model(y), y))
    y = ids()
    (head,) = heads_of(report_of(lambda: (loss(y), twice(y))))
    assert (head.graphs, head.count, head.bytes_saved) == (2, 1, 2 * 8 * BYTES)


def test_modules_that_are_compiled_one_by_one_have_a_head_each() -> None:
    def run() -> None:
        for _ in range(2):
            model = Model()
            compiled(lambda y, model=model: F.cross_entropy(model(y), y))(ids())
            torch._dynamo.reset()  # else the second would run what the first has compiled

    (head,) = heads_of(report_of(run))
    assert (head.graphs, head.count, head.bytes_saved) == (2, 2, 2 * 2 * 8 * BYTES)


def test_logits_that_were_built_are_not_counted_as_not_built() -> None:
    f = compiled(Model())

    def run() -> None:
        for _ in range(3):
            f(ids()).sort()

    report = report_of(run)
    (head,) = heads_of(report)
    assert head.is_computed
    text = told(report)
    assert "computed after all, 3 times: see below built at least in part: logits 10 KiB" in text
    assert "1 head: 1 deferred; 0 B not built; 10 KiB deferred, and built at least in part" in text
    assert _numbers(report)[3:] == ["0 B", "10 KiB"]
    assert "built at least in part" in page(report, {}, "train.py").lower()


def test_a_weight_that_a_step_copies_is_said_with_its_bytes_and_its_line() -> None:
    model = Model()
    f, optimizer = compiled(model), torch.optim.SGD(model.parameters(), lr=0.1)
    lines: list[int] = []

    def run() -> None:
        for _ in range(2):
            z = f(y := ids())
            F.cross_entropy(z, y).backward()
            optimizer.step()
            lines.append(sys._getframe().f_lineno - 1)

    text = str(report_of(run))
    sentence = "copied: a weight was copied before an optimizer changed it, because logits that nothing had read were"
    assert sentence in " ".join(text.split())
    (size,) = re.findall(r"^    (.*), 2 times \(logits of test_report_heads.py:\d+\)\n.*:(\d+)", text, re.MULTILINE)
    assert size == ("20 KiB", str(lines[0])) and model.lm_head.weight.nbytes == 20 << 10


def test_logits_that_nothing_reads_are_said_to_be_so() -> None:
    report = report_of(lambda: compiled(Model())(ids()))
    assert "nothing was seen to read them not built: logits 10 KiB" in told(report)
    assert "1 head: 1 deferred; 10 KiB not built" in told(report)


def test_logits_that_are_small_when_they_are_made_are_said_to_be_built() -> None:
    f = torch.compile(
        Model(), backend="fxfuse", dynamic=True, options={**OPTIONS, "fxfuse.min_logits_bytes": 6 * BYTES}
    )

    def run() -> None:
        for rows in (8, 4, 3):
            f(ids(rows))

    report = report_of(run)
    (read,) = report.reads
    assert (read.kind, read.count, read.bytes, read.where) == ("at_once", 2, 7 * BYTES, read.head)
    text = told(report)
    assert "not deferred, but computed at once, 2 times: see below" in text
    assert "at once: logits were computed at once, because there were fewer bytes" in text
    assert "nothing was seen to read them" not in text
    assert torch._dynamo.utils.counters["fxfuse"]["computed at once"] >= 2


# What crosses a graph break


def test_a_loss_of_another_function_is_not_taken_for_that_of_the_logits() -> None:
    score, other = compiled(Model(), defer_logits=False), compiled(lambda z, y: F.cross_entropy(z, y))

    def run() -> None:
        score(ids())
        other(torch.randn(4, V), ids(4))

    report = report_of(run)
    assert [len(graph.losses) for graph in report.graphs] == [0, 1]
    assert "has a loss" not in told(report)


def test_the_loss_in_the_rest_of_the_function_is_named_if_one_head_is_there_before() -> None:
    a, b = torch.nn.Linear(D, V), torch.nn.Linear(D, V)

    def one(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        za = a(x)
        torch._dynamo.graph_break()
        return F.cross_entropy(za, y)

    def two(x: torch.Tensor, y: torch.Tensor) -> Any:
        za, zb = a(x), b(x)
        torch._dynamo.graph_break()
        return F.cross_entropy(za, y), zb.sort()

    x, y = torch.randn(8, D), ids()
    first = told(report_of(lambda: compiled(one, defer_logits=False)(x, y)))
    assert re.search(r"the rest of \S*one has a loss of logits of that size: za → cross_entropy", first)
    second = report_of(lambda: compiled(two, defer_logits=False)(x, y))
    assert any(graph.losses for graph in second.graphs)
    assert "has a loss" not in told(second)


# Graphs that are split


class Split(torch.nn.Module):
    """Of which ``DDPOptimizer`` makes two parts: the parameter before the loss fills a bucket."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(V, D)
        self.lm_head = torch.nn.Linear(D, V, bias=False)
        self.other = torch.nn.Linear(300, 300)
        self.between = between

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        if self.between:
            logits = self.lm_head(hidden)
            penalty = self.other(torch.ones(300)).mean()
        else:
            penalty = self.other(torch.ones(300)).mean()
            logits = self.lm_head(hidden)
        return F.cross_entropy(logits, ids) + penalty


def split(model: torch.nn.Module, inner: str = "eager") -> Any:
    compile = functools.partial(backend, options={**OPTIONS, "fxfuse.inner": inner})
    return torch.compile(
        model, backend=DDPOptimizer(200_000, compile, first_bucket_cap=200_000).compile_fn, dynamic=False
    )


def test_the_parts_of_a_split_graph_are_compiled_together() -> None:
    f = split(Split(between=False))

    def run() -> None:
        for rows in (6, 7, 8):
            f(ids(rows)).backward()

    report = report_of(run)
    assert len(report.graphs) == 6
    assert len({graph.compile_id for graph in report.graphs}) == 3
    assert all(graph.ending is None for graph in report.graphs)
    text = told(report)
    assert "compiled again: Split.forward" in text
    assert ", 2 times tensor" in text
    assert "1 head: 1 fused" in text


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_logits_that_go_from_part_to_part_are_computed_where_the_next_part_reads_them(inner: str) -> None:
    model = Split(between=True)
    y = ids()
    expected = torch.autograd.grad(model(y), list(model.parameters()))
    results: list[torch.Tensor] = []
    report = report_of(lambda: results.append(split(model, inner)(y)))
    for gradient, wanted in zip(torch.autograd.grad(results[0], list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(gradient, wanted)
    (site,) = report.sites
    assert (site.status, site.chain) == ("deferred", "lm_head → return")
    (read,) = report.reads
    assert (read.kind, read.count) == ("read", 1)
    assert read.source == "return F.cross_entropy(logits, ids) + penalty"
    assert report.fused_reads == ()
    text = told(report)
    assert "graph break" not in text
    assert "torch/_dynamo" not in text
    assert text.count("cross_entropy(logits, ids)") == 1


# What is not known, or was not asked for


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_depend_on_values_are_unknown() -> None:
    lin = torch.nn.Linear(D, V)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        chosen = y > 9
        return F.cross_entropy(lin(x[chosen]), y[chosen])

    report = report_of(lambda: compiled(f)(torch.randn(64, D), ids(64)))
    (site,) = report.sites
    assert site.status == "fused"
    assert {site.rows_hint, site.logits_bytes, site.gradient_bytes, site.converted_bytes, site.bytes_saved} == {None}
    assert json.loads(json.dumps(report.to_dict()))["graphs"][0]["sites"][0]["bytes_saved"] is None
    text = told(report)
    assert "float32 ? " in text
    assert "not built: ? bytes, as the number of rows depends on values" in text
    assert "1 head: 1 fused; 0 B not built, and ? more" in text
    shown = page(report, {}, "train.py")
    assert "? bytes, as the number of rows depends on values" in shown
    assert "not built, and ? more" in shown


def test_an_explanation_has_the_reads_of_its_own_call() -> None:
    lin = torch.nn.Linear(D, 100_000)

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = lin(x)
        torch._dynamo.graph_break()
        return F.cross_entropy(z, y)

    x, y = torch.randn(64, D), ids(64)
    for _ in range(3):
        (read,) = fxfuse.explain(program, x, y).fused_reads
        assert read.count == 1
    assert fxfuse.explain(lambda x: x + 1, x).fused_reads == ()
    assert fxfuse.summary().fused_reads[-3:] == tuple(r for r in journal.report().fused_reads if r.head == read.head)


def test_where_fxfuse_is_off_nothing_is_said_of_projections() -> None:
    report = report_of(lambda: compiled(Model(), enabled=False)(ids()))
    assert [graph.enabled for graph in report.graphs] == [False]
    off = "None was looked for in 1 graph, compiled with fxfuse.enabled=False."
    assert told(report) == f"No heads seen. {off}"
    assert f"No heads seen. {off}" in page(report, {}, "train.py")
    with_one = report_of(lambda: (compiled(Model())(ids()), compiled(lambda x: x + 1, enabled=False)(ids())))
    assert told(with_one).endswith(f"10 KiB not built {off}")


def test_a_line_is_as_it_was_when_it_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "edited_later.py"
    file.write_text("def read(z):\n    return z.sort(), z.logsumexp(-1)  # as it was\n")
    monkeypatch.syspath_prepend(tmp_path)
    import edited_later

    def run() -> None:
        edited_later.read(compiled(Model())(ids()))
        file.write_text("# edited\n# while it ran\n" + file.read_text())
        __import__("linecache").checkcache()

    report = report_of(run)
    for read in (*report.reads, *report.fused_reads):
        assert read.source == "return z.sort(), z.logsumexp(-1)  # as it was"


# The document


def test_the_document_shows_what_its_script_prints(tmp_path: Path) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    script, shown, example = re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    plain = "torch.compile(Model())"
    assert plain in script
    without_a_compiler = "torch.compile(Model(), backend='fxfuse', options={'fxfuse.inner': 'eager'})"
    write(tmp_path, script.replace(plain, without_a_compiler), preamble="")
    done = python(tmp_path, "-m", "fxfuse", "--report", "--report-json", "report.json", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == shown.strip()
    made = json.loads((tmp_path / "report.json").read_text(encoding="utf-8").replace(str(tmp_path), "/home/me"))
    documented = json.loads(example)
    assert made == {**documented, "torch": torch.__version__, "fxfuse": fxfuse.__version__}
