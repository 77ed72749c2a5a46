"""What a task says about an image, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from engram.errors import EngramError
from engram.images.masks import palette
from engram.inference import predict
from engram.inference.attention import PARTS, attention
from engram.inference.predict import kind_of
from engram.serve.catalogue import Snapshot


def answer(
    snapshot: Snapshot, outputs: Mapping[str, Tensor], top_k: int
) -> dict[str, dict[str, Any]]:
    """By task, its kind and what it says about one image, from its output of the model.

    One whose output is not finite, which JSON cannot hold, gets an error: the others answer.
    """
    answers: dict[str, dict[str, Any]] = {}
    for name, output in outputs.items():
        kind = kind_of(snapshot.model, name)
        if not bool(output.isfinite().all()):
            problem = f"{name!r} has numbers that are not finite for this image; train it again."
            answers[name] = {"kind": kind.name, "error": problem}
            continue
        found = predict.answer(snapshot.model, name, output, top_k)
        if kind.per_pixel:
            classes = snapshot.model.task(name).spec.classes
            found["classes"] = _coloured(found["classes"], classes)
        answers[name] = {"kind": kind.name, "answer": found}
    return answers


def _coloured(rows: Sequence[dict[str, Any]], classes: Sequence[str]) -> list[dict[str, Any]]:
    """The classes of a mask with the colours that they have in it."""
    colours = palette(len(classes))
    return [
        {**row, "colour": "#" + bytes(colours[classes.index(row["class"])]).hex()} for row in rows
    ]


def look(snapshot: Snapshot, name: str, pixels: Tensor) -> dict[str, Any]:
    """Where the class token of a task looked in one image (1, 3, h, w), layer by layer."""
    seen = attention(snapshot.model, name, pixels)
    if not bool(seen.shares.isfinite().all()):
        raise EngramError(f"{name!r} looks with numbers that are not finite; train it again.")
    patches = seen.patches[0]  # (l, rows, columns)
    return {
        "task": name,
        "parts": list(PARTS),
        "layers": [
            {
                "shares": [round(share, 5) for share in shares.tolist()],
                "patches": [[round(p, 6) for p in row] for row in rows.tolist()],
            }
            for shares, rows in zip(seen.shares, patches, strict=True)
        ],
    }
