"""Cases that run on a GPU, or where there is none in one process under Triton's interpreter (see test_kernels)."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
# The interpreter's bfloat16 is not to be trusted: it truncates where a GPU rounds.
DTYPES = (torch.float32, torch.float16, *((torch.bfloat16,) if HAS_GPU else ()))


class Cases(dict[str, Callable[[], None]]):
    """Checks by name. A test file fills one, makes its ``main`` its own and asks it for ``failure``s."""

    def __call__(
        self, *, gpu_only: bool = False, each_dtype: bool = False
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Register a function as one case, or one for each dtype."""

        def register(check: Callable[..., None]) -> Callable[..., None]:
            if not gpu_only or HAS_GPU:
                for dtype in DTYPES if each_dtype else (None,):
                    name = "-".join(filter(None, (check.__name__, dtype and str(dtype).removeprefix("torch."))))
                    self[name] = lambda dtype=dtype: check(*(() if dtype is None else (dtype,)))
            return check

        return register

    def main(self) -> None:
        """Run every case and write a traceback, or nothing, for each into the file that is the argument."""
        _prepare_once_a_launch()
        results = {}
        for name, check in self.items():
            torch.manual_seed(0)
            try:
                check()
                results[name] = ""
            except Exception:
                results[name] = traceback.format_exc()
        pathlib.Path(sys.argv[1]).write_text(json.dumps(results))


def _prepare_once_a_launch() -> None:
    """Let the interpreter put its functions in the language's place once for a kernel that is launched.

    It does so again for every function that the kernel calls, which takes half of its time.
    """
    import triton.language
    from triton.runtime import interpreter

    patch, language = interpreter._patch_lang, (triton.language, triton.language.core)
    done: list[Any] = []  # since the launch: which names of the language have its functions

    def patch_once(fn: Any) -> Any:
        seen = [module for module in language if any(value is module for value in fn.__globals__.values())]
        if seen in done:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        if not done:
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        done.append(seen)
        return scope

    interpreter._patch_lang = patch_once


def made_of(cases: Cases, file: str) -> tuple[Callable[..., dict[str, str]], Callable[..., None]]:
    """A fixture ``interpreted`` and a test ``test_kernels`` for pytest to find in the test file ``file``."""

    @pytest.fixture(scope="module")
    def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
        """A traceback, or nothing, for each case under Triton's interpreter."""
        return interpret(file, tmp_path_factory)

    @pytest.mark.slow
    @pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
    @pytest.mark.parametrize("name", cases)
    def test_kernels(name: str, request: pytest.FixtureRequest) -> None:
        if HAS_GPU:
            cases[name]()
            return
        failure = request.getfixturevalue("interpreted")[name]
        assert not failure, failure

    return interpreted, test_kernels


def interpret(file: str, folder: pytest.TempPathFactory) -> dict[str, str]:
    """What ``Cases.main`` of the test file ``file`` writes in a process with TRITON_INTERPRET=1."""
    results = folder.mktemp("interpreted") / "results.json"
    root = str(pathlib.Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", file, str(results)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=3000,  # 18 minutes of a slow processor's time for the largest file
    )
    assert results.exists(), done.stderr
    return dict(json.loads(results.read_text()))
