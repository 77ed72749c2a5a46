"""Outputs of a pass about one image: tensors by name, and how many values they have.

A task's output has the name of the task. A segmentation's is a mask, because its logits are larger
by the number of its classes; those are `logits_name(task)`. Where a task tells how familiar the
image looks, that is `familiarity_name(task)`. No task can have such a name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from engram.inference.engine import familiarity_name, on_cpu
from engram.serve.catalogue import Snapshot
from engram.serve.routes.schemas import LOGITS

Outputs = dict[str, Tensor]  # of one image, by name

VALUE_BYTES = 4  # of a value in memory, at most


def logits_name(task: str) -> str:
    return task + LOGITS


def task_name(output: str) -> str:
    return output.removesuffix(LOGITS)


def output_shape(snapshot: Snapshot, name: str) -> tuple[int, ...]:
    """The shape of an output for one image."""
    shape = snapshot.shapes[task_name(name)]
    return shape[1:] if is_mask(snapshot, name) else shape


def is_mask(snapshot: Snapshot, name: str) -> bool:
    return task_name(name) == name and snapshot.model.task(name).kind.per_pixel


def vector_size(snapshot: Snapshot, name: str) -> int:
    """Numbers in the vector of a task, or of base."""
    model = snapshot.model
    if name == "base":
        return int(model.backbone.config.width)
    return int(model.task(name).head.weight.shape[-1])


def kept_values(snapshot: Snapshot, names: Iterable[str], embeds: bool = False) -> int:
    """Values that are kept of one image until it is answered."""
    if embeds:
        return sum(vector_size(snapshot, name) for name in names)
    return sum(math.prod(output_shape(snapshot, name)) for name in names)


def computed_values(snapshot: Snapshot, names: Iterable[str]) -> int:
    """Values that a pass computes per image: a mask is made of logits, and so costs its vector."""
    tasks = {task_name(name) for name in names}
    return sum(math.prod(snapshot.shapes.get(task, ())) for task in tasks)


def fetch(
    snapshot: Snapshot,
    computed: Mapping[str, Tensor],
    places: Mapping[str, Sequence[int]],
    asked: Sequence[Sequence[str]],
) -> list[Outputs]:
    """For each image its own outputs or vectors, on the CPU, from those of a pass.

    `places` has, by task, the images that the rows of `computed` belong to.
    """
    rows = {task: {image: i for i, image in enumerate(own)} for task, own in places.items()}
    forms: dict[str, Sequence[Tensor] | Tensor] = {}
    for name in dict.fromkeys(name for own in asked for name in own):
        whole, familiarity = computed[task_name(name)], familiarity_name(name)
        is_logits = whole.ndim > 2  # a vector is none
        forms[name] = _masks(snapshot, name, whole) if is_logits else on_cpu({name: whole})[name]
        if familiarity in computed:
            forms |= on_cpu({familiarity: computed[familiarity]})
    found: list[Outputs] = []
    for i, own in enumerate(asked):
        keys = [
            (name, key) for name in own for key in (name, familiarity_name(name)) if key in forms
        ]
        found.append({key: forms[key][rows[task_name(name)][i]] for name, key in keys})
    return found


def copied(outputs: Sequence[Outputs]) -> list[Outputs]:
    """Outputs of images that keep no memory of the pass: a row keeps the whole tensor.

    In the thread of the passes, copies would lie between the large tensors of one pass and the
    next, so this belongs in another thread.
    """
    return [{name: output.clone() for name, output in own.items()} for own in outputs]


def _masks(snapshot: Snapshot, name: str, logits: Tensor) -> Sequence[Tensor] | Tensor:
    """The masks that logits make, uint8 (h, w); of logits that are not finite, one NaN."""
    if not is_mask(snapshot, name):
        return logits.float().cpu()
    masks = snapshot.model.task(name).kind.condensed(logits).cpu()
    return [
        mask if is_finite(own) else torch.tensor(torch.nan)
        for mask, own in zip(masks, logits, strict=True)
    ]


def is_finite(output: Tensor) -> bool:
    """Whether all values are finite. Unlike `isfinite`, it takes no memory of the same size."""
    return all(math.isfinite(one) for one in output.aminmax())
