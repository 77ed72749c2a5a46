"""The service as an ASGI application, put together from its parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI, Request

from engram import __version__
from engram.errors import EngramError
from engram.serve.batching import Batcher
from engram.serve.catalogue import Catalogue
from engram.serve.clients import Shares
from engram.serve.decoding.pool import Pool
from engram.serve.hosts import AllowedHosts
from engram.serve.log import Log
from engram.serve.metrics import Metrics
from engram.serve.middleware import RequestMiddleware, client_of
from engram.serve.problems import add_handlers
from engram.serve.routes.embed import embed_router
from engram.serve.routes.infer import infer_router
from engram.serve.routes.openapi import error_responses
from engram.serve.routes.operations import operations_router
from engram.serve.routes.pages import pages_router
from engram.serve.routes.pipeline import Pipeline
from engram.serve.routes.predict import predict_router
from engram.serve.routes.tasks import tasks_router
from engram.serve.service_settings import Settings
from engram.serve.stages import Stages
from engram.serve.tokens import Tokens
from engram.serve.tracing import Tracing


def create_app(
    catalogue: Catalogue, settings: Settings, token: str | None = None, ask_token: str | None = None
) -> FastAPI:
    """The service for a catalogue; tasks can be attached and removed only if there is a token.

    With an `ask_token`, only clients that send it may ask.
    """
    metrics, log, tracing = Metrics(), Log(settings.log), Tracing()
    stages = Stages(metrics, tracing)
    tokens = Tokens(token, ask_token, partial(_log_refused_token, log))
    batcher = Batcher(
        settings, metrics.batch_images.observe, metrics.queued_images.set, stages.record
    )
    decoders = Pool(settings, partial(_count_killed_decoder, metrics, log))
    catalogue.on_change = lambda snapshot: metrics.tasks.set(len(snapshot.model.tasks))
    catalogue.on_change(catalogue.now)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await decoders.start()
        batcher.start()
        following = asyncio.create_task(_follow(catalogue, settings.follow, log))
        yield
        following.cancel()
        await batcher.stop()
        await decoders.stop()
        tracing.stop()
        log.stop()

    app = FastAPI(
        title="Engram",
        version=__version__,
        description="One frozen Vision Transformer and any number of tasks, in one pass.",
        docs_url=None,
        redoc_url=None,
        responses=error_responses(400, 421),
        lifespan=lifespan,
    )
    app.state.catalogue, app.state.batcher = catalogue, batcher
    app.state.log = log
    hosts = AllowedHosts(settings.host, settings.allow_host)
    clients = Shares(settings.client_requests, "requests in progress")
    app.add_middleware(
        RequestMiddleware, metrics=metrics, log=log, tracing=tracing, hosts=hosts, clients=clients
    )
    add_handlers(app)
    pipeline = Pipeline(settings, batcher, decoders, metrics, stages)
    app.include_router(predict_router(catalogue, pipeline, tokens))
    app.include_router(embed_router(catalogue, pipeline, tokens))
    app.include_router(infer_router(catalogue, pipeline, tokens))
    app.include_router(tasks_router(catalogue, settings, tokens, log))
    app.include_router(operations_router(batcher, metrics, tokens))
    app.include_router(pages_router())
    return app


async def _follow(catalogue: Catalogue, seconds: float, log: Log) -> None:
    """Take over what other services on the same folder attach and remove."""
    while seconds:
        await asyncio.sleep(seconds)
        try:
            if await asyncio.to_thread(catalogue.follow):
                log.event("followed", tasks=", ".join(catalogue.now.model.tasks))
        except EngramError as error:
            log.event("not followed", reason=str(error))


def _log_refused_token(log: Log, request: Request) -> None:
    log.event(
        "refused token",
        client=client_of(request.scope),
        method=request.method,
        path=request.url.path,
    )


def _count_killed_decoder(metrics: Metrics, log: Log, reason: str) -> None:
    metrics.killed_decoders.inc()
    log.event("killed decoder", reason=reason)
