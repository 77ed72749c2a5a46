"""Measurements of requests: metrics for Prometheus, and traces for OpenTelemetry.

Traces are written if OpenTelemetry is installed and its own environment variables configure it:
`OTEL_EXPORTER_OTLP_ENDPOINT` and the others of its specification.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.process_collector import ProcessCollector
from starlette.datastructures import Headers
from starlette.types import Scope

from engram import __version__
from engram.util.optional import require

METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # where prometheus_client adds up the processes
#: Stages in the order of a request: the body arrives, images are decoded, wait for a pass and are
#: part of one, and the answers are written.
BODY, DECODE, QUEUE, PASS, WRITE = "body", "decode", "queue", "pass", "write"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_IMAGES = (1, 2, 4, 8, 16, 32, 64)
_AGREEMENT = (0, 0.25, 0.5, 0.75, 0.9, 0.99, 1)
_CONFIDENCE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)
_FAMILIARITY = (-8, -4, -2, -1, -0.5, 0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2)
_MOST_SERIES = 2_000  # tasks, and pairs of task and class: each is a time series of Prometheus
OTHER = "other"
_CONFIGURED = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_OFF = ("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")


class Telemetry:
    """One service's metrics, in its own registry, and its traces.

    The workers of a service write their metrics to one folder, and each of them answers for all.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        if METRICS_FOLDER not in os.environ:  # which prometheus_client reads when it is imported
            ProcessCollector(registry=self.registry)
        counter = partial(Counter, namespace="engram", registry=self.registry)
        gauge = partial(Gauge, namespace="engram", registry=self.registry)
        histogram = partial(Histogram, namespace="engram", registry=self.registry, buckets=_SECONDS)
        self.requests = counter("requests", "Requests answered.", ["method", "path", "status"])
        self.request_seconds = histogram("request_seconds", "Time per request.", ["path"])
        stages = ", ".join((BODY, DECODE, QUEUE, PASS, WRITE))
        self.stage_seconds = histogram(
            "stage_seconds", f"Time per stage of a request: {stages}.", ["stage"]
        )
        self.batch_images = histogram("pass_images", "Images per forward pass.", buckets=_IMAGES)
        self.shadow_agreement = histogram(
            "shadow_agreement",
            "Agreement of a shadow with the version that answered, per image: 1 is full.",
            ["task", "version"],
            buckets=_AGREEMENT,
        )
        self.shadow_seconds = histogram(
            "shadow_seconds", "Time per pass of a shadow.", ["task", "version"]
        )
        self.answers = counter("answers", "Answers per task.", ["task"])
        self.classes = counter("answer_classes", "Answers per task and class.", ["task", "class"])
        self.confidence = histogram(
            "answer_confidence",
            "Probability of the likeliest class per task.",
            ["task"],
            buckets=_CONFIDENCE,
        )
        self.familiarity = histogram(
            "answer_familiarity",
            "Familiarity of images per task: 1 is usual, 5 % of validation images are below 0.",
            ["task"],
            buckets=_FAMILIARITY,
        )
        self.queued_images = gauge(
            "waiting_images", "Images accepted and not yet answered.", multiprocess_mode="livesum"
        )
        self.killed_decoders = counter(
            "killed_decoders", "Decoders killed at a limit and replaced."
        )
        self.tasks = gauge("tasks", "Tasks attached.", multiprocess_mode="livemostrecent")
        self._series = set[tuple[str, ...]]()
        self._provider = _trace_provider()
        self._tracer = self._provider and self._provider.get_tracer("engram", __version__)

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        if METRICS_FOLDER not in os.environ:
            return generate_latest(self.registry)
        together = CollectorRegistry()
        MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return generate_latest(together)

    def record_answer(
        self, task: str, classes: Sequence[str], confidence: float | None, familiarity: float | None
    ) -> None:
        """Count what a task answered for an image: its classes, and how sure and familiar it is."""
        task = task if self._has_room(task) else OTHER
        for name in classes:
            self.classes.labels(task, name if self._has_room(task, name) else OTHER).inc()
        if confidence is not None:
            self.confidence.labels(task).observe(confidence)
        if familiarity is not None:
            self.familiarity.labels(task).observe(familiarity)

    def _has_room(self, *labels: str) -> bool:
        """Whether these labels are counted by themselves: the first ones of all that come are."""
        if len(self._series) < _MOST_SERIES:
            self._series.add(labels)
        return labels in self._series

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record the time that the block takes, also if it fails."""
        began = time.time_ns()
        try:
            yield
        finally:
            self.record_stage(name, began, time.time_ns())

    def record_stage(self, name: str, began: int, ended: int) -> None:
        """Record a stage of the current request, with its times in nanoseconds."""
        ended = max(began, ended)  # a clock that is set back does not make it negative
        self.stage_seconds.labels(name).observe((ended - began) / 1e9)
        if self._tracer is not None:
            self._tracer.start_span(name, start_time=began).end(ended)

    def span(self, scope: Scope) -> Any:
        """A block of the span of a request, or None; below the client's, if it sends one."""
        if self._tracer is None:
            return nullcontext()
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        parent, start = extract(Headers(scope=scope)), self._tracer.start_as_current_span
        return start(scope["method"], context=parent, kind=SpanKind.SERVER)

    def record_request(
        self, span: Any, method: str, path: str, status: int, seconds: float
    ) -> None:
        """Count a request, and name its span after its route."""
        self.requests.labels(method, path, str(status)).inc()
        self.request_seconds.labels(path).observe(seconds)
        if span is not None:
            about = {"http.request.method": method, "http.route": path}
            span.update_name(f"{method} {path}")
            span.set_attributes({**about, "http.response.status_code": status})

    def stop(self) -> None:
        """Send the spans that wait."""
        if self._provider is not None:
            self._provider.shutdown()


def _trace_provider() -> Any:
    off = any(os.environ.get(name, "").lower() == value for name, value in _OFF)
    if off or not any(os.environ.get(name) for name in _CONFIGURED):
        return None
    for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        require(package, extra="tracing", purpose="Tracing")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", "engram")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
