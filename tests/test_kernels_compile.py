"""Every kernel compiles for sm_80, sm_90 and sm_100 in the shapes that the ops launch; no GPU is needed.

The launches themselves are recorded: the ops run on meta tensors with a recorder in each kernel's place, so what is
compiled is what would run, specialised the way Triton specialises a call (integers that are 1 or multiples of 16).
"""

from __future__ import annotations

import ast
import dataclasses
import os
import pathlib
import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from fxfuse.kernels import dlogits, launcher, prepared, recorder, stats, tiles  # noqa: E402
from fxfuse.ops import cuda, gpu, hopper  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="kernels are interpreted"),
]

POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
}
# Compute capability -> the machine, and the least shared memory per block of the GPUs that share its tiles.
TARGETS = {
    80: (tiles.Machine("ampere", 132), 99 << 10),
    90: (tiles.Machine("hopper", 132, takes_turns=True), 227 << 10),
    100: (tiles.Machine("hopper", 132), 227 << 10),
}


@dataclasses.dataclass
class Launch:
    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


class Recorder:
    """Stands in a kernel's place and keeps what it is launched with."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert 0 < grid[0] < 2**31
        return lambda *args, **options: self.launches.append(Launch(self.kernel, args, options))


ALONE = ("loss", "plain_loss", "stored", "bounded", "bounded_few")  # without gradients


def record(
    monkeypatch: pytest.MonkeyPatch, machine: tiles.Machine, dtype: torch.dtype, rows: int, kind: str
) -> list[Launch]:
    """The launches of one ``linear_loss``, and of the backward of ``linear_stats``.

    A ``plain`` cross entropy, one ``without_turns``, one of a scaled and ``transposed`` weight and of hidden states
    with gaps, one with a ``softcap`` and a mask, one that is ``capped`` alone, ``all_options``, those with
    ``few_hidden`` or ``fewer_hidden`` units or with an ``odd_hidden`` size. Or ``entropy``, or ``entropy_and_top``
    among the statistics, and its backward. Or a ``loss`` alone with every option, of all rows if they are few, or a
    ``plain_loss``. Or products that are ``stored``, and the statistics of softcapped logits. Or statistics of
    ``bounded`` logits alone, of few hidden units in ``bounded_few``.
    """
    everything = kind not in ALONE and kind not in ("plain", "transposed", "softcap", "capped", "without_turns")
    vocab, indexed = 50257 if everything else 50256 if kind == "transposed" else 128256, 1
    hidden = {"odd_hidden": 4095, "few_hidden": 896, "fewer_hidden": 640, "bounded_few": 2304}.get(kind, 4096)
    launches: list[Launch] = []
    monkeypatch.setattr(tiles, "machine", lambda device: machine)
    monkeypatch.setattr(recorder, "_tapes", {})  # of other machines
    for module, name in ((stats, "stats_kernel"), (stats, "merge_kernel"), (dlogits, "dlogits_kernel")):
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), launches))
    monkeypatch.setattr(
        launcher,
        "launch",
        lambda signature, kernel, grid, *args, **options: Recorder(kernel, launches)[grid](*args, **options),
    )

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    operands = (
        meta(rows, hidden * 2, dtype=dtype)[:, ::2] if kind == "transposed" else meta(rows, hidden, dtype=dtype),
        meta(hidden, vocab, dtype=dtype).t() if kind == "transposed" else meta(vocab, hidden, dtype=dtype),
        meta(vocab, dtype=dtype) if everything else None,
        meta(rows, indexed, dtype=torch.int64),
        meta(vocab) if everything else None,
        0.5 if everything or kind == "transposed" else 1.0,
    )
    upstream = (meta(rows), meta(rows, indexed), meta(rows) if everything else None)
    needs = (True, True, everything)
    transforms = {"capped": "tanh mul:30.0", **dict.fromkeys(("softcap", "stored"), "tanh mul:30.0 masked:-inf")}
    options = {"transform": transforms.get(kind, "")}
    if kind.startswith("bounded"):
        cuda.linear_stats(*operands, False, False, transform="tanh mul:30.0")
        return launches
    if kind == "loss":
        of_classes = meta(vocab, dtype=dtype), operands[3], meta(vocab)
        cuda.linear_loss(*operands[:2], *of_classes, 0.5, *upstream[1:2], meta(rows), *[False] * 3, **options)
        return launches
    if kind == "plain_loss":
        cuda.linear_loss(*operands, upstream[1], None, *[False] * 3)
        return launches
    if kind == "stored":
        call = gpu.GpuOperands.of(*operands, **options).call()
        hopper.products(call, meta(rows, vocab, dtype=dtype))
        return launches
    if kind.startswith("entropy"):
        more = kind == "entropy_and_top"
        cuda.linear_stats(*operands, True, True, want_expectation=more, want_entropy=True, want_top=more)
        options |= {"entropy": meta(rows), "g_entropy": meta(rows), "expectation": meta(rows) if more else None}
    else:
        cuda.linear_loss(*operands, *upstream[1:], *needs, **options)
    cuda.linear_stats_backward(*operands, meta(rows), meta(rows), *upstream, *needs, **options)
    # Further windows launch the same kernel again.
    return list({(launch.kernel.__name__, *[a is None for a in launch.args]): launch for launch in launches}.values())


def compile_ahead(launch: Launch, capability: int) -> Any:
    """What ``launch`` would compile on a GPU of this ``capability``."""
    options = {key: launch.options[key] for key in ("num_warps", "num_stages") if key in launch.options}
    values = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.options
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, values[parameter.name]
        specialised = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialised and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
        elif isinstance(value, (TensorDescriptor, GluonDescriptor)):
            layout = f",{value.layout!r}" if isinstance(value, GluonDescriptor) else ""
            signature[name] = f"tensordesc<{POINTERS[value.base.dtype][1:]}{list(value.block_shape)}{layout}>"
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
        if isinstance(value, Tensor) or (specialised and value % 16 == 0):
            attributes[(position,)] = [["tt.divisibility", 16]]
    make = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    source = make(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


PRODUCTS, SPILLS = "HGMMA|HMMA|FFMA", "STL|LDL"
MEMORY = r"\b(LDG|STG|LD|ST|RED|REDG|ATOM|ATOMG|LDGSTS|UTMALDG|UTMASTG)\b"


def disassembled(cubin: bytes, folder: pathlib.Path) -> list[tuple[str, str]]:
    """(address, instruction) of each."""
    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("it compiles; this Triton has no cuobjdump to look at it with")
    (folder / "kernel.cubin").write_bytes(cubin)
    text = subprocess.run([tool, "-sass", folder / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text)


def spills_in_product(lines: list[tuple[str, str]]) -> int:
    """Accesses to spilled registers in every turn of the innermost loop that multiplies most.

    Where the loop over tiles is flattened into it, the end of a tile is a part of that loop which most turns jump over:
    that part does not count.
    """
    at = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    loops, skipped = [], set()
    for i, (_, instruction) in enumerate(lines):
        jump = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction)
        target = at.get(int(jump[1], 16), i) if jump else i
        if target < i:
            loops.append((target, i))
        elif "@" in instruction:
            skipped.update(range(i + 1, target))
    innermost = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]

    def count(loop: tuple[int, int], names: str) -> int:
        turn = (i for i in range(loop[0], loop[1] + 1) if i not in skipped or names != SPILLS)
        return sum(bool(re.search(rf"\b({names})\b", lines[i][1])) for i in turn)

    product = max(innermost, key=lambda loop: count(loop, PRODUCTS))
    assert count(product, PRODUCTS) > 0
    return count(product, SPILLS)


def waits_before_memory(lines: list[tuple[str, str]]) -> bool:
    """Whether ``griddepcontrol.wait`` comes before the first access of global memory."""
    names = [instruction for _, instruction in lines]
    waits = next(i for i, name in enumerate(names) if re.search(r"\bACQBULK\b", name))
    return waits < next(i for i, name in enumerate(names) if re.search(MEMORY, name))


def parameter_sizes(ptx: str) -> list[int]:
    """Of the kernel that it is, in bytes."""
    declared = re.search(r"\.entry [^(]*\((.*?)\)\n", ptx, re.DOTALL)
    assert declared is not None
    found = re.findall(r"\.param (?:\.align \d+ )?\.(\w)(\d+)[^\[,]*(?:\[(\d+)\])?,?$", declared[1], re.MULTILINE)
    assert len(found) == declared[1].count(".param")
    return [int(bits) // 8 * int(count or 1) for _, bits, count in found]


class Library:
    """CUDA's driver, of one kernel's parameters."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.maps = sizes, 0

    def cuFuncGetParamInfo(self, function: int, at: int, offset: Any, size: Any) -> int:
        if at == len(self.sizes):
            return 1
        size._obj.value = self.sizes[at]
        return 0

    def cuTensorMapEncodeTiled(self, *how: Any) -> int:
        self.maps += 1
        return 0


# Every tile of the table, and every optional part of a kernel, but not every combination: this file is to be quick.
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CONFIGURATIONS = [
    *((80, BF16, rows, "plain") for rows in (1, 64, 16384)),
    (80, BF16, 16384, "all_options"),
    *((capability, FP32, rows, "plain") for capability in (80, 90) for rows in (1, 64)),
    *((capability, FP32, 16384, "all_options") for capability in (80, 90)),
    *((90, BF16, rows, "plain") for rows in (1, 64)),
    (90, BF16, 16384, "all_options"),
    *((90, BF16, rows, "few_hidden") for rows in (512, 16384)),
    (90, BF16, 16384, "fewer_hidden"),
    *((90, BF16, rows, "plain") for rows in (512, 1500)),
    *((90, BF16, 256, kind) for kind in ("all_options", "few_hidden")),
    (100, BF16, 256, "all_options"),
    (90, BF16, 16384, "softcap"),
    (90, BF16, 16384, "without_turns"),
    (90, BF16, 16384, "transposed"),
    (80, BF16, 16384, "softcap"),
    (90, FP16, 16384, "plain"),
    (100, BF16, 16384, "plain"),
    (80, BF16, 1, "odd_hidden"),
    (90, BF16, 16384, "odd_hidden"),
    (80, FP32, 1, "odd_hidden"),
    (90, FP32, 16384, "odd_hidden"),
    *((80, dtype, rows, "entropy_and_top") for dtype, rows in ((BF16, 1), (BF16, 64), (BF16, 16384), (FP32, 16384))),
    *((90, dtype, rows, "entropy_and_top") for dtype, rows in ((BF16, 1), (FP16, 64), (BF16, 16384), (FP32, 16384))),
    *((90, dtype, rows, "entropy") for dtype, rows in ((BF16, 1), (FP16, 64), (BF16, 16384))),
    *((100, BF16, 16384, kind) for kind in ("entropy", "entropy_and_top")),
    *((90, dtype, 16384, "stored") for dtype in (BF16, FP16)),
    *((90, BF16, rows, "loss") for rows in (1, 64, 150)),
    (100, BF16, 1, "loss"),
    (90, BF16, 150, "plain_loss"),
    *((90, BF16, rows, "bounded") for rows in (1, 64, 16384)),
    *((90, FP16, rows, "bounded_few") for rows in (256, 16384)),
    (100, BF16, 16384, "bounded"),
    (90, BF16, 16384, "capped"),
]


@pytest.mark.parametrize(("capability", "dtype", "rows", "kind"), CONFIGURATIONS, ids=str)
def test_compiles(
    capability: int,
    dtype: torch.dtype,
    rows: int,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    machine, shared_memory = TARGETS[capability]
    if kind == "without_turns":
        machine = machine._replace(takes_turns=False)
    launches = record(monkeypatch, machine, dtype, rows, kind)
    names = {launch.kernel.__name__ for launch in launches}
    assert {"stats_kernel", "stats_together_kernel"} & names and "merge_kernel" in names
    short_end = kind in ("plain", "plain_loss", "transposed", "all_options", "bounded", "capped")
    shares_tiles = capability == 90 and dtype != FP32 and rows > 64 and short_end
    assert ("stats_together_kernel" in names) == shares_tiles
    described_way = machine.generation == "hopper" and dtype != FP32 and kind != "odd_hidden"
    made = described_way and kind not in ALONE  # gradients, by kernels on descriptors
    assert ("dlogits_kernel" in names) == (kind not in ALONE)
    assert bool({"d_weight_kernel", "d_weight_together_kernel"} & names) == made
    takes_turns = machine.takes_turns and dtype != FP32 and rows > 64
    assert ("d_weight_together_kernel" in names) == (made and takes_turns and kind != "fewer_hidden")
    few = kind in ("few_hidden", "fewer_hidden")
    many = rows == 16384 and not few
    assert ("input_sums_together_kernel" in names) == (made and many and machine.takes_turns)
    has_entropy = kind.startswith("entropy")
    exponentials = {"exponentials_kernel", "exponentials_together_kernel"} & names
    assert bool(exponentials) == (made and dtype == BF16 and not has_entropy)
    assert ("add_class_sums_kernel" in names) == (bool(exponentials) and rows == 256)
    in_large_tiles = machine.takes_turns and rows > 64 and not few
    assert ("exponentials_together_kernel" in exponentials) == (bool(exponentials) and in_large_tiles)
    assert ("d_input_kernel" if in_large_tiles else "d_input_together_kernel") not in names
    assert "d_input_together_kernel" in names or not (exponentials and in_large_tiles)
    for launch in launches:
        compiled = compile_ahead(launch, capability)
        assert compiled.asm["cubin"][:4] == b"\x7fELF"
        assert compiled.metadata.shared <= shared_memory
        library = Library(parameter_sizes(compiled.asm["ptx"]))
        monkeypatch.setattr(prepared, "library", lambda library=library: library)
        ready = prepared.prepare(compiled, (1,), launch.args)
        assert ready is not None and len(ready.maps) == library.maps, launch.kernel.__name__
        lines = disassembled(compiled.asm["cubin"], tmp_path)
        multiplies = launch.kernel.is_gluon() or "tt.dot" in compiled.asm["ttir"]
        if multiplies and capability < 100:
            # Spilling between products costs little; spilling inside them would cost everything.
            assert spills_in_product(lines) == 0, launch.kernel.__name__
        if launch.kernel.__name__ == "pick_kernel":  # whose loads, with strides, are jumped over within the loop
            assert not any(re.search(rf"\b({SPILLS})\b", instruction) for _, instruction in lines)
        described = launch.kernel.__module__.startswith("fxfuse.kernels.hopper.")
        assert bool(launch.options.get("launch_pdl")) == described
        if described:
            if launch.kernel.is_gluon():  # the other warps are where they are, and begin when the first tells them to
                text = compiled.asm["ttgir"]
                assert text.index("griddepcontrol.wait") < text.index("ttg.warp_specialize("), launch.kernel.__name__
            else:
                assert waits_before_memory(lines), launch.kernel.__name__


def test_every_kernel_begins_with_waiting() -> None:
    """Those in ``kernels/hopper`` are launched before the last one's end."""
    kernels = [
        (function.name, function.body[bool(ast.get_docstring(function))])
        for file in pathlib.Path(launcher.__file__).with_name("hopper").rglob("*.py")
        for function in ast.walk(ast.parse(file.read_text()))
        if isinstance(function, ast.FunctionDef) and function.name.endswith("_kernel")
    ]
    assert len(kernels) > 20
    for name, first in kernels:
        assert ast.unparse(first) == "begin(PDL)", name
