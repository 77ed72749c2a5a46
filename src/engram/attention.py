"""Attention maps: what a class token reads at every layer, of the picture and of its cells.

There are two maps of a layer. The *weights* are the softmax of the token's scores. Some patches of
a ViT, often in the corners, have a high weight in every image and nearly no value: a head looks
there when it wants to read nothing. The *contribution* of a patch leaves them out: with f_j what
the layer's attention adds to the token because of patch j, and r all that it adds, it is the length
of f_j along r, f_j . r / |r|, or 0 where that is negative. docs/explanation.md compares them.

A task with side patches has no class token: its map is what its queries pool after the last layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.errors import EngramError
from engram.layers import Block, split_heads
from engram.passes import forward_fast
from engram.sights import tokens_alone
from engram.squares import squares_of
from engram.tasks.task import Task
from engram.vit import ViT

if TYPE_CHECKING:
    from engram.model import MemoryViT

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
    """Attention of one task's class token, over all heads (and averaged over its class tokens).

    Of side patches there is one map, `pooled`: of the queries that pool them.
    """

    weights: Tensor  # (b, l, rows, columns), averaged over heads
    contribution: Tensor  # (b, l, rows, columns)
    shares: Tensor  # of the weights, (l, len(PARTS)), averaged over the images
    pooled: bool = False


_Maps = tuple[Tensor, Tensor, Tensor]  # weights and contribution (b, l, patches), shares (b, l, …)


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
    with trunk.products():
        if pooled:
            found = _pooled(model, name, pixels)
        elif task is not None and masked:
            found = _masked(model, task, pixels)
        else:
            changing = task if task is not None and task.spec.parts.changes_trunk else None
            found = _plain(model, trunk, changing, pixels)
    weights, contribution, shares = map(trunk.unrounded, found)
    rows, columns = (side // trunk.config.patch for side in pixels.shape[-2:])
    shape = (*weights.shape[:2], rows, columns)
    return Attention(weights.view(shape), contribution.view(shape), shares.mean(0), pooled)


def _pooled(model: MemoryViT, name: str, pixels: Tensor) -> _Maps:
    """Each row of a side is of one trunk token; l is 1."""
    trunk = model.trunk
    climb = model.sides([name]).begin(squares_of(trunk, pixels.shape[-2:], pixels.device))
    tokens = trunk.norm(trunk.encode(trunk.embed(pixels), pixels.shape[-2:], climb.see))
    climb.see(trunk.config.depth, tokens)
    by_query, rows = climb.weights(name), climb.of(name)  # (b, queries, n), (b, n, r)
    towards = F.normalize((by_query @ rows).flatten(1)).view(len(rows), -1, rows.shape[2])
    contribution = (by_query * (towards @ rows.mT)).sum(1, keepdim=True).clamp(min=0)
    weights = by_query.mean(1, keepdim=True)
    prefix = trunk.config.prefix
    patches = weights[..., prefix:]
    shares = weights.new_zeros(*weights.shape[:2], len(PARTS))
    shares[..., 0] = patches.sum(2)
    shares[..., 1] = 1 - shares[..., 0]
    return patches, contribution[..., prefix:], shares


def _contribution(block: Block, weights: Tensor, values: Tensor, read: Tensor) -> Tensor:
    """What each of the values (b, h, n, d) contributes to the `read` (b, s, D): (b, n).

    By the weights (b, h, s, n); averaged over the class tokens.
    """
    scale = 1 if block.scale1 is None else block.scale1
    towards = F.normalize(block.add_up(read) * scale, dim=2) * scale @ block.proj.weight
    if isinstance(block.read_norm, nn.LayerNorm):  # as far as it is linear: at what was read
        spread = read.var(2, correction=0, keepdim=True).add(block.read_norm.eps).sqrt()
        towards = towards * block.read_norm.weight / spread
        towards = towards - towards.mean(2, keepdim=True)
    towards = split_heads(towards, block.heads)  # (b, h, s, d)
    return (weights * (towards @ values.mT)).sum(1).clamp(min=0).mean(1)


def _masked(model: MemoryViT, task: Task, pixels: Tensor) -> _Maps:
    """As `Memory.attend` weighs what the task reads."""
    memory = model.memory([task.spec.name])
    own = memory.spans[-1]  # all that is read comes before it, so its rows have no padding
    prefix, cells = model.trunk.config.prefix, task.spec.cells
    patches: list[Tensor] = []
    contributions: list[Tensor] = []
    shares: list[Tensor] = []

    def watch(
        layer: int, to_trunk: Tensor, to_tokens: Tensor, to_cells: Tensor, v: Tensor, read: Tensor
    ) -> None:
        rows = slice(own.start, own.stop)
        trunk, tokens, kept = (
            part.mean(1)[:, rows].mean(1) for part in (to_trunk, to_tokens, to_cells)
        )
        patches.append(trunk[:, prefix:])
        block = model.trunk.layers[layer]
        contributions.append(
            _contribution(block, to_trunk[:, :, rows, prefix:], v[:, :, prefix:], read[:, rows])
        )
        old_tokens, itself = tokens[:, : -len(own)], tokens[:, -len(own) :]
        old_cells, its_cells = torch.split(kept, [kept.shape[1] - cells, cells], dim=1)
        parts = (trunk[:, prefix:], trunk[:, :prefix], itself, its_cells)
        extended = old_tokens.sum(1) + old_cells.sum(1)
        shares.append(torch.stack([*(part.sum(1) for part in parts), extended], dim=1))

    x = model.trunk.embed(pixels)
    rotation = model.trunk.rotation(pixels.shape[-2:], x.shape[1])
    forward_fast(model.trunk, x, memory, 0, watch, rotation=rotation)
    return torch.stack(patches, 1), torch.stack(contributions, 1), torch.stack(shares, 1)


def _plain(model: MemoryViT, trunk: ViT, task: Task | None, pixels: Tensor) -> _Maps:
    """The same where all tokens read each other: of token 0, in a pass of its own.

    Without hooks on the trunk: other models share it, and may run at this moment.
    """
    prefix = trunk.config.prefix + (not trunk.config.class_token)  # an added one comes first
    n = prefix + (pixels.shape[-2] // trunk.config.patch) * (pixels.shape[-1] // trunk.config.patch)
    patches: list[Tensor] = []
    contributions: list[Tensor] = []
    shares: list[Tensor] = []

    def watch(block: Block, weights: Tensor, values: Tensor, read: Tensor) -> None:
        by_head = weights[..., prefix:n].unsqueeze(2)
        contributions.append(_contribution(block, by_head, values[:, :, prefix:n], read))
        weights = weights.mean(1)  # (b, n + m)
        patches.append(weights[:, prefix:n])
        parts = (weights[:, prefix:n], weights[:, 1:prefix], weights[:, :1], weights[:, n:])
        shares.append(
            torch.stack([*(part.sum(1) for part in parts), weights.new_zeros(len(weights))], 1)
        )

    tokens_alone(model, task, pixels, watch)
    return torch.stack(patches, 1), torch.stack(contributions, 1), torch.stack(shares, 1)
