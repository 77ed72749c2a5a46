"""Table 1 without its mask, for comparison: tasks read each other, the backbone reads all cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from engram.data.datasets import Dataset
from engram.methods.forward import BackbonePass, forward_tasks, full_attention
from engram.methods.memory import Memory, Stream
from engram.model import MemoryViT
from engram.vit import ViT


def remove_mask(
    model: MemoryViT, task: str, test: Dataset, batches: Iterable[Tensor]
) -> dict[str, Any]:
    """The accuracy of a task as other tasks are added, with and without the mask between them.

    And how many answers of the backbone change if its own tokens read all cells.
    """
    others = [name for name in model.tasks if name != task]
    neighbours = [others[:count] for count in range(len(others) + 1)]
    found = [_logits(model, task, neighbours, batch) for batch in batches]
    answers = {key: torch.cat([part[key] for part in found]).argmax(1) for key in found[0]}
    labels = torch.from_numpy(test.labels)

    def accuracy(key: str) -> float:
        return round(float((answers[key].cpu() == labels).float().mean()), 4)

    steps = [
        {
            "beside": added,
            "with_mask": accuracy(f"with mask {len(added)}"),
            "without_mask": accuracy(f"without mask {len(added)}"),
        }
        for added in neighbours
    ]
    changed = (answers["backbone"] != answers["backbone without mask"]).float().mean()
    return {"task": task, "steps": steps, "base_answers_changed": round(float(changed), 4)}


@torch.inference_mode()
def _logits(
    model: MemoryViT, first: str, neighbours: Sequence[Sequence[str]], pixels: Tensor
) -> dict[str, Tensor]:
    """Logits of a task with and without the mask between it and its neighbours, and the backbone's.

    The backbone runs once for all that leave it unchanged.
    """
    backbone, task = model.backbone, model.task(first)
    x = backbone.embed(pixels)
    rotation = backbone.rotation(pixels.shape[-2:], x.shape[1])
    alone = BackbonePass(backbone, x, keep=x.shape[1], rotation=rotation)
    views = list(alone)
    logits = {"backbone": _own_logits(backbone, alone.tokens)}
    for names in neighbours:
        streams = [_stream(model, name) for name in names]
        for what, reads in (("with mask", ()), ("without mask", tuple(range(len(names))))):
            memory = Memory(backbone, [*streams, _stream(model, first, reads)])
            tokens = forward_tasks(backbone, views, memory, len(x))
            logits[f"{what} {len(names)}"] = task.head(backbone.norm(tokens[:, -1]))
    cells = [task.input().tensors["cells"].detach() for task in model.tasks.values()]
    tokens = full_attention(backbone, pixels, {"cells": torch.cat(cells, dim=1)})
    logits["backbone without mask"] = _own_logits(backbone, tokens)
    return logits


def _own_logits(backbone: ViT, tokens: Tensor) -> Tensor:
    assert backbone.head is not None
    logits: Tensor = backbone.head(tokens, backbone.norm(tokens))
    return logits


def _stream(model: MemoryViT, name: str, reads: tuple[int, ...] = ()) -> Stream:
    tensors = model.task(name).input().tensors
    return Stream(name, tensors["class_token"], tensors["cells"], reads)
