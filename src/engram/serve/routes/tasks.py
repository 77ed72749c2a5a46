"""/v1/tasks: list and describe the tasks, attach and remove them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engram.serve.catalogue import Catalogue, Snapshot
from engram.serve.log import Log
from engram.serve.middleware import client_of
from engram.serve.routes.openapi import error_responses, request_body
from engram.serve.routes.schemas import TaskDetail, TaskInfo, TaskList
from engram.serve.routes.uploads import read_whole_body
from engram.serve.service_settings import Settings
from engram.serve.tokens import Tokens
from engram.util.text import without_folder

_ENGRAM_FILE = {"type": "string", "format": "binary", "minLength": 1}


def tasks_router(catalogue: Catalogue, settings: Settings, tokens: Tokens, log: Log) -> APIRouter:
    """The endpoints about tasks; those that change them need the token."""
    router = APIRouter()
    documents = Documents(settings.engine, tokens.attach is not None)
    _add_reading(router, catalogue, documents, tokens)
    _add_changing(router, catalogue, settings, documents, tokens, log)
    return router


class Documents:
    """The descriptions of tasks as JSON, written once for each snapshot and not for each request.

    An engram may have 100,000 metrics. A thread writes them, in many small steps, so that other
    requests are answered meanwhile.
    """

    def __init__(self, engine: str, attaching: bool) -> None:
        self._engine, self._attaching = engine, attaching
        self._written: WeakKeyDictionary[Snapshot, dict[str, bytes]] = WeakKeyDictionary()

    async def tasks(self, snapshot: Snapshot) -> bytes:
        """All tasks."""
        work = partial(task_list, snapshot, self._engine, self._attaching)
        return await self._once(snapshot, "", work)

    async def task(self, snapshot: Snapshot, name: str) -> bytes:
        """One task; a Problem if there is none."""
        snapshot.engram(name)  # raises the Problem
        return await self._once(snapshot, name, partial(task_detail, snapshot, name))

    async def _once(
        self, snapshot: Snapshot, key: str, describe: Callable[[], dict[str, Any]]
    ) -> bytes:
        written = self._written.setdefault(snapshot, {})
        if key not in written:
            written[key] = await asyncio.to_thread(lambda: _json(describe()))
        return written[key]


def _json(document: dict[str, Any]) -> bytes:
    # Not in one call: json.dumps lets no other thread run until it has finished.
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return "".join(encoder.iterencode(document)).encode()


def _response(content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(content, status, headers, media_type="application/json")


def _add_reading(
    router: APIRouter, catalogue: Catalogue, documents: Documents, tokens: Tokens
) -> None:

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
        return _response(await documents.tasks(snapshot), headers={"ETag": tag})

    @router.get(
        "/v1/tasks/{name}",
        summary="Describe one task and its classes",
        response_model=TaskDetail,
        responses=error_responses(401, 404, 422, 429),
        dependencies=tokens.to_ask,
    )
    async def task(name: str) -> Response:
        return _response(await documents.task(catalogue.now, name))


def _add_changing(
    router: APIRouter,
    catalogue: Catalogue,
    settings: Settings,
    documents: Documents,
    tokens: Tokens,
    log: Log,
) -> None:

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
        body = await read_whole_body(request, settings.max_engram, deadline)
        data = await asyncio.to_thread(bytes, body)
        body.clear()
        snapshot, new = await asyncio.to_thread(catalogue.attach, name, data)
        if new:
            content = snapshot.contents[name]
            log.event("attached", client=client_of(request.scope), task=name, content=content)
        return _response(await documents.task(snapshot, name), 201 if new else 200)

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
        log.event("detached", client=client_of(request.scope), task=name)
        return Response(status_code=204)


# What the responses say


def task_info(snapshot: Snapshot, name: str) -> dict[str, Any]:
    """One task, as an entry of the list."""
    engram = snapshot.public_engrams[name]
    spec = engram.spec
    info = {
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
    assert info.keys() == TaskInfo.model_fields.keys()
    return info


def task_detail(snapshot: Snapshot, name: str) -> dict[str, Any]:
    """One task with its classes and how it was trained."""
    engram = snapshot.public_engrams[name]
    return {
        **task_info(snapshot, name),
        "class_names": list(engram.spec.classes),
        "created": engram.created,
        "library": engram.library,
        "recipe": engram.recipe,
    }


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
