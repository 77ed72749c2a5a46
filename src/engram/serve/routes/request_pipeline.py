"""The path of every request about images: read the body, decode the images, run the tasks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel
from torch import Tensor

from engram.inference.engine import familiarity_name
from engram.serve.batching import Batcher
from engram.serve.catalogue import Snapshot
from engram.serve.decoding.pool import Decoded, DecoderPool
from engram.serve.decoding.worker import Read
from engram.serve.limits import Reserve, Shares
from engram.serve.log import Log
from engram.serve.middleware import client_address
from engram.serve.outputs import Outputs, is_finite, task_name
from engram.serve.problems import Problem
from engram.serve.service_settings import Settings
from engram.serve.telemetry import BODY, WRITE, Telemetry
from engram.util.text import printable

Options = TypeVar("Options", bound=BaseModel)
Result = TypeVar("Result")
Asked = tuple[Sequence[str], int]  # outputs, and the values of the answer about one image
Answered = tuple[Decoded, Outputs]

_ANSWERS = 4  # as large as one may be, in progress at a time
# Seconds in which a client may finish sending a refused body: only then does it read the answer.
_DRAIN_SECONDS = 2.0


class RequestPipeline:
    """Decoders, the forward pass and threads that write answers: from a body to its outputs."""

    def __init__(self, settings: Settings, telemetry: Telemetry, log: Log) -> None:
        self.settings, self.telemetry, self.log = settings, telemetry, log
        self.batcher = Batcher(settings, telemetry, log)
        self.decoders = DecoderPool(settings, telemetry, log)
        # One client gets half, or one request.
        most = max(settings.max_bodies // 2, settings.max_body)
        self._bodies = Shares(most, "bytes in requests", settings.max_bodies)
        most = _ANSWERS * settings.max_values
        self._answers = Shares(most // 2, "values in answers", most)
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="engram-answer")

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytearray]:
        """The whole body, within the limits of the service; the block has a deadline."""
        deadline = asyncio.get_running_loop().time() + self.settings.timeout
        self.batcher.places.check()
        with self._bodies.taken(client_address(request.scope), 0) as reserve:
            with self.telemetry.stage(BODY):
                body = await read_body(request, self.settings.max_body, deadline, reserve)
            try:
                async with asyncio.timeout_at(deadline):
                    yield body
            except TimeoutError:
                raise Problem(
                    503, "The request timed out; try again in a few seconds.", retry=5
                ) from None

    @asynccontextmanager
    async def answers(
        self,
        request: Request,
        snapshot: Snapshot,
        options_type: type[Options],
        read: Read,
        asked: Callable[[Options], Asked],
        embeds: bool = False,
    ) -> AsyncIterator[tuple[Options, list[Answered]]]:
        """Run tasks on the images of a request; gives its options, and the images with outputs.

        `read` is called with the body, by a decoder. With `embeds`, images have vectors in place of
        outputs. They keep their places in the queue until the block has written the answer, and so
        do their values in the limit on all answers.
        """
        address, most = client_address(request.scope), self.settings.max_values
        async with self.body(request) as body:
            with ExitStack() as places:
                async with self.decoders.decoder(address) as decoder:
                    names, options = await decoder.read(options_type, read, body)
                    (wanted, each), count = asked(options), len(names)
                    if count * each > most:  # before it is computed
                        raise Problem(
                            422,
                            f"The answer would have {count * each:,} values, {each:,} for each "
                            f"image, and {most:,} is the limit; send fewer images, or ask for "
                            "fewer tasks or outputs.",
                        )
                    places.enter_context(self._answers.taken(address, count * each))
                    places.enter_context(self.batcher.reserve(count, address))
                    preprocessing = snapshot.model.preprocessing
                    decoded = [await decoder.decode(name, preprocessing) for name in names]
                views = [one.view for one in decoded]
                outputs = await self.batcher.run(snapshot, views, wanted, embeds)
                with self.telemetry.stage(WRITE):
                    yield options, list(zip(decoded, outputs, strict=True))
            for task in {task_name(name) for name in wanted}:
                self.telemetry.answers.labels(task).inc(count)
            if not embeds:  # vectors are no answers
                await self.in_thread(partial(record_answers, self.telemetry, snapshot, outputs))

    async def in_thread(self, write: Callable[[], Result]) -> Result:
        """Call `write` in a thread for answers, so that the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, write)


def record_answers(
    telemetry: Telemetry, snapshot: Snapshot, images: Sequence[Mapping[str, Tensor]]
) -> None:
    """Count the classes, confidence and familiarity of answers; those not finite are left out."""
    for outputs in images:
        for name in snapshot.names:
            output = outputs.get(name)
            if output is None or not output.ndim or not is_finite(output):
                continue
            familiarity = float(outputs.get(familiarity_name(name), math.nan))
            known = familiarity if math.isfinite(familiarity) else None
            telemetry.record_answer(name, *snapshot.model.task(name).labels(output), known)


async def read_body(
    request: Request, most: int, deadline: float, reserve: Reserve = lambda size: None
) -> bytearray:
    """The whole body; one that is too large or too slow is a Problem."""
    declared, body = request.headers.get("content-length", ""), bytearray()
    stream = request.stream()
    too_large = Problem(413, f"The body has more than {most:,} bytes, which is the limit.")
    try:
        if declared.isdecimal() and int(declared) > most:
            raise too_large
        async with asyncio.timeout_at(deadline):
            async for piece in stream:
                if len(body) + len(piece) > most:
                    raise too_large
                reserve(len(piece))
                body += piece  # small pieces must not take more memory than large ones
    except TimeoutError:
        raise Problem(
            408, "The body did not arrive in time; send it faster, or send less."
        ) from None
    except Problem:
        await _drain(stream, most)
        raise
    return body


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
