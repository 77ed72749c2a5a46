"""Attention maps: what a class token reads at every layer, of the picture and of its cells.

A task with side patches has no class token: its map is what its queries pool after the last layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engram.errors import EngramError
from engram.memory import forward_fast
from engram.model import MemoryViT
from engram.tasks.task import Task
from engram.vit import ViT

#: What a class token can read. The shares of `Attention` are in this order and add up to 1.
PARTS = (
    "the picture's patches",
    "the ViT's own class token",
    "itself",
    "its cells",
    "the tasks it extends",
)


@dataclass(frozen=True, eq=False)
class Attention:
    """Attention of one task's class token, averaged over heads (and over its class tokens).

    Of side patches there is one map, `pooled`: averaged over the queries that pool them.
    """

    patches: Tensor  # (b, l, rows, columns)
    shares: Tensor  # (l, len(PARTS)), averaged over the images
    pooled: bool = False


@torch.inference_mode()
def attention(model: MemoryViT, name: str, pixels: Tensor) -> Attention:
    """What the class token of a task, or of the trunk ("base"), reads of these images.

    An EngramError where the answer comes from no class token but from an average over patches.
    """
    task = None if name == "base" else model.task(name)
    pooled = task is not None and task.spec.parts.side and not task.kind.per_pixel
    trunk = model.trunk if task is None or task.trunk is None else task.trunk
    masked = task is not None and task.spec.parts.masked
    own = pooled or masked or (task is not None and task.class_token is not None)
    if not own and not trunk.config.class_token:
        raise EngramError(
            f"{name!r} has no class token on this trunk, so there is no attention to show."
        )
    if pooled:
        to_patches, shares = _pooled(model, name, pixels)
    elif task is not None and masked:
        to_patches, shares = _masked(model, task, pixels)
    else:
        changing = task if task is not None and task.spec.parts.changes_trunk else None
        to_patches, shares = _plain(model, trunk, changing, pixels)
    patch = trunk.config.patch
    rows, columns = pixels.shape[-2] // patch, pixels.shape[-1] // patch
    return Attention(to_patches.view(*to_patches.shape[:2], rows, columns), shares.mean(0), pooled)


def _pooled(model: MemoryViT, name: str, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """(b, 1, patches) and shares (b, 1, parts): each row of a side is of one trunk token."""
    trunk, climb = model.trunk, model.sides([name]).begin()
    tokens = trunk.norm(trunk.encode(trunk.embed(pixels), climb.see))
    climb.see(trunk.config.depth, tokens)
    weights = climb.weights(name).mean(1, keepdim=True)  # (b, 1, n)
    patches = weights[..., trunk.config.prefix :]
    shares = weights.new_zeros(*weights.shape[:2], len(PARTS))
    shares[..., 0] = patches.sum(2)
    shares[..., 1] = 1 - shares[..., 0]
    return patches, shares


def _masked(model: MemoryViT, task: Task, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """(b, l, patches) and shares (b, l, parts), as `Memory.attend` weighs them."""
    memory = model.memory([task.spec.name])
    own = memory.spans[-1]  # all that is read comes before it, so its rows have no padding
    prefix, cells = model.trunk.config.prefix, task.spec.cells
    patches, shares = [], []

    def watch(layer: int, to_trunk: Tensor, to_tokens: Tensor, to_cells: Tensor) -> None:
        trunk, tokens, kept = (
            part.mean(1)[:, own.start : own.stop].mean(1)
            for part in (to_trunk, to_tokens, to_cells)
        )
        patches.append(trunk[:, prefix:])
        old_tokens, itself = tokens[:, : -len(own)], tokens[:, -len(own) :]
        old_cells, its_cells = torch.split(kept, [kept.shape[1] - cells, cells], dim=1)
        read = (trunk[:, prefix:], trunk[:, :prefix], itself, its_cells)
        extended = old_tokens.sum(1) + old_cells.sum(1)
        shares.append(torch.stack([*(part.sum(1) for part in read), extended], dim=1))

    forward_fast(model.trunk, model.trunk.embed(pixels), memory, 0, watch)
    return torch.stack(patches, 1), torch.stack(shares, 1)


def _plain(
    model: MemoryViT, trunk: ViT, task: Task | None, pixels: Tensor
) -> tuple[Tensor, Tensor]:
    """The same where all tokens read each other: of token 0, in a pass of its own.

    Without hooks on the trunk: other models share it, and may run at this moment.
    """
    prefix = trunk.config.prefix + (not trunk.config.class_token)  # an added one comes first
    n = prefix + (pixels.shape[-2] // trunk.config.patch) * (pixels.shape[-1] // trunk.config.patch)
    patches: list[Tensor] = []
    shares: list[Tensor] = []

    def watch(weights: Tensor) -> None:
        weights = weights.mean(1)  # (b, n + m)
        patches.append(weights[:, prefix:n])
        read = (weights[:, prefix:n], weights[:, 1:prefix], weights[:, :1], weights[:, n:])
        shares.append(
            torch.stack([*(part.sum(1) for part in read), weights.new_zeros(len(weights))], 1)
        )

    model.tokens_alone(task, pixels, watch)
    return torch.stack(patches, 1), torch.stack(shares, 1)
