"""The page about a farm: all jobs with their states, and links to the pages of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram.report.contents import Bar, Bars, Charts, Links, Section, Table, Text
from engram.report.page import write_sections
from engram.report.run_page import read_history
from engram.train.plots import learning_curves

_MOST_CHARTS = 30  # jobs with learning curves on the page


@dataclass(frozen=True)
class JobRow:
    """A job, as the page shows it."""

    name: str
    cells: Sequence[str]  # of the table
    run: Path | None  # the folder of its run, if it is done
    result: Mapping[str, Any]  # its metric, and that as a length from 0 to 1, the share
    error: str = ""  # why it failed


def write_farm_page(
    path: Path, title: str, lead: str, columns: Sequence[str], jobs: Sequence[JobRow]
) -> Path:
    """Write the page into the farm's folder, and return its path."""
    done = [(job, job.run) for job in jobs if job.run is not None]
    results = [(job.name, job.result) for job, _ in done if job.result["share"] is not None]
    bars = [Bar(name, result["share"], result["metric"]) for name, result in results]
    links = [(job.name, f"{run.name}/report.html") for job, run in done]
    charts = []
    for job, run in done:
        if history := read_history(run / "history.csv"):
            chart = learning_curves(history)[1]  # the metric; its own page has the loss too
            charts.append(chart._replace(title=f"{job.name}: {chart.title}"))
    table = Table(columns, [job.cells for job in jobs], text_columns=4)
    note = f"Of the first {_MOST_CHARTS} jobs." if len(charts) > _MOST_CHARTS else ""
    pages = Links(links, "Each has a page of its own: mistakes, attention, costs.")
    failed = [Text(f"{job.name}: {job.error}") for job in jobs if job.error]
    sections = [
        Section("jobs", "Jobs", [table, *([Bars(bars)] if bars else [])]),
        Section("failed", "Failed", failed),
        Section("pages", "The tasks", [pages] if links else []),
        Section("curves", "Curves", [Charts(charts[:_MOST_CHARTS], note)] if charts else []),
    ]
    filled = [section for section in sections if section.contents]
    return write_sections(path, title=title, lead=lead, sections=filled)
