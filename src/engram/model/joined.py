"""Cache of joined tasks across calls: stacked weights, and keys and values of cells."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engram.methods.method import Joined, TaskInput
from engram.util.devices import autocast_dtype
from engram.util.tensors import VersionedCache
from engram.vit import ViT

_SELECTIONS = 8  # of tasks that are kept, beside one for every task


class JoinCache:
    """Joined tasks by family and names, as long as no parameter changes.

    torch.compile cannot ask whether one has changed: a compiled pass joins every time. In a copy of
    a model that is to be traced, `freeze` makes constants of what is joined from then on.
    """

    def __init__(self) -> None:
        self._cache: VersionedCache[Joined] = VersionedCache(_SELECTIONS)
        self._frozen: dict[object, Joined] | None = None

    def clear(self, tasks: int | None = None) -> None:
        """Forget everything; with a number of tasks, make room for each of them joined alone."""
        self._cache.clear()
        if tasks is not None:
            self._cache.size = _SELECTIONS + tasks

    def freeze(self) -> None:
        self._frozen = {}

    def join(self, tasks: Sequence[TaskInput], backbone: ViT, trains: bool) -> Joined:
        """Join tasks of one family with all they extend, parents first."""
        family = tasks[0].method.family()
        key = (family, *(task.name for task in tasks))
        if self._frozen is not None:
            if key not in self._frozen:
                self._frozen[key] = family.join(tasks, backbone)
            return self._frozen[key]
        if trains:
            self.clear()  # some optimisers write where `version` does not see it
        if trains or torch.compiler.is_compiling():
            return family.join(tasks, backbone)
        own = [tensor for task in tasks for tensor in task.tensors.values()]
        return self._cache.get(
            (autocast_dtype(backbone.device), *key),
            [*own, *_backbone_tensors(backbone)],
            lambda: family.join(tasks, backbone),
        )


def _backbone_tensors(backbone: ViT) -> list[Tensor]:
    """All of the backbone that keys and values of cells are made from."""
    found: list[Tensor] = [
        p for b in backbone.layers for m in (b.norm1, b.qkv) for p in m.parameters()
    ]
    found += [p for p in (backbone.prefix_position,) if p is not None]
    if backbone.pre_norm is not None:
        found += backbone.pre_norm.parameters()
    return found
