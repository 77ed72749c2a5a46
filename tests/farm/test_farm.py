"""A farm from its plan to its bundle, log and page."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.farming import FOLDER, Inline, plan_of

from engram import EngramError
from engram.errors import Interrupted
from engram.farm.events import Event
from engram.farm.farm import held, run_farm
from engram.farm.jobs import FarmJob
from engram.farm.schedule import Status
from engram.store.bundles import read_bundle


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def show(self, statuses: Sequence[Status]) -> None:
        pass

    def line(self, text: str) -> None:
        self.lines.append(text)


def test_what_is_done_is_in_the_bundle_and_what_failed_is_named(work: Path) -> None:
    shutil.copy("colours.npz", "gone.npz")
    text = '[jobs.a]\n[jobs.lost]\ndata = "gone.npz"\n[jobs.b]\nextends = ["a"]\n'
    plan, board = plan_of(text), Lines()
    Path("gone.npz").unlink()
    with held(FOLDER):
        result = run_farm(plan, FOLDER, Inline(), board)
    assert [status.name for status in result.failed] == ["lost"]
    assert result.complaint.startswith("1 of 3 jobs failed: lost (")
    assert "gone.npz" in result.complaint
    assert [one.spec.name for one in read_bundle(FOLDER / "bundle").engrams] == ["a", "b"]
    assert result.report.exists()
    log = (FOLDER / "farm.log").read_text(encoding="utf-8")
    assert [line[21:] for line in log.splitlines()] == board.lines
    assert board.lines[0] == "3 jobs begin"
    assert board.lines[1] == "a: running"
    assert board.lines[2].startswith("a: done, val accuracy ")
    shown = result.describe()
    assert shown.document["failed"] == ["lost"]
    assert shown.rows[0] == ("jobs", "2 done, 1 failed")
    assert [row[:2] for row in shown.table] == [("a", "done"), ("b", "done"), ("lost", "failed")]


def test_a_later_run_shows_the_attempts_and_seconds_of_the_training(work: Path) -> None:
    class Retried(Inline):
        def start(self, job: FarmJob, group: str = "") -> None:
            self._said.append(Event(job.name, "retried", "attempt 2: killed"))
            super().start(job, group)

    shown = []
    for runner in (Retried(), Inline()):
        with held(FOLDER):
            result = run_farm(plan_of("[jobs.a]\n"), FOLDER, runner, Lines())
        (status,) = result.statuses
        shown.append((status.attempts, status.seconds, result.describe().table))
    assert status.result["finished_before"]
    assert shown[0] == shown[1]
    assert shown[0][0] == 2


def test_a_farm_that_is_stopped_says_how_to_continue(work: Path) -> None:
    class Stopped(Inline):
        def events(self, seconds: float) -> list[Event]:
            raise KeyboardInterrupt

    plan, board = plan_of("[jobs.a]\n[jobs.b]\n"), Lines()
    with held(FOLDER), pytest.raises(Interrupted, match=r"0 of 2 jobs are done\. Run the same"):
        run_farm(plan, FOLDER, Stopped(), board)
    assert board.lines[-1] == "stopped: 0 of 2 jobs done"


def test_two_farms_cannot_have_one_folder(work: Path) -> None:
    with held(FOLDER), pytest.raises(EngramError, match=r"Another farm is at work in jobs\.farm"):
        held(FOLDER).__enter__()
    with held(FOLDER):
        pass
