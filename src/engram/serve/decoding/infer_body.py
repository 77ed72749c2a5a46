"""Read images or pixels from the body of an inference request (Open Inference Protocol).

The body is JSON. With the protocol's binary extension, tensors follow the JSON as bytes, and a
header of the request says where the JSON ends.

Values are counted before they become objects: an empty list takes three bytes of JSON and sixty of
memory. Numbers of pixels are cut out of the JSON, and never become objects.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engram.serve.decoding.upload import Upload, decode_base64, named, parse_json, too_many
from engram.serve.problems import Problem
from engram.serve.schemas import (
    IMAGE,
    MAX_TASKS,
    MAX_VECTORS,
    PIXELS,
    InferInput,
    InferRequest,
    TeachRequest,
)
from engram.util.text import printable

Floats = npt.NDArray[np.float32]

# Where the numbers of a tensor begin. In valid JSON this matches no text: a quote inside of one
# follows a backslash.
_DATA, _VECTORS = (
    re.compile(rb'(?<=[{,\s])"%s"\s*:\s*(?=\[)' % name) for name in (b"data", b"vectors")
)
_NUMBERS = re.compile(rb"\[[\s\d.,eE+\-\[\]NaIinfty]*\]")  # also NaN and Infinity
_OF_NUMBERS = b"0123456789.eE+-NaIinfty \t\r\n"
_AS_SPACES = bytes.maketrans(b"[]", b"  ")
_PLACE = [None]  # what the JSON has in place of numbers
_LARGEST = 1e6  # value of a vector: squares of larger ones are rounded away, or not finite
_PER_OUTPUT = 8  # values that describe one output, with room for fields of other servers


def read_inference(
    json_bytes: int | None, size: Sequence[int], most: int, body: bytearray
) -> Upload:
    """Read at most so many images or pixels (3, *size) of a body; anything wrong is a Problem.

    `json_bytes` is where the JSON ends, if binary tensors follow it. Clears the body.
    """
    if json_bytes is not None and not 0 < json_bytes <= len(body):
        raise Problem(
            400,
            f"Inference-Header-Content-Length is {json_bytes:,}, and the body has {len(body):,} "
            "bytes; it is the length of the JSON at the start of the body.",
        )
    text = body
    if json_bytes is not None:
        text = body[:json_bytes]
        del body[:json_bytes]  # the binary tensors stay where they are
    numbers = _cut_numbers(text, most * 3 * math.prod(size))
    hint = f"beside pixels, it has {most} images at most, and each output once"
    request = parse_json(InferRequest, text, 2 * most + _PER_OUTPUT * (MAX_TASKS + 1), hint)
    [tensor] = request.inputs  # the schema allows one
    if tensor.shape[0] > most:
        raise too_many(most)
    sent = tensor.parameters.binary_data_size
    if sent is not None and len(body) != sent:
        raise Problem(
            400,
            f"{len(body):,} bytes follow the JSON, and binary_data_size is {sent:,}; the JSON "
            "ends where Inference-Header-Content-Length says.",
        )
    if tensor.name == PIXELS:
        images = _pixels(tensor, body, numbers, size)
    else:
        images = _encoded(tensor, body, most)
    body.clear()
    return Upload(named(images), request, (3, *size) if tensor.name == PIXELS else None)


def read_vectors(features: int, body: bytearray) -> Upload:
    """Vectors with labels, which a task is taught from; anything wrong is a Problem.

    They are one array of float32, (vectors, features). Clears the body.
    """
    numbers = _cut_numbers(body, MAX_VECTORS * (features + 1), _VECTORS)
    hint = f"beside numbers, it has a name for each of {MAX_VECTORS:,} vectors at most"
    request = parse_json(TeachRequest, body, MAX_VECTORS + _PER_OUTPUT, hint)
    shape, vectors = (len(request.labels), features), None
    if numbers and request.vectors == _PLACE:
        vectors = _read_numbers(numbers, shape)
    if vectors is None:
        raise Problem(
            422,
            f"The vectors are not {shape[0]} lists of {features} numbers; send one for each label, "
            "as /v1/embed gives them for base.",
        )
    if not (np.abs(vectors) < _LARGEST).all():
        raise Problem(422, "A vector has values that no backbone gives; send those of /v1/embed.")
    return Upload([("vectors", vectors.tobytes())], request, shape=shape)


# Numbers as JSON, nested or flat: Python objects of all of them would take ten times their text


def _cut_numbers(text: bytearray, most: int, begin: re.Pattern[bytes] = _DATA) -> bytes:
    """Take the numbers of a tensor out of the JSON; more than `most` are a Problem."""
    place = begin.search(text)
    found = _NUMBERS.match(text, place.end()) if place else None
    if found is None:
        return b""
    start, end = found.span()
    if max(text.count(b",", start, end), text.count(b"[", start, end)) > most:
        raise Problem(422, f"The request has more than {most:,} numbers, which is the limit.")
    numbers = bytes(memoryview(text)[start:end])
    text[start:end] = json.dumps(_PLACE).encode()
    return numbers


def _read_numbers(text: bytes, shape: Sequence[int]) -> Floats | None:
    """All numbers, flat; None if they are no tensor of this shape."""
    marks = text.translate(None, _OF_NUMBERS)
    if marks not in (_marks(shape), _marks([math.prod(shape)])):
        return None
    try:
        found = np.fromstring(text.translate(_AS_SPACES), dtype="<f4", sep=",")
    except ValueError:
        return None
    return found if found.size == math.prod(shape) else None


def _marks(shape: Sequence[int]) -> bytes:
    """The brackets and commas of a nested list."""
    marks = b""
    for count in reversed(shape):
        marks = b"[" + (marks + b",") * (count - 1) + marks + b"]"
    return marks


# Tensors


def _encoded(tensor: InferInput, binary: bytearray, most: int) -> list[bytes]:
    """The images of a BYTES tensor (n) or (n, 1): as bytes, or in JSON in base64."""
    _check(tensor, "BYTES", len(tensor.shape) in (1, 2) and math.prod(tensor.shape[1:]) == 1, "[n]")
    if tensor.data is None:
        images = _split(binary, most)
    else:
        texts = [one[0] if isinstance(one, list) and len(one) == 1 else one for one in tensor.data]
        tensor.data.clear()
        images = decode_base64(texts)
    if len(images) != tensor.shape[0]:
        raise Problem(
            422, f"{IMAGE} has the shape {tensor.shape}, and the images in it are {len(images)}."
        )
    return images


def _split(data: bytearray, most: int) -> list[bytes]:
    """The elements of a BYTES tensor: each is its length, in four bytes, and then its bytes."""
    images, position = list[bytes](), 0
    while position < len(data):
        if len(images) == most:
            raise too_many(most)
        start = position + 4
        position = start + int.from_bytes(data[position:start], "little")
        if position > len(data) or start > len(data):
            raise Problem(422, f"The bytes of {IMAGE} end inside an image.")
        images.append(bytes(memoryview(data)[start:position]))
    return images


def _pixels(
    tensor: InferInput, binary: bytearray, numbers: bytes, size: Sequence[int]
) -> list[bytes]:
    """The images of an FP32 tensor (n, 3, height, width), ready for the backbone."""
    shape = ", ".join(["n", "3", *map(str, size)])
    fits = len(tensor.shape) == 4 and tensor.shape[1:] == [3, *size]
    _check(tensor, "FP32", fits, f"[{shape}]")
    count, pixels = math.prod(tensor.shape), None
    if tensor.data is None:
        if len(binary) != 4 * count:
            raise Problem(
                422,
                f"{PIXELS} has the shape {tensor.shape}, so it needs {4 * count:,} bytes, and has "
                f"{len(binary):,}.",
            )
        pixels = np.frombuffer(binary, dtype="<f4")
    elif numbers and tensor.data == _PLACE:
        pixels = _read_numbers(numbers, tensor.shape)
    if pixels is None:
        raise Problem(
            422,
            f"The data of {PIXELS} are not the {count:,} numbers of the shape {tensor.shape}; send "
            "a flat list of numbers, or one that is nested like the shape.",
        )
    if not np.isfinite(pixels).all():
        raise Problem(422, f"{PIXELS} has values that are not finite.")
    return [image.tobytes() for image in pixels.reshape(tensor.shape)]


def _check(tensor: InferInput, datatype: str, fits: bool, shape: str) -> None:
    if tensor.datatype != datatype or not fits or tensor.shape[0] < 1:
        raise Problem(
            422,
            f"The input {printable(tensor.name, 40)} has the datatype "
            f"{printable(tensor.datatype, 20)} and the shape {tensor.shape}; send {datatype} "
            f"{shape} with at least one image.",
        )
