"""``python -m fxfuse``: which calls of torch.compile it routes, and that nothing else is different from python."""

from __future__ import annotations

import json
import multiprocessing.spawn
import subprocess
import sys
import zipapp
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import HEAD, RANKED, python, shell, write

from fxfuse.__main__ import main
from fxfuse.report.run import route, routed, through_fxfuse

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
        ({"backend": "cudagraphs", "mode": "fast"}, {"options": {"fxfuse.inner": "cudagraphs"}}),
        ({"backend": "nosuch", "mode": "fast"}, {"backend": "nosuch", "mode": "fast"}),
        ({"backend": "eager", "options": [1]}, {"options": {"fxfuse.inner": "eager"}}),
        (
            {"backend": "tvm", "options": {"guard_filter_fn": any}},
            {"options": {"fxfuse.inner": "tvm", "guard_filter_fn": any}},
        ),
    ],
)
def test_arguments_through_fxfuse(given: dict[str, Any], routed_to: dict[str, Any]) -> None:
    assert through_fxfuse(given) == {"backend": "fxfuse", **routed_to}


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {}),
        ({"mode": "max-autotune"}, {}),
        (
            {"options": {"shape_padding": True, "fxfuse.memory": 9, "guard_filter_fn": any}},
            {"fxfuse.memory": 9, "guard_filter_fn": any},
        ),
        ({"backend": lambda graph, inputs: graph}, {}),
    ],
)
def test_an_inner_backend_for_all(given: dict[str, Any], options: dict[str, Any]) -> None:
    expected = {"backend": "fxfuse", "fullgraph": True, "options": {**options, "fxfuse.inner": "eager"}}
    assert through_fxfuse({**given, "fullgraph": True}, "eager") == expected


def test_backends_given_as_functions(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("inductor", "fxfuse"):
        function = torch._dynamo.lookup_backend(name)
        assert through_fxfuse({"backend": function, "mode": "default"}) == {"backend": "fxfuse", "mode": "default"}
    assert capsys.readouterr().err == ""

    def my_backend(graph: Any, inputs: Any) -> Any: ...

    assert through_fxfuse({"backend": my_backend})["options"] == {"fxfuse.inner": "eager"}
    assert "my_backend" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(torch.compiler, "set_default_backend"), reason="torch 2.13 and later")
def test_a_default_backend_of_the_program() -> None:
    torch.compiler.set_default_backend("aot_eager")
    try:
        assert through_fxfuse({}) == {"backend": "fxfuse", "options": {"fxfuse.inner": "aot_eager"}}
    finally:
        torch.compiler.set_default_backend(None)


def test_every_way_to_call_torch_compile_is_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def record(model: Any = None, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return model

    monkeypatch.setattr(torch, "compile", record)
    monkeypatch.setattr(multiprocessing.spawn, "get_preparation_data", multiprocessing.spawn.get_preparation_data)
    route()
    from torch import compile

    torch.compile(record, backend="eager")
    torch.compile(backend="eager")
    compile(record, backend="eager")
    torch.compiler.compile(record, backend="eager")
    torch.nn.Linear(2, 2).compile(backend="eager")
    assert calls == [{"backend": "fxfuse", "options": {"fxfuse.inner": "eager"}}] * 5


def test_what_torch_compiles_for_itself_is_left_alone() -> None:
    compiled = routed(lambda **kwargs: kwargs)
    torchs_own = {"__name__": "torch._higher_order_ops.utils", "compiled": compiled}
    assert eval("compiled(backend='eager', fullgraph=True)", torchs_own) == {"backend": "eager", "fullgraph": True}


# As python

ENDS = {
    "well": "print('ok'); sys.exit()",
    "status": "sys.exit(7)",
    "message": "sys.exit('no data')",
    "exception": """
        def fail():
            raise ValueError("boom")

        try:
            fail()
        except ValueError as error:
            raise KeyError("lost") from error
        """,
    "interrupt": "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "hook": "sys.excepthook = lambda kind, error, frames: print(kind, error, frames.tb_lineno); 1 / 0",
    "syntax": "print(",
}

AS_MAIN = """\
import atexit, os, pickle, signal, sys, time

class Something:
    pass

atexit.register(print, "at exit")
print(sys.argv, sys.path[0], __name__, __file__, __spec__ and __spec__.name, __package__, type(__loader__))
print(sys.excepthook)
print(pickle.loads(pickle.dumps(Something())).__class__ is sys.modules["__main__"].Something)
"""


@pytest.mark.parametrize(
    "end", [end if end == "exception" else pytest.param(end, marks=pytest.mark.slow) for end in ENDS]
)
def test_a_script_does_what_it_does_with_python(end: str, tmp_path: Path) -> None:
    write(tmp_path, ENDS[end], AS_MAIN)
    plain = python(tmp_path, "train.py", "-m", "--", "--report")
    routed = python(tmp_path, "-m", "fxfuse", "train.py", "-m", "--", "--report")
    assert routed.returncode == plain.returncode
    assert routed.stdout == plain.stdout
    nothing = "fxfuse: train.py compiled nothing in this process "
    said, _, hint = routed.stderr.partition(nothing)
    assert said == plain.stderr
    assert bool(hint) == (end == "well")


@pytest.mark.slow
def test_a_module_does_what_it_does_with_python(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    write(package, "from . import sizes\nprint(sizes.__name__, __spec__.name)", AS_MAIN, "__main__.py")
    (package / "sizes.py").touch()
    plain = python(tmp_path, "-m", "package", "--x")
    routed = python(tmp_path, "-m", "fxfuse", "-m", "package", "--x")
    assert (routed.returncode, routed.stdout) == (0, plain.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("archived", [False, True], ids=["directory", "archive"])
def test_a_directory_or_an_archive_does_what_it_does_with_python(archived: bool, tmp_path: Path) -> None:
    (directory := tmp_path / "app").mkdir()
    write(directory, "import sizes\nprint(sizes.__name__)", AS_MAIN, "__main__.py")
    (directory / "sizes.py").touch()
    if archived:
        zipapp.create_archive(directory)
    name = "app.pyz" if archived else "app"
    plain = python(tmp_path, name, "--x")
    routed = python(tmp_path, "-m", "fxfuse", name, "--x")
    assert (routed.returncode, routed.stdout) == (0, plain.stdout), routed.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("target", "status"), [("nothing.py", 2), ("-m nothing", 1), ("-m nothing.more", 1)])
def test_what_is_not_there(target: str, status: int, tmp_path: Path) -> None:
    done = python(tmp_path, "-m", "fxfuse", *target.split())
    assert done.returncode == status == python(tmp_path, *target.split()).returncode
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert target.split()[-1] in done.stderr


@pytest.mark.parametrize(
    "argv",
    [[], ["--nope", "x.py"], *(["--report-json", name, "x.py"] for name in ("no/such/directory.json", ".", ""))],
)
def test_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(argv)
    assert exit.value.code == 2
    assert "usage: python -m fxfuse [--report] [--report-json FILE] train.py [ARGS ...]" in capsys.readouterr().err


def test_no_report_is_begun_of_a_program_that_is_not_there(tmp_path: Path) -> None:
    done = python(tmp_path, "-m", "fxfuse", "--report-json", "heads.json", "nothing.py")
    assert done.returncode == 2 and not list(tmp_path.iterdir())


# The report

COMPILES = """
    import functools

    optimised = functools.partial(torch.compile, options=SMALL)

    @optimised
    def loss(x, w):
        return F.cross_entropy(F.linear(x, w), y)

    Model = optimised(Model())
    print(Model(x, y).item() > 0)
    import os
    os.chdir("/")
    """


@pytest.mark.parametrize(
    "end",
    [
        "1 / 0",
        pytest.param("", marks=pytest.mark.slow),
        pytest.param("import os, signal; os.kill(os.getpid(), signal.SIGINT)", marks=pytest.mark.slow),
    ],
)
def test_the_report_is_printed_however_the_script_ends(end: str, tmp_path: Path) -> None:
    write(tmp_path, COMPILES)
    with (tmp_path / "train.py").open("a") as file:
        file.write(
            f"import atexit; atexit.register(torch.compile(ranked, options=SMALL), x, torch.randn(32, 8))\n{end}\n"
        )
    done = python(tmp_path, "-m", "fxfuse", "--report", "--report-json", "heads.json", "train.py")
    assert (done.returncode == 0) == (end == "")
    assert done.stdout == "True\n"
    assert done.stderr.count("Traceback") == (end != "")
    table = done.stderr.partition("status ")[2]
    assert f"{HEAD} " in table
    assert table.splitlines()[-1].startswith("2 heads: 1 fused, 1 kept; ")
    parsed = json.loads((tmp_path / "heads.json").read_text(encoding="utf-8"))
    assert [site["status"] for graph in parsed["graphs"] for site in graph["sites"]] == ["fused", "kept"]
    assert parsed["graphs"][1]["sites"][0]["where"] == f"{tmp_path}/{RANKED}"


@pytest.mark.slow
def test_of_many_alike_only_the_first_reports(tmp_path: Path) -> None:
    write(tmp_path, COMPILES)
    command = ["-m", "fxfuse", "--report", "--report-json", "heads.json", "train.py"]
    done = python(tmp_path, *command, RANK="1", WORLD_SIZE="2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
    assert not (tmp_path / "heads.json").exists()
    done = python(tmp_path, *command, RANK="1")
    assert "1 head: 1 fused; " in done.stderr and (tmp_path / "heads.json").exists()


@pytest.mark.slow
def test_the_json_is_there_whatever_becomes_of_what_is_printed(tmp_path: Path) -> None:
    write(tmp_path, COMPILES)
    done = shell(tmp_path, "-m fxfuse --report --report-json heads.json train.py 2> /dev/full")
    assert (done.returncode, done.stdout) == (0, "True\n")
    assert len(json.loads((tmp_path / "heads.json").read_text(encoding="utf-8"))["graphs"]) == 1
    done = shell(tmp_path, "-m fxfuse --report --report-json /dev/full train.py")
    assert done.returncode == 0 and "1 head: 1 fused; " in done.stderr
    assert "fxfuse: cannot write /dev/full: No space left on device\n" in done.stderr
    done = shell(tmp_path, "-m fxfuse --report train.py 2>&-")
    assert (done.returncode, done.stdout) == (0, "True\n")


# Programs that others would write

MODEL = """\
import torch
import torch.nn.functional as F

class GPT(torch.nn.Module):
    def __init__(self, vocabulary=32000, width=32):
        super().__init__()
        self.wte = torch.nn.Embedding(vocabulary, width)
        self.lm_head = torch.nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets=None):
        logits = self.lm_head(self.wte(idx))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
"""

PLAIN_LOOP = """
from model import GPT

model = GPT()
optimizer = torch.optim.AdamW(model.parameters())
model = torch.compile(model, backend="eager")
for _ in range(3):
    ids = torch.randint(32000, (8, 33))
    logits, loss = model(ids[:, :-1], ids[:, 1:].contiguous())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print("done")
"""

LOSS_ELSEWHERE = """
from losses import loss_of
from model import GPT

student, teacher = torch.compile(GPT(), backend="eager"), GPT()
teacher.compile(backend="eager")
ids = torch.randint(32000, (8, 32))
loss_of(student(ids)[0], ids).backward()
with torch.no_grad():
    print(float(teacher(ids)[0].sum()) != 0)
print("done")
"""

TRAINER = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, max_position_embeddings=32, **sizes))
ids = torch.randint(32000, (16, 32))
arguments = TrainingArguments(
    **{"output_dir": "out", "max_steps": 2, "use_cpu": True, "save_strategy": "no", "report_to": "none"},
    **{"torch_compile": True, "torch_compile_backend": "eager"},
)
Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids]).train()
print("done")
"""

ACCELERATE = """
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from model import GPT

accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager") if PLUGIN else None)
model, optimizer = accelerator.prepare(model := GPT(), torch.optim.AdamW(model.parameters()))
for _ in range(2):
    ids = torch.randint(32000, (8, 32))
    _, loss = model(ids, ids)
    accelerator.backward(loss)
    optimizer.step()
print("done")
"""

LIGHTNING = """
import lightning
from model import GPT

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = GPT()

    def training_step(self, batch, index):
        return self.model(batch, batch)[1]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

loader = torch.utils.data.DataLoader(torch.randint(32000, (16, 32)), batch_size=8)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(max_steps=2, accelerator="cpu", **quiet)
trainer.fit(torch.compile(Module(), backend="eager"), loader)
print("done")
"""

STRANGERS: dict[str, tuple[str, str, list[str]]] = {
    "a plain loop": ("torch", PLAIN_LOOP, ["deferred"]),
    "two models, a loss elsewhere": ("torch", LOSS_ELSEWHERE, ["deferred", "deferred"]),
    "Trainer": ("transformers", TRAINER, ["deferred"]),
    "accelerate": ("accelerate", ACCELERATE.replace("PLUGIN", "True"), ["deferred"]),
    "accelerate's environment": ("accelerate", ACCELERATE.replace("PLUGIN", "False"), ["deferred"]),
    "Lightning": ("lightning", LIGHTNING, ["fused"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRANGERS)
def test_programs_of_strangers(name: str, tmp_path: Path) -> None:
    library, source, expected = STRANGERS[name]
    pytest.importorskip(library)
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    losses = "import torch.nn.functional as F\n\ndef loss_of(logits, ids):\n"
    (tmp_path / "losses.py").write_text(
        losses + "    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())\n", encoding="utf-8"
    )
    write(tmp_path, source, "import torch\n")
    command = ["-m", "fxfuse", "--report-json", "heads.json", "train.py"]
    done = python(tmp_path, *command, ACCELERATE_DYNAMO_BACKEND="eager" if "environment" in name else "no")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"
    parsed = json.loads((tmp_path / "heads.json").read_text(encoding="utf-8"))
    assert [site["status"] for graph in parsed["graphs"] for site in graph["sites"]] == expected


SPAWN = """
import multiprocessing
import os
from model import GPT

def work(method, queue):
    ids = torch.randint(32000, (8, 32))
    torch.compile(GPT(), backend="eager")(ids, ids)
    import fxfuse
    queue.put([method, *(site.status for site in fxfuse.sites())])

if __name__ == "__main__":
    for method in ("spawn", "forkserver", "fork"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=work, args=(method, queue))
        process.start()
        print(*queue.get())
        process.join()
"""


@pytest.mark.slow
def test_processes_that_the_program_starts(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    write(tmp_path, SPAWN, "import torch\n")
    done = python(tmp_path, "-m", "fxfuse", "--report", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["spawn deferred", "forkserver deferred", "fork deferred"]
    assert done.stderr.count("fxfuse: train.py compiled nothing in this process") == 1


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    write(tmp_path, PLAIN_LOOP, "import torch\n")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = python(tmp_path, *torchrun, "-m", "fxfuse", "--report", "train.py", "--x", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.replace("\n", "") == "donedone"  # two processes may share a line
    assert done.stderr.count("1 head: 1 deferred; ") == 1


@pytest.mark.slow
def test_accelerate_launch(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    write(tmp_path, ACCELERATE.replace("PLUGIN", "False"), "import torch\n")
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--dynamo_backend", "eager"]
    done = python(tmp_path, *launch, "-m", "fxfuse", "--report", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["done"]
    assert "1 head: 1 deferred; " in done.stderr


def test_the_import_does_not_import_the_compiler() -> None:
    """Which takes seconds, and does things when a process ends."""
    code = "import fxfuse, sys; sys.exit(any(m in sys.modules for m in ('torch._dynamo', 'torch._inductor', 'triton')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
