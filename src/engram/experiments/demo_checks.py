"""What the demo measures: predictions, the unchanged backbone, passes in turn, attention unmasked.

Every function takes its batches from the caller, which may show progress while they are consumed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.data.datasets import Dataset
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.methods.forward import BackbonePass, forward_tasks, full_attention
from engram.methods.memory import Memory, Stream
from engram.model import MemoryViT
from engram.vit import ViT


def read_images(model: MemoryViT, dataset: Dataset, samples: Iterable[int]) -> Tensor:
    """Images as the model takes them: (images, 3, height, width)."""
    views = [evaluation_view(dataset.read(i), model.preprocessing) for i in samples]
    return normalise(torch.from_numpy(np.stack(views)), model.preprocessing)


def accuracy(logits: Tensor, dataset: Dataset) -> float:
    right = (logits.argmax(1).cpu().numpy() == dataset.labels).mean()
    return round(float(right), 4)


@torch.inference_mode()
def predict_batches(
    model: MemoryViT, tasks: Sequence[str], batches: Iterable[Tensor]
) -> dict[str, Tensor]:
    """The logits of these tasks for all batches."""
    found = [model(batch, tasks=list(tasks)) for batch in batches]
    return {name: torch.cat([logits[name] for logits in found]) for name in tasks}


@torch.inference_mode()
def base_is_identical(model: MemoryViT, plain: ViT, batches: Iterable[Tensor]) -> bool:
    """Whether `base` equals, bit for bit, the logits of the plain backbone, which has no tasks."""
    same = [torch.equal(model(batch, exact=True)["base"], plain(batch)) for batch in batches]
    return all(same) and plain.fingerprint == model.backbone.fingerprint


@torch.inference_mode()
def time_passes(model: MemoryViT, pixels: Tensor, turns: Iterable[int]) -> dict[str, float]:
    """Milliseconds per image: one pass for all tasks, a pass for each, and the plain backbone.

    They take turns, so that all are measured under the same load; turn 0 is a warm-up.
    """

    def pass_per_task() -> None:
        for name in ("base", *model.tasks):
            model(pixels, tasks=[name])

    passes: dict[str, Callable[[], object]] = {
        "one_pass": lambda: model(pixels),
        "pass_per_task": pass_per_task,
        "plain_backbone": lambda: model.backbone(pixels),
    }
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for turn in turns:
        for name, run in passes.items():
            start = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    each = {name: 1000 * statistics.median(t) / len(pixels) for name, t in seconds.items()}
    ratio = each["pass_per_task"] / each["one_pass"]
    return {**{f"{name}_ms": round(ms, 3) for name, ms in each.items()}, "ratio": round(ratio, 2)}


def remove_mask(
    model: MemoryViT, task: str, test: Dataset, batches: Iterable[Tensor]
) -> dict[str, Any]:
    """The accuracy of a task as other tasks are added, with and without the mask between them.

    And how many answers of `base` change if the backbone's own tokens read all cells.
    """
    others = [name for name in model.tasks if name != task]
    neighbours = [others[:count] for count in range(len(others) + 1)]
    found = [_unmasked_logits(model, task, neighbours, batch) for batch in batches]
    logits = {key: torch.cat([part[key] for part in found]) for key in found[0]}
    steps = [
        {
            "beside": added,
            "with_mask": accuracy(logits[f"masked {len(added)}"], test),
            "without_mask": accuracy(logits[f"unmasked {len(added)}"], test),
        }
        for added in neighbours
    ]
    changed = logits["base"].argmax(1) != logits["base unmasked"].argmax(1)
    share = round(float(changed.float().mean()), 4)
    return {"task": task, "steps": steps, "base_answers_changed": share}


@torch.inference_mode()
def _unmasked_logits(
    model: MemoryViT, first: str, neighbours: Sequence[Sequence[str]], pixels: Tensor
) -> dict[str, Tensor]:
    """Logits of a task with and without the mask between it and its neighbours, and of base.

    Without it, the task reads the class tokens and cells of all neighbours, and the backbone's own
    tokens read all cells. The backbone runs once for all that leave it unchanged.
    """
    backbone, task = model.backbone, model.task(first)
    x = backbone.embed(pixels)
    rotation = backbone.rotation(pixels.shape[-2:], x.shape[1])
    alone = BackbonePass(backbone, x, keep=x.shape[1], rotation=rotation)
    views = list(alone)
    logits = {"base": _base_logits(backbone, alone.tokens)}
    for names in neighbours:
        streams = [_stream(model, name) for name in names]
        for what, reads in (("masked", ()), ("unmasked", tuple(range(len(names))))):
            memory = Memory(backbone, [*streams, _stream(model, first, reads)])
            tokens = forward_tasks(backbone, views, memory, len(x))
            logits[f"{what} {len(names)}"] = task.head(backbone.norm(tokens[:, -1]))
    tensors = [task.input().tensors for task in model.tasks.values()]
    cells = [own["cells"].detach() for own in tensors if "cells" in own]
    tokens = full_attention(backbone, x, torch.cat(cells, dim=1), rotation=rotation)
    logits["base unmasked"] = _base_logits(backbone, tokens)
    return logits


def _base_logits(backbone: ViT, tokens: Tensor) -> Tensor:
    assert backbone.head is not None
    logits: Tensor = backbone.head(tokens, backbone.norm(tokens))
    return logits


def _stream(model: MemoryViT, name: str, reads: tuple[int, ...] = ()) -> Stream:
    tensors = model.task(name).input().tensors
    return Stream(name, tensors["class_token"], tensors["cells"], reads)
