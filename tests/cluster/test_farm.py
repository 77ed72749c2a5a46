"""A farm from its plan to its bundle, log and page, and the order in which its jobs run."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from tests.support.farming import FOLDER, Inline, Lines, farm, plan_of

from engram import EngramError
from engram.cluster.jobs import FarmJob, JobOptions
from engram.cluster.trainers import Trained
from engram.errors import Interrupted
from engram.store.bundles import read_bundle
from engram.tasks.task_settings import TaskSettings

DONE = {"seconds": 1.5, "metric": "val accuracy 90%", "share": 0.9, "finished_before": False}


def test_what_is_done_is_in_the_bundle_and_what_failed_is_named(work: Path) -> None:
    shutil.copy("colours.npz", "gone.npz")
    plan = plan_of('[jobs.a]\n[jobs.lost]\ndata = "gone.npz"\n[jobs.b]\nextends = ["a"]\n')
    Path("gone.npz").unlink()
    lines = Lines()
    result = farm(plan, lines=lines)
    assert [status.name for status in result.failed] == ["lost"]
    assert "1 of 3 jobs failed: lost (" in result.complaint
    assert "gone.npz" in result.complaint
    assert [one.spec.name for one in read_bundle(FOLDER / "bundle").engrams] == ["a", "b"]
    log = (FOLDER / "farm.log").read_text(encoding="utf-8")
    assert [line[21:] for line in log.splitlines()] == lines
    assert lines[1] == "a: running"
    assert any("a: done, val accuracy" in line for line in lines[2:4])
    rows = [status.to_row()[:2] for status in result.statuses]
    assert rows == [("a", "done"), ("lost", "failed"), ("b", "done")]


def test_a_farm_that_is_stopped_says_how_to_continue(work: Path) -> None:
    class Stopped(Inline):
        def submit(self, job: FarmJob) -> Future[Trained]:
            raise KeyboardInterrupt

    lines = Lines()
    with pytest.raises(Interrupted, match="0 of 2 jobs are done"):
        farm(plan_of("[jobs.a]\n[jobs.b]\n"), Stopped(), lines)
    assert lines[-1] == "stopped: 0 of 2 jobs done"


def test_a_folder_that_cannot_be_written_is_a_sentence(work: Path) -> None:
    plan = plan_of("[jobs.a]\n")
    FOLDER.touch()
    with pytest.raises(EngramError, match="cannot be written"):
        farm(plan)


class Script(Inline):
    """Trainers that do as they are told: a job says something, and ends, at a later look."""

    def __init__(self, slots: int, **ends: list[Exception]) -> None:
        super().__init__()
        self.slots, self.ends = slots, ends
        self.events: list[str] = []
        self.running: list[tuple[FarmJob, Future[Trained]]] = []
        self.queue = self  # type: ignore[assignment]

    def submit(self, job: FarmJob) -> Future[Trained]:
        self.events.append(f"{job.name} starts")
        self.running.append((job, Future()))
        assert len(self.running) <= self.slots
        return self.running[-1][1]

    def qsize(self) -> int:
        """The farm looks: the first job says something, and ends at the next look."""
        job, future = self.running[0]
        if f"{job.name} trains" not in self.events:
            self.events.append(f"{job.name} trains")
            return 1
        self.running.pop(0)
        ends = self.ends.get(job.name)
        self.events.append(f"{job.name} {'lost' if ends else 'done'}")
        if ends:
            future.set_exception(ends.pop(0))
        else:
            future.set_result((DONE, {}))
        return 0

    def get_nowait(self) -> tuple[str, str, str]:
        return self.running[0][0].name, "note", "training"


def planned(name: str, parents: tuple[str, ...] = ()) -> FarmJob:
    return FarmJob(name, JobOptions("data"), FOLDER, Path("b"), {TaskSettings: {}}, parents)


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("engram.cluster.farm._POLL", 0.0)
    monkeypatch.setattr("engram.cluster.farm.add_to_bundle", lambda *given: None)


def run(workers: Script, *jobs: FarmJob, **others: Any) -> dict[str, Any]:
    return {status.name: status for status in farm(list(jobs), workers, **others).statuses}


def before(events: list[str], *order: str) -> bool:
    return [events.index(one) for one in order] == sorted(events.index(one) for one in order)


def test_as_many_jobs_run_as_there_are_slots(quick: None) -> None:
    workers = Script(2)
    found = run(workers, *map(planned, "abcd"))
    assert before(workers.events, "b starts", "a done", "c starts", "b done", "d starts")
    assert {status.state for status in found.values()} == {"done"}
    assert found["a"].seconds == "2"


def test_children_wait_for_their_parents_and_fail_with_them(quick: None) -> None:
    workers = Script(4, b=[EngramError("Bad data.")])
    jobs = (planned("a"), planned("b"), planned("c", parents=("a",)), planned("d", parents=("b",)))
    found = run(workers, *jobs)
    assert before(workers.events, "a done", "c starts")
    assert "d starts" not in workers.events
    assert "extends b" in found["d"].note
    assert found["b"].note == "Bad data."


def test_a_lost_job_is_tried_again_and_fails_if_it_is_lost_too_often(quick: None) -> None:
    lost, lines = RuntimeError("killed"), Lines()
    workers = Script(1, a=[lost, lost], b=[lost, lost, lost])
    found = run(workers, planned("a"), planned("b"), retries=2, lines=lines)
    assert (found["a"].state, found["a"].attempts) == ("done", 3)
    assert (found["b"].state, found["b"].attempts) == ("failed", 3)
    assert "crashed 3 times: killed" in found["b"].note
    assert "a: retried, attempt 2: killed" in lines


def test_what_cannot_be_kept_has_failed(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise EngramError("The disk is full.")

    monkeypatch.setattr("engram.cluster.farm.add_to_bundle", full)
    assert run(Script(1), planned("a"))["a"].note == "The disk is full."


def test_a_lost_queue_loses_no_job(quick: None) -> None:
    class Broken(Queue[Any]):
        def qsize(self) -> int:
            raise ConnectionError

    workers = Inline()
    workers.queue = Broken()
    workers.queue.put(("a", "note", "training"))
    workers.train = lambda job: DONE  # type: ignore[method-assign]
    assert not farm([planned("a")], workers).failed
