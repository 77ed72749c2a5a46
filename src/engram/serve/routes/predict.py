"""POST /v1/predict: read the body, decode the images, run the tasks, answer."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engram.images.preprocessing import normalise
from engram.serve.catalogue import Catalogue, Snapshot
from engram.serve.decoding.pool import Decoded, Decoder, Received
from engram.serve.outputs import kept_values
from engram.serve.routes.answers import Look, image_json, images_json, task_answers
from engram.serve.routes.openapi import answer_limit, error_responses
from engram.serve.routes.pipeline import Answered, Asked, Pipeline, Query, Written, body_schemas
from engram.serve.routes.schemas import Prediction, PredictOptions
from engram.serve.routes.uploads import content_type
from engram.serve.tokens import Tokens


def predict_router(catalogue: Catalogue, pipeline: Pipeline, tokens: Tokens) -> APIRouter:
    """The endpoint that runs tasks on images."""
    router = APIRouter()

    @router.post(
        "/v1/predict",
        summary="Run tasks on images",
        description=answer_limit(pipeline.settings.max_values),
        response_model=Prediction,
        responses=error_responses(400, 401, 404, 408, 413, 415, 422, 429, 503),
        dependencies=tokens.to_ask,
        openapi_extra=body_schemas(PredictOptions, pipeline.settings),
    )
    async def predict(request: Request) -> Response:
        snapshot, kind = catalogue.now, content_type(request)

        def read(decoder: Decoder, body: bytearray) -> Awaitable[Received[PredictOptions]]:
            return decoder.read(PredictOptions, kind, body)

        async def write(options: PredictOptions, images: Sequence[Answered]) -> Written:
            looks = [await _look(pipeline, snapshot, one, options.looks) for one, _ in images]
            parts = (
                image_json(one.fields, task_answers(snapshot, outputs, options.top_k), look)
                for (one, outputs), look in zip(images, looks, strict=True)
            )
            return images_json(parts), {}

        return pipeline.respond(request, snapshot, Query(read, partial(_asked, snapshot), write))

    return router


def _asked(snapshot: Snapshot, options: PredictOptions) -> Asked:
    """The tasks to run, each once; one that does not exist is a Problem."""
    names = list(dict.fromkeys(options.tasks or snapshot.names))
    for name in (*names, options.looks or names[0]):
        if name not in snapshot.names:
            snapshot.engram(name)  # raises the Problem
    look = 0 if options.looks is None else Look.values(snapshot)
    return Asked(names, kept_values(snapshot, names) + look)


async def _look(
    pipeline: Pipeline, snapshot: Snapshot, decoded: Decoded, task: str | None
) -> Look | None:
    """The attention maps of one image, if a request asks for those of a task."""
    if task is None:
        return None
    pixels = normalise(decoded.view[None], snapshot.preprocessing)
    return await pipeline.batcher.in_engine_thread(partial(Look.of, snapshot, task, pixels))
