"""In which order jobs start: as many at once as a runner takes, one at a time to fill a cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from engram.farm.events import Event
from engram.farm.jobs import FarmJob
from engram.farm.plan import PlannedJob

State = Literal["waiting", "running", "retried", "done", "failed"]
#: Seconds between two looks at the clock, where nothing happens.
TICK = 0.5


class Runner(Protocol):
    """Works on jobs, a number at once, and tries those again whose process crashed."""

    @property
    def slots(self) -> int:
        """The jobs that it takes at once."""

    def start(self, job: FarmJob, group: str = "") -> None:
        """Begin to train a job; those of a group are on the same data and trunk."""

    def events(self, seconds: float) -> list[Event]:
        """What happened, after waiting at most so long for something."""


@dataclass
class Status:
    """Where a job is."""

    planned: PlannedJob
    state: State = "waiting"
    note: str = ""  # what it is doing, or why it failed or was retried
    attempts: int = 0
    began: float = 0.0
    ended: float = 0.0
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.planned.job.name

    @property
    def running(self) -> bool:
        return self.state in ("running", "retried")

    @property
    def seconds(self) -> float:
        """How long it has been running, or how long its training took."""
        if self.state == "done":
            return float(self.result["seconds"])
        return (self.ended or time.monotonic()) - self.began if self.began else 0.0

    def to_dict(self) -> dict[str, Any]:
        job = self.planned.job
        return {
            "job": job.name,
            "task": job.task,
            "data": self.planned.data,
            "bundle": str(job.bundle),
            "state": self.state,
            "attempts": self.attempts,
            "error": self.note if self.state == "failed" else None,
            "result": self.result or None,
        }


class Schedule:
    """Jobs that wait, run and end.

    A job waits for the jobs that it extends, and while another one fills the cache that it needs.
    If a job fails, those that extend it do too, and the others go on.

    Args:
        statuses: The jobs, in the order of their plan.
        runner: Who trains them.
        changed: Called when a job has another state, or does something else.
        done: Called with a job whose engram is written. A sentence makes it a failed one.
    """

    def __init__(
        self,
        statuses: Sequence[Status],
        runner: Runner,
        changed: Callable[[Status, Event], object],
        done: Callable[[Status], str | None],
    ) -> None:
        self.statuses = statuses
        self._runner, self._changed, self._done = runner, changed, done
        self._by_name = {status.name: status for status in self.statuses}
        self._filled: set[str] = set()  # caches
        self._filling: dict[str, str] = {}  # caches, with the job that fills each

    def run(self) -> None:
        """Until every job is done or has failed."""
        while True:
            self._start()
            if not any(status.running for status in self.statuses):
                return
            for event in self._runner.events(TICK):
                self._take(event)

    def _start(self) -> None:
        running = sum(status.running for status in self.statuses)
        for status in self.statuses:
            if status.state != "waiting":
                continue
            parents = [self._by_name[name] for name in status.planned.job.parents]
            lost = next((parent for parent in parents if parent.state == "failed"), None)
            if lost is not None:
                why = f"It extends {lost.name}, which failed."
                self._end(status, Event(status.name, "failed", why))
                continue
            cache = status.planned.cache
            free = running < self._runner.slots and cache not in self._filling
            if free and all(parent.state == "done" for parent in parents):
                if cache and cache not in self._filled:
                    self._filling[cache] = status.name
                running += 1
                status.state, status.began, status.attempts = "running", time.monotonic(), 1
                self._runner.start(status.planned.job, " ".join(status.planned.group))
                self._changed(status, Event(status.name, "started"))

    def _take(self, event: Event) -> None:
        status = self._by_name[event.job]
        if event.kind == "ready":
            self._filled.add(status.planned.cache)
            self._release(status)
        elif event.kind == "retried":
            status.state, status.attempts = "retried", status.attempts + 1
        if event.kind in ("done", "failed"):
            self._end(status, event)
            return
        if event.kind in ("at_work", "retried"):
            status.note = event.text
        self._changed(status, event)

    def _end(self, status: Status, event: Event) -> None:
        self._release(status)
        status.ended = time.monotonic()
        status.result = event.result
        if event.kind == "done" and (problem := self._done(status)) is not None:
            event = Event(status.name, "failed", problem)
        status.state = "done" if event.kind == "done" else "failed"
        status.note = event.text
        self._changed(status, event)

    def _release(self, status: Status) -> None:
        """Let other jobs have the cache that this one was filling."""
        if self._filling.get(status.planned.cache) == status.name:
            del self._filling[status.planned.cache]
