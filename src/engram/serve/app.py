"""The endpoints: read, ask, answer."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.resources import files as package_files
from typing import Annotated, Any

import torch
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from torch import Tensor

from engram import __version__
from engram.images.decode import image_size
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_box, evaluation_view
from engram.serve import answers
from engram.serve.batching import Batcher
from engram.serve.catalogue import Catalogue, Snapshot
from engram.serve.listing import task_detail, task_list
from engram.serve.observe import Numbers, Observed
from engram.serve.problems import Problem, add_handlers
from engram.serve.reference import reference_page
from engram.serve.schemas import (
    AskForm,
    AskJson,
    Error,
    Prediction,
    Status,
    TaskDetail,
    TaskList,
)
from engram.serve.settings import Settings
from engram.serve.uploads import Asked, Bodies, read_asked, read_body

_DECODERS = 2  # threads
_PAGE = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_REASONS = {
    400: "The body cannot be read",
    401: "The token is missing or wrong",
    403: "Attaching is off: the service was started without a token",
    404: "There is no such task",
    408: "The body came too slowly",
    409: "The engram does not fit, or the task cannot go",
    413: "The body is too large",
    415: "The body is of a type that is not understood",
    422: "An image, an engram or an option cannot be used",
    503: "Too much to do; Retry-After says when to try again",
}
Bearer = Annotated[
    HTTPAuthorizationCredentials | None,
    Depends(HTTPBearer(auto_error=False, description="The token of --token or ENGRAM_TOKEN")),
]


def _told(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": Error, "description": _REASONS[code]} for code in codes}


def _body(schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
    content = {kind: {"schema": schema} for kind, schema in schemas.items()}
    return {"requestBody": {"required": True, "content": content}}


def _at_most(images: int, model: type[AskForm | AskJson], field: str) -> dict[str, Any]:
    schema = model.model_json_schema()
    schema["properties"][field]["maxItems"] = images
    return schema


def create_app(catalogue: Catalogue, settings: Settings, token: str | None = None) -> FastAPI:
    """The service as an ASGI application; tasks come and go only with a token."""
    numbers, bodies = Numbers(), Bodies(settings.max_bodies)
    decoders = ThreadPoolExecutor(_DECODERS, thread_name_prefix="engram-decode")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batcher = app.state.batcher = Batcher(settings, numbers.passes.observe)
        numbers.waiting.set_function(lambda: batcher.images)
        numbers.tasks.set_function(lambda: len(catalogue.now.model.tasks))
        batcher.start()
        yield
        await batcher.stop()
        decoders.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="Engram",
        version=__version__,
        description="One frozen Vision Transformer and any number of tasks, in one pass.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.catalogue = catalogue
    app.add_middleware(Observed, numbers=numbers)
    add_handlers(app)

    def allowed(bearer: Bearer) -> None:
        """Whether the caller may change the tasks; the comparison takes as long either way."""
        if token is None:
            raise Problem(
                403, "Attaching is off here; start the service with --token or ENGRAM_TOKEN."
            )
        given = bearer.credentials if bearer is not None else ""
        if not hmac.compare_digest(given.encode(), token.encode()):
            raise Problem(401, "The token is missing or wrong; send Authorization: Bearer TOKEN.")

    # Answers

    @app.post(
        "/v1/predict",
        summary="Ask tasks about images",
        response_model=Prediction,
        responses=_told(400, 404, 408, 413, 415, 422, 503),
        openapi_extra=_body(
            {
                "multipart/form-data": _at_most(settings.max_images, AskForm, "image"),
                "application/json": _at_most(settings.max_images, AskJson, "images"),
            }
        ),
    )
    async def predict(request: Request) -> Response:
        batcher: Batcher = request.app.state.batcher
        deadline = asyncio.get_running_loop().time() + settings.timeout
        batcher.check_room()
        with bodies.one() as take:
            asked = await read_asked(request, settings, deadline, take)
            snapshot = catalogue.now
            names = list(dict.fromkeys(asked.options.tasks or snapshot.names))
            for name in (*names, asked.options.looks or names[0]):
                if name not in snapshot.names:
                    snapshot.engram(name)
            try:
                async with asyncio.timeout_at(deadline):
                    with batcher.room(len(asked.pictures)):
                        images = await _answer(batcher, decoders, snapshot, asked, names, settings)
            except TimeoutError:
                raise Problem(
                    503, "There was no answer in time; try again in a few seconds.", retry=5
                ) from None
        for name in names:
            numbers.answers.labels(name).inc(len(images))
        return JSONResponse({"images": images})

    # Tasks

    @app.get("/v1/tasks", summary="Every task", response_model=TaskList, responses={304: {}})
    async def tasks(request: Request) -> Response:
        snapshot = catalogue.now
        tag = f'"{snapshot.tag}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        return JSONResponse(
            task_list(snapshot, settings.engine, token is not None), headers={"ETag": tag}
        )

    @app.get(
        "/v1/tasks/{name}",
        summary="One task, with its classes",
        response_model=TaskDetail,
        responses=_told(404, 422),
    )
    async def task(name: str) -> Response:
        return JSONResponse(task_detail(catalogue.now, name))

    @app.put(
        "/v1/tasks/{name}",
        summary="Attach an engram",
        description="The body is the engram's file. It is verified, built in beside what answers "
        "now, and written to the bundle before it answers.",
        status_code=201,
        response_model=TaskDetail,
        responses={
            **_told(401, 403, 408, 409, 413, 422, 503),
            200: {"model": TaskDetail, "description": "It was attached already"},
        },
        dependencies=[Depends(allowed)],
        openapi_extra=_body(
            {"application/octet-stream": {"type": "string", "format": "binary", "minLength": 1}}
        ),
    )
    async def attach(name: str, request: Request) -> Response:
        deadline = asyncio.get_running_loop().time() + settings.timeout
        body = read_body(request, settings.max_engram, deadline)
        data = b"".join([piece async for piece in body])
        snapshot, new = await asyncio.to_thread(catalogue.attach, name, data)
        return JSONResponse(task_detail(snapshot, name), 201 if new else 200)

    @app.delete(
        "/v1/tasks/{name}",
        summary="Detach a task",
        status_code=204,
        response_class=Response,
        responses=_told(401, 403, 404, 409, 422, 503),
        dependencies=[Depends(allowed)],
    )
    async def detach(name: str) -> Response:
        await asyncio.to_thread(catalogue.detach, name)
        return Response(status_code=204)

    # For those who run it

    @app.get("/healthz", summary="Whether the process lives", response_model=Status)
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get(
        "/readyz",
        summary="Whether it takes requests now",
        response_model=Status,
        responses=_told(503),
    )
    async def ready(request: Request) -> Response:
        batcher: Batcher = request.app.state.batcher
        if not batcher.running:
            raise Problem(503, "The engine has stopped; restart the service.", retry=5)
        batcher.check_room()
        return JSONResponse({"status": "ready"})

    @app.get(
        "/metrics",
        summary="Numbers for Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        return Response(numbers.text(), media_type="text/plain; version=0.0.4")

    # Pages

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(reference_page(app.openapi()), media_type="text/html")

    for path, (file, kind) in _PAGE.items():
        app.add_api_route(path, _file(file, kind), include_in_schema=False)
    return app


def _file(name: str, kind: str) -> Callable[[], Response]:
    data = (package_files("engram.serve") / "page" / name).read_bytes()
    return lambda: Response(data, media_type=kind, headers={"Cache-Control": "no-cache"})


async def _answer(
    batcher: Batcher,
    decoders: ThreadPoolExecutor,
    snapshot: Snapshot,
    asked: Asked,
    names: Sequence[str],
    settings: Settings,
) -> list[dict[str, Any]]:
    loop = asyncio.get_running_loop()
    seen = [
        await loop.run_in_executor(decoders, _decode, snapshot, name, data, settings.max_pixels)
        for name, data in asked.pictures
    ]
    views = [view for _, view in seen]
    outputs = await batcher.answer(snapshot, views, names)
    looks, images = asked.options.looks, []
    for (image, view), output in zip(seen, outputs, strict=True):
        image["tasks"] = await loop.run_in_executor(
            decoders, answers.answer, snapshot, output, asked.options.top_k
        )
        if looks is not None:
            pixels = normalise(view[None], snapshot.preprocessing)
            image["looks"] = await batcher.between(
                lambda name=looks, pixels=pixels: answers.look(snapshot, name, pixels)  # type: ignore[misc]
            )
        images.append(image)
    return images


def _decode(
    snapshot: Snapshot, name: str, data: bytes, max_pixels: int
) -> tuple[dict[str, Any], Tensor]:
    """What is known of a picture, and its view; its size is checked before it is decoded."""
    width, height = image_size(data, name=name, max_pixels=max_pixels)
    view = torch.from_numpy(evaluation_view(data, snapshot.preprocessing, name=name))
    box = evaluation_box(width, height, snapshot.preprocessing)
    about = {"name": name, "width": width, "height": height, "view": [round(x, 3) for x in box]}
    return about, view
