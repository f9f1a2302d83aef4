"""The graph around each head as plain data, and as a diff."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fxfuse import errors, graph
from fxfuse.options import Options
from fxfuse.report import picture
from fxfuse.report.diff import diff
from fxfuse.report.picture import Box, Drawing, Sketch
from fxfuse.report.records import Journal, Watched, journal

SMALL = {"fxfuse.min_logits_bytes": 0, "fxfuse.inner": "eager"}
VOCAB = 64


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(8, 8)
        self.lm_head = torch.nn.Linear(8, VOCAB, bias=False)
        self.draft = torch.nn.Linear(8, VOCAB)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.lm_head(self.body(x).relu())
        return F.cross_entropy(z.float().view(-1, VOCAB), y.view(-1))

    def returned(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.lm_head(self.body(x).relu())
        return F.cross_entropy(z.view(-1, VOCAB), y.view(-1)), z

    def logits(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.body(x).relu())

    def kept(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.lm_head(x)
        return F.cross_entropy(z.view(-1, VOCAB), y.view(-1)), z.sort().indices

    def two(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(x, y) + F.cross_entropy(self.draft(x).view(-1, VOCAB), y.view(-1))

    def checkpointed(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.loss, x, y, use_reentrant=False)

    def pieces(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Many readers of one head."""
        z = self.lm_head(x).view(-1, VOCAB)
        return sum(F.cross_entropy(z / (1 + i), y.view(-1)) for i in range(30))


INPUTS = torch.randn(2, 6, 8), torch.zeros(2, 6, dtype=torch.long)


@pytest.fixture
def sketched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Sketch]]:
    """Compiles a function and returns the sketch of its one graph."""
    mine = Journal()
    mine.watchers.append(Sketch)
    monkeypatch.setattr("fxfuse.backend.journal", mine)

    def run(function: Any, *, dynamic: bool = False) -> Sketch:
        torch._dynamo.reset()
        torch.compile(function, backend="fxfuse", options=SMALL, dynamic=dynamic, fullgraph=True)(*INPUTS)
        sketch = mine.watched[len(mine) - 1].by(Sketch)
        assert sketch is not None
        return sketch

    yield run


def roles(boxes: tuple[Box, ...]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for box in boxes:
        found.setdefault(box.role, []).append(box.function)
    return found


def is_closed(boxes: tuple[Box, ...]) -> bool:
    """Whether every edge starts at a box that is there."""
    names = [box.name for box in boxes]
    return len(set(names)) == len(names) and {source for box in boxes for source in box.inputs} <= set(names)


def test_before_and_after(sketched: Callable[..., Sketch]) -> None:
    (drawing,) = sketched(Model().loss).drawings
    before = roles(drawing.before)
    assert before == {
        "operand": ["lm_head.weight", "relu", "view"],
        "projection": ["linear"],
        "derived": ["float", "view"],
        "reader": ["cross_entropy"],
        "other": ["return"],
    }
    after = roles(drawing.after)
    assert after["operand"] == before["operand"]
    assert after["fused"] == ["fxfuse.linear_loss"]
    assert after["other"][-1] == "return"
    assert "projection" not in after
    assert is_closed(drawing.before)
    assert is_closed(drawing.after)
    (projection,) = [box for box in drawing.before if box.role == "projection"]
    assert (projection.shape, projection.dtype, projection.bytes) == (f"2 × 6 × {VOCAB}", "float32", 12 * VOCAB * 4)
    assert projection.where.startswith(__file__)
    assert projection.inputs == ("relu", drawing.before[0].name)
    # A view and a conversion to the dtype that is there already take no memory.
    assert [box.bytes for box in drawing.before if box.role == "derived"] == [0, 0]


def test_small_operations_are_one_box(sketched: Callable[..., Sketch]) -> None:
    (drawing,) = sketched(Model().loss).drawings
    together = [box for box in drawing.after if box.count > 3]
    assert together
    assert all(box.function == f"{box.count} small operations" for box in together)
    assert len(drawing.after) < 10


def test_dynamic_sizes_are_symbols(sketched: Callable[..., Sketch]) -> None:
    (drawing,) = sketched(Model().loss, dynamic=True).drawings
    (projection,) = [box for box in drawing.before if box.role == "projection"]
    assert projection.shape.endswith(f" × {VOCAB}")
    assert not projection.shape.startswith("2")
    assert projection.bytes == 12 * VOCAB * 4  # of the hints


@pytest.mark.parametrize("name", ["returned", "logits"])
def test_deferred_logits_are_made_of_what_is_returned(name: str, sketched: Callable[..., Sketch]) -> None:
    (drawing,) = sketched(getattr(Model(), name)).drawings
    assert "return" in roles(drawing.before)["other"]
    (logits,) = [box for box in drawing.after if box.role == "deferred"]
    assert (logits.function, logits.shape) == ("DeferredLogits", f"2 × 6 × {VOCAB}")
    by_name = {box.name: box.function for box in drawing.after}
    assert [by_name[source] for source in logits.inputs] == ["return", "lm_head.weight"]
    assert is_closed(drawing.after)


def test_a_kept_head_has_one_drawing(sketched: Callable[..., Sketch]) -> None:
    sketch = sketched(Model().kept)
    (drawing,) = sketch.drawings
    assert drawing.after == ()
    assert roles(drawing.before)["reader"] == ["cross_entropy", "sort"]
    assert sketch.codes[0].before == sketch.codes[0].after


def test_two_heads_have_a_drawing_each(sketched: Callable[..., Sketch]) -> None:
    first, second = sketched(Model().two).drawings
    assert roles(first.before)["operand"][0] == "lm_head.weight"
    assert "draft.weight" in roles(second.before)["operand"]
    assert all(roles(drawing.after)["fused"] == ["fxfuse.linear_loss"] for drawing in (first, second))


def test_a_checkpointed_body(sketched: Callable[..., Sketch]) -> None:
    sketch = sketched(Model().checkpointed)
    (drawing,) = sketch.drawings
    (code,) = sketch.codes
    assert roles(drawing.after)["fused"] == ["fxfuse.linear_stats"]
    assert "getitem" not in roles(drawing.after)["other"]  # statistics that nobody asked for
    assert any("functional.cross_entropy(" in line for line in code.before)
    assert not any("functional.cross_entropy(" in line for line in code.after)


def test_large_neighbourhoods_are_cut(sketched: Callable[..., Sketch]) -> None:
    (drawing,) = sketched(Model().pieces).drawings
    assert len(drawing.before) == picture.LIMIT
    assert drawing.left_out > 0
    assert is_closed(drawing.before)
    assert is_closed(drawing.after)
    assert "projection" in roles(drawing.before)


def test_a_sketch_holds_no_graph(sketched: Callable[..., Sketch], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[Any]] = []
    rewrite = graph.rewrite

    def remembering(gm: Any, *args: Any) -> Any:
        seen.extend(map(weakref.ref, (gm, gm.graph)))
        return rewrite(gm, *args)

    monkeypatch.setattr("fxfuse.backend.rewrite", remembering)
    sketch = sketched(Model().returned)
    torch._dynamo.reset()
    gc.collect()
    assert sketch.drawings
    assert len(seen) == 2
    assert [reference() for reference in seen] == [None, None]


def test_a_watcher_that_fails_changes_nothing() -> None:
    class Broken(Sketch):
        def planned(self, candidates: Any) -> None:
            raise ZeroDivisionError("of mine")

    def backend(gm: Any, inputs: Any) -> Any:
        sites.extend(graph.rewrite(gm, Options(min_logits_bytes=0), watchers=[Broken()]).sites)
        return gm

    sites: list[Any] = []
    torch._dynamo.reset()
    with pytest.warns(errors.FxfuseWarning, match="for its report .ZeroDivisionError: of mine"):
        torch.compile(Model().loss, backend=backend)(*INPUTS)
    assert [site.status for site in sites] == ["fused"]


def test_a_failed_analysis_is_drawn_as_kept(sketched: Callable[..., Sketch], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(graph, "_as_eager", broken)
    with pytest.warns(errors.FxfuseWarning, match="ZeroDivisionError"):
        sketch = sketched(Model().loss)
    assert sketch.codes[0].before == sketch.codes[0].after
    assert [drawing.after for drawing in sketch.drawings] == [()]


def test_nothing_watches_by_default() -> None:
    assert journal.watchers == []
    heavy = ["picture", "html", "layout", "diff", "measure"]
    code = f"import fxfuse, sys; print([m for m in {heavy} if 'fxfuse.report.' + m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "[]\n"


# The diff


def test_diff(sketched: Callable[..., Sketch]) -> None:
    watched = {0: Watched([sketched(Model().loss)], None, {})}
    mine = Journal()
    mine.add([])
    lines = diff(mine.report(), watched).splitlines()
    assert lines[:2] == ["--- graph 0, as captured", "+++ graph 0, by fxfuse"]
    removed = [line for line in lines if line.startswith("-") and " = " in line]
    added = [line for line in lines if line.startswith("+") and " = " in line]
    assert any("cross_entropy(view, view_1)" in line for line in removed)
    assert any(f'"f32[2, 6, {VOCAB}]"' in line for line in removed)
    assert any("fxfuse.linear_loss" in line for line in added)
    assert not any(f", {VOCAB}]" in line for line in added)
    assert not any("= None" in line for line in lines)
    assert "\33" not in "".join(lines)
    coloured = diff(mine.report(), watched, colour=True).splitlines()
    assert [line[:5] for line in coloured if "cross_entropy(view" in line] == ["\33[31m"]
    assert len(coloured) == len(lines)


def test_diff_of_what_was_left_alone(sketched: Callable[..., Sketch]) -> None:
    mine = Journal()
    assert diff(mine.report(), {}) == "No heads seen: no graph was changed."
    mine.add([])
    assert diff(mine.report(), {0: Watched([sketched(Model().kept)], None, {})}) == "graph 0: left as it was"


def test_drawings_of_no_boxes() -> None:
    assert Drawing(()).left_out == 0
    assert picture._nearest((), "projection") == ()
