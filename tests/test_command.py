"""The command line of the report, its exit statuses, and its fake tensors."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from scripts import HEAD, RANKED, python, shell, write

from fxfuse.reasons import because
from fxfuse.report import GraphRecord, Report, Site
from fxfuse.report.__main__ import main
from fxfuse.report.check import failures
from fxfuse.report.fake import NO_VALUE, fake
from fxfuse.report.progress import Progress
from fxfuse.report.run import callable_of, example_call, imported, writable
from fxfuse.report.text import WIDTH

# What needs no script


def test_help_names_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^  (\d)  ", printed.partition("exit status:")[2], re.MULTILINE) == list("012345678")
    assert max(map(len, printed.splitlines())) <= WIDTH


@pytest.mark.parametrize("argv", [[], ["--nope", "x.py"], ["--json"], ["--require"], ["x.py:model", "argument"]])
def test_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(argv)
    assert exit.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "usage: python -m fxfuse.report [options] SCRIPT [ARGS ...]" in printed.err


@pytest.mark.parametrize("name", ["", ":model"])
@pytest.mark.parametrize(
    ("source", "status", "complaint"),
    [
        (None, 5, "cannot read"),
        (b"x = (\n", 6, "SyntaxError: '(' was never closed"),
        (b"\xff\xfe\x00", 6, "is not a Python script"),
    ],
)
def test_not_a_script(
    source: bytes | None, status: int, complaint: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    if source is not None:
        script.write_bytes(source)
    assert main([f"{script}{name}"]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert complaint in printed.err
    assert str(script) in printed.err


# --check

FUSED = Site("fused", "linear → cross_entropy", "/home/someone/train.py:42", "model.lm_head", 8, 4, 99, "float32")
KEPT = Site(
    *("kept", "linear → sort", "/home/someone/eval.py:7", "probe", 8, 4, 99, "float32"),
    reason=because("unknown_reader", "sort", "/home/someone/eval.py:8"),
)
SAYS = "not fused: probe at /home/someone/eval.py:7 (linear → sort): sort reads the logits, and fxfuse has no rule"


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([], [SAYS]),
        (["*lm_head"], []),
        (["lm_head"], []),
        (["head"], ["no head matches 'head'"]),
        (["train.py:42"], []),
        (["someone/eval.py:*"], [SAYS]),
        (["*cross_entropy*", "/home/*"], [SAYS]),
        (["probe", "*sort"], [SAYS]),
        (["other.py:*", "probe"], ["no head matches 'other.py:*'", SAYS]),
    ],
)
def test_required_heads(patterns: list[str], expected: list[str]) -> None:
    report = Report((GraphRecord(0, (FUSED, KEPT)), GraphRecord(1, (KEPT,))))
    lines = failures(report, patterns)
    assert len(lines) == len(expected)
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True))


def test_a_deferred_head_is_as_good_as_a_fused_one_and_none_is_not() -> None:
    deferred = Site("deferred", "linear", "/home/someone/train.py:42", "lm_head", 8, 4, 99, "float32")
    assert failures(Report((GraphRecord(0, (deferred,)),)), []) == []
    assert failures(Report((GraphRecord(0),)), []) == ["no head was seen"]


# FILE.py:NAME


def test_what_is_called_with_what() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    x = torch.ones(2)
    scope = {"model": model, "example_inputs": x, "loss": abs, "loss_example_inputs": lambda: {"input": x}}
    assert callable_of(scope, "model") is model
    assert callable_of(scope, "model.0") is model[0]
    assert callable_of(scope, "model.forward.__self__") is model
    assert callable_of(scope, "nothing") is None
    assert callable_of(scope, "model.training") is None
    assert example_call(scope, "model") == ((x,), {})
    assert example_call(scope, "loss") == ((), {"input": x})
    assert example_call({"example_inputs": [x, 1]}, "model") == ((x, 1), {})
    assert example_call({"a_b_example_inputs": (1,), "example_inputs": 2}, "a.b") == ((1,), {})
    assert example_call({"model": model}, "model") is None


@pytest.fixture
def _modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", sys.argv)
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.mark.usefixtures("_modules")
def test_files_are_imported_as_what_they_are(tmp_path: Path) -> None:
    package = tmp_path / "package" / "inner"
    package.mkdir(parents=True)
    for directory in (package.parent, package):
        (directory / "__init__.py").touch()
    (package / "sizes.py").write_text("VOCAB = 99")
    (package / "model.py").write_text("from .sizes import VOCAB")
    made = imported(str(package / "model.py"))
    assert (made.__name__, made.VOCAB) == ("package.inner.model", 99)

    (tmp_path / "json.py").write_text("mine = __name__")
    assert imported(str(tmp_path / "json.py")).mine == "json_"
    assert sys.modules["json"] is json


# Fake tensors


def test_fake_tensors_take_no_memory_and_small_integers_are_real() -> None:
    with fake():
        model = torch.nn.Linear(1 << 20, 1 << 17)  # half a TiB
        x = torch.randn(4, 1 << 20, requires_grad=True)
        loss = model(x).logsumexp(-1).mean()
        loss.backward()
        assert model.weight.grad is not None
        assert model.weight.grad.shape == (1 << 17, 1 << 20)
        torch.optim.AdamW(model.parameters()).step()
        assert str(loss.item()) == f"{loss:.3f}" == "nan"
        rows = torch.randint(9, (4,))
        assert [int(row) < 9 for row in rows] == [True] * 4
        assert [1, 2, 3][torch.tensor(1) + 1] == 3
        with torch.device("meta"):
            assert torch.nn.Linear(2, 2).weight.device.type == "cpu"
        assert model.to("cpu", torch.bfloat16).weight.grad.dtype == torch.bfloat16
        large = torch.zeros(1 << 20, dtype=torch.long)
        for ask in (
            lambda: bool((x > 0).any()),
            lambda: x[x > 0],
            lambda: int(large[0]),
            lambda: int(loss.to(torch.long)),
        ):
            with pytest.raises(NO_VALUE):
                ask()
    assert type(torch.ones(2)) is torch.Tensor


def test_what_is_read_from_fake_tensors_is_not_a_number() -> None:
    with fake():
        loss, known = torch.randn(3).sum(), torch.tensor(3.0)
        compared = [loss < 1e9, loss == loss, torch.isinf(loss), torch.isfinite(loss), loss > 3]
        assert not any(compared)
        assert all([loss != loss, torch.isnan(loss), ~torch.isfinite(loss), known + 1 == 4, known < 4])
        flag = loss < 3
        flag |= (torch.randn(3) > 0).any()
        with pytest.raises(NO_VALUE):
            bool(flag)
        for ask in (int, numpy.asarray, lambda loss: loss.detach().cpu().numpy()):
            with pytest.raises(NO_VALUE):
                ask(loss)
        assert int(torch.tensor(3)) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_fake_tensors_go_through_data_loaders(workers: int) -> None:
    with fake():
        rows = torch.utils.data.TensorDataset(torch.arange(64).view(16, 4), torch.randn(16))
        loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, num_workers=workers)
        batches = list(loader)
    assert len(batches) == 4
    assert sorted(torch.cat([ids for ids, _ in batches]).flatten().tolist()) == list(range(64))


def test_fake_tensors_overwrite_no_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    file.write_text("weeks of work")
    with fake(), pytest.raises(NO_VALUE):
        torch.save(torch.nn.Linear(2, 2).state_dict(), file)
    assert file.read_text() == "weeks of work"


# The line on a terminal


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_shown_on_a_terminal_and_leaves_nothing(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    monkeypatch.setattr(sys, "stderr", stream := Stream())
    monkeypatch.setattr("fxfuse.report.progress._PATIENCE", 0.01)
    with Progress():
        time.sleep(0.5)
    *states, last = stream.getvalue().split("\r")
    assert bool(states) == terminal
    assert all(re.fullmatch(r"fxfuse\.report: capturing, \d+ s\x1b\[K", state) for state in states[1:])
    assert last == "\x1b[K" * terminal
    threads = threading.active_count()
    with Progress():
        pass
    assert threading.active_count() == threads


# Each of the others runs a script in a process of its own


def report(tmp_path: Path, body: str, *command: str) -> subprocess.CompletedProcess[str]:
    write(tmp_path, body)
    return python(tmp_path, "-m", "fxfuse.report", *command)


def test_table_of_a_script(tmp_path: Path) -> None:
    """Compiled heads, fused and kept; the script's output first; sys.exit(0) is success; --check is not."""
    done = report(
        tmp_path,
        """
        print("training")
        torch.compile(Model(), options=SMALL)(x, y).backward()
        torch.compile(ranked, options=SMALL)(x, torch.randn(32, 8))
        sys.exit(0)
        """,
        *("--require", "lm_head", "--require", RANKED, "train.py"),
    )
    assert done.returncode == 7, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"fxfuse.report: not fused: {tmp_path}/{RANKED} (")
    assert "lm_head" not in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "training"
    fused, kept = (next(line for line in lines if line.startswith(status)) for status in ("fused ", "kept "))
    assert f"{HEAD} " in fused
    assert "lm_head" in fused
    assert "6 x 8" in fused
    assert f"{RANKED} " in kept
    assert f"kept: matmul(w) → sort → return\n    {RANKED}  return (x @ w.t()).sort().indices\n" in done.stdout
    assert "remedy: " in done.stdout
    assert lines[-1].startswith("2 heads: 1 fused, 1 kept; ")


@pytest.mark.slow
def test_json_of_a_script_that_compiles_in_every_way(tmp_path: Path) -> None:
    """One JSON object on standard output, whoever else writes there; every form of torch.compile ends in fxfuse."""
    done = report(
        tmp_path,
        """
        import ctypes, os, subprocess
        from torch import compile
        print("args", *sys.argv, __name__, sys.path[0], os.path.basename(__file__))
        os.write(1, b"by descriptor\\n")
        subprocess.run([sys.executable, "-S", "-c", "print('by a child')"])
        ctypes.CDLL(None).puts(b"by C")

        @torch.compile(backend="eager", dynamic=False)
        def decorated(x, w):
            return F.cross_entropy(F.linear(x, w), y)

        decorated(x, torch.randn(32, 8))

        in_place = Model()
        in_place.compile(options=SMALL)
        in_place(x, y)

        compile(options=SMALL)(lambda x, w: F.cross_entropy(x @ w.t(), y))(x, torch.randn(32, 8))
        torch.compile(Model(), backend=lambda graph, inputs: graph.forward)(x, y)
        print(torch.cond(x.sum() > 9e9, lambda x: x + 1, lambda x: x - 1, (x,)).shape)
        print("still " * 9)
        sys.stdout.close()
        """,
        *("--json", "train.py", "--json", "--", "-x"),
    )
    assert done.returncode == 0, done.stderr
    parsed = json.loads(done.stdout)
    assert {"fxfuse", "torch", "graphs", "reads"} <= set(parsed)
    assert parsed["torch"] == torch.__version__
    assert [graph["id"] for graph in parsed["graphs"]] == [0, 1, 2, 3]  # torch.cond's own graph is not among them
    statuses = [[site["status"] for site in graph["sites"]] for graph in parsed["graphs"]]
    assert statuses == [["kept"], ["fused"], ["fused"], ["kept"]]
    reasons = [graph["sites"][0]["reason"] for graph in parsed["graphs"]]
    assert [reason and reason["code"] for reason in reasons] == ["too_small", None, None, "too_small"]

    for words in ("by descriptor", "by a child", "by C", "still still"):
        assert words in done.stderr
    assert f"args train.py --json -- -x __main__ {tmp_path.resolve()} train.py\n" in done.stderr
    assert "has no registered name" in done.stderr


@pytest.mark.slow
def test_model_and_example_inputs(tmp_path: Path) -> None:
    done = report(tmp_path, 'model, example_inputs = Model(), {"y": y, "x": x}', "--json", "train.py")
    assert done.returncode == 0, done.stderr
    [graph] = json.loads(done.stdout)["graphs"]
    [site] = graph["sites"]
    assert (site["module"], site["rows"], site["hidden"], site["vocab"]) == ("lm_head", 6, 8, 32)


def test_a_function_of_a_file_is_called_with_fake_tensors(tmp_path: Path) -> None:
    body = """
        assert (__name__, sys.argv) == ("train", ["train.py"])

        class Owner:
            weight = torch.randn(1 << 17, 1 << 20)  # half a TiB

            @staticmethod
            def loss(x, y):
                return F.cross_entropy(x @ Owner.weight.t(), y)

        def Owner_loss_example_inputs():
            return torch.randn(6, 1 << 20), y
        """
    done = report(tmp_path, body, "--json", "train.py:Owner.loss")
    assert done.returncode == 0, done.stderr
    [graph] = json.loads(done.stdout)["graphs"]
    [site] = graph["sites"]
    assert (site["status"], site["rows"], site["vocab"]) == ("kept", 6, 1 << 17)
    assert site["reason"]["code"] == "too_small"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "target", "status", "sentence"),
    [
        ("raise KeyError(1)", "train.py:model", 1, "train.py:model raised KeyError; what"),
        ("model = Model()", "train.py:modell", 2, "train.py has no modell that can be called"),
        ("model = Model()", "train.py:model", 3, "train.py defines no `example_inputs` to call model with"),
        (
            "model, example_inputs = Model(), (x, y, 3)",
            "train.py:model",
            1,
            "train.py:model raised TypeError; what follows was compiled until then",
        ),
        ("example_inputs = (2 * y.float(),)", "train.py:scaled", 4, "train.py:scaled has no projection"),
        ("def three(x): return 3\nexample_inputs = 1,", "train.py:three", 3, "train.py:three compiled nothing"),
        ("", "-m train.nothing", 5, "No module named train.nothing"),
        ("print(", "-m train", 6, "train is not a Python script"),
    ],
)
def test_each_end_has_its_status(body: str, target: str, status: int, sentence: str, tmp_path: Path) -> None:
    done = report(tmp_path, body, "--json", *target.split())
    assert done.returncode == status, done.stderr
    assert f"fxfuse.report: {sentence}" in done.stderr
    assert (done.stdout == "") == (status in (2, 5, 6))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("train.py > /dev/full", "No space left on device"),
        ("train.py | true", "Broken pipe"),
        ("train.py >&-", "Bad file descriptor"),
        ("--json train.py >&-", "Bad file descriptor"),
    ],
)
def test_standard_output_that_takes_nothing(arguments: str, why: str, tmp_path: Path) -> None:
    """The page is there all the same."""
    write(tmp_path, "torch.compile(Model(), options=SMALL)(x, y)")
    done = shell(tmp_path, f"-m fxfuse.report --html page.html {arguments}")
    assert done.returncode == 8, done.stderr
    assert done.stderr.splitlines()[-1] == f"fxfuse.report: cannot write standard output: {why}"
    assert "Traceback" not in done.stderr and "lm_head" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_page_on_a_full_disk(tmp_path: Path) -> None:
    write(tmp_path, "torch.compile(Model(), options=SMALL)(x, y)")
    done = shell(tmp_path, "-m fxfuse.report --html /dev/full train.py")
    assert done.returncode == 8, done.stderr
    assert done.stderr == "fxfuse.report: cannot write /dev/full: No space left on device\n"


@pytest.mark.slow
def test_without_standard_error_the_messages_are_not_on_standard_output(tmp_path: Path) -> None:
    body = "print('training')\ntorch.compile(ranked, backend=lambda graph, inputs: graph)(x, torch.randn(32, 8))"
    write(tmp_path, body)
    done = shell(tmp_path, "-m fxfuse.report --json --check train.py 2>&-")
    assert done.returncode == 7
    assert len(json.loads(done.stdout)["graphs"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("change", ["sys.stderr = None", "sys.stderr.close()", "sys.stderr = sys.stdout = Logger()"])
def test_a_script_that_replaces_or_closes_standard_error(change: str, tmp_path: Path) -> None:
    logger = "class Logger:\n    def write(self, text): pass\n    def flush(self): pass\n"
    done = report(tmp_path, f"{logger}{change}\ntorch.compile(Model(), options=SMALL)(x, y)", "train.py")
    assert done.returncode == 0, done.stdout
    assert "1 head: 1 fused; " in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", "sys.exit(3)"])
def test_a_page_whose_directory_the_script_takes_away(ending: str, tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    done = report(
        tmp_path,
        f"torch.compile(Model(), options=SMALL)(x, y)\nimport os\nos.rmdir('pages')\n{ending}",
        *("--html", "pages/page.html", "train.py"),
    )
    assert done.returncode == (1 if ending else 8), done.stderr
    assert "fxfuse.report: cannot write " in done.stderr and "page.html: No such file or directory" in done.stderr
    assert "1 head: 1 fused" in done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "the name of a file is empty"),
        ("no/such/directory.html", "cannot write no/such/directory.html: No such file or directory"),
        (".", "cannot write .: Is a directory"),
        ("a" * 300, f"cannot write {'a' * 300}: File name too long"),
    ],
    ids=["empty", "missing", "directory", "long"],
)
def test_a_page_that_cannot_be_written(name: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--html", name, "train.py"])
    assert exit.value.code == 2 and capsys.readouterr().err.endswith(f"argument --html: {why}\n")


def test_asking_whether_a_file_can_be_written_leaves_all_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "known").write_text("known")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    for name in ("new", "link", "known", "pipe"):
        assert writable(str(tmp_path / name)) == tmp_path / name
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "known").read_text() == "known"


@pytest.mark.slow
def test_a_page_of_a_program_with_a_name_that_is_no_text(tmp_path: Path) -> None:
    body = "torch.compile(Model(), options=SMALL)(x, y)"
    done = report(tmp_path, body, "--html", "page.html", "train.py", os.fsdecode(b"\xff"))
    assert done.returncode == 0 and "1 head: 1 fused" in done.stdout, done.stderr
    assert "train.py ?" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_whole_script_with_fake_tensors(tmp_path: Path) -> None:
    done = report(
        tmp_path,
        """
        vocabulary, width = 1 << 17, 1 << 20
        model = torch.nn.Sequential(torch.nn.Embedding(vocabulary, width), torch.nn.Linear(width, vocabulary))
        optimizer = torch.optim.AdamW(model.parameters())

        @torch.compile(mode="max-autotune")
        def loss_of(ids):
            return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

        for [ids] in torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.randint(vocabulary, (6, 17))), batch_size=3, shuffle=True
        ):
            loss = loss_of(ids)
            loss.backward()
            optimizer.step()
            print(f"loss {loss.item():.2f}")
        if loss < 3 or (model[1].weight > 0).any():
            print("not reached")
        """,
        *("--fake", "--check", "train.py"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss nan\nloss nan\nstatus ")
    assert f"{3 * 17} x {1 << 20}" in done.stdout
    assert f"needs values at {tmp_path}/train.py:37, which fake tensors do not have; what" in done.stderr


@pytest.mark.slow
def test_a_script_that_raises(tmp_path: Path) -> None:
    done = report(
        tmp_path,
        """
        torch.compile(Model(), options=SMALL)(x, y)
        raise KeyError("lost")
        """,
        "train.py",
    )
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("1 head: 1 fused; ")
    frames = [line for line in done.stderr.splitlines() if line.lstrip().startswith("File ")]
    assert len(frames) == 1
    assert str(tmp_path / "train.py") in frames[0]
    assert "KeyError: 'lost'\nfxfuse.report: train.py raised KeyError; " in done.stderr


@pytest.mark.slow
def test_a_script_that_exits_with_a_message(tmp_path: Path) -> None:
    done = report(tmp_path, 'sys.exit("no data")', "train.py")
    assert done.returncode == 1
    assert "no data\nfxfuse.report: train.py exited" in done.stderr
    assert done.stdout == "No heads seen: nothing was compiled.\n"


@pytest.mark.slow
def test_a_script_that_compiles_nothing(tmp_path: Path) -> None:
    done = report(tmp_path, "model = Model()", "--json", "train.py")
    assert done.returncode == 3
    assert json.loads(done.stdout)["graphs"] == []
    assert "train.py compiled nothing, and does not define a callable `model` and `example_inputs`" in done.stderr


@pytest.mark.slow
def test_a_script_without_a_head(tmp_path: Path) -> None:
    done = report(tmp_path, "torch.compile(scaled, backend='eager')(x)", "train.py")
    assert done.returncode == 4
    assert done.stdout.startswith("No heads seen: 1 graph compiled, none ")
    assert done.stderr == ""
