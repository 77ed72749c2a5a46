"""Table 1 without its mask, for comparison: tasks read each other, the backbone reads all cells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engram.data.datasets import Dataset
from engram.methods import Base
from engram.methods.forward import full_attention
from engram.model import MemoryViT


@torch.inference_mode()
def remove_mask(
    model: MemoryViT, task: str, test: Dataset, batches: Iterable[Tensor]
) -> dict[str, Any]:
    """The accuracy of a task as other tasks are added, with and without the mask between them.

    And how many answers of the backbone change if its own tokens read all cells.
    """
    backbone, others = model.backbone, [name for name in model.tasks if name != task]
    # Beside the task stand copies of it that read the others, as if it extended them.
    steps = {f"{task}-{count}": others[:count] for count in range(len(others) + 1)}
    beside = MemoryViT(backbone).eval()
    for name in (*others, task):
        _attach(beside, model, name, name)
    for copy, added in steps.items():
        _attach(beside, model, task, copy, added)
    cells = torch.cat([one.input().tensors["cells"] for one in model.tasks.values()], dim=1)
    assert backbone.head is not None
    right, changed = defaultdict[str, list[Tensor]](list), list[Tensor]()
    labels = iter(torch.from_numpy(test.labels))
    for batch in batches:
        true = torch.stack([next(labels) for _ in batch])
        for copy, added in steps.items():
            found = beside(batch, tasks=[Base.name, *added, task, copy])
            for key, name in ((copy, copy), (f"{copy}, masked", task)):
                right[key].append(found[name].argmax(1).cpu() == true)
        tokens = full_attention(backbone, batch, {"cells": cells})
        logits = backbone.head(tokens, backbone.norm(tokens))
        changed.append(logits.argmax(1) != found[Base.name].argmax(1))

    def share(parts: list[Tensor]) -> float:
        return round(float(torch.cat(parts).float().mean()), 4)

    def step(copy: str) -> dict[str, Any]:
        masked, unmasked = share(right[f"{copy}, masked"]), share(right[copy])
        return {"beside": steps[copy], "with_mask": masked, "without_mask": unmasked}

    return {"task": task, "steps": list(map(step, steps)), "base_answers_changed": share(changed)}


def _attach(
    to: MemoryViT, model: MemoryViT, task: str, name: str, reads: Sequence[str] = ()
) -> None:
    """Attach a task of a model under another name, as if it extended these and no others."""
    engram, parents = model.engram(task), {other: to.engram(other).content for other in reads}
    spec = replace(engram.spec, name=name, extends=tuple(reads))
    to.attach(replace(engram, spec=spec, parents=parents))
