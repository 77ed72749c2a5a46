"""How long work reports how far it is, without knowing who watches."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told how far a piece of work is."""

    def __call__(self, what: str, done: int, total: int, note: str = "") -> object: ...


def silent(what: str, done: int, total: int, note: str = "") -> None:
    """Progress that nobody watches."""
