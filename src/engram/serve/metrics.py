"""What happens, as numbers for Prometheus; and the headers that every answer carries."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector
from starlette.responses import JSONResponse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_HEADERS = 32_768  # bytes
_METHODS = ("GET", "POST", "PUT", "DELETE")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

#: Everything comes from the service itself, and nobody else may frame it.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Numbers:
    """The service's own registry: two services in one process do not share it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        made: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter(
            "engram_requests", "Requests answered.", ["method", "path", "status"], **made
        )
        self.seconds = Histogram(
            "engram_request_seconds",
            "Time to answer, by path.",
            ["path"],
            buckets=_SECONDS,
            **made,
        )
        self.passes = Histogram(
            "engram_pass_images", "Images in a pass.", buckets=(1, 2, 4, 8, 16, 32, 64), **made
        )
        self.answers = Counter("engram_answers", "Answers given, by task.", ["task"], **made)
        self.waiting = Gauge("engram_waiting_images", "Images accepted, not answered.", **made)
        self.tasks = Gauge("engram_tasks", "Tasks attached.", **made)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Observed:
    """Counts and times every request, adds the headers, and refuses those that are too long."""

    def __init__(self, app: ASGIApp, numbers: Numbers) -> None:
        self.app, self.numbers = app, numbers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), "500"

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                headers = message.setdefault("headers", [])
                given = {name.lower() for name, _ in headers}
                for name, value in HEADERS.items():
                    if name.encode() not in given:
                        headers.append((name.encode(), value.encode()))
            await send(message)

        app: ASGIApp = self.app
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEADERS:
            sentence = f"The headers have more than {MOST_HEADERS:,} bytes, which is the limit."
            app = JSONResponse({"error": sentence}, 431)
        try:
            await app(scope, receive, counted)
        finally:
            path = getattr(scope.get("route"), "path", "other")  # the template: few, and ours
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.numbers.requests.labels(method, path, status).inc()
            self.numbers.seconds.labels(path).observe(time.perf_counter() - began)
