"""What every measurement is told, and what is written beside its results: shapes, dtypes, the command, the machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path
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
# What else a result depends on, where it is installed.
PACKAGES = ("triton", "transformers", "liger-kernel", "cut-cross-entropy", "quack-kernels", "fla-core")


# --- arguments ------------------------------------------------------------------------------------------------


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


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError
    return number


def device(text: str) -> str:
    """A device that can be used here; a GPU becomes the current one, of which memory and time are measured."""
    try:
        kind = torch.device(text).type
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text} is no device of PyTorch's") from error
    if kind not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text}: nothing here measures such a device")
    try:
        found = torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be used here: {str(error).splitlines()[0]}") from error
    if found.is_cuda:
        torch.cuda.set_device(found.device)
    return text


def on_gpu(device: str) -> bool:
    return torch.device(device).type == "cuda"


def results_file(text: str) -> Path:
    """A file that can be written to, which is known before anything is measured."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: its folder does not exist")
    return path


def argument_parser(doc: str | None) -> argparse.ArgumentParser:
    """One whose help shows the docstring as it is; arguments are given in full, so that ``command`` knows them."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=formatter, allow_abbrev=False)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add ``--device`` and ``--dtype``."""
    add_device(parser)
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of the operands (default %(default)s)")


def add_device(parser: argparse.ArgumentParser) -> None:
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=device, default=usual, help="where to measure (default here %(default)s)")


def add_repeats(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repeats", type=positive, default=5, help="turns of each measurement, of which medians are taken "
        "(default %(default)s)",
    )  # fmt: skip


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=results_file, metavar="FILE", help="write the results there, as they come")


# --- what is written ------------------------------------------------------------------------------------------


def command() -> str:
    """The script and the arguments of this run, but for where it writes."""
    kept, given = [Path(sys.argv[0]).name], iter(sys.argv[1:])
    for word in given:
        if word == "--json":
            next(given, None)
        elif not word.startswith("--json="):
            kept.append(word)
    return shlex.join(kept)


def about(device: str, dtype: str) -> dict[str, Any]:
    """Under which conditions this run measures."""
    name = torch.cuda.get_device_name(device) if on_gpu(device) else f"CPU ({platform.machine()})"
    return {
        "command": command(),
        "device": name,
        "torch": torch.__version__,
        "dtype": dtype,
        "commit": _commit(),
        "packages": _packages(),
    }


def _commit() -> str | None:
    """Of fxfuse, where this is a checkout of it; ``-dirty`` if that has changes."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _packages() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def told(conditions: dict[str, Any]) -> str:
    """The machine and the dtype, for the line above a table."""
    return "{device}, torch {torch}, {dtype}".format_map(conditions)


def write(path: Path | None, conditions: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Write what has been measured so far, if there is a place for it: after each, so that it is not lost."""
    if path is not None:
        path.write_text(
            json.dumps({**conditions, "results": results}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
