"""The two figures of docs/results.md, from the records: accuracy against cost, and the order.

Blue points leave the backbone unchanged; grey ones need a pass of the backbone for each task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from benchmarks.paper.experiments import LARGE_ROWS, poster_settings, table2_settings
from benchmarks.paper.formatting import accuracies
from benchmarks.paper.runs import datasets
from benchmarks.paper.runs.settings import Setting, run_records
from benchmarks.paths import ROOT
from engram.tasks.costs import task_costs
from engram.tasks.spec import TaskSpec, class_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGES = ROOT / "docs" / "images"
BLUE, GREY = "#4063d8", "#9aa3ad"
CLASSES = {"fashion": 10, "cifar10": 10, "pets": 37, "flowers": 102}


def draw() -> None:
    """Write both figures; the same numbers give the same files."""
    import matplotlib as mpl

    mpl.rcParams["svg.hashsalt"] = "engram"
    IMAGES.mkdir(exist_ok=True)
    for name, figure in (("results-cost", _against_cost()), ("results-order", _order())):
        figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})


def _against_cost() -> Figure:
    """At 224 pixels: what one more task of every regime costs, and how good it is."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.6), layout="constrained")
    for axes, name in zip(figure.subplots(2, 2, sharex=True).flat, datasets.SETS, strict=True):
        _draw_costs(axes, name)
    figure.supxlabel("multiply-adds of one more task, in % of the backbone's pass", size=10)
    figure.supylabel("test accuracy, %", size=10)
    return figure


def _draw_costs(axes: Axes, dataset: str) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator

    axes.set(title=dataset, xscale="log", xlim=(5e-5, 4e3))
    axes.margins(y=0.25)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_major_locator(LogLocator(100))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, min_n_ticks=3))
    axes.grid(color="#e3e6ea", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    columns: dict[int, dict[str, tuple[float, float]]] = {}  # points of about one cost, by name
    for label, setting in LARGE_ROWS:
        values = [100 * value for value in accuracies(setting(dataset))]
        if not values:
            continue
        mean, cost = sum(values) / len(values), _cost(setting(dataset))
        name = label.strip("*").split(":")[0]
        if name == "auto":  # a ring around what it kept
            axes.plot(cost, mean, "o", ms=12, mfc="none", mec="#d8402a", zorder=4)
            axes.annotate("auto", (cost, mean), (-9, 0), textcoords="offset points",
                          color="#d8402a", ha="right", va="center", size=8)  # fmt: skip
            continue
        colour = GREY if label.startswith("*") else BLUE
        axes.plot([cost] * len(values), values, "_", color=colour, zorder=2)
        axes.plot(cost, mean, "o", ms=6, color=colour, zorder=3)
        columns.setdefault(round(math.log10(cost)), {})[name] = (cost, mean)
    low, high = axes.get_ylim()
    for points in columns.values():
        heights = _apart([mean for _, mean in points.values()], (high - low) / 17)
        for (name, (cost, _)), height in zip(points.items(), heights, strict=True):
            axes.annotate(name, (cost, height), (7, 0), textcoords="offset points",
                          va="center", size=8)  # fmt: skip


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """The same heights, but those of neighbours that are too close are moved apart."""
    order, moved = sorted(range(len(heights)), key=heights.__getitem__), list(heights)
    for _ in range(20):
        for below, above in pairwise(order):
            push = max(gap - (moved[above] - moved[below]), 0) / 2
            moved[below], moved[above] = moved[below] - push, moved[above] + push
    return moved


def _cost(setting: Setting) -> float:
    """Per cent of the backbone's pass, with the head; one pass more where the backbone changes."""
    if setting.regime == "auto":
        kept = Setting(setting.set, str(run_records(setting)[0]["kept"]))
        setting = replace(kept, pixels=setting.pixels)
    if setting.regime == "lora":
        return 100.0  # merged into the backbone's own weights
    spec = TaskSpec("task", class_names(CLASSES[setting.set]), method=setting.method())
    costs = task_costs(datasets.shape(), spec, image_size=(setting.pixels, setting.pixels))
    return 100 * (costs.share + costs.own_pass)


def _order() -> Figure:
    """At 112 pixels: the order of the paper's regimes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    names = ("fashion", "pets")
    for axes, name in zip(figure.subplots(1, len(names)), names, strict=True):
        found = {label: accuracies(setting) for label, setting in _plotted(name).items()}
        _draw_points(axes, name, {label: values for label, values in found.items() if values})
    return figure


def _plotted(dataset: str) -> dict[str, Setting]:
    table2, poster = table2_settings(dataset), poster_settings(dataset)
    return {
        "head": table2[1],
        "masked 5": poster[2],
        "masked + adapter 32": poster[4],
        "masked + adapter 128": poster[5],
        "head + class": table2[2],
        "memory 5": table2[4],
        "memory 20": table2[6],
        "full": table2[0],
    }


def _draw_points(axes: Axes, title: str, found: Mapping[str, Sequence[float]]) -> None:
    means = [100 * sum(values) / len(values) for values in found.values()]
    colours = [BLUE if "masked" in label or label == "head" else GREY for label in found]
    axes.scatter(means, list(found), color=colours, s=46, zorder=2)
    axes.grid(axis="y", color="#e3e6ea", zorder=0)
    for at, (values, mean) in enumerate(zip(found.values(), means, strict=True)):
        axes.plot([100 * v for v in values], [at] * len(values), "|", color="black", zorder=3)
        axes.annotate(f"   {mean:.1f}", (100 * max(values), at), va="center", size=9)
    low = min(means, default=0)
    axes.set(title=title, xlim=(low - 3, max(means, default=100) + 4), xlabel="test accuracy, %")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
