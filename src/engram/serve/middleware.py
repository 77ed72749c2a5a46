"""What happens around every request: security headers, a limit on header size, metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse

from engram.serve.metrics import Metrics

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_HEADER_BYTES = 32_768
_METHODS = ("GET", "POST", "PUT", "DELETE")

#: Browsers may load resources from the service alone, and no other site may frame it.
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class RequestMiddleware:
    """Counts and times requests, adds security headers, and refuses headers that are too long."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), "500"

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                _add_security_headers(message)
            await send(message)

        app: ASGIApp = self.app
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            sentence = f"The headers have more than {MAX_HEADER_BYTES:,} bytes, which is the limit."
            app = JSONResponse({"error": sentence}, 431)
        try:
            await app(scope, receive, send_with_headers)
        finally:
            self._record(scope, status, time.perf_counter() - began)

    def _record(self, scope: Scope, status: str, seconds: float) -> None:
        # The route's template, not the path that was sent: clients must not create labels.
        path = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self.metrics.requests.labels(method, path, status).inc()
        self.metrics.request_seconds.labels(path).observe(seconds)


def _add_security_headers(message: Message) -> None:
    headers = message.setdefault("headers", [])
    present = {name.lower() for name, _ in headers}
    for name, value in SECURITY_HEADERS.items():
        if name.encode() not in present:
            headers.append((name.encode(), value.encode()))
