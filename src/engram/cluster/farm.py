"""`run_farm`: train all jobs of a file, put their tasks into bundles, write a page about them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from engram.cluster.jobs import PlannedJob
from engram.cluster.trainers import Ended, Trainers, write_files
from engram.errors import EngramError, Interrupted
from engram.report.contents import Bar, Bars, Charts, Links, Section, Table, Text
from engram.report.page import write_sections
from engram.report.run_page import read_history
from engram.store.compose import add_to_bundle
from engram.store.remote import single_engram_path
from engram.train.options import named
from engram.train.plots import learning_curves
from engram.train.run import run_folder
from engram.util.description import Description
from engram.util.files import make_private_folder, private, write_atomically
from engram.util.text import counted, first_line, visible, without_folder

_POLL = 0.5  # seconds
_COLUMNS = ("job", "state", "regime", "metric", "seconds", "attempts")
_MOST_CHARTS = 30  # jobs with learning curves on the page


@dataclass
class JobStatus:
    """The state of a job."""

    job: PlannedJob
    state: Literal["waiting", "running", "retried", "done", "failed"] = "waiting"
    note: str = ""  # what it is doing, or why it failed or was retried
    node: str | None = None  # where it filled the cache, once its training has begun
    attempts: int = 0
    began: float = 0.0
    ended: float = 0.0
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def seconds(self) -> float:
        """Seconds it has been running, or that its training took."""
        if self.state == "done":
            return float(self.result["seconds"])
        return (self.ended or time.monotonic()) - self.began if self.began else 0.0

    def to_dict(self) -> dict[str, Any]:
        error = self.note if self.state == "failed" else None
        now = {"state": self.state, "attempts": self.attempts, "error": error}
        return {**self.job.to_dict(), **now, "result": self.result or None}

    def to_row(self) -> tuple[str, ...]:
        seconds = f"{self.seconds:.0f}" if self.began else ""
        found = (self.result.get("regime", ""), self.result.get("metric", ""), seconds)
        return self.name, self.state, *found, str(self.attempts or "")


#: Called with all jobs as they are now, and with what happened, for a log, or "".
Show = Callable[[Sequence[JobStatus], str], object]


@dataclass(frozen=True)
class FarmResult:
    """The outcome of all jobs."""

    folder: Path
    statuses: Sequence[JobStatus]
    seconds: float

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

    def describe(self) -> Description:
        """Describe the jobs, for people and as JSON."""
        bundles = list(dict.fromkeys(str(one.job.bundle) for one in self.statuses))
        report = str(self.folder / "report.html")
        rows = [
            ("jobs", self.counts),
            ("seconds", f"{self.seconds:.0f}"),
            ("bundles", ", ".join(bundles)),
            ("report", report),
        ]
        document = {
            "jobs": [one.to_dict() for one in self.statuses],
            "failed": [one.name for one in self.failed],
            "bundles": bundles,
            "report": report,
            "seconds": round(self.seconds, 2),
        }
        return Description(document, rows, _COLUMNS, tuple(one.to_row() for one in self.statuses))

    def write_page(self) -> None:
        """Write the page about all jobs, with links to the page of each."""
        rows, bars, links, charts = [], [], [], []
        for one in self.statuses:
            where = map(without_folder, (one.job.data, one.job.backbone))
            rows.append((*one.to_row(), *where, one.job.bundle.name))
            if one.state != "done":
                continue
            run = run_folder(one.job.out)
            links.append((one.name, f"{run.name}/report.html"))
            if one.result["share"] is not None:
                bars.append(Bar(one.name, one.result["share"], one.result["metric"]))
            if history := read_history(run / "history.csv"):
                chart = learning_curves(history)[1]  # the metric; its own page has the loss too
                charts.append(chart._replace(title=f"{one.name}: {chart.title}"))
        table = Table((*_COLUMNS, "data", "backbone", "bundle"), rows, text_columns=4)
        note = f"Of the first {_MOST_CHARTS} jobs." if len(charts) > _MOST_CHARTS else ""
        pages = Links(links, "Each has a page of its own: mistakes, attention, costs.")
        sections = [
            Section("jobs", "Jobs", [table, *([Bars(bars)] if bars else [])]),
            Section("failed", "Failed", [Text(f"{one.name}: {one.note}") for one in self.failed]),
            Section("pages", "The tasks", [pages] if links else []),
            Section("curves", "Curves", [Charts(charts[:_MOST_CHARTS], note)] if charts else []),
        ]
        write_sections(
            self.folder / "report.html",
            title=f"The farm {self.folder.name.removesuffix('.farm')}",
            lead=f"{counted(len(self.statuses), 'job')}: {self.counts}, in {self.seconds:,.0f} "
            "seconds.",
            sections=[section for section in sections if section.contents],
        )


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make the farm's folder, which no other farm can have in the meantime."""
    try:
        make_private_folder(folder)
        lock = FileLock(folder / "lock", timeout=0, mode=0o600).acquire()
    except Timeout:
        busy = f"Another farm is at work in {folder}; wait for it, or stop it."
        raise EngramError(busy) from None
    except OSError as error:
        raise EngramError(f"{folder} cannot be written ({error.strerror or error}).") from None
    with lock:
        yield


def run_farm(
    plan: Sequence[PlannedJob],
    folder: Path,
    workers: AbstractContextManager[Trainers],
    show: Show,
    retries: int = 2,
) -> FarmResult:
    """Train what is not trained yet, in a folder that is `held`.

    A job whose process or node is lost is tried again, `retries` times. Where somebody stops the
    farm (`Interrupted`), what runs has written a checkpoint.
    """
    began, jobs = time.monotonic(), counted(len(plan), "job")
    farm = _Farm([JobStatus(job) for job in plan], folder, retries, show)
    farm.log(f"{jobs} begin")
    try:
        with workers as working:
            farm.run(working)
    except KeyboardInterrupt:
        done = sum(status.state == "done" for status in farm.statuses)
        farm.log(f"stopped: {done} of {jobs} done")
        raise Interrupted(
            f"Stopped; {done} of {jobs} are done. Run the same command again to continue."
        ) from None
    result = FarmResult(folder, farm.statuses, time.monotonic() - began)
    result.write_page()
    farm.log(result.complaint or f"all done in {result.seconds:.0f} s")
    return result


class _Farm:
    """The loop of a farm: start what can start, and take in what has ended.

    A job waits for the jobs that it extends, and while another one fills the cache that it needs.
    If a job fails, those that extend it do too, and the others go on.
    """

    def __init__(self, statuses: list[JobStatus], folder: Path, retries: int, show: Show) -> None:
        self.statuses, self._folder, self._retries, self._show = statuses, folder, retries, show
        self._by_name = {status.name: status for status in statuses}
        self._running: dict[Future[Ended], JobStatus] = {}

    def run(self, workers: Trainers) -> None:
        """Run until every job is done or has failed."""
        while True:
            self._start(workers)
            self._show(self.statuses, "")
            if not self._running:
                return
            ended, _ = wait(self._running, _POLL, FIRST_COMPLETED)
            self._read(workers.queue)
            for future in ended:
                self._end(self._running.pop(future), future, workers)

    def log(self, text: str) -> None:
        with open(self._folder / "farm.log", "a", encoding="utf-8", opener=private) as log:
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {visible(text)}", file=log)
        self._show(self.statuses, text)

    def _start(self, workers: Trainers) -> None:
        free = workers.slots() - len(self._running)
        filled = {"", *(one.job.cache for one in self.statuses if one.node is not None)}
        filling = {one.job.cache for one in self._running.values()} - filled
        for status in self.statuses:
            if status.state != "waiting":
                continue
            parents = [self._by_name[name] for name in status.job.parents]
            if failed := [parent.name for parent in parents if parent.state == "failed"]:
                self._fail(status, f"It extends {failed[0]}, which failed.")
            elif (
                free > 0
                and status.job.cache not in filling
                and all(parent.state == "done" for parent in parents)
            ):
                free -= 1
                filling |= {status.job.cache} - filled
                status.state, status.began = "running", time.monotonic()
                self.log(f"{status.name}: running")
                self._submit(status, workers)

    def _submit(self, status: JobStatus, workers: Trainers) -> None:
        status.attempts += 1
        group = [one for one in self.statuses if one.job.group == status.job.group]
        near = next((one.node for one in group if one.node), "")
        self._running[workers.submit(status.job, near)] = status

    def _read(self, queue: Any) -> None:
        """Take in what running jobs have told; a queue that is lost loses no job."""
        with contextlib.suppress(Exception):
            for _ in range(queue.qsize()):
                name, kind, text = queue.get_nowait()
                if kind == "said":
                    self.log(f"{name}: {text}")
                elif kind == "ready":
                    self._by_name[name].node = text
                else:
                    self._by_name[name].note = text

    def _end(self, status: JobStatus, future: Future[Ended], workers: Trainers) -> None:
        try:
            ended = future.result()
        except Exception as error:
            ended = Ended("lost", f"its process or its node was lost ({first_line(error)})")
        if ended.state == "done":
            self._finish(status, ended)
        elif ended.state == "failed":
            self._fail(status, ended.why)
        elif status.attempts <= self._retries:
            status.state, status.note = "retried", f"attempt {status.attempts + 1}: {ended.why}"
            self.log(f"{status.name}: retried, {status.note}")
            self._submit(status, workers)
        else:
            log = self._folder / f"{status.name}.log"
            see = f"; see {log}" if log.exists() else ""
            times = counted(status.attempts, "time")
            self._fail(status, f"It crashed {times}: {ended.why}{see}.")

    def _finish(self, status: JobStatus, ended: Ended) -> None:
        job, result = status.job, ended.result | {"path": str(status.job.out)}
        kept = run_folder(job.out) / "attempts.txt"
        try:
            write_files(self._folder, ended.files)
            parents = [single_engram_path(named(text)[1]) for text in job.extends]
            add_to_bundle(job.bundle, [*parents, job.out])
            if result["finished_before"]:  # how many attempts its training took
                with contextlib.suppress(OSError, ValueError):
                    status.attempts = int(kept.read_text(encoding="ascii"))
            write_atomically(kept, f"{status.attempts}\n".encode(), owner_only=True)
        except EngramError as error:
            self._fail(status, str(error))
            return
        status.state, status.note, status.ended = "done", "", time.monotonic()
        status.result = result
        earlier = ", trained by an earlier run" if result["finished_before"] else ""
        self.log(f"{status.name}: done, {result['metric']}, {status.seconds:.0f} s{earlier}")

    def _fail(self, status: JobStatus, why: str) -> None:
        status.state, status.note, status.ended = "failed", why, time.monotonic()
        self.log(f"{status.name}: failed, {why}")
