"""TOML as settings need it: a flat table of texts, numbers, truth values and lists of them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engram.errors import EngramError
from engram.util.documents import is_too_long
from engram.util.schema import FreeObject

_MAX_BYTES = 4_000_000  # a farm of ten thousand jobs has a tenth of it
_SCHEMA = FreeObject(most=200_000, nesting=10)


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a file; an EngramError if there is none, or it holds no settings."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ValueError(f"it is larger than {_MAX_BYTES / 1e6:g} MB")
        table = tomllib.loads(text.decode())
        _SCHEMA.check(table, "its table")
    except OSError as error:
        raise EngramError(f"{path} cannot be read ({error.strerror}); check the path.") from None
    except RecursionError:
        raise EngramError(
            f"{path} is nested too deeply; write lines such as epochs = 10."
        ) from None
    except ValueError as error:  # of the syntax, of bytes, or of a number
        why = "a number in it has thousands of digits" if is_too_long(error) else error
        raise EngramError(f"{path} is no TOML ({why}); write lines such as epochs = 10.") from None
    return table


def to_toml(settings: Mapping[str, Any]) -> str:
    """The settings, a line for each."""
    return "".join(f"{name} = {_value(value)}\n" for name, value in settings.items())


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    # JSON writes all of these as TOML does, but for one character that TOML does not allow.
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")
