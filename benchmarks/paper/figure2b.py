"""Figure 2b: fresh cells, propagated cells, propagated with a learned addition; and the norm.

    python benchmarks/paper/figure2b.py

The first three with every token reading the cells. Cells that join before the layer's norm (the
paper) against behind it (the public re-implementations) in the masked regime, from the cache.
About 230 processor seconds a row and seed on fashion. Expect there fresh 83.4 ± 0.4, propagated
80.9 ± 0.3, with an addition 81.1 ± 0.3, and on pets 73.7 ± 0.6, 67.1 ± 0.2 and 67.3 ± 0.5; before
and behind the norm no difference (80.2 ± 0.2 and 80.2 ± 0.2, 63.5 ± 1.0 and 63.2 ± 0.4).
"""

from __future__ import annotations

from cached import cached_setting
from runs import Setting
from sets import SETS
from show import cell, markdown

COLUMNS = ("fresh", "propagated", "propagated + added", "masked, before the norm",
           "masked, behind the norm")  # fmt: skip


def settings(name: str) -> list[Setting]:
    updates = [Setting(name, "memory", update=update) for update in ("fresh", "propagate", "add")]
    before = cached_setting(name, regime="masked")
    return [*updates, before, cached_setting(name, regime="masked", after_norm=True)]


def table() -> list[str]:
    return markdown(("set", *COLUMNS), [[name, *map(cell, settings(name))] for name in SETS])


if __name__ == "__main__":
    from run import script

    script([one for name in SETS for one in settings(name)], table)
