"""Waiting for facts, and measuring work by the processor: a busy machine changes neither."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: Seconds after which a test that would wait for ever fails. It decides nothing else.
FUSE = 300.0


def wait_until(fact: Callable[[], object], why: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + FUSE
    while not fact():
        assert time.monotonic() < deadline, why()
        time.sleep(0.005)


def running(pid: int) -> bool:
    """Whether a process is neither gone nor about to be."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def computing_less_than(seconds: float) -> Iterator[None]:
    """Fails where this process computes for longer, whatever others compute meanwhile."""
    began = time.process_time()
    yield
    assert time.process_time() - began < seconds
