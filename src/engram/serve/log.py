"""What happened, one line each on stderr: requests, attached and removed tasks, refusals."""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading
from datetime import UTC, datetime
from typing import Any

from engram.util.text import printable

LOGS = ("text", "json")
_LINES = 10_000  # that may wait; more are dropped, because nothing must wait for stderr


class Log:
    """Writes lines in a thread of its own: a reader of stderr that stops must not stop requests.

    Lines hold no token and nothing of a body.
    """

    def __init__(self, form: str) -> None:
        self._json = form == "json"
        self._lines: queue.Queue[str | None] = queue.Queue(_LINES)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def request(self, client: str, method: str, path: str, status: int, seconds: float) -> None:
        """A request that was answered; the path is without its query."""
        self.event("request", client=client, method=method, path=path, status=status,
                   ms=round(1000 * seconds, 1))  # fmt: skip

    def event(self, event: str, **facts: str | float) -> None:
        """Anything that happened; facts from clients are shown safely."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        shown = {k: printable(v, 200) if isinstance(v, str) else v for k, v in facts.items()}
        document = {"time": now, "event": event, **shown}
        line = json.dumps(document) if self._json else f"{now} {_sentence(event, shown)}"
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(line)
        self._start()

    def stop(self) -> None:
        """Write what waits, unless nobody reads it."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            with contextlib.suppress(queue.Full):
                self._lines.put(None, timeout=1)
                thread.join(1)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, daemon=True)
                self._thread.start()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # stderr is closed
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()


def _sentence(event: str, facts: dict[str, Any]) -> str:
    if event == "request":
        return "{client} {method} {path} {status} {ms:g} ms".format(**facts)
    return " ".join([event, *(f"{name}={value}" for name, value in facts.items())])
