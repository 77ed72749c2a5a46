"""What a decoder runs in tests, for a process that has to import nothing else."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

from engram.serve.decoding import worker
from engram.serve.decoding.worker import BodyDecoder


def work_for(connection: Connection, seconds: float) -> None:
    """A decoder that answers nothing for so many seconds, if any."""
    if seconds:
        BodyDecoder.answer = lambda *_: time.sleep(seconds)  # type: ignore[assignment,method-assign]
    worker.work(connection, 10**9, 1)
