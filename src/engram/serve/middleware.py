"""What happens around every request: refusals, security headers, metrics, the log."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from engram.serve.clients import Shares
from engram.serve.hosts import AllowedHosts
from engram.serve.log import Log
from engram.serve.metrics import Metrics
from engram.serve.problems import Problem, error_response
from engram.serve.tracing import Tracing, finish
from engram.util.text import printable

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_HEADER_BYTES = 32_768
_COUNTED = ("/v1/", "/v2/models/")
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
    """Refuses what no endpoint should see, adds security headers, counts, times and logs."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        log: Log,
        tracing: Tracing,
        hosts: AllowedHosts,
        clients: Shares,
    ) -> None:
        self.app, self.metrics, self.log, self.tracing = app, metrics, log, tracing
        self.hosts, self.clients = hosts, clients

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                _add_security_headers(message)
            await send(message)

        with self.tracing.request(scope) as span:
            try:
                with ExitStack() as shares:
                    app = self.app
                    try:
                        self._admit(scope, shares)
                    except Problem as problem:
                        app = error_response(problem.status, problem.sentence, problem.headers)
                    await app(scope, receive, send_with_headers)
            finally:
                self._record(scope, status, time.perf_counter() - began, span)

    def _admit(self, scope: Scope, shares: ExitStack) -> None:
        """Refuse a request with a Problem, or count it for its client."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            raise Problem(
                431, f"The headers have more than {MAX_HEADER_BYTES:,} bytes, which is the limit."
            )
        given = dict(headers)
        if b"content-length" in given and b"transfer-encoding" in given:
            # A proxy in front may believe the other one, and see other requests than this service.
            raise Problem(
                400,
                "The request has both Content-Length and Transfer-Encoding; send one of them.",
                close=True,
            )
        host = given.get(b"host", b"").decode("latin-1")
        if not self.hosts.allows(host, (scope.get("server") or ("",))[0]):
            raise Problem(
                421,
                f"This service does not answer to the name {printable(host, 80)!r}; start it with "
                "--allow-host NAME if it should.",
            )
        if scope["path"].startswith(_COUNTED):  # the others take no time; operators need them
            shares.enter_context(self.clients.taken(client_of(scope)))

    def _record(self, scope: Scope, status: int, seconds: float, span: Any) -> None:
        # The route's template, not the path that was sent: clients must not create labels.
        path = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        finish(span, method, path, status)
        self.metrics.requests.labels(method, path, str(status)).inc()
        self.metrics.request_seconds.labels(path).observe(seconds)
        self.log.request(client_of(scope), scope["method"], scope["path"], status, seconds)


def client_of(scope: Scope) -> str:
    """The address of a client, which a proxy that is trusted passes on in X-Forwarded-For."""
    return str((scope.get("client") or ("unknown",))[0])


def _add_security_headers(message: Message) -> None:
    headers = message.setdefault("headers", [])
    present = {name.lower() for name, _ in headers}
    for name, value in SECURITY_HEADERS.items():
        if name.encode() not in present:
            headers.append((name.encode(), value.encode()))
