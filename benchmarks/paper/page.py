"""The tables and the plot of docs/results.md, from the records.

A table stands between <!-- table: NAME --> and <!-- end -->; the text around it is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.paper.experiments import EXPERIMENTS, poster_settings, table2_settings
from benchmarks.paper.formatting import accuracies
from benchmarks.paper.queue import all_jobs
from benchmarks.paper.records import RATES
from benchmarks.paper.runs.settings import Setting, best_rate
from benchmarks.paths import ROOT
from benchmarks.report import markdown_table
from engram.util.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = ROOT / "docs" / "results.md"
PLOT = ROOT / "docs" / "images" / "results-order.svg"


def up_to_date() -> bool:
    """Whether the tables of the page are those of the records."""
    page = PAGE.read_text(encoding="utf-8")
    return filled(page) == page


def write() -> None:
    write_atomically(PAGE, filled(PAGE.read_text(encoding="utf-8")).encode())
    draw()


def filled(page: str) -> str:
    """The page with every table as in the records."""

    def fill(found: re.Match[str]) -> str:
        lines = "\n".join(TABLES[found[1]]())
        return f"<!-- table: {found[1]} -->\n{lines}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)


def rates() -> list[str]:
    """The learning rates that were tried, with the validation accuracy of each."""
    rows = []
    for record in RATES.all():
        best = best_rate(record)
        tried = []
        for lr, runs in sorted(record["val"].items(), key=lambda item: float(item[0])):
            bold = "**" if float(lr) == best else ""
            tried.append(f"{bold}{float(lr):g}: {100 * runs[0]['accuracy']:.1f}{bold}")
        rows.append([Setting.label(record), str(record["epochs"]), ", ".join(tried)])
    return markdown_table(("setting", "epochs", "learning rate: validation accuracy"), rows)


def state() -> list[str]:
    jobs = all_jobs()
    done = sum(not job.missing() for job in jobs)
    return [f"{done} of {len(jobs)} runs of the list are done."]


TABLES: Mapping[str, Callable[[], list[str]]] = {
    **{name: experiment.table for name, experiment in EXPERIMENTS.items()},
    "rates": rates,
    "state": state,
}


# The plot


def draw() -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "engram"  # the same numbers give the same file
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    names = ("fashion", "pets")
    for axes, name in zip(figure.subplots(1, len(names)), names, strict=True):
        found = {label: accuracies(setting) for label, setting in _plotted(name).items()}
        _draw_points(axes, name, {label: values for label, values in found.items() if values})
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, metadata={"Date": None})


def _plotted(dataset: str) -> dict[str, Setting]:
    table2, poster = table2_settings(dataset), poster_settings(dataset)
    return {
        "head": table2[1],
        "masked 5": poster[2],
        "masked + adapter 32": poster[4],
        "masked + adapter 128": poster[5],
        "head + class": table2[2],
        "memory 5": table2[4],
        "memory 20": table2[6],
        "full": table2[0],
    }


def _draw_points(axes: Axes, title: str, found: Mapping[str, Sequence[float]]) -> None:
    means = [100 * sum(values) / len(values) for values in found.values()]
    colours = ["#4063d8" if "masked" in label or label == "head" else "#9aa3ad" for label in found]
    axes.scatter(means, list(found), color=colours, s=46, zorder=2)
    axes.grid(axis="y", color="#e3e6ea", zorder=0)
    for at, (values, mean) in enumerate(zip(found.values(), means, strict=True)):
        axes.plot([100 * v for v in values], [at] * len(values), "|", color="black", zorder=3)
        axes.annotate(f"   {mean:.1f}", (100 * max(values), at), va="center", size=9)
    low = min(means, default=0)
    axes.set(title=title, xlim=(low - 3, max(means, default=100) + 4), xlabel="test accuracy, %")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
