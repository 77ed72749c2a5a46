"""From the body of an inference request (Open Inference Protocol) to images or pixels.

The body is JSON. With the protocol's binary extension, tensors follow the JSON as bytes, and a
header of the request says where the JSON ends.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from engram.serve.decoding.upload import Limits, Refusal, invalid, too_many
from engram.serve.routes.infer_schemas import IMAGE, PIXELS, InferInput, InferOptions, InferRequest
from engram.util.text import printable


@dataclass(frozen=True)
class Inference:
    """A request to infer: encoded images, or the pixels of each as float32 bytes, and options."""

    images: list[tuple[str, bytes]]
    pixels: bool
    options: InferOptions


def read_inference(
    body: bytearray, json_bytes: int | None, size: Sequence[int], limits: Limits
) -> Inference:
    """Images or pixels (3, *size) from a body; anything wrong is a Refusal.

    `json_bytes` is where the JSON ends, if binary tensors follow it.
    """
    if json_bytes is not None and not 0 < json_bytes <= len(body):
        raise Refusal(
            400,
            f"Inference-Header-Content-Length is {json_bytes:,}, and the body has {len(body):,} "
            "bytes; it is the length of the JSON at the start of the body.",
        )
    try:
        request = InferRequest.model_validate_json(bytes(body[:json_bytes]))
    except ValidationError as error:
        raise invalid(error, "The JSON of the request") from None
    binary = b"" if json_bytes is None else bytes(memoryview(body)[json_bytes:])
    body.clear()
    [given] = request.inputs  # the schema allows one
    images = _pixels(given, binary, size) if given.name == PIXELS else _encoded(given, binary)
    if len(images) > limits.max_images:
        raise too_many(limits)
    named = [(f"image {i + 1}", data) for i, data in enumerate(images)]
    return Inference(named, given.name == PIXELS, request.options())


def _encoded(given: InferInput, binary: bytes) -> list[bytes]:
    """The images of a BYTES tensor (n) or (n, 1): as bytes, or in JSON in base64."""
    _check(given, "BYTES", len(given.shape) in (1, 2) and math.prod(given.shape[1:]) == 1, "[n]")
    size = given.parameters.binary_data_size
    images = _from_json(given) if size is None else _split(_exactly(binary, size))
    if len(images) != given.shape[0]:
        raise Refusal(
            422, f"{IMAGE} has the shape {given.shape}, and the images in it are {len(images)}."
        )
    return images


def _from_json(given: InferInput) -> list[bytes]:
    images = []
    for i, text in enumerate(np.ravel(np.array(given.data or [], dtype=object)).tolist()):
        try:
            images.append(base64.b64decode(str(text).encode(), validate=True))
        except (binascii.Error, ValueError):
            raise Refusal(
                422, f"image {i + 1} is not valid base64; in JSON, images are in base64."
            ) from None
    return images


def _split(data: bytes) -> list[bytes]:
    """The elements of a BYTES tensor: each is its length, in four bytes, and then its bytes."""
    images, position = [], 0
    while position < len(data):
        start = position + 4
        position = start + int.from_bytes(data[position:start], "little")
        if position > len(data) or start > len(data):
            raise Refusal(422, f"The bytes of {IMAGE} end inside an image.")
        images.append(data[start:position])
    return images


def _pixels(given: InferInput, binary: bytes, size: Sequence[int]) -> list[bytes]:
    """The images of an FP32 tensor (n, 3, height, width), ready for the trunk."""
    shape = ", ".join(["n", "3", *map(str, size)])
    fits = len(given.shape) == 4 and given.shape[1:] == [3, *size]
    _check(given, "FP32", fits, f"[{shape}]")
    values = math.prod(given.shape)
    data: Any
    if given.parameters.binary_data_size is not None:
        data = _exactly(binary, given.parameters.binary_data_size)
        if len(data) != 4 * values:
            raise Refusal(
                422,
                f"{PIXELS} has the shape {given.shape}, so it needs {4 * values:,} bytes, and "
                f"has {len(data):,}.",
            )
        tensor = np.frombuffer(data, dtype="<f4")
    else:
        try:
            tensor = np.array(given.data or [], dtype="<f4").ravel()
        except (TypeError, ValueError):
            raise Refusal(
                422, f"The data of {PIXELS} are not numbers, or nested unevenly."
            ) from None
        if tensor.size != values:
            raise Refusal(
                422, f"{PIXELS} has the shape {given.shape}, and there are {tensor.size:,} numbers."
            )
    if not np.isfinite(tensor).all():
        raise Refusal(422, f"{PIXELS} has values that are not finite.")
    return [image.tobytes() for image in tensor.reshape(given.shape)]


def _check(given: InferInput, datatype: str, fits: bool, shape: str) -> None:
    if given.datatype != datatype or not fits or given.shape[0] < 1:
        raise Refusal(
            422,
            f"The input {printable(given.name, 40)} has the datatype "
            f"{printable(given.datatype, 20)} and the shape {given.shape}; send {datatype} "
            f"{shape} with at least one image.",
        )


def _exactly(binary: bytes, size: int) -> bytes:
    if len(binary) != size:
        raise Refusal(
            400,
            f"{len(binary):,} bytes follow the JSON, and binary_data_size is {size:,}; the JSON "
            "ends where Inference-Header-Content-Length says.",
        )
    return binary
