"""/v1/tasks: list, describe, attach, replace and remove tasks; /v1/teach: make one of vectors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from fastapi import APIRouter, Request
from fastapi.responses import Response
from torch import Tensor

from engram.methods import Base, Head
from engram.serve.catalogue import Catalogue, Condition, Snapshot
from engram.serve.decoding.infer_body import read_vectors
from engram.serve.middleware import client_address
from engram.serve.problems import Problem
from engram.serve.routes.request_pipeline import RequestPipeline, read_body
from engram.serve.routes.writing import Answer
from engram.serve.schemas import (
    MAX_VECTORS,
    TaskDetail,
    TaskList,
    TeachOptions,
    TeachRequest,
    error_responses,
    request_body,
)
from engram.serve.telemetry import WRITE
from engram.serve.tokens import Tokens
from engram.store.bundles import Bundle
from engram.store.format import serialise_engram
from engram.store.portable import without_local_paths
from engram.tasks.feature_sums import FeatureSums
from engram.tasks.spec import TaskSpec
from engram.train.teach import solve_task
from engram.util.text import without_folder

_ENGRAM_FILE = {"type": "string", "format": "binary"}


def tasks_router(catalogue: Catalogue, pipeline: RequestPipeline, tokens: Tokens) -> APIRouter:
    """The endpoints about tasks; those that change them need the token. Who may ask may teach."""
    router, settings = APIRouter(), pipeline.settings
    teacher = ThreadPoolExecutor(1, thread_name_prefix="engram-teach")  # one task after the other

    @router.get(
        "/v1/tasks",
        summary="List all tasks",
        response_model=TaskList,
        responses={304: {}, **error_responses(401, 429)},
        dependencies=tokens.to_ask,
    )
    def tasks(request: Request) -> Response:
        snapshot = catalogue.now
        tag = f'"{snapshot.tag}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        describe = partial(task_list, snapshot, settings.engine, tokens.attaching)
        return _document(snapshot, "", describe, {"ETag": tag})

    @router.get(
        "/v1/tasks/{name}",
        summary="Describe one task and its classes",
        response_model=TaskDetail,
        responses=error_responses(401, 404, 422, 429),
        dependencies=tokens.to_ask,
    )
    def task(name: str) -> Response:
        return _described(catalogue.now, name)

    def log_change(event: str, request: Request, name: str, **content: str) -> None:
        pipeline.log.event(event, client=client_address(request.scope), task=name, **content)

    @router.put(
        "/v1/tasks/{name}",
        summary="Attach an engram, or replace one",
        description="The body is the engram's file. It is verified, loaded into a second model "
        "and written to the bundle; then the second model takes over, and requests in progress "
        "finish with the first. A task that is replaced is kept as an older version. With "
        "`shadow=1` the engram is a shadow of the task of its name: it answers into metrics and "
        "the log only, until it is promoted or dropped. `If-None-Match: *` replaces nothing, and "
        '`If-Match: "CONTENT"` only that version.',
        status_code=201,
        response_model=TaskDetail,
        responses={
            **error_responses(401, 403, 404, 408, 409, 412, 413, 422, 429, 503),
            200: {"model": TaskDetail, "description": "It replaced another, or was there already"},
        },
        dependencies=tokens.to_attach,
        openapi_extra=request_body({"application/octet-stream": {**_ENGRAM_FILE, "minLength": 1}}),
    )
    async def attach(name: str, request: Request, shadow: bool = False) -> Response:
        deadline = asyncio.get_running_loop().time() + settings.timeout
        condition = _condition(request)
        body = await read_body(request, settings.max_engram, deadline)
        data = await asyncio.to_thread(bytes, body)
        body.clear()
        old, new = await asyncio.to_thread(
            catalogue.attach, name, data, shadow=shadow, condition=condition
        )
        created = name not in old.contents
        if old is not new:
            known = new.shadows[name] if shadow else new
            event = "attached shadow" if shadow else "attached" if created else "replaced"
            log_change(event, request, name, content=known.contents[name])
        return await asyncio.to_thread(_described, new, name, 201 if created else 200)

    about: dict[str, Any] = {
        "responses": error_responses(401, 403, 404, 409, 422, 429, 503),
        "dependencies": tokens.to_attach,
    }

    @router.post(
        "/v1/tasks/{name}/promote",
        summary="Let the shadow of a task answer in its place",
        response_model=TaskDetail,
        **about,
    )
    def promoted(name: str, request: Request) -> Response:
        snapshot = catalogue.change(name, lambda bundle, name: bundle.plus(bundle.shadow(name)))
        log_change("promoted", request, name, content=snapshot.contents[name])
        return _described(snapshot, name)

    @router.post(
        "/v1/tasks/{name}/rollback",
        summary="Let the version before this one answer again",
        response_model=TaskDetail,
        **about,
    )
    def rolled_back(name: str, request: Request) -> Response:
        snapshot = catalogue.change(name, lambda bundle, name: bundle.plus(bundle.before(name)))
        log_change("rolled back", request, name, content=snapshot.contents[name])
        return _described(snapshot, name)

    @router.delete(
        "/v1/tasks/{name}",
        summary="Detach a task with its versions, or with `shadow=1` drop its shadow",
        status_code=204,
        response_class=Response,
        **about,
    )
    def detach(name: str, request: Request, shadow: bool = False) -> Response:
        catalogue.change(name, Bundle.without_shadow if shadow else Bundle.minus)
        log_change("dropped shadow" if shadow else "detached", request, name)
        return Response(status_code=204)

    @router.post(
        "/v1/teach",
        summary="Teach a task from vectors of a few images",
        description=f"At most {MAX_VECTORS} vectors, those of `base` that /v1/embed gives. The "
        "response is the engram of the task, for /v1/tasks/{name} or a file. Images and vectors "
        "are not kept.",
        response_class=Response,
        responses={
            200: {"content": {"application/octet-stream": {"schema": _ENGRAM_FILE}}},
            **error_responses(400, 401, 408, 413, 422, 429, 503),
        },
        dependencies=tokens.to_ask,
        openapi_extra=request_body({"application/json": TeachRequest.model_json_schema()}),
    )
    async def teach(request: Request) -> Response:
        snapshot = catalogue.now
        read = partial(read_vectors, snapshot.model.task(Base.name).head.vector_size)

        async def work(answer: Answer) -> None:
            async with pipeline.body(request) as body:
                async with pipeline.decoders.decoder(client_address(request.scope)) as decoder:
                    [name], options = await decoder.read(TeachOptions, read, body)
                    vectors = await decoder.decode(name, snapshot.model.preprocessing)
                solve = partial(taught_engram, snapshot, options, vectors.view)
                data = await asyncio.get_running_loop().run_in_executor(teacher, solve)
                with pipeline.telemetry.stage(WRITE):
                    await answer.write([data], {"Content-Type": "application/octet-stream"})

        return Answer(work, pipeline.threads)

    return router


def taught_engram(snapshot: Snapshot, options: TeachOptions, vectors: Tensor) -> bytes:
    """The engram of a task that was taught, without paths of this machine."""
    classes = list(dict.fromkeys(options.labels))
    spec = TaskSpec.create(options.task, classes, Head())
    labels = torch.tensor([classes.index(label) for label in options.labels])
    sums = FeatureSums.from_features(vectors, labels, len(classes))
    engram = solve_task(snapshot.model, spec, sums, (vectors, labels), options.statistics == "on")
    return serialise_engram(without_local_paths(engram)[0])


def _condition(request: Request) -> Condition:
    """The condition in the headers of a request, on the version that it would replace."""
    given = {name: request.headers.get(name) for name in ("If-Match", "If-None-Match")}

    def check(name: str, content: str | None) -> None:
        for header, tags in given.items():
            if tags is None:
                continue
            listed = [tag.strip().strip('"') for tag in tags.split(",")]
            matches = content is not None and ("*" in listed or content in listed)
            if matches != (header == "If-Match"):
                is_now = f"has the content {content}" if content else "is not attached"
                raise Problem(
                    412, f"{name!r} {is_now}, which {header} excludes; nothing was changed."
                )

    return check


def _described(snapshot: Snapshot, name: str, status: int = 200) -> Response:
    """The description of a task; a Problem if there is no such task."""
    snapshot.check_task(name)
    headers = {"ETag": f'"{snapshot.contents[name]}"'}
    return _document(snapshot, name, partial(task_detail, snapshot, name), headers, status)


def _document(
    snapshot: Snapshot,
    name: str,
    describe: Callable[[], dict[str, Any]],
    headers: dict[str, str],
    status: int = 200,
) -> Response:
    """A description as JSON, written once for each snapshot and not for each request.

    An engram may have 100,000 metrics. They are written in many small steps, so that other requests
    are answered meanwhile: json.dumps lets no other thread run until it has finished.
    """
    if name not in snapshot.documents:
        encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        snapshot.documents[name] = "".join(encoder.iterencode(describe())).encode()
    return Response(snapshot.documents[name], status, headers, "application/json")


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
    shadow, older = snapshot.shadows.get(name), snapshot.bundle.older.get(name, ())
    return {
        **task_info(snapshot, name),
        "class_names": list(engram.spec.classes),
        **more,
        "older": [vars(version) for version in older],
        "shadow": shadow.contents[name] if shadow is not None else None,
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
            "image_size": list(snapshot.model.preprocessing.size),
            "layers": backbone.config.depth,
        },
        "tasks": [task_info(snapshot, name) for name in snapshot.public_engrams],
        "engine": engine,
        "attaching": attaching,
    }
