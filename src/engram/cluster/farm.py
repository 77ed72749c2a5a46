"""`run_farm`: train all jobs of a file, and put their tasks into bundles."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from engram.cluster.plan import PlannedJob
from engram.cluster.status import FarmResult, Status
from engram.cluster.workers import Ended, Workers, write_files
from engram.errors import EngramError, Interrupted
from engram.store.bundles import add_to_bundle
from engram.store.remote import single_engram_path
from engram.train.options import named
from engram.train.run import run_folder
from engram.util.files import make_private_folder, private, write_atomically
from engram.util.text import counted, first_line, visible

#: Called with all jobs as they are now, and with what happened, for a log, or "".
Show = Callable[[Sequence[Status], str], object]
_POLL = 0.5  # seconds


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make the farm's folder, which no other farm can have in the meantime."""
    try:
        make_private_folder(folder)
        lock = FileLock(folder / "lock", timeout=0, mode=0o600).acquire()
    except Timeout:
        busy = f"Another farm is at work in {folder}; wait for it, or stop it."
        raise EngramError(busy) from None
    except OSError as error:
        raise EngramError(f"{folder} cannot be written ({error.strerror or error}).") from None
    with lock:
        yield


def run_farm(
    plan: Sequence[PlannedJob],
    folder: Path,
    workers: AbstractContextManager[Workers],
    show: Show,
    retries: int = 2,
) -> FarmResult:
    """Train what is not trained yet, in a folder that is `held`.

    A job whose process or node is lost is tried again, `retries` times. Where somebody stops the
    farm (`Interrupted`), what runs has written a checkpoint.
    """
    began, jobs = time.monotonic(), counted(len(plan), "job")
    farm = _Farm([Status(planned) for planned in plan], folder, retries, show)
    farm.log(f"{jobs} begin")
    try:
        with workers as working:
            farm.run(working)
    except KeyboardInterrupt:
        done = sum(status.state == "done" for status in farm.statuses)
        farm.log(f"stopped: {done} of {jobs} done")
        raise Interrupted(
            f"Stopped; {done} of {jobs} are done. Run the same command again to continue."
        ) from None
    result = FarmResult(folder, farm.statuses, time.monotonic() - began)
    result.write_page()
    farm.log(result.complaint or f"all done in {result.seconds:.0f} s")
    return result


class _Farm:
    """The loop of a farm: start what can start, and take in what has ended.

    A job waits for the jobs that it extends, and while another one fills the cache that it needs.
    If a job fails, those that extend it do too, and the others go on.
    """

    def __init__(self, statuses: list[Status], folder: Path, retries: int, show: Show) -> None:
        self.statuses, self._folder, self._retries, self._show = statuses, folder, retries, show
        self._by_name = {status.name: status for status in statuses}
        self._running: dict[Future[Ended], Status] = {}

    def run(self, workers: Workers) -> None:
        """Until every job is done or has failed."""
        while True:
            self._start(workers)
            self._show(self.statuses, "")
            if not self._running:
                return
            ended, _ = wait(self._running, _POLL, FIRST_COMPLETED)
            self._read(workers.queue)
            for future in ended:
                self._end(self._running.pop(future), future, workers)

    def log(self, text: str) -> None:
        """Tell what happened."""
        with open(self._folder / "farm.log", "a", encoding="utf-8", opener=private) as log:
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {visible(text)}", file=log)
        self._show(self.statuses, text)

    def _start(self, workers: Workers) -> None:
        free = workers.slots() - len(self._running)
        filled = {"", *(one.planned.cache for one in self.statuses if one.node is not None)}
        filling = {one.planned.cache for one in self._running.values()} - filled
        for status in self.statuses:
            if status.state != "waiting":
                continue
            parents = [self._by_name[name] for name in status.planned.job.parents]
            if failed := [parent.name for parent in parents if parent.state == "failed"]:
                self._fail(status, f"It extends {failed[0]}, which failed.")
            elif (
                free > 0
                and status.planned.cache not in filling
                and all(parent.state == "done" for parent in parents)
            ):
                free -= 1
                filling |= {status.planned.cache} - filled
                status.state, status.began = "running", time.monotonic()
                self.log(f"{status.name}: running")
                self._submit(status, workers)

    def _submit(self, status: Status, workers: Workers) -> None:
        status.attempts += 1
        group = [one for one in self.statuses if one.planned.group == status.planned.group]
        near = next((one.node for one in group if one.node), "")
        self._running[workers.submit(status.planned.job, near)] = status

    def _read(self, queue: Any) -> None:
        """Take in what running jobs have told; a queue that is lost loses no job."""
        with contextlib.suppress(Exception):
            for _ in range(queue.qsize()):
                name, kind, text = queue.get_nowait()
                if kind == "said":
                    self.log(f"{name}: {text}")
                elif kind == "ready":
                    self._by_name[name].node = text
                else:
                    self._by_name[name].note = text

    def _end(self, status: Status, future: Future[Ended], workers: Workers) -> None:
        try:
            ended = future.result()
        except Exception as error:
            ended = Ended("lost", f"its process or its node was lost ({first_line(error)})")
        if ended.state == "done":
            self._finish(status, ended)
        elif ended.state == "failed":
            self._fail(status, ended.why)
        elif status.attempts <= self._retries:
            status.state, status.note = "retried", f"attempt {status.attempts + 1}: {ended.why}"
            self.log(f"{status.name}: retried, {status.note}")
            self._submit(status, workers)
        else:
            log = self._folder / f"{status.name}.log"
            see = f"; see {log}" if log.exists() else ""
            times = counted(status.attempts, "time")
            self._fail(status, f"It crashed {times}: {ended.why}{see}.")

    def _finish(self, status: Status, ended: Ended) -> None:
        job, result = status.planned.job, ended.result | {"path": str(status.planned.job.out)}
        kept = run_folder(job.out) / "attempts.txt"
        try:
            write_files(self._folder, ended.files)
            parents = [single_engram_path(named(text)[1]) for text in job.extends]
            add_to_bundle(job.bundle, [*parents, job.out])
            if result["finished_before"]:  # how many attempts its training took
                with contextlib.suppress(OSError, ValueError):
                    status.attempts = int(kept.read_text(encoding="ascii"))
            write_atomically(kept, f"{status.attempts}\n".encode(), owner_only=True)
        except EngramError as error:
            self._fail(status, str(error))
            return
        status.state, status.note, status.ended = "done", "", time.monotonic()
        status.result = result
        earlier = ", trained by an earlier run" if result["finished_before"] else ""
        self.log(f"{status.name}: done, {result['score']}, {status.seconds:.0f} s{earlier}")

    def _fail(self, status: Status, why: str) -> None:
        status.state, status.note, status.ended = "failed", why, time.monotonic()
        self.log(f"{status.name}: failed, {why}")
