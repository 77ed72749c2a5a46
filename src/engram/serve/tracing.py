"""Traces of requests for OpenTelemetry, if it is installed and configured; nothing otherwise.

The environment variables of OpenTelemetry configure it: `OTEL_EXPORTER_OTLP_ENDPOINT` and the
others of its specification.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from engram import __version__
from engram.util.optional import require

if TYPE_CHECKING:
    from starlette.types import Scope

_CONFIGURED = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_OFF = ("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")


class Tracing:
    """Writes spans; without a configuration every method does nothing."""

    def __init__(self) -> None:
        self._provider: Any = None
        self._tracer: Any = None
        off = any(os.environ.get(name, "").lower() == value for name, value in _OFF)
        if off or not any(os.environ.get(name) for name in _CONFIGURED):
            return
        for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
            require(package, extra="tracing", purpose="Tracing")
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        name = os.environ.get("OTEL_SERVICE_NAME", "engram")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("engram", __version__)

    @contextlib.contextmanager
    def request(self, scope: Scope) -> Iterator[Any]:
        """The span of a request, below that of the client if it sends `traceparent`.

        Gives the span, or None.
        """
        if self._tracer is None:
            yield None
            return
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        headers = {
            name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"]
        }
        with self._tracer.start_as_current_span(
            scope["method"], context=extract(headers), kind=SpanKind.SERVER
        ) as span:
            yield span

    def stage(self, name: str, began: int, ended: int) -> None:
        """A part of the current request that is over, with its times in nanoseconds."""
        if self._tracer is not None:
            self._tracer.start_span(name, start_time=began).end(ended)

    def stop(self) -> None:
        """Send what waits."""
        if self._provider is not None:
            self._provider.shutdown()


def finish(span: Any, method: str, path: str, status: int) -> None:
    """Name the span of a request after its route, and record the status."""
    if span is not None:
        span.update_name(f"{method} {path}")
        span.set_attributes(
            {"http.request.method": method, "http.route": path, "http.response.status_code": status}
        )
