"""How time grows with tasks, images, cells and the backbone, measured and predicted.

An exponent is the slope of log time over log size. The predicted one is the same slope of the
multiply-accumulates that `engram.tasks.costs` counts, over the same points. A pass has a part that
grows and a part that does not, so neither slope has to be an integer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.speed.plan import Plan, backbone_of
from engram.backbones.shape import BackboneShape
from engram.experiments.bench import PLAIN, Workload
from engram.experiments.timing import Case, Say, Timing
from engram.methods import Masked
from engram.tasks.costs import backbone_macs, task_costs
from engram.tasks.spec import TaskSpec, class_names
from engram.vit import ViT

LAST = 3  # number of points of the second slope, where the growing part dominates
Document = dict[str, Any]


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The p of the power law y = c x^p nearest to the points: the slope of log y over log x."""
    fit = statistics.linear_regression([math.log(x) for x in xs], [math.log(y) for y in ys])
    return fit.slope


def growth(plan: Plan, say: Say) -> Document:
    backbone = backbone_of(plan.big)
    grown = {
        "tasks": _over_tasks(plan, backbone, say),
        "images": _over_images(plan, backbone, say),
        "cells": _over_cells(plan, backbone, say),
        "width of the backbone": _over_backbones(plan, say),
    }
    return {"last": LAST, "of": grown}


def _over_tasks(plan: Plan, backbone: ViT, say: Say) -> Document:
    workload, batch, counts = (
        plan.workload(backbone, 60, least=3),
        plan.growth_batch,
        plan.growth_tasks,
    )
    pixels = workload.pixels(batch)
    tasks = {n: Case(partial(workload.model(n), pixels)) for n in counts}
    plain = Case(partial(backbone, pixels))
    say(f"growth: tasks, batch {batch}")
    found: Mapping[Any, Timing] = _compare(workload, {PLAIN: plain, **tasks}, say)
    grown = _fitted(
        counts,
        [found[n] for n in counts],
        [_macs(workload, n, batch, workload.cells) for n in counts],
        f"{plan.big}, batch {batch}, {workload.cells} cells",
    )
    return {**grown, "plain_seconds": found[PLAIN].seconds}


def _over_images(plan: Plan, backbone: ViT, say: Say) -> Document:
    workload, tasks = plan.workload(backbone, 70, least=3), plan.middle
    model = workload.model(tasks)
    cases = {n: Case(partial(model, workload.pixels(n))) for n in plan.growth_images}
    say(f"growth: images, {tasks} tasks")
    return _fitted(
        plan.growth_images,
        list(_compare(workload, cases, say).values()),
        [_macs(workload, tasks, n, workload.cells) for n in plan.growth_images],
        f"{plan.big}, {tasks} tasks, {workload.cells} cells",
    )


def _over_cells(plan: Plan, backbone: ViT, say: Say) -> Document:
    workload, tasks, batch = plan.workload(backbone, 30, least=3), plan.middle, plan.growth_batch
    pixels = workload.pixels(batch)
    cases = {n: Case(partial(workload.model(tasks, cells=n), pixels)) for n in plan.growth_cells}
    say(f"growth: cells, {tasks} tasks, batch {batch}")
    return _fitted(
        plan.growth_cells,
        list(_compare(workload, cases, say).values()),
        [_macs(workload, tasks, batch, n) for n in plan.growth_cells],
        f"{plan.big}, {tasks} tasks, batch {batch}",
    )


def _over_backbones(plan: Plan, say: Say) -> Document:
    tasks, batch = plan.middle, plan.growth_batch
    workloads = {
        name: plan.workload(backbone_of(name), 30, least=3) for name in plan.growth_backbones
    }
    cases = {
        name: Case(partial(each.model(tasks), each.pixels(batch)))
        for name, each in workloads.items()
    }
    say(f"growth: backbones, {tasks} tasks, batch {batch}")
    return _fitted(
        [each.backbone.config.width for each in workloads.values()],
        list(_compare(next(iter(workloads.values())), cases, say).values()),
        [_macs(each, tasks, batch, each.cells) for each in workloads.values()],
        f"{', '.join(workloads)}, {tasks} tasks, batch {batch}",
    )


def _compare(workload: Workload, cases: Mapping[Any, Case], say: Say) -> dict[Any, Timing]:
    with torch.inference_mode():
        return workload.compare(cases, say)


def _macs(workload: Workload, tasks: int, images: int, cells: int) -> int:
    """The multiply-accumulates of one pass."""
    shape = BackboneShape.measure(workload.backbone)
    spec = TaskSpec("task", class_names(workload.classes), method=Masked(cells))
    costs = task_costs(shape, spec)
    return images * (backbone_macs(shape) + tasks * (costs.macs + costs.head_macs))


def _fitted(
    xs: Sequence[int], timings: Sequence[Timing], macs: Sequence[int], about: str
) -> Document:
    """The points, and the slopes through all of them and through the last ones."""
    points = [
        {"x": x, "macs": count, **vars(timing)}
        for x, timing, count in zip(xs, timings, macs, strict=True)
    ]
    positive = [point for point in points if point["x"] > 0]  # zero has no logarithm
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
