"""TOML as settings need it: a flat table of texts, numbers, truth values and lists of them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engram.errors import EngramError


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a file; an EngramError if there is none, or it is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngramError(f"{path} cannot be read ({error.strerror}); check the path.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise EngramError(
            f"{path} is no TOML ({error}); write lines such as epochs = 10."
        ) from None


def to_toml(settings: Mapping[str, Any]) -> str:
    """The settings, a line for each."""
    return "".join(f"{name} = {_value(value)}\n" for name, value in settings.items())


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    # JSON writes all of these as TOML does, but for one character that TOML does not allow.
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")
