"""What every measurement is told, and what is written beside its results: shapes, dtypes, the command, the machine."""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
from typing import Any

import torch

SHAPES = {
    "llama3-4k": (4096, 4096, 128256),
    "llama3-8b": (16384, 4096, 128256),
    "qwen-0.5b": (16384, 896, 151936),
    "gemma2-2b": (8192, 2304, 256000),
    "gpt2": (16384, 768, 50257),
    "llama3-512": (512, 4096, 128256),
    "llama3-1": (1, 4096, 128256),
}
DTYPES = ("bfloat16", "float16", "float32")


def sizes(text: str) -> tuple[int, int, int]:
    """Rows, hidden size and vocabulary of ``NxDxV`` or of a name in ``SHAPES``, as the ``type`` of an argument."""
    if text in SHAPES:
        return SHAPES[text]
    given = text.split("x")
    if len(given) != 3 or not all(size.isdecimal() and int(size) for size in given):
        known = ", ".join(SHAPES)
        raise argparse.ArgumentTypeError(f"{text!r} is not NxDxV, three sizes of one or more, nor one of {known}")
    rows, hidden, vocab = map(int, given)
    return rows, hidden, vocab


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add ``--device`` and ``--dtype``."""
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)


def command() -> str:
    """The arguments of this run, but for where it writes."""
    given = sys.argv[1:]
    at = given.index("--json") if "--json" in given else len(given)
    return shlex.join(given[:at] + given[at + 2 :])


def about(device: str, dtype: str) -> dict[str, Any]:
    """Under which conditions this run measures."""
    on_gpu = device.startswith("cuda")
    name = torch.cuda.get_device_name(device) if on_gpu else f"CPU ({platform.machine()})"
    return {"command": command(), "device": name, "torch": torch.__version__, "dtype": dtype}


def told(conditions: dict[str, Any]) -> str:
    """The machine and the dtype, for the line above a table."""
    return "{device}, torch {torch}, {dtype}".format_map(conditions)
