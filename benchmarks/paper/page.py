"""The tables of docs/results.md and benchmarks/results/paper.md, from the records.

A table stands between <!-- table: NAME --> and <!-- end -->; the text around it is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.paper.experiments import EXPERIMENTS
from benchmarks.paper.figures import draw
from benchmarks.paper.queue import all_jobs
from benchmarks.paper.records import RATES
from benchmarks.paper.runs.settings import Setting, best_rate
from benchmarks.paths import RESULTS, ROOT
from benchmarks.report import markdown_table
from engram.util.files import write_atomically

PAGES = (ROOT / "docs" / "results.md", RESULTS / "paper.md")


def outdated() -> list[Path]:
    """The pages whose tables are not those of the records."""
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    return [page for page, text in texts.items() if filled(text) != text]


def write() -> None:
    for page in PAGES:
        write_atomically(page, filled(page.read_text(encoding="utf-8")).encode())
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
