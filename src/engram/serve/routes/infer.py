"""The Open Inference Protocol over HTTP (KServe v2, Triton): /v2.

A model is a task, `base`, or the whole bundle under the name of its folder. Its outputs are
tensors, one per task: what `model(pixels)` returns for it, and masks of segmentations, whose logits
are outputs of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from torch import Tensor

from engram import __version__
from engram.serve.catalogue import Catalogue, Snapshot
from engram.serve.decoding.infer_body import read_inference
from engram.serve.outputs import (
    is_finite,
    is_mask,
    kept_values,
    logits_name,
    output_shape,
    task_name,
)
from engram.serve.problems import Problem
from engram.serve.routes.request_pipeline import Asked, RequestPipeline
from engram.serve.routes.writing import JSON, Answer, json_parts, numbers, raw
from engram.serve.schemas import (
    IMAGE,
    PIXELS,
    InferOptions,
    InferOutput,
    InferRequest,
    InferResponse,
    ModelMetadata,
    ModelReady,
    ServerMetadata,
    answer_limit,
    error_responses,
    request_body,
)
from engram.serve.tokens import Tokens
from engram.util.text import printable

JSON_BYTES = "Inference-Header-Content-Length"
_MODEL = "/v2/models/{name}"
_VERSION = _MODEL + "/versions/{version}"


def infer_router(catalogue: Catalogue, pipeline: RequestPipeline, tokens: Tokens) -> APIRouter:
    """The endpoints of the protocol."""
    router = APIRouter()

    @router.get("/v2", summary="Describe the server", response_model=ServerMetadata)
    async def server() -> dict[str, Any]:
        extensions = ["binary_tensor_data", "classification"]
        return {"name": "engram", "version": __version__, "extensions": extensions}

    @router.get("/v2/health/live", summary="Whether the process is alive")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @router.get(
        "/v2/health/ready",
        summary="Whether the service accepts requests now",
        responses=error_responses(503),
    )
    async def ready() -> dict[str, bool]:
        pipeline.batcher.check_ready()
        return {"ready": True}

    about: dict[str, Any] = {
        "responses": error_responses(401, 404, 422, 429),
        "dependencies": tokens.to_ask,
    }

    @router.get(_MODEL, summary="Describe a model", response_model=ModelMetadata, **about)
    @router.get(_VERSION, summary="Describe a version", response_model=ModelMetadata, **about)
    async def model(name: str, version: str = "") -> Response:
        return JSONResponse(Served.find(catalogue.now, name, version).metadata)

    about["response_model"] = ModelReady

    @router.get(f"{_MODEL}/ready", summary="Whether a model answers", **about)
    @router.get(f"{_VERSION}/ready", summary="Whether a version answers", **about)
    async def model_ready(name: str, version: str = "") -> Response:
        return JSONResponse({"name": Served.find(catalogue.now, name, version).name, "ready": True})

    about |= {
        "response_model": InferResponse,
        "description": answer_limit(pipeline.settings.max_values),
        "responses": error_responses(400, 401, 404, 408, 413, 422, 429, 503),
        "openapi_extra": request_body({"application/json": InferRequest.model_json_schema()}),
    }

    @router.post(f"{_MODEL}/infer", summary="Run a model on images", **about)
    @router.post(f"{_VERSION}/infer", summary="Run a version of a model on images", **about)
    async def infer(name: str, request: Request, version: str = "") -> Response:
        snapshot = catalogue.now
        served = Served.find(snapshot, name, version)

        size, most = snapshot.model.preprocessing.size, pipeline.settings.max_images
        read = partial(read_inference, _json_bytes(request), size, most)

        async def work(answer: Answer) -> None:
            answers = pipeline.answers(request, snapshot, InferOptions, read, served.asked)
            async with answers as (options, images):
                response = TensorResponse(served, options, [outputs for _, outputs in images])
                await answer.write(response.parts(), await pipeline.in_thread(response.headers))

        return Answer(work, pipeline.threads)

    return router


def _json_bytes(request: Request) -> int | None:
    sent = request.headers.get(JSON_BYTES)
    if sent is None:
        return None
    if not sent.isdecimal() or len(sent) > 15:
        raise Problem(
            400, f"{JSON_BYTES} is {printable(sent, 40)!r}; it is the number of bytes of the JSON."
        )
    return int(sent)


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
        folder = snapshot.bundle.folder.resolve().name
        if name in snapshot.names:
            found = cls(snapshot, name, (name,), snapshot.version(name))
        elif name == folder:
            found = cls(snapshot, name, snapshot.names, snapshot.tag)
        else:
            models = ", ".join((*snapshot.names, folder))
            raise Problem(404, f"There is no model {printable(name, 64)!r}; there are {models}.")
        if version not in ("", found.version):
            raise Problem(
                404, f"The model {name!r} has the version {found.version}, and no other is served."
            )
        return found

    @property
    def metadata(self) -> dict[str, Any]:
        def tensor(name: str, datatype: str, *shape: int) -> dict[str, Any]:
            return {"name": name, "datatype": datatype, "shape": [-1, *shape]}

        size = self.snapshot.model.preprocessing.size
        return {
            "name": self.name,
            "versions": [self.version],
            "platform": "engram",
            "inputs": [tensor(IMAGE, "BYTES"), tensor(PIXELS, "FP32", 3, *size)],
            "outputs": [
                tensor(name, self.datatype(name), *output_shape(self.snapshot, name))
                for name in self.outputs
            ],
        }

    @property
    def outputs(self) -> list[str]:
        """All outputs: of each task one, and the logits of segmentations."""
        masks = [name for name in self.tasks if is_mask(self.snapshot, name)]
        return [*self.tasks, *map(logits_name, masks)]

    def datatype(self, name: str) -> str:
        return "UINT8" if is_mask(self.snapshot, name) else "FP32"

    def requested(self, options: InferOptions) -> list[InferOutput]:
        """The outputs that a request wants; what the model does not have is a Problem."""
        if options.outputs is None:
            return [InferOutput(name=name) for name in self.tasks]
        seen, known = set[str](), self.outputs
        for output in options.outputs:
            name, shown = output.name, printable(output.name, 64)
            if name not in known:
                raise Problem(
                    422,
                    f"The model {self.name!r} has no output {shown!r}; it has {', '.join(known)}.",
                )
            if name in seen:
                raise Problem(422, f"The output {shown!r} is asked for twice; ask for it once.")
            kind = self.snapshot.model.task(task_name(name)).kind
            if output.parameters.classification and kind.name != "classification":
                raise Problem(
                    422,
                    f"{name!r} is no classification, so it has no most likely classes; ask for "
                    "its tensor.",
                )
            seen.add(name)
        return options.outputs

    def asked(self, options: InferOptions) -> Asked:
        names = [output.name for output in self.requested(options)]
        return names, kept_values(self.snapshot, names)


class TensorResponse:
    """A response: the tensors that a request asked for, in the JSON or after it as bytes.

    Its parts are made when they are sent, and again where their length has to be known before.
    """

    def __init__(
        self, served: Served, options: InferOptions, images: Sequence[Mapping[str, Tensor]]
    ) -> None:
        self.served, self.options, self.images = served, options, images
        self.outputs = served.requested(options)
        self.binary = [output for output in self.outputs if options.wants_binary(output)]

    def headers(self) -> dict[str, str]:
        """The headers of the response; values that it cannot hold are a Problem."""
        for output in self.outputs:
            mask = is_mask(self.served.snapshot, output.name)
            if output in self.binary and not mask:
                continue
            if not all(map(is_finite, self._tensors(output))):
                raise Problem(
                    422,
                    f"The output of {output.name!r} is not finite for an image, and "
                    f"{'a mask' if mask else 'JSON'} has no such values; train the task again.",
                )
        if not self.binary:
            return JSON
        json_bytes = sum(map(len, self._json()))
        size = json_bytes + sum(self._size(output) for output in self.binary)
        return {
            JSON_BYTES: str(json_bytes),
            "Content-Length": str(size),
            "Content-Type": "application/octet-stream",
        }

    def parts(self) -> Iterator[bytes]:
        yield from self._json()
        for output in self.binary:
            yield from self._raw(output)

    def _json(self) -> Iterator[bytes]:
        head = {"model_name": self.served.name, "model_version": self.served.version}
        if self.options.id is not None:
            head["id"] = self.options.id
        return json_parts({**head, "outputs": map(self._described, self.outputs)})

    def _described(self, output: InferOutput) -> dict[str, Any]:
        name, most = output.name, output.parameters.classification
        shape, datatype = output_shape(self.served.snapshot, name), self.served.datatype(name)
        if most is not None:
            shape, datatype = (min(most, *shape),), "BYTES"
        about = {"name": name, "datatype": datatype, "shape": [len(self.images), *shape]}
        if output in self.binary:
            return {**about, "parameters": {"binary_data_size": self._size(output)}}
        if most is None:
            return {**about, "data": numbers(self._tensors(output))}
        return {**about, "data": chain.from_iterable(self._labels(output, most))}

    def _size(self, output: InferOutput) -> int:
        """The bytes of an output that follows the JSON."""
        if output.parameters.classification is not None:
            return sum(map(len, self._raw(output)))
        return sum(one.numel() * one.element_size() for one in self._tensors(output))

    def _raw(self, output: InferOutput) -> Iterator[bytes]:
        """Values as bytes; a text is its length, in four bytes, and its bytes."""
        if output.parameters.classification is None:
            yield from raw(self._tensors(output))
            return
        for labels in self._labels(output, output.parameters.classification):
            texts = [label.encode() for label in labels]
            yield b"".join(len(text).to_bytes(4, "little") + text for text in texts)

    def _tensors(self, output: InferOutput) -> Iterator[Tensor]:
        return (image[output.name] for image in self.images)

    def _labels(self, output: InferOutput, most: int) -> Iterator[list[str]]:
        """The most likely classes of each image, as "probability:index:class"."""
        names = self.served.snapshot.model.task(output.name).spec.classes
        for logits in self._tensors(output):
            top = logits.softmax(-1).topk(min(most, len(names)))
            pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
            yield [f"{p:.6f}:{i}:{names[i]}" for p, i in pairs]
