"""The report: its table and its JSON."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import replace

import pytest
import torch

from fxfuse.reasons import because
from fxfuse.report import GraphRecord, Report, Site
from fxfuse.report.records import Journal
from fxfuse.report.text import WIDTH, human_bytes, table

FUSED = Site(
    status="fused",
    pattern="linear → view → cross_entropy",
    where="train.py:42",
    module="lm_head",
    rows=8192,
    hidden=4096,
    vocab=128256,
    dtype="bfloat16",
    variant="gradients in forward",
    bytes_saved=6 << 30,
)
KEPT = Site(
    status="kept",
    pattern="linear → topk + cross_entropy",
    where="/home/someone/project/models/modeling_llama.py:1234",
    module="model.language_model.decoder.lm_head",
    rows="s0*s1",
    hidden=4096,
    vocab=128256,
    dtype="bfloat16",
    reason=because("unknown_reader", "topk", "/home/someone/project/metrics.py:7"),
)
DEFERRED = Site(
    "deferred", "linear", "eval.py:3", "", "s77*s27", 896, 151936, "float32", "recompute in backward", 10**9
)


def report(*sites: Site) -> Report:
    return Report((GraphRecord(0, sites),))


# The table


def test_table_of_one_head() -> None:
    assert table(report(FUSED)) == textwrap.dedent("""\
        status    where        module    pattern        shape        dtype     variant       saved
        --------  -----------  --------  -------------  -----------  --------  ------------  -------
        fused     train.py:42  lm_head   linear →       8192 x 4096  bfloat16  gradients in  6.0 GiB
                                         view →         → 128256               forward
                                         cross_entropy

        1 head: 1 fused; 6.0 GiB of logits not built""")


def test_every_kept_head_has_its_reason_and_remedy() -> None:
    printed = str(report(FUSED, KEPT))
    note = textwrap.dedent(f"""
        kept: {KEPT.where} ({KEPT.module})
            topk reads the logits, and fxfuse has no rule for it
            at /home/someone/project/metrics.py:7
            remedy: read them only through cross_entropy, log_softmax and gather, nll_loss, logsumexp,
              entropy or argmax; take anything else, such as another metric, from a separate call
        """)
    assert note in printed
    assert printed.endswith("2 heads: 1 fused, 1 kept; 6.0 GiB of logits not built")


def test_the_same_note_is_printed_once() -> None:
    printed = table(report(KEPT, KEPT))
    assert printed.count("remedy:") == 1
    assert "(2 times)" in printed
    assert "2 heads: 2 kept" in printed


@pytest.mark.parametrize("sites", [(FUSED,), (KEPT,), (DEFERRED,), (FUSED, KEPT, DEFERRED)])
def test_table_fits(sites: tuple[Site, ...]) -> None:
    lines = table(report(*sites)).splitlines()
    assert max(map(len, lines)) <= WIDTH == 100


def cells(printed: str) -> set[str]:
    return {cell.strip() for line in printed.splitlines() for cell in line.split("  ")}


def test_long_cells_break_where_people_would() -> None:
    pieces = {"project/", "models/", "modeling_", "llama.py:1234", "model.", "language_model.", "decoder.lm_head"}
    pieces |= {"cross_entropy", "s0*s1 x 4096", "→ 128256"}
    assert pieces <= cells(table(report(KEPT)))


def test_files_are_named_from_where_python_imports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/home/someone/project/models", "/home/someone", *sys.path])
    assert "modeling_llama.py:1234" in cells(table(report(replace(FUSED, where=KEPT.where))))


def test_report_without_heads_says_so() -> None:
    assert table(Report()) == "No heads seen: nothing was compiled."
    assert table(report()).startswith("No heads seen: 1 graph compiled, none ")


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


# JSON


def test_json_form() -> None:
    import fxfuse

    journal = Journal()
    journal.add([KEPT])
    journal.add([])
    assert json.loads(json.dumps(journal.report().to_dict())) == {
        "fxfuse": fxfuse.__version__,
        "torch": torch.__version__,
        "reads": [],
        "graphs": [
            {
                "id": 0,
                "sites": [
                    {
                        "status": "kept",
                        "pattern": "linear → topk + cross_entropy",
                        "where": "/home/someone/project/models/modeling_llama.py:1234",
                        "module": "model.language_model.decoder.lm_head",
                        "rows": "s0*s1",
                        "hidden": 4096,
                        "vocab": 128256,
                        "dtype": "bfloat16",
                        "variant": "",
                        "bytes_saved": 0,
                        "reason": {
                            "code": "unknown_reader",
                            "sentence": "topk reads the logits, and fxfuse has no rule for it",
                            "remedy": "read them only through cross_entropy, log_softmax and gather, nll_loss, "
                            "logsumexp, entropy or argmax; take anything else, such as another metric, from a separate "
                            "call",
                            "where": "/home/someone/project/metrics.py:7",
                        },
                    }
                ],
            },
            {"id": 1, "sites": []},
        ],
    }
