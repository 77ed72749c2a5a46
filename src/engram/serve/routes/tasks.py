"""/v1/tasks: list and describe the tasks, attach and remove them."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engram.serve.catalogue import Catalogue, Snapshot
from engram.serve.log import Log
from engram.serve.middleware import client_address
from engram.serve.routes.request_pipeline import read_body
from engram.serve.routes.schemas import (
    TaskDetail,
    TaskList,
    error_responses,
    request_body,
)
from engram.serve.service_settings import Settings
from engram.serve.tokens import Tokens
from engram.util.text import without_folder

_ENGRAM_FILE = {"type": "string", "format": "binary", "minLength": 1}


def tasks_router(catalogue: Catalogue, settings: Settings, tokens: Tokens, log: Log) -> APIRouter:
    """The endpoints about tasks; those that change them need the token."""
    router = APIRouter()
    documents = Documents(settings.engine, tokens.attach is not None)

    @router.get(
        "/v1/tasks",
        summary="List all tasks",
        response_model=TaskList,
        responses={304: {}, **error_responses(401, 429)},
        dependencies=tokens.to_ask,
    )
    async def tasks(request: Request) -> Response:
        snapshot = catalogue.now
        tag = f'"{snapshot.tag}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        return await documents.response(snapshot, headers={"ETag": tag})

    @router.get(
        "/v1/tasks/{name}",
        summary="Describe one task and its classes",
        response_model=TaskDetail,
        responses=error_responses(401, 404, 422, 429),
        dependencies=tokens.to_ask,
    )
    async def task(name: str) -> Response:
        return await documents.response(catalogue.now, name)

    @router.put(
        "/v1/tasks/{name}",
        summary="Attach an engram",
        description="The body is the engram's file. It is verified, loaded into a second model "
        "and written to the bundle; then the second model takes over.",
        status_code=201,
        response_model=TaskDetail,
        responses={
            **error_responses(401, 403, 408, 409, 413, 422, 429, 503),
            200: {"model": TaskDetail, "description": "It was already attached"},
        },
        dependencies=tokens.to_attach,
        openapi_extra=request_body({"application/octet-stream": _ENGRAM_FILE}),
    )
    async def attach(name: str, request: Request) -> Response:
        deadline = asyncio.get_running_loop().time() + settings.timeout
        body = await read_body(request, settings.max_engram, deadline)
        data = await asyncio.to_thread(bytes, body)
        body.clear()
        snapshot, new = await asyncio.to_thread(catalogue.attach, name, data)
        if new:
            content = snapshot.contents[name]
            log.event("attached", client=client_address(request.scope), task=name, content=content)
        return await documents.response(snapshot, name, status_code=201 if new else 200)

    @router.delete(
        "/v1/tasks/{name}",
        summary="Detach a task",
        status_code=204,
        response_class=Response,
        responses=error_responses(401, 403, 404, 409, 422, 429, 503),
        dependencies=tokens.to_attach,
    )
    async def detach(name: str, request: Request) -> Response:
        await asyncio.to_thread(catalogue.detach, name)
        log.event("detached", client=client_address(request.scope), task=name)
        return Response(status_code=204)

    return router


class Documents:
    """The descriptions of tasks as JSON, written once for each snapshot and not for each request.

    An engram may have 100,000 metrics. A thread writes them, in many small steps, so that other
    requests are answered meanwhile.
    """

    def __init__(self, engine: str, attaching: bool) -> None:
        self._engine, self._attaching = engine, attaching
        self._written: WeakKeyDictionary[Snapshot, dict[str, bytes]] = WeakKeyDictionary()

    async def response(self, snapshot: Snapshot, name: str = "", **settings: Any) -> Response:
        """One task, or all; a Problem if there is no such task."""
        written = self._written.setdefault(snapshot, {})
        if name:
            snapshot.engram(name)  # raises the Problem
        if name not in written:
            written[name] = await asyncio.to_thread(self._write, snapshot, name)
        return Response(written[name], media_type="application/json", **settings)

    def _write(self, snapshot: Snapshot, name: str) -> bytes:
        if name:
            document = task_detail(snapshot, name)
        else:
            document = task_list(snapshot, self._engine, self._attaching)
        # Not in one call: json.dumps lets no other thread run until it has finished.
        encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return "".join(encoder.iterencode(document)).encode()


def task_info(snapshot: Snapshot, name: str) -> dict[str, Any]:
    """One task, as an entry of the list."""
    engram = snapshot.public_engrams[name]
    spec = engram.spec
    return {
        "name": spec.name,
        "kind": spec.kind,
        "classes": len(spec.classes),
        "regime": spec.regime,
        "settings": spec.method.settings(),
        "extends": list(spec.extends),
        "parameters": engram.parameters,
        "content": snapshot.contents[name],
        "metrics": engram.metrics,
    }


def task_detail(snapshot: Snapshot, name: str) -> dict[str, Any]:
    """One task with its classes and how it was trained."""
    engram = snapshot.public_engrams[name]
    more = {key: getattr(engram, key) for key in ("created", "library", "recipe")}
    return {**task_info(snapshot, name), "class_names": list(engram.spec.classes), **more}


def task_list(snapshot: Snapshot, engine: str, attaching: bool) -> dict[str, Any]:
    """The backbone, all tasks attached to it, and the engine that runs them."""
    backbone = snapshot.model.backbone
    head = backbone.config.head
    return {
        "tag": snapshot.tag,
        "backbone": {
            "source": without_folder(backbone.source),
            "fingerprint": backbone.fingerprint,
            "classes": head.classes if head is not None and head.classes else None,
            "image_size": list(snapshot.preprocessing.size),
            "layers": backbone.config.depth,
        },
        "tasks": [task_info(snapshot, name) for name in snapshot.public_engrams],
        "engine": engine,
        "attaching": attaching,
    }
