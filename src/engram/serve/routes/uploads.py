"""Reading requests: a limit on bytes, a limit on time, and a sentence for every error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from fastapi import Request

from engram.serve.clients import Shares
from engram.serve.problems import Problem
from engram.util.text import printable

Reserve = Callable[[int], None]  # counts more, or raises a Problem

# Seconds in which a client may finish sending a refused body: only then does it read the answer.
_DRAIN_SECONDS = 2.0


class Budget:
    """Limits what all requests in progress have: many, each within its own limit, add up.

    One client gets half of it, or one request, so that there is room for others.

    Args:
        most: What all of them may have.
        most_each: What one request may have.
        what: What is counted, for the sentence.
    """

    def __init__(self, most: int, most_each: int, what: str) -> None:
        self.most, self.what, self.taken = most, what, 0
        self._shares = Shares(max(most // 2, most_each), what)

    @contextmanager
    def request(self, client: str) -> Iterator[Reserve]:
        """Counts for one request until it ends."""
        own = 0

        def reserve(size: int) -> None:
            nonlocal own
            if self.taken + size > self.most:
                raise Problem(
                    503,
                    f"All requests together would have more than {self.most:,} {self.what}, which "
                    "is the limit; try again in a second.",
                    retry=1,
                )
            self._shares.take(client, size)
            self.taken += size
            own += size

        try:
            yield reserve
        finally:
            self.taken -= own
            self._shares.give_back(client, own)


async def read_body(
    request: Request, most: int, deadline: float, reserve: Reserve = lambda size: None
) -> AsyncGenerator[bytes, None]:
    """The body in pieces; a body that is too large or too slow is a Problem."""
    declared = request.headers.get("content-length", "")
    stream = request.stream()
    seen = 0
    too_much = declared.isdecimal() and int(declared) > most
    try:
        while not too_much:
            async with asyncio.timeout_at(deadline):
                piece = await anext(stream, None)
            if piece is None:
                return
            seen += len(piece)
            too_much = seen > most
            if not too_much:
                reserve(len(piece))
                yield piece
    except TimeoutError:
        raise Problem(
            408, "The body did not arrive in time; send it faster, or send less."
        ) from None
    except Problem:
        await _drain(stream, most)
        raise
    await _drain(stream, most)
    raise Problem(413, f"The body has more than {most:,} bytes, which is the limit.")


async def _drain(stream: AsyncIterator[bytes], most: int) -> None:
    """Read and drop the rest of a refused body, within limits."""
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for piece in stream:
                most -= len(piece)
                if most < 0:
                    return
    except TimeoutError:
        return


async def read_whole_body(
    request: Request, most: int, deadline: float, reserve: Reserve = lambda size: None
) -> bytearray:
    """The whole body; see `read_body`. Small pieces must not take more memory than large ones."""
    body = bytearray()
    async for piece in read_body(request, most, deadline, reserve):
        body += piece
    return body


def content_type(request: Request) -> str:
    """The content type of a request to predict; one that is not supported is a Problem."""
    kind = request.headers.get("content-type", "")
    short = kind.partition(";")[0].strip().lower()
    if short not in ("multipart/form-data", "application/json"):
        raise Problem(
            415,
            f"The content type is {printable(short, 60)!r}; send multipart/form-data with the "
            "field image, or application/json with images in base64.",
        )
    return kind
