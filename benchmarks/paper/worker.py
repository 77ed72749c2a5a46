"""Work through a list of jobs; several processes can share one list.

A job is locked while a process works on it, and a job that has a record is skipped. So processes
never do the same work, and killing one loses only the run it was in.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from benchmarks.paper.runs import datasets

WAIT = 5.0  # seconds before looking again for jobs that other processes work on


class Job(Protocol):
    """Something to run that leaves records."""

    @property
    def name(self) -> str: ...

    def missing(self) -> bool:
        """Whether a record is missing."""

    def ready(self) -> bool:
        """Whether the results that it needs exist."""

    def work(self, say: Callable[[str], object]) -> None:
        """Run what is missing and append the records."""


def work_through(jobs: Sequence[Job], limit: int = 0) -> None:
    """Do the missing jobs in order, together with other processes; stop after `limit` jobs."""
    torch.set_num_threads(1)
    done = 0
    while todo := [job for job in jobs if job.missing()]:
        if limit and done == limit:
            return
        if _work_on_first(todo):
            done += 1
        else:
            time.sleep(WAIT)  # other processes work on the rest, or on what the rest needs


def _work_on_first(jobs: Sequence[Job]) -> bool:
    """Do the first job that is ready and free; False if there is none."""
    for job in jobs:
        if not job.missing() or not job.ready():
            continue
        with locked(job.name.replace(" ", "-")) as ours:
            if ours and job.missing():
                print(time.strftime("%H:%M:%S"), job.name, flush=True)
                job.work(lambda text: print("        ", text, flush=True))
                return True
    return False


@contextmanager
def locked(name: str) -> Iterator[bool]:
    """Whether this process got the lock of that name, which ends with the process."""
    lock = datasets.WORK / "locks" / f"{name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
