"""How long the parts of a request take: for Prometheus, and as spans of its trace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from engram.serve.metrics import Metrics
from engram.serve.tracing import Tracing

#: In the order of a request: the body arrives, images are decoded, wait for a pass and are part of
#: one, and the answers are written.
BODY, DECODE, QUEUE, PASS, WRITE = "body", "decode", "queue", "pass", "write"


class Stages:
    """Records what requests go through."""

    def __init__(self, metrics: Metrics, tracing: Tracing) -> None:
        self._metrics, self._tracing = metrics, tracing

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record the time that the block takes, also if it fails."""
        began = time.time_ns()
        try:
            yield
        finally:
            self.record(name, began, time.time_ns())

    def record(self, name: str, began: int, ended: int) -> None:
        """Record a stage of the current request, with its times in nanoseconds."""
        ended = max(began, ended)  # a clock that is set back does not make it negative
        self._metrics.stage_seconds.labels(name).observe((ended - began) / 1e9)
        self._tracing.stage(name, began, ended)
