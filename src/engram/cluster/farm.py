"""`Farm`: train all jobs of a file, put their tasks into bundles, write a page about them."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engram.cluster.jobs import FarmJob
from engram.cluster.trainers import Trained, Trainers, write_files
from engram.errors import EngramError, Interrupted
from engram.report.contents import Bar, Bars, Charts, Links, Section, Table, Text
from engram.report.page import write_sections
from engram.report.run_page import read_history
from engram.store.compose import add_to_bundle
from engram.store.remote import single_engram_path
from engram.train.options import named
from engram.train.runs.plots import learning_curves
from engram.train.runs.run import run_folder
from engram.util.files import make_private_folder, private
from engram.util.text import counted, first_line, visible, without_folder

_POLL = 0.5  # seconds
COLUMNS = ("job", "state", "regime", "metric", "seconds", "attempts")
_MOST_CHARTS = 30  # jobs with learning curves on the page


@dataclass
class JobStatus:
    """The state of a job."""

    job: FarmJob
    state: Literal["waiting", "running", "done", "failed"] = "waiting"
    note: str = ""  # what it is doing, or why it failed
    attempts: int = 0
    began: float = 0.0
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def seconds(self) -> str:
        """Seconds it has been running, or that its training took."""
        if self.state == "running":
            return f"{time.monotonic() - self.began:.0f}"
        return f"{self.result['seconds']:.0f}" if self.result else ""

    def to_row(self) -> tuple[str, ...]:
        found = (self.result.get("regime", ""), self.result.get("metric", ""), self.seconds)
        return self.name, self.state, *found, str(self.attempts or "")


#: Called with all jobs as they are now, and with what happened, for a log, or "".
Show = Callable[[Sequence[JobStatus], str], object]


class Farm:
    """The jobs of a farm, how they are trained, and what came of them.

    A job waits for the jobs that it extends. If one fails, those that extend it do too, and the
    others go on. A job whose process or node is lost is tried again, `retries` times.
    """

    def __init__(self, plan: Sequence[FarmJob], folder: Path, show: Show, retries: int = 2) -> None:
        self.statuses, self.folder, self.seconds = [JobStatus(job) for job in plan], folder, 0.0
        self._show, self._retries = show, retries
        self._by_name = {status.name: status for status in self.statuses}
        self._running: dict[Future[Trained], JobStatus] = {}

    @property
    def failed(self) -> list[JobStatus]:
        return [status for status in self.statuses if status.state == "failed"]

    @property
    def counts(self) -> str:
        failed = len(self.failed)
        return f"{len(self.statuses) - failed} done, {failed} failed"

    @property
    def complaint(self) -> str:
        """A sentence that names the jobs that failed; "" if none did."""
        why = "; ".join(f"{status.name} ({status.note.rstrip('.')})" for status in self.failed)
        total = counted(len(self.statuses), "job")
        return f"{len(self.failed)} of {total} failed: {why}." if self.failed else ""

    def write_page(self) -> None:
        """Write the page about all jobs, with links to the page of each."""
        done = [(one, run_folder(one.job.out)) for one in self.statuses if one.state == "done"]
        results = [(one.name, one.result) for one, _ in done if one.result["share"] is not None]
        bars = [Bar(name, result["share"], result["metric"]) for name, result in results]
        charts = []
        for one, run in done:
            if history := read_history(run / "history.csv"):
                chart = learning_curves(history)[1]  # the metric; its own page has the loss too
                charts.append(chart._replace(title=f"{one.name}: {chart.title}"))
        rows = []
        for one in self.statuses:
            where = map(without_folder, (one.job.options.data, one.job.backbone))
            rows.append((*one.to_row(), *where, one.job.bundle.name))
        table = Table((*COLUMNS, "data", "backbone", "bundle"), rows, text_columns=4)
        failed = [Text(f"{one.name}: {one.note}") for one in self.failed]
        links = [(one.name, f"{run.name}/report.html") for one, run in done]
        pages = Links(links, "Each has a page of its own: mistakes, attention, costs.")
        note = f"Of the first {_MOST_CHARTS} jobs." if len(charts) > _MOST_CHARTS else ""
        sections = [
            Section("jobs", "Jobs", [table, *([Bars(bars)] if bars else [])]),
            Section("failed", "Failed", failed),
            Section("pages", "The tasks", [pages] if links else []),
            Section("curves", "Curves", [Charts(charts[:_MOST_CHARTS], note)] if charts else []),
        ]
        jobs = counted(len(self.statuses), "job")
        title = f"The farm {self.folder.name.removesuffix('.farm')}"
        lead = f"{jobs}: {self.counts}, in {self.seconds:,.0f} seconds."
        write_sections(self.folder / "report.html", title, lead, sections)

    def log(self, text: str) -> None:
        with open(self.folder / "farm.log", "a", encoding="utf-8", opener=private) as log:
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {visible(text)}", file=log)
        self._show(self.statuses, text)

    def run(self, workers: AbstractContextManager[Trainers]) -> None:
        """Train what is not trained yet, until every job is done or has failed.

        Where somebody stops the farm (`Interrupted`), what runs has written a checkpoint.
        """
        began, jobs = time.monotonic(), counted(len(self.statuses), "job")
        try:
            make_private_folder(self.folder)
        except OSError as error:
            raise EngramError(
                f"{self.folder} cannot be written ({error.strerror or error})."
            ) from None
        try:
            with workers as working:
                self.log(f"{jobs} begin")
                self._train(working)
        except KeyboardInterrupt:
            done = sum(status.state == "done" for status in self.statuses)
            self.log(f"stopped: {done} of {jobs} done")
            raise Interrupted(
                f"Stopped; {done} of {jobs} are done. Run the same command again to continue."
            ) from None
        self.seconds = time.monotonic() - began
        self.write_page()
        self.log(self.complaint or f"all done in {self.seconds:.0f} s")

    def _train(self, workers: Trainers) -> None:
        """Start what can start, and take in what has ended, until nothing runs any more."""
        while True:
            self._start(workers)
            self._show(self.statuses, "")
            if not self._running:
                return
            ended, _ = wait(self._running, _POLL, FIRST_COMPLETED)
            self._read(workers.queue)
            for future in ended:
                self._end(self._running.pop(future), future)

    def _start(self, workers: Trainers) -> None:
        busy = list(self._running.values())
        for status in self.statuses:
            if status.state in ("done", "failed") or status in busy:
                continue
            parents = [self._by_name[name] for name in status.job.parents]
            if failed := [parent.name for parent in parents if parent.state == "failed"]:
                self._fail(status, f"It extends {failed[0]}, which failed.")
            elif len(self._running) < workers.slots and all(p.state == "done" for p in parents):
                status.attempts += 1
                self._running[workers.submit(status.job)] = status

    def _read(self, queue: Any) -> None:
        """Take in what running jobs have told; a queue that is lost loses no job."""
        with contextlib.suppress(Exception):
            for _ in range(queue.qsize()):
                name, kind, text = queue.get_nowait()
                status = self._by_name[name]
                if status.state == "waiting":  # Ray had no room for it until now
                    status.state, status.began = "running", time.monotonic()
                    self.log(f"{name}: running")
                if kind == "said":
                    self.log(f"{name}: {text}")
                else:
                    status.note = text

    def _end(self, status: JobStatus, future: Future[Trained]) -> None:
        job = status.job
        try:
            result, files = future.result()
            write_files(self.folder, files)
            parents = [single_engram_path(named(text)[1]) for text in job.extends]
            add_to_bundle(job.bundle, [*parents, job.out])
        except Exception as error:
            self._lose(status, error)
            return
        status.state, status.note = "done", ""
        status.result = result | {"path": str(job.out)}
        earlier = ", trained by an earlier run" if result["finished_before"] else ""
        self.log(f"{status.name}: done, {result['metric']}, {status.seconds} s{earlier}")

    def _lose(self, status: JobStatus, error: Exception) -> None:
        why = getattr(error, "cause", None) or error  # of a task of Ray
        if isinstance(why, EngramError) and not isinstance(why, Interrupted):
            self._fail(status, str(why))
            return
        path = self.folder / f"{status.name}.log"
        with open(path, "a", encoding="utf-8", opener=private) as log:
            traceback.print_exception(error, file=log)
        if status.attempts > self._retries:
            times = counted(status.attempts, "time")
            self._fail(status, f"It crashed {times}: {first_line(why)}; see {path}.")
        else:
            status.note = f"attempt {status.attempts + 1}: {first_line(why)}"
            self.log(f"{status.name}: retried, {status.note}")

    def _fail(self, status: JobStatus, why: str) -> None:
        status.state, status.note = "failed", why
        self.log(f"{status.name}: failed, {why}")
