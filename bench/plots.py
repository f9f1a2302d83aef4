"""Plots of what the benchmarks measured, as PNG beside their JSON.

python bench/plots.py bench/results
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from conditions import argument_parser
from matplotlib.ticker import FixedLocator, NullLocator
from train_step import largest

COLOURS = {
    **{"fxfuse": "#c0392b", "fused": "#c0392b", "inductor": "#2c3e50", "eager": "#7f8c8d", "naive": "#7f8c8d"},
    **{
        "inductor, auto_chunker": "#8e44ad",
        "Cut Cross-Entropy": "#2980b9",
        "Liger-Kernel": "#27ae60",
        "fxfuse in 256 MiB": "#e59866",
    },
}
MARKERS = "osD^vP*X"
LEAST_GIB = 2**-10


class NothingToDraw(Exception):
    """Results have nothing that a plot of their kind shows."""


def head(data: dict[str, Any], to: Path) -> None:
    """Time over the bare products against extra memory: one panel a shape, one point an implementation.

    What takes less than ``LEAST_GIB`` is drawn there, as the axis is logarithmic.
    """
    results = [
        row
        for row in data["results"]
        if isinstance(row["÷3"], float) and isinstance(row.get("extra"), float) and not row["shape"].startswith("1×")
    ]
    shapes = list(dict.fromkeys(row["shape"] for row in results))
    if not shapes:
        raise NothingToDraw("no shape of several rows with both time and memory")
    lines, columns = -(-len(shapes) // 3), min(3, len(shapes))
    figure, axes = plt.subplots(lines, columns, figsize=(3.3 * columns, 2.9 * lines + 0.8), squeeze=False)
    names = list(dict.fromkeys(row["implementation"] for row in results))
    for axis in axes.flat[len(shapes) :]:
        axis.remove()
    for axis, shape in zip(axes.flat, shapes, strict=False):
        for row in (r for r in results if r["shape"] == shape):
            name = row["implementation"]
            axis.scatter(
                max(row["extra"] / 1024, LEAST_GIB), row["÷3"], s=55, label=name, zorder=3,
                color=COLOURS.get(name), marker=MARKERS[names.index(name) % len(MARKERS)],
            )  # fmt: skip
        axis.axhline(1, color="#bbbbbb", linewidth=1, zorder=1)
        axis.set(title=shape, xlabel="extra memory, GiB", xscale="log", yscale="log")
        axis.yaxis.set_major_locator(FixedLocator((1, 1.5, 2, 3, 5, 10, 20, 50)))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter("{x:g}")
        axis.tick_params(axis="y", labelsize=7)
        axis.title.set_fontsize(9)
    for line in axes:
        line[0].set_ylabel("time over three products")
    found = {
        label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        [found[name] for name in names], names, loc="lower center", ncol=len(names), frameon=False, fontsize=9
    )
    figure.suptitle(f"Loss and gradients of one head, {data['dtype']}, {data['device']}: down and left is better")
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(to, dpi=150)
    plt.close(figure)


def logprobs(data: dict[str, Any], to: Path) -> None:
    """Time and peak memory over the number of rows, and over the vocabulary, fused against naive."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.4))
    for column, (over, key, label) in enumerate((("rows", "rows", "rows"), ("vocab", "vocab", "vocabulary"))):
        rows = [row for row in data["results"] if row["over"] == over]
        fixed = f"vocabulary {rows[0]['vocab']}" if over == "rows" else f"{rows[0]['rows']} rows"
        for line, quantity in enumerate(("ms", "MiB")):
            axis = axes[line][column]
            for name in ("fused", "naive"):
                points = [(r[key], r[f"{name} {quantity}"]) for r in rows if r.get(f"{name} {quantity}") is not None]
                axis.plot(*zip(*points, strict=True), marker="o", label=name, color=COLOURS[name])
            axis.set(yscale="log", xlabel=label, ylabel="time, ms" if line == 0 else "peak memory, MiB")
            axis.set_xscale("log", base=2)
            axis.grid(alpha=0.3)
        axes[0][column].set_title(f"hidden {rows[0]['hidden']}, {fixed}", fontsize=9)
    axes[0][0].legend(frameon=False)
    figure.suptitle(f"Log-probabilities of given tokens, {data['dtype']}, {data['device']}")
    figure.tight_layout()
    figure.savefig(to, dpi=150)
    plt.close(figure)


def step(data: dict[str, Any], to: Path) -> None:
    """Tokens a second and peak memory over the batch, and the largest batch that fits, where that was looked for."""
    names = list(dict.fromkeys(row["implementation"] for row in data["results"]))
    of = {name: [row for row in data["results"] if row["implementation"] == name] for name in names}
    most = {name: found for name in names if (found := largest(of[name])) is not None}
    figure, axes = plt.subplots(1, 3 if most else 2, figsize=(11 if most else 8, 3.6))
    for i, name in enumerate(names):
        rows = sorted((row for row in of[name] if row["tok/s"] is not None), key=lambda row: row["batch"])
        look = {"marker": MARKERS[i % len(MARKERS)], "color": COLOURS.get(name), "label": name}
        for axis, quantity, scale in ((axes[0], "tok/s", 1e-3), (axes[1], "GiB", 1)):
            axis.plot([row["batch"] for row in rows], [row[quantity] * scale for row in rows], **look)
        if name in most:
            bar = axes[2].barh(name, most[name], color=axes[0].lines[-1].get_color())
            axes[2].bar_label(bar, padding=3)
    axes[0].set(xlabel="batch", ylabel="thousand tokens a second")
    axes[1].set(xlabel="batch", ylabel="peak memory, GiB")
    for axis in axes[:2]:
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
        axis.grid(alpha=0.3)
    if most:
        axes[2].set(xlabel="largest batch that fits")
        axes[2].invert_yaxis()
        axes[2].margins(x=0.15)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=3 if len(labels) > 4 else 4, frameon=False, fontsize=9)
    figure.suptitle(f"A training step of {data.get('model', 'llama')}, {data['device']}")
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(to, dpi=150)
    plt.close(figure)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("folder", type=Path, help="where head-*.json, logprobs-*.json and step-*.json are")
    args = parser.parse_args()
    drawn = 0
    for kind, draw in (("head", head), ("logprobs", logprobs), ("step", step)):
        for file in sorted(args.folder.glob(f"{kind}-*.json")):
            try:
                draw(json.loads(file.read_text()), file.with_suffix(".png"))
            except NothingToDraw as why:
                print(f"{file}: {why}", file=sys.stderr)
                continue
            print(file.with_suffix(".png"))
            drawn += 1
    if not drawn:
        print(f"{args.folder}: no head-*.json, logprobs-*.json or step-*.json", file=sys.stderr)
    return 0 if drawn else 1


if __name__ == "__main__":
    sys.exit(main())
