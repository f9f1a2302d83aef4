"""``bench/train_step.py``: its search for the largest batch, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parent.parent / "bench"


def run(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "train_step.py"), "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.mark.parametrize(
    ("held", "each", "total", "given"),
    [
        (10, 5.5, 140, (8, 16, 32)),
        (2, 40, 140, (8,)),
        (20, 0.9, 140, (8, 16)),
        (120, 30, 140, (4, 8)),
        (1, 7.3, 80, (1,)),
    ],
)
def test_the_largest_batch_is_bracketed_in_few_tries(
    monkeypatch: pytest.MonkeyPatch, held: float, each: float, total: float, given: tuple[int, ...]
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import train_step

    tried: dict[int, dict[str, Any]] = {}

    def attempt(batch: int) -> None:
        gib = held + each * batch * (1 + 0.03 * (batch % 2))  # not quite linear
        tried[batch] = {"implementation": "x", "batch": batch, "tok/s": 1 if gib < total else None, "GiB": gib}

    for batch in given:
        attempt(batch)
    while batch := train_step.next_batch(tried, total):
        assert batch not in tried
        attempt(batch)
    fits = [batch for batch in range(1, 1000) if held + each * batch * (1 + 0.03 * (batch % 2)) < total]
    most = train_step.largest(list(tried.values()))
    if not fits:
        assert most is None and min(tried) == 1
        return
    assert most is not None and any(most < b <= most + max(1, most // 16) and not tried[b]["tok/s"] for b in tried)
    assert max(fits) - most <= max(1, most // 16)
    assert len(tried) - len(given) <= 7


def test_a_batch_is_the_largest_only_if_little_more_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import train_step

    ran = [{"batch": 8, "tok/s": 1}, {"batch": 32, "tok/s": 1}]
    assert train_step.largest(ran) is None
    assert train_step.largest([*ran, {"batch": 64, "tok/s": None}]) is None
    assert train_step.largest([*ran, {"batch": 34, "tok/s": None}]) == 32


@pytest.mark.slow
def test_it_measures_and_writes(tmp_path: Path) -> None:
    sizes = [
        "n_layer=1",
        "n_embd=32",
        "n_head=2",
        "vocab_size=500",
        "resid_pdrop=0.0",
        "embd_pdrop=0.0",
        "attn_pdrop=0.0",
    ]
    file = tmp_path / "step.json"
    small = ["--batch", "2", "--length", "16", "--steps", "1", "--dtype", "float32", "--json", str(file)]
    done = run("--model", "gpt2", "--set", *sizes, *small, "--only", "eager", "--only", "fxfuse")
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["results"]
    assert [row["implementation"] for row in rows] == ["eager", "fxfuse"]
    assert abs(rows[0]["loss"] - rows[1]["loss"]) < 1e-3 and all(row["tok/s"] > 0 for row in rows)
    assert "fxfuse" in done.stdout and "tok/s" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--largest"], "needs a GPU"),
        (["--model", "gpt2", "--length", "4096"], "1024 positions"),
        (["--batch", "0"], "argument --batch: invalid positive value: '0'"),
        (["--model", "gpt2", "--set", "n_layer"], "'n_layer' is not KEY=VALUE"),
        (["--set", "num_attention_heads=3"], "--set num_attention_heads=3: "),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and message in done.stderr
