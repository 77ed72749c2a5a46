"""From the body of a request to images and options: a form, or JSON with images in base64.

Limits are part of the schema, and the first error ends the work.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from engram.serve.routes.schemas import MAX_TASKS, Options, json_body
from engram.util.text import counted, printable

MAX_FIELDS = 1000
MAX_FIELD_BYTES = 10_000
MAX_FIELDS_BYTES = 100_000  # of all fields: more than the names of all tasks need
MAX_UNICODE_BYTES = 100_000  # of a JSON body that has more than ASCII

# Other escapes than those of the first 256 characters, which take one byte each in memory.
_UNICODE_ESCAPE = re.compile(rb"\\u(?!00)")


class Refusal(Exception):
    """A request that is answered with this status and sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


@dataclass(frozen=True)
class Upload:
    """The images of a request (name, and the encoded image), and its options.

    With a `shape`, they are arrays of float32 instead: pixels, or vectors.
    """

    images: list[tuple[str, bytes]]
    options: BaseModel
    shape: tuple[int, ...] | None = None


def read_upload(options: type[Options], kind: str, body: bytearray, most: int) -> Upload:
    """At most so many images, and options, from a body; anything wrong is a Refusal.

    `kind` is its content type. The body is cleared as soon as it is not needed any more.
    """
    if kind.partition(";")[0].strip().lower() == "application/json":
        return _from_json(options, body, most)
    return _from_fields(options, _read_form(kind, body, most))


# JSON


def _from_json(options: type[Options], body: bytearray, most: int) -> Upload:
    known = list(options.model_fields)
    hint = f"it needs the list images, and may have {', '.join(known)}"
    check_json(body, most + MAX_TASKS + len(known), hint)
    try:
        document = json_body(options, most).model_validate_json(body)
    except ValidationError as error:
        raise invalid(error, "The JSON body", most) from None
    body.clear()
    return Upload(named(decode_base64(document.images)), document)


def decode_base64(texts: list[Any]) -> list[bytes]:
    """Images from texts, which are cleared one by one: never are all of them in memory twice."""
    images: list[bytes] = []
    texts.reverse()
    while texts:
        try:
            images.append(base64.b64decode(texts.pop(), validate=True))
        except (binascii.Error, TypeError, ValueError):
            name = f"image {len(images) + 1}"
            raise Refusal(422, f"{name} is not valid base64, as images in JSON are.") from None
    return images


def named(images: list[bytes]) -> list[tuple[str, bytes]]:
    """Images without names of their own, by their places."""
    return [(f"image {i + 1}", data) for i, data in enumerate(images)]


def check_json(text: bytearray, most: int, hint: str) -> None:
    """Refuse JSON that would take far more memory than it has bytes, before it is parsed.

    Every value would take memory. What separates them is counted; neither base64 nor the names of
    tasks and options have these characters. And one character beyond ASCII can make every other of
    its text take four bytes.
    """
    if sum(text.count(mark) for mark in (b",", b"[", b"{")) > most:
        raise Refusal(422, f"The JSON has more than {most:,} values, which is the limit; {hint}.")
    if len(text) <= MAX_UNICODE_BYTES:
        return
    if not text.isascii() or _UNICODE_ESCAPE.search(text):
        raise Refusal(
            422,
            f"The JSON body has characters outside ASCII, and more than {MAX_UNICODE_BYTES:,} "
            "bytes; images in base64 and the names of tasks need ASCII only.",
        )


# Forms


@dataclass
class _FormPart:
    """A field of a form, or a file if there is a file name."""

    disposition: bytes = b""
    field_name: str = ""
    file_name: str | None = None
    data: bytearray = field(default_factory=bytearray)


class _FormReader:
    """Collects the parts of a form; the parser calls the methods in the order of the body."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.parts: list[_FormPart] = []
        self.complete = False
        self._files = self._field_bytes = 0
        self._header, self._value = bytearray(), bytearray()

    def on_part_begin(self) -> None:
        self.parts.append(_FormPart())

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self.parts[-1].disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def on_headers_finished(self) -> None:
        part = self.parts[-1]
        _, options = parse_options_header(part.disposition)
        if b"name" not in options:
            raise Refusal(400, "The form cannot be read: a part has no name.")
        part.field_name = _text(options[b"name"])
        if b"filename" in options:
            part.file_name = _text(options[b"filename"])
            self._files += 1
        if self._files > self.most:
            raise too_many(self.most)
        if len(self.parts) - self._files > MAX_FIELDS:
            raise Refusal(400, f"The form has more than {MAX_FIELDS:,} fields; send fewer.")

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        part = self.parts[-1]
        part.data += memoryview(data)[start:end]
        if part.file_name is not None:
            return
        self._field_bytes += end - start
        if self._field_bytes > MAX_FIELDS_BYTES:
            raise Refusal(
                400, f"The fields of the form have more than {MAX_FIELDS_BYTES:,} bytes; send less."
            )
        if len(part.data) > MAX_FIELD_BYTES:
            raise Refusal(
                400,
                f"The field {printable(part.field_name, 40)!r} has more than {MAX_FIELD_BYTES:,} "
                "bytes; an image needs a filename.",
            )

    def on_end(self) -> None:
        self.complete = True


def _read_form(kind: str, body: bytearray, most: int) -> list[_FormPart]:
    boundary = parse_options_header(kind)[1].get(b"boundary")
    if not boundary:
        raise Refusal(400, "The form cannot be read: its content type has no boundary.")
    reader = _FormReader(most)
    callbacks: Any = {name: getattr(reader, name) for name in dir(reader) if name[:3] == "on_"}
    try:
        parser = MultipartParser(boundary, callbacks)
        parser.write(body)  # type: ignore[arg-type]  # it only slices and searches
        parser.finalize()
    except FormParserError as error:
        reason = printable(str(error)).rstrip(".")
        raise Refusal(400, f"The form cannot be read: {reason}.") from None
    if not reader.complete:
        raise Refusal(400, "The form cannot be read: it ends before its last boundary.")
    body.clear()
    return reader.parts


def _text(data: bytes | bytearray) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _from_fields(allowed: type[Options], parts: list[_FormPart]) -> Upload:
    images: list[tuple[str, bytes]] = []
    options: dict[str, Any] = {}
    for part in parts:
        name, shown = part.field_name, printable(part.field_name, 40)
        if name == "image" and part.file_name is not None:
            file_name = printable(part.file_name or f"image {len(images) + 1}", 80)
            images.append((file_name, bytes(part.data)))
            part.data.clear()
        elif name == "image":
            raise Refusal(422, "The field image holds text; send a file, with a filename.")
        elif part.file_name is not None:
            raise Refusal(422, f"The field {shown!r} is a file; only image may be one.")
        elif name == "tasks":
            options.setdefault("tasks", []).extend(_text(part.data).split(","))
        elif name in options:
            raise Refusal(422, f"The field {shown!r} is given twice.")
        else:
            text = _text(part.data)
            # Python refuses to read thousands of digits; the limit is far below them
            is_number = name == "top_k" and text.isdecimal() and len(text) < 100
            options[name] = int(text) if is_number else text
    if not images:
        raise Refusal(422, "There is no image; send at least one file in the field image.")
    try:
        return Upload(images, allowed.model_validate(options))
    except ValidationError as error:
        raise invalid(error, "The form") from None


# Errors


def too_many(most: int) -> Refusal:
    """For a request with more images than one may have."""
    return Refusal(422, f"A request may have {counted(most, 'image')} at most; send fewer.")


def invalid(error: ValidationError, what: str, most: int = 0) -> Refusal:
    """The first error as a sentence; a body that is not JSON at all gets status 400."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return Refusal(400, f"{what} is not JSON: {printable(first['msg'])}.")
    if first["type"] == "too_long" and first["loc"] == ("images",):
        return too_many(most)
    where = ".".join(str(part) for part in first["loc"])
    return Refusal(
        422, f"{what} is invalid at {printable(where, 60)!r}: {printable(first['msg'])}."
    )
