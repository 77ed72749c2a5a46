"""Methods that change the backbone's own tokens: each needs a pass of its own.

In `memory` every token reads the cells, the paper's form with the best accuracy for one task;
`class` is its "Head + Class", `adapter` and `memory+adapter` are those of its Table 4, and `full`
trains everything.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engram.backbones.shape import BackboneShape
from engram.errors import EngramError
from engram.methods.adapters import adapter_parameters
from engram.methods.attention_maps import AttentionMaps, first_token_maps
from engram.methods.forward import full_attention
from engram.methods.masked import class_token
from engram.methods.method import (
    Batch,
    Cached,
    Features,
    HeadInput,
    Initial,
    Method,
    OwnPassMethod,
    TaskInput,
    TaskShape,
    keys_values_macs,
    layers_macs,
    parameter_count,
)
from engram.methods.method_flags import shared_setting
from engram.vit import ViT


@dataclass(frozen=True)
class ClassToken(OwnPassMethod):
    """A class token of the task's own in the place of the backbone's, and a head."""

    name: ClassVar[str] = "class"
    about: ClassVar[str] = "class token + head"
    rates: ClassVar[Mapping[str, float]] = {"adamw": 1e-3, "sgd": 0.3}

    @property
    def _memory(self) -> tuple[int, str]:
        """Cells and how they pass from layer to layer, where a subclass has them."""
        return 0, "fresh"

    def parameters(self, task: TaskShape) -> dict[str, Initial]:
        return {"class_token": class_token(1, task.backbone.width, task.class_init)}

    def macs(self, task: TaskShape, n: int, ancestors: Sequence[Method]) -> tuple[int, int]:
        shape, parameters, (cells, update) = task.backbone, self.parameters(task), self._memory
        tokens, once = n + ("class_token" in parameters and not shape.class_token), 0
        adapters = {k: v for k, v in parameters.items() if k.startswith("adapters.")}
        if update == "fresh":
            macs = layers_macs(shape, tokens) + 2 * shape.width * tokens * cells * shape.depth
            once = keys_values_macs(shape, cells)
        else:  # Figure 2b: the cells are tokens like the others
            tokens += cells
            macs = layers_macs(shape, tokens)
        return macs + tokens * parameter_count(adapters) - layers_macs(shape, n), once

    def own_pass(
        self, tasks: Sequence[TaskInput], task: TaskInput, backbone: ViT, pixels: Tensor
    ) -> HeadInput:
        raw = full_attention(backbone, pixels, _with_cells(task, tasks), self._memory[1])
        size = (pixels.shape[-2], pixels.shape[-1])
        features = Features(Batch(backbone, size, pixels.device), Cached(raw=raw))
        own = features.tokens[:, 0] if "class_token" in task.tensors else features.pooled
        return HeadInput(own, features.patches_for(task))

    def attention_maps(
        self, tasks: Sequence[TaskInput], task: TaskInput, backbone: ViT, pixels: Tensor
    ) -> AttentionMaps:
        tensors = _with_cells(task, tasks)
        return first_token_maps(backbone, pixels, task.name, tensors, self._memory[1])


def _with_cells(task: TaskInput, tasks: Sequence[TaskInput]) -> Mapping[str, Tensor]:
    """A task's tensors with the cells of all others behind its own (the paper's section 4.4)."""
    if "cells" not in task.tensors:
        return task.tensors
    others = [one.tensors["cells"] for one in tasks if one is not task and "cells" in one.tensors]
    return {**task.tensors, "cells": torch.cat([task.tensors["cells"], *others], 1)}


@dataclass(frozen=True)
class FullMemory(ClassToken):
    """Cells that every token reads, class token and head."""

    name: ClassVar[str] = "memory"
    about: ClassVar[str] = "cells + class token + head, every token reads the cells"

    cells: int = shared_setting("cells")
    update: str = shared_setting("update")

    @property
    def _memory(self) -> tuple[int, str]:
        return self.cells, self.update

    def concatenates(self, other: Method) -> bool:
        same = type(other) is type(self)
        return same and isinstance(other, FullMemory) and self.update == other.update

    def parameters(self, task: TaskShape) -> dict[str, Initial]:
        layers = 1 if self.update == "propagate" else task.backbone.depth
        cells = Initial((layers, self.cells, task.backbone.width), std=0.02)
        return {"cells": cells, **super().parameters(task)}


@dataclass(frozen=True)
class FullAdapter(ClassToken):
    """Bottleneck adapters that every token passes through, class token and head."""

    name: ClassVar[str] = "adapter"
    about: ClassVar[str] = "adapters + class token + head"
    rates: ClassVar[Mapping[str, float]] = {"adamw": 1e-3, "sgd": 0.1}

    adapter_width: int = shared_setting("adapter_width")

    def parameters(self, task: TaskShape) -> dict[str, Initial]:
        depth, width = task.backbone.depth, task.backbone.width
        return super().parameters(task) | adapter_parameters(depth, width, self.adapter_width)


@dataclass(frozen=True)
class FullMemoryAdapter(FullAdapter, FullMemory):
    """Cells and adapters for every token, class token and head."""

    name: ClassVar[str] = "memory+adapter"
    about: ClassVar[str] = "cells + adapters + class token + head"


@dataclass(frozen=True)
class FullTuning(ClassToken):
    """Everything trains: the task has a backbone of its own."""

    name: ClassVar[str] = "full"
    about: ClassVar[str] = "everything"
    rates: ClassVar[Mapping[str, float]] = {"adamw": 1e-4, "sgd": 1e-2}

    def parameters(self, task: TaskShape) -> dict[str, Initial]:
        return {}

    def backbone_parameters(self, backbone: BackboneShape) -> int:
        return backbone.parameters

    def own_backbone(self, backbone: ViT) -> ViT | None:
        if backbone.stored != "fp32":
            raise EngramError(
                f"The regime {self.name} trains the backbone itself, whose weights are in "
                f"{backbone.stored}; load it in fp32 (backbone_dtype)."
            )
        own = copy.deepcopy(backbone)
        if own.head is not None and own.config.pooler:
            own.head.hidden = own.head.linear = None  # the pooling trains as well
        else:
            own.head = None
        return own.requires_grad_(True)
