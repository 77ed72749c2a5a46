"""Settings are checked where they are made, and a wrong one is named in a sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import pytest

from engram import EngramError
from engram.util.settings import check, setting


@dataclass(frozen=True)
class Oven:
    name: str = setting("home", "what it is called")
    mode: str = setting("fan", "how it heats", choices=("fan", "grill"), group="Heat")
    minutes: int = setting(30, "how long it is on", least=1)
    degrees: float = setting(180.0, "how hot it gets", most=300)
    open: float = setting(0.0, "how far the door is open", below=1)

    def __post_init__(self) -> None:
        check(self)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("name", 5, "name is 5; it must be text."),
        ("mode", "steam", "mode is 'steam'; it can be fan, grill."),
        ("mode", True, "mode is True; it can be fan, grill."),
        ("minutes", 0, "minutes is 0; it must be a whole number, at least 1."),
        ("minutes", 1.5, "minutes is 1.5; it must be a whole number, at least 1."),
        ("minutes", True, "minutes is True; it must be a whole number, at least 1."),
        ("degrees", "hot", "degrees is 'hot'; it must be a number, at least 0."),
        ("degrees", -1, "degrees is -1; it must be a number, at least 0."),
        ("degrees", math.nan, "degrees is nan; it must be a number, at least 0."),
        ("degrees", math.inf, "degrees is inf; it must be a number, at least 0."),
        ("degrees", 301, "degrees is 301; it can be 300 at most."),
        ("minutes", 2**63, f"minutes is {2**63}; it can be {2**63 - 1} at most."),
        ("open", 1, "open is 1; it must be below 1."),
    ],
)
def test_a_wrong_value_is_a_sentence(name: str, value: object, expected: str) -> None:
    with pytest.raises(EngramError, match=expected):
        Oven(**{name: value})  # type: ignore[arg-type]


def test_a_number_that_python_does_not_print_is_a_sentence() -> None:
    with pytest.raises(EngramError, match="about 6,020 digits"):
        Oven(minutes=1 << 20_000)


def test_values_at_the_bounds_are_allowed() -> None:
    oven = Oven(name="", mode="grill", minutes=1, degrees=300, open=0.999)
    assert (oven.mode, oven.degrees) == ("grill", 300)


def test_a_field_carries_what_a_flag_needs() -> None:
    mode = fields(Oven)[1]
    assert mode.default == "fan"
    assert mode.metadata["about"] == "how it heats"
    assert mode.metadata["choices"] == ("fan", "grill")
    assert mode.metadata["group"] == "Heat"
