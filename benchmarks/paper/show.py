"""Tables from records. What was not run is said to be not run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from runs import SEEDS, Setting, read, run_path

from engram.tasks.costs import task_costs
from engram.tasks.shape import TrunkShape
from engram.tasks.spec import TaskSpec, class_names

MISSING = "not run"


def tests(setting: Setting) -> list[float]:
    """Test accuracy of every seed that ran."""
    records = [read(run_path(setting, seed)) for seed in SEEDS]
    return [record["test"] for record in records if record]


def mean_and_spread(values: Sequence[float]) -> str:
    """Per cent; with several seeds the standard deviation beside it."""
    if not values:
        return MISSING
    mean = f"{100 * statistics.fmean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * statistics.stdev(values):.1f}"


def cell(setting: Setting) -> str:
    """As `mean_and_spread`, and how many seeds it is from if not all of them."""
    values = tests(setting)
    seeds = "" if len(values) in (0, len(SEEDS)) else f" ({len(values)})"
    return mean_and_spread(values) + seeds


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def parameters(setting: Setting) -> str:
    """What the task learns beside its head."""
    records = [read(run_path(setting, seed)) for seed in SEEDS]
    found = [record["parameters"] for record in records if record]
    return f"{found[0]:,}" if found else MISSING


def macs(setting: Setting, trunk: TrunkShape) -> str:
    """Multiply-accumulates an image, as a part of the trunk's own pass at that size."""
    spec = TaskSpec(
        "task",
        class_names(2),
        regime=setting.regime,
        cells=setting.cells,
        adapter_width=setting.width or 32,
    )
    size = (setting.pixels, setting.pixels)
    cost = task_costs(trunk, spec, image_size=size)
    more = cost.macs
    if setting.place != "both":
        more -= 2 * trunk.width * setting.width * trunk.depth
    pass_of_its_own = ", in a pass of its own" if cost.own_pass else ""
    return f"{100 * more / cost.trunk_macs:.1f} %{pass_of_its_own}"
