"""The masked regime by itself: 0 to 20 cells and adapters, at 112 and at 224 pixels.

    python benchmarks/paper/masked.py

At 224 pixels from up to 4,000 training images, at 112 from up to 1,000; all from the cache. Expect
from 79.8 to 81.0 on fashion at 112 pixels, whatever the number of cells, and adapters above that;
at 224 pixels from 85.4 to 87.5, with adapters 88.7 ± 0.7 (2,000 processor seconds for three seeds);
on pets at 224 pixels from 87.8 to 89.0, with six views 89.1 ± 0.5, and adapters below that (300
seconds, the views 700).
"""

from __future__ import annotations

from cached import GROUPS, Together, cached_setting, group
from runs import SEEDS, Setting
from sets import SETS
from show import cell, markdown

ROWS = (
    ("head", {"regime": "head"}),
    ("masked, no cells", {"regime": "masked", "cells": 0}),
    ("masked, 1 cell", {"regime": "masked", "cells": 1}),
    *((f"masked, {m} cells", {"regime": "masked", "cells": m}) for m in (5, 10, 20)),
    ("masked, 5 cells, 6 views", {"regime": "masked", "views": 6}),
    ("masked + adapter 32", {"regime": "masked+adapter", "width": 32}),
    ("masked + adapter 128", {"regime": "masked+adapter", "width": 128}),
)


def settings(name: str, what: str) -> list[Setting]:
    return [cached_setting(name, what, **row) for _, row in ROWS]


def jobs() -> list[Together]:
    groups = ("rows", "views", "large", "large views")
    return [group(name, what, *SEEDS) for what in groups for name in SETS]


def table() -> list[str]:
    head = [f"{name}, {GROUPS[what][0]} px" for what in ("rows", "large") for name in SETS]
    columns = [list(map(cell, settings(name, what))) for what in ("rows", "large") for name in SETS]
    rows = [[label, *(column[i] for column in columns)] for i, (label, _) in enumerate(ROWS)]
    return markdown(("", *head), rows)


if __name__ == "__main__":
    from run import script

    script(jobs(), table)
