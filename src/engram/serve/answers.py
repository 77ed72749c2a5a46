"""What a task says about an image, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from engram.looks import PARTS, looks
from engram.serve.catalogue import Snapshot


def kind_of(snapshot: Snapshot, name: str) -> str:
    return "classification" if name == "base" else snapshot.model.task(name).spec.kind


def classes_of(snapshot: Snapshot, name: str, count: int) -> Sequence[str]:
    if name != "base":
        return snapshot.model.task(name).spec.classes
    return snapshot.model.trunk.labels or tuple(str(i) for i in range(count))


def answer(snapshot: Snapshot, name: str, logits: Tensor, top_k: int) -> dict[str, Any]:
    """The likeliest classes of one image, the first being the answer."""
    classes = classes_of(snapshot, name, len(logits))
    best = logits.float().softmax(-1).topk(min(top_k, len(classes)))
    return {
        "kind": kind_of(snapshot, name),
        "classes": [
            {"index": i, "class": classes[i], "probability": round(p, 6)}
            for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ],
    }


def look(snapshot: Snapshot, name: str, pixels: Tensor) -> dict[str, Any]:
    """Where the class token of a task looked in one image (1, 3, h, w), layer by layer."""
    seen = looks(snapshot.model, name, pixels)
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
