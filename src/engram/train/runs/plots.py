"""Plots of a run: the learning curve as SVG, and a sweep as PNG where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engram.util.charts import Chart, Line, line_chart


def learning_curves(history: Sequence[Mapping[str, float]], score: str = "") -> list[Chart]:
    """Loss and validation score over the steps; `score` is the metric's name for people."""
    metric, steps = validation_metric(history[0]), [row["step"] for row in history]
    losses = [
        Line("training", steps, [row["loss"] for row in history]),
        Line("validation", steps, [row["val_loss"] for row in history]),
    ]
    scores = [Line("", steps, [100 * row[f"val_{metric}"] for row in history])]
    title = f"Validation {score or metric}, %, over steps"
    return [
        Chart("Loss over steps", line_chart(losses, "Loss over steps", from_zero=True)),
        Chart(title, line_chart(scores, title)),
    ]


def validation_metric(row: Mapping[str, Any]) -> str:
    """The metric in a row of a history or a sweep: what it has under val_, except the loss."""
    return next(k[4:] for k in row if k.startswith("val_") and k != "val_loss")


def draw_sweep(settings: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Validation score over the learning rate, with a line for each cell count and weight decay.

    Nothing is drawn where matplotlib is missing (the extra `plots`).
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    lines: dict[tuple[int, float], list[Mapping[str, Any]]] = {}
    for setting in settings:
        lines.setdefault((setting["cells"], setting["weight_decay"]), []).append(setting)
    decays, metric = {decay for _, decay in lines}, validation_metric(settings[0])
    for (cells, decay), points in lines.items():
        points = sorted(points, key=lambda point: point["lr"])
        label = f"{cells} cells" + (f", decay {decay:g}" if len(decays) > 1 else "")
        axes.errorbar(
            [point["lr"] for point in points],
            [100 * point[f"val_{metric}"] for point in points],
            [100 * point["deviation"] for point in points],
            marker="o",
            markersize=4,
            capsize=3,
            label=label,
        )
    axes.set(xscale="log", xlabel="learning rate", ylabel=f"validation {metric}, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
