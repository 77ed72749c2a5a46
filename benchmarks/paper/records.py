"""Records of finished runs: one file per kind of run, one JSON line per record.

    runs.jsonl            one run at the chosen learning rate: validation and test accuracy
    rates.jsonl           validation accuracy of every learning rate that was tried for a setting
    concatenation.jsonl   accuracy of a first task while others are attached
    extension.jsonl       accuracy of a second task that extends or does not extend a first one
    costs.jsonl           operations and time of every regime

Any number of processes may read and append at the same time.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from benchmarks.paths import RESULTS
from engram.errors import EngramError

FOLDER = Path(os.environ.get("ENGRAM_PAPER_RECORDS", RESULTS / "paper"))
Record = dict[str, Any]


class Records:
    """The records of one file, by name.

    A record is appended as a whole line, under a lock and synced to disk, and never changed: if
    two have the same name, the later one counts. A crash can leave an incomplete line at the end.
    It is ignored when reading and removed by the next append.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._version: tuple[int, ...] = ()
        self._records: dict[str, Record] = {}

    def get(self, name: str) -> Record | None:
        return self._read().get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._read()

    def all(self) -> list[Record]:
        """All records in the order of their names."""
        return [record for _, record in sorted(self._read().items())]

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        line = json.dumps({"name": name, **dict(sorted(record.items()))}) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
            _remove_incomplete_line(file)
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> dict[str, Record]:
        """Everything in the file; it is parsed again only when it has changed."""
        if not self.path.exists():
            return {}
        with self.path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            status = os.fstat(file.fileno())
            version = (status.st_ino, status.st_size, status.st_mtime_ns)
            if version != self._version:
                self._records, self._version = self._parse(file.read()), version
        return self._records

    def _parse(self, content: bytes) -> dict[str, Record]:
        found = {}
        lines = content.split(b"\n")[:-1]  # after the last newline: nothing, or half a record
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                found[record.pop("name")] = record
            except (ValueError, KeyError, TypeError, AttributeError):
                raise EngramError(
                    f"Line {number} of {self.path} is not a record; restore the file or remove "
                    "that line."
                ) from None
        return found


def _remove_incomplete_line(file: IO[bytes]) -> None:
    file.seek(0)
    content = file.read()
    complete = content.rfind(b"\n") + 1
    if complete != len(content):
        file.truncate(complete)


RUNS = Records(FOLDER / "runs.jsonl")
RATES = Records(FOLDER / "rates.jsonl")
CONCATENATION = Records(FOLDER / "concatenation.jsonl")
EXTENSION = Records(FOLDER / "extension.jsonl")
COSTS = Records(FOLDER / "costs.jsonl")
