"""The service as an ASGI application, put together from its parts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from engram import __version__
from engram.serve.batching import Batcher
from engram.serve.catalogue import Catalogue
from engram.serve.decoding.pool import Pool
from engram.serve.metrics import Metrics
from engram.serve.middleware import RequestMiddleware
from engram.serve.problems import add_handlers
from engram.serve.routes.operations import operations_router
from engram.serve.routes.pages import pages_router
from engram.serve.routes.predict import predict_router
from engram.serve.routes.tasks import tasks_router
from engram.serve.settings import Settings


def create_app(catalogue: Catalogue, settings: Settings, token: str | None = None) -> FastAPI:
    """The service for a catalogue; tasks can be attached and removed only if there is a token."""
    metrics = Metrics()
    batcher = Batcher(settings, metrics.batch_images.observe)
    decoders = Pool(settings, lambda reason: metrics.killed_decoders.inc())
    metrics.queued_images.set_function(lambda: batcher.pending)
    metrics.tasks.set_function(lambda: len(catalogue.now.model.tasks))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await decoders.start()
        batcher.start()
        yield
        await batcher.stop()
        await decoders.stop()

    app = FastAPI(
        title="Engram",
        version=__version__,
        description="One frozen Vision Transformer and any number of tasks, in one pass.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.catalogue, app.state.batcher = catalogue, batcher
    app.add_middleware(RequestMiddleware, metrics=metrics)
    add_handlers(app)
    app.include_router(predict_router(catalogue, settings, batcher, decoders, metrics))
    app.include_router(tasks_router(catalogue, settings, token))
    app.include_router(operations_router(batcher, metrics))
    app.include_router(pages_router())
    return app
