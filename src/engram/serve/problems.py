"""What the service answers when it does not answer: a status and a sentence."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from engram.errors import EngramError
from engram.images.decode import BadImage, LargeImage
from engram.util.text import printable


class Problem(Exception):
    """Ends a request with this status; `retry` is after how many seconds to try again."""

    def __init__(self, status: int, sentence: str, *, retry: int | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.retry = status, sentence, retry

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry is None else {"Retry-After": str(self.retry)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def add_handlers(app: FastAPI) -> None:
    """Whatever goes wrong is a status and {"error": a sentence}."""

    def told(status: int, sentence: str, headers: dict[str, str] | None = None) -> JSONResponse:
        return JSONResponse({"error": " ".join(sentence.split())}, status, headers)

    @app.exception_handler(Problem)
    async def problem(request: Request, error: Problem) -> Response:
        return told(error.status, error.sentence, error.headers)

    @app.exception_handler(BadImage)
    async def bad_image(request: Request, error: BadImage) -> Response:
        what = (
            "a smaller one" if isinstance(error, LargeImage) else "a JPEG, PNG, WebP or other image"
        )
        return told(422, f"{str(error).rstrip('.')}. Send {what}.")

    @app.exception_handler(EngramError)
    async def refused(request: Request, error: EngramError) -> Response:
        return told(422, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return told(422, f"The request cannot be understood: {error.errors()[0]['msg']}.")

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return told(400, "The body ended before it was whole.")

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        path = printable(request.url.path, 80)
        sentences = {
            404: f"There is nothing at {path}; /docs lists what there is.",
            405: f"{path} does not take {printable(request.method, 20)}; /docs lists what it "
            "takes.",
        }
        sentence = sentences.get(error.status_code, str(error.detail))
        return told(error.status_code, sentence, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def ours(request: Request, error: Exception) -> Response:
        return told(500, "Something went wrong inside the service; its log says what.")
