"""What a response says about images, written in parts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engram.errors import EngramError
from engram.images.masks import palette
from engram.inference import predict
from engram.methods.attention_maps import SOURCES
from engram.serve.catalogue import Snapshot
from engram.serve.outputs import score_of
from engram.serve.routes.writing import numbers
from engram.util.devices import to_device

Answered = tuple[str, dict[str, Any]]  # the name of a task, and its kind and answer


def task_answers(
    snapshot: Snapshot, outputs: Mapping[str, Tensor], top_k: int
) -> Iterator[Answered]:
    """The answer of each task about one image, from the model's outputs.

    A task whose output is not finite gets an error, because JSON has no such numbers; the other
    tasks still answer.
    """
    for name in (name for name in outputs if name in snapshot.names):
        kind, output = snapshot.model.task(name).kind, outputs[name]
        if not bool(output.isfinite().all()):
            problem = f"The output of {name!r} is not finite for this image; train the task again."
            yield name, {"kind": kind.name, "error": problem}
            continue
        answer = snapshot.model.task(name).answer(output, top_k)
        if kind.per_pixel:
            classes = snapshot.model.task(name).spec.classes
            answer["classes"] = _with_colours(answer["classes"], classes)
        score = outputs.get(score_of(name))
        known = {} if score is None else {"score": predict.shown_score(score)}
        yield name, {"kind": kind.name, "answer": answer, **known}


def _with_colours(rows: Sequence[dict[str, Any]], classes: Sequence[str]) -> list[dict[str, Any]]:
    """The classes of a mask with their colours in it."""
    colours = palette(len(classes))
    return [
        {**row, "colour": "#" + bytes(colours[classes.index(row["class"])]).hex()} for row in rows
    ]


@dataclass(frozen=True, eq=False)
class Look:
    """The attention of a task in one image, layer by layer, or of its side network (`pooled`)."""

    task: str
    pooled: bool
    shares: Tensor  # (l, parts)
    patches: Tensor  # (l, rows, columns)

    @classmethod
    def of(cls, snapshot: Snapshot, name: str, pixels: Tensor) -> Look:
        """The attention of a task in one image (1, 3, h, w)."""
        model = snapshot.model
        maps = model.attention_maps(name, to_device(pixels, model.backbone.device))
        shares, patches = maps.shares.cpu(), maps.contribution[0].cpu()
        if not all(bool(part.isfinite().all()) for part in (shares, patches)):
            raise EngramError(f"The attention of {name!r} is not finite; train the task again.")
        return cls(name, maps.pooled, shares, patches)

    @staticmethod
    def values(snapshot: Snapshot) -> int:
        """How many values one has at most."""
        config = snapshot.model.backbone.config
        patches = math.prod(side // config.patch for side in snapshot.preprocessing.size)
        return config.depth * (patches + len(SOURCES))

    def parts(self) -> Iterator[bytes]:
        """Its JSON, layer by layer."""
        about = {"task": self.task, "parts": list(SOURCES), "pooled": self.pooled}
        yield _dump(about)[:-1] + b',"layers":['
        for i, (shares, rows) in enumerate(zip(self.shares, self.patches, strict=True)):
            layer = {
                "shares": [round(share, 5) for share in shares.tolist()],
                "patches": [[float(f"{p:.4g}") for p in row] for row in rows.tolist()],
            }
            yield (b"," if i else b"") + _dump(layer)
        yield b"]}"


def image_json(
    fields: Mapping[str, Any], answers: Iterable[Answered], look: Look | None = None
) -> Iterator[bytes]:
    """The part of a response about one image, task by task and layer by layer.

    Other threads wait while one value is written, and a thousand classes of many tasks would be a
    long wait.
    """
    yield _dump(fields)[:-1] + b',"tasks":{'
    for i, (name, answer) in enumerate(answers):
        yield (b"," if i else b"") + _dump(name) + b":" + _dump(answer)
    yield b"}"
    if look is not None:
        yield b',"looks":'
        yield from look.parts()
    yield b"}"


def vectors_json(fields: Mapping[str, Any], vectors: Mapping[str, Tensor]) -> Iterator[bytes]:
    """The part of a response about one image: vectors, with the nine digits of float32.

    One that is not finite is an error instead, because JSON has no such numbers.
    """
    yield _dump(fields)[:-1] + b',"vectors":{'
    good = {name: one for name, one in vectors.items() if bool(one.isfinite().all())}
    for i, (name, vector) in enumerate(good.items()):
        yield (b"," if i else b"") + _dump(name) + b":["
        yield from numbers([vector])
        yield b"]"
    yield b"}"
    errors = {
        name: f"The vector of {name!r} is not finite for this image; train the task again."
        for name in vectors.keys() - good.keys()
    }
    yield (b',"errors":' + _dump(errors) if errors else b"") + b"}"


def images_json(images: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """A response, from its parts about each image."""
    yield b'{"images":['
    for i, image in enumerate(images):
        if i:
            yield b","
        yield from image
    yield b"]}"


def _dump(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()
