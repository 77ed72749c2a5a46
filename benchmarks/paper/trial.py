"""A quick earlier trial, repeated on its own images and by its own rule, beside ours.

    python benchmarks/paper/trial.py

It took the first 1,000 training and the first 1,000 test images of Fashion-MNIST as they come, and
the best rate on those test images. Here the rows are trained on the same images, once with the rate
that is best on the test images, and once as everywhere else: other images, a rate that is chosen on
validation images. About 500 processor seconds from the cache and 1,500 through the trunk.
Expect head 81.1, masked with 5 cells 82.4, memory 85.8, full 87.6.
"""

from __future__ import annotations

from typing import Any

from cached import cached_setting
from gap import WIDE
from runs import Setting
from sets import FIRST
from show import cell, markdown

#: What the earlier trial had, in per cent.
ROWS: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("head", {"regime": "head"}, 80.5),
    ("masked, no cells", {"regime": "masked", "cells": 0}, 81.4),
    ("masked, 5 cells", {"regime": "masked"}, 82.1),
    ("masked, 5 cells, 6 views", {"regime": "masked", "views": 6}, 83.8),
    ("masked + adapter 32", {"regime": "masked+adapter", "width": 32}, 84.2),
    ("masked + adapter 128", WIDE, 85.2),
    ("masked + adapter 128, 6 views", {**WIDE, "views": 6}, 85.5),
    ("memory, 5 cells", {"regime": "memory"}, 85.0),
    ("memory, 20 cells", {"regime": "memory", "cells": 20}, 85.8),
    ("full", {"regime": "full"}, 87.1),
)


def setting(name: str, row: dict[str, Any]) -> Setting:
    through = row["regime"] in ("memory", "full")
    return Setting(name, **row) if through else cached_setting(name, **row)


def table() -> list[str]:
    rows = [
        [label, f"{earlier:.1f}", cell(setting(FIRST, row)), cell(setting("fashion", row))]
        for label, row, earlier in ROWS
    ]
    head = ("", "the earlier trial", "its images, its rule", "ours: fashion")
    return markdown(head, rows)


if __name__ == "__main__":
    from run import script

    script([setting(name, row) for name in (FIRST, "fashion") for _, row, _ in ROWS], table)
