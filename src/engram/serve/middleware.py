"""Around every request: refusals, security headers, metrics, the log, errors as responses."""

from __future__ import annotations

import time
from contextlib import ExitStack

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engram.errors import EngramError
from engram.serve.hosts import is_own_name
from engram.serve.limits import Shares
from engram.serve.log import Log
from engram.serve.problems import Problem
from engram.serve.service_settings import Settings
from engram.serve.telemetry import Telemetry
from engram.util.text import printable, without_paths

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

    def __init__(self, app: ASGIApp, settings: Settings, telemetry: Telemetry, log: Log) -> None:
        self.app, self.settings, self.telemetry, self.log = app, settings, telemetry, log
        self.clients = Shares(settings.client_requests, "requests in progress")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, text in SECURITY_HEADERS.items():
                    headers.setdefault(name, text)
            await send(message)

        with self.telemetry.span(scope) as span:
            try:
                with ExitStack() as shares:
                    app = self.app
                    try:
                        self._admit(scope, shares)
                    except Problem as problem:
                        app = error_response(problem)
                    await app(scope, receive, send_with_headers)
            finally:
                seconds, method = time.perf_counter() - began, scope["method"]
                # The route's template, not the path that was sent: clients must not create labels.
                path = getattr(scope.get("route"), "path", "other")
                counted = method if method in _METHODS else "other"
                self.telemetry.record_request(span, counted, path, status, seconds)
                self.log.event("request", client=client_address(scope), method=method,
                               path=scope["path"], status=status,
                               ms=round(1000 * seconds, 1))  # fmt: skip

    def _admit(self, scope: Scope, shares: ExitStack) -> None:
        """Refuse a request with a Problem, or count it for its client."""
        headers = Headers(scope=scope)
        if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADER_BYTES:
            raise Problem(
                431, f"The headers have more than {MAX_HEADER_BYTES:,} bytes, which is the limit."
            )
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy in front may believe the other one, and see other requests than this service.
            raise Problem(
                400,
                "The request has both Content-Length and Transfer-Encoding; send one of them.",
                close=True,
            )
        host, reached = headers.get("host", ""), (scope.get("server") or ("",))[0]
        if not is_own_name(host, self.settings.host, self.settings.allow_host, reached):
            raise Problem(
                421,
                f"This service does not answer to the name {printable(host, 80)!r}; start it with "
                "--allow-host NAME if it should.",
            )
        if scope["path"].startswith(_COUNTED):  # the others take no time; operators need them
            shares.enter_context(self.clients.taken(client_address(scope)))


def client_address(scope: Scope) -> str:
    """The address of a client, which a proxy that is trusted passes on in X-Forwarded-For."""
    return str((scope.get("client") or ("unknown",))[0])


def error_response(problem: Problem) -> JSONResponse:
    """The body of every error: {"error": a sentence}."""
    sentence = " ".join(problem.sentence.split())
    return JSONResponse({"error": sentence}, problem.status, problem.headers)


def add_handlers(app: FastAPI) -> None:
    """Answer every exception with an error response."""

    async def answer(request: Request, error: Exception) -> Response:
        return error_response(_problem(request, error))

    known = (Problem, EngramError, RequestValidationError, ClientDisconnect, HTTPException)
    for kind in (*known, Exception):
        app.add_exception_handler(kind, answer)


def _problem(request: Request, error: Exception) -> Problem:
    match error:
        case Problem():
            return error
        case EngramError():
            return Problem(422, without_paths(str(error)))
        case RequestValidationError():
            first = error.errors()[0]
            where = printable(".".join(map(str, first["loc"])), 60)
            return Problem(422, f"The request is invalid: {first['msg']} ({where}).")
        case ClientDisconnect():
            return Problem(400, "The body ended before it was complete.")
        case HTTPException():
            path, method = printable(request.url.path, 80), printable(request.method, 20)
            sentences = {
                404: f"There is nothing at {path}; /docs lists the endpoints.",
                405: f"{path} does not accept {method}; /docs lists the methods.",
            }
            sentence = sentences.get(error.status_code, str(error.detail))
            problem = Problem(error.status_code, sentence)
            problem.headers |= error.headers or {}
            return problem
    return Problem(500, "The service had an internal error; its log has the details.")
