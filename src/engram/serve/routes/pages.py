"""The page to try the service, and the reference of its endpoints."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files as package_files

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engram.serve.reference import reference_page

_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}


def pages_router() -> APIRouter:
    """What a person opens in a browser; none of it is in the OpenAPI document."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def docs(request: Request) -> Response:
        return Response(reference_page(request.app.openapi()), media_type="text/html")

    for path, (file, kind) in _FILES.items():
        router.add_api_route(path, _file_response(file, kind))
    return router


def _file_response(name: str, kind: str) -> Callable[[], Response]:
    data = (package_files("engram.serve") / "page" / name).read_bytes()
    return lambda: Response(data, media_type=kind, headers={"Cache-Control": "no-cache"})
