"""The order of jobs: one fills a cache, children wait for parents, and a failure stops no other."""

from __future__ import annotations

from pathlib import Path

from engram.farm.events import Event
from engram.farm.jobs import FarmJob
from engram.farm.plan import PlannedJob
from engram.farm.schedule import Schedule, Status


def planned(name: str, cache: str = "", parents: tuple[str, ...] = ()) -> PlannedJob:
    job = FarmJob(name, name, "data", Path("b"), Path(f"{name}.safetensors"), {}, parents=parents)
    return PlannedJob(job, "data", "vit", "key", "masked", 9, alone=False, cache=cache)


class Script:
    """A runner that says what it was told to say, job by job; it says one thing at a time."""

    def __init__(self, slots: int, **events: list[Event]) -> None:
        self.slots, self._events = slots, events
        self.started: list[str] = []
        self.together: list[set[str]] = []  # the jobs that ran at the same time
        self._running: list[str] = []

    def start(self, job: FarmJob, group: str = "") -> None:
        self.started.append(job.name)
        self._running.append(job.name)
        self.together.append(set(self._running))

    def events(self, seconds: float) -> list[Event]:
        name = self._running[0]
        event = self._events.get(name, []).pop(0) if self._events.get(name) else done(name)
        if event.kind in ("done", "failed"):
            self._running.remove(name)
        return [event]


def done(name: str) -> Event:
    return Event(name, "done", result={"seconds": 1.5})


def run(runner: Script, *jobs: PlannedJob) -> tuple[list[str], dict[str, Status]]:
    said: list[str] = []

    def changed(status: Status, event: Event) -> None:
        said.append(f"{status.name} {event.kind}")

    statuses = [Status(job) for job in jobs]
    Schedule(statuses, runner, changed, lambda status: None).run()
    return said, {status.name: status for status in statuses}


def test_as_many_jobs_run_as_the_runner_takes() -> None:
    runner = Script(2)
    _, found = run(runner, *map(planned, "abcd"))
    assert runner.started == ["a", "b", "c", "d"]
    assert max(map(len, runner.together)) == 2
    assert {status.state for status in found.values()} == {"done"}
    assert found["a"].seconds == 1.5


def test_others_wait_until_the_first_has_filled_their_cache() -> None:
    runner = Script(3, a=[Event("a", "at_work"), Event("a", "ready")])
    said, _ = run(
        runner, planned("a", "x"), planned("b", "x"), planned("c", "x"), planned("d", "y")
    )
    assert runner.started == ["a", "d", "b", "c"]
    assert said.index("a ready") < said.index("b started")


def test_if_the_one_that_fills_a_cache_fails_the_next_one_does() -> None:
    runner = Script(3, a=[Event("a", "failed", "No.")], b=[Event("b", "ready")])
    said, found = run(runner, planned("a", "x"), planned("b", "x"), planned("c", "x"))
    assert said.index("a failed") < said.index("b started") < said.index("b ready")
    assert said.index("b ready") < said.index("c started")
    assert [found[name].state for name in "abc"] == ["failed", "done", "done"]


def test_children_wait_for_their_parents_and_fail_with_them() -> None:
    runner = Script(3, b=[Event("b", "failed", "Bad data.")])
    jobs = (planned("a"), planned("b"), planned("c", parents=("a",)), planned("d", parents=("b",)))
    said, found = run(runner, *jobs)
    assert runner.started == ["a", "b", "c"]
    assert said.index("a done") < said.index("c started")
    assert (found["d"].state, found["d"].note) == ("failed", "It extends b, which failed.")
    assert found["b"].to_dict()["error"] == "Bad data."


def test_attempts_are_counted_and_what_cannot_be_kept_has_failed() -> None:
    runner = Script(1, a=[Event("a", "retried", "attempt 2: killed"), Event("a", "at_work", "x")])
    states = []

    def changed(status: Status, event: Event) -> None:
        states.append(status.state)

    status = Status(planned("a"))
    Schedule([status], runner, changed, lambda status: "The disk is full.").run()
    assert states == ["running", "retried", "retried", "failed"]
    assert (status.attempts, status.note) == (2, "The disk is full.")
