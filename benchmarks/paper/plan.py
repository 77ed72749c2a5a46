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
        jobs += [cached.group(name, "rows", 0), *pilots(name), *finals(name, 0, ROWS[:2])]
    for name in ("fashion", "pets"):
        jobs += finals(name, 0, ROWS[2:])
    jobs += [cached.group("fashion", "gap", 0), cached.group("fashion", "views", 0)]
    jobs += finals("fashion", 0, MORE)
    for name in ("fashion", "pets"):
        jobs += [cached.group(name, "rows", 1), cached.group(name, "rows", 2)]
    jobs += [*finals("flowers", 0, ROWS[1:2]), *finals("cifar10", 0, ROWS[1:2])]
    jobs += [cached.group("pets", "gap", 0), cached.group("pets", "views", 0)]
    jobs += [*finals("pets", 0, MORE), cached.group("pets", "large", *SEEDS)]
    for name in ("fashion", "pets"):
        jobs += [cached.group(name, what, seed) for what in ("gap", "views") for seed in (1, 2)]
    jobs += [cached.group(name, "rows", *SEEDS) for name in ("flowers", "cifar10")]
    for seed in SEEDS[1:]:
        jobs += [*finals("fashion", seed, ROWS), *finals("pets", seed, ROWS)]
    jobs += [cached.group(name, "large", *SEEDS) for name in ("flowers", "fashion", "cifar10")]
    for seed in SEEDS[1:]:
        jobs += [*finals("fashion", seed, MORE), *finals("pets", seed, MORE)]
    for seed in SEEDS:
        for name in ("cifar10", "flowers"):
            jobs += finals(name, seed, ROWS + MORE)
    return list(dict.fromkeys(jobs))
