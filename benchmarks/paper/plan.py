"""Which runs there are, in the order of their value: time cuts off what matters least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cached
from runs import RATES, SEEDS, Final, Pilot, Setting

Job = Pilot | Final | cached.Together

#: Rows that train through the trunk, and the family whose rate they take.
ROWS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("full", {}, "full"),
    ("memory", {"cells": 5}, "memory"),
    ("class", {}, "memory"),
    ("memory", {"cells": 20}, "memory"),
    ("adapter", {}, "adapter"),
)
MORE: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("memory", {"cells": 1}, "memory"),
    ("memory", {"update": "propagate"}, "memory"),
    ("memory+adapter", {}, "adapter"),
    ("memory", {"cells": 10}, "memory"),
    ("memory", {"update": "add"}, "memory"),
)
RATES_OF = {"fashion": "fashion", "pets": "pets", "cifar10": "fashion", "flowers": "pets"}


def pilots(name: str) -> list[Job]:
    return [Pilot(Setting(name, family), lrs) for family, lrs in RATES.items()]


def finals(name: str, seed: int, rows: Sequence[tuple[str, dict[str, Any], str]]) -> list[Job]:
    return [
        Final(Setting(name, regime, **options), seed, Setting(RATES_OF[name], family))
        for regime, options, family in rows
    ]


def queue() -> list[Job]:
    jobs: list[Job] = []
    for name in ("fashion", "pets"):
        jobs += [cached.core(name), *pilots(name), *finals(name, 0, ROWS)]
    for name in ("flowers", "cifar10"):
        jobs += finals(name, 0, ROWS[1:2])
    jobs += [*finals("fashion", 0, MORE), *finals("pets", 0, MORE)]
    jobs += [cached.gap("fashion"), cached.views("fashion")]
    jobs += [cached.gap("pets"), cached.views("pets")]
    jobs += [cached.core("cifar10"), cached.core("flowers")]
    jobs += [*finals("fashion", 1, ROWS), *finals("pets", 1, ROWS)]
    jobs += [cached.large("pets"), cached.large("fashion")]
    jobs += [*finals("fashion", 1, MORE), *finals("pets", 1, MORE)]
    jobs += [cached.large("flowers"), cached.large("cifar10")]
    for name in ("fashion", "pets"):
        jobs += finals(name, 2, ROWS + MORE)
    for name in ("cifar10", "flowers"):
        for seed in SEEDS:
            jobs += finals(name, seed, ROWS + MORE)
    return list(dict.fromkeys(jobs))
