"""Table 2: full, head, head + class, and 1, 5, 10, 20 cells that every token reads.

    python benchmarks/paper/table2.py

Processor seconds on one core, for 4 epochs and the test: 90 to 130 a row and seed on fashion, 50 to
75 on pets; three times that for 12 epochs. Expect, from one seed (a figure is known to one or two
points): fashion full 83.8, head 80.3, head + class 79.5, 5 cells 81.7 (83.4 after 12 epochs); pets
full 69.1, head 61.2, head + class 61.4, 5 cells 73.8. With 20 cells at the rate of 5 expect less.
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
