"""Schemas for the values of a file, declared once and checked where the file is read.

A rule is one of the classes below, which are named as in JSON Schema. `rule.check(value, name)`
raises `Invalid`, which says what the value is and what it must be. A tuple counts as a list.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Protocol

from engram.util.text import printable


class Invalid(ValueError):
    """A value that breaks a rule. The message is part of a sentence, without a full stop."""


class Rule(Protocol):
    def check(self, value: Any, name: str) -> None:
        """Raise `Invalid` unless the value keeps the rule; `name` is where it was found."""


@dataclass(frozen=True)
class Real:
    """A number in a range, which is never NaN or infinite; without `most`, what fp32 can hold."""

    least: float
    most: float | None = None
    below: float = math.inf

    types: ClassVar[tuple[type, ...]] = (int, float)
    noun: ClassVar[str] = "a number"
    limit: ClassVar[float] = 3e38

    def check(self, value: Any, name: str) -> None:
        number = isinstance(value, self.types) and not isinstance(value, bool)
        if not number or not self.least <= value < math.inf:
            _refuse(value, name, f"{self.noun}, at least {self.least:g}")
        if value >= self.below:
            _refuse(value, name, f"below {self.below:g}")
        most = self.limit if self.most is None else self.most
        if value > most:
            raise Invalid(f"{name} is {brief(value)}; it can be {most} at most")


class Integer(Real):
    """A whole number in a range; without `most`, what counters and tensors can hold."""

    types = (int,)
    noun = "a whole number"
    limit = 2**63 - 1


@dataclass(frozen=True)
class Boolean:
    """True or false."""

    def check(self, value: Any, name: str) -> None:
        if not isinstance(value, bool):
            _refuse(value, name, "true or false")


@dataclass(frozen=True)
class String:
    """Text: any, one of several, or such that a pattern matches all of it."""

    most: int | None = None  # characters
    choices: tuple[str, ...] = ()
    pattern: str = ""
    about: str = "text"  # what the pattern matches

    def check(self, value: Any, name: str) -> None:
        if self.choices and value not in self.choices:
            raise Invalid(f"{name} is {brief(value)}; it can be {', '.join(self.choices)}")
        if not isinstance(value, str) or (self.pattern and not re.fullmatch(self.pattern, value)):
            _refuse(value, name, self.about)
        if self.most is not None and len(value) > self.most:
            raise Invalid(f"{name} has {len(value):,} characters; at most {self.most:,} are read")


@dataclass(frozen=True)
class Array:
    """A list whose values all keep one rule."""

    item: Rule
    least: int = 0
    most: int = 1_000_000

    def check(self, value: Any, name: str) -> None:
        if not isinstance(value, (list, tuple)):
            _refuse(value, name, "a list")
        if not self.least <= len(value) <= self.most:
            count = f"{self.least:,}"
            count += f" to {self.most:,}" if self.most > self.least else ""
            _refuse(value, name, f"a list of {count} values")
        for i, item in enumerate(value):
            try:
                self.item.check(item, name)
            except Invalid:  # a name for each of a million values would take longer than the check
                self.item.check(item, f"{name}[{i}]")


@dataclass(frozen=True)
class Nullable:
    """Null, or a value that keeps a rule."""

    rule: Rule

    def check(self, value: Any, name: str) -> None:
        if value is not None:
            self.rule.check(value, name)


@dataclass(frozen=True)
class Object:
    """An object. Fields without a rule are refused, unless `others` lets them be."""

    required: Mapping[str, Rule] = field(default_factory=dict)
    optional: Mapping[str, Rule] = field(default_factory=dict)
    others: bool = False

    def check(self, value: Any, name: str) -> None:
        if not isinstance(value, Mapping):
            _refuse(value, name, "an object")
        prefix = f"{name}." if name else ""
        for key in self.required:
            if key not in value:
                raise Invalid(f"{prefix}{key} is missing")
        rules = {**self.optional, **self.required}
        unknown = [key for key in value if key not in rules]
        if unknown and not self.others:
            raise Invalid(f"there is no field {prefix}{brief(unknown[0])}")
        for key, rule in rules.items():
            if key in value:
                rule.check(value[key], f"{prefix}{key}")


@dataclass(frozen=True)
class FreeObject:
    """An object with anything in it: so many values at most, and numbers that programs can hold."""

    most: int
    nesting: int = 100

    def check(self, value: Any, name: str) -> None:
        if not isinstance(value, Mapping):
            _refuse(value, name, "an object")
        count, level = 0, [value]
        for _ in range(self.nesting):
            level = [part for item in level for part in _parts(item)]
            count += len(level)
            if count > self.most:
                raise Invalid(f"{name} has more than {self.most:,} values")
            for part in level:
                if isinstance(part, float) and not math.isfinite(part):
                    _refuse(part, f"a number in {name}", "finite")
                if isinstance(part, int) and not -(2**63) <= part < 2**64:
                    _refuse(part, f"a number in {name}", "one that 64 bits can hold")
        if level:
            raise Invalid(f"{name} is nested more than {self.nesting} levels deep")


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else []


def _refuse(value: Any, name: str, expected: str) -> NoReturn:
    raise Invalid(f"{name} is {brief(value)}; it must be {expected}")


def brief(value: Any) -> str:
    """A value for an error message, however large it is."""
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value):,} values" if value else "an empty list"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"a number of about {int(value.bit_length() * math.log10(2)):,} digits"
    if isinstance(value, str):
        return repr(printable(value, 60))
    return "null" if value is None else printable(repr(value), 60)
