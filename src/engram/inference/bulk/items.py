"""One image of many: its name and its bytes. Decoders import it, and wait for no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, Any

from engram.util.optional import require


@dataclass(frozen=True)
class Item:
    """One image: what answers call it, and its bytes, or None if the name is where they are."""

    name: str
    data: bytes | None = None

    def read(self) -> bytes:
        """The encoded image; an OSError if it cannot be had."""
        if self.data is not None:
            return self.data
        with opened(self.name) as file:
            content: bytes = file.read()
            return content


def is_address(source: str) -> bool:
    """Whether this is an address of another file system, such as s3://bucket/file."""
    return "://" in source


def opened(source: str, mode: str = "rb") -> IO[Any]:
    """Open a path or an address."""
    if not is_address(source):
        return open(source, mode)
    fsspec = file_systems()
    file: IO[Any] = fsspec.open(source, mode).open()
    return file


def file_systems() -> Any:
    """The package that opens addresses."""
    return require("fsspec", extra="hub-data", purpose="Reading from an address")
