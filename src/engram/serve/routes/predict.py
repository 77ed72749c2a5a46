"""POST /v1/predict: read the body, decode the images, run the tasks, answer."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from torch import Tensor

from engram.images.preprocessing import normalise
from engram.serve.batching import Batcher
from engram.serve.catalogue import Catalogue, Snapshot
from engram.serve.decoding.pool import Pool
from engram.serve.metrics import Metrics
from engram.serve.middleware import client_of
from engram.serve.problems import Problem
from engram.serve.routes.answers import attention_maps, image_json, task_answers
from engram.serve.routes.openapi import error_responses, request_body
from engram.serve.routes.schemas import Prediction, PredictOptions, predict_form, predict_json
from engram.serve.routes.uploads import BodyBudget, content_type, read_whole_body
from engram.serve.settings import Settings
from engram.serve.tokens import Tokens


def predict_router(
    catalogue: Catalogue,
    settings: Settings,
    batcher: Batcher,
    decoders: Pool,
    metrics: Metrics,
    tokens: Tokens,
) -> APIRouter:
    """The endpoint that runs tasks on images."""
    router, budget = APIRouter(), BodyBudget(settings.max_bodies, settings.max_body)
    pipeline = Pipeline(batcher, decoders, metrics)

    @router.post(
        "/v1/predict",
        summary="Run tasks on images",
        response_model=Prediction,
        responses=error_responses(400, 401, 404, 408, 413, 415, 422, 429, 503),
        dependencies=tokens.to_ask,
        openapi_extra=_predict_body(settings),
    )
    async def predict(request: Request) -> Response:
        deadline = asyncio.get_running_loop().time() + settings.timeout
        batcher.check_capacity()
        kind = content_type(request)
        client = client_of(request.scope)
        with budget.request(client) as reserve:
            body = await read_whole_body(request, settings.max_body, deadline, reserve)
            try:
                async with asyncio.timeout_at(deadline):
                    images = await pipeline.answer(catalogue.now, kind, body, client)
            except TimeoutError:
                raise Problem(
                    503, "The request timed out; try again in a few seconds.", retry=5
                ) from None
        return Response(b'{"images":[%s]}' % b",".join(images), media_type="application/json")

    return router


def _predict_body(settings: Settings) -> dict[str, Any]:
    """The two forms that a request can have, with the limits of this service."""
    form, document = (
        predict_form(settings.max_images),
        predict_json(settings.max_images, settings.max_body),
    )
    return request_body(
        {
            "multipart/form-data": form.model_json_schema(),
            "application/json": document.model_json_schema(),
        }
    )


def _requested_names(snapshot: Snapshot, options: PredictOptions) -> list[str]:
    """The tasks to run, each once; one that does not exist is a Problem."""
    names = list(dict.fromkeys(options.tasks or snapshot.names))
    for name in (*names, options.looks or names[0]):
        if name not in snapshot.names:
            snapshot.engram(name)  # raises the Problem
    return names


class Pipeline:
    """From a body to answers: decoders, the forward pass, and threads that write the answers."""

    def __init__(self, batcher: Batcher, decoders: Pool, metrics: Metrics) -> None:
        self.batcher, self.decoders, self.metrics = batcher, decoders, metrics
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="engram-answer")

    async def answer(
        self, snapshot: Snapshot, kind: str, body: bytearray, client: str
    ) -> list[bytes]:
        """What the response says about each image, as JSON."""
        with ExitStack() as places:
            async with self.decoders.decoder(client) as decoder:
                received = await decoder.read(kind, body)
                names = _requested_names(snapshot, received.options)
                places.enter_context(self.batcher.reserve(len(received.names), client))
                decoded = [
                    await decoder.decode(i, name, snapshot.preprocessing)
                    for i, name in enumerate(received.names)
                ]
            outputs = await self.batcher.run(snapshot, [view for _, view in decoded], names)
            images = [
                await self._image(snapshot, fields, view, output, received.options)
                for (fields, view), output in zip(decoded, outputs, strict=True)
            ]
        for name in names:
            self.metrics.answers.labels(name).inc(len(images))
        return images

    async def _image(
        self,
        snapshot: Snapshot,
        fields: dict[str, Any],
        view: Tensor,
        outputs: dict[str, Tensor],
        options: PredictOptions,
    ) -> bytes:
        looks = None
        if options.looks is not None:
            pixels = normalise(view[None], snapshot.preprocessing)
            looks = await self.batcher.in_engine_thread(
                partial(attention_maps, snapshot, options.looks, pixels)
            )

        def write() -> bytes:
            return image_json(fields, task_answers(snapshot, outputs, options.top_k), looks)

        return await asyncio.get_running_loop().run_in_executor(self._threads, write)
