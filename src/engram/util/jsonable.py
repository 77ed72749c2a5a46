"""Values as JSON can hold them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


def jsonable(value: Any, as_text: Callable[[object], str] = str) -> Any:
    """A value that JSON can hold: NaN and infinity become null, tuples lists, the rest text."""
    if isinstance(value, Mapping):
        return {as_text(key): jsonable(item, as_text) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item, as_text) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int)) else as_text(value)
