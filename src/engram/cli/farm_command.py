"""`engram farm`: train the jobs of a file, and show where each of them is."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram.cli import shared
from engram.cli.flags import argument, out_option, switch
from engram.cli.terminal import announce, bars, is_first
from engram.cluster.connect import FarmSettings, check_address
from engram.util.settings import Given
from engram.util.text import Description, duration, visible

if TYPE_CHECKING:
    from engram.cluster.farm import Farm, JobStatus, Show
    from engram.cluster.jobs import FarmJob

_JOBS = "A .toml file: a table jobs.NAME for each job, and one, defaults, of shared options."
_STYLES = {"running": "cyan", "done": "green", "failed": "red"}
_STATES = ("waiting", "running", "done", "failed")


@shared.command("farm", {FarmSettings: "Resources"}, threads=True)
def farm_command(
    jobs: Path = argument("JOBS.toml", _JOBS),
    out: Path | None = out_option(
        "Bundle for the tasks of jobs that name none (default: JOBS.farm/bundle).", "BUNDLE"
    ),
    overwrite: bool = switch(
        "Output", "Retrain jobs whose options have changed, and replace their tasks.", "--overwrite"
    ),
    dry_run: bool = switch("Output", "Check the jobs, print them, and stop.", "--dry-run"),
    *,
    flags: Given,
    as_json: bool,
) -> Description:
    """Train a list of tasks, each as engram fit does; run it again to continue."""
    settings = FarmSettings(**flags[FarmSettings])
    if settings.on != "local" and not dry_run:
        check_address(settings.on)  # a wrong one is refused before the jobs are checked
    with bars(as_json, "starting") as progress:
        from engram.cluster.farm import Farm
        from engram.cluster.jobs import check_jobs, read_jobs
        from engram.cluster.trainers import local_workers, ray_workers

        folder = jobs.with_suffix(".farm")
        found = read_jobs(jobs, folder, out or folder / "bundle", overwrite)
        plan = check_jobs(found, announce, progress)
    if dry_run:
        return _plan(plan)
    workers = local_workers(settings) if settings.on == "local" else ray_workers(settings, folder)
    with _shown(as_json) as showing:
        farm = Farm(plan, folder, showing, settings.retries)
        farm.run(workers)
    return _outcome(farm)


def _plan(plan: Sequence[FarmJob]) -> Description:
    table = []
    for one in plan:
        where = (one.options.data, one.backbone, one.regime, f"{one.images:,}", str(one.bundle))
        table.append((one.name, one.task, *where))
    columns = ("job", "task", "data", "backbone", "regime", "images", "bundle")
    return Description({"jobs": list(map(_job, plan))}, [], columns, table)


def _job(job: FarmJob) -> dict[str, Any]:
    named = {"job": job.name, "task": job.task, "parents": list(job.parents)}
    where = {"data": job.options.data, "backbone": job.backbone, "bundle": str(job.bundle)}
    return {**named, **where, "regime": job.regime, "images": job.images}


def _outcome(farm: Farm) -> Description:
    from engram.cluster.farm import COLUMNS

    bundles = list(dict.fromkeys(str(one.job.bundle) for one in farm.statuses))
    report = str(farm.folder / "report.html")
    rows = [
        ("jobs", farm.counts),
        ("seconds", f"{farm.seconds:.0f}"),
        ("bundles", ", ".join(bundles)),
        ("report", report),
    ]
    jobs = []
    for one in farm.statuses:
        error = one.note if one.state == "failed" else None
        now = {"state": one.state, "attempts": one.attempts, "error": error}
        jobs.append({**_job(one.job), **now, "result": one.result or None})
    document = {
        "jobs": jobs,
        "failed": [one.name for one in farm.failed],
        "bundles": bundles,
        "report": report,
        "seconds": round(farm.seconds, 2),
    }
    table = [one.to_row() for one in farm.statuses]
    code = 2 if farm.failed else 0
    return Description(document, rows, COLUMNS, table, problem=farm.complaint, code=code)


@contextmanager
def _shown(as_json: bool) -> Iterator[Show]:
    """Show the jobs as a table on a terminal, as lines in a file, and not at all for machines."""
    if as_json or not is_first():
        yield lambda statuses, text: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        table = JobTable(console)
        with Live(table, console=console, refresh_per_second=4, transient=True):
            yield table.show
    else:

        def print_line(statuses: Sequence[JobStatus], text: str) -> None:
            if text:
                print(f"{time.strftime('%H:%M:%S')}  {visible(text)}", file=sys.stderr, flush=True)

        yield print_line


class JobTable:
    """All jobs with their states, drawn again and again; of many, those that matter now."""

    def __init__(self, console: Any) -> None:
        self._console, self._statuses, self._began = console, list[Any](), time.monotonic()

    def show(self, statuses: Sequence[JobStatus], text: str = "") -> None:
        self._statuses = list(statuses)

    def __rich__(self) -> Any:
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for title in ("job", "state", "metric", "seconds", ""):
            table.add_column(title, no_wrap=True, overflow="ellipsis")
        shown = self._chosen(max(3, self._console.height - 6))
        for one in shown:
            state = Text(one.state, _STYLES.get(one.state, ""))
            note = visible(one.note) if one.state != "done" else ""
            table.add_row(visible(one.name), state, one.result.get("metric", ""), one.seconds, note)
        counts = Counter(one.state for one in self._statuses)
        states = ", ".join(f"{counts[state]} {state}" for state in _STATES if counts[state])
        hidden = len(self._statuses) - len(shown)
        more = f"; {hidden} not shown" if hidden else ""
        spent = duration(time.monotonic() - self._began)
        return Group(table, Text(f"{states}{more}; {spent}"))

    def _chosen(self, most: int) -> list[JobStatus]:
        """The jobs for which there is room, in their order: first those that run."""
        rank = ("running", "failed", "waiting", "done")
        kept = sorted(self._statuses, key=lambda one: rank.index(one.state))[:most]
        return [one for one in self._statuses if one in kept]
