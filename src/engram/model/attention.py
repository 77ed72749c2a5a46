"""Attention of one task over images: the maps of its method on the grid of patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram.methods.attention_maps import SOURCES as SOURCES
from engram.model.passes import task_inputs

if TYPE_CHECKING:
    from engram.model.memory_vit import MemoryViT


@dataclass(frozen=True, eq=False)
class Attention:
    """Attention of one task's class token, over all heads (and averaged over its class tokens).

    Where something else reads the patches there is one map, `pooled`, in place of layers.
    """

    weights: Tensor  # (b, l, rows, columns), averaged over heads
    contribution: Tensor  # (b, l, rows, columns)
    shares: Tensor  # of the weights by source, (l, len(SOURCES)), averaged over the images
    pooled: bool = False


@torch.inference_mode()
def attention(model: MemoryViT, name: str, pixels: Tensor) -> Attention:
    """What a task, or the backbone ("base"), reads of these images.

    An EngramError where the answer comes from no class token but from an average over patches.
    """
    task = model.task(name)
    backbone = task.backbone or model.backbone
    tasks = task_inputs(model, [name] if task.method.shares_pass else list(model.tasks))
    own = next(one for one in tasks if one.name == name)
    with backbone.autocast():
        maps = task.method.attention_maps(tasks, own, backbone, pixels)
    weights, contribution = backbone.to_fp32(maps.weights), backbone.to_fp32(maps.contribution)
    rows, columns = (side // backbone.config.patch for side in pixels.shape[-2:])
    shape = (*weights.shape[:2], rows, columns)
    shares = backbone.to_fp32(maps.shares).mean(0)
    return Attention(weights.view(shape), contribution.view(shape), shares, maps.pooled)
