"""Which runs there are, in the order of their value: time cuts off what matters least."""

from __future__ import annotations

from runs import RATES, SEEDS, Final, Pilot, Setting

#: Rows that train through the trunk, and the row whose rates they share.
THROUGH_TRUNK: tuple[tuple[str, dict[str, object], str], ...] = (
    ("full", {}, "full"),
    ("memory", {"cells": 5}, "memory"),
    ("class", {}, "class"),
    ("memory", {"cells": 20}, "memory"),
    ("adapter", {}, "adapter"),
    ("memory", {"cells": 1}, "memory"),
    ("memory", {"cells": 10}, "memory"),
    ("memory+adapter", {}, "adapter"),
    ("memory", {"update": "propagate"}, "memory"),
    ("memory", {"update": "add"}, "memory"),
)


def pilots(name: str) -> list[Pilot]:
    return [Pilot(Setting(name, regime), lrs) for regime, lrs in RATES.items()]


def finals(name: str, seed: int, rates_of: str | None = None) -> list[Final]:
    return [
        Final(Setting(name, regime, **options), seed, Setting(rates_of or name, family))  # type: ignore[arg-type]
        for regime, options, family in THROUGH_TRUNK
    ]


def queue() -> list[Pilot | Final]:
    jobs: list[Pilot | Final] = []
    for name in ("fashion", "pets"):
        jobs += [*pilots(name), *finals(name, 0)]
    for seed in SEEDS[1:]:
        for name in ("fashion", "pets"):
            jobs += finals(name, seed)
    for name, rates_of in (("cifar10", "fashion"), ("flowers", "pets")):
        jobs += finals(name, 0, rates_of)
    return jobs
