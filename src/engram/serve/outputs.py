"""A forward pass of a snapshot, and its outputs about each image: tensors by name.

A task's output has the name of the task. A segmentation's is a mask, because its logits are larger
by the number of its classes; those are `logits_name(task)`. Where a task tells how familiar the
image looks, that is `familiarity_name(task)`. No task can have such a name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from engram.inference.engine import familiarity_name, stack_views
from engram.serve.catalogue import Snapshot
from engram.serve.schemas import LOGITS
from engram.util.allocator import return_freed_memory

Outputs = dict[str, Tensor]  # of one image, by name

MANY_VALUES = 1_000_000  # outputs that leave holes of megabytes in memory


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


def kept_values(snapshot: Snapshot, names: Iterable[str], embeds: bool = False) -> int:
    """Values that are kept of one image until it is answered."""
    if embeds:
        return sum(snapshot.model.task(name).head.vector_size for name in names)
    return sum(math.prod(output_shape(snapshot, name)) for name in names)


def computed_values(snapshot: Snapshot, names: Iterable[str]) -> int:
    """Values that a pass computes per image: a mask is made of logits, and so costs its vector."""
    tasks = {task_name(name) for name in names}
    return sum(math.prod(snapshot.shapes.get(task, ())) for task in tasks)


def forward_asked(
    snapshot: Snapshot, views: Sequence[Tensor], asked: Sequence[Sequence[str]], embeds: bool
) -> list[Outputs]:
    """Outputs that each view is asked for, or vectors of tasks, fetched; nothing else is kept.

    One pass. Where views are asked for different tasks, the model computes only those; an exported
    graph computes for all what any of them is asked for.
    """
    tasks = [list(dict.fromkeys(task_name(name) for name in own)) for own in asked]
    wanted = {name for own in tasks for name in own}
    names = [name for name in snapshot.embedding_names if name in wanted]
    alike = len({frozenset(own) for own in tasks}) == 1
    graph = not embeds and snapshot.computing is not snapshot.engine
    if alike or graph or not all(snapshot.model.task(n).method.shares_pass for n in names):
        outputs = forward_views(snapshot, views, names, embeds)
        places: Mapping[str, Sequence[int]] = {name: range(len(views)) for name in names}
    else:
        outputs = forward_views(snapshot, views, (), embeds, route=tasks)
        places = snapshot.model.rows(tasks)
    found = fetch(snapshot, outputs, places, asked)
    del outputs
    if len(views) * computed_values(snapshot, wanted) > MANY_VALUES:
        return_freed_memory()
    return found


def forward_views(
    snapshot: Snapshot,
    views: Sequence[Tensor],
    names: Sequence[str],
    embeds: bool = False,
    route: Sequence[Sequence[str]] | None = None,
) -> Outputs:
    """Outputs and familiarity of these tasks for all views, or vectors, where they are computed.

    With a `route`, those of each view's own tasks, as `MemoryViT.rows` says. An exported graph has
    no routes.
    """
    own = snapshot.computing
    pixels = stack_views(views, snapshot.model.preprocessing, own.device)
    if embeds:
        return own.embed(pixels, names, route)
    if own is snapshot.engine:
        return own.run(pixels, names, True, route)
    return snapshot.engine.run(pixels, names, familiarity=True)


def fetch(
    snapshot: Snapshot,
    computed: Mapping[str, Tensor],
    places: Mapping[str, Sequence[int]],
    asked: Sequence[Sequence[str]],
) -> list[Outputs]:
    """Outputs or vectors of each image, on the CPU, copied from those of a pass.

    `places` has, by task, the images that the rows of `computed` belong to.
    """
    rows = {task: {image: i for i, image in enumerate(own)} for task, own in places.items()}
    forms: dict[str, Sequence[Tensor] | Tensor] = {}
    for name in dict.fromkeys(name for own in asked for name in own):
        whole, familiarity = computed[task_name(name)], familiarity_name(name)
        masks = whole.ndim > 2 and is_mask(snapshot, name)  # a vector is no logits
        forms[name] = _masks(snapshot, name, whole) if masks else whole.float().cpu()
        if familiarity in computed:
            forms[familiarity] = computed[familiarity].float().cpu()
    found: list[Outputs] = []
    for i, own in enumerate(asked):
        keys = [
            (name, key) for name in own for key in (name, familiarity_name(name)) if key in forms
        ]
        found.append({key: forms[key][rows[task_name(name)][i]].clone() for name, key in keys})
    return found


def _masks(snapshot: Snapshot, name: str, logits: Tensor) -> Sequence[Tensor]:
    """The masks that logits make, uint8 (h, w); of logits that are not finite, one NaN."""
    masks = snapshot.model.task(name).kind.condensed(logits).cpu()
    return [
        mask if is_finite(own) else torch.tensor(torch.nan)
        for mask, own in zip(masks, logits, strict=True)
    ]


def is_finite(output: Tensor) -> bool:
    """Whether all values are finite. Unlike `isfinite`, it takes no memory of the same size."""
    return all(math.isfinite(one) for one in output.aminmax())
