"""All runs in the order of their value, so that stopping early loses what matters least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.paper.runs import auto, concatenation, extension
from benchmarks.paper.runs.auto import UnchangedRun
from benchmarks.paper.runs.datasets import CLIP, DINOV2, FIRST, MORE_SETS, SETS
from benchmarks.paper.runs.from_cache import BASE_SETS, CachedRuns, cached_runs
from benchmarks.paper.runs.lora import LoraRun
from benchmarks.paper.runs.settings import SEEDS, Setting
from benchmarks.paper.runs.through_backbone import BackboneRun
from benchmarks.paper.worker import Job

#: Rows that train through the backbone, each at the best of its own learning rates.
MAIN: tuple[dict[str, Any], ...] = (
    {"regime": "full"},
    {"regime": "memory"},
    {"regime": "class"},
    {"regime": "adapter"},
)
MANY_CELLS: tuple[dict[str, Any], ...] = ({"regime": "memory", "cells": 20},)
#: Rows that take the learning rate of another row.
MORE: tuple[dict[str, Any], ...] = (
    {"regime": "memory+adapter", "like": {"regime": "adapter"}},
    {"regime": "memory", "update": "propagate", "like": {"regime": "memory"}},
    {"regime": "memory", "update": "add", "like": {"regime": "memory"}},
    {"regime": "memory", "cells": 1, "like": {"regime": "memory"}},
    {"regime": "memory", "cells": 10, "like": {"regime": "memory", "cells": 20}},
)


def backbone_runs(dataset: str, seed: int, rows: Sequence[dict[str, Any]]) -> list[Job]:
    jobs: list[Job] = []
    for row in rows:
        like = Setting(dataset, **row["like"]) if "like" in row else None
        setting = Setting(dataset, **{key: value for key, value in row.items() if key != "like"})
        jobs.append(BackboneRun(setting, seed, like))
    return jobs


#: At 224 pixels: what leaves the backbone unchanged, what does not, and whose rate a set takes if
#: it does not choose its own.
UNCHANGED = ("auto", "head", "readout", "masked", "masked+adapter", "side", "pooling")
OTHERS = ("lora", "full", "memory", "adapter")
RATE_OF = {"flowers": "pets", "fashion": "cifar10"}


def unchanged_setting(dataset: str, regime: str) -> Setting:
    return large_setting(dataset, regime, epochs=auto.EPOCHS, batch=auto.BATCH)


def small_auto(dataset: str) -> Setting:
    """`auto` at 112 pixels, with the images of the paper's tables."""
    return Setting(dataset, "auto", epochs=auto.EPOCHS, batch=auto.BATCH)


def other_setting(dataset: str, regime: str) -> Setting:
    return large_setting(dataset, regime, precision="bf16")


def large_setting(dataset: str, regime: str, **row: Any) -> Setting:
    """A row at 224 pixels, with 2,000 images of fashion and at most 1,000 of the others."""
    images = 2_000 if dataset == "fashion" else 1_000
    return Setting(dataset, regime, **{"pixels": 224, "images": images, **row})


def large_runs(seed: int) -> list[Job]:
    """Auto, then training through the backbone, then every regime; sets that choose rates first."""
    order = ("pets", "flowers", "cifar10", "fashion", *MORE_SETS)
    unchanged: list[Job] = [
        UnchangedRun(unchanged_setting(dataset, regime), seed)
        for regime in UNCHANGED
        for dataset in order
    ]
    others: list[Job] = []
    for dataset in order:
        first = RATE_OF.get(dataset)
        for regime in OTHERS:
            like = None if first is None else other_setting(first, regime)
            run = LoraRun if regime == "lora" else BackboneRun
            others.append(run(other_setting(dataset, regime), seed, like))
    return [*unchanged[: len(order)], *others, *unchanged[len(order) :]]


#: Sets of the tables of other backbones; LoRA and full tuning run on the first three of DINOV2's.
BACKBONE_SETS = {
    DINOV2: ("textures", "waste", "bloodcells", *SETS, "leaves", "xray"),
    CLIP: ("textures", "waste", "bloodcells", "pets", "flowers"),
}
CHANGED_SETS = BACKBONE_SETS[DINOV2][:3]


def backbone_setting(backbone: str, dataset: str, regime: str) -> Setting:
    setting = unchanged_setting if regime in UNCHANGED else other_setting
    return replace(setting(dataset, regime), backbone=backbone)


def larger_runs(backbone: str, seed: int) -> list[Job]:
    """Auto and every regime that shares the pass, with a larger backbone, which has to be there."""
    return [
        UnchangedRun(backbone_setting(backbone, dataset, regime), seed)
        for regime in UNCHANGED
        for dataset in BACKBONE_SETS[backbone]
    ]


def changed_runs() -> list[Job]:
    """One seed of LoRA and full tuning with a DINOv2-small."""
    return [
        run(backbone_setting(DINOV2, name, regime), 0)
        for regime, run in (("lora", LoraRun), ("full", BackboneRun))
        for name in CHANGED_SETS
    ]


def all_jobs() -> list[Job]:
    jobs: list[Job] = [cached_runs("fashion", "rows", 0), *backbone_runs("fashion", 0, MAIN)]
    jobs += [*backbone_runs("pets", 0, MAIN), cached_runs("flowers", "five", 0)]
    jobs += [*backbone_runs("flowers", 0, MAIN[1:2]), *concatenation.jobs()]
    jobs += [cached_runs("pets", "rows", 0), *backbone_runs("fashion", 0, MANY_CELLS)]
    jobs += [cached_runs(name, "rows", seed) for seed in (1, 2) for name in ("pets", "fashion")]
    jobs += [*backbone_runs("fashion", 0, MORE), *backbone_runs("pets", 0, MANY_CELLS)]
    jobs += [cached_runs("fashion", "crops", 0), cached_runs("fashion", "gap", 0)]
    jobs += [cached_runs("fashion", "views", 0), cached_runs("pets", "large", *SEEDS)]
    jobs += extension.jobs()
    for seed in SEEDS[1:]:
        jobs += [*backbone_runs("pets", seed, MAIN[:2]), *backbone_runs("fashion", seed, MAIN[:2])]
    jobs += [cached_runs(FIRST, "rows", 0), cached_runs(FIRST, "views", 0)]
    jobs += [*backbone_runs(FIRST, 0, MAIN[:2]), *backbone_runs(FIRST, 0, MANY_CELLS)]
    jobs += [*backbone_runs("pets", 0, MORE), cached_runs("pets", "gap", 0)]
    jobs += [cached_runs("pets", "views", 0)]
    jobs += [cached_runs(name, "rows", 0) for name in ("flowers", "cifar10")]
    jobs += [cached_runs("flowers", "large", *SEEDS)]
    for seed in SEEDS[1:]:
        jobs += [*backbone_runs("pets", seed, MAIN), *backbone_runs("fashion", seed, MAIN)]
        jobs += [cached_runs(name, "rows", seed) for name in ("flowers", "cifar10")]
    jobs += [cached_runs("fashion", "large", *SEEDS)]
    for seed in SEEDS[1:]:
        for name in ("pets", "fashion"):
            jobs += backbone_runs(name, seed, MANY_CELLS + MORE)
    jobs += [cached_runs("pets", "large views", *SEEDS), cached_runs("cifar10", "large", *SEEDS)]
    jobs += [cached_runs(name, "views", seed) for seed in SEEDS[1:] for name in ("pets", "fashion")]
    jobs += [cached_runs(name, "gap", seed) for seed in SEEDS[1:] for name in ("pets", "fashion")]
    jobs += [*backbone_runs("flowers", 0, MAIN), *backbone_runs("cifar10", 0, MAIN)]
    jobs += [cached_runs(name, "norm", *SEEDS) for name in ("cifar10", "flowers")]
    jobs += [cached_runs("flowers", "views", 0), cached_runs("flowers", "large views", *SEEDS)]
    for seed in SEEDS:
        for name in ("cifar10", "flowers"):
            jobs += backbone_runs(name, seed, MAIN + MANY_CELLS + MORE)
    jobs += [job for seed in SEEDS for job in large_runs(seed)]
    jobs += [UnchangedRun(small_auto(name), seed) for seed in SEEDS for name in SETS]
    jobs += [*larger_runs(DINOV2, 0), *larger_runs(CLIP, 0), *changed_runs()]
    jobs += [cached_runs(name, "base", 0) for name in BASE_SETS]
    jobs += [job for seed in SEEDS[1:] for job in larger_runs(DINOV2, seed)]
    return list(dict.fromkeys(jobs))


def jobs_for(settings: Sequence[Setting]) -> list[Job]:
    """The jobs that these settings need, and no more."""
    jobs: list[Job] = []
    runs = [job for job in all_jobs() if isinstance(job, BackboneRun)]
    likes = {job.like for job in runs if job.setting in settings}
    for job in all_jobs():
        if isinstance(job, CachedRuns):
            wanted = tuple(one for one in job.settings if one in settings)
            jobs += [replace(job, settings=wanted)] if wanted else []
        elif isinstance(job, BackboneRun):
            rate_of_others = job.chooses and job.setting in likes
            jobs += [job] if job.setting in settings or rate_of_others else []
        elif isinstance(job, UnchangedRun):
            jobs += [job] if job.setting in settings else []
    return jobs
