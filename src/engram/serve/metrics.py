"""What Prometheus reads from the service."""

from __future__ import annotations

import os
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.process_collector import ProcessCollector

from engram.serve.workers import METRICS_FOLDER

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """One service's metrics, in its own registry: two services in one process do not share it.

    The workers of a service write theirs to one folder, and each of them answers for all.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        if not _of_workers():
            ProcessCollector(registry=self.registry)
        own: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter(
            "engram_requests", "Requests answered.", ["method", "path", "status"], **own
        )
        self.request_seconds = Histogram(
            "engram_request_seconds", "Time per request.", ["path"], buckets=_SECONDS, **own
        )
        self.stage_seconds = Histogram(
            "engram_stage_seconds",
            "Time per stage of a request: body, decode, queue, pass, write.",
            ["stage"],
            buckets=_SECONDS,
            **own,
        )
        self.batch_images = Histogram(
            "engram_pass_images",
            "Images per forward pass.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            **own,
        )
        self.answers = Counter("engram_answers", "Answers per task.", ["task"], **own)
        self.queued_images = Gauge(
            "engram_waiting_images",
            "Images accepted and not yet answered.",
            multiprocess_mode="livesum",
            **own,
        )
        self.killed_decoders = Counter(
            "engram_killed_decoders", "Decoders killed at a limit and replaced.", **own
        )
        self.tasks = Gauge("engram_tasks", "Tasks attached.", multiprocess_mode="livemax", **own)

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        if not _of_workers():
            return generate_latest(self.registry)
        together = CollectorRegistry()
        MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return generate_latest(together)


def _of_workers() -> bool:
    """Whether prometheus_client adds up several processes, which it decides when it is imported."""
    return METRICS_FOLDER in os.environ
