"""Which runs there are, in the order of their value: time cuts off what matters least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cached
import concatenation
import extension
from runs import RATES, SEEDS, Final, Pilot, Setting

Job = Pilot | Final | cached.Together | concatenation.Concatenation | extension.Extension

#: Rows that train through the trunk, and the family whose rate they take.
ROWS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("full", {}, "full"),
    ("memory", {"cells": 5}, "memory"),
    ("class", {}, "memory"),
    ("memory", {"cells": 20}, "memory"),
    ("adapter", {}, "adapter"),
)
MORE: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("memory", {"update": "propagate"}, "memory"),
    ("memory+adapter", {}, "adapter"),
    ("memory", {"cells": 1}, "memory"),
    ("memory", {"cells": 10}, "memory"),
    ("memory", {"update": "add"}, "memory"),
)
LONG = 12  # epochs
#: The set on whose validation images the rate of a family was chosen.
RATES_OF = {
    "fashion": {"full": "fashion", "memory": "fashion", "adapter": "fashion"},
    "pets": {"full": "pets", "memory": "pets", "adapter": "fashion"},
    "cifar10": {"full": "fashion", "memory": "fashion", "adapter": "fashion"},
    "flowers": {"full": "pets", "memory": "pets", "adapter": "fashion"},
}


def pilots(name: str) -> list[Job]:
    return [
        Pilot(Setting(name, family), lrs)
        for family, lrs in RATES.items()
        if RATES_OF[name][family] == name
    ]


def finals(name: str, seed: int, rows: Sequence[tuple[str, dict[str, Any], str]]) -> list[Job]:
    return [
        Final(Setting(name, regime, **options), seed, Setting(RATES_OF[name][family], family))
        for regime, options, family in rows
    ]


def longer(name: str, seed: int, rows: Sequence[tuple[str, dict[str, Any], str]]) -> list[Job]:
    """The same rows with three times the epochs."""
    return finals(name, seed, [(r, {**options, "epochs": LONG}, f) for r, options, f in rows])


def queue() -> list[Job]:
    jobs: list[Job] = [cached.group("fashion", "rows", 0), *pilots("fashion")]
    jobs += [*finals("fashion", 0, ROWS[:2]), cached.group("pets", "lite", 0)]
    jobs += [*pilots("pets"), *finals("pets", 0, ROWS[:2])]
    jobs += [*finals("fashion", 0, ROWS[2:3]), cached.group("fashion", "crops", 0)]
    jobs += [*finals("fashion", 0, ROWS[4:]), cached.group("fashion", "gap", 0)]
    jobs += [*extension.jobs()[:2], *finals("fashion", 0, MORE[:1])]
    jobs += finals("flowers", 0, ROWS[1:2])
    jobs += [cached.group("fashion", "five", 1), cached.group("pets", "five", 1)]
    jobs += [cached.group("flowers", "five", 0), *concatenation.jobs()]
    jobs += [*finals("pets", 0, ROWS[2:3]), *finals("fashion", 0, ROWS[2:] + MORE[:2])]
    jobs += [*longer("fashion", 0, ROWS[:2]), *finals("pets", 0, ROWS[2:])]
    jobs += [cached.group("fashion", "views", 0), *finals("pets", 1, ROWS[:2])]
    jobs += [cached.group(name, "rows", 1) for name in ("pets", "fashion")]
    jobs += finals("fashion", 1, ROWS)
    jobs += [*longer("pets", 0, ROWS[:2]), cached.group("pets", "large", *SEEDS)]
    jobs += [*finals("pets", 1, ROWS), cached.group("pets", "rows", 0)]
    jobs += [cached.group(name, "rows", seed) for seed in (1, 2) for name in ("fashion", "pets")]
    jobs += [*finals("fashion", 0, MORE), *longer("fashion", 0, ROWS[2:])]
    jobs += [cached.group("pets", "views", 0), cached.group("pets", "gap", 0)]
    jobs += [*finals("fashion", 2, ROWS), *finals("pets", 2, ROWS)]
    jobs += [*extension.jobs(), *finals("pets", 0, MORE)]
    jobs += [cached.group(name, "rows", 0) for name in ("flowers", "cifar10")]
    for name in ("fashion", "pets"):
        jobs += [cached.group(name, what, seed) for what in ("gap", "views") for seed in (1, 2)]
    for seed in SEEDS[1:]:
        jobs += [*longer("fashion", seed, ROWS), *longer("pets", seed, ROWS)]
        jobs += [*finals("fashion", seed, MORE), *finals("pets", seed, MORE)]
    jobs += [cached.group(name, "rows", 1, 2) for name in ("flowers", "cifar10")]
    jobs += [cached.group(name, "large", *SEEDS) for name in ("flowers", "fashion", "cifar10")]
    for seed in SEEDS:
        for name in ("cifar10", "flowers"):
            jobs += finals(name, seed, ROWS + MORE)
    return list(dict.fromkeys(jobs))


def jobs_for(settings: Sequence[Setting]) -> list[Job]:
    """What has to be done for these settings, and no more."""
    jobs: list[Job] = []
    pilots_needed = {
        job.pilot for job in queue() if isinstance(job, Final) and job.setting in settings
    }
    for job in queue():
        if isinstance(job, cached.Together):
            wanted = tuple(one for one in job.settings if one in settings)
            jobs += [replace(job, settings=wanted)] if wanted else []
        elif (isinstance(job, Final) and job.setting in settings) or (
            isinstance(job, Pilot) and job.setting in pilots_needed
        ):
            jobs.append(job)
    return jobs
