"""The body of an inference request becomes images or pixels, or a sentence."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from engram.serve.decoding.infer_body import read_inference
from engram.serve.decoding.upload import Upload
from engram.serve.problems import Problem

SIZE, MOST = (2, 2), 2
PIXELS = np.arange(12, dtype=np.float32).reshape(1, 3, 2, 2)


def read(document: dict[str, Any], binary: bytes | None = None) -> Upload:
    text = json.dumps(document).encode()
    body = bytearray(text + (binary or b""))
    return read_inference(None if binary is None else len(text), SIZE, MOST, body)


def tensor(name: str, datatype: str, shape: list[int], **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": name, "datatype": datatype, "shape": shape, **more}]}


def test_images_are_base64_in_json_and_have_a_length_in_bytes() -> None:
    text = base64.b64encode(b"picture").decode()
    found = read(tensor("image", "BYTES", [1, 1], data=[[text]]))
    assert found.images == [("image 1", b"picture")]
    assert found.shape is None
    binary = b"\7\0\0\0picture" + b"\1\0\0\0x"
    given = tensor("image", "BYTES", [2], parameters={"binary_data_size": len(binary)})
    assert read(given, binary).images == [("image 1", b"picture"), ("image 2", b"x")]


@pytest.mark.parametrize("nested", [True, False])
def test_pixels_are_numbers_or_bytes(nested: bool) -> None:
    data = PIXELS.tolist() if nested else PIXELS.ravel().tolist()
    found = read(tensor("pixel_values", "FP32", [1, 3, 2, 2], data=data))
    assert found.shape == (3, 2, 2)
    assert found.images == [("image 1", PIXELS.tobytes())]
    given = tensor("pixel_values", "FP32", [1, 3, 2, 2], parameters={"binary_data_size": 48})
    assert read(given, PIXELS.tobytes()).images == found.images


def test_there_are_no_more_images_than_the_limit() -> None:
    given = tensor("image", "BYTES", [3], parameters={"binary_data_size": 12})
    with pytest.raises(Problem, match="2 images at most"):
        read(given, b"\0\0\0\0" * 3)


def test_bytes_of_another_length_are_refused() -> None:
    given = tensor("pixel_values", "FP32", [1, 3, 2, 2], parameters={"binary_data_size": 44})
    with pytest.raises(Problem, match="needs 48 bytes, and has 44"):
        read(given, bytes(44))


def pixels(data: str, shape: str = "[1,3,2,2]") -> bytearray:
    fields = f'"name":"pixel_values","datatype":"FP32","shape":{shape},"data":{data}'
    return bytearray(f'{{"inputs":[{{{fields}}}]}}'.encode())


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (pixels("[" + "[]," * 100_000 + "[]]"), "more than 24 numbers"),
        (pixels("[" * 50_000 + "]" * 50_000), "more than 24 numbers"),
        (pixels("[" + "{}," * 100_000 + "{}]"), "values"),
        (pixels("[" + '"ab",' * 100_000 + '""]'), "values"),
        (pixels("[1]").replace(b'"inputs"', b'"x":[0' + b",0" * 100_000 + b'],"inputs"'), "values"),
        (pixels("[" + "1" * 400 + ",0" * 11 + "]"), "not finite"),
        (pixels("[" + "1" * 5000 + ",0" * 11 + "]"), "not finite"),
        (pixels("[1e999" + ",0" * 11 + "]"), "not finite"),
        (pixels("[NaN" + ",0" * 11 + "]"), "not finite"),
        (pixels("[null" + ",0" * 11 + "]"), "12 numbers"),
        (pixels("[1 0" + ",0" * 11 + "]"), "12 numbers"),
        (pixels("[[0,0,0],[0,0,0],[0,0,0],[0,0,0]]"), "12 numbers"),
        (pixels("[1]", "[1" + "0" * 4299 + ",3,2,2]"), "shape"),
        (pixels("[1]", "[1" + "0" * 9999 + ",3,2,2]"), "not JSON"),
        (pixels("[1]", "[100,3,2,2]"), "2 images at most"),
    ],
)  # fmt: skip
def test_what_takes_more_memory_than_it_is_worth_is_counted_first(
    body: bytearray, sentence: str
) -> None:
    with pytest.raises(Problem, match=sentence):
        read_inference(None, SIZE, MOST, body)


def test_numbers_may_have_spaces_between_them() -> None:
    for data in (PIXELS.tolist(), PIXELS.ravel().tolist()):
        text = json.dumps(data, indent=1)
        found = read_inference(None, SIZE, MOST, pixels(text))
        assert found.images == [("image 1", PIXELS.tobytes())]


def test_numbers_elsewhere_are_no_pixels() -> None:
    body = pixels("[1]").replace(b'"data":[1]', b'"parameters":{"data":[1,2]},"data":["eA=="]')
    with pytest.raises(Problem, match="12 numbers"):
        read_inference(None, SIZE, MOST, body)


def test_elements_of_bytes_are_counted_while_they_are_read() -> None:
    given = tensor("image", "BYTES", [2], parameters={"binary_data_size": 4_000_000})
    with pytest.raises(Problem, match="2 images at most"):
        read(given, bytes(4_000_000))


def test_images_in_json_are_texts() -> None:
    for data in ([1], [["eA==", "eA=="]], [{"b64": "eA=="}], [None]):
        with pytest.raises(Problem, match="not valid base64"):
            read(tensor("image", "BYTES", [1], data=data))
