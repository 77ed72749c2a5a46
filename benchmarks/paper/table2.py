"""Table 2: full, head, head + class, and 1, 5, 10, 20 cells that every token reads.

    python benchmarks/paper/table2.py

Processor seconds on one core for 10 epochs: 220 to 300 a row, rate and seed on fashion, 120 to 170
on pets. Expect, from one seed (a figure is known to one or two points): fashion full 86.2, head
80.2, head + class 79.3, 5 cells 83.4, 20 cells 83.6; pets full 73.2, head 60.9, head + class 65.0,
5 cells 73.5.
"""

from __future__ import annotations

from cached import cached_setting
from runs import Setting
from sets import SETS
from show import cell, markdown

COLUMNS = ("full", "head", "head + class", "1 cell", "5", "10", "20")


def settings(name: str) -> list[Setting]:
    head = cached_setting(name, regime="head")
    memory = [Setting(name, "memory", cells=cells) for cells in (1, 5, 10, 20)]
    return [Setting(name, "full"), head, Setting(name, "class"), *memory]


def table() -> list[str]:
    return markdown(("set", *COLUMNS), [[name, *map(cell, settings(name))] for name in SETS])


if __name__ == "__main__":
    from run import script

    script([one for name in SETS for one in settings(name)], table)
