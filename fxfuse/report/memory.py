"""Peaks of memory: of CUDA's allocator, or of the process, on Linux."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import torch


def resident_bytes(field: str) -> int:
    """``VmRSS``, the memory of this process, or ``VmHWM``, the most since that was last reset; on Linux."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(f"{field}:")) << 10


def reset_resident_peak() -> None:
    """Let ``VmHWM`` start anew."""
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps would hide what is taken next
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")


def peak_bytes(f: Callable[[], Any], device: torch.device) -> int | None:
    """Peak of memory during ``f`` above what was in use before: the CUDA allocator's, or of the process for a CPU.

    None where that cannot be told: on neither Linux nor glibc.
    """
    gc.collect()
    if device.type != "cuda":
        try:
            reset_resident_peak()
            before = resident_bytes("VmRSS")
            f()
            return resident_bytes("VmHWM") - before
        except (OSError, AttributeError):
            return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    f()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def check_room(device: torch.device, needed: int) -> None:
    """Raise MemoryError where it is known that a CPU has not so many bytes: nothing else stops it in time."""
    if device.type != "cpu":
        return
    try:
        with open("/proc/meminfo") as info:
            free = next(int(line.split()[1]) for line in info if line.startswith("MemAvailable:")) << 10
    except (OSError, StopIteration):
        return
    if needed > free:
        raise MemoryError
