"""The log, one line each on stderr: requests, attached and removed tasks, refusals."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Hashable
from datetime import UTC, datetime

from engram.util.text import printable

LOGS = ("text", "json")
_LINES = 10_000  # that may wait; more are dropped, because nothing must wait for stderr
_INTERVAL = 60.0  # seconds between two lines about one kind of error
_KINDS = 1000  # of errors that are remembered


class Log:
    """Writes lines in a thread of its own: a reader of stderr that stops must not stop requests.

    Lines hold no token and nothing of a body.
    """

    def __init__(self, form: str) -> None:
        self._json = form == "json"
        self._lines: queue.Queue[str | None] = queue.Queue(_LINES)
        self._seldom = Seldom()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def event(self, event: str, **facts: str | float) -> None:
        """Anything that happened; facts from clients are shown safely."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        shown = {k: printable(v, 200) if isinstance(v, str) else v for k, v in facts.items()}
        if self._json:
            line = json.dumps({"time": now, "event": event, **shown})
        elif event == "request":
            words = (v if isinstance(v, str) else f"{v:g}" for v in shown.values())
            line = " ".join([now, *words, "ms"])
        else:
            line = " ".join([now, event, *(f"{name}={value}" for name, value in shown.items())])
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(line)

    def event_seldom(self, event: str, **facts: str | float) -> None:
        """A line a minute about what may happen often, with the count since the last one."""
        held_back = self._seldom.passes(event)
        if held_back is not None:
            self.event(event, **facts, **({"before": held_back} if held_back else {}))

    def stop(self) -> None:
        """Write what waits, unless nobody reads it."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=1)
            self._thread.join(1)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # stderr is closed
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()


class Seldom(logging.Filter):
    """Lets one of each kind through in an interval, and counts the others.

    As a filter for the loggers of libraries, it does so with errors that come again and again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        # By kind: when one passed, and how many did not since.
        self._last: dict[Hashable, tuple[float, int]] = {}

    def passes(self, kind: Hashable) -> int | None:
        """The number of its kind that were held back before it; None if it is held back, too."""
        now = time.monotonic()
        with self._lock:
            when, held_back = self._last.get(kind, (-_INTERVAL, 0))
            if now - when < _INTERVAL:
                self._last[kind] = when, held_back + 1
                return None
            if len(self._last) >= _KINDS:
                self._last.clear()
            self._last[kind] = now, 0
            return held_back

    def filter(self, record: logging.LogRecord) -> bool:
        kind, _, trace = record.exc_info or (None, None, None)
        lines = [(frame.f_code, line) for frame, line in traceback.walk_tb(trace)]
        what = str(record.msg).partition("\n")[0][:100]
        held_back = self.passes((record.name, what, kind, *lines[-1:]))
        if held_back:
            record.msg, record.args = f"{record.getMessage()} ({held_back} more before it)", ()
        return held_back is not None
