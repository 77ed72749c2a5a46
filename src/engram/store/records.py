"""What files said about the weights of attached tasks: kept as long as these are the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engram.store.engram import Engram

_KEPT = ("metrics", "recipe", "created", "library")  # no part of the content


class Records:
    """Metrics, recipe and origin of tasks by name, each with the content that they are about."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, Mapping[str, Any]]] = {}

    def remember(self, engram: Engram) -> None:
        """Keep what the engram records about itself."""
        about = {name: getattr(engram, name) for name in _KEPT}
        self._known[engram.spec.name] = (engram.content, about)

    def restore(self, engram: Engram) -> Engram:
        """The engram with what is known about it; as it is, if that was about other weights."""
        if engram.spec.name not in self._known:
            return engram
        content, about = self._known[engram.spec.name]
        return replace(engram, **about) if content == engram.content else engram
