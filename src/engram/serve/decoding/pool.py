"""The decoders of a service: a few processes, each used by one request at a time.

They are forked from a small process (multiprocessing's fork server) that has loaded what they need
and no more: the service itself has threads and a model.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any, TypeVar

import torch
from pydantic import BaseModel
from torch import Tensor

from engram.images.preprocessing import Preprocessing
from engram.serve.decoding.worker import GOOD, SMALLER, BodyDecoder, Document, Read, receive, work
from engram.serve.log import Log
from engram.serve.problems import Problem
from engram.serve.service_settings import Settings
from engram.serve.telemetry import DECODE, Telemetry

Options = TypeVar("Options", bound=BaseModel)

_ENVIRONMENT = threading.Lock()
_HIDDEN = ("ENGRAM_", "PYTHONSAFEPATH")


@dataclass(frozen=True)
class Decoded:
    """An image: what responses say about it, and its view, uint8 (h, w, 3); or floats as sent."""

    fields: dict[str, Any]
    view: Tensor


def start_fork_server() -> None:
    """Start the process that decoders are forked from, without waiting until it is ready.

    It knows no token of the service, and imports nothing from the current folder.
    """
    decoding = "engram.serve.decoding"
    multiprocessing.set_forkserver_preload([f"{decoding}.worker", f"{decoding}.infer_body"])
    with _ENVIRONMENT:
        hidden = {name: text for name, text in os.environ.items() if name.startswith(_HIDDEN)}
        for name in hidden:
            del os.environ[name]
        os.environ["PYTHONSAFEPATH"] = "1"
        try:
            forkserver.ensure_running()
        finally:
            del os.environ["PYTHONSAFEPATH"]
            os.environ.update(hidden)


class Decoder:
    """One process. `failed` says why it cannot be used again; OSError if there is none."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.failed = settings, ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engram-decoder")
        self._connection, theirs = multiprocessing.Pipe()
        weakref.finalize(self, self._connection.close)  # the process ends with it, also at exit
        limits = settings.decode_memory, math.ceil(settings.decode_timeout) + 1
        start_fork_server()  # another, if it was killed
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=work, args=(theirs, *limits), daemon=True)
        with theirs:
            self.process.start()

    @property
    def alive(self) -> bool:
        """Whether it waits for a message: a process that has ended closes its connection."""
        return not self._connection.poll()

    async def read(
        self, options: type[Options], read: Read, body: bytearray
    ) -> tuple[list[str], Options]:
        """Let it `read` the body of a request, which is cleared: names of images, and options."""
        answer, _ = await self._ask("The body", BodyDecoder.read, read, body=body)
        return answer["names"], options.model_validate(answer["options"])

    async def decode(self, name: str, preprocessing: Preprocessing) -> Decoded:
        """The next image of the body, which has this name."""
        arguments = preprocessing, self.settings.max_pixels
        answer, data = await self._ask(name, BodyDecoder.decode, *arguments)
        view = torch.frombuffer(data, dtype=getattr(torch, answer["dtype"])).view(answer["shape"])
        return Decoded(answer["fields"], view)

    def forget(self) -> None:
        """Let it drop images of the request that were not decoded; there is no answer."""
        with suppress(OSError):
            self._connection.send(None)

    def kill(self) -> None:
        """End the process at once, whatever it does, and so the thread that waits for it."""
        self.process.kill()

    async def _ask(
        self, what: str, *call: Any, body: bytearray | None = None
    ) -> tuple[Document, bytearray]:
        """The result of a call in the process; if there is none, a Problem about `what`."""
        self.failed = "its request was cancelled"  # unless the answer arrives
        limit = self.settings.decode_timeout
        try:
            async with asyncio.timeout(limit):
                loop = asyncio.get_running_loop()
                work = loop.run_in_executor(self._thread, self._exchange, what, call, body)
                answer, data = await work
        except TimeoutError:
            self.failed = f"{limit:g} seconds were over"
            sentence = f"it takes more than {limit:g} seconds to read, which is the limit"
            raise Problem(422, f"{what}: {sentence}. {SMALLER}") from None
        except (OSError, EOFError):
            await asyncio.to_thread(self.process.join, 1.0)
            if self.process.exitcode == -signal.SIGKILL:  # no body does that: limits end it before
                self.failed = "somebody else had killed it"
                sentence = "the process that read it was killed; send it again"
                raise Problem(503, f"{what}: {sentence}.", retry=1) from None
            self.failed = "it had ended by itself"
            raise Problem(422, f"{what}: it ended the process that read it. {GOOD}") from None
        self.failed = answer.get("ending", "")
        if "refused" in answer:
            raise Problem(answer["status"], answer["refused"])
        return answer, data

    def _exchange(
        self, what: str, call: Sequence[Any], body: bytearray | None
    ) -> tuple[Document, bytearray]:
        method, *arguments = call
        self._connection.send((what, method, tuple(arguments), body is not None))
        if body is not None:
            self._connection.send_bytes(body)
            body.clear()
        return receive(self._connection)


class DecoderPool:
    """Lends decoders to requests, and replaces those that failed."""

    def __init__(self, settings: Settings, telemetry: Telemetry, log: Log) -> None:
        self.settings, self._telemetry, self._log = settings, telemetry, log
        # Of clients that have requests: an entry is dropped with the last of them.
        self._turns: weakref.WeakValueDictionary[str, asyncio.Semaphore]
        self._turns = weakref.WeakValueDictionary()
        # None: a decoder that the next request has to start.
        self._free: asyncio.LifoQueue[Decoder | None] = asyncio.LifoQueue()

    async def start(self) -> None:
        """Start all decoders, so that the first requests do not wait for them."""
        for _ in range(self.settings.decoders):
            self._free.put_nowait(await self._new())

    def stop(self) -> None:
        """End the decoders that are not in use."""
        while not self._free.empty():
            decoder = self._free.get_nowait()
            if decoder is not None:
                decoder.kill()

    @asynccontextmanager
    async def decoder(self, client: str) -> AsyncIterator[Decoder]:
        """A decoder for one request; waits until one is free.

        One client gets all of them but one, so that slow images of one do not stop the others.
        """
        turn = self._turns.setdefault(client, asyncio.Semaphore(max(1, self.settings.decoders - 1)))
        with self._telemetry.stage(DECODE):
            async with turn:
                decoder = await self._free.get()
                try:
                    if decoder is None or not decoder.alive:
                        decoder = await self._new()
                    yield decoder
                finally:
                    if decoder is not None and decoder.failed:
                        decoder.kill()
                        self._telemetry.killed_decoders.inc()
                        self._log.event("killed decoder", reason=decoder.failed)
                        decoder = None
                    elif decoder is not None:
                        decoder.forget()
                    self._free.put_nowait(decoder)

    async def _new(self) -> Decoder:
        try:
            return await asyncio.to_thread(Decoder, self.settings)
        except (OSError, EOFError) as error:
            raise Problem(
                503,
                f"No process can be started to decode images ({error}); try again in a few "
                "seconds.",
                retry=5,
            ) from None
