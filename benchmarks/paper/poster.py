"""The poster's four curves: {full attention, masked} x {memory, no memory}, and masked + adapter.

    python benchmarks/paper/poster.py

Two rows are those of table2.py; the masked ones come from the cache, 340 processor seconds for all
rates of fashion and 150 for those of pets. Expect on fashion masked 80.2 ± 0.2, with adapters of
width 128 82.9 ± 1.2; on pets masked 63.5 ± 1.0, with adapters of width 32 64.0 ± 1.8; on CIFAR-10
74.7 ± 0.3 and on flowers 81.2 ± 0.8, where a head has 71.7 and 76.4.
"""

from __future__ import annotations

from cached import cached_setting
from runs import Setting
from sets import SETS
from show import cell, markdown

COLUMNS = ("full attention, 5 cells", "full attention, none", "masked, 5 cells", "masked, none",
           "masked + adapter 32", "masked + adapter 128", "head alone")  # fmt: skip


def settings(name: str) -> list[Setting]:
    return [
        Setting(name, "memory"),
        Setting(name, "class"),
        cached_setting(name, regime="masked"),
        cached_setting(name, regime="masked", cells=0),
        cached_setting(name, regime="masked+adapter", width=32),
        cached_setting(name, regime="masked+adapter", width=128),
        cached_setting(name, regime="head"),
    ]


def table() -> list[str]:
    return markdown(("set", *COLUMNS), [[name, *map(cell, settings(name))] for name in SETS])


if __name__ == "__main__":
    from run import script

    script([one for name in SETS for one in settings(name)], table)
