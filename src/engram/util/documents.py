"""JSON and TOML documents of unknown origin, parsed within limits, and what is written as such."""

from __future__ import annotations

import gc
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from engram.errors import EngramError
from engram.util.schema import FreeObject


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


def _readable(error: ValueError) -> ValueError:
    """The error, or a shorter one: Python explains at length why it reads 4,300 digits at most."""
    long = "int_max_str_digits" in str(error)
    return ValueError("a number in it has thousands of digits") if long else error


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
        raise _readable(error) from None
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


# TOML as settings need it: a flat table of texts, numbers, truth values and lists of them

_MAX_TOML = 4_000_000  # bytes; a farm of ten thousand jobs has a tenth of it
_TOML = FreeObject(most=200_000, nesting=10)


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a file; an EngramError if there is none, or it holds no settings."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_TOML + 1)
        if len(text) > _MAX_TOML:
            raise ValueError(f"it is larger than {_MAX_TOML / 1e6:g} MB")
        table = tomllib.loads(text.decode())
        _TOML.check(table, "its table")
    except OSError as error:
        raise EngramError(f"{path} cannot be read ({error.strerror}); check the path.") from None
    except RecursionError:
        raise EngramError(
            f"{path} is nested too deeply; write lines such as epochs = 10."
        ) from None
    except ValueError as error:  # of the syntax, of bytes, or of a number
        raise EngramError(
            f"{path} is no TOML ({_readable(error)}); write lines such as epochs = 10."
        ) from None
    return table


def to_toml(settings: Mapping[str, Any]) -> str:
    """The settings, a line for each."""
    return "".join(f"{name} = {_toml_value(value)}\n" for name, value in settings.items())


def _toml_value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml_value, value))}]"
    # JSON writes all of these as TOML does, but for one character that TOML does not allow.
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")
