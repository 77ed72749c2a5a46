"""Read images and options from the body of a request: a form, or JSON with base64 images.

Limits are part of the schema, and the first error ends the work.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, parse_options_header

from engram.serve.problems import Problem
from engram.serve.schemas import MAX_TASKS, Options, body_with_images
from engram.util.text import counted, printable

Model = TypeVar("Model", bound=BaseModel)

MAX_FIELDS = 1000
MAX_FIELD_BYTES = 10_000
MAX_FIELDS_BYTES = 100_000  # of all fields: more than the names of all tasks need
MAX_UNICODE_BYTES = 100_000  # of a JSON body that has more than ASCII

# Other escapes than those of the first 256 characters, which take one byte each in memory.
_UNICODE_ESCAPE = re.compile(rb"\\u(?!00)")


@dataclass(frozen=True)
class Upload:
    """The images of a request (name, and the encoded image), and its options.

    With a `shape`, they are arrays of float32 instead: pixels, or vectors.
    """

    images: list[tuple[str, bytes]]
    options: BaseModel
    shape: tuple[int, ...] | None = None


def read_upload(options: type[Options], kind: str, most: int, body: bytearray) -> Upload:
    """Read at most so many images, and options, of a body; anything wrong is a Problem.

    `kind` is its content type. The body is cleared as soon as it is not needed any more.
    """
    if kind.partition(";")[0].strip().lower() == "application/json":
        return _from_json(options, most, body)
    return _from_form(options, kind, most, body)


# JSON


def _from_json(options: type[Options], most: int, body: bytearray) -> Upload:
    known = list(options.model_fields)
    hint = f"it needs the list images, and may have {', '.join(known)}"
    model, values = body_with_images(options, most), most + MAX_TASKS + len(known)
    document = parse_json(model, body, values, hint, images=most)
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
            raise Problem(422, f"{name} is not valid base64, as images in JSON are.") from None
    return images


def named(images: list[bytes]) -> list[tuple[str, bytes]]:
    """Images without names of their own, by their places."""
    return [(f"image {i + 1}", data) for i, data in enumerate(images)]


def parse_json(model: type[Model], text: bytearray, most: int, hint: str, images: int = 0) -> Model:
    """Parse JSON of at most so many values, and so many images, and clear it.

    What would take far more memory than it has bytes is a Problem before it is parsed. Every value
    would take memory. What separates them is counted; neither base64 nor the names of tasks and
    options have these characters. And one character beyond ASCII can make every other of its text
    take four bytes.
    """
    if sum(text.count(mark) for mark in (b",", b"[", b"{")) > most:
        raise Problem(422, f"The JSON has more than {most:,} values, which is the limit; {hint}.")
    large = len(text) > MAX_UNICODE_BYTES
    if large and (not text.isascii() or _UNICODE_ESCAPE.search(text)):
        raise Problem(
            422,
            f"The JSON body has characters outside ASCII, and more than {MAX_UNICODE_BYTES:,} "
            "bytes; images in base64 and the names of tasks need ASCII only.",
        )
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise invalid(error, "The JSON body", images) from None
    finally:
        text.clear()


# Forms


def _from_form(options: type[Options], kind: str, most: int, body: bytearray) -> Upload:
    files, fields, ends = list[File](), list[Field](), list[bool]()

    def keep_file(file: File) -> None:
        files.append(file)
        if len(files) > most:
            raise too_many(most)

    def keep_field(one: Field) -> None:
        fields.append(one)
        if len(fields) > MAX_FIELDS:
            raise Problem(400, f"The form has more than {MAX_FIELDS:,} fields; send fewer.")

    try:
        parser = FormParser(
            "multipart/form-data",
            keep_field,
            keep_file,
            on_end=lambda: ends.append(True),
            boundary=parse_options_header(kind)[1].get(b"boundary") or None,
            config={"MAX_MEMORY_FILE_SIZE": math.inf},  # in no file on disk
        )
        parser.write(body)  # type: ignore[arg-type]  # it only slices and searches
        parser.finalize()
    except FormParserError as error:
        reason = printable(str(error)).rstrip(".")
        raise Problem(400, f"The form cannot be read: {reason}.") from None
    if not ends:
        raise Problem(400, "The form cannot be read: it ends before its last boundary.")
    body.clear()
    values = _fields(fields)
    images = [_image(file, f"image {i + 1}") for i, file in enumerate(files)]
    if not images:
        raise Problem(422, "There is no image; send at least one file in the field image.")
    try:
        return Upload(images, options.model_validate(values, strict=False))
    except ValidationError as error:
        raise invalid(error, "The form") from None


def _image(file: File, name: str) -> tuple[str, bytes]:
    if file.field_name != b"image":
        shown = printable(_text(file.field_name), 40)
        raise Problem(422, f"The field {shown!r} is a file; only image may be one.")
    with file.file_object as data:
        data.seek(0)
        return printable(_text(file.file_name) or name, 80), data.read()


def _fields(fields: list[Field]) -> dict[str, Any]:
    """The options in the fields of a form."""
    if sum(len(one.value or b"") for one in fields) > MAX_FIELDS_BYTES:
        raise Problem(
            400, f"The fields of the form have more than {MAX_FIELDS_BYTES:,} bytes; send less."
        )
    options: dict[str, Any] = {}
    for one in fields:
        name, text = _text(one.field_name), _text(one.value)
        if len(one.value or b"") > MAX_FIELD_BYTES:
            raise Problem(
                400,
                f"The field {printable(name, 40)!r} has more than {MAX_FIELD_BYTES:,} bytes; an "
                "image needs a filename.",
            )
        if name == "image":
            raise Problem(422, "The field image holds text; send a file, with a filename.")
        if name == "tasks":
            options.setdefault("tasks", []).extend(text.split(","))
        elif name in options:
            raise Problem(422, f"The field {printable(name, 40)!r} is given twice.")
        else:
            options[name] = text
    return options


def _text(data: bytes | None) -> str:
    try:
        return (data or b"").decode()
    except UnicodeDecodeError:
        return (data or b"").decode("latin-1")


# Errors


def too_many(most: int) -> Problem:
    """The refusal of a request with more images than one may have."""
    return Problem(422, f"A request may have {counted(most, 'image')} at most; send fewer.")


def invalid(error: ValidationError, what: str, most: int = 0) -> Problem:
    """The first error as a sentence; a body that is not JSON at all gets status 400."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return Problem(400, f"{what} is not JSON: {printable(first['msg'])}.")
    if first["type"] == "too_long" and first["loc"] == ("images",):
        return too_many(most)
    where = ".".join(str(part) for part in first["loc"])
    return Problem(
        422, f"{what} is invalid at {printable(where, 60)!r}: {printable(first['msg'])}."
    )
