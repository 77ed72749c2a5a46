"""How far a process is, read from the files that it writes while they are replaced."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from engram.util.documents import read_header


class Fact(Protocol):
    """Something that becomes true while a process works, and what is true a little later."""

    def __call__(self) -> bool: ...

    @property
    def later(self) -> Fact: ...


def step_of(out: Path) -> int:
    """How far the checkpoint of a run is.

    Opened once: a reader that opens it twice may see two files, because it is replaced.
    """
    try:
        with open(out.with_suffix(".run") / "checkpoint.safetensors", "rb") as file:
            return int(json.loads(read_header(file)["__metadata__"]["run"])["step"])
    except FileNotFoundError:
        return 0


@dataclass(frozen=True)
class reached:
    """Whether the checkpoint of a run is at a step."""

    out: Path
    step: int

    def __call__(self) -> bool:
        return step_of(self.out) >= self.step

    @property
    def later(self) -> reached:
        return replace(self, step=self.step + 2)


@dataclass(frozen=True)
class written:
    """Whether there are so many files of a pattern, or so many bytes in all of them."""

    folder: Path
    pattern: str
    files: int = 0
    size: int = 0
    more: int = 1  # a little later there are so many more

    def __call__(self) -> bool:
        found = list(self.folder.glob(self.pattern))
        return len(found) >= self.files and sum(p.stat().st_size for p in found) >= self.size

    @property
    def later(self) -> written:
        if self.size:
            return replace(self, size=self.size + self.more)
        return replace(self, files=self.files + self.more)


def hold_when(fact: Fact, go: Path) -> None:
    """Let this process wait at its next `fsync` once a fact is true, until `go` is a file.

    Whoever waits for an earlier fact then finds it working or waiting, never at its end, however
    busy the machine is.
    """
    fsync, family = os.fsync, (os.getpid(), os.getppid())

    def held(handle: int) -> None:
        fsync(handle)
        if fact():
            while not go.exists():
                if os.getpid() == family[0] and os.getppid() != family[1]:
                    os._exit(1)  # the tests were stopped: nobody will let it go
                time.sleep(0.005)

    os.fsync = held
