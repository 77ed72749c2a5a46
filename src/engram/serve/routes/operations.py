"""Routes for operators (liveness, readiness, metrics) and people (the page, the reference)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from engram.serve.catalogue import Catalogue
from engram.serve.routes.request_pipeline import RequestPipeline
from engram.serve.schemas import Status, error_responses
from engram.serve.tokens import Tokens
from engram.util.templates import page_files, render


def operations_router(catalogue: Catalogue, pipeline: RequestPipeline, tokens: Tokens) -> APIRouter:
    """Endpoints that a container runtime, a load balancer and Prometheus poll, and pages."""
    router, telemetry = APIRouter(), pipeline.telemetry

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
        pipeline.batcher.check_ready()
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
    def read_metrics() -> Response:
        telemetry.tasks.set(len(catalogue.now.model.tasks))
        return Response(telemetry.text(), media_type="text/plain; version=0.0.4")

    @router.get("/docs", include_in_schema=False)
    def docs(request: Request) -> Response:
        return Response(reference_page(request.app.openapi()), media_type="text/html")

    files = {"/": (render("engram.serve", "page.html.j2").encode(), "text/html")}
    for name, data in page_files("engram.serve").items():
        files[f"/{name}"] = (data, "text/css" if name.endswith(".css") else "text/javascript")
    for path, (data, kind) in files.items():
        router.add_api_route(path, _file_response(data, kind), include_in_schema=False)
    return router


def reference_page(document: Mapping[str, Any]) -> str:
    """The OpenAPI document as a page that needs no network and no script."""
    schemas = document.get("components", {}).get("schemas", {})
    # The framework lists its own schemas of a failed validation, which is never sent.
    shown = {name: schema for name, schema in schemas.items() if "Validation" not in name}
    return render("engram.serve", "reference.html.j2", document=document, schemas=shown)


def _file_response(data: bytes, kind: str) -> Callable[[], Response]:
    return lambda: Response(data, media_type=kind, headers={"Cache-Control": "no-cache"})
