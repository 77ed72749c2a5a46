"""The decoders of a service: a few processes, each used by one request at a time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from pydantic import BaseModel
from torch import Tensor

from engram.images.decode import BadImage, LargeImage
from engram.images.preprocessing import Preprocessing
from engram.serve.decoding.launcher import Child, launcher
from engram.serve.decoding.messages import HEAD_BYTES, Document, pack, sizes, unpack
from engram.serve.problems import Problem
from engram.serve.routes.infer_schemas import InferOptions
from engram.serve.service_settings import Settings

Options = TypeVar("Options", bound=BaseModel)


@dataclass(frozen=True)
class Received(Generic[Options]):
    """What a body holds: the names of its images, and the options."""

    names: list[str]
    options: Options


@dataclass(frozen=True)
class Decoded:
    """An image: what responses say about it, and its view: uint8 (h, w, 3), or pixels (3, h, w)."""

    fields: dict[str, Any]
    view: Tensor


class Decoder:
    """One process. `failed` says why it cannot be used again."""

    def __init__(self, child: Child, settings: Settings) -> None:
        self.child, self.settings = child, settings
        self.failed = ""
        self._images = 0  # that it still holds
        child.connection.setblocking(False)

    @property
    def alive(self) -> bool:
        """Whether it waits for a message: a process that has ended closes its connection."""
        try:
            self.child.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    async def read(self, options: type[Options], kind: str, body: bytearray) -> Received[Options]:
        """Send the body of a request, and give what it holds. Clears the body."""
        message = {"do": "read", "options": options.__name__, "kind": kind}
        return await self._read(message, body, options)

    async def read_inference(
        self, body: bytearray, json_bytes: int | None, size: Sequence[int]
    ) -> Received[InferOptions]:
        """The same for a request of the Open Inference Protocol; `size` is that of pixels."""
        message = {"do": "read_inference", "json_bytes": json_bytes, "size": list(size)}
        return await self._read(message, body, InferOptions)

    async def _read(
        self, message: Document, body: bytearray, options: type[Options]
    ) -> Received[Options]:
        limits = {"max_images": self.settings.max_images, "max_body": self.settings.max_body}
        answer, _ = await self._ask("The body", {**message, "limits": limits}, body)
        self._images = len(answer["names"])
        return Received(answer["names"], options.model_validate(answer["options"]))

    async def decode(self, index: int, name: str, preprocessing: Preprocessing) -> Decoded:
        """An image of the body."""
        message = {
            "do": "decode",
            "index": index,
            "preprocessing": preprocessing.to_dict(),
            "max_pixels": self.settings.max_pixels,
        }
        answer, data = await self._ask(name, message)
        self._images -= 1
        view = torch.frombuffer(data, dtype=getattr(torch, answer["dtype"])).view(answer["shape"])
        return Decoded(answer["fields"], view)

    def forget(self) -> None:
        """Let it drop images of the request that were not decoded; there is no answer."""
        if self._images:
            self._images = 0
            with suppress(OSError):
                self.child.connection.send(pack({"do": "forget"}))

    async def _ask(
        self, what: str, message: Document, data: bytearray | None = None
    ) -> tuple[Document, bytearray]:
        """The answer to a message; `what` is the subject of the sentence if there is none."""
        self.failed = "its request was cancelled"  # unless the answer arrives
        limit = self.settings.decode_timeout
        try:
            async with asyncio.timeout(limit) as timer:
                answer, more = await self._exchange(message, data)
        except TimeoutError:
            if not timer.expired():
                raise
            self.failed = f"{limit:g} seconds were over"
            raise LargeImage(
                f"{what}: it takes more than {limit:g} seconds to read, which is the limit"
            ) from None
        except (OSError, EOFError):
            self.failed = "it had ended by itself"
            raise BadImage(f"{what}: it ended the process that read it") from None
        self.failed = "it ran out of memory" if "out_of_memory" in answer else ""
        if self.failed:
            raise LargeImage(f"{what}: it takes too much memory to read")
        if "failed" in answer:
            self.failed = f"it failed with {answer['failed']}"
            raise BadImage(f"{what}: it cannot be read")
        if "refused" in answer:
            raise Problem(answer["status"], answer["refused"])
        if "bad_image" in answer:
            raise (LargeImage if answer["large"] else BadImage)(answer["bad_image"])
        return answer, more

    async def _exchange(
        self, message: Document, data: bytearray | None
    ) -> tuple[Document, bytearray]:
        loop, connection = asyncio.get_running_loop(), self.child.connection
        await loop.sock_sendall(connection, pack(message, len(data or b"")))
        if data is not None:
            with memoryview(data) as view:
                await loop.sock_sendall(connection, view)
            data.clear()
        document, more = sizes(await self._receive(HEAD_BYTES))
        return unpack(await self._receive(document)), await self._receive(more)

    async def _receive(self, size: int) -> bytearray:
        loop, data = asyncio.get_running_loop(), bytearray(size)
        rest = memoryview(data)
        while rest:
            count = await loop.sock_recv_into(self.child.connection, rest)
            if count == 0:
                raise EOFError
            rest = rest[count:]
        return data


class Pool:
    """Lends decoders to requests, and replaces those that failed.

    `on_kill` is called with the reason whenever a decoder is killed.
    """

    def __init__(
        self, settings: Settings, on_kill: Callable[[str], None] = lambda reason: None
    ) -> None:
        self.settings, self._on_kill = settings, on_kill
        # Of clients that have requests: an entry is dropped with the last of them.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        # None: a decoder that the next request has to start.
        self._free: asyncio.LifoQueue[Decoder | None] = asyncio.LifoQueue()
        for _ in range(settings.decoders):
            self._free.put_nowait(None)

    async def start(self) -> None:
        """Start all decoders, so that the first requests do not wait for them."""
        for decoder in self._take_free():
            self._free.put_nowait(decoder or await self._new())

    async def stop(self) -> None:
        """End the decoders. Those in use end with their requests."""
        for decoder in self._take_free():
            if decoder is not None:
                decoder.child.connection.close()  # it ends by itself
            self._free.put_nowait(None)

    def _take_free(self) -> list[Decoder | None]:
        return [self._free.get_nowait() for _ in range(self._free.qsize())]

    @asynccontextmanager
    async def decoder(self, client: str = "") -> AsyncIterator[Decoder]:
        """A decoder for one request; waits until one is free.

        One client gets all of them but one, so that slow images of one do not stop the others.
        """
        turn = self._turns.setdefault(client, asyncio.Semaphore(max(1, self.settings.decoders - 1)))
        async with turn, self._lend() as decoder:
            yield decoder

    @asynccontextmanager
    async def _lend(self) -> AsyncIterator[Decoder]:
        decoder = await self._free.get()
        try:
            if decoder is None or not decoder.alive:
                decoder = await self._new()
            yield decoder
        finally:
            if decoder is not None and decoder.failed:
                self._kill(decoder)
                decoder = None
            elif decoder is not None:
                decoder.forget()
            self._free.put_nowait(decoder)

    async def _new(self) -> Decoder:
        try:
            child = await asyncio.to_thread(launcher().fork, self.settings.decode_memory)
        except OSError as error:
            raise Problem(
                503,
                f"No process can be started to decode images ({error.strerror or error}); try "
                "again in a few seconds.",
                retry=5,
            ) from None
        return Decoder(child, self.settings)

    def _kill(self, decoder: Decoder) -> None:
        # In a thread, and nobody waits for it: this also happens while a request is cancelled.
        asyncio.get_running_loop().run_in_executor(None, launcher().kill, decoder.child)
        self._on_kill(decoder.failed)
