"""Pictures of numbers, where matplotlib is installed (`pip install engram-vit[plots]`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_history(history: Sequence[Mapping[str, float]], path: Path) -> bool:
    """Loss and validation accuracy over the steps, as a PNG; False where matplotlib is missing."""
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
    accuracy = [100 * row["val_accuracy"] for row in history]
    right.plot(steps, accuracy, color="#cb3c33", marker="o", markersize=3)
    right.annotate(f"{accuracy[-1]:.1f} %", (steps[-1], accuracy[-1]), ha="right", va="bottom")
    right.set(xlabel="step", ylabel="validation accuracy, %")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    return True


def draw_sweep(settings: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Validation accuracy over the learning rate, a line for each count of cells and decay."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    lines: dict[tuple[int, float], list[Mapping[str, Any]]] = {}
    for setting in settings:
        lines.setdefault((setting["cells"], setting["weight_decay"]), []).append(setting)
    decays = {decay for _, decay in lines}
    for (cells, decay), points in lines.items():
        points = sorted(points, key=lambda point: point["lr"])
        label = f"{cells} cells" + (f", decay {decay:g}" if len(decays) > 1 else "")
        axes.errorbar(
            [point["lr"] for point in points],
            [100 * point["val_accuracy"] for point in points],
            [100 * point["deviation"] for point in points],
            marker="o",
            markersize=4,
            capsize=3,
            label=label,
        )
    axes.set(xscale="log", xlabel="learning rate", ylabel="validation accuracy, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    return True
