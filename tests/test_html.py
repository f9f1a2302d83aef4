"""The page: what is on it, that it is whole, safe and readable; where boxes go; in a browser, if there is one."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxfuse.reasons import because
from fxfuse.report import GraphRecord, Report, Site
from fxfuse.report.html import PALETTES, SIGNS, page
from fxfuse.report.layout import layout
from fxfuse.report.picture import Box, Code, Drawing, Sketch
from fxfuse.report.records import Cost, Measured, Read, Watched

HOSTILE = "<script>alert('1')</script>\"&<b>"
BEFORE = (
    Box("w", "lm_head.weight", "operand", "32000 × 64", "bfloat16"),
    Box("h", f"relu{HOSTILE}", "operand", "8 × s27 × 64", "bfloat16", 1 << 20, "model.py:8"),
    Box("linear", "linear", "projection", "8 × s27 × 32000", "bfloat16", 3 << 30, "model.py:9", ("h", "w")),
    Box("view", "view", "derived", "2048 × 32000", "bfloat16", 0, "model.py:9", ("linear",)),
    Box("y", "labels", "operand", "2048", "int64"),
    Box("ce", "cross_entropy", "reader", "scalar", "float32", 4, "model.py:10", ("view", "y")),
    Box("sort", "sort", "reader", "", "", 1 << 20, "model.py:10", ("view",)),
    Box("output", "return", "other", inputs=("ce", "sort")),
)
AFTER = (
    *BEFORE[:2],
    Box("y", "labels", "operand", "2048", "int64"),
    Box("small", "16 small operations", "other", bytes=60 << 10, inputs=("y",), count=16),
    Box("loss", "fxfuse.linear_loss", "fused", bytes=1 << 20, inputs=("h", "w", "small")),
    Box("output", "return", "other", inputs=("loss",)),
    Box("z", "DeferredLogits", "deferred", "8 × s27 × 32000", "bfloat16", inputs=("output", "w")),
)
FUSED = Site(
    "fused", "linear → view → cross_entropy", "model.py:9", "lm_head", "8*s27", 64, 32000, "bfloat16",
    "gradients in forward", 6 << 30, measured=Measured(Cost(12.5, 7 << 30), Cost(11.5, 1 << 30), "cuda:0"),
)  # fmt: skip
DEFERRED = Site(
    "deferred", "linear", "model.py:30", "", 2048, 64, 32000, "float32", "", 3 << 30,
    measured=Measured(note="nothing in this graph reads the logits"),
)  # fmt: skip
KEPT = Site(
    "kept", f"linear → {HOSTILE} + linear → sort", f"dir/{HOSTILE}.py:9", f"head.{HOSTILE}", 2048, 64, 32000, "float16",
    reason=because("unknown_reader", f"sort {HOSTILE}", "model.py:10"),
)  # fmt: skip


def sketch(*drawings: Drawing) -> Watched:
    made = Sketch()
    made.drawings = list(drawings)
    made.codes = [Code(("a = 1", f"b = {HOSTILE!r}"), ("a = 1", "c = 2"))]
    return Watched([made], None, {})


REPORT = Report(
    (GraphRecord(0, (FUSED, KEPT)), GraphRecord(1), GraphRecord(2, (DEFERRED,))),
    (Read("read", f"train{HOSTILE}.py:7", "model.py:30", 3, 9 << 30, graph=2),),
)
WATCHED = {
    0: sketch(Drawing(BEFORE, AFTER), Drawing(BEFORE, left_out=12)),
    2: sketch(Drawing(BEFORE[:3], AFTER)),
}


class Tags(HTMLParser):
    """Raises where tags do not match; counts what there is, and collects the text by the innermost tag."""

    VOID = ("meta", "br", "rect", "path", "link", "img", "input", "hr")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{self.getpos()}: </{tag}>"

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open:
            self.text.setdefault(self.open[-1], []).append(data.strip())

    def values(self, name: str) -> list[str]:
        return [value for _, key, value in self.attributes if key == name]


@pytest.fixture(scope="module")
def source() -> str:
    return page(REPORT, WATCHED, f"train.py {HOSTILE}")


def test_the_page_is_whole(source: str) -> None:
    parsed = Tags(source)
    ids = parsed.values("id")
    assert len(ids) == len(set(ids))
    assert {link.removeprefix("#") for link in parsed.values("href")} <= set(ids)
    for labels in parsed.values("aria-labelledby"):
        assert set(labels.split()) <= set(ids)
    assert parsed.tags["article"] == 3
    assert parsed.tags["svg"] == 5  # before and after, but for the one that was kept
    assert parsed.tags["h1"] == parsed.tags["main"] == 1
    assert parsed.tags["desc"] == 5


def test_the_page_needs_nothing_else(source: str) -> None:
    parsed = Tags(source)
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert not re.search(r"https?:|@import|url\(|\bsrc=", source)
    assert all(link.startswith("#") for link in parsed.values("href"))


def test_what_comes_from_the_program_is_escaped(source: str) -> None:
    assert "<script" not in source
    assert "<b>" not in source
    parsed = Tags(source)
    whole = " ".join(text for texts in parsed.text.values() for text in texts)
    for shown in (f"train.py {HOSTILE}", f"head.{HOSTILE}", f"dir/{HOSTILE}.py:9", f"sort {HOSTILE} reads the logits"):
        assert shown in whole


def test_every_head_is_told(source: str) -> None:
    text = Tags(source).text
    assert text["strong"][:5] == ["1", "1", "1", "6.0 GiB", "3.0 GiB"]  # the last was built after all
    words = " ".join(word for texts in text.values() for word in texts)
    for said in (
        "8*s27 × 64 → 32000",
        "gradients in forward",
        "12.5 ms",
        "7.0 GiB",
        "11.5 ms",
        "Not measured: nothing in this graph reads the logits.",
        "What to do:",
        because("unknown_reader").remedy,
        "12 more operations, farther from the projection, are not drawn.",
        "DeferredLogits",
        "✕ reader, in the way",
    ):
        assert said in words, said
    assert text["li"].count("cross_entropy") == 1  # as one of a chain


def test_only_the_reader_in_the_way_is_marked(source: str) -> None:
    """Of two on one line, the one that the reason names."""
    (marked,) = re.findall(r'<g class="reader blocks".*?</g>', source, re.DOTALL)
    assert ">sort<" in marked


def test_status_is_never_a_colour_alone(source: str) -> None:
    for status, sign in SIGNS.items():
        badges = re.findall(rf'class="badge {status}">(.*?)</span> (\w+)</span>', source)
        assert badges
        assert all(sign in before and word == status for before, word in badges)
    for role in ("operand", "projection", "derived", "fused", "deferred"):
        assert '<text class="role"' in source and f">{role}</text>" in source


def test_drawings_that_could_not_be_made_are_left_out() -> None:
    lacking = {0: sketch(Drawing(BEFORE, AFTER))}  # of two heads
    assert Tags(page(REPORT, lacking, "x.py")).tags["svg"] == 0
    assert Tags(page(REPORT, {}, "x.py")).tags["article"] == 3


def test_attention_without_masks() -> None:
    said = "is_causal in place of a causal mask, or of one that hides nothing: 2 attentions (train.py:7)."
    unmasked = GraphRecord(3, unmasked=("train.py:7", "train.py:7"))
    assert said in page(Report((*REPORT.graphs, unmasked)), {}, "x.py")
    assert said in page(Report((unmasked, unmasked)), {}, "x.py")
    assert "is_causal" not in page(REPORT, {}, "x.py")


def test_a_page_without_heads() -> None:
    assert "No heads seen: nothing was compiled." in page(Report(), {}, "x.py")
    assert "No heads seen: 1 graph compiled, none" in page(Report((GraphRecord(0),)), {}, "x.py")


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", PALETTES)
def test_contrast(scheme: str) -> None:
    """WCAG 2, level AA, of every pair of text and ground that the page has."""
    colours = PALETTES[scheme]
    pairs = [("text", ground) for ground in ("page", "card", "code", "fused-tint", "deferred-tint", "kept-tint")]
    pairs += [("faint", ground) for ground in ("page", "card", "code")]
    pairs += [(status, f"{status}-tint") for status in SIGNS] + [(status, "card") for status in SIGNS]
    pairs += [(status, "code") for status in SIGNS]  # the lines of a diff
    for front, ground in pairs:
        light, dark = sorted((luminance(colours[front]), luminance(colours[ground])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (front, ground)


# Where boxes go


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Box], dict[str, float]]:
    count = draw(st.integers(1, 14))
    boxes, widths = [], {}
    for i in range(count):
        inputs = draw(st.sets(st.integers(0, i - 1), max_size=4)) if i else set()
        boxes.append(Box(f"n{i}", "f", "other", inputs=tuple(f"n{j}" for j in sorted(inputs))))
        widths[f"n{i}"] = float(draw(st.integers(20, 200)))
    return boxes, widths


@settings(deadline=None, max_examples=200)
@given(graphs())
def test_boxes_do_not_overlap_and_lines_go_down(graph: tuple[list[Box], dict[str, float]]) -> None:
    boxes, widths = graph
    arranged = layout(boxes, widths, height=50.0, step=80.0)
    assert [placed.box for placed in arranged.boxes] == boxes
    assert len(arranged.lines) == sum(len(box.inputs) for box in boxes)
    by_layer: dict[float, list[tuple[float, float]]] = {}
    for placed in arranged.boxes:
        assert -1e-6 <= placed.x <= placed.x + placed.width <= arranged.width + 1e-6
        assert 0 <= placed.y <= placed.y + placed.height <= arranged.height + 1e-6
        by_layer.setdefault(placed.y, []).append((placed.x, placed.x + placed.width))
    for spans in by_layer.values():
        spans.sort()
        assert all(left[1] < right[0] for left, right in pairwise(spans))
    for line in arranged.lines:
        assert all(above[1] < below[1] for above, below in pairwise(line))
        for x, y in line[1:-1]:  # which passes between the boxes of a layer
            spans = by_layer.get(y if y in by_layer else y - 50.0, [])
            assert not any(left < x < right for left, right in spans)


def test_a_circle_is_drawn_all_the_same() -> None:
    boxes = [Box("a", "f", "other", inputs=("b",)), Box("b", "f", "other", inputs=("a",))]
    arranged = layout(boxes, {"a": 10.0, "b": 10.0}, height=50.0, step=80.0)
    assert {placed.y for placed in arranged.boxes} == {0.0, 80.0}


def test_nothing_to_place() -> None:
    assert layout([], {}, 50.0, 80.0).boxes == ()


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with playwright.sync_playwright() as running:
        try:
            launched = running.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no browser: {error.message.splitlines()[0]}")
        yield launched
        launched.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 820, 1280])
@pytest.mark.parametrize("scheme", PALETTES)
def test_in_a_browser(width: int, scheme: str, browser: Any, source: str, tmp_path: Path) -> None:
    """It loads nothing, says nothing on the console, is never wider than the screen, and takes on the scheme."""
    file = tmp_path / "page.html"
    file.write_text(source, encoding="utf-8")
    tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    noticed: list[str] = []
    tab.on("request", lambda request: noticed.append(request.url))
    tab.on("console", lambda message: noticed.append(message.text))
    tab.on("dialog", lambda dialog: noticed.append(dialog.message))
    tab.on("pageerror", lambda error: noticed.append(str(error)))
    tab.goto(file.as_uri())
    assert noticed == [file.as_uri()]
    assert tab.evaluate("document.compatMode") == "CSS1Compat"
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    red, green, blue = map(int, re.findall(r"\d+", tab.evaluate("getComputedStyle(document.body).backgroundColor")))
    assert f"#{red:02x}{green:02x}{blue:02x}" == PALETTES[scheme]["page"]
    # No text sticks out of its box.
    wider = """() => [...document.querySelectorAll("svg g")].filter(g => [...g.querySelectorAll("text")].some(
        t => t.getBBox().width > g.querySelector("rect").getBBox().width)).length"""
    assert tab.evaluate(wider) == 0
    assert tab.get_by_role("img", name="Before").count() == 2
    tab.emulate_media(media="print")  # on white paper, whatever the scheme
    assert tab.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
    ink = tab.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--text')")
    assert ink.strip() == PALETTES["light"]["text"]
    tab.close()
