"""Every exception and warning of ``fxfuse/errors.py``, brought about as a user's program would, and what it says."""

from __future__ import annotations

import ast
import functools
import linecache
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled, problem
from programs import World, ce
from torch.autograd import forward_ad

import fxfuse
from fxfuse import errors, graph, ops
from fxfuse.deferred import DeferredLogits
from fxfuse.report.records import journal

PACKAGE = Path(fxfuse.__file__).parent
DEFER_LOGITS = 'options={"fxfuse.defer_logits": False}'
TRIGGERED: set[str] = set()


def triggers(*names: str) -> Callable[[Any], Any]:
    """Say which names of ``errors`` the test brings about."""
    TRIGGERED.update(names)
    return lambda test: test


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def parts(raised: Any) -> tuple[str, str]:
    """The line of this file that a message says was running, and what else it says."""
    message = str(raised.value)
    found = re.match(rf"{re.escape(__file__)}:(\d+): (?!.*\d: )(.+)", message, re.DOTALL)
    assert found, f"no place of this file stands before {message!r}"
    return linecache.getline(__file__, int(found[1])), found[2]


def deferred(s: World) -> torch.Tensor:
    """Logits that a compiled function has returned."""
    z = compiled(lambda s: s.z)(s)
    assert isinstance(z, DeferredLogits)
    return z


PROJECTION = rf"of the projection at \S+{re.escape('programs.py')}:\d+"


# --- that there is a test for each ----------------------------------------------------------------------------


def test_each_of_them_is_triggered_here() -> None:
    own = {name for name, value in vars(errors).items() if getattr(value, "__module__", None) == errors.__name__}
    texts = {name for name, value in vars(errors).items() if isinstance(value, str)}
    assert {name for name in own | texts if not name.startswith("_")} == TRIGGERED


# What does not come from errors.py, by file and what is raised.
ELSEWHERE = {
    ("backend.py", "compat.as_raised"): "one of errors.py, as Dynamo hands it on unwrapped",
    ("rules/__init__.py", "Keep(because(code, detail or self.name, self.where))"): "caught: the head is kept",
    ("lazy_tensor.py", "NotDeferred"): "caught: the values are put in",
    ("kernels/launcher.py", "_NotCompiled"): "caught: the op is rehearsed",
    ("kernels/launcher.py", "CancelledError"): "caught: Triton forgets that it was asked for the kernel",
    ("kernels/prepared.py", "_Unknown"): "caught: Triton launches the kernel",
    ("graph.py", "AssertionError"): "caught: analysis_failed",
    ("lazy.py", "AssertionError"): "can only be a fault of fxfuse",
    ("__main__.py", "raised"): "what the program raised",
    ("__main__.py", "SystemExit"): "how a command ends, after its sentence",
    ("report/__main__.py", "_Ended"): "caught: a sentence and an exit status",
    ("report/run.py", "argparse.ArgumentTypeError"): "caught: argparse says it",
    ("report/run.py", "ModuleNotFoundError"): "as `python -m` has it",
    ("report/run.py", "ImportError"): "as `python -m` has it",
    ("report/fake.py", "NoValue"): "caught: the report says where the script ended",
    ("report/memory.py", "MemoryError"): "caught: the report says that the head does not fit",
}


def raised_in(path: Path) -> Iterator[tuple[int, str]]:
    """Where a file raises or warns by something that errors.py has not made."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        thrown = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("warn", "warn_explicit"):
            thrown = node.args[0]
        if thrown is not None and not ast.unparse(thrown).startswith("errors."):
            yield node.lineno, ast.unparse(thrown)


def test_all_that_is_raised_is_made_in_one_module() -> None:
    unused = dict(ELSEWHERE)
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for line, thrown in raised_in(path):
            keys = {(name, thrown), (name, thrown.partition("(")[0])} & set(ELSEWHERE)
            assert keys, f"fxfuse/{name}:{line} raises {thrown}, which belongs into errors.py"
            for key in keys:
                unused.pop(key, None)
    assert not unused, "is raised nowhere"


# --- what eager would raise too -------------------------------------------------------------------------------


@triggers("index_out_of_range")
def test_a_class_that_is_none() -> None:
    p = problem(4, 3, 5)
    with pytest.raises(IndexError, match=r"^Target 7 is out of bounds\.$"):
        fxfuse.linear_cross_entropy(p.input, p.weight, p.target * 0 + 7)
    with pytest.raises(RuntimeError, match=r"^index 7 is out of bounds for dimension 1 with size 5$"):
        fxfuse.linear_log_probs(p.input, p.weight, p.target * 0 + 7)
    with pytest.raises(IndexError, match=r"^index -6 is out of bounds for dimension 1 with size 5$"):
        ops.check_index(p.target * 0 - 6, 5, None, wraps=True)


@triggers("INDEX_OUT_OF_RANGE")
def test_a_class_that_is_none_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the device asserts, which ends the process. What it asserts can be seen on a CPU."""
    monkeypatch.setattr(ops.gpu, "has_triton", lambda device: False)
    with pytest.raises(RuntimeError, match=r"out of range \[0, vocab\).*ignore_index.* on a CPU .*LAUNCH_BLOCKING=1"):
        ops._check_index_cuda(torch.tensor([0, 7]), 5, None)
    assert len(errors.INDEX_OUT_OF_RANGE) < 256, "CUDA cuts the message of an assertion"
    if torch.cuda.is_available():
        for bad in (-1, 5, 2**33):
            program = "import torch, fxfuse; y = torch.zeros(3000, dtype=torch.int64).cuda(); y[2777] = 3\n"
            program += "torch.ops.fxfuse.check_index(y, 5, -100); torch.cuda.synchronize(); print('so far')\n"
            program += f"y[2777] = {bad}; torch.ops.fxfuse.check_index(y, 5, -100); torch.cuda.synchronize()"
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
            assert done.returncode != 0 and "so far" in done.stdout
            assert errors.INDEX_OUT_OF_RANGE in done.stderr + done.stdout


# --- wrong calls ----------------------------------------------------------------------------------------------


@triggers("not_a_tensor")
@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_log_probs", "linear_logsumexp"])
def test_something_else_for_a_tensor(name: str) -> None:
    p = problem(4, 3, 5)
    arguments = [p.input, p.weight, p.target][: 2 if name == "linear_logsumexp" else 3]
    for i in range(len(arguments)):
        with pytest.raises(TypeError) as raised:
            getattr(fxfuse, name)(*arguments[:i], [1.0], *arguments[i + 1 :])
        line, text = parts(raised)
        assert "getattr(fxfuse, name)" in line
        assert re.search(rf"^fxfuse\.{name}\(\): argument '\w+' must be a Tensor, not list\. .*torch\.as_tensor", text)
    with pytest.raises(TypeError, match=r"'linear_bias' must be a Tensor, not float"):
        getattr(fxfuse, name)(*arguments, linear_bias=1.0)
    with pytest.raises(TypeError, match=r"'linear_bias' must be a Tensor, not float"):
        torch.compile(getattr(fxfuse, name), backend="eager")(*arguments, linear_bias=1.0)


@triggers("target_of_another_shape")
def test_a_target_that_does_not_repeat_the_leading_dimensions() -> None:
    p = problem(6, 3, 5)
    for input, target in ((p.input.view(2, 3, -1), p.target), (p.input.view(1, 6, -1), p.target[None, :5])):
        with pytest.raises(ValueError) as raised:
            fxfuse.linear_cross_entropy(input, p.weight, target)
        line, text = parts(raised)
        assert "fxfuse.linear_cross_entropy(input" in line
        assert f"shape {tuple(target.shape)}" in text and f"input are {tuple(input.shape[:-1])}" in text


@triggers("unknown_transform")
@pytest.mark.parametrize("transform", ["cube", "tanh:1.0", "mul", "mul:x"])
def test_an_unknown_transform(transform: str) -> None:
    p = problem(4, 3, 5)
    with pytest.raises(ValueError) as raised:
        ops.linear_stats(p.input, p.weight, None, p.target[:, None], None, 1.0, False, False, transform=transform)
    line, text = parts(raised)
    assert "ops.linear_stats(" in line
    assert text.startswith(repr(transform)) and "'mul:0.5 tanh'" in text and "softsign" in text


@triggers("bad_options")
@pytest.mark.parametrize("options", [[1], {None: 2}], ids=str)
def test_options_that_are_none(options: Any) -> None:
    with pytest.raises(ValueError) as raised:
        torch.compile(torch.sin, backend="fxfuse", options=options)(torch.ones(3))
    assert parts(raised)[1].startswith(f"options must be a dict with strings for keys, not {options!r}")


@triggers("unknown_option")
def test_an_unknown_option() -> None:
    f = torch.compile(torch.sin, backend="fxfuse", options={"fxfuse.min_logit_bytes": 0})
    with pytest.raises(ValueError) as raised:
        f(torch.ones(3))
    line, text = parts(raised)
    assert "f(torch.ones(3))" in line
    assert text.startswith("unknown option 'fxfuse.min_logit_bytes'; did you mean 'fxfuse.min_logits_bytes'?")
    assert "fxfuse.defer_logits, fxfuse.enabled" in text and "every other key is Inductor's" in text


@triggers("bad_option")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 1.5}, "option 'fxfuse.memory' must be a number of bytes, from 0 to 2**63 - 1, not 1.5"),
        ({"strict": 1}, "option 'fxfuse.strict' must be True or False, not 1"),
        ({"inner": "fxfuse"}, "option 'fxfuse.inner' must be a backend other than fxfuse itself, not 'fxfuse'"),
        ({"inner": "no"}, "option 'fxfuse.inner' must be one of "),
    ],
    ids=str,
)
def test_a_wrong_value_of_an_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        compiled(torch.sin, **options)(torch.ones(3))
    line, text = parts(raised)
    assert "compiled(torch.sin" in line
    assert text.startswith(message)


# --- the ops --------------------------------------------------------------------------------------------------


@triggers("not_differentiable")
def test_a_gradient_that_an_op_does_not_have() -> None:
    p = problem(4, 3, 5)
    class_weight = p.class_weight.clone().requires_grad_()
    with pytest.raises(fxfuse.FxfuseError) as raised:
        ops.linear_stats(p.input, p.weight, None, p.target[:, None], class_weight, 1.0, True, False)
    line, text = parts(raised)
    assert "ops.linear_stats(" in line
    assert re.search("linear_stats has no gradient for `class_weight`.* Detach it, or .*torch.nn.functional", text)


@triggers("gradient_not_made")
def test_a_gradient_that_an_op_was_not_told_to_make() -> None:
    p = problem(4, 3, 5)
    x = p.input.clone().requires_grad_()
    one = torch.ones(4)
    with pytest.raises(fxfuse.FxfuseError) as raised:
        ops.linear_loss(x, p.weight, None, p.target[:, None], None, 1.0, one[:, None], None, False, False, False)
    line, text = parts(raised)
    assert "ops.linear_loss(" in line
    assert re.search(
        "linear_loss was told not to .* Pass need_input, need_weight and need_bias as .*requires_grad", text
    )


@triggers("no_double_backward", "FxfuseError")
def test_a_second_derivative() -> None:
    p = problem(4, 3, 5)
    x = p.input.clone().requires_grad_()
    loss = fxfuse.linear_cross_entropy(x, p.weight, p.target)
    with pytest.raises(fxfuse.FxfuseError) as raised:
        torch.autograd.grad(loss, x, create_graph=True)
    line, text = parts(raised)
    assert "create_graph=True" in line
    assert "has no second derivative" in text and 'options={"fxfuse.enabled": False}' in text


@triggers("no_forward_mode")
def test_a_forward_mode_derivative_of_what_is_compiled() -> None:
    s = World.make()
    x = s.x.detach()
    f = compiled(lambda x: ce(x @ s.w.detach().T, s.y))
    f(x)
    with forward_ad.dual_level(), pytest.raises(fxfuse.FxfuseError) as raised:
        f(forward_ad.make_dual(x, x))
    line, text = parts(raised)
    assert "f = compiled(" in line, "the function that was compiled runs, of which no lines are known any more"
    assert "has no forward-mode derivative" in text and "Compile inside of the dual_level" in text


# --- deferred logits ------------------------------------------------------------------------------------------


@triggers("not_traceable")
def test_deferred_logits_in_another_compiled_function() -> None:
    z = deferred(World.make())
    with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
        torch.compile(lambda z: z.sin(), backend="eager", fullgraph=True)(z)
    text = str(raised.value)
    assert "break the graph of another compiled function" in text
    assert "without fullgraph, or compute the loss inside of the first function" in text and DEFER_LOGITS in text
    assert f'File "{__file__}", line' in text, "Dynamo says where"


@triggers("STEP_NOT_TRACEABLE")
def test_a_step_of_an_optimizer_in_one_graph_while_logits_wait() -> None:
    s = World.make()
    z = deferred(s)
    s.w.grad = torch.ones_like(s.w)
    optimizer = torch.optim.SGD([s.w], lr=0.1)
    with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
        torch.compile(optimizer.step, backend="eager", fullgraph=True)()
    text = " ".join(str(raised.value).split())
    assert "copies the weight here" in text and "without fullgraph" in text and DEFER_LOGITS in text
    del z


@triggers("read_in_capture")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")
def test_logits_that_a_cuda_graph_reads_first() -> None:
    z = deferred(World.make(torch.float32, "cuda")).detach()
    torch.cuda.synchronize()
    with pytest.raises(errors.StaleLogitsError) as raised, torch.cuda.graph(torch.cuda.CUDAGraph()):
        z.sum()
    line, text = parts(raised)
    assert "z.sum()" in line
    assert re.search(f"{PROJECTION} are read for the first time while a CUDA graph is captured", text)
    assert "`logits.data_ptr()`" in text and DEFER_LOGITS in text


@triggers("stale_logits", "StaleLogitsError")
def test_logits_that_are_read_too_late() -> None:
    s = World.make()
    z = deferred(s)
    s.w.data.zero_()
    with pytest.raises(errors.StaleLogitsError) as raised:
        z.sum()
    line, text = parts(raised)
    assert "z.sum()" in line
    assert re.search(f"{PROJECTION} were not computed.*the weight .* changed behind autograd's back", text)
    assert "`logits.data_ptr()`" in text and DEFER_LOGITS in text


@pytest.mark.parametrize("grad", [True, False])
def test_logits_that_are_had_computed_in_time(grad: bool) -> None:
    """As the error advises."""
    s = World.make()
    with torch.set_grad_enabled(grad):
        z = deferred(s)
        z.data_ptr()
        s.w.data.zero_()
        torch.testing.assert_close(z.sin(), World.make().z.sin())


def test_the_logits_of_a_compiled_projection_are_from_where_it_is_called() -> None:
    head = torch.nn.Linear(4, 33)
    z = compiled(head)(torch.randn(6, 4))
    F.cross_entropy(z, torch.zeros(6, dtype=torch.int64))
    with pytest.raises(errors.FxfuseError, match=rf"the logits of the projection at {re.escape(__file__)}:\d+, but"):
        z.retain_grad()


@triggers("gradient_went_past")
@pytest.mark.parametrize(
    "late",
    [
        lambda z, loss: z.register_hook(print),
        lambda z, loss: z.retain_grad(),
        lambda z, loss: torch.autograd.grad(loss, z),
        lambda z, loss: loss.backward(inputs=[z]),
    ],
    ids=["register_hook", "retain_grad", "grad", "backward"],
)
def test_a_gradient_that_is_asked_for_too_late(late: Callable[..., Any], request: pytest.FixtureRequest) -> None:
    s = World.make()
    z = deferred(s)
    loss = ce(z, s.y)
    with pytest.raises(fxfuse.FxfuseError) as raised:
        late(z, loss)
    line, text = parts(raised)
    name = request.node.callspec.id
    assert name in line and text.startswith(f"{name} wants the gradient of the logits of the projection at ")
    assert re.search(f"{PROJECTION}, but.*`register_hook` or `retain_grad` .* before the loss", text)
    assert DEFER_LOGITS in text


@triggers("put_in_place_of")
def test_one_function_in_the_place_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    z, argmax = deferred(World.make()), torch._C.TensorBase.argmax

    def ours(z: torch.Tensor) -> torch.Tensor:
        return argmax(z)

    monkeypatch.setattr(torch.Tensor, "argmax", ours)
    monkeypatch.setattr(torch.Tensor, "argmin", ours)
    with pytest.raises(fxfuse.FxfuseError) as raised:
        z.argmax()
    line, text = parts(raised)
    assert "argmax(z)" in line
    assert re.match(r"argmax and argmin are one function of the program's, <function .*ours", text)
    assert "Put a function of its own in the place of each" in text and DEFER_LOGITS in text


@triggers("deferred_cannot")
@pytest.mark.parametrize(
    "change",
    [
        lambda z: z.unsqueeze_(0),
        lambda z: z.resize_(3),
        lambda z: setattr(z, "data", torch.ones(3)),
        lambda z: torch.ones(3, dtype=z.dtype).set_(z),
    ],
    ids=["unsqueeze_", "resize_", "data", "set_"],
)
def test_a_change_of_shape_or_memory(change: Callable[..., Any], request: pytest.FixtureRequest) -> None:
    z = deferred(World.make()).detach()
    with pytest.raises(fxfuse.FxfuseError) as raised:
        change(z)
    line, text = parts(raised)
    name = request.node.callspec.id
    assert name in line and name in text.partition(" would change")[0]
    assert re.search(f"{PROJECTION}, .*Use the function that returns a new tensor", text) and DEFER_LOGITS in text


# --- compilation ----------------------------------------------------------------------------------------------


@triggers("kept_dense")
def test_a_head_that_is_kept_under_strict() -> None:
    def program(s: World) -> Any:
        z = s.z
        return z.sort(-1).values

    with pytest.raises(fxfuse.FxfuseError) as raised:
        compiled(program, strict=True)(World.make())
    text = str(raised.value)
    assert re.match(r"\S+programs\.py:\d+: the logits are kept, because sort reads the logits", text)
    (line,) = re.findall(rf"\(at {re.escape(__file__)}:(\d+)\)", text)
    assert "z.sort(-1)" in linecache.getline(__file__, int(line))
    assert ". Remedy: read them only through cross_entropy" in text
    assert "Without fxfuse.strict the program runs as it is." in text


@triggers("analysis_failed", "FxfuseWarning")
def test_a_fault_of_fxfuse(monkeypatch: pytest.MonkeyPatch) -> None:
    @functools.wraps(graph.compute)
    def broken(*args: Any) -> Any:
        raise LookupError("of what is not there")

    monkeypatch.setattr(graph, "compute", broken)
    s = World.make()
    with pytest.warns(fxfuse.FxfuseWarning) as warned:
        found = compiled(lambda s: ce(s.z, s.y))(s)
    torch.testing.assert_close(found, ce(s.z, s.y))
    (text,) = (str(w.message) for w in warned if w.category is fxfuse.FxfuseWarning)
    assert re.match(r"\S+programs\.py:\d+: fxfuse could not analyse this graph", text)
    assert "(LookupError: of what is not there)" in text and "please report this" in text
    assert 'options={"fxfuse.enabled": False}' in text


@triggers("arguments_share_memory")
def test_arguments_that_come_to_share_memory() -> None:
    def program(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        z = (x @ w.T).logsumexp(-1)
        v.zero_()
        return z

    x, w = torch.randn(3, 4), torch.randn(17, 4)
    ours = compiled(program)
    ours(x, w, torch.randn(17))
    with pytest.warns(fxfuse.FxfuseWarning) as warned:
        ours(x, w, w.view(-1)[:17])
    (text,) = (str(w.message) for w in warned if w.category is fxfuse.FxfuseWarning)
    assert re.match(r"\S+test_errors\.py:\d+: arguments of this compiled function share memory in this call", text)
    assert "pass copies (tensor.clone())" in text


@triggers("not_told")
def test_a_fault_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise LookupError("of what is not there")

    monkeypatch.setattr("fxfuse.report.site.uses_of", fail)
    s = World.make()
    with pytest.warns(
        fxfuse.FxfuseWarning, match=r"could not tell its report .* \(LookupError: of what is not there\)"
    ):
        found = compiled(lambda s: ce(s.z, s.y))(s)
    torch.testing.assert_close(found, ce(s.z, s.y))
    assert fxfuse.sites()[-1].status == "fused"


@triggers("watching_failed")
def test_a_fault_of_what_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def analysed(self, *args: Any) -> None:
            raise LookupError("of what is not there")

    monkeypatch.setattr(journal, "watchers", [Broken])
    s = World.make()
    with pytest.warns(fxfuse.FxfuseWarning, match=r"take a head apart .* \(LookupError: of what is not there\)"):
        found = compiled(lambda s: ce(s.z, s.y))(s)
    torch.testing.assert_close(found, ce(s.z, s.y))
    assert fxfuse.sites()[-1].status == "fused"
