"""The examples, run as a user runs them, but for fewer steps; and the parts of score_text.py that can be wrong."""

from __future__ import annotations

import argparse
import importlib
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
    assert f"As a whole, {code} is the likelier: e^" in output and f"For its size, {code} is: " in output


@pytest.mark.slow
def test_score_text_draws_the_surprise_of_every_token(trained: tuple[Path, str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    texts = ["for i in range($9$):\n", "import os\n" * 60]
    given = [word for text in texts for word in ("--text", text)]
    output = run("score_text.py", "--model", trained[0], "--device", "cpu", *given, "--plot", tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes()[:4] == b"\x89PNG"
    assert output.index("import os") < output.index("for i in"), "what repeats itself is the likeliest for its size"
    assert "less than fxfuse.min_logits_bytes" in output, "and the report says that it was not worth it"


def test_score_text_says_which_text_is_the_likelier(score_text: ModuleType) -> None:
    rows = score_text.rows(["short", "long"], ["ab", "abcdefgh"], [[-1.0, -1.0], [-0.5] * 8])
    assert [row.name for row in rows] == ["long", "short"]
    assert rows[0].bits == pytest.approx(0.5 / math.log(2)) and rows[1].perplexity == pytest.approx(math.e)
    whole, size = score_text.verdict(rows).splitlines()
    assert whole == "As a whole, short is the likelier: 7.4 times as likely as long."
    assert size == "For its size, long is: 0.721 bits a byte, where short takes 1.443."


WRONG = [
    ("quickstart", ["--hidden", "100"], "--hidden must be a multiple of 64"),
    ("quickstart", ["--device", "abacus"], "abacus cannot be used here"),
    ("score_text", [], "give the name of a FILE, or a --text"),
    ("score_text", ["--text", "", "--text", "a"], "a --text is empty"),
    ("score_text", ["--text", "a", "--plot", "no/where.png"], "there is no directory no"),
    ("score_text", ["--text", "a", "--plot", "a.gif"], "its name does not end in .png"),
    ("finetune", ["--model", "./no/model"], "cannot load a model from ./no/model, which is no directory here"),
    ("finetune", ["--steps", "0"], "argument --steps"),
    ("distillation", ["--teacher", "./no/model"], "cannot load a model from ./no/model, which is no directory here"),
    ("distillation", ["--temperature", "0"], "--temperature must be more than 0"),
    ("distillation", ["--hidden", "100"], "--hidden must be a multiple of 64"),
    pytest.param("policy_gradient", ["--prefer", ""], "0 of 8,192 tokens hold one", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("script", "arguments", "message"), WRONG)
def test_wrong_arguments(
    script: str,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    main = importlib.import_module(script).main
    for given, status in ((arguments, 2), (["--help"], 0)):
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *given])
        with pytest.raises(SystemExit) as exit:
            main()
        assert exit.value.code == status
        said = capsys.readouterr()
        assert message in said.err.splitlines()[-1] if status else "--backend" in said.out


@pytest.mark.slow
def test_finetune_learns_from_completions(trained: tuple[Path, str]) -> None:
    output = run("finetune.py", "--model", trained[0], "--device", "cpu", "--steps", 8, "--batch", 32, "--lr", 5e-3)
    before, after = numbers(output, "before"), numbers(output, "after")
    assert after[0] < before[0] - 0.1
    assert after[1] == pytest.approx(math.exp(after[0]), rel=0.05)
    assert re.search(rf"Of the {8 * 32 * 64:,} rows of 8 steps \d\d% are prompt or padding", output)
    assert "1 head: 1 deferred; 64 MiB not built" in output, "32 MiB and their gradient"


def test_finetune_gives_labels_to_completions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import finetune

    source = 'def f(a, *, b=1):\n    """Add them.\n\n    With care."""\n\ndef g():\n    pass\n'
    (example,) = finetune.documented_functions(["syntax error", source])
    assert example == ('def f(a, *, b=1):\n    """', 'Add them."""')

    class Characters:
        eos_token_id = 0

        def __call__(self, text: str, **_: Any) -> Any:
            return type("Encoding", (), {"input_ids": list(map(ord, text))})

    assert finetune.encode(Characters(), finetune.Example("ab", "cde"), 6) is None
    encoded = finetune.encode(Characters(), finetune.Example("ab", "cde"), 9)
    ignored = finetune.IGNORED
    assert encoded["input_ids"] == [0, *map(ord, "abcde"), 0, 0, 0]
    assert encoded["labels"] == [ignored] * 3 + [*map(ord, "cde"), 0] + [ignored] * 2
    assert finetune.ignored([encoded]) == pytest.approx(1 - 4 / 9), "four rows predict c, d, e and the end"


@pytest.mark.slow
def test_policy_gradient_raises_the_reward() -> None:
    output = run("policy_gradient.py", "--device", "cpu", "--steps", 24, "--lr", 8e-3)
    first, last = numbers(output, "1"), numbers(output, "23-24")
    assert last[0] > 5 * first[0] > 0
    assert first[1] == pytest.approx(math.log(8192), rel=0.01) and last[1] < first[1]
    loss, gradient = map(float, re.findall(r"(?:loss differs by|gradients by) (\S+e[-+]\d+)", output))
    assert loss < 1e-5 and gradient < 1e-4
    assert "1 head: 1 fused" in output


@pytest.mark.slow
def test_distillation_brings_the_student_nearer(trained: tuple[Path, str]) -> None:
    arguments = ["--teacher", trained[0], "--device", "cpu", "--steps", 8, "--hidden", 64, "--batch", 16]
    output = run("distillation.py", *arguments)
    first, last = numbers(output, "1"), numbers(output, "8")
    assert 0 < last[0] < first[0] / 2
    before, after, teacher = (
        numbers(output.replace(",", ""), name)[0] for name in ("student before", "student after", "teacher")
    )
    assert teacher < after < before
    assert "1 head: 1 fused" in output


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
    for text, found in zip(
        texts, score_text.score(score_text.token_log_probs, model, texts, length=8, batch=3), strict=True
    ):
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


@pytest.mark.parametrize(
    ("script", "given"),
    [
        ("head.py", ["--shape", "512x256"]),
        ("head.py", ["--repeats", "0"]),
        ("head.py", ["--json", "no/such/folder.json"]),
        ("readers.py", ["--shape", "0x8x8"]),
        ("logprobs.py", ["--dtype", "flo32"]),
        ("analysis.py", ["--device", "cuda:99"]),
        ("kernels.py", ["--seconds", "-1"]),
        ("train_step.py", ["--set", "n_layer"]),
    ],
)
def test_benchmarks_refuse_what_they_cannot_measure(script: str, given: list[str]) -> None:
    done = subprocess.run([sys.executable, str(BENCH / script), *given], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"argument {given[0]}: " in done.stderr and given[1] in done.stderr


def test_what_a_peer_refuses_costs_no_other_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCH)
    import head

    args = argparse.Namespace(
        device="cpu", dtype="float32", repeats=1, seconds=1e-3, errors=True, ignored=0.5, per_row=True, host=False,
        options=False,
    )  # fmt: skip

    def peer(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        if not torch.is_grad_enabled():
            raise ValueError("gradients\nalone")
        return head.plain(x, w, y, reduction)

    case = head.Case((20, 16, 40), args)
    row = case.measure("eager", peer)
    assert all(row[column] > 0 for column in ("first call s", "÷3", "ms", "of dense", "rows ÷4")) and row["same bits"]
    refused = ("fwd ÷1", "fwd extra", "fwd of dense")
    assert [row[column] for column in refused] == ["ValueError"] * 3 and set(refused) < set(row)
    assert "eager, 20×16×40, fwd ÷1: ValueError: gradients\n" in capsys.readouterr().err
    with pytest.raises(ValueError, match="gradients"):
        case.measure("fxfuse", peer)


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
