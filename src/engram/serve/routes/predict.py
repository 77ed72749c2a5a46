"""POST /v1/predict: read the body, decode the images, run the tasks, answer."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engram.images.preprocessing import normalise
from engram.serve.batching import Outputs
from engram.serve.catalogue import Catalogue, Snapshot
from engram.serve.decoding.pool import Decoded
from engram.serve.middleware import client_of
from engram.serve.routes.answers import attention_maps, image_json, task_answers
from engram.serve.routes.openapi import error_responses
from engram.serve.routes.pipeline import Pipeline, body_schemas
from engram.serve.routes.schemas import Prediction, PredictOptions
from engram.serve.routes.uploads import content_type
from engram.serve.tokens import Tokens


def predict_router(catalogue: Catalogue, pipeline: Pipeline, tokens: Tokens) -> APIRouter:
    """The endpoint that runs tasks on images."""
    router = APIRouter()

    @router.post(
        "/v1/predict",
        summary="Run tasks on images",
        response_model=Prediction,
        responses=error_responses(400, 401, 404, 408, 413, 415, 422, 429, 503),
        dependencies=tokens.to_ask,
        openapi_extra=body_schemas(PredictOptions, pipeline.settings),
    )
    async def predict(request: Request) -> Response:
        snapshot, kind = catalogue.now, content_type(request)
        async with (
            pipeline.body(request) as body,
            pipeline.run(
                snapshot,
                client_of(request.scope),
                lambda decoder: decoder.read(PredictOptions, kind, body),
                partial(_requested_names, snapshot),
            ) as (received, images),
        ):
            written = [
                await _image(pipeline, snapshot, decoded, outputs, received.options)
                for decoded, outputs in images
            ]
        return Response(b'{"images":[%s]}' % b",".join(written), media_type="application/json")

    return router


def _requested_names(snapshot: Snapshot, options: PredictOptions) -> list[str]:
    """The tasks to run, each once; one that does not exist is a Problem."""
    names = list(dict.fromkeys(options.tasks or snapshot.names))
    for name in (*names, options.looks or names[0]):
        if name not in snapshot.names:
            snapshot.engram(name)  # raises the Problem
    return names


async def _image(
    pipeline: Pipeline,
    snapshot: Snapshot,
    decoded: Decoded,
    outputs: Outputs,
    options: PredictOptions,
) -> bytes:
    """What the response says about one image."""
    looks = None
    if options.looks is not None:
        pixels = normalise(decoded.view[None], snapshot.preprocessing)
        looks = await pipeline.batcher.in_engine_thread(
            partial(attention_maps, snapshot, options.looks, pixels)
        )
    answers = partial(task_answers, snapshot, outputs, options.top_k)
    return await pipeline.in_thread(lambda: image_json(decoded.fields, answers(), looks))
