"""Table 2: full, head, head + class, and 1, 5, 10, 20 cells that every token reads.

python benchmarks/paper/table2.py
"""

from __future__ import annotations

from cached import cached_setting
from plan import LONG
from runs import EPOCHS, Setting
from sets import SETS
from show import cell, markdown

COLUMNS = ("full", "head", "head + class", "1 cell", "5", "10", "20")


LONG_SETS = ("fashion", "pets")


def settings(name: str, epochs: int = EPOCHS) -> list[Setting]:
    def through(regime: str, cells: int = 0) -> Setting:
        return Setting(name, regime, cells=cells, epochs=epochs)

    head = cached_setting(name, regime="head")
    memory = [through("memory", cells) for cells in (1, 5, 10, 20)]
    return [through("full"), head, through("class"), *memory]


def table() -> list[str]:
    rows = [[f"{name}, {EPOCHS} epochs", *map(cell, settings(name))] for name in SETS]
    rows += [[f"{name}, {LONG} epochs", *map(cell, settings(name, LONG))] for name in LONG_SETS]
    return markdown(("set", *COLUMNS), rows)


if __name__ == "__main__":
    from run import script

    longer = [one for name in LONG_SETS for one in settings(name, LONG)]
    script([*(one for name in SETS for one in settings(name)), *longer], table)
