"""For operators: liveness, readiness and metrics."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from engram.serve.batching import Batcher
from engram.serve.metrics import Metrics
from engram.serve.routes.openapi import error_responses
from engram.serve.routes.schemas import Status
from engram.serve.tokens import Tokens


def operations_router(batcher: Batcher, metrics: Metrics, tokens: Tokens) -> APIRouter:
    """The endpoints that a container runtime, a load balancer and Prometheus poll."""
    router = APIRouter()

    @router.get("/healthz", summary="Whether the process is alive", response_model=Status)
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @router.get(
        "/readyz",
        summary="Whether the service accepts requests now",
        response_model=Status,
        responses=error_responses(503),
    )
    async def ready() -> Response:
        batcher.check_ready()
        return JSONResponse({"status": "ready"})

    @router.get(
        "/metrics",
        name="metrics",
        summary="Metrics for Prometheus",
        response_class=Response,
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
            **error_responses(401),
        },
        dependencies=tokens.to_ask,
    )
    async def read_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    return router
