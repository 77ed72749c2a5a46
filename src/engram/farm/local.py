"""Jobs in processes of this machine, each of which takes one after another."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from engram.errors import LOST_WORKER, is_lost_worker
from engram.farm.events import Event
from engram.farm.jobs import FarmJob
from engram.farm.work import train_job
from engram.util.files import private
from engram.util.quiet import ignore_pillow_warnings
from engram.util.spelling import spelled_as_flags
from engram.util.text import counted
from engram.util.workers import end_with_parent

#: Seconds for a training to write its checkpoint when the farm is stopped.
PATIENCE = 60.0
_NO_LEAKS = "ignore:resource_tracker:UserWarning"
_CONTEXT = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork


class LocalRunner:
    """Processes that train: a context, in which they live.

    A process that dies, whatever the reason, is replaced, and its job is tried again, `retries`
    times at most. What jobs print is in NAME.log of the farm's folder.
    """

    def __init__(self, slots: int, retries: int, threads: int, folder: Path) -> None:
        self.slots, self._retries, self._threads, self._folder = slots, retries, threads, folder
        self._workers: list[_Worker] = []
        self._tried: dict[str, int] = {}

    def __enter__(self) -> LocalRunner:
        _start_tracker()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stop()

    def start(self, job: FarmJob, group: str = "") -> None:
        self._tried[job.name] = self._tried.get(job.name, 0) + 1
        idle = (one for one in self._workers if one.job is None and one.process.is_alive())
        free = next(idle, None)
        if free is None:
            free = _Worker(self._threads, self._folder)
            self._workers.append(free)
        free.give(job)

    def events(self, seconds: float) -> list[Event]:
        busy = [worker for worker in self._workers if worker.job is not None]
        waits: list[Any] = [worker.connection for worker in busy]
        wait([*waits, *(worker.process.sentinel for worker in busy)], seconds)
        return [event for worker in busy for event in self._heard(worker)]

    def _heard(self, worker: _Worker) -> list[Event]:
        """What a process said, in events; a crash is another attempt, or the end of its job."""
        job = worker.job
        assert job is not None
        ended, heard = not worker.process.is_alive(), list[Event]()
        with contextlib.suppress(EOFError, OSError):
            while worker.connection.poll():
                heard.append(worker.connection.recv())
        last = heard[-1].kind if heard else ""
        if last in ("done", "failed"):
            worker.job = None
            return heard
        why = heard.pop().text if last == "stopped" else ""  # by somebody else, or it crashed
        if ended:
            self._workers.remove(worker)
            worker.connection.close()
            code = worker.process.exitcode or 0
            why = why or (
                f"its process was ended by {signal.Signals(-code).name}"
                if code < 0
                else f"its process ended with the exit code {code}"
            )
        if not why:
            return heard
        worker.job = None
        return [*heard, self._again(job, why)]

    def _again(self, job: FarmJob, why: str) -> Event:
        tries = self._tried[job.name]
        if tries > self._retries:
            said = self._folder / f"{job.name}.log"
            return Event(
                job.name, "failed", f"It crashed {counted(tries, 'time')}: {why}; see {said}."
            )
        self.start(job)
        return Event(job.name, "retried", f"attempt {tries + 1}: {why}")

    def _stop(self) -> None:
        """Ask those that train to write a checkpoint, and end all processes."""
        for worker in self._workers:
            worker.ask_to_stop()
        until = time.monotonic() + PATIENCE
        try:
            for worker in self._workers:
                worker.process.join(max(0.1, until - time.monotonic()))
        finally:  # a second Ctrl-C too
            for worker in self._workers:
                if worker.process.is_alive():
                    worker.process.kill()
                worker.process.join()
                worker.connection.close()


def _start_tracker() -> None:
    """Start the process that frees the semaphores of killed workers, and let it say nothing.

    It is Python's, and would call them leaked, at the end of the farm and at its terminal.
    """
    given = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (given, _NO_LEAKS)))
    try:
        resource_tracker.ensure_running()
    finally:
        del os.environ["PYTHONWARNINGS"]
        if given is not None:
            os.environ["PYTHONWARNINGS"] = given


class _Worker:
    """A process, and the job that it is working on."""

    def __init__(self, threads: int, folder: Path) -> None:
        self.connection, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(
            target=_work, args=(theirs, os.getpid(), threads, str(folder))
        )
        self.process.start()
        theirs.close()
        self.job: FarmJob | None = None

    def give(self, job: FarmJob) -> None:
        self.job = job
        with contextlib.suppress(OSError):  # it has died: the next look at it finds out
            self.connection.send(job)

    def ask_to_stop(self) -> None:
        self.connection.close()  # then it waits for no other job
        if self.job is not None and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGTERM)


# In the process


def _work(connection: Connection, parent: int, threads: int, folder: str) -> None:
    """Train one job after another until nobody has any more."""
    os.setsid()  # Ctrl-C at the terminal is for the farm, which then asks its processes to stop
    end_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ignore_pillow_warnings()
    import torch

    torch.set_num_threads(threads)

    def tell(event: Event) -> None:
        with contextlib.suppress(OSError):
            connection.send(event)

    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt), spelled_as_flags():
        while True:
            job: FarmJob = connection.recv()
            _print_into(Path(folder) / f"{job.name}.log")
            tell(_outcome(job, tell))


def _outcome(job: FarmJob, tell: Callable[[Event], None]) -> Event:
    try:
        return train_job(job, tell)
    except KeyboardInterrupt:
        return Event(job.name, "stopped", "it was interrupted")
    except Exception as error:
        traceback.print_exc()
        lost = LOST_WORKER if is_lost_worker(error) else f"{type(error).__name__}: {error}"
        return Event(job.name, "stopped", lost.rstrip("."))


def _print_into(path: Path) -> None:
    """Append what this process prints to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(path, "ab", opener=private) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
