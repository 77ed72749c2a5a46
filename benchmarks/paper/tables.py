"""Write the tables and plots of docs/results.md from the records.

    python benchmarks/paper/tables.py            writes them
    python benchmarks/paper/tables.py --check    exits with 1 if the page differs from the records

A table stands between <!-- table: NAME --> and <!-- end -->; the text around it is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import concatenation
import extension
import figure2b
import gap
import masked
import poster
import table2
import table4
import table5
import trial
from plan import queue
from runs import RECORDS, Setting, all_rates, chosen_in
from show import markdown, tests

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results.md"
IMAGES = ROOT / "docs" / "images"


def rates() -> list[str]:
    """The rates that were tried, with the validation accuracy of each."""
    rows = []
    for record in all_rates():
        best = chosen_in(record)
        tried = [
            f"{'**' if float(lr) == best else ''}{float(lr):g}: {100 * runs[0]['accuracy']:.1f}"
            f"{'**' if float(lr) == best else ''}"
            for lr, runs in sorted(record["val"].items(), key=lambda item: float(item[0]))
        ]
        rows.append([Setting.label(record), str(record["epochs"]), ", ".join(tried)])
    return markdown(("setting", "epochs", "rate: validation accuracy"), rows)


def state() -> list[str]:
    jobs = queue()
    done = sum(not job.missing() for job in jobs)
    return [f"{done} of {len(jobs)} runs of the list are done."]


TABLES: Mapping[str, Callable[[], list[str]]] = {
    "table2": table2.table,
    "poster": poster.table,
    "masked": masked.table,
    "table4": table4.table,
    "table5": table5.table,
    "concatenation": concatenation.table,
    "extension": extension.table,
    "figure2b": figure2b.table,
    "gap": gap.table,
    "trial": trial.table,
    "rates": rates,
    "state": state,
}


def filled(page: str) -> str:
    """The page with every table as the records have it."""

    def fill(found: re.Match[str]) -> str:
        lines = "\n".join(TABLES[found[1]]())
        return f"<!-- table: {found[1]} -->\n{lines}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)


# Plots


def draw() -> None:
    import matplotlib as mpl

    mpl.rcParams["svg.hashsalt"] = "engram"  # the same numbers give the same file
    _points(
        "results-order.svg",
        {
            "head": lambda n: table2.settings(n)[1],
            "masked 5": lambda n: poster.settings(n)[2],
            "masked + adapter 32": lambda n: poster.settings(n)[4],
            "masked + adapter 128": lambda n: poster.settings(n)[5],
            "head + class": lambda n: table2.settings(n)[2],
            "memory 5": lambda n: table2.settings(n)[4],
            "memory 20": lambda n: table2.settings(n)[6],
            "full": lambda n: table2.settings(n)[0],
        },
        ("fashion", "pets"),
    )


def _points(name: str, rows: Mapping[str, Callable[[str], Setting]], names: Sequence[str]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, data in zip(figure.subplots(1, len(names)), names, strict=True):
        found = {label: tests(setting(data)) for label, setting in rows.items()}
        found = {label: values for label, values in found.items() if values}
        means = [100 * sum(values) / len(values) for values in found.values()]
        colours = [
            "#4063d8" if "masked" in label or label == "head" else "#9aa3ad" for label in found
        ]
        axes.scatter(means, list(found), color=colours, s=46, zorder=2)
        axes.grid(axis="y", color="#e3e6ea", zorder=0)
        for at, (values, mean) in enumerate(zip(found.values(), means, strict=True)):
            axes.plot([100 * v for v in values], [at] * len(values), "|", color="black", zorder=3)
            axes.annotate(f"   {mean:.1f}", (100 * max(values), at), va="center", size=9)
        low = min(means, default=0)
        axes.set(title=data, xlim=(low - 3, max(means, default=100) + 4), xlabel="test accuracy, %")
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / name, metadata={"Date": None})


if __name__ == "__main__":
    page = PAGE.read_text()
    if "--check" in sys.argv:
        sys.exit(None if filled(page) == page else f"{PAGE} differs from {RECORDS}; run tables.py.")
    PAGE.write_text(filled(page))
    draw()
