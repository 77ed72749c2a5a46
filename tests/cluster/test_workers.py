"""Trainers of a farm: as `engram fit`, and what is killed or moved to another node goes on."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import ray
from tests.support.commands import fit
from tests.support.farming import FOLDER, Inline, Lines, farm, jobs_of, plan_of

import engram
from engram import EngramError
from engram.cluster import trainers
from engram.cluster.connect import FarmSettings
from engram.cluster.trainers import local_workers, ray_workers
from engram.errors import Interrupted, Notice
from engram.store.bundles import read_bundle

SLOW = "steps = 60\ncheckpoint_seconds = 0.0\npatience = 0\n"
JOBS = '[jobs.a]\n[jobs.b]\nextends = ["a"]\nseed = 3\n'


def contents(folder: Path = FOLDER) -> dict[str, str]:
    return {one.spec.name: one.content for one in read_bundle(folder / "bundle").engrams}


def test_a_job_trains_what_fit_trains_and_once(work: Path) -> None:
    assert fit("--regime", "masked") == 0
    (job,) = jobs_of("[jobs.new]\n")
    workers = Inline()
    result = workers.train(job)
    assert not result["finished_before"]
    assert "val accuracy" in result["metric"]
    assert engram.inspect(job.out).content == engram.inspect("new.safetensors").content
    assert (FOLDER / "new.run" / "report.html").exists()
    assert workers.train(job)["finished_before"]


def test_a_mistake_is_the_end_of_a_job_and_after_a_bug_it_is_tried_again(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = jobs_of('[jobs.new]\nlog = "paper"\n')
    result = farm([job])
    assert [status.attempts for status in result.failed] == [1]
    assert "paper" in result.complaint
    monkeypatch.setattr("engram.cluster.trainers.TrainingJob.start", lambda *given: 1 / 0)
    result = farm([job])
    assert [status.attempts for status in result.failed] == [2]
    assert "division by zero" in result.complaint


def test_notices_are_told_and_other_warnings_stay_in_the_log(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(*given: object) -> None:
        warnings.warn("Three images are listed twice.", Notice, stacklevel=1)
        warnings.warn("numbers", RuntimeWarning, stacklevel=1)

    monkeypatch.setattr("engram.cluster.trainers.TrainingJob.start", start)
    workers = Inline()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *place, **more: print(message)
        workers.submit(jobs_of("[jobs.new]\n")[0])
    assert ("new", "said", "Three images are listed twice.") in workers.queue.queue
    assert capsys.readouterr().out == "numbers\n"


class AtCheckpoint(Lines):
    """Does something, once, when the job `a` has written a checkpoint."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act, self.done = act, False

    def __call__(self, statuses: object, text: str) -> None:
        super().__call__(statuses, text)
        if not self.done and (FOLDER / "a.run" / "checkpoint.safetensors").exists():
            self.done = True
            self.act()

    def has(self, text: str) -> bool:
        return any(text in line for line in self)


def own_children() -> list[int]:
    children = multiprocessing.active_children()  # and the one that has the queue
    return [one.pid for one in children if one.pid and "Manager" not in one.name]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram.cluster.farm._POLL", 0.02)


def kill_own() -> None:
    for pid in own_children():
        os.kill(pid, signal.SIGKILL)


def assert_as_uninterrupted(task: str) -> None:
    (whole,) = jobs_of(f'[jobs.whole]\ntask = "{task}"\n{SLOW}')
    Inline().train(whole)
    found = engram.inspect(FOLDER / f"{task}.safetensors")
    assert found.content == engram.inspect(whole.out).content


def test_a_killed_job_resumes_and_a_bad_one_is_not_tried_again(work: Path, quick: None) -> None:
    lines = AtCheckpoint(kill_own)
    shutil.copy("colours.npz", "gone.npz")
    plan = plan_of(f'[jobs.a]\n{SLOW}[jobs.bad]\ndata = "gone.npz"\n')
    Path("gone.npz").unlink()
    result = farm(plan, local_workers(FarmSettings(cpus_per_job=1)), lines)
    assert [(one.state, one.attempts) for one in result.statuses] == [("done", 2), ("failed", 1)]
    assert lines.has("a: retried, attempt 2")
    assert lines.has("a: resumed at step ")
    assert "gone.npz" in result.complaint
    assert "terminated abruptly" in (FOLDER / "a.log").read_text()
    assert own_children() == []
    assert_as_uninterrupted("a")


def test_a_farm_that_is_stopped_leaves_a_checkpoint_and_no_process(work: Path, quick: None) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    plan = plan_of(f"[jobs.a]\n{SLOW}")
    with pytest.raises(Interrupted):
        farm(plan, local_workers(FarmSettings(cpus_per_job=1)), AtCheckpoint(stop))
    assert own_children() == []
    lines = Lines()
    farm(plan, lines=lines)
    assert any("a: resumed at step " in line for line in lines)


def on_ray(cpus: int = 1) -> Any:
    return ray_workers(FarmSettings("ray", cpus_per_job=cpus), FOLDER)


def test_ray_trains_what_one_process_trains_where_no_disk_is_shared(
    cluster: Any, work: Path, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    farm(plan_of(JOBS))
    alone = contents()
    FOLDER.rename("alone.farm")
    disk = str(tmp_path_factory.mktemp("disk") / "of-the-nodes")  # which has the data
    shutil.copytree(work, disk)
    train = trainers._train_there
    monkeypatch.setattr(
        trainers, "_train_there", lambda job, sent, home, *others: train(job, sent, disk, *others)
    )
    assert farm(plan_of(JOBS), on_ray()).failed == []
    assert contents() == alone
    assert Path(disk, FOLDER, "a.safetensors").exists()
    again = farm(plan_of("[jobs.a]\n"), on_ray())
    assert all(status.result["finished_before"] for status in again.statuses)
    assert (FOLDER / "a.run" / "report.html").exists()


def test_a_job_whose_node_is_lost_resumes_on_another(cluster: Any, work: Path, quick: None) -> None:
    node = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    head = ray.remote(num_cpus=2)(Event).remote()  # takes the CPUs of the head for a while
    ray.get(head.is_set.remote())

    def lose_node() -> None:
        ray.kill(head)
        cluster.remove_node(node, allow_graceful=False)

    lines = AtCheckpoint(lose_node)
    result = farm(plan_of(f"[jobs.a]\n{SLOW}"), on_ray(), lines)
    assert [(one.state, one.attempts) for one in result.statuses] == [("done", 2)]
    assert lines.has("a: resumed at step ")
    assert_as_uninterrupted("a")


def test_jobs_that_no_node_can_hold_are_refused(cluster: Any, work: Path) -> None:
    with pytest.raises(EngramError, match="99 CPUs and 0 GPUs"):
        farm(plan_of("[jobs.a]\n"), on_ray(cpus=99))
