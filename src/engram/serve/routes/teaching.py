"""POST /v1/teach: a task from a handful of vectors, as an engram. Nothing is kept or attached."""

from __future__ import annotations

import torch
from fastapi import APIRouter, Request
from fastapi.responses import Response
from torch import Tensor

from engram.methods import Base, Head
from engram.serve.catalogue import Catalogue, Snapshot
from engram.serve.routes.request_pipeline import RequestPipeline
from engram.serve.routes.schemas import (
    MAX_VECTORS,
    TeachOptions,
    TeachRequest,
    error_responses,
    request_body,
)
from engram.serve.tokens import Tokens
from engram.store.format import serialise_engram
from engram.store.portable import without_local_paths
from engram.tasks.feature_sums import FeatureSums
from engram.tasks.spec import TaskSpec
from engram.train.teach import solve_task

_ENGRAM_FILE = {"type": "string", "format": "binary"}


def teach_router(catalogue: Catalogue, pipeline: RequestPipeline, tokens: Tokens) -> APIRouter:
    """The endpoint that teaches; whoever may ask may teach."""
    router = APIRouter()

    @router.post(
        "/v1/teach",
        summary="Teach a task from vectors of a few images",
        description=f"At most {MAX_VECTORS} vectors, those of `base` that /v1/embed gives. The "
        "response is the engram of the task, for /v1/tasks/{name} or a file. Images and vectors "
        "are not kept.",
        response_class=Response,
        responses={
            200: {"content": {"application/octet-stream": {"schema": _ENGRAM_FILE}}},
            **error_responses(400, 401, 408, 413, 422, 429, 503),
        },
        dependencies=tokens.to_ask,
        openapi_extra=request_body({"application/json": TeachRequest.model_json_schema()}),
    )
    async def teach(request: Request) -> Response:
        snapshot = catalogue.now

        def solve(options: TeachOptions, vectors: Tensor) -> bytes:
            return taught_engram(snapshot, options, vectors)

        return pipeline.teach(request, snapshot.model.task(Base.name).head.vector_size, solve)

    return router


def taught_engram(snapshot: Snapshot, options: TeachOptions, vectors: Tensor) -> bytes:
    """The engram of a task that was taught, without paths of this machine."""
    classes = list(dict.fromkeys(options.labels))
    spec = TaskSpec.create(options.task, classes, Head())
    labels = torch.tensor([classes.index(label) for label in options.labels])
    sums = FeatureSums.from_features(vectors, labels, len(classes))
    engram = solve_task(snapshot.model, spec, sums, (vectors, labels), options.statistics == "on")
    return serialise_engram(without_local_paths(engram)[0])
