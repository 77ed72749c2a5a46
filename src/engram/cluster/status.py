"""Where the jobs of a farm are and what became of them: as a table, as JSON and as a page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engram.cluster.plan import PlannedJob
from engram.report.contents import Bar, Bars, Charts, Links, Section, Table, Text
from engram.report.page import write_sections
from engram.report.run import read_history
from engram.train.plots import learning_curves
from engram.train.run import run_folder
from engram.util.description import Description
from engram.util.text import counted, without_folder

_COLUMNS = ("job", "state", "regime", "score", "seconds", "attempts")
_MOST_CHARTS = 30  # jobs with learning curves on the page


@dataclass
class Status:
    """Where a job is."""

    planned: PlannedJob
    state: Literal["waiting", "running", "retried", "done", "failed"] = "waiting"
    note: str = ""  # what it is doing, or why it failed or was retried
    node: str | None = None  # where it filled the cache, once its training has begun
    attempts: int = 0
    began: float = 0.0
    ended: float = 0.0
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.planned.job.name

    @property
    def seconds(self) -> float:
        """How long it has been running, or how long its training took."""
        if self.state == "done":
            return float(self.result["seconds"])
        return (self.ended or time.monotonic()) - self.began if self.began else 0.0

    def to_dict(self) -> dict[str, Any]:
        error = self.note if self.state == "failed" else None
        now = {"state": self.state, "attempts": self.attempts, "error": error}
        return {**self.planned.to_dict(), **now, "result": self.result or None}

    def to_row(self) -> tuple[str, ...]:
        seconds = f"{self.seconds:.0f}" if self.began else ""
        found = (self.result.get("regime", ""), self.result.get("score", ""), seconds)
        return self.name, self.state, *found, str(self.attempts or "")


@dataclass(frozen=True)
class FarmResult:
    """What became of the jobs."""

    folder: Path
    statuses: Sequence[Status]
    seconds: float

    @property
    def failed(self) -> list[Status]:
        return [status for status in self.statuses if status.state == "failed"]

    @property
    def complaint(self) -> str:
        """A sentence that names the jobs that failed; "" if none did."""
        why = "; ".join(f"{status.name} ({status.note.rstrip('.')})" for status in self.failed)
        total = counted(len(self.statuses), "job")
        return f"{len(self.failed)} of {total} failed: {why}." if self.failed else ""

    def describe(self) -> Description:
        """Describe the jobs, for people and as JSON."""
        bundles = list(dict.fromkeys(str(one.planned.job.bundle) for one in self.statuses))
        failed, report = [one.name for one in self.failed], str(self.folder / "report.html")
        rows = [
            ("jobs", f"{len(self.statuses) - len(failed)} done, {len(failed)} failed"),
            ("seconds", f"{self.seconds:.0f}"),
            ("bundles", ", ".join(bundles)),
            ("report", report),
        ]
        jobs = [one.to_dict() for one in self.statuses]
        document = {"jobs": jobs, "failed": failed, "bundles": bundles, "report": report}
        document["seconds"] = round(self.seconds, 2)
        return Description(document, rows, _COLUMNS, tuple(one.to_row() for one in self.statuses))

    def write_page(self) -> None:
        """Write the page about all jobs, with links to the page of each."""
        rows, bars, links, charts = [], [], [], []
        for one in self.statuses:
            job, where = one.planned.job, (one.planned.data, one.planned.backbone)
            rows.append((*one.to_row(), *map(without_folder, where), job.bundle.name))
            if one.state != "done":
                continue
            run = run_folder(job.out)
            links.append((one.name, f"{run.name}/report.html"))
            if one.result["share"] is not None:
                bars.append(Bar(one.name, one.result["share"], one.result["score"]))
            if history := read_history(run / "history.csv"):
                chart = learning_curves(history)[1]  # the score; its own page has the loss too
                charts.append(chart._replace(title=f"{one.name}: {chart.title}"))
        table = Table((*_COLUMNS, "data", "backbone", "bundle"), rows, text_columns=4)
        note = f"Of the first {_MOST_CHARTS} jobs." if len(charts) > _MOST_CHARTS else ""
        failed = [Text(f"{one.name}: {one.note}") for one in self.failed]
        pages = [Links(links, "Each has a page of its own: mistakes, attention, costs.")]
        sections = [
            Section("jobs", "Jobs", [table, *([Bars(bars)] if bars else [])]),
            Section("failed", "Failed", failed),
            Section("pages", "The tasks", pages if links else []),
            Section("curves", "Curves", [Charts(charts[:_MOST_CHARTS], note)] if charts else []),
        ]
        jobs = counted(len(self.statuses), "job")
        counts = f"{len(self.statuses) - len(failed)} done, {len(failed)} failed"
        write_sections(
            self.folder / "report.html",
            title=f"The farm {self.folder.name.removesuffix('.farm')}",
            lead=f"{jobs}: {counts}, in {self.seconds:,.0f} seconds.",
            sections=[section for section in sections if section.contents],
        )
