"""``fxfuse.kernels.prepared``: what CUDA's driver is given; a kernel and a driver stand in for theirs.

That compiled kernels have the parameters that are expected of them is in test_kernels_compile, that they launch so in
test_kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import problem, value_and_grads
from torch import Tensor

pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor

import fxfuse
from fxfuse.kernels import launcher, prepared, recorder, tape

STREAM = 1234
# Of a float32 descriptor, as Triton has it.
MAP = {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [2, 4], "fp4_padded": False}
SIGNATURE = {
    "source": "tensordesc<fp32[2, 4]>",
    "nothing": "constexpr",
    "target": "*fp32",
    "count": "i32",
    "factor": "fp32",
    "BLOCK": "constexpr",
}
# The descriptor with its shape and strides, the rest, and Triton's scratch memory.
SIZES = [128, 4, 4, 8, 8, 8, 4, 4, 8, 8]


class Driver:
    """Launches ``target[:count] = factor * source`` on the host's memory."""

    def __init__(self) -> None:
        self.sizes = list(SIZES)
        self.codes: list[int] = []  # of the next calls, if not 0
        self.launches: list[prepared._Config] = []
        self.within: Callable[[], None] = lambda: None
        self.encoded: list[Any] = []

    def cuFuncGetParamInfo(self, function: int, at: int, offset: Any, size: Any) -> int:
        assert function == 77
        if at >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[at]
        return 0

    def cuTensorMapEncodeTiled(self, map: Any, *how: Any) -> int:
        kind, rank, _, shape, strides, box, steps, *rest = how
        assert ctypes.addressof(map) % 64 == 0
        self.encoded.append((kind, rank, list(shape), list(strides)[: rank - 1], list(box), list(steps), *rest))
        return 0

    def cuTensorMapReplaceAddress(self, map: Any, address: int) -> int:
        if self.codes and (code := self.codes.pop(0)):
            return code
        ctypes.c_uint64.from_address(map.value).value = address
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        if self.codes and (code := self.codes.pop(0)):
            return code
        self.within()
        kept = prepared._Config.from_buffer_copy(ctypes.string_at(config.value, ctypes.sizeof(prepared._Config)))
        self.launches.append(kept)
        at = (ctypes.c_void_p * len(SIZES)).from_address(parameters.value)
        types = [ctypes.c_uint64, *[ctypes.c_int32] * 2, *[ctypes.c_int64] * 2, ctypes.c_uint64, ctypes.c_int32]
        types += [ctypes.c_float, *[ctypes.c_uint64] * 2]
        values = [type.from_address(address).value for type, address in zip(types, at, strict=True)]
        source, rows, columns, row, column, target, count, factor, *scratch = values
        assert (rows, columns, row, column) == (3, 4, 4, 1) and scratch == [0, 0] and function.value == 77
        multiply(source, target, count, factor)
        return 0


def multiply(source: int, target: int, count: int, factor: float) -> None:
    numbers = [(ctypes.c_float * count).from_address(address) for address in (source, target)]
    numbers[1][:] = [factor * number for number in numbers[0]]


class Kernel:
    """The same kernel to Triton, which counts its launches."""

    def __init__(self, **metadata: Any) -> None:
        usual = {"num_ctas": 1, "launch_cooperative_grid": False, "global_scratch_size": 0, "profile_scratch_size": 0}
        usual |= {"num_warps": 4, "shared": 48, "launch_pdl": True, "tensordesc_meta": [MAP]}
        self.signature = dict(SIGNATURE)
        source = SimpleNamespace(signature=self.signature)
        compiled = SimpleNamespace(metadata=SimpleNamespace(**usual | metadata), src=source, function=77)
        self.launches = 0
        self.compiled = launcher._Compiled(compiled, self.run, 77, None, ("a constant",))

    def run(self, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
        self.launches += 1
        *_, source, nothing, target, count, factor, constant = args
        assert stream == STREAM and nothing is None and constant == "a constant"
        multiply(source.base.data_ptr(), target, count, factor)

    def __call__(self, source: Tensor, target: Tensor, count: int, factor: float) -> None:
        described = TensorDescriptor(source, list(source.shape), list(source.stride()), [2, 4])
        args = described, None, target, count, factor
        with launcher.compat.disable_dispatch_modes():
            multiply(source.data_ptr(), target.data_ptr(), count, factor)
        if (listener := launcher._listener.get()) is not None:
            listener.launched(self.compiled, (5, 2), args)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    for module in (prepared, tape):
        monkeypatch.setattr(module, "library", lambda: made)
    monkeypatch.setattr(tape, "_stream", lambda: STREAM)
    monkeypatch.setattr(recorder, "_tapes", {})
    yield made


def an_op(kernel: Kernel) -> Callable[[Tensor], Tensor]:
    def op(x: Tensor) -> Tensor:
        between, out = torch.empty(3, 4), torch.zeros(20)
        kernel(x, between, 12, 3.0)
        kernel(between, out[2:], 10, 0.5)
        return out

    return recorder.replayed(op)


def wanted(x: Tensor) -> Tensor:
    out = torch.zeros(20)
    out[2:12] = 1.5 * x.view(-1)[:10]
    return out


def check(played: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 4)
    assert torch.equal(played(x), wanted(x))


def on_tape(kernel: Kernel) -> Callable[[Tensor], Tensor]:
    played = an_op(kernel)
    for _ in range(2):
        check(played)
    assert any(isinstance(made, tape.Tape) for made in recorder._tapes.values())
    return played


def test_the_driver_launches_what_is_played(driver: Driver) -> None:
    kernel = Kernel()
    played = on_tape(kernel)
    for _ in range(3):
        check(played)
    assert kernel.launches == 0 and len(driver.launches) == 6
    for config in driver.launches:
        assert [getattr(config, f"grid_{axis}") for axis in "xyz"] == [5, 2, 1]
        assert [getattr(config, f"block_{axis}") for axis in "xyz"] == [128, 1, 1]
        assert (config.shared, config.stream, config.attribute_count) == (48, STREAM, 1)
    # What changes fastest comes first, in bytes but for the last: float32, rank 2, 128-byte swizzle, zeros outside.
    assert driver.encoded == [(7, 2, [4, 3], [16], [4, 2], [1, 1], 0, 3, 2, 0)] * 2


def test_without_dependent_launches(driver: Driver) -> None:
    check(on_tape(Kernel(launch_pdl=False)))
    assert [config.attribute_count for config in driver.launches] == [0, 0]


@pytest.mark.parametrize("codes", [[1], [0, 1], [0, 0, 1], [1, 700]], ids=str)
def test_triton_launches_what_the_driver_does_not(driver: Driver, codes: list[int]) -> None:
    kernel = Kernel()
    played = on_tape(kernel)
    driver.codes = list(codes)
    check(played)
    assert kernel.launches == sum(code != 0 for code in codes) and not driver.codes
    check(played)
    assert kernel.launches == sum(code != 0 for code in codes)


def test_triton_launches_within_another_call(driver: Driver) -> None:
    """As a finaliser may, or another thread, while the driver launches: the arguments are those of the outer call."""
    kernel = Kernel()
    played = on_tape(kernel)
    depth = []

    def within() -> None:
        if not depth:
            depth.append(1)
            check(played)

    driver.within = within
    check(played)
    assert depth and kernel.launches == 2 and len(driver.launches) == 2
    check(played)
    assert kernel.launches == 2


def test_an_error_does_not_keep_others_from_the_driver(driver: Driver) -> None:
    kernel = Kernel()
    played = on_tape(kernel)

    def fail() -> None:
        raise ValueError("from within")

    driver.within = fail
    with pytest.raises(ValueError, match="from within"):
        played(torch.randn(3, 4))
    driver.within = lambda: None
    check(played)
    assert kernel.launches == 0


def test_triton_launches_while_somebody_is_told(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler has asked Triton, so there is no stream for us, and the kernel finds it."""
    kernel = Kernel()
    launched = []
    monkeypatch.setattr(tape, "_stream", lambda: None)
    monkeypatch.setattr(launcher._Compiled, "launch", lambda self, grid, args, on: launched.append((grid, on)))
    played = an_op(kernel)
    for _ in range(3):
        played(torch.randn(3, 4))
    assert launched == [((5, 2), None)] * 2 and not driver.launches


@pytest.mark.parametrize(
    "unknown",
    [
        {"num_ctas": 2},
        {"launch_cooperative_grid": True},
        {"global_scratch_size": 64},
        {"profile_scratch_size": 64},
        {"tensordesc_meta": []},
        {"tensordesc_meta": [MAP | {"fp4_padded": True}]},
        "more parameters",
        "another size",
        "another kind",
        "a tuple",
        "no driver",
    ],
    ids=str,
)
def test_triton_launches_what_is_not_known(driver: Driver, monkeypatch: pytest.MonkeyPatch, unknown: Any) -> None:
    kernel = Kernel(**unknown) if isinstance(unknown, dict) else Kernel()
    if unknown == "more parameters":
        driver.sizes.append(8)
    elif unknown == "another size":
        driver.sizes[6] = 8
    elif unknown == "another kind":
        kernel.signature["factor"] = "fp16"
    elif unknown == "a tuple":
        kernel.signature["factor"] = ("fp32",)
    elif unknown == "no driver":
        monkeypatch.setattr(prepared, "library", lambda: None)
    check(on_tape(kernel))
    assert kernel.launches == 2 and not driver.launches


@pytest.mark.skipif(not torch.cuda.is_available(), reason="launches are CUDA's")
def test_threads_that_share_tapes() -> None:
    """Of new threads no call has made the device's context current; several play one tape at a time, on own streams."""
    p = problem(300, 64, 1000, torch.bfloat16, "cuda")
    inputs = [p.input * (1 + i) for i in range(6)]

    def run(i: int) -> list[Tensor]:
        return value_and_grads(lambda x, w: fxfuse.linear_cross_entropy(x, w, p.target), inputs[i], p.weight)

    def in_a_thread(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(25):
                found[i].append(run(i))
        torch.cuda.synchronize()

    expected = [run(i) for i in range(6)]
    torch.cuda.synchronize()
    found: list[list[list[Tensor]]] = [[] for _ in inputs]
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(in_a_thread, range(6)))
    for want, runs in zip(expected, found, strict=True):
        assert len(runs) == 25
        for got in runs:
            assert all(map(torch.equal, got, want))
    made = [made for made in recorder._tapes.values() if isinstance(made, tape.Tape)]
    launched = [step for one in made for step in one.steps if isinstance(step, tape.Launched)]
    assert launched and all(step.kernel.prepare(step.grid, step.args) is not None for step in launched)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert prepared.library.__wrapped__() is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())  # an older one
    assert prepared.library.__wrapped__() is None
