"""Any value as JSON can hold it, and JSON of unknown origin within limits."""

import io
import json
from pathlib import Path

import pytest
from tests.support.waiting import computing_less_than

from engram.util.documents import jsonable, parse_json, read_header


def test_what_json_has_stays_as_it_is() -> None:
    value = {"a": [1, 2.5, True, None, "x"], "b": {"c": 10**400}}
    assert jsonable(value) == value


def test_what_json_does_not_have_becomes_null_a_list_or_text() -> None:
    value = {1: (float("nan"), float("inf")), "path": Path("x"), "caf\udce9": b"y"}
    safe = jsonable(value, as_text=ascii)
    assert safe == {"1": [None, None], "'path'": "PosixPath('x')", "'caf\\udce9'": "b'y'"}
    json.dumps(jsonable(value), allow_nan=False)


def header(text: bytes, length: int | None = None) -> io.BytesIO:
    size = len(text) if length is None else length
    return io.BytesIO(size.to_bytes(8, "little") + text)


def test_a_document_is_parsed_within_limits() -> None:
    assert parse_json(b'{"a": [1, "x,y"]}') == {"a": [1, "x,y"]}
    names = json.dumps([f"a class with a long name, number {i}" for i in range(100_000)])
    assert len(parse_json(names.encode())) == 100_000
    for text, reason in (
        (b'"' + b"x" * 16_000_000 + b'"', "larger than 16 MB"),
        (b"[" + b"0," * 1_000_001 + b"0]", "more than 1,000,000 values"),
        (b"[" * 100_000, "nested too deeply"),
        (b"{", "Expecting property name"),
        (b"\xff", "codec can't decode"),
        (b"9" * 5000, "thousands of digits"),
    ):
        with computing_less_than(0.5), pytest.raises(ValueError, match=reason):
            parse_json(text)


def test_the_header_of_a_safetensors_file_is_read_within_limits() -> None:
    assert read_header(header(b'{"__metadata__": {"a": "b"}}')) == {"__metadata__": {"a": "b"}}
    many = json.dumps({str(i): {"dtype": "F32"} for i in range(20_001)}).encode()
    for file, reason in (
        (io.BytesIO(b"short"), "shorter than a header"),
        (header(b"{}", 3), "shorter than its header"),
        (header(b"{}", 2**63), "larger than 16 MB"),
        (header(b"[]"), "not an object"),
        (header(many), "more than 20,000 tensors"),
    ):
        with pytest.raises(ValueError, match=reason):
            read_header(file)
