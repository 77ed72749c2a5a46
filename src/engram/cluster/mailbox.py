"""Where jobs on other nodes leave word; its process is small, for it never loads torch."""

from __future__ import annotations

from engram.farm.events import Event


class Mailbox:
    """An actor that keeps what jobs tell until the farm asks for it."""

    def __init__(self) -> None:
        self._events: list[tuple[Event, str]] = []

    def put(self, event: Event, node: str) -> None:
        self._events.append((event, node))

    def take(self) -> list[tuple[Event, str]]:
        taken, self._events = self._events, []
        return taken
