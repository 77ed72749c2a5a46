"""What requests about images share: read the body, decode the images, run the tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import Request
from pydantic import BaseModel

from engram.serve.batching import MANY_VALUES, Batcher
from engram.serve.catalogue import Snapshot
from engram.serve.decoding.pool import Decoded, Decoder, Pool, Received
from engram.serve.metrics import Metrics
from engram.serve.middleware import client_of
from engram.serve.outputs import Outputs, task_of
from engram.serve.problems import Problem
from engram.serve.routes import schemas
from engram.serve.routes.openapi import request_body
from engram.serve.routes.uploads import Budget, read_whole_body
from engram.serve.routes.writing import Answer, Client
from engram.serve.service_settings import Settings
from engram.serve.stages import BODY, DECODE, WRITE, Stages
from engram.util.allocator import return_freed_memory

Options = TypeVar("Options", bound=BaseModel)
Result = TypeVar("Result")
Answered = tuple[Decoded, Outputs]
Written = tuple[Iterable[bytes], Mapping[str, str]]  # parts of the body, and headers

_ANSWERS = 4  # as large as one may be, in progress at a time


@dataclass(frozen=True)
class Asked:
    """The outputs that a request asks for, and the values of its answer about one image."""

    names: Sequence[str]
    values: int


@dataclass(frozen=True)
class Query(Generic[Options]):
    """How an endpoint reads a body, what its options ask for, and how the answer is written."""

    read: Callable[[Decoder, bytearray], Awaitable[Received[Options]]]
    asked: Callable[[Options], Asked]
    write: Callable[[Options, Sequence[Answered]], Awaitable[Written]]


def body_schemas(options: type[schemas.Options], settings: Settings) -> dict[str, Any]:
    """The two forms that a request can have, with the limits of this service."""
    form = schemas.form_body(options, settings.max_images)
    document = schemas.json_body(options, settings.max_images, settings.max_body)
    return request_body(
        {
            "multipart/form-data": form.model_json_schema(),
            "application/json": document.model_json_schema(),
        }
    )


class Pipeline:
    """From a body to outputs: decoders, the forward pass, and threads that write the answers."""

    def __init__(
        self, settings: Settings, batcher: Batcher, decoders: Pool, metrics: Metrics, stages: Stages
    ) -> None:
        self.settings, self.batcher, self.decoders = settings, batcher, decoders
        self.metrics, self.stages = metrics, stages
        self._bodies = Budget(settings.max_bodies, settings.max_body, "bytes in requests")
        most = settings.max_values
        self._answers = Budget(_ANSWERS * most, most, "values in answers")
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="engram-answer")

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytearray]:
        """The whole body, within the limits of the service; what is done with it has a deadline."""
        deadline = asyncio.get_running_loop().time() + self.settings.timeout
        self.batcher.check_capacity()
        with self._bodies.request(client_of(request.scope)) as reserve:
            with self.stages.stage(BODY):
                body = await read_whole_body(request, self.settings.max_body, deadline, reserve)
            try:
                async with asyncio.timeout_at(deadline):
                    yield body
            except TimeoutError:
                raise Problem(
                    503, "The request timed out; try again in a few seconds.", retry=5
                ) from None

    @asynccontextmanager
    async def run(
        self,
        request: Request,
        snapshot: Snapshot,
        query: Query[Options],
        embeds: bool,
    ) -> AsyncIterator[tuple[Received[Options], list[Answered]]]:
        """What the body holds and, for each image, what was decoded and the outputs of the tasks.

        With `embeds`, their vectors in place of the outputs. The images keep their places in the
        queue until the answers are written, and so do their values in what all answers may have.
        """
        client = client_of(request.scope)
        async with self._body(request) as body:
            with ExitStack() as places:
                with self.stages.stage(DECODE):
                    async with self.decoders.decoder(client) as decoder:
                        received = await query.read(decoder, body)
                        asked, images = query.asked(received.options), len(received.names)
                        self._check_values(asked, images)
                        places.enter_context(self._answers.request(client))(images * asked.values)
                        places.enter_context(self.batcher.reserve(images, client))
                        decoded = [
                            await decoder.decode(i, name, snapshot.preprocessing)
                            for i, name in enumerate(received.names)
                        ]
                views = [one.view for one in decoded]
                outputs = await self.batcher.run(snapshot, views, asked.names, embeds)
                answers = list(zip(decoded, outputs, strict=True))
                del views, outputs
                with self.stages.stage(WRITE):
                    yield received, answers
            for task in {task_of(name) for name in asked.names}:
                self.metrics.answers.labels(task).inc(len(decoded))

    def _check_values(self, asked: Asked, images: int) -> None:
        """Refuse an answer that would be too large with a Problem, before it is computed."""
        most = self.settings.max_values
        if images * asked.values > most:
            raise Problem(
                422,
                f"The answer would have {images * asked.values:,} values, {asked.values:,} for "
                f"each image, and {most:,} is the limit; send fewer images, or ask for fewer "
                "tasks or outputs.",
            )

    def respond(
        self,
        request: Request,
        snapshot: Snapshot,
        query: Query[Options],
        embeds: bool = False,
    ) -> Answer:
        """Answer a request about images, in JSON unless its headers say otherwise."""

        async def work(client: Client) -> None:
            many = await self._answer(client, request, snapshot, query, embeds)
            if many:  # by now nothing holds the outputs
                await self.in_thread(return_freed_memory)

        return Answer(work)

    async def _answer(
        self,
        client: Client,
        request: Request,
        snapshot: Snapshot,
        query: Query[Options],
        embeds: bool,
    ) -> bool:
        """Send the answer; gives whether its values leave holes in memory."""
        async with self.run(request, snapshot, query, embeds) as (received, images):
            parts, headers = await query.write(received.options, images)
            headers = {"Content-Type": "application/json", **headers}
            await client.answer(parts, self.in_thread, headers)
            values = query.asked(received.options).values
            return len(images) * values > MANY_VALUES

    async def in_thread(self, write: Callable[[], Result]) -> Result:
        """Call `write` in a thread for answers, so that the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, write)
