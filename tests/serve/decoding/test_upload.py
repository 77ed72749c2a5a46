"""A body becomes images and options, within limits; the first error ends it."""

from __future__ import annotations

import base64
import json
import tracemalloc

import pytest
from tests.support.waiting import computing_less_than

from benchmarks.serve.malformed import BOUNDARY, form
from engram.serve.decoding.upload import Upload, read_upload
from engram.serve.problems import Problem
from engram.serve.schemas import PredictOptions

JSON, FORM = "application/json", f"multipart/form-data; boundary={BOUNDARY.decode()}"
MOST = 4


def read(kind: str, body: bytes) -> Upload:
    return read_upload(PredictOptions, kind, MOST, bytearray(body))


def refusal(kind: str, body: bytes) -> tuple[int, str]:
    with pytest.raises(Problem) as refused:
        read(kind, body)
    return refused.value.status, refused.value.sentence


def test_json_has_images_in_base64() -> None:
    body = {"images": [base64.b64encode(b"one").decode(), ""], "tasks": ["a"], "top_k": 3.0}
    upload = read("Application/JSON; charset=utf-8", json.dumps(body).encode())
    assert upload.images == [("image 1", b"one"), ("image 2", b"")]
    assert (upload.options.tasks, upload.options.top_k, upload.options.attention) == (
        ["a"],
        3,
        None,
    )


def test_a_form_has_files() -> None:
    parts = form(
        ("image", b"\r\n--", True), ("tasks", b"a,b", False), ("top_k", b"7", False),
        ("tasks", b"c", False), ("attention", b"a", False), ("image", b"", True),
    )  # fmt: skip
    upload = read(FORM, parts)
    assert upload.images == [("image.png", b"\r\n--"), ("image.png", b"")]
    assert (upload.options.tasks, upload.options.top_k) == (["a", "b", "c"], 7)


def test_the_body_is_dropped() -> None:
    body = bytearray(form(("image", b"x", True)))
    read_upload(PredictOptions, FORM, MOST, body)
    assert not body


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"images":[1%s]}' % (b",1" * 2_000_000), "more than 1,007 values"),
        (b'{"images":[%s""]}' % (b'"",' * 1_000_000), "more than 1,007 values"),
        (b'{"x":%s' % (b"[" * 4_000_000), "more than 1,007 values"),
        (b'{"a":' * 900, "is not JSON: Invalid JSON: recursion limit exceeded"),
        (b'{"top_k":%s}' % (b"1" * 4_000_000), "is not JSON: Invalid JSON: number out of range"),
        (b'{"images":["%s"],"tasks":["%s"]}' % (b"A" * 4, b"a" * 4_000_000), "64 characters"),
        (b'{"images":["%s"]}' % (b"\\u0041" * 700_000 + b"!"), "image 1 is not valid base64"),
        (b'{"images":["\xf0\x9f\x98\x80%s"]}' % (b"A" * 4_000_000), "characters outside ASCII"),
        (b'{"images":["\\ud83d\\ude00%s"]}' % (b"A" * 4_000_000), "characters outside ASCII"),
        (b'{"\xf0\x9f\x98\x80%s":1}' % (b"A" * 4_000_000), "characters outside ASCII"),
        (b'{"%s":1}' % (b"A" * 4_000_000), "invalid at 'images'"),
        (b'{"images":["","","","",""]}', "4 images at most"),
        (b'{"images":[]}', "invalid at 'images'"),
    ],
)
def test_json_beyond_the_limits_takes_neither_time_nor_memory(body: bytes, sentence: str) -> None:
    tracemalloc.start()
    try:
        with computing_less_than(1.5):
            assert sentence in refusal(JSON, body)[1]
        assert tracemalloc.get_traced_memory()[1] < 4 * len(body) + 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("escape", [b"\\/", b"\\u002B", b"\\u002f"])
def test_base64_may_have_the_escapes_that_encoders_write(escape: bytes) -> None:
    body = b'{"images":["%s"]}' % (escape * 400_000)
    assert len(read(JSON, body).images[0][1]) == 300_000


def test_a_small_json_body_may_name_a_task_in_any_characters() -> None:
    assert read(JSON, '{"images":[""],"tasks":["rösen","😀"]}'.encode()).options.tasks == [
        "rösen",
        "😀",
    ]


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (form(("x", b"1", False), closed=False) * 100_000, 400, "more than 1,000 fields"),
        (form(("attention", b"a" * 20_000, False)), 400, "'attention' has more than 10,000 bytes"),
        (form(*[("tasks", b"a" * 9000, False)] * 12), 400, "fields of the form"),
        (form(*[("image", b"x", True)] * 5), 422, "4 images at most"),
        (form(("x", b"1", True)), 422, "'x' is a file"),
        (form(("image", b"x", True), closed=False), 400, "ends before its last boundary"),
        (b"--" + BOUNDARY + b"\r\n" + b"A: 1\r\n" * 10**5, 400, "The form cannot be read"),
        (b"--" + BOUNDARY + b"\r\nA: 1\r\n\r\nx\r\n", 400, "The form cannot be read"),
    ],
)
def test_forms_beyond_the_limits_are_refused(body: bytes, status: int, sentence: str) -> None:
    found = refusal(FORM, body)
    assert found[0] == status
    assert sentence in found[1]


def test_a_form_needs_a_boundary() -> None:
    assert refusal("multipart/form-data", b"")[0] == 400
