"""What the service says of its tasks."""

from __future__ import annotations

from typing import Any

from engram.serve.catalogue import Snapshot
from engram.serve.schemas import TaskInfo
from engram.util.text import without_folder


def task_info(snapshot: Snapshot, name: str) -> dict[str, Any]:
    """One task, as the list has it."""
    engram = snapshot.told[name]
    spec = engram.spec
    known = {
        "name": spec.name,
        "kind": spec.kind,
        "classes": len(spec.classes),
        "regime": spec.regime,
        "cells": spec.cells if spec.parts.cells else 0,
        "extends": list(spec.extends),
        "parameters": engram.parameters,
        "content": snapshot.contents[name],
        "metrics": engram.metrics,
    }
    assert known.keys() == TaskInfo.model_fields.keys()
    return known


def task_detail(snapshot: Snapshot, name: str) -> dict[str, Any]:
    """One task, with its classes and how it was made."""
    snapshot.engram(name)  # a Problem if there is none
    engram = snapshot.told[name]
    return {
        **task_info(snapshot, name),
        "class_names": list(engram.spec.classes),
        "created": engram.created,
        "library": engram.library,
        "recipe": engram.recipe,
    }


def task_list(snapshot: Snapshot, engine: str, attaching: bool) -> dict[str, Any]:
    """Everything that answers now, and what computes it."""
    trunk = snapshot.model.trunk
    head = trunk.config.head
    return {
        "tag": snapshot.tag,
        "trunk": {
            "source": without_folder(trunk.source),
            "fingerprint": trunk.fingerprint,
            "classes": head.classes if head is not None and head.classes else None,
            "image_size": list(snapshot.preprocessing.size),
            "layers": trunk.config.depth,
        },
        "tasks": [task_info(snapshot, name) for name in snapshot.told],
        "engine": engine,
        "attaching": attaching,
    }
