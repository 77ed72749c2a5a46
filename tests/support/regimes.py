"""Settings for tests that go through all regimes."""

from __future__ import annotations

from typing import Any

from engram.methods import METHODS


def known(regime: str, **settings: Any) -> dict[str, Any]:
    """Those of the settings that the method of a regime has."""
    names = METHODS[regime].setting_names()
    return {name: value for name, value in settings.items() if name in names}
