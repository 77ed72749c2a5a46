"""POST /v1/embed: images as vectors."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engram.serve.catalogue import Catalogue, Snapshot
from engram.serve.decoding.pool import Decoder
from engram.serve.middleware import client_of
from engram.serve.routes.answers import vectors_json
from engram.serve.routes.openapi import error_responses
from engram.serve.routes.pipeline import Pipeline, body_schemas
from engram.serve.routes.schemas import Embedding, EmbedOptions
from engram.serve.routes.uploads import content_type
from engram.serve.tokens import Tokens


def embed_router(catalogue: Catalogue, pipeline: Pipeline, tokens: Tokens) -> APIRouter:
    """The endpoint that turns images into vectors."""
    router = APIRouter()

    @router.post(
        "/v1/embed",
        summary="Turn images into vectors",
        response_model=Embedding,
        responses=error_responses(400, 401, 404, 408, 413, 415, 422, 429, 503),
        dependencies=tokens.to_ask,
        openapi_extra=body_schemas(EmbedOptions, pipeline.settings),
    )
    async def embed(request: Request) -> Response:
        snapshot, kind = catalogue.now, content_type(request)
        wanted = partial(_requested_names, snapshot)
        async with pipeline.body(request) as body:
            client = client_of(request.scope)
            read = partial(Decoder.read, options=EmbedOptions, kind=kind, body=body)
            async with pipeline.run(snapshot, client, read, wanted, embeds=True) as (_, images):
                written = [
                    await pipeline.in_thread(partial(vectors_json, decoded.fields, vectors))
                    for decoded, vectors in images
                ]
        return Response(b'{"images":[%s]}' % b",".join(written), media_type="application/json")

    return router


def _requested_names(snapshot: Snapshot, options: EmbedOptions) -> list[str]:
    """The tasks to embed for, each once; one that does not exist is a Problem."""
    names = list(dict.fromkeys(options.tasks or snapshot.embedding_names))
    for name in names:
        if name not in snapshot.embedding_names:
            snapshot.engram(name)  # raises the Problem
    return names
