"""The service as an ASGI application, put together from its parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from engram import __version__
from engram.errors import EngramError
from engram.serve.catalogue import Catalogue
from engram.serve.log import Log
from engram.serve.middleware import RequestMiddleware, add_handlers
from engram.serve.routes.infer import infer_router
from engram.serve.routes.operations import operations_router
from engram.serve.routes.predictions import predict_router
from engram.serve.routes.request_pipeline import RequestPipeline
from engram.serve.routes.tasks import tasks_router
from engram.serve.schemas import error_responses
from engram.serve.telemetry import Telemetry
from engram.serve.tokens import Tokens


def create_app(
    catalogue: Catalogue, token: str | None = None, ask_token: str | None = None
) -> FastAPI:
    """The service for a catalogue; tasks can be attached and removed only if there is a token.

    With an `ask_token`, only clients that send it may ask.
    """
    settings, telemetry = catalogue.settings, Telemetry()
    log = Log(settings.log)
    tokens, pipeline = Tokens(token, ask_token, log), RequestPipeline(settings, telemetry, log)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await pipeline.decoders.start()
        pipeline.batcher.start()
        following = asyncio.create_task(_follow(catalogue, settings.follow, log))
        yield
        following.cancel()
        await pipeline.batcher.stop()
        pipeline.decoders.stop()
        telemetry.stop()
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
    app.state.catalogue, app.state.batcher, app.state.log = catalogue, pipeline.batcher, log
    app.add_middleware(RequestMiddleware, settings=settings, telemetry=telemetry, log=log)
    add_handlers(app)
    for router in (predict_router, infer_router, tasks_router, operations_router):
        app.include_router(router(catalogue, pipeline, tokens))
    return app


async def _follow(catalogue: Catalogue, seconds: float, log: Log) -> None:
    """Take over tasks that other services on the same folder attach and remove."""
    while seconds:
        await asyncio.sleep(seconds)
        try:
            if await asyncio.to_thread(catalogue.follow):
                log.event("followed", tasks=", ".join(catalogue.now.model.tasks))
        except EngramError as error:
            log.event("not followed", reason=str(error))
