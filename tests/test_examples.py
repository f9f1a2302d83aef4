"""The examples, run as a user runs them, but for fewer steps; and the parts of score_text.py that can be wrong."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

EXAMPLES, BENCH = (Path(__file__).parents[1] / folder for folder in ("examples", "bench"))
LENGTH = 128
# 64 x 128 tokens x 4096 classes x 4 bytes: 128 MiB, four of the chunks that take their place, so that memory tells.
SMALL = f"--device cpu --batch 64 --length {LENGTH} --vocab 4096 --text 1 --hidden 64 --layers 1".split()


def run(script: str | Path, *args: object) -> str:
    command = [sys.executable, str(EXAMPLES / script), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(output: str, line: str) -> list[float]:
    """The columns of the table row that begins with ``line``."""
    (row,) = re.findall(rf"^ *{re.escape(line)} +([-.\d ]+)$", output, re.MULTILINE)
    return [float(column) for column in row.split()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A saved model and what quickstart.py printed while it trained it."""
    saved = tmp_path_factory.mktemp("model")
    return saved, run("quickstart.py", *SMALL, "--steps", 6, "--save", saved)


@pytest.fixture
def score_text(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    import score_text

    return score_text


@pytest.mark.slow
def test_quickstart_trains_alike_and_fuses(trained: tuple[Path, str]) -> None:
    _, output = trained
    first, last = numbers(output, "1"), numbers(output, "8")
    for losses in (first, last):
        assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    assert first[0] == pytest.approx(math.log(4096), rel=0.05)
    assert last[0] < first[0] - 0.1
    fused, inductor = numbers(output, "fxfuse"), numbers(output, "inductor")
    assert 0 < fused[1] < inductor[1]
    assert "1 head: 1 fused" in output


@pytest.mark.slow
def test_score_text_gives_the_log_probabilities_of_eager(trained: tuple[Path, str], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    code, noise = tmp_path / "code.py", tmp_path / "noise.txt"
    code.write_text("import os\n\n\ndef main(self):\n    return None\n")
    noise.write_text("".join(chr(0x3B1 + (7 * i) % 24) for i in range(700)))
    output = run("score_text.py", "--model", trained[0], "--device", "cpu", noise, code)

    assert output.index(str(code)) < output.index(str(noise)), "the likelier text comes first"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(trained[0]), AutoTokenizer.from_pretrained(trained[0])
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(code.read_text()).input_ids]])
    with torch.no_grad():
        mean = -model(input_ids=ids, labels=ids).loss.item()
    tokens, total, per_token, perplexity, bits = numbers(output, str(code))
    assert tokens == ids.numel() - 1 <= LENGTH
    assert total == pytest.approx(mean * tokens, abs=0.1)
    assert per_token == pytest.approx(mean, abs=1e-3)
    assert perplexity == pytest.approx(math.exp(-mean), rel=1e-3)
    assert bits == pytest.approx(-mean * tokens / math.log(2) / code.stat().st_size, abs=1e-2)
    assert numbers(output, str(noise))[0] > 2 * LENGTH, "a text of several windows"


@pytest.mark.parametrize("length", [1, 2, 7, 8, 63])
@pytest.mark.parametrize("count", [2, 7, 8, 9, 10, 64])
def test_windows_score_every_token_once_after_what_preceded_it(score_text: ModuleType, count: int, length: int) -> None:
    tokens, scored = list(range(count)), []
    for window in score_text.windows(0, tokens, length):
        assert len(window.tokens) <= length + 1
        assert window.tokens == tokens[window.tokens[0] : window.tokens[-1] + 1]
        assert window.first >= 1
        scored += window.tokens[window.first :]
    assert scored == tokens[1:]


class _Unigram(torch.nn.Module):
    """A model to which every token is as likely after any text."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.scores = torch.nn.Parameter(torch.randn(vocab))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        return type("Output", (), {"logits": self.scores.expand(*input_ids.shape, -1)})


def test_texts_of_any_length_share_batches(score_text: ModuleType) -> None:
    model = _Unigram(32)
    texts = [torch.randint(32, (n,)).tolist() for n in (2, 30, 9, 10, 57)]
    expected = model.scores.detach().log_softmax(0)
    for text, found in zip(texts, score_text.score(model, texts, length=8, batch=3, backend="eager"), strict=True):
        assert found == pytest.approx(expected[text[1:]].tolist())


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read .*: No such file"), (b"", "is empty"), (b"\xff\xfe", r"is not UTF-8 text \(byte 0\)")],
    ids=["missing", "empty", "binary"],
)
def test_score_text_refuses_what_it_cannot_read(
    score_text: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    content: bytes | None,
    message: str,
) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["score_text.py", str(path)])
    with pytest.raises(SystemExit) as exit:
        score_text.main()
    assert exit.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_score_text_refuses_a_model_that_is_not_there(
    score_text: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["score_text.py", __file__, "--model", str(tmp_path / "nothing" / "here")])
    with pytest.raises(SystemExit) as exit:
        score_text.main()
    assert exit.value.code == 2
    assert "cannot load a model from" in capsys.readouterr().err


@pytest.mark.slow
def test_benchmarks_measure_and_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    common = ["--device", "cpu", "--dtype", "float32", "--repeats", "1"]
    table = run(
        BENCH / "head.py", *common, "--shape", "64x32x500", "--only", "eager", "--only", "fxfuse", "--errors",
        "--ignored", 0.5, "--json", tmp_path / "head-cpu.json",
    )  # fmt: skip
    assert "64×32×500" in table and "fxfuse" in table
    rows = {row["implementation"]: row for row in json.loads((tmp_path / "head-cpu.json").read_text())["results"]}
    for gradient in ("dX error", "dW error"):
        assert 0 < rows["fxfuse"][gradient] < 2 * rows["eager"][gradient] < 1e-5
    assert rows["fxfuse"]["÷3"] > 0 and rows["fxfuse"]["of dense"] > 0
    sizes = ["--hidden", "32", "--rows", "4", "8", "--vocab", "100", "200"]
    run(BENCH / "logprobs.py", *common, *sizes, "--json", tmp_path / "logprobs-cpu.json")
    results = json.loads((tmp_path / "logprobs-cpu.json").read_text())["results"]
    assert len(results) == 4 and all(row["largest difference"] < 1e-5 for row in results)

    committed = BENCH / "results" / "head-h200.json"
    (tmp_path / committed.name).write_text(committed.read_text())
    (tmp_path / "head-cpu.json").unlink()  # no memory was measured there
    (tmp_path / "logprobs-cpu.json").unlink()
    assert run(BENCH / "plots.py", tmp_path).split() == [str(tmp_path / "head-h200.png")]
    assert (tmp_path / "head-h200.png").read_bytes()[:4] == b"\x89PNG"
