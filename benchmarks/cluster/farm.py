"""Six small trainings on a cluster of three nodes, one of which is removed while it trains.

    python -m benchmarks.cluster.farm

The same jobs run in one process after another, on the cluster, and on the cluster with a loss.
All engrams have to be equal, each task is in the bundle once, and nothing is trained twice but what
was lost. The nodes are processes of this machine and share its cores. It takes a few minutes and
writes benchmarks/results/cluster_farm.md; the exit code is 1 if an engram differs.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cluster.nodes import processes, three_nodes
from benchmarks.paths import BUILD
from benchmarks.report import markdown_table, write_report
from engram.cluster.connect import FarmSettings
from engram.cluster.farm import Farm, JobStatus
from engram.cluster.jobs import check_jobs, read_jobs
from engram.cluster.trainers import Trainers, local_workers, ray_workers
from engram.data.arrays import DIGITS
from engram.store.bundles import read_bundle

FOLDER = BUILD / "cluster" / "farm"
JOBS = """
[defaults]
data = "digits.npz"
backbone = "pico"
regime = "masked"
steps = 80
batch = 32
evaluations = 2
patience = 0
workers = 0
checkpoint_seconds = 0.5

[jobs.masked]
[jobs.few]
cells = 1
[jobs.side]
regime = "side"
[jobs.head]
regime = "head"
[jobs.seed]
seed = 1
[jobs.child]
extends = ["masked"]
"""
IMAGES = 300  # of the digits
_TITLE = "ray::engram "  # of the processes that train


class Watch:
    """Says what happens; with a cluster, removes a node on which a job is training."""

    def __init__(self, cluster: Any = None) -> None:
        self._cluster, self.lost = cluster, ""

    def line(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)

    def __call__(self, statuses: Sequence[JobStatus], text: str) -> None:
        if text:
            self.line(text)
        if self._cluster is None or self.lost:
            return
        training = [
            one.name for one in statuses if one.state == "running" and "training" in one.note
        ]
        for node in self._cluster.worker_nodes:
            for name in training:
                if processes(node, f"{_TITLE}{name}"):
                    self.lost = name
                    self.line(f"removing the node that trains {name}")
                    self._cluster.remove_node(node, allow_graceful=False)
                    return


def farm(
    name: str, workers_in: Callable[[Path], AbstractContextManager[Trainers]], watch: Watch
) -> Farm:
    """Run the jobs in a folder of their own, with a cache of their own."""
    folder = FOLDER / f"{name}.farm"
    os.environ["ENGRAM_CACHE"] = str(FOLDER / f"{name}.cache")
    plan = check_jobs(read_jobs(Path("jobs.toml"), folder, folder / "bundle"), print)
    farm = Farm(plan, folder, watch, retries=3)
    farm.run(workers_in(folder))
    return farm


def on(address: str, folder: Path) -> AbstractContextManager[Trainers]:
    return ray_workers(FarmSettings(address, parallel=2), folder)


def contents(result: Farm) -> dict[str, str]:
    """The content hash of every task in the bundle."""
    return {one.spec.name: one.content for one in read_bundle(result.folder / "bundle").engrams}


def done_lines(result: Farm) -> list[str]:
    """The jobs that the log says are done, each as often as it says so."""
    lines = (result.folder / "farm.log").read_text(encoding="utf-8").splitlines()
    return sorted(line.split()[2].rstrip(":") for line in lines if ": done, " in line)


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    os.chdir(FOLDER)
    Path("jobs.toml").write_text(JOBS, encoding="utf-8")
    digits = np.load(DIGITS)
    np.savez("digits.npz", images=digits["images"][:IMAGES], labels=digits["labels"][:IMAGES])
    torch.set_num_threads(1)
    alone = farm("alone", lambda folder: local_workers(FarmSettings(cpus_per_job=1)), Watch())
    runs = {"one process after another": (alone, "")}
    with three_nodes() as cluster:
        there = partial(on, cluster.address)
        runs["cluster, two at once"] = farm("cluster", there, Watch()), ""
        watch = Watch(cluster)
        lossy = farm("loss", there, watch)
        runs["cluster, and a node is removed"] = lossy, watch.lost
    expected, good, rows = contents(alone), True, []
    for title, (result, lost) in runs.items():
        found = contents(result)
        same = found == expected and done_lines(result) == sorted(expected)
        good &= same and not result.failed
        again = [f"{s.name} ({s.attempts})" for s in result.statuses if s.attempts > 1]
        rows.append(
            [
                title,
                f"{result.seconds:.0f}",
                f"{sum(found[name] == expected[name] for name in found)} of {len(expected)}",
                ", ".join(again) or "none",
                f"the node that trained {lost}" if lost else "nothing",
            ]
        )
    columns = ["run", "seconds", "equal engrams", "jobs with more attempts", "lost"]
    good &= bool(runs["cluster, and a node is removed"][1])
    lines = [
        "`python -m benchmarks.cluster.farm`: six trainings on 300 digits (pico, one thread each), "
        "in one process, and on a Ray cluster of a head and two nodes with one CPU each. The nodes "
        "are processes of the same machine, so the times say nothing about several machines. "
        "Engrams are equal if their content hashes are: every tensor is the same, bit for bit.",
        "",
        *markdown_table(columns, rows),
        "",
        "Every engram is equal, and every job was done once." if good else "**Something differs.**",
    ]
    write_report("cluster_farm", "A farm on a cluster", lines)
    sys.exit(not good)


if __name__ == "__main__":
    main()
