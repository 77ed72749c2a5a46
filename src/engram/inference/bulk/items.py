"""One image of many: its name and its bytes. Decoders import it, and wait for no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engram.images.decode import MAX_IMAGE_BYTES, BadImage, check_bytes, read_image_file
from engram.inference.bulk.addresses import Allowed, fetch, is_address
from engram.util.text import utf8

#: Bytes of images that are held at once, if they are more than one.
HELD = MAX_IMAGE_BYTES // 4


@dataclass(frozen=True)
class Item:
    """One image: its place, and its bytes if they are not there but in an archive or table."""

    place: str  # a path or an address; of an image that is part of a file, its place in there
    data: bytes | None = None
    allowed: Allowed | None = None  # where a list or table names the place; None: the command line
    problem: str = ""  # why there is no image, as the end of a sentence

    @property
    def name(self) -> str:
        r"""The name in answers: the place, with bytes that are no UTF-8 as `\udcff`."""
        return utf8(self.place).decode()

    def read(self) -> bytes:
        """The encoded image; an exception of any kind if it cannot be had within the limits."""
        if self.problem:
            raise BadImage(f"{self.name}: {self.problem}")
        if self.data is not None:
            check_bytes(len(self.data), self.name)
            return self.data
        if not is_address(self.place):
            return read_image_file(self.place, self.name)
        return fetch(self.place, self.allowed, self.name)


def some_of(items: Iterator[Item], most: int) -> tuple[Item, ...]:
    """The next items: at most so many, and fewer if their bytes are more than a few images."""
    taken: list[Item] = []
    while len(taken) < most and sum(map(held, taken)) < HELD:
        if (item := next(items, None)) is None:
            break
        taken.append(item)
    return tuple(taken)


def held(item: Item) -> int:
    """The bytes that an item holds in memory."""
    return len(item.data or b"")
