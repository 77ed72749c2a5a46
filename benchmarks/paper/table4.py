"""Table 4: adapters, memory, and both, where every token passes through them; with their sizes.

    python benchmarks/paper/table4.py

About 240 processor seconds a row, rate and seed on fashion. Expect there memory 83.4 ± 0.4,
adapters 84.8 ± 0.5, both 85.3 ± 0.4; on pets memory 73.7 ± 0.6, adapters 73.4 ± 0.8, both
72.8 ± 1.5.
"""

from __future__ import annotations

from runs import Setting
from sets import SETS
from show import cell, markdown, parameters

ROWS = (
    ("memory, 5 cells", {"regime": "memory"}),
    ("adapters of width 32", {"regime": "adapter"}),
    ("both", {"regime": "memory+adapter"}),
)


def settings(name: str) -> list[Setting]:
    return [Setting(name, **row) for _, row in ROWS]  # type: ignore[arg-type]


def table() -> list[str]:
    rows = [
        [label, parameters(settings(SETS[0])[i]), *(cell(settings(name)[i]) for name in SETS)]
        for i, (label, _) in enumerate(ROWS)
    ]
    return markdown(("", "parameters without the head", *SETS), rows)


if __name__ == "__main__":
    from run import script

    script([one for name in SETS for one in settings(name)], table)
