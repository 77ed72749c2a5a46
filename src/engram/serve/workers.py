"""Several processes behind one port: a parent that starts workers and replaces those that die.

The parent opens the port and gives every worker the same listening socket. Connections wait in one
queue, and a worker takes the next one when it is free, so that one that is busy, stopped or killed
delays nobody else. (With SO_REUSEPORT every worker would have a queue of its own, and lose it.)
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Any

from engram.errors import EngramError
from engram.serve.service_settings import Settings
from engram.util.cpus import available_cpus
from engram.util.description import Description
from engram.util.parent_process import end_with_parent

_SPAWN = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
_PAUSE = (0.5, 30.0)  # seconds before a worker that died is replaced, at first and at most
_STEADY = 60.0  # seconds after which a worker counts as healthy again
METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # where prometheus_client adds up the processes


@dataclass(frozen=True)
class Job:
    """What every worker runs."""

    listener: socket.socket
    folder: Path
    settings: Settings
    token: str | None = field(repr=False)
    ask_token: str | None = field(repr=False)
    backbone: str | None


@dataclass
class Worker:
    process: SpawnProcess
    began: float
    pause: float = _PAUSE[0]  # before it would be replaced
    due: float | None = None  # when it will be, after it died


class Workers:
    """The workers of a service; `run` replaces them until a signal comes."""

    def __init__(self, job: Job, on_event: Callable[..., None]) -> None:
        threads = job.settings.threads or max(1, available_cpus() // job.settings.workers)
        self.job = replace(job, settings=replace(job.settings, threads=threads))
        self._on_event = on_event
        self._stopping = False
        self._workers: list[Worker] = []

    @contextlib.contextmanager
    def started(self) -> Iterator[Description]:
        """Start the workers, and end them at the end; gives what the first says of the service."""
        with tempfile.TemporaryDirectory(prefix="engram-metrics-") as metrics:
            os.environ[METRICS_FOLDER] = metrics
            try:
                waiting = [self._start() for _ in range(self.job.settings.workers)]
                descriptions = [_described(*one) for one in waiting]
                self._workers = [Worker(process, time.monotonic()) for process, _ in waiting]
                yield descriptions[0]
            finally:
                self._end()
                os.environ.pop(METRICS_FOLDER)

    def run(self) -> None:
        """Replace workers that die, until SIGTERM or Ctrl-C."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        while not self._stopping:
            living = [one.process.sentinel for one in self._workers if one.due is None]
            multiprocessing.connection.wait(living, 0.1)
            for worker in self._workers:
                if worker.due is None and not worker.process.is_alive():
                    self._ended(worker)
                elif worker.due is not None and time.monotonic() >= worker.due:
                    worker.process, _ = self._start()
                    worker.began, worker.due = time.monotonic(), None

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True

    def _start(self) -> tuple[SpawnProcess, Connection]:
        ours, theirs = _SPAWN.Pipe(duplex=False)
        process = _SPAWN.Process(target=_work, args=(self.job, theirs, os.getpid()))
        process.start()
        theirs.close()
        return process, ours

    def _ended(self, worker: Worker) -> None:
        """Plan another in its place; one that dies again and again is started less often."""
        process, now = worker.process, time.monotonic()
        _forget_metrics(process.pid)
        pause = _PAUSE[0] if now - worker.began > _STEADY else worker.pause
        worker.due, worker.pause = now + pause, min(2 * pause, _PAUSE[1])
        if not self._stopping:
            self._on_event("worker ended", pid=process.pid or 0, code=process.exitcode or 0)

    def _end(self) -> None:
        """Let the workers finish the requests in progress; those that do not are killed."""
        children = [child for child in _SPAWN.active_children() if child.pid is not None]
        for child in children:
            child.terminate()
        deadline = time.monotonic() + self.job.settings.timeout + 15
        for child in children:
            child.join(max(0.0, deadline - time.monotonic()))
            child.kill()
            child.join()


def _described(process: SpawnProcess, pipe: Connection) -> Description:
    """What a worker says when it is ready; what was wrong with it is an EngramError."""
    try:
        ready, message = pipe.recv()
    except EOFError:
        process.join()
        raise EngramError(
            f"A worker ended before it was ready (exit code {process.exitcode}); start the service "
            "with --workers 1 to see why."
        ) from None
    if not ready:
        raise EngramError(message)
    return Description(**message)


def _forget_metrics(pid: int | None) -> None:
    from prometheus_client import multiprocess

    multiprocess.mark_process_dead(pid)  # type: ignore[no-untyped-call]


def _work(job: Job, pipe: Connection, parent: int) -> None:
    """A worker: it loads the bundle, says that it is ready, and answers until a signal comes."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent decides
    from engram.serve.run import Service

    try:
        service = Service.on(job)
    except EngramError as error:
        with contextlib.suppress(OSError):
            pipe.send((False, str(error)))
        raise SystemExit(2) from None
    about = service.description
    message: dict[str, Any] = {"document": about.document, "rows": about.rows}
    with contextlib.suppress(OSError):  # nobody waits for one that replaces another
        pipe.send((True, message))
    pipe.close()
    service.run()
