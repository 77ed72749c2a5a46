"""Identity of a run, as a hash: the checkpoint of another run is refused."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

import torch

from engram.backbones.shape import BackboneShape
from engram.data.datasets import Dataset, Splits
from engram.data.folds import Integers
from engram.data.python_data import Items
from engram.data.source import Arrays, Files, Rows
from engram.model import MemoryViT
from engram.tasks.spec import TaskSpec
from engram.train.recipe import Recipe


def identity_of(
    model: MemoryViT, tasks: Sequence[tuple[TaskSpec, float, float]], splits: Splits, recipe: Recipe
) -> str:
    """A hash of all that decides the weights: backbone, tasks, recipe and data.

    `tasks` are specs, each with its learning rate and weight decay.
    """
    free = {"evaluations", "checkpoint_seconds", "max_bad", "cache", "cache_gb", "workers"}
    if recipe.patience:  # then the evaluations decide when to stop
        free.remove("evaluations")
    config, preprocessing = model.backbone.config, model.preprocessing
    shape = BackboneShape.measure(model.backbone)
    parents = {parent for spec, _, _ in tasks for parent in spec.extends}
    decides: dict[str, Any] = {
        "backbone": [model.backbone.fingerprint, config.heads, config.activation, config.antialias],
        "preprocessing": preprocessing.to_dict(),
        "parents": {name: model.engram(name).content for name in sorted(parents)},
        "tasks": [(repr(spec.fitted(shape)), lr, decay) for spec, lr, decay in tasks],
        "recipe": {k: v for k, v in recipe.to_dict().items() if k not in free},
        "data": [samples_of(splits["train"]), samples_of(splits["val"])],
    }
    if model.backbone.stored != "fp32":
        decides["backbone"].append(model.backbone.stored)
    if splits.legend is not None:
        decides["masks"] = [*splits.legend.values, splits.legend.ignore]
    return hashlib.sha256(json.dumps(decides, default=str).encode()).hexdigest()


def samples_of(dataset: Dataset) -> list[Any]:
    """Labels and names of a split's samples, without reading every file."""
    masks = [] if dataset.masks is None else _names(dataset.masks, dataset.order)
    found = [dataset.labels.tolist(), _names(dataset.rows, dataset.order), masks]
    return found if dataset.groups is None else [*found, dataset.groups.tolist()]


def _names(rows: Rows, order: Integers) -> list[Any]:
    """Names and sizes of files, without the folder they share: a dataset may have been moved.

    For arrays it is a hash of their content, for objects of Python of some of their images, for
    everything else the row numbers.
    """
    if isinstance(rows, Items):
        return [rows.content(), *order.tolist()]
    if isinstance(rows, Arrays):
        pixels = rows.pixels.contiguous().flatten().view(torch.uint8)
        return [hashlib.sha256(pixels.numpy().data).hexdigest(), *order.tolist()]
    if not isinstance(rows, Files):
        return list(order.tolist())
    paths = [os.path.abspath(path) for path in rows.paths]
    shared = os.path.commonpath(paths)
    return [(paths[row].removeprefix(shared), _size(paths[row])) for row in order]


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:  # it will be listed as unreadable
        return -1
