"""Settings for tests that go through all regimes."""

from __future__ import annotations

from typing import Any

from engram.methods import METHODS
from engram.tasks.kinds import KINDS

#: The regimes that learn from labelled images, and not from good ones alone.
SUPERVISED = [name for name, method in METHODS.items() if not method.one_class]


def teaches(regime: str, kind: str) -> bool:
    """Whether a regime can teach a kind of task: some answer for no pixel."""
    method = METHODS[regime]
    can = method.answers_pixels or not KINDS[kind].per_pixel
    return method.one_class == KINDS[kind].one_class and can


def class_count(kind: str) -> int:
    """Three classes, where the kind of task can have them."""
    return 1 if KINDS[kind].one_class else 3


def known(regime: str, **settings: Any) -> dict[str, Any]:
    """Those of the settings that the method of a regime has."""
    names = METHODS[regime].setting_names()
    return {name: value for name, value in settings.items() if name in names}
