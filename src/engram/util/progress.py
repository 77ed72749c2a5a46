"""Progress reports of long work, which does not know who watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """Receives how far a piece of work is; a total of 0 means that its length is not known."""

    def __call__(self, what: str, done: int, total: int, note: str = "") -> object: ...


def silent(what: str, done: int, total: int, note: str = "") -> None:
    """Progress that nobody watches."""


def labelled(progress: Progress, label: str) -> Progress:
    """Progress of work that is a part of something with a name."""
    return lambda what, done, total, note="": progress(f"{label}: {what}", done, total, note)


def counter(
    progress: Progress, what: str, total: int, note: str = "", times: int = 1
) -> Callable[[int], None]:
    """Counts items of one piece of work; `times` processes do as much at the same time.

    It shows at once that the work begins, if there is any.
    """
    done = 0

    def count(items: int = 1) -> None:
        nonlocal done
        done = min(total, done + items * times)
        progress(what, done, total, note)

    if total:
        count(0)
    return count
