"""POST /v1/embed: images as vectors."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engram.serve.catalogue import Catalogue, Snapshot
from engram.serve.decoding.pool import Decoder, Received
from engram.serve.outputs import kept_values
from engram.serve.routes.answers import images_json, vectors_json
from engram.serve.routes.openapi import answer_limit, error_responses
from engram.serve.routes.pipeline import Answered, Asked, Pipeline, Query, Written, body_schemas
from engram.serve.routes.schemas import Embedding, EmbedOptions
from engram.serve.routes.uploads import content_type
from engram.serve.tokens import Tokens


def embed_router(catalogue: Catalogue, pipeline: Pipeline, tokens: Tokens) -> APIRouter:
    """The endpoint that turns images into vectors."""
    router = APIRouter()

    @router.post(
        "/v1/embed",
        summary="Turn images into vectors",
        description=answer_limit(pipeline.settings.max_values),
        response_model=Embedding,
        responses=error_responses(400, 401, 404, 408, 413, 415, 422, 429, 503),
        dependencies=tokens.to_ask,
        openapi_extra=body_schemas(EmbedOptions, pipeline.settings),
    )
    async def embed(request: Request) -> Response:
        snapshot, kind = catalogue.now, content_type(request)

        def read(decoder: Decoder, body: bytearray) -> Awaitable[Received[EmbedOptions]]:
            return decoder.read(EmbedOptions, kind, body)

        async def write(options: EmbedOptions, images: Sequence[Answered]) -> Written:
            return images_json(vectors_json(one.fields, vectors) for one, vectors in images), {}

        query = Query(read, partial(_asked, snapshot), write)
        return pipeline.respond(request, snapshot, query, embeds=True)

    return router


def _asked(snapshot: Snapshot, options: EmbedOptions) -> Asked:
    """The tasks to embed for, each once; one that does not exist is a Problem."""
    names = list(dict.fromkeys(options.tasks or snapshot.embedding_names))
    for name in names:
        if name not in snapshot.embedding_names:
            snapshot.engram(name)  # raises the Problem
    return Asked(names, kept_values(snapshot, names, embeds=True))
