"""How time grows with tasks, images, cells and the trunk: measured, and as counted.

An exponent is the slope of log time over log size. The predicted one is the same slope, over the
same points, of the multiply-accumulates that `engram.costs` counts: a pass is a sum of a part that
grows and a part that does not, so neither slope has to be a whole number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.speed.plan import Plan, trunk_of
from engram.experiments.bench import PLAIN, Size
from engram.experiments.timing import Case, Say, Timing, exponent
from engram.tasks.costs import task_costs, trunk_macs
from engram.tasks.shape import TrunkShape

LAST = 3  # points of the second slope, where the part that grows weighs most


def growth(plan: Plan, say: Say) -> dict[str, Any]:
    trunk = trunk_of(plan.big)

    def pass_macs(size: Size, tasks: int, images: int, cells: int) -> int:
        spec = size.model(1, cells=cells).task("task0").spec
        shape = TrunkShape.of(size.trunk)
        costs = task_costs(shape, spec)
        return images * (trunk_macs(shape) + tasks * (costs.macs + costs.head_macs))

    size, batch, middle = plan.size(trunk, 60, least=3), plan.growth_batch, plan.middle
    pixels = size.pixels(batch)
    tasks = {n: Case(partial(size.model(n), pixels)) for n in plan.growth_tasks}
    plain = Case(partial(trunk, pixels))
    say(f"growth: tasks, batch {batch}")
    found: Mapping[Any, Timing] = _compare(size, {PLAIN: plain, **tasks}, say)
    told = {
        "tasks": _grown(
            plan.growth_tasks,
            [found[n] for n in plan.growth_tasks],
            [pass_macs(size, n, batch, size.cells) for n in plan.growth_tasks],
            f"{plan.big}, batch {batch}, {size.cells} cells",
        )
    }
    told["tasks"]["plain_seconds"] = found[PLAIN].seconds

    size = plan.size(trunk, 70, least=3)
    model = size.model(middle)
    images = {n: Case(partial(model, size.pixels(n))) for n in plan.growth_images}
    say(f"growth: images, {middle} tasks")
    told["images"] = _grown(
        plan.growth_images,
        list(_compare(size, images, say).values()),
        [pass_macs(size, middle, n, size.cells) for n in plan.growth_images],
        f"{plan.big}, {middle} tasks, {size.cells} cells",
    )

    size = plan.size(trunk, 30, least=3)
    cells = {n: Case(partial(size.model(middle, cells=n), pixels)) for n in plan.growth_cells}
    say(f"growth: cells, {middle} tasks, batch {batch}")
    told["cells"] = _grown(
        plan.growth_cells,
        list(_compare(size, cells, say).values()),
        [pass_macs(size, middle, batch, n) for n in plan.growth_cells],
        f"{plan.big}, {middle} tasks, batch {batch}",
    )

    sizes = {name: plan.size(trunk_of(name), 30, least=3) for name in plan.growth_trunks}
    cases = {
        name: Case(partial(each.model(middle), each.pixels(batch))) for name, each in sizes.items()
    }
    say(f"growth: trunks, {middle} tasks, batch {batch}")
    timings = _compare(next(iter(sizes.values())), cases, say)
    told["width of the trunk"] = _grown(
        [each.trunk.config.width for each in sizes.values()],
        [timings[name] for name in sizes],
        [pass_macs(each, middle, batch, each.cells) for each in sizes.values()],
        f"{', '.join(sizes)}, {middle} tasks, batch {batch}",
    )
    return {"last": LAST, "of": told}


def _compare(size: Size, cases: Mapping[Any, Case], say: Say) -> dict[Any, Timing]:
    with torch.inference_mode():
        return size.compare(cases, say)


def _grown(
    xs: Sequence[int], timings: Sequence[Timing], macs: Sequence[int], about: str
) -> dict[str, Any]:
    points = [
        {"x": x, "macs": count, **vars(timing)}
        for x, timing, count in zip(xs, timings, macs, strict=True)
    ]
    positive = [point for point in points if point["x"] > 0]  # a logarithm has no zero
    return {
        "about": about,
        "points": points,
        "measured": _slope(positive, "seconds"),
        "predicted": _slope(positive, "macs"),
        "measured_last": _slope(positive[-LAST:], "seconds"),
        "predicted_last": _slope(positive[-LAST:], "macs"),
    }


def _slope(points: Sequence[Mapping[str, Any]], what: str) -> float:
    return exponent([p["x"] for p in points], [p[what] for p in points])
