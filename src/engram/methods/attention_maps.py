"""Attention maps: what the class token of a task reads of every patch, and how much that counts.

A layer has two maps. The *weights* are the softmax of the token's scores. Some patches of a ViT,
often in the corners, have a high weight in every image and nearly no value: a head attends there
when it wants to read nothing. The *contribution* of a patch leaves them out: with f_j what the
layer's attention adds to the token because of patch j, and r all that it adds, it is the length of
f_j along r, f_j . r / |r|, or 0 where that is negative. docs/explanation.md compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.errors import EngramError
from engram.methods.forward import FirstTokenHook, forward_fast, full_attention
from engram.methods.memory import Memory
from engram.vit import ViT
from engram.vit.layers import Block, split_heads

#: What a class token can read. The shares of `Maps` are in this order and add up to 1.
SOURCES = (
    "the picture's patches",
    "the ViT's own class token",
    "itself",
    "its cells",
    "the tasks it extends",
)


@dataclass(frozen=True, eq=False)
class Maps:
    """Attention maps of one task, by layer; `pooled`: one map, of what pools the patches."""

    weights: Tensor  # (b, l, patches), averaged over heads
    contribution: Tensor  # (b, l, patches)
    shares: Tensor  # of the weights by source, (b, l, len(SOURCES))
    pooled: bool = False


def backbone_maps(backbone: ViT, pixels: Tensor, name: str) -> Maps:
    """Those of the backbone's own class token in the plain pass."""

    def encode(hook: FirstTokenHook) -> None:
        x = backbone.embed(pixels)
        cells = x.new_empty(backbone.config.depth, 0, backbone.config.width)
        rotation = backbone.rotation(pixels.shape[-2:], x.shape[1])
        full_attention(backbone, x, cells, hook=hook, rotation=rotation)

    return first_token_maps(backbone, pixels, encode, name, own=False)


def first_token_maps(
    backbone: ViT,
    pixels: Tensor,
    encode: Callable[[FirstTokenHook], None],
    name: str,
    own: bool,
) -> Maps:
    """Those of token 0 in a pass where all tokens read each other, which `encode` runs.

    `own`: it is the task's own class token, which an image has where the backbone has none. Without
    hooks on the backbone's modules: other models share it, and may run at this moment.
    """
    if not own and not backbone.config.class_token:
        raise EngramError(
            f"{name!r} has no class token on this backbone, so there is no attention to show."
        )
    prefix = backbone.config.prefix + (not backbone.config.class_token)  # an added one comes first
    rows, columns = (side // backbone.config.patch for side in pixels.shape[-2:])
    n = prefix + rows * columns
    weights_by_layer: list[Tensor] = []
    contributions: list[Tensor] = []
    shares: list[Tensor] = []

    def hook(block: Block, weights: Tensor, values: Tensor, read: Tensor) -> None:
        by_head = weights[..., prefix:n].unsqueeze(2)
        contributions.append(_contribution(block, by_head, values[:, :, prefix:n], read))
        weights = weights.mean(1)  # (b, n + m)
        weights_by_layer.append(weights[:, prefix:n])
        parts = (weights[:, prefix:n], weights[:, 1:prefix], weights[:, :1], weights[:, n:])
        none = weights.new_zeros(len(weights))
        shares.append(torch.stack([*(part.sum(1) for part in parts), none], 1))

    encode(hook)
    return Maps(
        torch.stack(weights_by_layer, 1), torch.stack(contributions, 1), torch.stack(shares, 1)
    )


def masked_maps(memory: Memory, cells: int, backbone: ViT, pixels: Tensor) -> Maps:
    """Those of the last task of a memory, as `Memory.attend` weighs what it reads."""
    own = memory.spans[-1]  # all that is read comes before it, so its rows have no padding
    rows, prefix = slice(own.start, own.stop), backbone.config.prefix
    patches: list[Tensor] = []
    contributions: list[Tensor] = []
    shares: list[Tensor] = []

    def hook(
        layer: int,
        to_backbone: Tensor,
        to_tokens: Tensor,
        to_cells: Tensor,
        values: Tensor,
        read: Tensor,
    ) -> None:
        plain, tokens, kept = (
            part.mean(1)[:, rows].mean(1) for part in (to_backbone, to_tokens, to_cells)
        )
        patches.append(plain[:, prefix:])
        by_head = to_backbone[:, :, rows, prefix:]
        block = backbone.layers[layer]
        contributions.append(_contribution(block, by_head, values[:, :, prefix:], read[:, rows]))
        old_tokens, itself = tokens[:, : -len(own)], tokens[:, -len(own) :]
        old_cells, its_cells = torch.split(kept, [kept.shape[1] - cells, cells], dim=1)
        parts = (plain[:, prefix:], plain[:, :prefix], itself, its_cells)
        extended = old_tokens.sum(1) + old_cells.sum(1)
        shares.append(torch.stack([*(part.sum(1) for part in parts), extended], dim=1))

    x = backbone.embed(pixels)
    rotation = backbone.rotation(pixels.shape[-2:], x.shape[1])
    forward_fast(backbone, x, memory, 0, hook, rotation=rotation)
    return Maps(torch.stack(patches, 1), torch.stack(contributions, 1), torch.stack(shares, 1))


def pooling_maps(weights: Tensor, rows: Tensor, prefix: int) -> Maps:
    """Those of queries that pool rows (b, n, r) by weights (b, queries, n): one map."""
    towards = F.normalize((weights @ rows).flatten(1)).view(len(rows), -1, rows.shape[2])
    contribution = (weights * (towards @ rows.mT)).sum(1, keepdim=True).clamp(min=0)
    weights = weights.mean(1, keepdim=True)
    patches = weights[..., prefix:]
    shares = weights.new_zeros(*weights.shape[:2], len(SOURCES))
    shares[..., 0] = patches.sum(2)
    shares[..., 1] = 1 - shares[..., 0]
    return Maps(patches, contribution[..., prefix:], shares, pooled=True)


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
