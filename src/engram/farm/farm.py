"""`run_farm`: train all jobs of a file, put their tasks into bundles, and write one page."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from engram.errors import EngramError, Interrupted
from engram.farm.events import Event
from engram.farm.page import write_farm_report
from engram.farm.plan import Plan
from engram.farm.results import add_to_bundle, attempts_of_training
from engram.farm.schedule import Runner, Schedule, Status
from engram.util.description import Description
from engram.util.files import make_private_folder
from engram.util.text import counted, visible


@dataclass(frozen=True)
class FarmResult:
    """What became of the jobs."""

    folder: Path
    statuses: Sequence[Status]
    seconds: float
    report: Path

    @property
    def failed(self) -> list[Status]:
        return [status for status in self.statuses if status.state == "failed"]

    @property
    def complaint(self) -> str:
        """A sentence that names the jobs that failed; "" if none did."""
        if not self.failed:
            return ""
        why = "; ".join(f"{status.name} ({status.note.rstrip('.')})" for status in self.failed)
        return f"{len(self.failed)} of {counted(len(self.statuses), 'job')} failed: {why}."

    def describe(self) -> Description:
        bundles = list(dict.fromkeys(str(s.planned.job.bundle) for s in self.statuses))
        document = {
            "jobs": [status.to_dict() for status in self.statuses],
            "failed": [status.name for status in self.failed],
            "bundles": bundles,
            "seconds": round(self.seconds, 2),
            "report": str(self.report),
        }
        done = sum(status.state == "done" for status in self.statuses)
        rows = [
            ("jobs", f"{done} done, {len(self.failed)} failed"),
            ("seconds", f"{self.seconds:.0f}"),
            ("bundles", ", ".join(bundles)),
            ("report", str(self.report)),
        ]
        columns = ("job", "state", "regime", "score", "seconds", "attempts")
        return Description(document, rows, columns, tuple(map(result_row, self.statuses)))


def result_row(status: Status) -> tuple[str, ...]:
    """A job in a table: its name, state, regime, score, seconds and attempts."""
    result = status.result
    return (
        *(status.name, status.state, result.get("regime", ""), result.get("score", "")),
        f"{status.seconds:.0f}" if status.began else "",
        str(status.attempts or ""),
    )


class Board(Protocol):
    """Shows where the jobs are."""

    def show(self, statuses: Sequence[Status]) -> None:
        """All jobs, as they are now."""

    def line(self, text: str) -> None:
        """What happened, for a log."""


def run_farm(
    plan: Plan, folder: Path, runner: AbstractContextManager[Runner], board: Board
) -> FarmResult:
    """Train what is not trained yet, and return what became of every job.

    Args:
        plan: The jobs, from `make_plan`.
        folder: The farm's folder, which `held` has.
        runner: Trains the jobs; see `engram.farm.schedule.Runner`.
        board: Shows where they are.

    Raises:
        Interrupted: Somebody stopped the farm. What runs has written a checkpoint.
    """
    began = time.monotonic()

    def finish(status: Status) -> str | None:
        job, before = status.planned.job, status.result["finished_before"]
        try:
            add_to_bundle(job)
            status.attempts = attempts_of_training(job, status.attempts, before)
        except EngramError as error:
            return str(error)
        return None

    with open(folder / "farm.log", "a", encoding="utf-8") as log:

        def write(text: str) -> None:
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {visible(text)}", file=log, flush=True)
            board.line(text)

        def changed(status: Status, event: Event) -> None:
            text = _line(status, event)
            if text:
                write(text)
            board.show(statuses)

        statuses = [Status(planned) for planned in plan.jobs]
        board.show(statuses)
        write(f"{counted(len(plan.jobs), 'job')} begin")
        try:
            with runner as working:
                Schedule(statuses, working, changed, finish).run()
        except KeyboardInterrupt:
            done = sum(status.state == "done" for status in statuses)
            write(f"stopped: {done} of {counted(len(plan.jobs), 'job')} done")
            raise Interrupted(
                f"Stopped; {done} of {counted(len(plan.jobs), 'job')} are done. Run the same "
                "command again to continue."
            ) from None
        seconds = time.monotonic() - began
        page = write_farm_report(folder / "report.html", statuses, seconds)
        result = FarmResult(folder, statuses, seconds, page)
        write(result.complaint or f"all done in {seconds:.0f} s")
    return result


def _line(status: Status, event: Event) -> str:
    """What a log says of an event; nothing of small steps."""
    if event.kind in ("at_work", "ready"):
        return ""
    if event.kind == "started":
        return f"{status.name}: running"
    if event.kind == "done":
        before = ", trained by an earlier run" if status.result["finished_before"] else ""
        score = status.result["score"]
        return f"{status.name}: done, {score}, {status.seconds:.0f} s{before}"
    label = "" if event.kind == "said" else f"{event.kind}, "
    return f"{status.name}: {label}{event.text}"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make the farm's folder, which no other farm can have in the meantime."""
    lock = FileLock(folder / "lock", timeout=0, mode=0o600)
    try:
        make_private_folder(folder)
        lock.acquire()
    except Timeout:
        raise EngramError(
            f"Another farm is at work in {folder}; wait for it, or stop it."
        ) from None
    except OSError as error:
        raise EngramError(f"{folder} cannot be written ({error.strerror or error}).") from None
    try:
        yield
    finally:
        lock.release()
