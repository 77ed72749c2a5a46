"""POST /v1/predict and /v1/embed: the answers of tasks about images, and images as vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from torch import Tensor

from engram.errors import EngramError
from engram.images.masks import palette
from engram.images.preprocessing import normalise
from engram.inference.engine import familiarity_name
from engram.inference.predict import shown_familiarity
from engram.methods.attention_maps import SOURCES
from engram.serve.catalogue import Catalogue, Snapshot
from engram.serve.decoding.upload import read_upload
from engram.serve.outputs import kept_values
from engram.serve.routes.request_pipeline import Asked, RequestPipeline, content_type
from engram.serve.routes.writing import JSON, Answer, json_parts, numbers
from engram.serve.schemas import (
    Embedding,
    EmbedOptions,
    Options,
    Prediction,
    PredictOptions,
    answer_limit,
    body_with_images,
    error_responses,
    request_body,
)
from engram.serve.tokens import Tokens
from engram.util.tensors import to_device


def predict_router(catalogue: Catalogue, pipeline: RequestPipeline, tokens: Tokens) -> APIRouter:
    """The endpoints that run tasks on images."""
    router, settings = APIRouter(), pipeline.settings

    def described(options: type[Options]) -> dict[str, Any]:
        forms = {
            "multipart/form-data": body_with_images(options, settings.max_images, form=True),
            "application/json": body_with_images(options, settings.max_images),
        }
        return {
            "description": answer_limit(settings.max_values),
            "responses": error_responses(400, 401, 404, 408, 413, 415, 422, 429, 503),
            "dependencies": tokens.to_ask,
            "openapi_extra": request_body({k: v.model_json_schema() for k, v in forms.items()}),
        }

    @router.post(
        "/v1/predict",
        summary="Run tasks on images",
        response_model=Prediction,
        **described(PredictOptions),
    )
    async def predict(request: Request) -> Response:
        snapshot, kind = catalogue.now, content_type(request)
        read = partial(read_upload, PredictOptions, kind, settings.max_images)
        asked = partial(_asked, snapshot)

        async def work(answer: Answer) -> None:
            answers = pipeline.answers(request, snapshot, PredictOptions, read, asked)
            async with answers as (options, images):
                found: list[dict[str, Any]] = []
                for image, outputs in images:
                    names = [name for name in outputs if name in snapshot.names]
                    about = partial(task_answer, snapshot, outputs, options.top_k)
                    tasks = {name: partial(about, name) for name in names}
                    found.append({**image.fields, "tasks": tasks})
                    if options.attention is not None:
                        find = partial(task_attention, snapshot, options.attention, image.view)
                        found[-1]["attention"] = await pipeline.batcher.in_engine_thread(find)
                contents = snapshot.answering(options.tasks or snapshot.names)
                await answer.write(json_parts({"images": iter(found), "contents": contents}), JSON)

        return Answer(work, pipeline.threads)

    @router.post(
        "/v1/embed",
        summary="Turn images into vectors",
        response_model=Embedding,
        **described(EmbedOptions),
    )
    async def embed(request: Request) -> Response:
        snapshot, kind = catalogue.now, content_type(request)
        read = partial(read_upload, EmbedOptions, kind, settings.max_images)
        asked = partial(_asked_vectors, snapshot)

        async def work(answer: Answer) -> None:
            answers = pipeline.answers(request, snapshot, EmbedOptions, read, asked, embeds=True)
            async with answers as (options, images):
                parts = ({**one.fields, **shown_vectors(vectors)} for one, vectors in images)
                contents = snapshot.answering(options.tasks or snapshot.embedding_names)
                await answer.write(json_parts({"images": parts, "contents": contents}), JSON)

        return Answer(work, pipeline.threads)

    return router


def _names(snapshot: Snapshot, names: Sequence[str], known: Sequence[str]) -> list[str]:
    """These tasks, each once; one that does not exist is a Problem."""
    for name in names:
        snapshot.check_task(name, known)
    return list(dict.fromkeys(names))


def _asked(snapshot: Snapshot, options: PredictOptions) -> Asked:
    names = _names(snapshot, options.tasks or snapshot.names, snapshot.names)
    values = kept_values(snapshot, names)
    if options.attention is not None:
        _names(snapshot, [options.attention], snapshot.names)
        config = snapshot.model.backbone.config
        patches = math.prod(side // config.patch for side in snapshot.model.preprocessing.size)
        values += config.depth * (patches + len(SOURCES))
    return names, values


def _asked_vectors(snapshot: Snapshot, options: EmbedOptions) -> Asked:
    known = snapshot.embedding_names
    names = _names(snapshot, options.tasks or known, known)
    return names, kept_values(snapshot, names, embeds=True)


# Answers, in the parts that `json_parts` writes: a thousand classes of many tasks would be one long
# wait for other threads


def task_attention(snapshot: Snapshot, name: str, view: Tensor) -> dict[str, Any]:
    """The attention of a task in one image, layer by layer, or of its side network (`pooled`)."""
    model, pixels = snapshot.model, normalise(view[None], snapshot.model.preprocessing)
    maps = model.attention_maps(name, to_device(pixels, model.backbone.device))
    shares, patches = maps.shares.cpu(), maps.contribution[0].cpu()
    if not all(bool(part.isfinite().all()) for part in (shares, patches)):
        raise EngramError(f"The attention of {name!r} is not finite; train the task again.")
    layers = (
        {
            "shares": [round(share, 5) for share in own],
            "patches": [[float(f"{p:.4g}") for p in row] for row in rows.tolist()],
        }
        for own, rows in zip(shares.tolist(), patches, strict=True)
    )
    return {"task": name, "parts": list(SOURCES), "pooled": maps.pooled, "layers": layers}


def task_answer(
    snapshot: Snapshot, outputs: Mapping[str, Tensor], top_k: int, name: str
) -> dict[str, Any]:
    """Kind and answer of a task about one image.

    A task whose output is not finite gets an error, because JSON has no such numbers; the other
    tasks still answer.
    """
    task, output = snapshot.model.task(name), outputs[name]
    if not bool(output.isfinite().all()):
        problem = f"The output of {name!r} is not finite for this image; train the task again."
        return {"kind": task.kind.name, "error": problem}
    answer, classes = task.answer(output, top_k), task.spec.classes
    if task.kind.per_pixel:
        colours = palette(len(classes))
        for row in answer["classes"]:
            row["colour"] = "#" + bytes(colours[classes.index(row["class"])]).hex()
    found = {"kind": task.kind.name, "answer": answer}
    familiarity = outputs.get(familiarity_name(name))
    if familiarity is not None:
        found["familiarity"] = shown_familiarity(familiarity)
    return found


def shown_vectors(vectors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The vectors of one image, with the nine digits of float32.

    One that is not finite is an error instead, because JSON has no such numbers.
    """
    good = {name: one for name, one in vectors.items() if bool(one.isfinite().all())}
    errors = {
        name: f"The vector of {name!r} is not finite for this image; train the task again."
        for name in vectors.keys() - good.keys()
    }
    found = {"vectors": {name: numbers([vector]) for name, vector in good.items()}}
    return found | ({"errors": errors} if errors else {})
