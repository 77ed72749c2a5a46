"""Reading requests: a limit on bytes, a limit on time, and a sentence for every error."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from engram.serve.problems import Problem
from engram.serve.routes.schemas import PredictJson, PredictOptions
from engram.serve.settings import Settings
from engram.util.text import printable

Reserve = Callable[[int], None]  # counts more bytes, or raises a Problem

# Seconds in which a client may finish sending a refused body: only then does it read the answer.
_DRAIN_SECONDS = 2.0


@dataclass(frozen=True)
class PredictRequest:
    """A request to predict: images (name and bytes) and options."""

    images: list[tuple[str, bytes]]
    options: PredictOptions


class BodyBudget:
    """Limits the bytes of all requests in progress: many bodies within their own limits add up."""

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0

    @contextmanager
    def request(self) -> Iterator[Reserve]:
        """Counts the bytes of one request until it ends."""
        own = 0

        def reserve(size: int) -> None:
            nonlocal own
            if self.bytes + size > self.most:
                raise Problem(
                    503,
                    f"The requests in progress would have more than {self.most:,} bytes, which is "
                    "the limit for all of them; try again in a second.",
                    retry=1,
                )
            self.bytes += size
            own += size

        try:
            yield reserve
        finally:
            self.bytes -= own


async def read_body(
    request: Request, most: int, deadline: float, reserve: Reserve = lambda size: None
) -> AsyncGenerator[bytes, None]:
    """The body in pieces; a body that is too large or too slow is a Problem."""
    declared = request.headers.get("content-length", "")
    stream = request.stream()
    seen = 0
    too_much = declared.isdecimal() and int(declared) > most
    try:
        while not too_much:
            async with asyncio.timeout_at(deadline):
                piece = await anext(stream, None)
            if piece is None:
                return
            seen += len(piece)
            too_much = seen > most
            if not too_much:
                reserve(len(piece))
                yield piece
    except TimeoutError:
        raise Problem(
            408, "The body did not arrive in time; send it faster, or send less."
        ) from None
    except Problem:
        await _drain(stream, most)
        raise
    await _drain(stream, most)
    raise Problem(413, f"The body has more than {most:,} bytes, which is the limit.")


async def _drain(stream: AsyncIterator[bytes], most: int) -> None:
    """Read and drop the rest of a refused body, within limits."""
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for piece in stream:
                most -= len(piece)
                if most < 0:
                    return
    except TimeoutError:
        return


async def read_predict_request(
    request: Request, settings: Settings, deadline: float, reserve: Reserve
) -> PredictRequest:
    """Images and options from a multipart form, or from JSON with the images in base64."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = read_body(request, settings.max_body, deadline, reserve)
    if kind == "multipart/form-data":
        result = await _from_form(request, body, settings)
    elif kind == "application/json":
        result = _from_json(b"".join([piece async for piece in body]))
    else:
        raise Problem(
            415,
            f"The content type is {printable(kind, 60)!r}; send multipart/form-data with the field "
            "image, or application/json with images in base64.",
        )
    if len(result.images) > settings.max_images:
        raise Problem(422, _too_many(settings))
    return result


def _too_many(settings: Settings) -> str:
    return f"A request may have {settings.max_images} images at most; send fewer."


def _from_json(body: bytes) -> PredictRequest:
    try:
        document = PredictJson.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error, "The JSON body") from None
    images = []
    for i, text in enumerate(document.images):
        try:
            images.append((f"image {i + 1}", base64.b64decode(text.encode(), validate=True)))
        except (binascii.Error, ValueError):
            raise Problem(422, f"image {i + 1} is not valid base64.") from None
    return PredictRequest(images, document)


async def _from_form(
    request: Request, body: AsyncGenerator[bytes, None], settings: Settings
) -> PredictRequest:
    parser = MultiPartParser(
        request.headers, body, max_files=settings.max_images, max_fields=1000, max_part_size=10_000
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        if "Too many files" in error.message:
            raise Problem(422, _too_many(settings)) from None
        raise Problem(400, f"The form cannot be read: {error.message}") from None
    try:
        return await _from_fields(form)
    finally:
        await form.close()


async def _from_fields(form: FormData) -> PredictRequest:
    images: list[tuple[str, bytes]] = []
    options: dict[str, Any] = {}
    for field, value in form.multi_items():
        if field == "image" and isinstance(value, UploadFile):
            name = printable(value.filename or f"image {len(images) + 1}", 80)
            images.append((name, await value.read()))
        elif field == "image":
            raise Problem(422, "The field image holds text; send a file, with a filename.")
        elif isinstance(value, UploadFile):
            raise Problem(
                422, f"The field {printable(field, 40)!r} is a file; only image may be one."
            )
        elif field == "tasks":
            options.setdefault("tasks", []).extend(value.split(","))
        elif field in options:
            raise Problem(422, f"The field {printable(field, 40)!r} is given twice.")
        else:
            # Python refuses to read thousands of digits; the limit is far below them
            number = field == "top_k" and value.isdecimal() and len(value) < 100
            options[field] = int(value) if number else value
    if not images:
        raise Problem(422, "There is no image; send at least one file in the field image.")
    try:
        return PredictRequest(images, PredictOptions.model_validate(options))
    except ValidationError as error:
        raise _invalid(error, "The form") from None


def _invalid(error: ValidationError, what: str) -> Problem:
    """The first error as a sentence; a body that is not JSON at all gets status 400."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return Problem(400, f"{what} is not JSON: {printable(first['msg'])}.")
    where = ".".join(str(part) for part in first["loc"])
    return Problem(
        422, f"{what} is invalid at {printable(where, 60)!r}: {printable(first['msg'])}."
    )
