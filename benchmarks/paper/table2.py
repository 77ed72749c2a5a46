"""Table 2: full, head, head + class, and 1, 5, 10, 20 cells that every token reads.

python benchmarks/paper/table2.py
"""

from __future__ import annotations

from cached import cached_setting
from runs import Setting
from sets import SETS
from show import cell, markdown

COLUMNS = ("full", "head", "head + class", "1 cell", "5", "10", "20")


def settings(name: str) -> list[Setting]:
    memory = [Setting(name, "memory", cells=cells) for cells in (1, 5, 10, 20)]
    head = cached_setting(name, regime="head")
    return [Setting(name, "full"), head, Setting(name, "class"), *memory]


def table() -> list[str]:
    rows = [[name, *map(cell, settings(name))] for name in SETS]
    return markdown(("set", *COLUMNS), rows)


if __name__ == "__main__":
    from run import script

    script([one for name in SETS for one in settings(name)], table)
