"""Pictures of numbers, where matplotlib is installed (`pip install engram-vit[plots]`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_history(history: Sequence[Mapping[str, float]], path: Path) -> bool:
    """Loss and validation score over the steps, as a PNG; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not history:
        return False
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = [row["step"] for row in history]
    left.plot(steps, [row["loss"] for row in history], label="training", color="#4063d8")
    left.plot(steps, [row["val_loss"] for row in history], label="validation", color="#cb3c33")
    left.set(xlabel="step", ylabel="loss", ylim=(0, None))
    left.legend(frameon=False)
    measure = measured(history[0])
    accuracy = [100 * row[f"val_{measure}"] for row in history]
    right.plot(steps, accuracy, color="#cb3c33", marker="o", markersize=3)
    right.annotate(f"{accuracy[-1]:.1f} %", (steps[-1], accuracy[-1]), ha="right", va="bottom")
    right.set(xlabel="step", ylabel=f"validation {measure}, %")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    return True


def measured(row: Mapping[str, Any]) -> str:
    """The metric of a row of a history or a sweep: what it has under val_, beside the loss."""
    return next(k[4:] for k in row if k.startswith("val_") and k != "val_loss")


def draw_sweep(settings: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Validation score over the learning rate, a line for each count of cells and decay."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    lines: dict[tuple[int, float], list[Mapping[str, Any]]] = {}
    for setting in settings:
        lines.setdefault((setting["cells"], setting["weight_decay"]), []).append(setting)
    decays, measure = {decay for _, decay in lines}, measured(settings[0])
    for (cells, decay), points in lines.items():
        points = sorted(points, key=lambda point: point["lr"])
        label = f"{cells} cells" + (f", decay {decay:g}" if len(decays) > 1 else "")
        axes.errorbar(
            [point["lr"] for point in points],
            [100 * point[f"val_{measure}"] for point in points],
            [100 * point["deviation"] for point in points],
            marker="o",
            markersize=4,
            capsize=3,
            label=label,
        )
    axes.set(xscale="log", xlabel="learning rate", ylabel=f"validation {measure}, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    return True
