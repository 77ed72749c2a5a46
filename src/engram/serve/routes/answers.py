"""What a response says about one image."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from engram.attention import PARTS, attention
from engram.errors import EngramError
from engram.images.masks import palette
from engram.inference import predict
from engram.inference.predict import kind_of
from engram.serve.batching import score_of
from engram.serve.catalogue import Snapshot
from engram.util.devices import to_device


def task_answers(
    snapshot: Snapshot, outputs: Mapping[str, Tensor], top_k: int
) -> dict[str, dict[str, Any]]:
    """By task, its kind and its answer about one image, from the model's outputs.

    A task whose output is not finite gets an error, because JSON has no such numbers; the other
    tasks still answer.
    """
    answers: dict[str, dict[str, Any]] = {}
    for name in (name for name in outputs if name in snapshot.names):
        kind, output = kind_of(snapshot.model, name), outputs[name]
        if not bool(output.isfinite().all()):
            problem = f"The output of {name!r} is not finite for this image; train the task again."
            answers[name] = {"kind": kind.name, "error": problem}
            continue
        answer = predict.answer(snapshot.model, name, output, top_k)
        if kind.per_pixel:
            classes = snapshot.model.task(name).spec.classes
            answer["classes"] = _with_colours(answer["classes"], classes)
        answers[name] = {"kind": kind.name, "answer": answer}
        if score_of(name) in outputs:
            answers[name]["score"] = predict.shown_score(outputs[score_of(name)])
    return answers


def _with_colours(rows: Sequence[dict[str, Any]], classes: Sequence[str]) -> list[dict[str, Any]]:
    """The classes of a mask with their colours in it."""
    colours = palette(len(classes))
    return [
        {**row, "colour": "#" + bytes(colours[classes.index(row["class"])]).hex()} for row in rows
    ]


def attention_maps(snapshot: Snapshot, name: str, pixels: Tensor) -> dict[str, Any]:
    """The attention of a task in one image (1, 3, h, w): of its class token, layer by layer.

    Of side patches there is one entry: what is pooled of them.
    """
    device = snapshot.model.trunk.device
    maps = attention(snapshot.model, name, to_device(pixels, device))
    shared, patches = maps.shares.cpu(), maps.contribution[0].cpu()  # (l, rows, columns)
    if not all(bool(part.isfinite().all()) for part in (shared, patches)):
        raise EngramError(f"The attention of {name!r} is not finite; train the task again.")
    return {
        "task": name,
        "parts": list(PARTS),
        "pooled": maps.pooled,
        "layers": [
            {
                "shares": [round(share, 5) for share in shares.tolist()],
                "patches": [[float(f"{p:.4g}") for p in row] for row in rows.tolist()],
            }
            for shares, rows in zip(shared, patches, strict=True)
        ],
    }


def image_json(
    fields: Mapping[str, Any],
    answers: Mapping[str, Mapping[str, Any]],
    looks: Mapping[str, Any] | None,
) -> bytes:
    """The part of a response about one image.

    Written task by task and layer by layer: other threads wait while one value is written, and a
    thousand classes of many tasks would be a long wait.
    """
    members = [_member(name, value) for name, value in fields.items()]
    members.append(b'"tasks":' + _object(_member(n, a) for n, a in answers.items()))
    if looks is not None:
        rest = [_member(name, value) for name, value in looks.items() if name != "layers"]
        layers = b",".join(_dump(layer) for layer in looks["layers"])
        members.append(b'"looks":' + _object([*rest, b'"layers":[' + layers + b"]"]))
    return _object(members)


def vectors_json(fields: Mapping[str, Any], vectors: Mapping[str, Tensor]) -> bytes:
    """The part of a response about one image: vectors, with the nine digits of float32.

    One that is not finite is an error instead, because JSON has no such numbers.
    """
    members = [_member(name, value) for name, value in fields.items()]
    good = {name: one for name, one in vectors.items() if bool(one.isfinite().all())}
    numbers = {name: b",".join(b"%.9g" % x for x in one.tolist()) for name, one in good.items()}
    members.append(
        b'"vectors":' + _object(_dump(name) + b":[" + row + b"]" for name, row in numbers.items())
    )
    errors = {
        name: f"The vector of {name!r} is not finite for this image; train the task again."
        for name in vectors.keys() - good.keys()
    }
    return _object([*members, *([_member("errors", errors)] if errors else [])])


def _object(members: Iterable[bytes]) -> bytes:
    return b"{" + b",".join(members) + b"}"


def _member(name: str, value: Any) -> bytes:
    return _dump(name) + b":" + _dump(value)


def _dump(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()
