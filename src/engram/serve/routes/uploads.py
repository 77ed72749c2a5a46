"""Reading requests: never more bytes than allowed, never for longer, every fault a sentence."""

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
from engram.serve.schemas import Ask, AskJson
from engram.serve.settings import Settings
from engram.util.text import printable

Take = Callable[[int], None]  # so many bytes more, or a Problem

_LINGER = 2.0  # seconds to let a client finish what will not be read, so that it reads the answer


@dataclass(frozen=True)
class Asked:
    """A request to predict: pictures (what they are called, their bytes) and options."""

    pictures: list[tuple[str, bytes]]
    options: Ask


class Bodies:
    """Counts the bytes of all requests of this moment: with many, each below its limit is much."""

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0

    @contextmanager
    def one(self) -> Iterator[Take]:
        """Counts what one request brings until it is over."""
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            if self.bytes + size > self.most:
                raise Problem(
                    503,
                    f"The requests of this moment have {self.most:,} bytes together, which is the "
                    "limit here; try again in a second.",
                    retry=1,
                )
            self.bytes += size
            mine += size

        try:
            yield take
        finally:
            self.bytes -= mine


async def read_body(
    request: Request, most: int, deadline: float, take: Take = lambda size: None
) -> AsyncGenerator[bytes, None]:
    """The body, piece by piece; too much of it, or too slow, is a Problem. `take` counts it."""
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
                take(len(piece))
                yield piece
    except TimeoutError:
        raise Problem(
            408, "The body did not arrive in time; send it faster, or send less."
        ) from None
    except Problem:
        await _discard(stream, most)
        raise
    await _discard(stream, most)
    raise Problem(413, f"The body has more than {most:,} bytes, which is the limit here.")


async def _discard(stream: AsyncIterator[bytes], most: int) -> None:
    try:
        async with asyncio.timeout(_LINGER):
            async for piece in stream:
                most -= len(piece)
                if most < 0:
                    return
    except TimeoutError:
        return


async def read_asked(request: Request, settings: Settings, deadline: float, take: Take) -> Asked:
    """Pictures and options from a multipart form, or from JSON with the pictures in base64."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = read_body(request, settings.max_body, deadline, take)
    if kind == "multipart/form-data":
        asked = await _from_form(request, body, settings)
    elif kind == "application/json":
        asked = _from_json(b"".join([piece async for piece in body]))
    else:
        raise Problem(
            415,
            f"The content type is {printable(kind, 60)!r}; send multipart/form-data with the field "
            "image, or application/json with images in base64.",
        )
    if len(asked.pictures) > settings.max_images:
        raise Problem(422, _too_many(settings))
    return asked


def _too_many(settings: Settings) -> str:
    return f"A request may have {settings.max_images} images; send fewer at a time."


def _from_json(body: bytes) -> Asked:
    try:
        ask = AskJson.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error, "The JSON body") from None
    pictures = []
    for i, text in enumerate(ask.images):
        try:
            pictures.append((f"image {i + 1}", base64.b64decode(text.encode(), validate=True)))
        except (binascii.Error, ValueError):
            raise Problem(422, f"image {i + 1} is not valid base64.") from None
    return Asked(pictures, ask)


async def _from_form(
    request: Request, body: AsyncGenerator[bytes, None], settings: Settings
) -> Asked:
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


async def _from_fields(form: FormData) -> Asked:
    pictures: list[tuple[str, bytes]] = []
    options: dict[str, Any] = {}
    for field, value in form.multi_items():
        if field == "image" and isinstance(value, UploadFile):
            name = printable(value.filename or f"image {len(pictures) + 1}", 80)
            pictures.append((name, await value.read()))
        elif field == "image":
            raise Problem(422, "The field image holds text; send a file, with a filename.")
        elif isinstance(value, UploadFile):
            raise Problem(
                422, f"The field {printable(field, 40)!r} is a file; only image may be one."
            )
        elif field == "tasks":
            options.setdefault("tasks", []).extend(value.split(","))
        elif field in options:
            raise Problem(422, f"The field {printable(field, 40)!r} is there twice.")
        else:
            # Python refuses to read thousands of digits; the limit is far below them
            number = field == "top_k" and value.isdecimal() and len(value) < 100
            options[field] = int(value) if number else value
    if not pictures:
        raise Problem(422, "There is no image; send at least one file in the field image.")
    try:
        return Asked(pictures, Ask.model_validate(options))
    except ValidationError as error:
        raise _invalid(error, "The form") from None


def _invalid(error: ValidationError, what: str) -> Problem:
    """The first thing that is wrong, as a sentence; a body that is no JSON at all is a 400."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return Problem(400, f"{what} is not JSON: {printable(first['msg'])}.")
    where = ".".join(str(part) for part in first["loc"])
    return Problem(
        422, f"{what} has a fault at {printable(where, 60)!r}: {printable(first['msg'])}."
    )
