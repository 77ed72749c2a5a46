"""The plots speed.svg and growth.svg."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.speed.page import Found, pick
from engram.experiments.bench import PLAIN

COLOURS = {
    "engram": "#4063d8",
    "straightforward": "#cb3c33",
    "separate models": "#7f7f7f",
    "vit-pytorch": "#389826",
    "PEFT LoRA": "#9558b2",
}
_FIXED: dict[Any, Any] = {
    "svg.hashsalt": "engram",
    "svg.fonttype": "none",
}  # the same numbers, the same file


def draw(found: Found, folder: Path) -> None:
    with mpl.rc_context(_FIXED):
        _save(_speed(found), folder / "speed.svg")
        _save(_growth(found["growth"]), folder / "growth.svg")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})


def _speed(found: Found) -> Figure:
    figure = Figure(figsize=(11, 7.6), layout="constrained")
    panels = figure.subplots(2, 2)
    rows = found["forward"]["rows"]
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    for axes, batch in zip(panels[0], batches, strict=False):
        _over_tasks(axes, [row for row in rows if row["batch"] == batch])
        axes.set_title(f"Forward, {found['forward']['backbone']}, batch {batch}")
    panels[0][0].legend(frameon=False, fontsize=8)
    steps = found["training"]["rows"]
    batch = steps[0]["batch"]
    steps = [row for row in steps if row["batch"] == batch and row["what"] != PLAIN]
    _bars(panels[1][0], {row["what"]: row["ratio"] for row in steps}, "{:.2f}")
    panels[1][0].set_title(f"One training step, batch {batch}")
    panels[1][0].set_xlabel("time, relative to the plain backbone's forward")
    _bars(panels[1][1], {r["what"]: r["peak"] / 1e6 for r in steps if "peak" in r}, "{:,.0f}")
    panels[1][1].set_title("Its memory")
    panels[1][1].set_xlabel("MB by which a process grows")
    return figure


def _over_tasks(axes: Axes, rows: list[Mapping[str, Any]]) -> None:
    counts = sorted({row["tasks"] for row in rows if row["tasks"]})
    for what, colour in COLOURS.items():
        here = [row for row in (pick(rows, what=what, tasks=n) for n in counts) if row]
        if not here:
            continue
        middle = [row["ratio"] for row in here]
        low = [row["ratio"] - row["low"] for row in here]
        high = [row["high"] - row["ratio"] for row in here]
        xs = [row["tasks"] for row in here]
        axes.errorbar(xs, middle, [low, high], color=colour, marker="o", markersize=4, label=what,
                      capsize=2, linewidth=2 if what == "engram" else 1)  # fmt: skip
    limits = [pick(rows, what="engram", tasks=n) for n in counts]
    axes.plot(counts, [row["limit"] if row else 1 for row in limits], color="black", linestyle=":",
              label="by FLOPs")  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="tasks", ylabel="ratio to the plain backbone")
    _plain_ticks(axes, counts)


def _bars(axes: Axes, values: Mapping[str, float], form: str) -> None:
    names = list(values)[::-1]
    ours = {"engram": COLOURS["engram"], "engram, from the cache": COLOURS["engram"]}
    colours = [ours.get(name, "#b0b0b0") for name in names]
    bars = axes.barh(names, [values[name] for name in names], color=colours)
    axes.bar_label(bars, [form.format(values[name]) for name in names], padding=3, fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)


def _growth(section: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    for axes, (what, grown) in zip(figure.subplots(2, 2).flat, section["of"].items(), strict=True):
        points = [point for point in grown["points"] if point["x"] > 0]
        xs = [point["x"] for point in points]
        seconds = [1e3 * point["seconds"] for point in points]
        # the predicted line is scaled so that its mean distance to the points, in logs, is zero
        scale = 1.0
        for point, time in zip(points, seconds, strict=True):
            scale *= (time / point["macs"]) ** (1 / len(points))
        axes.plot(xs, [scale * point["macs"] for point in points], color="black", linestyle=":",
                  label=f"predicted, slope {grown['predicted']:.2f}")  # fmt: skip
        axes.plot(xs, seconds, color=COLOURS["engram"], marker="o", markersize=4,
                  label=f"measured, slope {grown['measured']:.2f}")  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel=what, ylabel="ms")
        axes.set_title(grown["about"], fontsize=9)
        top, bottom = max(seconds), min(seconds)
        if top < 3 * bottom:  # nearly flat: do not magnify noise
            axes.set_ylim(bottom / 2, top * 2)
        axes.legend(frameon=False, fontsize=8)
        _plain_ticks(axes, xs)
    return figure


def _plain_ticks(axes: Axes, xs: list[int]) -> None:
    axes.set_xticks(xs, [str(x) for x in xs])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatted("{x:g}")
    axes.spines[["top", "right"]].set_visible(False)
