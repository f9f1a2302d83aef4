"""Scripts that are run in a process of their own, as a user runs them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

PREAMBLE = """\
import sys
import torch
import torch.nn.functional as F

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = torch.nn.Linear(8, 32, bias=False)

    def forward(self, x, y):
        return scaled(F.cross_entropy(self.lm_head(x), y))

def scaled(loss):  # a global that Dynamo looks up through sys.modules["__main__"]
    return loss * 2

def ranked(x, w):
    return (x @ w.t()).sort().indices

SMALL = {"fxfuse.min_logits_bytes": 0, "fxfuse.inner": "eager"}
x, y = torch.randn(6, 8), torch.zeros(6, dtype=torch.long)
"""

HEAD, RANKED = "train.py:11", "train.py:17"  # the lines of the two projections


def write(directory: Path, body: str, preamble: str = PREAMBLE, name: str = "train.py") -> None:
    (directory / name).write_text(preamble + textwrap.dedent(body), encoding="utf-8")


def python(directory: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python COMMAND`` in a directory."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )


def shell(directory: Path, command: str) -> subprocess.CompletedProcess[str]:
    """``python COMMAND`` in a directory as bash runs it, with redirections; its status is that of python."""
    line = f"{shlex.quote(sys.executable)} {command}; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(["bash", "-c", line], cwd=directory, capture_output=True, text=True, timeout=300)
