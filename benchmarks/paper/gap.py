"""What closes part of the gap between masked and full attention without breaking a promise.

    python benchmarks/paper/gap.py

Adapters on the task's own stream (their width and place), cached augmented views, and the head's
learning rate beside that of the rest; with what each costs a task. About 200 processor seconds for
the variations and 190 for the views of fashion. Expect adapters to be worth one to three points
there, and random crops to cost some; on pets six views to be worth five points.
"""

from __future__ import annotations

from typing import Any

import sets
from cached import cached_setting
from runs import Setting
from show import cell, macs, markdown, parameters

SETS = ("fashion", "pets")
WIDE: dict[str, Any] = {"regime": "masked+adapter", "width": 128}
ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("head alone", {"regime": "head"}),
    ("masked, 0 cells", {"regime": "masked", "cells": 0}),
    ("masked, 5 cells", {"regime": "masked"}),
    ("masked, 20 cells", {"regime": "masked", "cells": 20}),
    ("+ head at 4 times the rate", {"regime": "masked", "head_rate": 4.0}),
    ("+ head at a quarter of the rate", {"regime": "masked", "head_rate": 0.25}),
    ("+ 6 cached views", {"regime": "masked", "views": 6}),
    ("+ 6 cached views, crops", {"regime": "masked", "views": 6, "augment": "inception"}),
    ("+ adapters, width 8", {"regime": "masked+adapter", "width": 8}),
    ("+ adapters, width 32", {"regime": "masked+adapter", "width": 32}),
    ("+ adapters, width 64, beside attention only",
     {"regime": "masked+adapter", "width": 64, "place": "attention"}),
    ("+ adapters, width 64, beside the MLP only",
     {"regime": "masked+adapter", "width": 64, "place": "mlp"}),
    ("+ adapters, width 128", WIDE),
    ("+ adapters, width 32, 6 cached views",
     {"regime": "masked+adapter", "width": 32, "views": 6}),
    ("+ adapters, width 128, 6 cached views", {**WIDE, "views": 6}),
    ("+ adapters, width 128, 6 cached views, crops",
     {**WIDE, "views": 6, "augment": "inception"}),
)  # fmt: skip


def settings(name: str) -> list[Setting]:
    return [cached_setting(name, **row) for _, row in ROWS]


def beside(name: str) -> list[Setting]:
    """Full attention, to compare with."""
    return [Setting(name, "memory"), Setting(name, "memory", cells=20), Setting(name, "full")]


def table() -> list[str]:
    labels = [label for label, _ in ROWS]
    labels += ["*memory, 5 cells: every token*", "*memory, 20 cells: every token*", "*full tuning*"]
    first = [*settings(SETS[0]), *beside(SETS[0])]
    shape = sets.shape()
    rows = [
        [
            label,
            *(cell([*settings(name), *beside(name)][i]) for name in SETS),
            parameters(first[i]),
            macs(first[i], shape),
        ]
        for i, label in enumerate(labels)
    ]
    return markdown(("", *SETS, "parameters", "MACs more than the trunk's pass"), rows)


if __name__ == "__main__":
    from run import script

    script([one for name in SETS for one in (*settings(name), *beside(name))], table)
