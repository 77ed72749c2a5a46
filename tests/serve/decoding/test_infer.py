"""The body of an inference request becomes images or pixels, or a sentence."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from engram.serve.decoding.infer import Inference, read_inference
from engram.serve.decoding.upload import Limits, Refusal

SIZE, LIMITS = (2, 2), Limits(max_images=2, max_body=10**6)
PIXELS = np.arange(12, dtype=np.float32).reshape(1, 3, 2, 2)


def read(document: dict[str, Any], binary: bytes | None = None) -> Inference:
    text = json.dumps(document).encode()
    body = bytearray(text + (binary or b""))
    return read_inference(body, None if binary is None else len(text), SIZE, LIMITS)


def tensor(name: str, datatype: str, shape: list[int], **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": name, "datatype": datatype, "shape": shape, **more}]}


def test_images_are_base64_in_json_and_have_a_length_in_bytes() -> None:
    text = base64.b64encode(b"picture").decode()
    found = read(tensor("image", "BYTES", [1, 1], data=[[text]]))
    assert found.images == [("image 1", b"picture")]
    assert not found.pixels
    binary = b"\7\0\0\0picture" + b"\1\0\0\0x"
    given = tensor("image", "BYTES", [2], parameters={"binary_data_size": len(binary)})
    assert read(given, binary).images == [("image 1", b"picture"), ("image 2", b"x")]


@pytest.mark.parametrize("nested", [True, False])
def test_pixels_are_numbers_or_bytes(nested: bool) -> None:
    data = PIXELS.tolist() if nested else PIXELS.ravel().tolist()
    found = read(tensor("pixel_values", "FP32", [1, 3, 2, 2], data=data))
    assert found.pixels
    assert found.images == [("image 1", PIXELS.tobytes())]
    given = tensor("pixel_values", "FP32", [1, 3, 2, 2], parameters={"binary_data_size": 48})
    assert read(given, PIXELS.tobytes()).images == found.images


def test_there_are_no_more_images_than_the_limit() -> None:
    given = tensor("image", "BYTES", [3], parameters={"binary_data_size": 12})
    with pytest.raises(Refusal, match="2 images at most"):
        read(given, b"\0\0\0\0" * 3)


def test_bytes_of_another_length_are_refused() -> None:
    given = tensor("pixel_values", "FP32", [1, 3, 2, 2], parameters={"binary_data_size": 44})
    with pytest.raises(Refusal, match="needs 48 bytes, and has 44"):
        read(given, bytes(44))
