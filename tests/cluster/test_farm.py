"""A farm on Ray: the same engrams as on one machine, also where a node shares no disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from tests.support.farming import FOLDER, Inline, plan_of

from engram import EngramError
from engram.cluster.farm import RayRunner
from engram.farm.farm import FarmResult, held, run_farm
from engram.farm.jobs import FarmJob
from engram.farm.plan import Plan
from engram.farm.schedule import Status
from engram.store.bundles import read_bundle

JOBS = '[jobs.a]\n[jobs.b]\nextends = ["a"]\nseed = 3\n'


class Nobody:
    def show(self, statuses: Sequence[Status]) -> None:
        pass

    def line(self, text: str) -> None:
        pass


def farm(plan: Plan, **others: Any) -> FarmResult:
    given = {"on": "ray", "slots": None, "retries": 1, "cpus": 1, "gpus": 0.0, "folder": FOLDER}
    with held(FOLDER):
        return run_farm(plan, FOLDER, RayRunner(**{**given, **others}), Nobody())


def contents() -> dict[str, str]:
    return {one.spec.name: one.content for one in read_bundle(FOLDER / "bundle").engrams}


def test_ray_trains_what_one_process_trains(
    cluster: Any, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(FOLDER):
        run_farm(plan_of(JOBS), FOLDER, Inline(), Nobody())
    alone = contents()
    FOLDER.rename("alone.farm")
    # The nodes find another mark in the folder, as if they did not share it: engrams travel.
    monkeypatch.setattr("engram.cluster.farm.mark", lambda folder: work.name)
    assert farm(plan_of(JOBS)).failed == []
    assert contents() == alone
    again = farm(plan_of("[jobs.a]\n"))
    assert all(status.result["finished_before"] for status in again.statuses)
    assert not (FOLDER / "mark").exists()


def test_a_lost_mailbox_loses_no_engram(
    cluster: Any, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: RayRunner, job: FarmJob, group: str = "") -> None:
        begin(self, job, group)
        ray.kill(self._mailbox)

    begin = RayRunner.start
    monkeypatch.setattr(RayRunner, "start", start)
    assert farm(plan_of("[jobs.a]\n")).failed == []
    assert list(contents()) == ["a"]


def test_jobs_that_no_node_can_hold_are_refused(cluster: Any, work: Path) -> None:
    with pytest.raises(EngramError, match="No node of the cluster has 99 CPUs and 0 GPUs"):
        farm(plan_of("[jobs.a]\n"), cpus=99)
