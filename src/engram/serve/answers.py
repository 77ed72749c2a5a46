"""What a task says about an image, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from engram.looks import PARTS, looks
from engram.serve.catalogue import Snapshot


def answer(snapshot: Snapshot, name: str, logits: Tensor, top_k: int) -> dict[str, Any]:
    """The kind of a task, and what it says about one image: the likeliest classes, best first."""
    kind, labels = "classification", snapshot.model.trunk.labels
    classes: Sequence[str] = labels or tuple(str(i) for i in range(len(logits)))
    if name != "base":
        spec = snapshot.model.task(name).spec
        kind, classes = spec.kind, spec.classes
    best = logits.float().softmax(-1).topk(min(top_k, len(classes)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return {
        "kind": kind,
        "answer": [{"class": classes[i], "probability": round(p, 6)} for i, p in pairs],
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
