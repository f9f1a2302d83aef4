"""The report: its table, its JSON, which torch.compile calls it routes, and its command line."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fxfuse.reasons import because
from fxfuse.report import GraphRecord, Report, Site
from fxfuse.report.__main__ import main
from fxfuse.report.records import Journal
from fxfuse.report.run import example_call, routed, routing, through_fxfuse
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
                        "measured": None,
                    }
                ],
            },
            {"id": 1, "sites": []},
        ],
    }


# Which calls are routed


@pytest.mark.parametrize(
    ("given", "routed_to"),
    [
        ({}, {}),
        ({"backend": None}, {}),
        ({"mode": "max-autotune", "fullgraph": True}, {"mode": "max-autotune", "fullgraph": True}),
        ({"backend": "inductor", "options": {"shape_padding": True}}, {"options": {"shape_padding": True}}),
        ({"backend": "fxfuse", "options": {"fxfuse.strict": True}}, {"options": {"fxfuse.strict": True}}),
        ({"backend": "aot_eager", "dynamic": True}, {"dynamic": True, "options": {"fxfuse.inner": "aot_eager"}}),
        ({"backend": "tvm", "options": {"trials": 9}}, {"options": {"fxfuse.inner": "tvm"}}),
        ({"backend": "onnxrt", "mode": "fast"}, {"options": {"fxfuse.inner": "onnxrt"}}),
        (
            {"backend": "tvm", "options": {"guard_filter_fn": any}},
            {"options": {"fxfuse.inner": "tvm", "guard_filter_fn": any}},
        ),
    ],
)
def test_arguments_through_fxfuse(given: dict[str, Any], routed_to: dict[str, Any]) -> None:
    assert through_fxfuse(given) == {"backend": "fxfuse", **routed_to}


def test_backends_given_as_functions(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("inductor", "fxfuse"):
        function = torch._dynamo.lookup_backend(name)
        assert through_fxfuse({"backend": function, "mode": "default"}) == {"backend": "fxfuse", "mode": "default"}
    assert capsys.readouterr().err == ""

    def my_backend(graph: Any, inputs: Any) -> Any: ...

    assert through_fxfuse({"backend": my_backend})["options"] == {"fxfuse.inner": "eager"}
    assert "my_backend" in capsys.readouterr().err


def test_every_way_to_call_torch_compile_is_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def record(model: Any = None, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return model

    monkeypatch.setattr(torch, "compile", record)
    with routing():
        torch.compile(record, backend="eager")
        torch.compile(backend="eager")
        torch.compiler.compile(record, backend="eager")
        torch.nn.Linear(2, 2).compile(backend="eager")
    assert torch.compile is record
    assert calls == [{"backend": "fxfuse", "options": {"fxfuse.inner": "eager"}}] * 4


def test_what_torch_compiles_for_itself_is_left_alone() -> None:
    compiled = routed(lambda **kwargs: kwargs)
    torchs_own = {"__name__": "torch._higher_order_ops.utils", "compiled": compiled}
    assert eval("compiled(backend='eager', fullgraph=True)", torchs_own) == {"backend": "eager", "fullgraph": True}


def test_example_call() -> None:
    model, x = torch.nn.Linear(2, 2), torch.ones(2)
    assert example_call({"model": model, "example_inputs": x}) == (model, (x,), {})
    assert example_call({"model": model, "example_inputs": [x, 1]}) == (model, (x, 1), {})
    assert example_call({"model": model, "example_inputs": {"input": x}}) == (model, (), {"input": x})
    assert example_call({"model": model}) is None
    assert example_call({"model": "gpt2", "example_inputs": x}) is None


# The command line: the first group does not get as far as running a script


def test_help_names_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0
    printed = capsys.readouterr().out
    assert "exit status:" in printed
    assert max(map(len, printed.splitlines())) <= WIDTH


@pytest.mark.parametrize("argv", [[], ["--nope", "x.py"], ["--json"]])
def test_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(argv)
    assert exit.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "usage: python -m fxfuse.report [-h]" in printed.err


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (None, "cannot read"),
        (b"x = (\n", "SyntaxError: '(' was never closed"),
        (b"\xff\xfe\x00", "is not a Python script"),
    ],
)
def test_not_a_script(source: bytes | None, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    if source is not None:
        script.write_bytes(source)
    assert main([str(script)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert complaint in printed.err
    assert str(script) in printed.err


# Each of the others runs a script in a process of its own

PREAMBLE = """\
import sys
import torch
import torch.nn.functional as F

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = torch.nn.Linear(8, 32, bias=False)

    def forward(self, x, y):
        return scaled(F.cross_entropy(self.lm_head(x), y))

def scaled(loss):  # a global that Dynamo looks up through sys.modules["__main__"]
    return loss * 2

def topk(x, w):
    return (x @ w.t()).topk(2).indices

SMALL = {"fxfuse.min_logits_bytes": 0, "fxfuse.inner": "eager"}
x, y = torch.randn(6, 8), torch.zeros(6, dtype=torch.long)
"""


def run(tmp_path: Path, body: str, *args: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(PREAMBLE + textwrap.dedent(body))
    command = [sys.executable, "-m", "fxfuse.report", *flags, "train.py", *args]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", timeout=300)


def test_table_of_a_script(tmp_path: Path) -> None:
    """Compiled heads, fused and kept; the script's output first; sys.exit(0) is success."""
    done = run(
        tmp_path,
        """
        print("training")
        torch.compile(Model(), options=SMALL)(x, y).backward()
        torch.compile(topk, options=SMALL)(x, torch.randn(32, 8))
        sys.exit(0)
        """,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "training"
    fused, kept = (next(line for line in lines if line.startswith(status)) for status in ("fused ", "kept "))
    assert "train.py:11 " in fused
    assert "lm_head" in fused
    assert "6 x 8" in fused
    assert "train.py:17 " in kept
    assert f"kept: {tmp_path}/train.py:17" in done.stdout
    assert "remedy: " in done.stdout
    assert lines[-1].startswith("2 heads: 1 fused, 1 kept; ")


@pytest.mark.slow
def test_json_of_a_script_that_compiles_in_every_way(tmp_path: Path) -> None:
    """One JSON object on standard output, whoever else writes there; every form of torch.compile ends in fxfuse."""
    done = run(
        tmp_path,
        """
        import ctypes, os, subprocess
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

        torch.compile(options=SMALL)(lambda x, w: F.cross_entropy(x @ w.t(), y))(x, torch.randn(32, 8))
        torch.compile(Model(), backend=lambda graph, inputs: graph.forward)(x, y)
        print(torch.cond(x.sum() > 9e9, lambda x: x + 1, lambda x: x - 1, (x,)).shape)
        print("still " * 9)
        sys.stdout.close()
        """,
        "--json",
        "--",
        "-x",
        flags=("--json",),
    )
    assert done.returncode == 0, done.stderr
    parsed = json.loads(done.stdout)
    assert set(parsed) == {"fxfuse", "torch", "graphs", "reads"}
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
    done = run(tmp_path, 'model, example_inputs = Model(), {"y": y, "x": x}', flags=("--json",))
    assert done.returncode == 0, done.stderr
    [graph] = json.loads(done.stdout)["graphs"]
    [site] = graph["sites"]
    assert (site["module"], site["rows"], site["hidden"], site["vocab"]) == ("lm_head", 6, 8, 32)


@pytest.mark.slow
def test_a_script_that_raises(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        torch.compile(Model(), options=SMALL)(x, y)
        raise KeyError("lost")
        """,
    )
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("1 head: 1 fused; ")
    frames = [line for line in done.stderr.splitlines() if line.lstrip().startswith("File ")]
    assert len(frames) == 1
    assert str(tmp_path / "train.py") in frames[0]
    assert "KeyError: 'lost'\nfxfuse.report: train.py raised KeyError; " in done.stderr


@pytest.mark.slow
def test_a_script_that_exits_with_a_message(tmp_path: Path) -> None:
    done = run(tmp_path, 'sys.exit("no data")')
    assert done.returncode == 1
    assert "no data\nfxfuse.report: train.py exited" in done.stderr
    assert done.stdout == "No heads seen: nothing was compiled.\n"


@pytest.mark.slow
def test_a_script_that_compiles_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "model = Model()", flags=("--json",))
    assert done.returncode == 3
    assert json.loads(done.stdout)["graphs"] == []
    assert "train.py compiled nothing, and does not define a callable `model` and `example_inputs`" in done.stderr
