"""The API reference, docs/api.md, from the docstrings of what is public.

python docs/api.py
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fxfuse
from fxfuse import backend, deferred, errors, options, reasons
from fxfuse.report import records

TO = Path(__file__).with_name("api.md")
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Warns|Note):$")
ENTRY = re.compile(r"^([*\w][\w*., ]*): (.*)")


# --- docstrings -----------------------------------------------------------------------------------------------


def markdown(docstring: str) -> str:
    """A docstring with sections as Google writes them (``Args:``, ``Raises:`` …) as Markdown."""
    lines: list[str] = []
    section = ""
    for line in inspect.cleandoc(docstring).replace("``", "`").splitlines():
        indented = line.startswith("    ")
        if heading := SECTION.match(line):
            section = heading[1]
            lines += [f"**{section}**", ""]
        elif indented and section in ("Args", "Attributes", "Raises", "Warns"):
            entry = ENTRY.match(line[4:])  # what continues an entry is indented further
            lines.append(f"- `{entry[1]}`: {entry[2]}" if entry else f"  {line.strip()}")
        else:
            lines.append(line.strip() if indented and section else line)
    return "\n".join(lines)


def entries(docstring: str) -> dict[str, str]:
    """The entries of the one section of a docstring."""
    return dict(re.findall(r"^- `(\w+)`: (.*(?:\n  .*)*)", markdown(docstring), re.MULTILINE))


def documented(thing: Any, name: str) -> str:
    if not thing.__doc__:
        raise SystemExit(f"{name} is public and has no docstring")
    return markdown(thing.__doc__)


def signature(name: str, function: Callable[..., Any], skipped: int = 0) -> str:
    """``name(…) -> …`` as Python, without the first ``skipped`` parameters; one a line where one line is too short."""
    shown, star = [], False
    found = inspect.signature(function)
    for p in list(found.parameters.values())[skipped:]:
        if p.kind is p.KEYWORD_ONLY and not star:
            shown.append("*")
        star |= p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        prefix = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        annotation = "" if p.annotation is p.empty else f": {p.annotation}"
        shown.append(f"{prefix}{p.name}{annotation}" + ("" if p.default is p.empty else f" = {p.default!r}"))
    returned = "" if found.return_annotation is found.empty else f" -> {found.return_annotation}"
    line = f"{name}({', '.join(shown)}){returned}"
    broken = ",\n    ".join(shown)
    return line if len(line) <= 100 else f"{name}(\n    {broken},\n){returned}"


# --- what the reference is made of ----------------------------------------------------------------------------


def of_function(name: str, function: Callable[..., Any]) -> Iterator[str]:
    yield f"### `{name}`"
    yield f"```python\n{signature(name.rpartition('.')[2], function)}\n```"
    yield documented(function, name)


def of_class(name: str, kind: type) -> Iterator[str]:
    """A class with the methods and properties that it and its bases in fxfuse define."""
    yield f"### `{name}`"
    yield documented(kind, name)
    own = (base for base in reversed(kind.__mro__) if base.__module__.startswith("fxfuse"))
    for member, value in {m: v for base in own for m, v in vars(base).items()}.items():
        function = value.fget if isinstance(value, property) else value
        if member.startswith("_") or not inspect.isfunction(function):
            continue
        line = signature(member, function, skipped=1)
        if isinstance(value, property):
            line = line.replace("()", "", 1)
        yield f"#### `{line}`"
        yield documented(function, f"{name}.{member}")


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [" | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) for row in [head, *rows]]
    lines.insert(1, " | ".join("---" for _ in head))
    return "\n".join(f"| {line} |" for line in lines)


def of_options() -> str:
    said = entries(options.Options.__doc__ or "")
    rows = [
        [f"`{options.PREFIX}{field.name}`", f"`{field.default!r}`", said[field.name]]
        for field in dataclasses.fields(options.Options)
    ]
    return table(["option", "default", ""], rows)


def of_reasons() -> str:
    rows = [
        [f"`{kind.code}`", kind.sentence.replace("{detail}", "…"), kind.remedy, "yes" if kind.mendable else "no"]
        for kind in reasons.KINDS.values()
    ]
    return table(["code", "what happened", "remedy", "under `fxfuse.strict`"], rows)


def of_errors() -> str:
    rows = []
    for name, function in vars(errors).items():
        if not name.startswith("_") and inspect.isfunction(function) and function.__module__ == errors.__name__:
            rows.append([f"`{function.__annotations__['return']}`", documented(function, f"errors.{name}")])
    return table(["raised", "when"], rows)


def reference() -> str:
    """The text of docs/api.md."""
    functions = ("linear_cross_entropy", "linear_log_probs", "linear_logsumexp")
    reports = ("explain", "summary", "sites", "reads")
    kinds = (
        *(records.Report, records.GraphRecord, records.Site, records.Projection, records.Use, records.Ending),
        *(records.Measured, records.Cost, records.Read, records.FusedRead),
    )
    parts = [
        "# API reference",
        "Written by `make docs` from the docstrings. Letters in shapes: N rows (tokens), D hidden size, V vocabulary, "
        "K classes a row. Sizes of memory are in bytes, logarithms are natural.",
        "## The backend",
        *of_function("fxfuse.backend.fxfuse", backend.fxfuse),
        "### Options",
        "`torch.compile(…, options={…})`; every other key is the inner backend's, so Inductor's by default.",
        of_options(),
        "## Functions",
        inspect.cleandoc(inspect.getmodule(fxfuse.linear_logsumexp).__doc__ or "").replace("``", "`"),
        *(part for name in functions for part in of_function(f"fxfuse.{name}", getattr(fxfuse, name))),
        "## Logits that leave a graph",
        *of_class("fxfuse.deferred.DeferredLogits", deferred.DeferredLogits),
        "## The report",
        *(part for name in reports for part in of_function(f"fxfuse.{name}", getattr(fxfuse, name))),
        *(part for kind in kinds for part in of_class(public_name(kind), kind)),
        "## Reasons",
        "Why a head is kept as it was: one of these, and no other.",
        *of_class("fxfuse.Reason", reasons.Reason),
        of_reasons(),
        "## Errors and warnings",
        "Each message begins with `file.py:line` of the program, where that is known. What eager raises for the same "
        "program is raised as it is there.",
        *(
            part
            for name in ("FxfuseError", "errors.StaleLogitsError", "FxfuseWarning")
            for part in of_class(f"fxfuse.{name}", getattr(errors, name.rpartition(".")[2]))
        ),
        of_errors(),
    ]
    return "\n\n".join(parts) + "\n"


def public_name(kind: type) -> str:
    return f"fxfuse.{kind.__name__}" if kind.__name__ in fxfuse.__all__ else f"{kind.__module__}.{kind.__name__}"


def main() -> None:
    TO.write_text(reference(), encoding="utf-8")
    print(f"wrote {TO}")


if __name__ == "__main__":
    main()
