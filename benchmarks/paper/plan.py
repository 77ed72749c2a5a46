"""Which runs there are, in the order of their value: time cuts off what matters least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cached
import concatenation
import extension
from runs import SEEDS, Again, First, Setting

Job = First | Again | cached.Together | concatenation.Concatenation | extension.Extension

#: Rows that train through the trunk.
MAIN: tuple[dict[str, Any], ...] = (
    {"regime": "full"},
    {"regime": "memory"},
    {"regime": "class"},
    {"regime": "adapter"},
)
CELLS: tuple[dict[str, Any], ...] = tuple(
    {"regime": "memory", "cells": cells} for cells in (20, 1, 10)
)
MORE: tuple[dict[str, Any], ...] = (
    {"regime": "memory+adapter"},
    {"regime": "memory", "update": "propagate"},
    {"regime": "memory", "update": "add"},
)


def through(name: str, seed: int, rows: Sequence[dict[str, Any]]) -> list[Job]:
    job = First if seed == SEEDS[0] else Again
    return [job(Setting(name, **row), seed) for row in rows]


def queue() -> list[Job]:
    jobs: list[Job] = [cached.group("fashion", "rows", 0), *through("fashion", 0, MAIN[:2])]
    jobs += [cached.group("pets", "rows", 0), *through("pets", 0, MAIN)]
    jobs += [*through("fashion", 0, MAIN), cached.group("flowers", "five", 0)]
    jobs += [*through("flowers", 0, MAIN[1:2]), *concatenation.jobs()]
    jobs += [*through("fashion", 0, CELLS[:1]), *through("fashion", 0, MORE)]
    jobs += [cached.group(name, "rows", seed) for seed in (1, 2) for name in ("pets", "fashion")]
    jobs += [cached.group("fashion", "crops", 0), cached.group("fashion", "gap", 0)]
    jobs += [cached.group("fashion", "views", 0), cached.group("pets", "large", *SEEDS)]
    jobs += extension.jobs()
    jobs += [*through("pets", 0, CELLS[:1]), *through("fashion", 0, CELLS)]
    for seed in SEEDS[1:]:
        jobs += [*through("pets", seed, MAIN[:2]), *through("fashion", seed, MAIN[:2])]
    jobs += [*through("pets", 0, MORE), *through("pets", 0, CELLS)]
    jobs += [cached.group("pets", "gap", 0), cached.group("pets", "views", 0)]
    jobs += [cached.group(name, "rows", 0) for name in ("flowers", "cifar10")]
    for seed in SEEDS[1:]:
        jobs += [*through("pets", seed, MAIN), *through("fashion", seed, MAIN)]
        jobs += [cached.group(name, "rows", seed) for name in ("flowers", "cifar10")]
        jobs += [cached.group(name, what, seed) for what in ("gap", "views")
                 for name in ("fashion", "pets")]  # fmt: skip
    jobs += [*through("cifar10", 0, MAIN), *through("flowers", 0, MAIN)]
    for seed in SEEDS[1:]:
        jobs += through("pets", seed, CELLS + MORE) + through("fashion", seed, CELLS + MORE)
    jobs += [cached.group(name, "large", *SEEDS) for name in ("flowers", "fashion", "cifar10")]
    for seed in SEEDS:
        for name in ("cifar10", "flowers"):
            jobs += through(name, seed, MAIN + CELLS + MORE)
    return list(dict.fromkeys(jobs))


def jobs_for(settings: Sequence[Setting]) -> list[Job]:
    """What has to be done for these settings, and no more."""
    jobs: list[Job] = []
    for job in queue():
        if isinstance(job, cached.Together):
            wanted = tuple(one for one in job.settings if one in settings)
            jobs += [replace(job, settings=wanted)] if wanted else []
        elif isinstance(job, First | Again) and job.setting in settings:
            jobs.append(job)
    return jobs
