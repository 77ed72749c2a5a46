"""Images of any source, and processes that decode them, so that the model does not wait.

What is imported here is imported by each of them. Without torch they start in half a second, and
take 40 MB.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from engram.images.decode import MAX_IMAGE_BYTES, BadImage, check_bytes, read_image_file
from engram.images.preprocessing import Preprocessing
from engram.images.views import evaluation_view
from engram.inference.bulk.addresses import Allowed, fetch, is_address
from engram.util.text import first_line, utf8
from engram.util.worker_processes import begin_worker

View: TypeAlias = npt.NDArray[np.uint8]  # (h, w, 3)
_AT_ONCE = 8  # images that a process is given: a message for each would cost half of a decode
_AHEAD = 8  # times as many may be under way, per process


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


@dataclass(frozen=True)
class DecodedItem:
    """An image and its view, or the sentence that says why there is none."""

    name: str
    view: View | None
    error: str = ""


def decode_all(items: Sequence[Item], preprocessing: Preprocessing) -> list[DecodedItem]:
    return [decode(item, preprocessing) for item in items]


def decode(item: Item, preprocessing: Preprocessing) -> DecodedItem:
    """Read and decode one image; whatever is wrong with it is its error."""
    try:
        data = item.read()
        return DecodedItem(item.name, evaluation_view(data, preprocessing, name=item.name))
    except BadImage as error:
        return DecodedItem(item.name, None, utf8(str(error)).decode())
    except Exception as error:  # of any file system, about any name
        reason = utf8(first_line(error)).decode()
        return DecodedItem(item.name, None, f"{item.name}: it cannot be read ({reason})")


class Decoders:
    """A pool of processes; with 0 of them this process decodes.

    An image that ends the process that decodes it is an error, and the others go on.
    """

    def __init__(self, preprocessing: Preprocessing, processes: int) -> None:
        self.preprocessing, self.processes = preprocessing, processes
        self._pool: ProcessPoolExecutor | None = None

    def decoded(self, items: Iterable[Item]) -> Iterator[DecodedItem]:
        """The images in their order; some are decoded ahead."""
        if not self.processes:
            yield from map(partial(decode, preprocessing=self.preprocessing), items)
            return
        waiting: deque[tuple[tuple[Item, ...], Future[list[DecodedItem]]]] = deque()
        items, size = iter(items), 0  # bytes that wait
        while True:
            while len(waiting) < _AHEAD * self.processes and size < HELD:
                some = some_of(items, _AT_ONCE)
                if not some:
                    break
                waiting.append((some, self._submit(some)))
                size += sum(map(held, some))
            if not waiting:
                return
            some, future = waiting.popleft()
            size -= sum(map(held, some))
            try:
                found = future.result()
            except BrokenProcessPool:
                found = list(map(self._alone, some))
                waiting = deque((others, self._submit(others)) for others, _ in waiting)
            del some, future  # and the bytes in them
            yield from found

    def _submit(self, items: Sequence[Item]) -> Future[list[DecodedItem]]:
        for _ in range(2):
            if self._pool is None:
                context = multiprocessing.get_context("spawn")  # torch's threads survive no fork
                begin = begin_worker, (os.getpid(),)
                self._pool = ProcessPoolExecutor(self.processes, context, *begin)
            try:
                return self._pool.submit(decode_all, items, self.preprocessing)
            except BrokenProcessPool:
                self.close()
        raise AssertionError("a new pool takes work")

    def _alone(self, item: Item) -> DecodedItem:
        """Decode one image that may have ended a process, with no other under way."""
        try:
            return self._submit([item]).result()[0]
        except BrokenProcessPool:
            reason = "it ended the process that decoded it"
            return DecodedItem(item.name, None, f"{item.name}: {reason}")

    def close(self) -> None:
        """End the processes, also one that waits for an image that never comes."""
        if self._pool is not None:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
