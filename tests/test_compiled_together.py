"""``fxfuse.kernels.launcher.compiled_together``: a first call's kernels are compiled before the first is launched."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from fxfuse.kernels import launcher, tiles  # noqa: E402
from fxfuse.kernels.hopper import stats  # noqa: E402
from fxfuse.ops import cuda, hopper  # noqa: E402


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


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(launcher, "JITFunction", Kernel)
    monkeypatch.setattr(launcher, "AsyncCompileMode", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(launcher, "_compiled", {})
    monkeypatch.setattr(launcher, "driver", mock.MagicMock())
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
            mode = active_mode.get()
            assert mode is not None
            mode.submit("key", lambda: 1 / 0, lambda _: None)

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
    from triton.runtime._async_compile import active_mode

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
            mode = active_mode.get()
            assert mode is not None
            mode.submit("key", Compiled, lambda kernel: diary.append(f"have {type(kernel).__name__}"))

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
    call = cuda.GpuOperands.of(x, w, None, index, None, 1.0, "").call()
    linear_stats = hopper.linear_stats.__wrapped__  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as threads, launcher.AsyncCompileMode(threads):
        launcher._in_mode("rehearse", linear_stats, call, False, False, False, False)
    from fxfuse.kernels.hopper import pingpong

    for kernel in (stats.merge_kernel, pingpong.stats_kernel):
        (compiled,) = kernel.device_caches[0][0].values()
        assert compiled.asm["cubin"][:4] == b"\x7fELF"
