"""The page about all jobs of a farm."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from engram.farm.schedule import Status
from engram.report.contents import Bar, Bars, Charts, Content, Links, Section, Table, Text
from engram.report.page import write_sections
from engram.report.run import read_history
from engram.tasks.kinds import KINDS
from engram.train.plots import learning_curves
from engram.train.run import run_folder
from engram.util.text import counted, without_folder

_MOST_CHARTS = 30  # jobs with learning curves on the page


def write_farm_report(path: Path, statuses: Sequence[Status], seconds: float) -> Path:
    """Write the page about all jobs, with links to the page of each."""
    done = [status for status in statuses if status.state == "done"]
    failed = [status for status in statuses if status.state == "failed"]
    lead = f"{counted(len(statuses), 'job')}: {len(done)} done, {len(failed)} failed"
    sections = [Section("jobs", "Jobs", [_table(statuses), *_bars(done)])]
    if failed:
        texts = [Text(f"{status.name}: {status.note}") for status in failed]
        sections.append(Section("failed", "Failed", texts))
    pages = [(s.name, _link(path, run_folder(s.planned.job.out) / "report.html")) for s in done]
    if pages:
        links = Links(pages, "Each has a page of its own: mistakes, attention, costs.")
        sections.append(Section("pages", "The tasks", [links]))
    sections += _curves(done)
    return write_sections(
        path,
        title=f"The farm {path.parent.name.removesuffix('.farm')}",
        lead=f"{lead}, in {seconds:,.0f} seconds.",
        sections=sections,
    )


def _link(page: Path, other: Path) -> str:
    return os.path.relpath(other, page.parent).replace(os.sep, "/")


def _table(statuses: Sequence[Status]) -> Table:
    columns = (
        *("job", "task", "data", "trunk", "bundle", "state", "regime", "score"),
        *("parameters", "seconds", "attempts"),
    )
    rows = []
    for status in statuses:
        job, result = status.planned.job, status.result
        rows.append(
            (
                *(job.name, job.task, without_folder(status.planned.data)),
                *(without_folder(status.planned.trunk), job.bundle.name, status.state),
                str(result.get("regime", "")),
                str(result.get("score", "")),
                f"{result['parameters']:,}" if result else "",
                f"{status.seconds:,.0f}",
                str(status.attempts),
            )
        )
    return Table(columns, rows, text_columns=8)


def _bars(done: Sequence[Status]) -> list[Content]:
    """Scores from 0 to 1 as bars; other kinds of scores have none."""
    bars = []
    for status in done:
        kind = KINDS[status.result["kind"]]
        split = "test" if "test" in status.result["metrics"] else "val"
        score = status.result["metrics"][split][kind.score]
        if 0 <= score <= 1:
            bars.append(Bar(status.name, score, status.result["score"]))
    return [Bars(bars)] if bars else []


def _curves(done: Sequence[Status]) -> list[Section]:
    charts = []
    for status in done[:_MOST_CHARTS]:
        history = read_history(run_folder(status.planned.job.out) / "history.csv")
        if history:
            chart = learning_curves(history)[1]  # the score; its own page has the loss too
            charts.append(chart._replace(title=f"{status.name}: {chart.title}"))
    if not charts:
        return []
    note = f"Of the first {_MOST_CHARTS} jobs." if len(done) > _MOST_CHARTS else ""
    return [Section("curves", "Learning curves", [Charts(charts, note)])]
