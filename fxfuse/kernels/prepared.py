"""A compiled kernel, launched by CUDA's driver with arguments of which all but addresses are known.

Triton makes the arguments of each launch anew, which takes the host some microseconds, and more where it encodes
descriptors. Here they lie as the driver wants them, to be launched again with other addresses.

The driver's functions, structures and numbers are those of NVIDIA's "CUDA Driver API"; what Triton makes of a kernel's
parameters is looked up in its signature, and compared with the sizes that the driver has of the kernel's parameters.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from typing import Any

_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_
_L2_PROMOTION_128B = 2  # CU_TENSOR_MAP_
_FILL_WITH_NAN = 1  # CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64  # CUtensorMap
# Kinds of elements as PTX counts them (``tensormap.replace``), where the driver's CUtensorMapDataType differs.
_ELEMENTS = {8: 10, 9: 8, 10: 9}
_NUMBERS = {
    "i1": ctypes.c_bool,
    "u1": ctypes.c_bool,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    _fields_ = (
        *((f"{of}_{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_size_t),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@functools.cache
def library() -> Any:
    """CUDA's driver, or None where there is none that has all of what is asked of it here."""
    try:
        found = ctypes.CDLL("libcuda.so.1")
        found.cuTensorMapReplaceAddress.argtypes = ctypes.c_void_p, ctypes.c_void_p
        found.cuFuncGetParamInfo.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p
        found.cuTensorMapEncodeTiled  # noqa: B018 (looked up)
        found.cuLaunchKernelEx  # noqa: B018
    except (OSError, AttributeError):
        return None
    return found


class _Unknown(Exception):
    """Of a kernel's parameters, one is not known here."""


class Prepared:
    """A launch. It is done by one caller at a time, as the addresses are kept in it.

    ``addresses`` is where those of the kernel's parameters are put, in the order of ``addressed``, the arguments that
    they are of. ``maps`` are the descriptors: what ``cuTensorMapReplaceAddress`` takes, and the argument whose address
    that is. The stream is put into ``config``; ``arguments`` are then those of ``cuLaunchKernelEx``.
    """

    def __init__(self, compiled: Any, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        self.addressed: list[Any] = []
        self.maps: list[tuple[ctypes.c_void_p, Any]] = []
        meta, self._kept = compiled.metadata, [compiled]
        if meta.num_ctas != 1 or meta.launch_cooperative_grid or meta.global_scratch_size or meta.profile_scratch_size:
            raise _Unknown
        descriptors = iter(getattr(meta, "tensordesc_meta", None) or ())
        parameters: list[Any] = []  # numbers as ctypes, and None for an address
        for kind, arg in zip(compiled.src.signature.values(), args, strict=False):  # constants are last
            parameters += self._parameters(kind, arg, descriptors)
        parameters += [ctypes.c_size_t(0)] * 2  # Triton's scratch memory
        if [_size(parameter) for parameter in parameters] != _sizes(compiled.function):
            raise _Unknown
        self.addresses = (ctypes.c_size_t * len(self.addressed))()
        at = (ctypes.addressof(self.addresses) + i * 8 for i in range(len(self.addressed)))
        self._kept += parameters
        pointers = [next(at) if parameter is None else ctypes.addressof(parameter) for parameter in parameters]
        pdl = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        self.config = _Config(
            *grid, *[1] * (3 - len(grid)), 32 * meta.num_warps, 1, 1, meta.shared, 0,
            ctypes.pointer(pdl), int(bool(meta.launch_pdl)),
        )  # fmt: skip
        values = (ctypes.c_void_p * len(pointers))(*pointers)
        self._kept += [pdl, values]
        self.arguments = (
            ctypes.c_void_p(ctypes.addressof(self.config)),
            ctypes.c_void_p(compiled.function),
            ctypes.c_void_p(ctypes.addressof(values)),
            None,
        )

    def _parameters(self, kind: Any, arg: Any, descriptors: Iterator[Any]) -> Iterator[Any]:
        if kind == "constexpr":
            return
        if not isinstance(kind, str):
            raise _Unknown
        if kind.startswith("*"):
            self.addressed.append(arg)
            yield None
        elif kind.startswith("tensordesc"):
            meta = next(descriptors, None)
            if meta is None or meta["fp4_padded"] or getattr(arg, "round_f32_to_tf32", False):
                raise _Unknown
            encoded = _encoded(meta, list(arg.shape), list(arg.strides), arg.padding)
            self.maps.append((ctypes.c_void_p(ctypes.addressof(encoded)), arg.base))
            yield encoded
            yield from map(ctypes.c_int32, arg.shape)
            yield from map(ctypes.c_int64, arg.strides)
        elif kind in _NUMBERS:
            yield _NUMBERS[kind](arg)
        else:
            raise _Unknown


def prepare(compiled: Any, grid: tuple[int, ...], args: Sequence[Any]) -> Prepared | None:
    """The launch of Triton's compiled kernel with such arguments, those for its constants left out.

    Tensors, and those of descriptors, are anything that stands for their addresses. None if its parameters are not all
    known, so that only Triton can launch it.
    """
    if library() is None:
        return None
    try:
        return Prepared(compiled, grid, args)
    except _Unknown:
        return None


def _size(parameter: Any) -> int:
    return 8 if parameter is None else ctypes.sizeof(parameter)


def _sizes(function: int) -> list[int]:
    """Of all parameters of the kernel, in bytes."""
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while not library().cuFuncGetParamInfo(function, len(sizes), ctypes.byref(offset), ctypes.byref(size)):
        sizes.append(size.value)
    return sizes


def _encoded(meta: dict[str, Any], shape: list[int], strides: list[int], padding: str) -> Any:
    """A CUtensorMap, of no address yet."""
    rank, element = len(shape), meta["elem_size"]
    memory = (ctypes.c_char * (_MAP_BYTES + _MAP_ALIGNMENT))()
    encoded = (ctypes.c_char * _MAP_BYTES).from_buffer(memory, -ctypes.addressof(memory) % _MAP_ALIGNMENT)
    code = library().cuTensorMapEncodeTiled(
        encoded,
        _ELEMENTS.get(meta["elem_type"], meta["elem_type"]),
        rank,
        ctypes.c_void_p(1 << 20),  # any that is aligned
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * rank)(*(element * stride for stride in reversed(strides[:-1]))),  # in bytes, but the last
        (ctypes.c_uint32 * rank)(*reversed(meta["block_size"])),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # CU_TENSOR_MAP_INTERLEAVE_NONE
        meta["swizzle"],
        _L2_PROMOTION_128B,
        _FILL_WITH_NAN if padding == "nan" else 0,
    )
    if code:
        raise _Unknown
    return encoded
