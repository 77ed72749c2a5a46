"""POST /v1/predict: decode the images, run the tasks, answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from torch import Tensor

from engram.images.decode import image_size
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_box, evaluation_view
from engram.serve.batching import Batcher
from engram.serve.catalogue import Catalogue, Snapshot
from engram.serve.metrics import Metrics
from engram.serve.problems import Problem
from engram.serve.routes.answers import attention_maps, task_answers
from engram.serve.routes.openapi import error_responses, request_body
from engram.serve.routes.schemas import PredictForm, Prediction, PredictJson, PredictOptions
from engram.serve.routes.uploads import BodyBudget, PredictRequest, read_predict_request
from engram.serve.settings import Settings


def predict_router(
    catalogue: Catalogue,
    settings: Settings,
    batcher: Batcher,
    decoders: ThreadPoolExecutor,
    metrics: Metrics,
) -> APIRouter:
    """The endpoint that runs tasks on images."""
    router, budget = APIRouter(), BodyBudget(settings.max_bodies)
    pipeline = Pipeline(batcher, decoders, settings.max_pixels)

    @router.post(
        "/v1/predict",
        summary="Run tasks on images",
        response_model=Prediction,
        responses=error_responses(400, 404, 408, 413, 415, 422, 503),
        openapi_extra=_predict_body(settings.max_images),
    )
    async def predict(request: Request) -> Response:
        deadline = asyncio.get_running_loop().time() + settings.timeout
        batcher.check_capacity()
        with budget.request() as reserve:
            uploaded = await read_predict_request(request, settings, deadline, reserve)
            snapshot = catalogue.now
            names = _requested_names(snapshot, uploaded.options)
            try:
                async with asyncio.timeout_at(deadline):
                    with batcher.reserve(len(uploaded.images)):
                        images = await pipeline.answer(snapshot, uploaded, names)
            except TimeoutError:
                raise Problem(
                    503, "The request timed out; try again in a few seconds.", retry=5
                ) from None
        for name in names:
            metrics.answers.labels(name).inc(len(images))
        return JSONResponse({"images": images})

    return router


def _predict_body(max_images: int) -> dict[str, Any]:
    """The two forms that a request can have, with the limit of this service."""
    form, document = PredictForm.model_json_schema(), PredictJson.model_json_schema()
    form["properties"]["image"]["maxItems"] = max_images
    document["properties"]["images"]["maxItems"] = max_images
    return request_body({"multipart/form-data": form, "application/json": document})


def _requested_names(snapshot: Snapshot, options: PredictOptions) -> list[str]:
    """The tasks to run, each once; one that does not exist is a Problem."""
    names = list(dict.fromkeys(options.tasks or snapshot.names))
    for name in (*names, options.looks or names[0]):
        if name not in snapshot.names:
            snapshot.engram(name)  # raises the Problem
    return names


class Pipeline:
    """From uploaded images to answers; decoding and the forward pass run in their own threads."""

    def __init__(self, batcher: Batcher, decoders: ThreadPoolExecutor, max_pixels: int) -> None:
        self.batcher, self.decoders, self.max_pixels = batcher, decoders, max_pixels

    async def answer(
        self, snapshot: Snapshot, request: PredictRequest, names: Sequence[str]
    ) -> list[dict[str, Any]]:
        """What the response says about each image."""
        decode = asyncio.get_running_loop().run_in_executor
        decoded = [
            await decode(self.decoders, _decode, snapshot, name, data, self.max_pixels)
            for name, data in request.images
        ]
        outputs = await self.batcher.run(snapshot, [view for _, view in decoded], names)
        options, images = request.options, []
        for (image, view), output in zip(decoded, outputs, strict=True):
            image["tasks"] = await decode(
                self.decoders, task_answers, snapshot, output, options.top_k
            )
            if options.looks is not None:
                pixels = normalise(view[None], snapshot.preprocessing)
                image["looks"] = await self.batcher.in_engine_thread(
                    partial(attention_maps, snapshot, options.looks, pixels)
                )
            images.append(image)
        return images


def _decode(
    snapshot: Snapshot, name: str, data: bytes, max_pixels: int
) -> tuple[dict[str, Any], Tensor]:
    """The response's fields about an image, and its view; its size is checked before decoding."""
    width, height = image_size(data, name=name, max_pixels=max_pixels)
    view = torch.from_numpy(evaluation_view(data, snapshot.preprocessing, name=name))
    box = evaluation_box(width, height, snapshot.preprocessing)
    fields = {"name": name, "width": width, "height": height, "view": [round(x, 3) for x in box]}
    return fields, view
