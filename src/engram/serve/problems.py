"""Errors as responses: a status and a sentence."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from engram.errors import EngramError
from engram.images.decode import BadImage, LargeImage
from engram.serve.decoding.formats import FORMATS
from engram.util.text import printable, without_paths


class Problem(Exception):
    """Ends a request with this status.

    `retry` is the number of seconds before trying again; `close` ends the connection, too.
    """

    def __init__(
        self, status: int, sentence: str, *, retry: int | None = None, close: bool = False
    ) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.retry, self.close = status, sentence, retry, close

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry is None else {"Retry-After": str(self.retry)}
        headers |= {"Connection": "close"} if self.close else {}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def error_response(
    status: int, sentence: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    """The body of every error: {"error": a sentence}."""
    return JSONResponse({"error": " ".join(sentence.split())}, status, headers)


def add_handlers(app: FastAPI) -> None:
    """Answer every exception with an error response."""

    @app.exception_handler(Problem)
    async def problem(request: Request, error: Problem) -> Response:
        return error_response(error.status, error.sentence, error.headers)

    @app.exception_handler(BadImage)
    async def bad_image(request: Request, error: BadImage) -> Response:
        what = "a smaller one" if isinstance(error, LargeImage) else f"a good {FORMATS}"
        return error_response(422, f"{str(error).rstrip('.')}. Send {what}.")

    @app.exception_handler(EngramError)
    async def user_error(request: Request, error: EngramError) -> Response:
        return error_response(422, without_paths(str(error)))

    @app.exception_handler(RequestValidationError)
    async def invalid_request(request: Request, error: RequestValidationError) -> Response:
        return error_response(422, f"The request is invalid: {error.errors()[0]['msg']}.")

    @app.exception_handler(ClientDisconnect)
    async def disconnected(request: Request, error: ClientDisconnect) -> Response:
        return error_response(400, "The body ended before it was complete.")

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path, method = printable(request.url.path, 80), printable(request.method, 20)
        sentences = {
            404: f"There is nothing at {path}; /docs lists the endpoints.",
            405: f"{path} does not accept {method}; /docs lists the methods.",
        }
        sentence = sentences.get(error.status_code, str(error.detail))
        return error_response(error.status_code, sentence, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        return error_response(500, "The service had an internal error; its log has the details.")
