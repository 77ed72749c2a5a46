"""Errors as responses: a status and a sentence."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from engram.errors import EngramError
from engram.util.text import printable, without_paths


class Problem(Exception):
    """Ends a request with this status.

    `retry` is the number of seconds before trying again; `close` ends the connection, too.
    """

    def __init__(
        self, status: int, sentence: str, *, retry: int | None = None, close: bool = False
    ) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence
        self.headers = {} if retry is None else {"Retry-After": str(retry)}
        self.headers |= {"Connection": "close"} if close else {}
        self.headers |= {"WWW-Authenticate": "Bearer"} if status == 401 else {}

    @property
    def response(self) -> JSONResponse:
        """The body of every error: {"error": a sentence}."""
        return JSONResponse({"error": " ".join(self.sentence.split())}, self.status, self.headers)


def add_handlers(app: FastAPI) -> None:
    """Answer every exception with an error response."""

    async def answer(request: Request, error: Exception) -> Response:
        return _problem(request, error).response

    for kind in (EngramError, RequestValidationError, ClientDisconnect, HTTPException):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(Problem, answer)
    app.add_exception_handler(Exception, answer)


def _problem(request: Request, error: Exception) -> Problem:
    match error:
        case Problem():
            return error
        case EngramError():
            return Problem(422, without_paths(str(error)))
        case RequestValidationError():
            return Problem(422, f"The request is invalid: {error.errors()[0]['msg']}.")
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
