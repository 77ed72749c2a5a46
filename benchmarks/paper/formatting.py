"""Cells of the tables, from the records of runs; runs without a record show as "not run"."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.paper.runs.settings import SEEDS, Setting, run_records
from engram.backbones.shape import BackboneShape
from engram.tasks.costs import task_costs
from engram.tasks.spec import TaskSpec, class_names

MISSING = "not run"


def accuracies(setting: Setting) -> list[float]:
    """Test accuracy of every seed that was run."""
    return [record["test"] for record in run_records(setting)]


def mean_and_spread(values: Sequence[float]) -> str:
    """The mean in per cent; for several seeds also the standard deviation."""
    if not values:
        return MISSING
    mean = f"{100 * statistics.fmean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * statistics.stdev(values):.1f}"


def accuracy_cell(setting: Setting) -> str:
    """As `mean_and_spread`, with the number of seeds if some are missing."""
    values = accuracies(setting)
    seeds = "" if len(values) in (0, len(SEEDS)) else f" ({len(values)})"
    return mean_and_spread(values) + seeds


def mean_cell(settings: Sequence[Setting]) -> str:
    """The mean over settings, where all of them were run."""
    means = [statistics.fmean(values) for values in map(accuracies, settings) if values]
    return f"{100 * statistics.fmean(means):.1f}" if len(means) == len(settings) else ""


def parameters_cell(setting: Setting) -> str:
    """The number of parameters that the task trains, without its head."""
    found = [record["parameters"] for record in run_records(setting)]
    return f"{found[0]:,}" if found else MISSING


def macs_cell(setting: Setting, backbone: BackboneShape) -> str:
    """Multiply-accumulates per image, as a share of the backbone's own pass at that image size."""
    share, own_pass = extra_macs(setting, backbone)
    return f"{100 * share:.1f} %{', in a separate pass' if own_pass else ''}"


def extra_macs(setting: Setting, backbone: BackboneShape) -> tuple[float, bool]:
    """The cost of a task as a share of the backbone's pass, and whether it needs its own pass."""
    if setting.regime == "lora":
        return 0.0, True  # merged into the backbone's own weights
    spec = TaskSpec("task", class_names(2), method=setting.method())
    size = (setting.pixels, setting.pixels)
    cost = task_costs(backbone, spec, image_size=size)
    more = cost.macs
    if setting.place != "both":
        more -= 2 * backbone.width * setting.width * backbone.depth
    return more / cost.backbone_macs, cost.own_pass
