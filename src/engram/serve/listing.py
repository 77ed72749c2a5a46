"""What the service says of its tasks."""

from __future__ import annotations

import os
from typing import Any

from engram.files import Engram
from engram.serve.catalogue import Snapshot
from engram.serve.schemas import TaskInfo


def task_info(snapshot: Snapshot, engram: Engram) -> dict[str, Any]:
    """One task, as the list has it."""
    spec = engram.spec
    known = {
        "name": spec.name,
        "kind": spec.kind,
        "classes": len(spec.classes),
        "regime": spec.regime,
        "cells": spec.cells if spec.parts.cells else 0,
        "extends": list(spec.extends),
        "parameters": engram.parameters,
        "content": snapshot.contents[spec.name],
        "metrics": engram.header()["metrics"],
    }
    assert known.keys() == TaskInfo.model_fields.keys()
    return known


def task_detail(snapshot: Snapshot, name: str) -> dict[str, Any]:
    """One task, with its classes and how it was made."""
    engram = snapshot.engram(name)
    return {
        **task_info(snapshot, engram),
        "class_names": list(engram.spec.classes),
        "created": engram.created,
        "library": engram.library,
        "recipe": engram.header()["recipe"],
    }


def task_list(snapshot: Snapshot, engine: str, attaching: bool) -> dict[str, Any]:
    """Everything that answers now, and what computes it."""
    trunk = snapshot.model.trunk
    head = trunk.config.head
    return {
        "tag": snapshot.tag,
        "trunk": {
            "source": os.path.basename(trunk.source.rstrip("/"))
            if os.path.isabs(trunk.source)  # where it lies on this machine is nobody's business
            else trunk.source,
            "fingerprint": trunk.fingerprint,
            "classes": head.classes if head is not None and head.classes else None,
            "image_size": list(snapshot.preprocessing.size),
            "layers": trunk.config.depth,
        },
        "tasks": [task_info(snapshot, engram) for engram in snapshot.bundle.engrams],
        "engine": engine,
        "attaching": attaching,
    }
