"""Trainers of the jobs of a farm: processes of this machine, or tasks of Ray.

Both run `train_job`, and give a future of what it returns or raises. Meanwhile jobs put messages
into a queue: (NAME, "note", what it is doing) or (NAME, "said", a sentence for the user).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.managers import SyncManager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

import torch

from engram.cluster.connect import FarmSettings, connected, room
from engram.cluster.jobs import FarmJob
from engram.errors import Notice, naming_flags
from engram.report.run_page import write_run_report
from engram.tasks.kinds import KINDS
from engram.train.job import TrainingJob
from engram.train.runs.callbacks import Callback, RunStart
from engram.train.runs.run import run_folder
from engram.util.files import make_private_folder, private, write_atomically
from engram.util.worker_processes import end_with_parent, ignore_pillow_warnings

PATIENCE = 60.0  # seconds for trainings to write their checkpoints when the farm is stopped
_EVERY = 0.5  # seconds between two notes of a job
_STAY = ("checkpoint.safetensors", "lock")  # files of a run that do not travel
Files: TypeAlias = dict[str, bytes]  # by their paths below the farm's folder
#: The result of a job, and its files where the farm may not see them.
Trained: TypeAlias = tuple[dict[str, Any], Files]


@dataclass(frozen=True)
class Trainers:
    """Trains jobs: `submit` takes one, and at most `slots` at once."""

    slots: int
    submit: Callable[[FarmJob], Future[Trained]]
    queue: Any  # a queue.Queue, which may be in another process


@contextlib.contextmanager
def local_workers(settings: FarmSettings) -> Iterator[Trainers]:
    """A pool of one process for each job, so that one that is killed ends no other.

    What a job prints is in NAME.log of the farm's folder.
    """
    slots = settings.parallel or 1
    threads = settings.cpus_per_job or max(1, torch.get_num_threads() // slots)
    # Forks have imported everything; frameworks of macOS do not survive one.
    context: Any = get_context("spawn" if sys.platform == "darwin" else "forkserver")
    context.set_forkserver_preload([__name__])
    processes: list[BaseProcess] = []
    manager = SyncManager(ctx=context)
    manager.start(end_with_parent, (os.getpid(),))

    def submit(job: FarmJob) -> Future[Trained]:
        given = os.getpid(), job.folder / f"{job.name}.log", dict(os.environ)
        pool = ProcessPoolExecutor(1, context, _begin, given)
        future = pool.submit(train_job, job, threads, queue)
        processes.extend(pool._processes.values())
        future.add_done_callback(lambda _: pool.shutdown(wait=False))
        return future

    queue = manager.Queue()
    try:
        yield Trainers(slots, submit, queue)
    finally:
        until = time.monotonic() + PATIENCE
        try:
            for process in processes:
                process.terminate()  # one that trains writes a checkpoint
            for process in processes:
                process.join(max(0.1, until - time.monotonic()))
        finally:  # a second Ctrl-C too
            for process in processes:
                process.kill()
            manager.shutdown()


@contextlib.contextmanager
def ray_workers(settings: FarmSettings, folder: Path) -> Iterator[Trainers]:
    """Tasks of Ray (see `connected`), which starts as many at once as the cluster holds.

    Files travel with a task: its node may not see the farm's folder.
    """
    tasks, cpus, gpus = list[Any](), settings.cpus_per_job or 1, settings.gpus_per_job
    options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": 0}
    if cache := os.environ.get("ENGRAM_CACHE"):
        options["runtime_env"] = {"env_vars": {"ENGRAM_CACHE": cache}}
    with connected(settings.on) as ray:
        from ray.util.queue import Queue

        def submit(job: FarmJob) -> Future[Trained]:
            parents = [folder / f"{name}.safetensors" for name in job.parents]
            sent = _run_files(job.out) | {path.name: path.read_bytes() for path in parents}
            train = ray.remote(name=f"engram {job.name}", **options)(_train_there)
            tasks.append(train.remote(job, sent, os.getcwd(), cpus, queue))
            future: Future[Trained] = tasks[-1].future()
            return future

        room(ray, cpus, gpus, "--cpus-per-job or --gpus-per-job")
        queue = Queue(actor_options={"num_cpus": 0, "max_restarts": -1})
        try:
            yield Trainers(settings.parallel or sys.maxsize, submit, queue)
        finally:
            for task in tasks:
                ray.cancel(task, force=False)  # as Ctrl-C: one that trains writes a checkpoint
            if tasks:
                ray.wait(tasks, num_returns=len(tasks), timeout=PATIENCE)


# In a worker


def _begin(parent: int, log: Path, others: Mapping[str, str]) -> None:
    """Begin a process of this machine, which ends with the farm."""
    os.environ |= others  # the server that forks may be older
    os.setsid()  # Ctrl-C at the terminal is for the farm, which then asks its processes to stop
    end_with_parent(parent)
    with open(log, "ab", opener=private) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _train_there(job: FarmJob, sent: Files, home: str, threads: int, queue: Any) -> Trained:
    if os.path.isdir(home):
        os.chdir(home)  # where relative paths start
    write_files(job.folder, sent)
    return train_job(job, threads, queue)[0], _run_files(job.out)


class _Reporter(Callback):
    """Puts what a job does into the queue, and notes whether its training began."""

    def __init__(self, name: str, queue: Any) -> None:
        self.name, self.queue, self.begun, self.last = name, queue, False, 0.0

    def say(self, text: str, kind: str = "said") -> None:
        with contextlib.suppress(Exception):  # a lost queue loses no training
            self.queue.put((self.name, kind, text))

    def started(self, start: RunStart) -> None:
        self.begun = True
        if start.step:
            self.say(f"resumed at step {start.step:,} of {start.steps:,}")

    def progress(self, what: str, done: int, total: int, note: str = "") -> None:
        if time.monotonic() - self.last >= _EVERY:
            self.last = time.monotonic()
            self.say(f"{what} {done / total:.0%}" if total else what, "note")


def train_job(job: FarmJob, threads: int, queue: Any) -> Trained:
    """Train a job as `engram fit --resume` does, or find it done, and write its report."""
    torch.set_num_threads(threads)
    ignore_pillow_warnings()
    reporter, options = _Reporter(job.name, queue), job.options
    reporter.progress("starting", 0, 0)
    with naming_flags(), warnings.catch_warnings():
        show = warnings.showwarning  # into the log; notices are for the user
        warnings.showwarning = lambda message, category, *place, **more: (
            reporter.say(str(message))
            if issubclass(category, Notice)
            else show(message, category, *place, **more)
        )
        tell = reporter.progress, reporter.say
        work = TrainingJob.start(options.data, job.out, job.settings(), *tell)
        work = replace(work, callbacks=[*work.callbacks, reporter])
        regime, seeds = work.choose(options.regime, options.seeds)
        result = work.train(job.task, job.out, regime, seeds, reporter.progress)
        if reporter.begun or not (run_folder(job.out) / "report.html").exists():
            reporter.say("writing the report", "note")
            write_run_report(work.model, result, work.splits, work.recipe)
    kind, split = KINDS[work.splits.kind], "test" if "test" in result.metrics else "val"
    value = result.metrics[split][kind.score]
    return result.to_dict() | {
        "kind": kind.name,
        "backbone": work.model.backbone.source,
        "metric": f"{split} {kind.title} {kind.shown(value)}",
        "share": value if 0 <= value <= 1 else None,  # of a bar
        "finished_before": not reporter.begun,
    }, {}


def _run_files(out: Path) -> Files:
    """An engram that is written, and the files of its run."""
    run = [one for one in run_folder(out).glob("*") if one.is_file() and one.name not in _STAY]
    paths = (out, *run) if out.exists() else ()
    return {path.relative_to(out.parent).as_posix(): path.read_bytes() for path in paths}


def write_files(folder: Path, files: Files) -> None:
    """Write the files that are not there yet: where all see one folder, there are none."""
    for name, data in files.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != data:
            make_private_folder(path.parent)
            write_atomically(path, data, owner_only="/" in name)
