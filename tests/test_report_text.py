"""The report as text: its table, the paragraph of each head, and what came later."""

from __future__ import annotations

import io
import os
import sys
import textwrap
from dataclasses import replace

import pytest

from fxfuse.reasons import because
from fxfuse.report import GraphRecord, Report, Site
from fxfuse.report.records import Ending, FusedRead, Projection, Use
from fxfuse.report.text import WIDTH, for_stream, human_bytes, table, width_of

LOSS = Use(
    "lm_head → float → cross_entropy(ignore_index=-100)", "train.py:43", "loss = F.cross_entropy(logits.float(), y)"
)
FUSED = Site(
    status="fused",
    pattern="linear → float → cross_entropy",
    where="train.py:42",
    module="lm_head",
    rows=8192,
    hidden=4096,
    vocab=128256,
    dtype="bfloat16",
    variant="gradients in forward",
    bytes_saved=8 << 30,
    chain=LOSS.chain,
    source="logits = self.lm_head(hidden)",
    uses=(LOSS,),
    why="cross_entropy is one number, so its gradients are made beside it; the weight is frozen and gets none",
    shape=(4, 2048, 128256),
    rows_hint=8192,
    logits_bytes=2 << 30,
    converted_bytes=4 << 30,
    gradient_bytes=2 << 30,
)
METRICS = "/home/someone/project/metrics.py:7"
KEPT = Site(
    status="kept",
    pattern="linear → sort + cross_entropy",
    where="/home/someone/project/models/modeling_llama.py:1234",
    module="model.language_model.decoder.lm_head",
    rows="s0*s1",
    hidden=4096,
    vocab=128256,
    dtype="bfloat16",
    reason=replace(because("unknown_reader", "sort", METRICS), source="best = logits.sort().indices"),
    chain="lm_head → sort() + cross_entropy",
    source="logits = self.lm_head(hidden)",
    uses=(
        Use("lm_head → sort()", METRICS, "best = logits.sort().indices"),
        replace(LOSS, chain="lm_head → cross_entropy"),
    ),
    rows_hint=512,
    logits_bytes=125 << 20,
)
DEFERRED = Site(
    "deferred", "linear", "eval.py:3", "", "s77*s27", 896, 151936, "float32", "recompute in backward", 10**9,
    chain="linear(w) → graph break", uses=(Use("linear(w) → graph break", "eval.py:4", "print(1)", leaves=True),),
    source="logits = x @ w.t()", rows_hint=12, logits_bytes=10**9, projections=(Projection("linear(w)", "eval.py:3"),),
)  # fmt: skip
BROKE = Ending(True, "Failed to trace `print`", "Dynamo does not know it", ("Avoid it.",), "eval.py:4", "print(1)")


def report(*sites: Site, ending: Ending | None = None) -> Report:
    return Report((GraphRecord(0, sites, "Model.forward", "train.py:40", ending=ending),))


def test_one_fused_head() -> None:
    assert table(report(FUSED)) == textwrap.dedent("""\
        status    head     where        shape                 dtype     saved
        --------  -------  -----------  --------------------  --------  -------
        fused     lm_head  train.py:42  8192 x 4096 → 128256  bfloat16  8.0 GiB

        fused: lm_head → float → cross_entropy(ignore_index=-100)
            train.py:42  logits = self.lm_head(hidden)
            train.py:43  loss = F.cross_entropy(logits.float(), y)
            gradients in forward: cross_entropy is one number, so its gradients are made beside it
            the weight is frozen and gets none
            not built: logits 2.0 GiB + copies in other dtypes 4.0 GiB + gradient 2.0 GiB

        1 head: 1 fused; 8.0 GiB not built""")


def test_copies_of_the_weight_are_taken_off() -> None:
    text = " ".join(table(report(replace(FUSED, bytes_saved=7 << 30, copied_bytes=1 << 30))).split())
    assert "gradient 2.0 GiB, less 1.0 GiB of copies of the weight or its gradient" in text
    assert text.endswith("7.0 GiB not built")


def test_a_kept_head_has_its_reason_the_line_that_blocks_it_and_a_remedy() -> None:
    assert textwrap.dedent(f"""
        kept: lm_head → sort() + cross_entropy
            {KEPT.where}
              logits = self.lm_head(hidden)
            train.py:43  loss = F.cross_entropy(logits.float(), y)
            sort reads the logits, and fxfuse has no rule for it:
              {METRICS}  best = logits.sort().indices
            remedy: read them only through cross_entropy, log_softmax and gather, nll_loss, logsumexp,
              entropy, argmax or topk; take anything else, such as another metric, from a separate call
              (what is part of the loss itself may need all logits in any spelling)
            built for 512 rows: logits 125 MiB
        """) in table(report(FUSED, KEPT))


def test_a_graph_break_and_the_loss_after_it_are_one_story() -> None:
    read = FusedRead("linear(w) → view → cross_entropy", "eval.py:5", "return F.cross_entropy(…)", "eval.py:3", 3)
    told = table(replace(report(DEFERRED, ending=BROKE), fused_reads=(read,)))
    paragraph = textwrap.dedent("""
        deferred: linear(w) → graph break
            eval.py:3  logits = x @ w.t()
            the graph breaks here, while the logits are needed later: Failed to trace `print`
              eval.py:4  print(1)
              Dynamo does not know it
              hint: Avoid it.
            read later by a fused op, 3 times: linear(w) → view → cross_entropy
              eval.py:5  return F.cross_entropy(…)
            not built for 12 rows: logits 954 MiB
        """)
    assert paragraph in told


def test_a_head_that_is_compiled_again_is_told_once() -> None:
    again = replace(FUSED, rows="4*s77", bytes_saved=9 << 30)
    cause = "0/0: tensor 'x' size mismatch at index 0. expected 2, actual 3"
    graphs = [
        GraphRecord(0, (FUSED, FUSED), "Model.forward", "train.py:40"),
        GraphRecord(1, (again,), "Model.forward", "train.py:40", recompiled=cause),
        GraphRecord(2, (again,), "Model.forward", "train.py:40", recompiled=cause.replace("0/0", "0/1")),
    ]
    told = table(Report(tuple(graphs)))
    assert told.count("\nfused") == 2  # in the table, and its paragraph
    assert "4*s77 x 4096" in told
    assert "(2 alike)" in told
    assert (
        textwrap.dedent("""
        compiled again: Model.forward (train.py:40), 2 times
            tensor 'x' size mismatch at index 0. expected 2, actual 3 (2 times)

        2 heads: 2 fused; 16 GiB not built""")
        in told
    )


@pytest.mark.parametrize("width", [WIDTH, 80, 60])
@pytest.mark.parametrize("sites", [(FUSED,), (KEPT,), (DEFERRED,), (FUSED, KEPT, DEFERRED)])
def test_it_fits(sites: tuple[Site, ...], width: int) -> None:
    lines = table(report(*sites, ending=BROKE), width).splitlines()
    cannot_break = {KEPT.where, METRICS}
    assert max(len(line) for line in lines if line.strip() not in cannot_break) <= width


def cells(printed: str) -> set[str]:
    return {cell.strip() for line in printed.splitlines() for cell in line.split("  ")}


def test_long_cells_break_where_people_would() -> None:
    pieces = {"project/", "models/", "modeling_", "llama.py:1234", "model.", "language_", "decoder.", "lm_head"}
    assert pieces | {"s0*s1 x 4096", "→ 128256"} <= cells(table(report(KEPT), 70))


def test_files_are_named_from_where_python_imports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/home/someone/project/models", "/home/someone", *sys.path])
    assert "modeling_llama.py:1234" in cells(table(report(replace(FUSED, where=KEPT.where))))


def test_report_without_heads_says_so() -> None:
    assert table(Report()) == "No heads seen: nothing was compiled."
    assert table(report()).startswith("No heads seen: 1 graph compiled, none ")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = report(FUSED, KEPT)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = for_stream(shown, Terminal())
    assert "\n\033[1;32mfused\033[0m: lm_head" in coloured
    assert "\n\033[1;33mkept\033[0m  " in coloured
    assert for_stream(shown, io.StringIO()) == table(shown)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in for_stream(shown, Terminal())
    monkeypatch.setenv("NO_COLOR", "")
    assert "\033" in for_stream(shown, Terminal())
    monkeypatch.setattr("sys.stdout", Terminal())
    assert "\033" not in str(shown)


@pytest.mark.parametrize(("columns", "width"), [(20, 60), (80, 80), (200, 100)])
def test_the_width_of_a_terminal(columns: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "COLUMNS", str(columns))
    assert width_of(Terminal()) == width
    assert width_of(io.StringIO()) == width_of(None) == 100
    closed = io.StringIO()
    closed.close()
    assert width_of(closed) == 100


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1268 << 20, "1.2 GiB"),
        (980 << 20, "980 MiB"),
        (1 << 52, "4096 TiB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text
