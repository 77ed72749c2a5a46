"""Traces: a request and its stages, sent to a collector in OpenTelemetry's own format."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.support.serving import Opened, ask, picture

from engram.serve.telemetry import Telemetry

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A collector on this machine; the spans that it received."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield spans
    server.shutdown()


def test_a_request_is_a_trace_with_its_stages(bundle: Path, collector: list[Any]) -> None:
    opened = Opened(bundle)
    client = opened()
    client.headers["traceparent"] = f"00-{TRACE}-{PARENT}-01"
    ask(client, picture(1))
    client.__exit__(None, None, None)  # sends what waits
    spans = {span.name: span for span in collector}
    request = spans["POST /v1/predict"]
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    stages = ["body", "decode", "queue", "pass", "write"]
    assert set(stages) < set(spans)
    for name in stages:
        assert spans[name].parent_span_id == request.span_id
        assert spans[name].trace_id == request.trace_id
    begins = [spans[name].start_time_unix_nano for name in stages]
    assert begins == sorted(begins)
    status = {one.key: one.value for one in request.attributes}["http.response.status_code"]
    assert status.int_value == 200


@pytest.mark.parametrize("off", [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
def test_without_a_configuration_there_are_no_traces(
    bundle: Path, collector: list[Any], monkeypatch: pytest.MonkeyPatch, off: tuple[str, str]
) -> None:
    monkeypatch.setenv(*off)
    opened = Opened(bundle)
    client = opened()
    ask(client, picture(1))
    client.__exit__(None, None, None)
    assert collector == []


def test_a_collector_that_is_down_delays_no_answer(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    opened = Opened(bundle)
    client = opened()
    assert ask(client, picture(1))
    client.__exit__(None, None, None)


def test_stages_are_counted_for_prometheus(opened: Opened) -> None:
    client = opened()
    ask(client, picture(1))
    text = client.get("/metrics").text
    for stage in ("body", "decode", "queue", "pass", "write"):
        assert f'engram_stage_seconds_count{{stage="{stage}"}} 1.0' in text


def test_tracing_names_the_packages_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from engram import EngramError

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    with pytest.raises(EngramError, match=r"pip install .*opentelemetry-sdk"):
        Telemetry()
