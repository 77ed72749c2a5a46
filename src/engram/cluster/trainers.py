"""Trainers of the jobs of a farm: processes of this machine, or tasks of Ray.

Both run `train_job` and give a future of its `Ended`. Meanwhile jobs put messages into a queue:
(NAME, "note", what it is doing), (NAME, "said", a sentence for the user), or (NAME, "ready", its
node) when the cache is filled and the training begins.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Queue
from typing import Any

import torch

from engram.cluster.connect import FarmSettings, connected, room
from engram.cluster.jobs import FarmJob
from engram.errors import LOST_WORKER, EngramError, Interrupted, Notice, is_lost_worker
from engram.report.run_page import write_run_report
from engram.tasks.kinds import KINDS
from engram.train.callbacks import Callback, RunStart
from engram.train.job import TrainingJob
from engram.train.run import run_folder
from engram.util.files import make_private_folder, private, write_atomically
from engram.util.flag_names import naming_flags
from engram.util.worker_processes import end_with_parent, ignore_pillow_warnings

PATIENCE = 60.0  # seconds for trainings to write their checkpoints when the farm is stopped
_EVERY = 0.5  # seconds between two notes of a job
_STAYS = ("checkpoint.safetensors", "lock")  # files of a run that do not travel
Files = dict[str, bytes]  # by their paths below the farm's folder
Put = Callable[[tuple[str, str, str]], object]


@dataclass(frozen=True)
class Ended:
    """The end of a job: `done`, `failed` by the user's mistake, or `lost`: try it again."""

    state: str
    why: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    files: Files = field(default_factory=dict)  # that the farm's folder may not have


@dataclass(frozen=True)
class Trainers:
    """Trains jobs, `slots()` at once; `submit` takes one, and the node with its cache or ""."""

    slots: Callable[[], int]
    submit: Callable[[FarmJob, str], Future[Ended]]
    queue: Any  # a queue.Queue, which may be in another process


@contextlib.contextmanager
def local_workers(settings: FarmSettings) -> Iterator[Trainers]:
    """Processes of this machine, one for each job: forks of one that has imported everything.

    What a job prints is in NAME.log of the farm's folder.
    """
    slots = settings.parallel or 1
    threads = settings.cpus_per_job or max(1, torch.get_num_threads() // slots)
    # Python's tracker frees the semaphores of killed processes, and would call them leaked.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    resource_tracker.ensure_running()
    # Frameworks of macOS do not survive a fork.
    way = "spawn" if sys.platform == "darwin" else "forkserver"
    context: Any = multiprocessing.get_context(way)
    context.set_forkserver_preload([__name__])
    queue: Queue[Any] = Queue()
    processes = set[multiprocessing.process.BaseProcess]()

    def train(job: FarmJob) -> Ended:
        """In a thread: start a process, and hear it out."""
        receiver, sender = context.Pipe(duplex=False)
        here = (os.getpid(), dict(os.environ))
        process = context.Process(target=_train_here, args=(job, threads, sender, *here))
        process.start()
        processes.add(process)
        sender.close()
        try:
            while not isinstance(message := receiver.recv(), Ended):
                queue.put(message)
            return message
        except EOFError:
            process.join()
            return Ended("lost", f"its process ended with code {process.exitcode}")

    pool = ThreadPoolExecutor(slots)
    try:
        yield Trainers(lambda: slots, lambda job, near: pool.submit(train, job), queue)
    finally:
        until = time.monotonic() + PATIENCE
        try:
            for process in list(processes):
                process.terminate()  # one that trains writes a checkpoint
            for process in list(processes):
                process.join(max(0.1, until - time.monotonic()))
        finally:  # a second Ctrl-C too
            for process in list(processes):
                process.kill()
            pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def ray_workers(settings: FarmSettings, folder: Path) -> Iterator[Trainers]:
    """Tasks of Ray (see `connected`); if their number is not set, as many as the cluster holds.

    Nodes that do not see the farm's folder work in one of their own, and send what they made.
    """
    tasks, cpus, gpus = list[Any](), settings.cpus_per_job or 1, settings.gpus_per_job
    with connected(settings.on) as ray:
        from ray.util.queue import Queue
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

        def fitting() -> int:
            held = room(ray, cpus=cpus, gpus=gpus)
            return min(held, 1) * (settings.parallel or held)

        def submit(job: FarmJob, near: str) -> Future[Ended]:
            paths = [folder / f"{name}.safetensors" for name in job.parents]
            sent = _run_files(job.out) | {path.name: path.read_bytes() for path in paths}
            options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": 0}
            if cache := os.environ.get("ENGRAM_CACHE"):
                options["runtime_env"] = {"env_vars": {"ENGRAM_CACHE": cache}}
            if near:  # or elsewhere, if that node is busy or gone
                options["scheduling_strategy"] = OnNode(near, soft=True, _spill_on_unavailable=True)
            train = ray.remote(name=f"engram {job.name}", **options)(_train_there)
            tasks.append(train.remote(job, sent, os.getcwd(), _token(folder), cpus, queue))
            future: Future[Ended] = tasks[-1].future()
            return future

        if not fitting():
            raise EngramError(
                f"No node of the cluster has {cpus} CPUs and {gpus:g} GPUs, which each job takes; "
                "give other --cpus-per-job or --gpus-per-job."
            )
        # On this node: its end is the end of the farm in any case.
        here = OnNode(ray.get_runtime_context().get_node_id(), soft=False)
        queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})
        try:
            yield Trainers(fitting, submit, queue)
        finally:
            for task in tasks:
                ray.cancel(task, force=False)  # as Ctrl-C: one that trains writes a checkpoint
            if tasks:
                ray.wait(tasks, num_returns=len(tasks), timeout=PATIENCE)


# In a worker


def _train_here(
    job: FarmJob, threads: int, sender: Connection, parent: int, environment: dict[str, str]
) -> None:
    os.environ |= environment  # the server that forks may be older
    os.setsid()  # Ctrl-C at the terminal is for the farm, which then asks its processes to stop
    end_with_parent(parent)
    with open(job.folder / f"{job.name}.log", "ab", opener=private) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sender.send(train_job(job, threads, sender.send))


def _train_there(
    job: FarmJob, sent: Files, home: str, token: str, threads: int, queue: Any
) -> Ended:
    """Train a job on a node of Ray; a token tells the farm's folder from another of its path."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    if os.path.isdir(home):
        os.chdir(home)  # where relative paths start
    if job.folder.exists() and _token(job.folder) == token:
        return train_job(job, threads, queue.put, node)
    job = replace(job, folder=Path(tempfile.gettempdir()) / f"engram-farm-{token}-{job.name}")
    write_files(job.folder, sent)
    ended = replace(train_job(job, threads, queue.put, node), files=_run_files(job.out))
    if ended.state != "lost":  # else a checkpoint stays for the next attempt
        shutil.rmtree(job.folder, ignore_errors=True)
    return ended


class _Reporter(Callback):
    """Puts what a job does into the queue; also that its cache is filled, as training begins."""

    def __init__(self, name: str, put: Put, node: str) -> None:
        self.name, self.put, self.node = name, put, node
        self.begun, self.last, self.show = False, 0.0, warnings.showwarning

    def tell(self, kind: str, text: str) -> None:
        with contextlib.suppress(Exception):  # a lost queue loses no training
            self.put((self.name, kind, text))

    def say(self, text: str) -> None:
        self.tell("said", text)

    def warned(
        self, message: Warning | str, category: type[Warning], *place: Any, **more: Any
    ) -> None:
        """Tell notices to the user; other warnings stay in the job's log."""
        if issubclass(category, Notice):
            self.say(str(message))
        else:
            self.show(message, category, *place, **more)

    def started(self, start: RunStart) -> None:
        self.begun = True
        self.tell("ready", self.node)
        if start.step:
            self.say(f"resumed at step {start.step:,} of {start.steps:,}")

    def progress(self, what: str, done: int, total: int, note: str = "") -> None:
        if time.monotonic() - self.last >= _EVERY:
            self.last = time.monotonic()
            self.tell("note", f"{what} {done / total:.0%}" if total else what)


def train_job(job: FarmJob, threads: int, put: Put, node: str = "") -> Ended:
    """Train a job as `engram fit --resume` does, or find it done, and write its report."""
    torch.set_num_threads(threads)
    ignore_pillow_warnings()
    reporter = _Reporter(job.name, put, node)
    try:
        with naming_flags(), warnings.catch_warnings():
            warnings.showwarning = reporter.warned
            return Ended("done", result=_train(job, reporter))
    except (Interrupted, KeyboardInterrupt):
        return Ended("lost", "it was interrupted")
    except EngramError as error:
        return Ended("failed", str(error))
    except Exception as error:
        traceback.print_exc()
        why = LOST_WORKER if is_lost_worker(error) else f"{type(error).__name__}: {error}"
        return Ended("lost", why.rstrip("."))


def _train(job: FarmJob, reporter: _Reporter) -> dict[str, Any]:
    options, progress = job.options, reporter.progress
    work = TrainingJob.start(options.data, job.out, job.settings(), progress, reporter.say)
    work = replace(work, callbacks=[*work.callbacks, reporter])
    regime, seeds = work.choose(options.regime, options.seeds)
    result = work.train(job.task, job.out, regime, seeds, progress)
    if reporter.begun or not (run_folder(job.out) / "report.html").exists():
        reporter.tell("note", "writing the report")
        write_run_report(work.model, result, work.splits, work.recipe)
    kind = KINDS[work.splits.kind]
    split = "test" if "test" in result.metrics else "val"
    value = result.metrics[split][kind.score]
    return result.to_dict() | {
        "kind": kind.name,
        "backbone": work.model.backbone.source,
        "metric": f"{split} {kind.title} {kind.shown(value)}",
        "share": value if 0 <= value <= 1 else None,  # of a bar
        "finished_before": not reporter.begun,
    }


def _token(folder: Path) -> str:
    path = folder / "token"
    if not path.exists():
        write_atomically(path, secrets.token_hex(8).encode(), owner_only=True)
    return path.read_text(encoding="ascii")


def _run_files(out: Path) -> Files:
    """An engram that is written, and the files of its run."""
    run = [one for one in run_folder(out).glob("*") if one.is_file() and one.name not in _STAYS]
    paths = (out, *run) if out.exists() else ()
    return {path.relative_to(out.parent).as_posix(): path.read_bytes() for path in paths}


def write_files(folder: Path, files: Files) -> None:
    """Write the files that are not there yet."""
    for name, data in files.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != data:
            make_private_folder(path.parent)
            write_atomically(path, data, owner_only="/" in name)
