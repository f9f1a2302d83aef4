"""Decisions as they are made: the log, the counters and the structured trace."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from scripts import HEAD, RANKED, python, write
from torch import Tensor

OPTIONS = {"fxfuse.min_logits_bytes": 0, "fxfuse.inner": "eager"}


def heads(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return F.cross_entropy(x @ w.t(), y), x @ (w * 2).t(), (x @ (w * 3).t()).sort().indices


def test_counters_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    counts = torch._dynamo.utils.counters["fxfuse"]
    counts.clear()
    torch._dynamo.reset()
    caplog.set_level(logging.INFO, "fxfuse")
    operands = torch.randn(64, 8), torch.randn(32, 8), torch.zeros(64, dtype=torch.long)
    _, logits, _ = torch.compile(heads, backend="fxfuse", options=OPTIONS)(*operands)
    assert counts == {"graphs": 1, "fused": 1, "deferred": 1, "kept": 1, "kept:unknown_reader": 1}
    for _ in range(2):
        logits.sort()
    assert counts["dense reads"] == 1  # what was computed once is there
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 4
    assert [" ".join(message.split()[2:4]) for message in messages[:3]] == ["fused at", "deferred at", "kept at"]
    assert messages[2].count(f"{__file__}:") == 2  # the head and what reads it
    assert f"deferred logits computed at {__file__}:" in messages[3]

    torch.compile(lambda x: x + 1, backend="fxfuse", options=OPTIONS)(operands[0])
    assert counts["graphs"] == 2
    assert len(caplog.records) == 4  # without a head: for those who want to know more

    def attention(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, torch.ones(8, 8, dtype=torch.bool).tril())

    torch.compile(attention, backend="fxfuse", options=OPTIONS)(torch.randn(1, 2, 8, 8))
    assert counts["attentions without a mask"] == 1
    assert f"attention without its mask at {__file__}:" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("launcher", "setting"),
    [
        ((), "+fxfuse"),
        pytest.param((), "fxfuse", marks=pytest.mark.slow),
        pytest.param(("-m", "fxfuse"), "fxfuse", marks=pytest.mark.slow),
    ],
)
def test_torch_logs_and_torch_trace(setting: str, launcher: tuple[str, ...], tmp_path: Path) -> None:
    compile = "torch.compile(Model(), backend='fxfuse', options=SMALL)(x, y)\n"
    write(tmp_path, compile + "torch.compile(ranked, backend='fxfuse', options=SMALL)(x, torch.randn(32, 8))")
    done = python(tmp_path, *launcher, "train.py", TORCH_LOGS=setting, TORCH_TRACE=str(tmp_path / "trace"))
    assert done.returncode == 0, done.stderr
    # Between the brackets: the source line, and what Dynamo was compiling.
    lines = [line.partition("] ")[2].partition("] ")[2] for line in done.stderr.splitlines()]
    assert lines[0].startswith(f"graph 0: fused lm_head at {tmp_path}/{HEAD} (lm_head → cross_entropy, 6 x 8 → 32 ")
    assert lines[1].startswith(f"graph 1: kept at {tmp_path}/{RANKED} (")
    assert "fxfuse has no rule for it" in lines[1]
    assert [line.startswith("graph 1: remedy: ") for line in lines[2:]] == [True] * (setting == "+fxfuse")

    [trace] = (tmp_path / "trace").iterdir()
    entries = trace.read_text(encoding="utf-8").split('"artifact": {"name": "fxfuse", "encoding": "json"}')[1:]
    parsed = [json.loads(entry.split("\n\t", 1)[1].split("\nV", 1)[0]) for entry in entries]
    assert [graph["id"] for report in parsed for graph in report["graphs"]] == [0, 1]
    assert [report["graphs"][0]["sites"][0]["status"] for report in parsed] == ["fused", "kept"]
