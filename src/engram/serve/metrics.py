"""What Prometheus reads from the service."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """One service's metrics, in its own registry: two services in one process do not share it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        own: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter(
            "engram_requests", "Requests answered.", ["method", "path", "status"], **own
        )
        self.request_seconds = Histogram(
            "engram_request_seconds", "Time per request.", ["path"], buckets=_SECONDS, **own
        )
        self.batch_images = Histogram(
            "engram_pass_images",
            "Images per forward pass.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            **own,
        )
        self.answers = Counter("engram_answers", "Answers per task.", ["task"], **own)
        self.queued_images = Gauge(
            "engram_waiting_images", "Images accepted and not yet answered.", **own
        )
        self.killed_decoders = Counter(
            "engram_killed_decoders", "Decoders killed at a limit and replaced.", **own
        )
        self.tasks = Gauge("engram_tasks", "Tasks attached.", **own)

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self.registry)
