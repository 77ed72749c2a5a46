"""Which runs there are, in the order of their value: time cuts off what matters least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cached
import concatenation
import extension
from runs import SEEDS, Setting, Through
from sets import FIRST

Job = Through | cached.Together | concatenation.Concatenation | extension.Extension

#: Rows that train through the trunk, each at the best of its rates ...
MAIN: tuple[dict[str, Any], ...] = (
    {"regime": "full"},
    {"regime": "memory"},
    {"regime": "class"},
    {"regime": "adapter"},
)
MANY: tuple[dict[str, Any], ...] = ({"regime": "memory", "cells": 20},)
#: ... and rows that take the rate of one of those.
MORE: tuple[dict[str, Any], ...] = (
    {"regime": "memory+adapter", "like": {"regime": "adapter"}},
    {"regime": "memory", "update": "propagate", "like": {"regime": "memory"}},
    {"regime": "memory", "update": "add", "like": {"regime": "memory"}},
    {"regime": "memory", "cells": 1, "like": {"regime": "memory"}},
    {"regime": "memory", "cells": 10, "like": {"regime": "memory", "cells": 20}},
)


def through(name: str, seed: int, rows: Sequence[dict[str, Any]]) -> list[Job]:
    jobs: list[Job] = []
    for row in rows:
        like = Setting(name, **row["like"]) if "like" in row else None
        setting = Setting(name, **{key: value for key, value in row.items() if key != "like"})
        jobs.append(Through(setting, seed, like))
    return jobs


def queue() -> list[Job]:
    jobs: list[Job] = [cached.group("fashion", "rows", 0), *through("fashion", 0, MAIN)]
    jobs += [*through("pets", 0, MAIN), cached.group("flowers", "five", 0)]
    jobs += [*through("flowers", 0, MAIN[1:2]), *concatenation.jobs()]
    jobs += [cached.group("pets", "rows", 0), *through("fashion", 0, MANY)]
    jobs += [cached.group(name, "rows", seed) for seed in (1, 2) for name in ("pets", "fashion")]
    jobs += [*through("fashion", 0, MORE), *through("pets", 0, MANY)]
    jobs += [cached.group("fashion", "crops", 0), cached.group("fashion", "gap", 0)]
    jobs += [cached.group("fashion", "views", 0), cached.group("pets", "large", *SEEDS)]
    jobs += extension.jobs()
    for seed in SEEDS[1:]:
        jobs += [*through("pets", seed, MAIN[:2]), *through("fashion", seed, MAIN[:2])]
    jobs += [cached.group(FIRST, "rows", 0), cached.group(FIRST, "views", 0)]
    jobs += [*through(FIRST, 0, MAIN[:2]), *through(FIRST, 0, MANY)]
    jobs += [*through("pets", 0, MORE), cached.group("pets", "gap", 0)]
    jobs += [cached.group("pets", "views", 0)]
    jobs += [cached.group(name, "rows", 0) for name in ("flowers", "cifar10")]
    jobs += [cached.group("flowers", "large", *SEEDS)]
    for seed in SEEDS[1:]:
        jobs += [*through("pets", seed, MAIN), *through("fashion", seed, MAIN)]
        jobs += [cached.group(name, "rows", seed) for name in ("flowers", "cifar10")]
    jobs += [cached.group("fashion", "large", *SEEDS)]
    for seed in SEEDS[1:]:
        jobs += through("pets", seed, MANY + MORE) + through("fashion", seed, MANY + MORE)
    jobs += [cached.group("pets", "large views", *SEEDS), cached.group("cifar10", "large", *SEEDS)]
    jobs += [
        cached.group(name, "views", seed) for seed in SEEDS[1:] for name in ("pets", "fashion")
    ]
    jobs += [cached.group(name, "gap", seed) for seed in SEEDS[1:] for name in ("pets", "fashion")]
    jobs += [*through("flowers", 0, MAIN), *through("cifar10", 0, MAIN)]
    jobs += [cached.group(name, "norm", *SEEDS) for name in ("cifar10", "flowers")]
    jobs += [cached.group("flowers", "views", 0), cached.group("flowers", "large views", *SEEDS)]
    for seed in SEEDS:
        for name in ("cifar10", "flowers"):
            jobs += through(name, seed, MAIN + MANY + MORE)
    return list(dict.fromkeys(jobs))


def jobs_for(settings: Sequence[Setting]) -> list[Job]:
    """What has to be done for these settings, and no more."""
    jobs: list[Job] = []
    runs = [job for job in queue() if isinstance(job, Through)]
    likes = {job.like for job in runs if job.setting in settings}
    for job in queue():
        if isinstance(job, cached.Together):
            wanted = tuple(one for one in job.settings if one in settings)
            jobs += [replace(job, settings=wanted)] if wanted else []
        elif isinstance(job, Through):
            rate_of_others = job.chooses and job.setting in likes
            jobs += [job] if job.setting in settings or rate_of_others else []
    return jobs
