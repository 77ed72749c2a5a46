"""JSON documents: values that they can hold, and those of unknown origin, parsed within limits."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Mapping
from typing import IO, Any


def jsonable(value: Any, as_text: Callable[[object], str] = str) -> Any:
    """A value that JSON can hold: NaN and infinity become null, tuples lists, the rest text."""
    if isinstance(value, Mapping):
        return {as_text(key): jsonable(item, as_text) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item, as_text) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int)) else as_text(value)


#: The largest JSON document that is parsed: 100,000 classes with long names need half of it.
MAX_BYTES = 16_000_000
#: The most values that it may have. Small ones take 20 times as much memory as in the file.
MAX_VALUES = 1_000_000
#: The most tensors of a safetensors file.
MAX_TENSORS = 20_000


_DIGITS = "a number in it has thousands of digits"


def is_too_long(error: ValueError) -> bool:
    """Whether Python refused to read a number with more digits than its limit, 4,300."""
    return "int_max_str_digits" in str(error)


def parse_json(text: bytes) -> Any:
    """A JSON document of unknown origin. Whatever is wrong with it is a ValueError."""
    if len(text) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES / 1e6:g} MB")
    # Before any of them is made. Text may have these characters too, so it is an upper bound.
    if sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES:,} values")
    return load_json(text)


def load_json(text: bytes | str) -> Any:
    """A JSON document. Whatever is wrong with it is a ValueError, and no other exception."""
    collecting = gc.isenabled()
    gc.disable()  # JSON makes no cycles, and to look for them takes 20 times as long as parsing
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise (ValueError(_DIGITS) if is_too_long(error) else error) from None
    finally:
        if collecting:
            gc.enable()


def read_header(file: IO[bytes]) -> dict[str, Any]:
    """The header of a safetensors file, before any tensor is read.

    Whatever is wrong with it is a ValueError.
    """
    length = file.read(8)
    size = int.from_bytes(length, "little")
    if len(length) < 8:
        raise ValueError("the file is shorter than a header")
    if size > MAX_BYTES:
        raise ValueError(f"its header is larger than {MAX_BYTES / 1e6:g} MB")
    text = file.read(size)
    if len(text) < size:
        raise ValueError("the file is shorter than its header")
    header = parse_json(text)
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    if len(header) > MAX_TENSORS:
        raise ValueError(f"it has more than {MAX_TENSORS:,} tensors")
    return header
