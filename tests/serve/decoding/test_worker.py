"""A decoder answers every message, also those about what it cannot read."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from functools import partial
from multiprocessing import Pipe

import numpy as np
import pytest
from PIL import Image
from tests.support.serving import picture

from benchmarks.serve.malformed import BOUNDARY, form
from engram.images.preprocessing import Preprocessing
from engram.images.views import evaluation_view
from engram.serve.decoding.upload import read_upload
from engram.serve.decoding.worker import Answer, BodyDecoder, receive, send
from engram.serve.schemas import PredictOptions

PREPROCESSING = Preprocessing((16, 16), None)
KIND = f"multipart/form-data; boundary={BOUNDARY.decode()}"


def holding(*images: bytes) -> BodyDecoder:
    decoder = BodyDecoder()
    body = bytearray(form(*[("image", data, True) for data in images], ("top_k", b"2", False)))
    read = partial(read_upload, PredictOptions, KIND, 9)
    answer, _ = decoder.answer("The body", BodyDecoder.read, read, body)
    assert answer["names"] == ["image.png"] * len(images)
    assert answer["options"] == {"tasks": None, "top_k": 2, "attention": None}
    return decoder


def decode(decoder: BodyDecoder, max_pixels: int = 10**6) -> Answer:
    return decoder.answer("image.png", BodyDecoder.decode, PREPROCESSING, max_pixels)


def test_a_view_is_the_one_that_the_model_is_trained_on() -> None:
    decoder = holding(picture(1), picture(2))
    decode(decoder)
    answer, data = decode(decoder)
    assert answer["fields"] == {
        "name": "image.png", "width": 24, "height": 20, "view": [0, 0, 24, 20]
    }  # fmt: skip
    view = np.frombuffer(data, np.uint8).reshape(answer["shape"])
    assert (view == evaluation_view(picture(2), PREPROCESSING)).all()


@pytest.mark.parametrize(
    ("data", "most", "sentence", "large"),
    [
        (picture(), 100, "image.png: 24x20 pixels", True),
        (b"nonsense", 100, "image.png: not an image", False),
        (picture()[:60], 10**6, "image.png: ", False),
    ],
)
def test_what_is_wrong_is_the_answer(data: bytes, most: int, sentence: str, large: bool) -> None:
    answer, _ = decode(holding(data), max_pixels=most)
    assert answer["refused"].startswith(sentence)
    assert answer["refused"].endswith("Send a smaller one." if large else "or AVIF.")
    assert (answer["status"], answer["ending"]) == (422, "")


def test_running_out_of_memory_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise MemoryError

    decoder = holding(picture())
    monkeypatch.setattr(Image.Image, "load", full)
    answer, _ = decode(decoder)
    assert "too much memory" in answer["refused"]
    assert answer["ending"] == "out of memory"


def test_an_image_is_dropped_once_it_is_decoded() -> None:
    decoder = holding(picture())
    decode(decoder)
    assert decoder.images == []


def test_a_decoder_loads_neither_torch_nor_the_web_framework() -> None:
    code = "import sys, engram.serve.decoding.worker; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"torch", "fastapi", "starlette", "uvicorn"} & set(loaded.stdout.split())


def test_an_animation_gives_its_first_frame() -> None:
    file = io.BytesIO()
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    _, data = decode(holding(file.getvalue()))
    assert data[:3] == bytes([255, 0, 0])


def test_no_exception_ends_a_decoder_without_an_answer() -> None:
    class Panic(BaseException):
        """As those of parsers in Rust."""

    def fail(body: bytearray) -> None:
        raise Panic("a\nlong story")

    answer, _ = BodyDecoder().answer("The body", BodyDecoder.read, fail, bytearray())
    assert answer["ending"].startswith("Panic: a")
    assert "\n" not in answer["ending"]


def test_a_message_arrives_whole() -> None:
    one, other = Pipe()
    data = bytes(range(256)) * 4000
    with one, other:
        sender = threading.Thread(target=send, args=(one, {"do": "read", "ä": [1.5]}, data))
        sender.start()
        assert receive(other) == ({"do": "read", "ä": [1.5]}, data)
        sender.join()


def test_a_closed_connection_is_the_end() -> None:
    one, other = Pipe()
    with other:
        one.close()
        with pytest.raises(EOFError):
            receive(other)
