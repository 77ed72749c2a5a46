"""A schema refuses every value that breaks a rule, and says which and why."""

import math
from typing import Any

import pytest

from engram.util.schema import (
    Array,
    Boolean,
    FreeObject,
    Integer,
    Invalid,
    Nullable,
    Object,
    Real,
    Rule,
    String,
)

PAIR = Array(Integer(1, 4), 2, 2)
GOOD: list[tuple[Rule, list[Any]]] = [
    (Integer(0, 5), [0, 5]),
    (Real(-1, 1), [-1, 0.5, 1]),
    (Boolean(), [True, False]),
    (String(), ["", "x\ny"]),
    (String(choices=("a", "b")), ["b"]),
    (String(pattern="[0-9a-f]+"), ["0f"]),
    (PAIR, [[1, 4], (2, 2)]),
    (Nullable(Integer(0, 5)), [None, 3]),
    (Object({"a": Integer(0, 5)}, {"b": Boolean()}), [{"a": 1}, {"a": 1, "b": True}]),
    (Object({}, {"a": Boolean()}, others=True), [{}, {"other": []}]),
    (FreeObject(5), [{}, {"a": [1, {"b": 2.5}]}, {"a": 2**64 - 1, "b": -(2**63)}]),
]


@pytest.mark.parametrize(("rule", "values"), GOOD, ids=lambda item: type(item).__name__)
def test_what_keeps_the_rule_passes(rule: Rule, values: list[Any]) -> None:
    for value in values:
        rule.check(value, "x")


DEEP: Any = {}
for _ in range(200):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("rule", "value", "sentence"),
    [
        (Integer(0, 5), 6, "x is 6"),
        (Integer(0, 5), True, "x is True"),
        (Integer(0, 5), 1.0, "x is 1.0"),
        (Integer(0, 5), 10**4000, "x is a number of about 4,000 digits"),
        (Real(0, 1), math.nan, "x is nan"),
        (Real(0, 1), math.inf, "x is inf"),
        (Real(0, 1), 10**400, "x is a number of about 400 digits"),
        (Real(1e-4, 1e4), 5e-324, "x is 5e-324"),
        (Real(0, 1), "0.5", "x is '0.5'"),
        (Boolean(), 1, "x is 1"),
        (String(), None, "x is null"),
        (String(most=3), "abcd", "x has 4 characters"),
        (String(choices=("a", "b")), ["a"], "x is a list of 1 values"),
        (String(pattern="[0-9a-f]+", about="a hash"), "xyz", "it must be a hash"),
        (PAIR, 3, "x is 3"),
        (PAIR, [], "x is an empty list"),
        (PAIR, [1, 9], r"x\[1\] is 9"),
        (Array(Boolean(), 1, 3), [], "a list of 1 to 3 values"),
        (Nullable(Boolean()), 3, "x is 3"),
        (Object({"a": PAIR}), {}, "x.a is missing"),
        (Object({"a": PAIR}), {"a": [0, 1]}, r"x.a\[0\] is 0"),
        (Object({}), {"\x1b": 1}, "there is no field x.'\ufffd'"),
        (Object({}), [], "x is an empty list"),
        (FreeObject(3), {"a": [1, 2, 3]}, "x has more than 3 values"),
        (FreeObject(9), {"a": [math.nan]}, "a number in x is nan"),
        (FreeObject(9), {"a": 2**64}, "64 bits"),
        (FreeObject(999), DEEP, "100 levels"),
        (FreeObject(9), [], "x is an empty list"),
    ],
)
def test_what_breaks_the_rule_is_named(rule: Rule, value: Any, sentence: str) -> None:
    with pytest.raises(Invalid, match=sentence):
        rule.check(value, "x")
