"""Odd values in odd places of a JSON document."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

_NUMBERS = (
    *(-1, 0, 1, 2, 7, 2047, 2048, 8192, 2**31, 2**63, 2**64, 10**30, 10**400, -(10**400)),
    *(0.0, -0.0, 0.5, 1.5, 5e-324, 1e-300, 1e308, float("nan"), float("inf"), float("-inf")),
)
_TEXTS = (
    *("", "x", "base", "../x", "/etc/passwd", "\x00", "\n", "\x1b[2J", "\u202e", "\ud800"),
    *("x" * 100_000, "é" * 3, "0" * 64, "nan", "1e999", "{}", "__class__", "hf:a/b"),
)
_CONTAINERS: tuple[Any, ...] = (
    *([], {}, [[]], [None], ["x"], ["x", "x"], [1, 2], [1e9, 1e9], [10**9, 10**9], [10**400] * 3),
    *([0.5] * 3, [5e-324] * 3, [-1, -1], [0, 0], [1] * 10_000, ["x"] * 10_000, {"a": 1}),
    *({"": None}, {"height": 10**9, "width": 10**9}, {"shortest_edge": -1}),
)
ODD: tuple[Any, ...] = (None, True, False, *_NUMBERS, *_TEXTS, *_CONTAINERS)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to every value of a document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in inside:
        yield (*at, key)
        if isinstance(part, (dict, list)):
            yield from places(part, (*at, key))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def odd_value(rng: random.Random) -> Any:
    """A new odd value, so that a later change of it changes nothing else."""
    if rng.randrange(12) == 0:
        return nested(rng.choice((50, 150, 400)))
    return copy.deepcopy(rng.choice(ODD))


def oddly_changed(document: Any, rng: random.Random) -> tuple[str, Any]:
    """A copy in which one or two values are odd, missing or unknown, and the path of the last."""
    changed, name = copy.deepcopy(document), ""
    for _ in range(rng.choice((1, 1, 1, 2))):
        *way, last = rng.choice(list(places(changed)))
        place = changed
        for key in way:
            place = place[key]
        name = ".".join(str(key) for key in (*way, last))
        kind = rng.randrange(12)
        if kind == 0:
            del place[last]
        elif kind == 1 and isinstance(place, dict):
            place[rng.choice(("unknown", "__class__", ""))] = odd_value(rng)
        else:
            place[last] = odd_value(rng)
    return name, changed
