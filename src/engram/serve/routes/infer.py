"""The Open Inference Protocol over HTTP (KServe v2, Triton): /v2.

A model is a task, `base`, or the whole bundle under the name of its folder. Its outputs are
tensors, one per task: what `model(pixels)` returns for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from torch import Tensor

from engram import __version__
from engram.inference.predict import kind_of
from engram.serve.catalogue import Catalogue, Snapshot
from engram.serve.middleware import client_of
from engram.serve.problems import Problem
from engram.serve.routes.infer_schemas import (
    IMAGE,
    PIXELS,
    InferOptions,
    InferOutput,
    InferRequest,
    InferResponse,
    ModelMetadata,
    ModelReady,
    ServerLive,
    ServerMetadata,
    ServerReady,
)
from engram.serve.routes.openapi import error_responses, request_body
from engram.serve.routes.pipeline import Pipeline
from engram.serve.tokens import Tokens
from engram.util.text import printable

JSON_BYTES = "Inference-Header-Content-Length"
_EXTENSIONS = ["binary_tensor_data", "classification"]
_MODEL = "/v2/models/{name}"
_VERSION = _MODEL + "/versions/{version}"


def infer_router(catalogue: Catalogue, pipeline: Pipeline, tokens: Tokens) -> APIRouter:
    """The endpoints of the protocol."""
    router = APIRouter()
    _add_server(router, pipeline)
    _add_models(router, catalogue, tokens)
    _add_infer(router, catalogue, pipeline, tokens)
    return router


def _add_server(router: APIRouter, pipeline: Pipeline) -> None:
    @router.get("/v2", summary="Describe the server", response_model=ServerMetadata)
    async def server() -> dict[str, Any]:
        return {"name": "engram", "version": __version__, "extensions": _EXTENSIONS}

    @router.get(
        "/v2/health/live", summary="Whether the process is alive", response_model=ServerLive
    )
    async def live() -> dict[str, bool]:
        return {"live": True}

    @router.get(
        "/v2/health/ready",
        summary="Whether the service accepts requests now",
        response_model=ServerReady,
        responses=error_responses(503),
    )
    async def ready() -> dict[str, bool]:
        pipeline.batcher.check_ready()
        return {"ready": True}


def _add_models(router: APIRouter, catalogue: Catalogue, tokens: Tokens) -> None:
    about: dict[str, Any] = {
        "responses": error_responses(401, 404, 422, 429),
        "dependencies": tokens.to_ask,
    }

    @router.get(_MODEL, summary="Describe a model", response_model=ModelMetadata, **about)
    @router.get(
        _VERSION, summary="Describe a version of a model", response_model=ModelMetadata, **about
    )
    async def model(name: str, version: str = "") -> Response:
        return JSONResponse(Served.find(catalogue.now, name, version).metadata)

    @router.get(
        f"{_MODEL}/ready", summary="Whether a model answers", response_model=ModelReady, **about
    )
    @router.get(
        f"{_VERSION}/ready",
        summary="Whether a version of a model answers",
        response_model=ModelReady,
        **about,
    )
    async def ready(name: str, version: str = "") -> Response:
        return JSONResponse({"name": Served.find(catalogue.now, name, version).name, "ready": True})


def _add_infer(router: APIRouter, catalogue: Catalogue, pipeline: Pipeline, tokens: Tokens) -> None:
    about: dict[str, Any] = {
        "response_model": InferResponse,
        "responses": error_responses(400, 401, 404, 408, 413, 422, 429, 503),
        "dependencies": tokens.to_ask,
        "openapi_extra": request_body({"application/json": InferRequest.model_json_schema()}),
    }

    @router.post(f"{_MODEL}/infer", summary="Run a model on images", **about)
    @router.post(f"{_VERSION}/infer", summary="Run a version of a model on images", **about)
    async def infer(name: str, request: Request, version: str = "") -> Response:
        snapshot = catalogue.now
        served = Served.find(snapshot, name, version)
        json_bytes = _json_bytes(request)
        size = snapshot.preprocessing.size
        async with (
            pipeline.body(request) as body,
            pipeline.run(
                snapshot,
                client_of(request.scope),
                lambda decoder: decoder.read_inference(body, json_bytes, size),
                served.wanted,
            ) as (received, images),
        ):
            outputs = [output for _, output in images]
            return await pipeline.in_thread(partial(_response, served, received.options, outputs))


def _json_bytes(request: Request) -> int | None:
    given = request.headers.get(JSON_BYTES)
    if given is None:
        return None
    if not given.isdecimal() or len(given) > 15:
        raise Problem(
            400, f"{JSON_BYTES} is {printable(given, 40)!r}; it is the number of bytes of the JSON."
        )
    return int(given)


@dataclass(frozen=True)
class Served:
    """A model of the protocol: some tasks of a snapshot, and a version that their content gives."""

    snapshot: Snapshot
    name: str
    tasks: tuple[str, ...]
    version: str

    @classmethod
    def find(cls, snapshot: Snapshot, name: str, version: str = "") -> Served:
        """The model of this name; a Problem if there is none, or not in this version."""
        if name in snapshot.contents:
            found = cls(snapshot, name, (name,), snapshot.contents[name].split(":")[-1][:16])
        elif name in snapshot.names:  # base
            found = cls(snapshot, name, (name,), snapshot.model.trunk.fingerprint[:16])
        elif name == snapshot.bundle.folder.resolve().name:
            found = cls(snapshot, name, snapshot.names, snapshot.tag)
        else:
            models = (*snapshot.names, snapshot.bundle.folder.resolve().name)
            raise Problem(
                404, f"There is no model {printable(name, 64)!r}; there are {', '.join(models)}."
            )
        if version not in ("", found.version):
            raise Problem(
                404, f"The model {name!r} has the version {found.version}, and no other is served."
            )
        return found

    @property
    def metadata(self) -> dict[str, Any]:
        def tensor(name: str, datatype: str, *shape: int) -> dict[str, Any]:
            return {"name": name, "datatype": datatype, "shape": [-1, *shape]}

        return {
            "name": self.name,
            "versions": [self.version],
            "platform": "engram",
            "inputs": [
                tensor(IMAGE, "BYTES"),
                tensor(PIXELS, "FP32", 3, *self.snapshot.preprocessing.size),
            ],
            "outputs": [tensor(name, "FP32", *self.snapshot.shapes[name]) for name in self.tasks],
        }

    def requested(self, options: InferOptions) -> list[InferOutput]:
        """The outputs that a request wants; one that the model does not have is a Problem."""
        outputs = options.outputs or [InferOutput(name=name) for name in self.tasks]
        for output in outputs:
            if output.name not in self.tasks:
                raise Problem(
                    422,
                    f"The model {self.name!r} has no output {printable(output.name, 64)!r}; it "
                    f"has {', '.join(self.tasks)}.",
                )
        return outputs

    def wanted(self, options: InferOptions) -> list[str]:
        return list(dict.fromkeys(output.name for output in self.requested(options)))


def _response(
    served: Served, options: InferOptions, images: Sequence[Mapping[str, Tensor]]
) -> Response:
    """The tensors that a request asked for: in the JSON, or after it as bytes."""
    described, binary = [], []
    for output in served.requested(options):
        tensor = torch.stack([image[output.name] for image in images]).float()
        document: dict[str, Any] = {"name": output.name}
        classes = output.parameters.classification
        if classes is not None:
            labels = _classes(served, output.name, tensor, classes)
            document |= {"datatype": "BYTES", "shape": list(labels.shape)}
            data, values = _packed(labels.ravel().tolist()), labels.ravel().tolist()
        else:
            document |= {"datatype": "FP32", "shape": list(tensor.shape)}
            data, values = tensor.numpy().astype("<f4").tobytes(), None
        if options.wants_binary(output):
            document["parameters"] = {"binary_data_size": len(data)}
            binary.append(data)
        else:
            document["data"] = _numbers(output.name, tensor) if values is None else values
        described.append(document)
    head = {"model_name": served.name, "model_version": served.version, "outputs": described}
    if options.id is not None:
        head["id"] = options.id
    text = json.dumps(head, allow_nan=False, separators=(",", ":")).encode()
    if not binary:
        return Response(text, media_type="application/json")
    return Response(
        b"".join([text, *binary]),
        headers={JSON_BYTES: str(len(text))},
        media_type="application/octet-stream",
    )


def _numbers(name: str, tensor: Tensor) -> list[float]:
    if not bool(tensor.isfinite().all()):
        raise Problem(
            422,
            f"The output of {name!r} is not finite for an image, and JSON has no such numbers; "
            "train the task again.",
        )
    numbers: list[float] = tensor.flatten().tolist()
    return numbers


def _classes(served: Served, name: str, logits: Tensor, most: int) -> np.ndarray[Any, Any]:
    """The most likely classes of every image, as "probability:index:class", (images, classes)."""
    model = served.snapshot.model
    if kind_of(model, name).name != "classification":
        raise Problem(
            422,
            f"{name!r} is no classification, so it has no most likely classes; ask for its tensor.",
        )
    names = model.trunk.class_names if name == "base" else model.task(name).spec.classes
    top = logits.softmax(-1).topk(min(most, len(names)))
    rows = [
        [f"{p:.6f}:{i}:{names[i]}" for p, i in zip(values, places, strict=True)]
        for values, places in zip(top.values.tolist(), top.indices.tolist(), strict=True)
    ]
    return np.array(rows, dtype=object)


def _packed(texts: Sequence[str]) -> bytes:
    """The bytes of a BYTES tensor: each element is its length, in four bytes, and its bytes."""
    encoded = [text.encode() for text in texts]
    return b"".join(len(text).to_bytes(4, "little") + text for text in encoded)
