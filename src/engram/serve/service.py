"""A service in one process, and several of them behind one port.

Several workers get the same listening socket. Connections wait in one queue, and a worker takes the
next one when it is free, so that one that is busy, stopped or killed delays nobody else. (With
SO_REUSEPORT every worker would have a queue of its own, and lose it.)
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import uvicorn
from prometheus_client import multiprocess

from engram.errors import EngramError
from engram.serve.app import create_app
from engram.serve.catalogue import Catalogue
from engram.serve.connections import Server, ServiceProtocol, connections_allowed
from engram.serve.decoding.pool import start_fork_server
from engram.serve.hosts import THIS_MACHINE, is_loopback
from engram.serve.launch import Job
from engram.serve.log import Log, Seldom
from engram.serve.middleware import MAX_HEADER_BYTES
from engram.serve.telemetry import METRICS_FOLDER
from engram.store.bundles import unlisted_files
from engram.util.cpus import available_cpus
from engram.util.text import Description
from engram.util.worker_processes import end_with_parent

_SPAWN = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
_PAUSE = 1.0  # seconds before a worker that died is replaced


class Service:
    """A loaded bundle and an open port; `run` answers until a signal comes."""

    def __init__(self, job: Job, listener: socket.socket) -> None:
        self.job, self.listener = job, listener
        start_fork_server()  # it loads what decoders need while this process loads the model
        self.catalogue = Catalogue.load(job.folder, job.settings, job.backbone)
        self.app = create_app(self.catalogue, job.token, job.ask_token)

    @property
    def description(self) -> Description:
        """The bundle and the address, for the person who started the service."""
        snapshot, settings = self.catalogue.now, self.job.settings
        host, port = self.listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        connections = connections_allowed(settings)
        unlisted = unlisted_files(snapshot.bundle)
        document = {
            "url": url,
            "bundle": str(snapshot.bundle.folder),
            "tasks": list(snapshot.names),
            "engine": settings.engine,
            "device": str(snapshot.model.backbone.device),
            "workers": settings.workers,
            "connections": connections,
            "attaching": self.job.token is not None,
            "asking": "token" if self.job.ask_token else "open",
            "unlisted": unlisted,
        }
        disabled = "disabled (--token or ENGRAM_TOKEN enables it)"
        rows = [
            ("page", f"{url}/"),
            ("reference", f"{url}/docs"),
            ("tasks", ", ".join(snapshot.names)),
            ("backbone", snapshot.model.backbone.source),
            *((key, str(document[key])) for key in ("engine", "device", "workers")),
            ("attaching", "enabled" if self.job.token else disabled),
        ]
        if connections < settings.connections:
            rows.append(("connections", f"{connections}, because of the limit of open files"))
        if unlisted:
            rows.append(("not listed", f"{', '.join(unlisted)}: in the folder, not in the bundle"))
        if self.job.ask_token:
            rows.append(("asking", "needs the token of ENGRAM_ASK_TOKEN"))
        elif not is_loopback(settings.host):
            rows.append(("open", "anyone who can reach this address can send requests"))
        rows.append(("stop", "Ctrl-C; requests in progress are finished first"))
        return Description(document, rows)

    def run(self) -> None:
        """Answer until SIGTERM or Ctrl-C, then finish the requests in progress."""
        # uvicorn raises the signal again when it has finished; after SIGTERM nothing is left to do.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        settings = self.job.settings
        connections, log = connections_allowed(settings), self.app.state.log
        config = uvicorn.Config(
            self.app,
            http=partial(ServiceProtocol, settings, connections, log),  # type: ignore[arg-type]
            ws="none",
            log_level="error",
            access_log=False,
            server_header=False,
            forwarded_allow_ips=[*THIS_MACHINE, *settings.trust_proxy],
            timeout_keep_alive=max(1, int(min(10, settings.timeout))),
            timeout_graceful_shutdown=int(settings.timeout) + 10,
            h11_max_incomplete_event_size=2 * MAX_HEADER_BYTES,
        )
        for library in ("asyncio", "uvicorn.error"):
            logging.getLogger(library).addFilter(Seldom())
        Server(config).run(sockets=[self.listener])


# Several processes


def serve(job: Job, listener: socket.socket, show: Callable[[Description], None]) -> None:
    """Serve a bundle in one process or several, until a signal comes.

    `show` is called with the description of the service as soon as it can answer.
    """
    if job.settings.workers > 1:
        _run_workers(job, listener, show)
        return
    service = Service(job, listener)
    show(service.description)
    service.run()


def _run_workers(job: Job, listener: socket.socket, show: Callable[[Description], None]) -> None:
    """Start workers, and replace those that die, until SIGTERM or Ctrl-C; `show` the first's."""
    threads = job.settings.threads or max(1, available_cpus() // job.settings.workers)
    job = replace(job, settings=replace(job.settings, threads=threads))
    log, stopping = Log(job.settings.log), threading.Event()
    with tempfile.TemporaryDirectory(prefix="engram-metrics-") as metrics:
        os.environ[METRICS_FOLDER] = metrics
        try:
            started = [_start(job, listener) for _ in range(job.settings.workers)]
            description, *_ = [_described(*one) for one in started]
            show(description)
            workers = [process for process, _ in started]
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda number, frame: stopping.set())
            while not stopping.is_set():
                wait([worker.sentinel for worker in workers], 0.1)
                for i, worker in enumerate(workers):
                    if worker.is_alive() or stopping.is_set():
                        continue
                    multiprocess.mark_process_dead(worker.pid)  # type: ignore[no-untyped-call]
                    log.event("worker ended", pid=worker.pid or 0, code=worker.exitcode or 0)
                    stopping.wait(_PAUSE)
                    workers[i], _ = _start(job, listener)
        finally:
            _end_workers(job.settings.timeout + 15)
            del os.environ[METRICS_FOLDER]
            log.stop()


def _start(job: Job, listener: socket.socket) -> tuple[SpawnProcess, Connection]:
    ours, theirs = _SPAWN.Pipe(duplex=False)
    process = _SPAWN.Process(target=_work, args=(job, listener, theirs, os.getpid()))
    process.start()
    theirs.close()
    return process, ours


def _end_workers(seconds: float) -> None:
    """Let the workers finish the requests in progress; those that do not are killed."""
    children, deadline = _SPAWN.active_children(), time.monotonic() + seconds
    for child in children:
        child.terminate()
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        child.kill()
        child.join()


def _described(process: SpawnProcess, pipe: Connection) -> Description:
    """The description that a worker sends when it is ready; its error is an EngramError."""
    try:
        message = pipe.recv()
    except EOFError:
        process.join()
        raise EngramError(
            f"A worker ended before it was ready (exit code {process.exitcode}); start the service "
            "with --workers 1 to see why."
        ) from None
    if isinstance(message, str):
        raise EngramError(message)
    description: Description = message
    return description


def _work(job: Job, listener: socket.socket, pipe: Connection, parent: int) -> None:
    """A worker: it loads the bundle, says that it is ready, and answers until a signal comes."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent decides
    try:
        service = Service(job, listener)
    except EngramError as error:
        with contextlib.suppress(OSError):
            pipe.send(str(error))
        raise SystemExit(2) from None
    with contextlib.suppress(OSError):  # nobody waits for one that replaces another
        pipe.send(service.description)
    pipe.close()
    service.run()
