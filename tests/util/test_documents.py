"""Any value as JSON can hold it."""

import json
from pathlib import Path

from engram.util.documents import jsonable


def test_what_json_has_stays_as_it_is() -> None:
    value = {"a": [1, 2.5, True, None, "x"], "b": {"c": 10**400}}
    assert jsonable(value) == value


def test_what_json_does_not_have_becomes_null_a_list_or_text() -> None:
    value = {1: (float("nan"), float("inf")), "path": Path("x"), "caf\udce9": b"y"}
    safe = jsonable(value, as_text=ascii)
    assert safe == {"1": [None, None], "'path'": "PosixPath('x')", "'caf\\udce9'": "b'y'"}
    json.dumps(jsonable(value), allow_nan=False)
