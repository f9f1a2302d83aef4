"""The API reference is what the docstrings say, and has all that is public."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

import fxfuse
from fxfuse.reasons import KINDS

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def api() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api", DOCS / "api.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_up_to_date(api: ModuleType) -> None:
    assert (DOCS / "api.md").read_text(encoding="utf-8") == api.reference(), "a docstring has changed: make docs"


def test_all_that_is_public_is_in_the_reference(api: ModuleType) -> None:
    text = api.reference()
    for name in fxfuse.__all__:
        assert f"### `fxfuse.{name}`\n" in text, name
    for code, kind in KINDS.items():
        assert f"| `{code}` |" in text and kind.remedy.split("`")[0] in text


def test_docstrings_become_markdown(api: ModuleType) -> None:
    docstring = """First line with ``code``.

    Args:
        one: a number
            on two lines.
        *more, **others: the rest.

    Returns:
        Something: with a colon.

    After that.
    """
    assert api.markdown(docstring) == textwrap.dedent("""\
        First line with `code`.

        **Args**

        - `one`: a number
          on two lines.
        - `*more, **others`: the rest.

        **Returns**

        Something: with a colon.

        After that.""")
    assert api.entries(docstring) == {"one": "a number\n  on two lines."}

    def f(a: int, *rest: str, b: str = "x", **named: float) -> None: ...

    assert api.signature("f", f) == "f(a: int, *rest: str, b: str = 'x', **named: float) -> None"
    f.__doc__ = None
    with pytest.raises(SystemExit, match="f is public and has no docstring"):
        list(api.of_function("f", f))
