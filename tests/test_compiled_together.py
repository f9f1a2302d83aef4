"""``fxfuse.kernels.launcher.compiled_together``: a first call's kernels are compiled before the first is launched."""

from __future__ import annotations

import collections
import contextlib
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from fxfuse import backend, ops
from fxfuse.rehearsal import Rehearsals

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from fxfuse.kernels import launcher, recorder, tiles  # noqa: E402
from fxfuse.kernels.hopper import stats  # noqa: E402
from fxfuse.ops import gpu, hopper  # noqa: E402


class Kernel:
    """What ``launch`` asks of one, and a diary."""

    arg_names = ("x",)
    function = packed_metadata = None

    def __init__(self, name: str, diary: list[str]) -> None:
        self.name, self.diary = name, diary

    def warmup(self, *_: Any, grid: Any, **constants: Any) -> None:
        self.diary.append(f"compile {self.name}" + "".join(f" {name}={value}" for name, value in constants.items()))

    def __getitem__(self, grid: Any) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Kernel:
        self.diary.append(f"launch {self.name}")
        return self

    run = __call__


def submit(compile: Any, finalize: Any) -> Any:
    """What a kernel asks of Triton's mode; Triton 3.9 wants to be told how to clean up, too."""
    from triton.runtime._async_compile import active_mode

    mode = active_mode.get()
    assert mode is not None
    more = len(inspect.signature(mode.submit).parameters) - 3
    return mode.submit(object(), compile, finalize, *[lambda *_: None] * more)


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(launcher, "JITFunction", Kernel)
    monkeypatch.setattr(launcher, "AsyncCompileMode", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(launcher, "_compiled", {})
    monkeypatch.setattr(launcher, "driver", mock.MagicMock())
    monkeypatch.setattr(launcher, "prepare", lambda *_: None)  # CUDA's driver, where there is one, would know none
    return []


def test_all_are_compiled_before_any_is_launched(diary: list[str]) -> None:
    a, b = Kernel("a", diary), Kernel("b", diary)

    @launcher.compiled_together
    def op(x: int, also: bool) -> int:
        launcher.launch("signature", a, (1,), x)
        if also:
            launcher.launch("signature", b, (1,), x)
        return x + 1

    assert op(1, also=False) == 2
    assert diary == ["compile a", "launch a"]
    diary.clear()
    assert op(2, also=True) == 3
    # Again from the start, with what is new alone compiled.
    assert diary == ["launch a", "compile b", "launch a", "launch b"]
    diary.clear()
    op(3, also=True)
    assert diary == ["launch a", "launch b"]


def test_constants_make_another_kernel(diary: list[str]) -> None:
    a = Kernel("a", diary)
    a.arg_names = ("x", "PARTS")

    @launcher.compiled_together
    def op(parts: int) -> None:
        launcher.launch("signature", a, (1,), 0, PARTS=parts)

    for parts in (1, 2, 1):
        op(parts)
    assert diary == ["compile a PARTS=1", "launch a", "compile a PARTS=2", "launch a", "launch a"]
    assert [compiled.constants for compiled in launcher._compiled.values()] == [(1,), (2,)]


def test_an_op_in_an_op_is_rehearsed_with_it(diary: list[str]) -> None:
    a, b = Kernel("a", diary), Kernel("b", diary)
    inner = launcher.compiled_together(lambda: launcher.launch(0, b, (1,), 0))

    @launcher.compiled_together
    def op() -> None:
        launcher.launch(0, a, (1,), 0)
        inner()

    op()
    assert diary == ["compile a", "compile b", "launch a", "launch b"]


def test_an_error_leaves_nothing_behind(diary: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    a = Kernel("a", diary)
    op = launcher.compiled_together(lambda: launcher.launch(0, a, (1,), 0))
    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "warmup", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            op()
    op()
    assert diary == ["compile a", "launch a"]


@pytest.mark.skipif(launcher.AsyncCompileMode is None, reason="this Triton compiles one after the other")
def test_a_kernel_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says so once more where it is launched, and leaves Triton as it was."""
    from triton.runtime._async_compile import active_mode

    class Broken(Kernel):
        def warmup(self, *_: Any, grid: Any) -> None:
            submit(lambda: 1 / 0, lambda _: None)

        def __call__(self, *_: Any) -> Kernel:
            raise SyntaxError(self.name)

    monkeypatch.setattr(launcher, "JITFunction", Kernel)
    op = launcher.compiled_together(lambda: launcher.launch(0, Broken("a", []), (1,), 0))
    for _ in range(2):
        with pytest.raises(SyntaxError):
            op()
        assert active_mode.get() is None


@pytest.mark.skipif(launcher.AsyncCompileMode is None, reason="this Triton compiles one after the other")
@pytest.mark.parametrize("loads", [True, False])
def test_kernels_are_loaded_in_threads_too(monkeypatch: pytest.MonkeyPatch, loads: bool) -> None:
    """And what cannot be loaded says so where it is launched, not before."""
    diary: list[str] = []

    class Compiled:
        @property
        def run(self) -> None:
            assert threading.current_thread() is not threading.main_thread()
            diary.append("load")
            if not loads:
                raise MemoryError

    class Threaded(Kernel):
        def warmup(self, *_: Any, grid: Any) -> None:
            submit(Compiled, lambda kernel: diary.append(f"have {type(kernel).__name__}"))

    monkeypatch.setattr(launcher, "JITFunction", Kernel)
    monkeypatch.setattr(launcher, "_compiled", {})
    monkeypatch.setattr(launcher, "driver", mock.MagicMock())
    launcher.compiled_together(lambda: launcher.launch(0, Threaded("a", diary), (1,), 0))()
    assert diary == ["load", *(["have Compiled"] if loads else []), "launch a"]


class Driver:
    """Of an H200 that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = tiles.Machine("hopper", 132, takes_turns=True)
    monkeypatch.setattr(tiles, "machine", lambda device: machine)
    monkeypatch.setattr(driver, "_active", Driver())


@pytest.mark.slow
@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="kernels are interpreted")
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton has another driver here")
@pytest.mark.skipif(launcher.AsyncCompileMode is None, reason="this Triton compiles one after the other")
def test_triton_compiles_what_an_op_launches(an_h200: None) -> None:
    x, w, index = torch.empty(256, 64).bfloat16(), torch.empty(512, 64).bfloat16(), torch.zeros(256, 1).long()
    call = gpu.GpuOperands.of(x, w, None, index, None, 1.0, "").call()
    # One thread: in several, CPython 3.11.7's ast.parse may fail (gh-106905), after which ops compile again.
    with ThreadPoolExecutor(1) as threads, launcher.AsyncCompileMode(threads):
        launcher._in_mode("rehearse", hopper.linear_stats, call, False, False, False, False, False)
    from fxfuse.kernels.hopper import pingpong

    for kernel in (stats.merge_kernel, pingpong.stats_kernel):
        (compiled,) = kernel.device_caches[0][0].values()
        assert compiled.asm["cubin"][:4] == b"\x7fELF"


# --- before there is a call -----------------------------------------------------------------------------------

CUDA = torch.device("cuda", 0)


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rehearsal asks of the device it is for."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())


def test_a_rehearsal_launches_nothing(diary: list[str], no_device: None) -> None:
    a, b = Kernel("a", diary), Kernel("b", diary)
    meant = []

    def op(kernel: Kernel) -> None:
        meant.append(tiles.meant.get())
        launcher.launch(0, kernel, (1,), 0)

    def broken() -> None:
        raise ValueError

    launcher.rehearse(CUDA, [lambda: op(a), broken, lambda: op(b)])(False)
    assert diary == ["compile a", "compile b"] and not launcher._compiled
    assert meant == [CUDA, CUDA] and tiles.meant.get() is None and launcher._mode.get() == ""


@pytest.mark.skipif(launcher.AsyncCompileMode is None, reason="this Triton compiles one after the other")
def test_a_rehearsal_goes_on_until_it_is_waited_for(monkeypatch: pytest.MonkeyPatch, no_device: None) -> None:
    """And what comes meanwhile is not in Triton's mode."""
    from triton.runtime._async_compile import active_mode

    may_end, diary = threading.Event(), []

    class Slow(Kernel):
        def warmup(self, *_: Any, grid: Any) -> None:
            submit(lambda: mock.Mock(wait=may_end.wait(60)), lambda _: diary.append("compiled"))

    monkeypatch.setattr(launcher, "JITFunction", Kernel)
    monkeypatch.setattr(launcher, "_compiled", {})
    wait = launcher.rehearse(CUDA, [lambda: launcher.launch(0, Slow("a", []), (1,), 0)])
    assert active_mode.get() is None and not diary
    may_end.set()
    wait(False)
    assert diary == ["compiled"] and active_mode.get() is None


@pytest.mark.skipif(launcher.AsyncCompileMode is None, reason="this Triton compiles one after the other")
def test_what_has_not_begun_need_not_be_waited_for(monkeypatch: pytest.MonkeyPatch, no_device: None) -> None:
    may_end, diary = threading.Event(), []

    class Slow(Kernel):
        def warmup(self, *_: Any, grid: Any) -> None:
            submit(lambda: diary.append(may_end.wait(60)) or mock.Mock(), lambda _: None)

    monkeypatch.setattr(launcher, "_compiled", {})
    monkeypatch.setattr(launcher, "MOST_THREADS", 1)
    wait = launcher.rehearse(CUDA, [lambda: launcher.launch(0, Slow("a", []), (1,), 0)] * 3)
    threading.Timer(0.2, may_end.set).start()
    wait(True)
    assert diary == [True]


@pytest.mark.skipif(launcher.AsyncCompileMode is None, reason="this Triton compiles one after the other")
def test_what_fails_is_asked_for_anew(monkeypatch: pytest.MonkeyPatch, no_device: None) -> None:
    """Triton before 3.9 keeps it, and raises its error whenever it is asked for again."""

    class Failing(Kernel):
        def __init__(self) -> None:
            self.device_caches: dict[int, Any] = {0: ({}, "and more")}

        def warmup(self, *_: Any, grid: Any) -> None:
            cache = self.device_caches[0][0]
            cache["works"] = submit(mock.Mock, lambda compiled: cache.update(works=compiled))
            cache["fails"] = submit(lambda: 1 / 0, lambda _: None)

    monkeypatch.setattr(launcher, "_compiled", {})
    kernel = Failing()
    launcher.rehearse(CUDA, [lambda: launcher.launch(0, kernel, (1,), 0)])(False)
    assert [*kernel.device_caches[0][0]] == ["works"]


@pytest.mark.parametrize("mode", ["ask", "rehearse", "listen"])
def test_what_a_finaliser_calls_meanwhile_is_done(diary: list[str], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_tapes", {})
    monkeypatch.setattr(tiles, "dot_precision", lambda _: "")
    a, b = Kernel("a", diary), Kernel("b", diary)

    @recorder.replayed
    @launcher.compiled_together
    def theirs(x: Tensor) -> Tensor:
        launcher.launch(0, b, (1,), x)
        return x

    def ours() -> None:
        theirs(torch.ones(1))
        launcher.launch(0, a, (1,), 0)

    if mode == "listen":
        listener = mock.Mock()
        with launcher.listening(listener):
            theirs(torch.ones(1))
        assert not listener.mock_calls
    elif mode == "ask":
        launcher.compiled_together(ours)()
        assert diary[-2:] == ["launch b", "launch a"]
    else:
        launcher._in_mode("rehearse", ours)
        assert diary[-1] == "compile a"
    assert diary[:2] == ["compile b", "launch b"]


def test_a_rehearsal_that_fails_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise MemoryError

    graph = losses(torch.bfloat16)
    monkeypatch.setattr(gpu, "has_triton", lambda _: True)
    for rehearse in (refuse, lambda *_: refuse):  # at once, or once it is waited for
        monkeypatch.setattr(launcher, "rehearse", rehearse)
        with Rehearsals() as rehearsals:
            rehearsals.begin(graph)


def graph_on(device: torch.device, function: Any, *args: Tensor, mode: str = "fake") -> torch.fx.Graph:
    """Of tensors that are on ``device``, which need not be there."""
    graph = make_fx(function, tracing_mode=mode)(*args).graph
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            shape, stride = value.shape, value.stride()
            with value.fake_mode:
                alike = torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
            node.meta["val"] = FakeTensor(value.fake_mode, alike, device)
    return graph


def losses(dtype: torch.dtype, rows: int = 256, hidden: int = 512, vocab: int = 1000) -> torch.fx.Graph:
    """A loss that keeps exponentials, one that does not, and gradients of a statistic, of tensors on a GPU."""

    def function(x: Tensor, w: Tensor, y: Tensor, c: Tensor, g: Tensor) -> list[Tensor]:
        index = ops.check_index(y, vocab, -100)[:, None]
        head = x, w, None, index, None
        needs = True, True, False
        loss, *kept = ops.linear_loss_exponentials(*head, 1.0, c, None)
        grads = ops.linear_loss_exponentials_backward(*head, 1.0, None, g, *kept, *needs)
        other, d_input, *_ = ops.linear_loss(*head, 2.0, c, None, *needs)
        lse, _, _, _, _, residual, *_ = ops.linear_stats(*head, 1.0, False, True)
        of_rows = ops.linear_stats_backward(*head, 1.0, lse, residual, lse, c, None, *needs)
        return [loss, *grads, other, ops.scaled(d_input, g), *of_rows]

    x, w = (torch.empty(n, hidden, dtype=dtype) for n in (rows, vocab))
    y, c, g = torch.zeros(rows, dtype=torch.int64), torch.empty(rows, 1), torch.empty(())
    return graph_on(CUDA, function, x, w, y, c, g)


def looks(arg: Any) -> Any:
    """What Triton compiles a kernel for."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, int):
        return arg == 1, arg % 16 == 0, arg < 2**31
    return (type(arg), looks(arg.base), *map(str, arg.block_shape)) if hasattr(arg, "base") else arg


@pytest.fixture
def asked(an_h200: None, monkeypatch: pytest.MonkeyPatch, no_device: None) -> Iterator[list[Any]]:
    """What is asked for in rehearsals of an H200, of which nothing is compiled, and nothing launched."""
    found: list[Any] = []

    def warmup(kernel: Any, *args: Any, grid: Any, **constants: Any) -> None:
        found.append((kernel.__name__, *map(looks, args), constants))

    launched: list[Any] = []
    monkeypatch.setattr(triton.runtime.JITFunction, "warmup", warmup)
    monkeypatch.setattr(triton.runtime.JITFunction, "run", lambda kernel, *_, **__: launched.append(kernel.__name__))
    monkeypatch.setattr(launcher, "AsyncCompileMode", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(gpu, "has_triton", lambda _: True)
    yield found
    assert not launched


@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="kernels are interpreted")
def test_tensors_without_memory_ask_for_the_kernels_that_others_ask_for(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rehearsals() as rehearsals:
        rehearsals.begin(losses(torch.bfloat16))
    of_graph = list(asked)
    asked.clear()

    def with_memory(node: torch.fx.Node) -> Tensor:
        value = node.meta["val"]
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)

    # Which are not of somebody else here.
    monkeypatch.setattr(
        launcher, "undisturbed", lambda replayed, *args, **options: replayed.__wrapped__(*args, **options)
    )
    for node in reversed(losses(torch.bfloat16).nodes):
        if node.target in ops.can_be_rehearsed:
            args, kwargs = map_arg((node.args, node.kwargs), with_memory)
            launcher._in_mode("rehearse", ops.can_be_rehearsed[node.target], *args, **kwargs)

    def known(kernels: list[Any]) -> list[Any]:
        """Launches overlap on GPUs alone."""
        overlaps = {"PDL", "launch_pdl"}
        return [(*rest, {k: v for k, v in last.items() if k not in overlaps}) for *rest, last in kernels]

    assert known(of_graph) == known(asked)
    names = {name for name, *_ in of_graph}
    assert {"clean_kernel", "scale_kernel", "d_weight_kernel", "finish_kernel", "dlogits_kernel"} <= names


@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="kernels are interpreted")
@pytest.mark.parametrize("dtype, hidden", [(torch.float32, 512), (torch.bfloat16, 100)])
def test_what_goes_the_general_way_is_not_rehearsed(asked: list[Any], dtype: torch.dtype, hidden: int) -> None:
    """Which launches kernels in other ways: of memory that is not there."""
    with Rehearsals() as rehearsals:
        rehearsals.begin(losses(dtype, hidden=hidden))
    assert {name for name, *_ in asked} == {"clean_kernel", "scale_kernel"}


def test_only_ops_on_a_gpu_whose_sizes_are_known_are_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []

    def stopped(stop: bool) -> None:
        assert not stop
        begun.clear()

    monkeypatch.setattr(launcher, "rehearse", lambda device, calls: begun.append((device, len(calls))) or stopped)
    monkeypatch.setattr(gpu, "has_triton", lambda _: True)

    def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return ops.linear_stats(x, w, None, y, None, 1.0, False, False)[0]

    x, w, y = torch.empty(256, 512), torch.empty(1000, 512), torch.zeros(256, 1, dtype=torch.int64)
    graph = graph_on(CUDA, loss, x, w, y)
    with Rehearsals() as rehearsals:
        rehearsals.begin(graph_on(torch.device("cpu"), loss, x, w, y))
        rehearsals.begin(graph_on(CUDA, loss, x, w, y, mode="symbolic"))
        assert not begun
        rehearsals.begin(graph)
        assert begun == [(CUDA, 1)]
    assert not begun  # it was waited for
    monkeypatch.setattr(gpu, "has_triton", lambda _: False)
    with Rehearsals() as rehearsals:
        rehearsals.begin(graph)
    assert not begun


@pytest.mark.slow
@inductor_config.patch(force_disable_caches=True)
def test_forward_and_backward_are_rehearsed_before_inductor_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    diary: list[str] = []

    class Watched(Rehearsals):
        def begin(self, graph: torch.fx.Graph) -> None:
            diary.extend(node.target.name() for node in graph.nodes if node.target in ops.can_be_rehearsed)
            super().begin(graph)

        def __exit__(self, *details: Any) -> Any:
            diary.append("done")
            return super().__exit__(*details)

    monkeypatch.setattr(backend, "Rehearsals", Watched)
    x, w = torch.randn(64, 16, requires_grad=True), torch.randn(500, 16)
    for recompute in (True, False):
        options = {"fxfuse.min_logits_bytes": 0, "fxfuse.recompute": recompute}
        torch._dynamo.reset()
        loss = torch.compile(lambda: F.linear(x, w).logsumexp(-1).sum(), backend="fxfuse", options=options)
        loss().backward()
        assert diary == ["fxfuse::linear_stats", "fxfuse::linear_stats_backward", "done"]
        diary.clear()
    with torch.no_grad():
        loss()
    assert diary == ["fxfuse::linear_stats", "done"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(launcher.AsyncCompileMode is None, reason="this Triton compiles one after the other")
@pytest.mark.parametrize("rows", [256, 1024])
@inductor_config.patch(force_disable_caches=True)
def test_all_kernels_are_there_once_a_model_is_compiled(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Of losses that keep exponentials for the backward, and of those that do not."""
    if not tiles.machine(CUDA).takes_turns:
        pytest.skip("needs Hopper")
    compiled: list[str] = []
    before: list[str] = []
    for module in [module for name, module in sys.modules.items() if name.startswith("fxfuse.kernels.")]:
        for kernel in vars(module).values():
            if isinstance(kernel, triton.runtime.JITFunction):  # which other tests may have compiled
                monkeypatch.setattr(kernel, "device_caches", collections.defaultdict(kernel.create_binder))
    monkeypatch.setattr(launcher, "_compiled", {})

    def listener(*, src: Any, **_: Any) -> None:
        compiled.append(src.fn.__name__)

    class Watched(Rehearsals):
        def __exit__(self, *details: Any) -> Any:
            super().__exit__(*details)
            before.extend(compiled)
            compiled.clear()

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    monkeypatch.setattr(backend, "Rehearsals", Watched)
    torch._dynamo.reset()
    x = torch.randn(rows, 528, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(2003 + rows, 528, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = torch.randint(2003, (rows,), device="cuda")
    options = {"fxfuse.min_logits_bytes": 0}
    loss = torch.compile(lambda: F.cross_entropy(F.linear(x, w).float(), y), backend="fxfuse", options=options)()
    loss.backward()
    assert [name for name in compiled if not name.startswith("triton_")] == []
    assert {"finish_kernel", "exponentials_kernel", "d_weight_kernel", "merge_kernel"} <= {*before}
