"""Answers that are written while they are sent: in pieces, and none after the client is gone.

An answer can have millions of values. As one text it would take gigabytes, and whatever wrote it at
once would keep everything else waiting.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send
from torch import Tensor

from engram.serve.problems import Problem
from engram.util.allocator import return_freed_memory

JSON = {"Content-Type": "application/json"}
MANY_BYTES = 4_000_000  # of an answer that leaves holes of megabytes in memory
PIECE_BYTES = 65_536  # at least, of all pieces but the last
PIECE_VALUES = 4096  # written at a time: one or two milliseconds, in which no other thread runs


class Answer(Response):
    """A response that begins its work when it is to be sent, and keeps its places until then.

    A Problem before the first piece is answered as always. Later it ends the connection: the client
    sees that the answer is not complete. The pieces are computed in `threads`.
    """

    def __init__(self, work: Callable[[Answer], Awaitable[None]], threads: Executor) -> None:
        super().__init__()
        self._work, self._threads, self._started, self._sent = work, threads, False, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        try:
            await self._work(self)
        except Problem:
            if not self._started:
                raise
        if self._sent > MANY_BYTES:  # by now nothing holds what it was made of
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._threads, return_freed_memory)

    async def write(self, parts: Iterable[bytes], headers: Mapping[str, str]) -> None:
        """Send a body. Ends early if the client is gone."""
        run, pieces = asyncio.get_running_loop().run_in_executor, _gather(parts)
        fetch = partial(run, self._threads, next, pieces, None)
        piece, following = await fetch(), await fetch()
        if following is None:
            headers = {"Content-Length": str(len(piece or b"")), **headers}
        encoded = [(name.lower().encode(), text.encode()) for name, text in headers.items()]
        gone = asyncio.ensure_future(self._disconnect())
        try:
            self._started = True
            start = {"type": "http.response.start", "status": 200}
            await self._send({**start, "headers": encoded})
            while piece is not None and not gone.done():
                more = following is not None
                await self._send({"type": "http.response.body", "body": piece, "more_body": more})
                self._sent += len(piece)
                piece, following = following, await fetch() if more else None
        finally:
            gone.cancel()

    async def _disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _gather(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Join parts to pieces that are worth sending."""
    piece = bytearray()
    for part in parts:
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)


def numbers(tensors: Iterable[Tensor]) -> Iterator[bytes]:
    """The values of tensors as items of one JSON list: float32 with all its nine digits."""
    for tensor in tensors:
        form = b"%.9g" if tensor.is_floating_point() else b"%d"
        flat = tensor.flatten()
        for start in range(0, len(flat), PIECE_VALUES):
            values = flat[start : start + PIECE_VALUES]
            yield b",".join([form] * len(values)) % tuple(values.tolist())


def raw(tensors: Iterable[Tensor]) -> Iterator[bytes]:
    """The values of tensors as bytes, little-endian."""
    for tensor in tensors:
        values = tensor.flatten().numpy()
        values = values.astype(values.dtype.newbyteorder("<"), copy=False)
        for start in range(0, len(values), PIECE_VALUES):
            yield values[start : start + PIECE_VALUES].tobytes()


def json_parts(value: Any) -> Iterator[bytes]:
    """A value as JSON, in parts: other threads wait while one part is written.

    Mappings are written member by member, iterators as lists, item by item. A function is called
    when its turn has come, and bytes are JSON already.
    """
    if isinstance(value, bytes):
        yield value
    elif callable(value):
        yield from json_parts(value())
    elif isinstance(value, Mapping):
        yield b"{"
        for i, (name, one) in enumerate(value.items()):
            yield (b"," if i else b"") + _dump_json(name) + b":"
            yield from json_parts(one)
        yield b"}"
    elif isinstance(value, Iterator):
        yield b"["
        for i, one in enumerate(value):
            yield b"," if i else b""
            yield from json_parts(one)
        yield b"]"
    else:
        yield _dump_json(value)


def _dump_json(value: Any) -> bytes:
    """A value as JSON, which has no numbers that are not finite."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()
