"""Table 2: full, head, head + class, and 1, 5, 10, 20 cells that every token reads.

    python benchmarks/paper/table2.py

Processor seconds on one core for 10 epochs: 220 to 300 a row, rate and seed on fashion, 120 to 170
on pets. Expect on fashion full 85.5 ± 0.6, head 80.2 ± 0.1, head + class 79.5 ± 0.3, with 1 cell
82.0 ± 1.2, 5 cells 83.4 ± 0.4, 20 cells 83.1 ± 1.5; on pets full 71.6 ± 1.5, head 60.9 ± 0.5,
head + class 64.6 ± 0.4, 1 cell 71.1 ± 0.3, 5 cells 73.7 ± 0.6, 20 cells 68.8 ± 2.3.
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
