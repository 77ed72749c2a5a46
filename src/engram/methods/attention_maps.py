"""Attention maps: what the class token of a task reads of every patch, and how much that counts.

A layer has two maps. The *weights* are the softmax of the token's scores. Some patches of a ViT,
often in the corners, have a high weight in every image and nearly no value: a head attends there
when it wants to read nothing. The *contribution* of a patch leaves them out: with f_j what the
layer's attention adds to the token because of patch j, and r all that it adds, it is the length of
f_j along r, f_j . r / |r|, or 0 where that is negative. docs/explanation.md compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.errors import EngramError
from engram.methods.forward import FastPass, full_attention
from engram.methods.memory import Memory
from engram.vit import ViT
from engram.vit.layers import Block, split_heads

#: What a class token can read. The shares of `AttentionMaps` are in this order and add up to 1.
SOURCES = (
    "the picture's patches",
    "the ViT's own class token",
    "itself",
    "its cells",
    "the tasks it extends",
)


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """Attention of one task's class token, over all heads (and averaged over its class tokens).

    Where something else reads the patches there is one map, `pooled`, in place of layers.
    """

    weights: Tensor  # (b, l, rows, columns), averaged over heads
    contribution: Tensor  # (b, l, rows, columns)
    shares: Tensor  # of the weights by source, (l, len(SOURCES)), averaged over the images
    pooled: bool = False

    @classmethod
    def create(
        cls,
        backbone: ViT,
        pixels: Tensor,
        layers: Sequence[tuple[Tensor, Tensor, Tensor]],
        pooled: bool = False,
    ) -> AttentionMaps:
        """Create from weights, contributions (b, patches) and shares (b, sources) of all layers."""
        weights, contribution, shares = (
            backbone.to_fp32(torch.stack(part, 1)) for part in zip(*layers, strict=True)
        )
        rows, columns = (side // backbone.config.patch for side in pixels.shape[-2:])
        shape = (*weights.shape[:2], rows, columns)
        return cls(weights.view(shape), contribution.view(shape), shares.mean(0), pooled)


def first_token_maps(
    backbone: ViT, pixels: Tensor, name: str, tensors: Mapping[str, Tensor], update: str = "fresh"
) -> AttentionMaps:
    """Maps of token 0 in a pass of `full_attention`: a task's own class token, or the backbone's.

    Without hooks on the backbone's modules: other models share it, and may run at this moment.
    """
    config = backbone.config
    if "class_token" not in tensors and not config.class_token:
        raise EngramError(
            f"{name!r} has no class token on this backbone, so there is no attention to show."
        )
    prefix = config.prefix + (not config.class_token)  # an added one comes first
    rows, columns = (side // config.patch for side in pixels.shape[-2:])
    n = prefix + rows * columns
    layers: list[tuple[Tensor, Tensor, Tensor]] = []

    def hook(block: Block, weights: Tensor, values: Tensor, read: Tensor) -> None:
        by_head = weights[..., prefix:n]
        contribution = _contribution(block, by_head, values[:, :, prefix:n], read)
        itself, first, patches, cells = weights.mean((1, 2)).tensor_split([1, prefix, n], dim=1)
        layers.append((patches, contribution, _shares(patches, first, itself, cells)))

    full_attention(backbone, pixels, tensors, update, hook)
    return AttentionMaps.create(backbone, pixels, layers)


def masked_maps(memory: Memory, cells: int, backbone: ViT, pixels: Tensor) -> AttentionMaps:
    """Maps of the last task of a memory, which has so many cells of its own."""
    own = memory.spans[-1]  # all that is read comes before it, so its rows have no padding
    rows, prefix = slice(own.start, own.stop), backbone.config.prefix
    x = backbone.embed(pixels)
    n, a = x.shape[1], memory.tokens_read.shape[1]
    layers: list[tuple[Tensor, Tensor, Tensor]] = []

    def hook(block: Block, weights: Tensor, values: Tensor, read: Tensor) -> None:
        by_head = weights[:, :, rows, prefix:n]
        contribution = _contribution(block, by_head, values[:, :, prefix:], read[:, rows])
        ends = [prefix, n, n + a - len(own), n + a, weights.shape[3] - cells]
        parts = weights[:, :, rows].mean((1, 2)).tensor_split(ends, dim=1)
        first, patches, old_tokens, itself, old_cells, its_cells = parts
        extended = torch.cat([old_tokens, old_cells], dim=1)
        shares = _shares(patches, first, itself, its_cells, extended)
        layers.append((patches, contribution, shares))

    memory.hook = hook
    FastPass(memory, n, backbone.rotation(pixels.shape[-2:], n)).run(backbone, x, 0)
    return AttentionMaps.create(backbone, pixels, layers)


def _shares(*parts: Tensor) -> Tensor:
    """The sum of the weights of every source in turn, 0 for those left out: (b, sources)."""
    shares = torch.stack([part.sum(1) for part in parts], dim=1)
    return F.pad(shares, (0, len(SOURCES) - len(parts)))


def pooling_maps(weights: Tensor, rows: Tensor, backbone: ViT, pixels: Tensor) -> AttentionMaps:
    """Maps of queries that pool rows (b, n, r) by weights (b, queries, n): one map."""
    prefix = backbone.config.prefix
    towards = F.normalize((weights @ rows).flatten(1)).view(len(rows), -1, rows.shape[2])
    contribution = (weights * (towards @ rows.mT)).sum(1).clamp(min=0)
    first, patches = weights.mean(1).tensor_split([prefix], dim=1)
    layer = patches, contribution[:, prefix:], _shares(patches, first)
    return AttentionMaps.create(backbone, pixels, [layer], pooled=True)


def _contribution(block: Block, weights: Tensor, values: Tensor, read: Tensor) -> Tensor:
    """Contribution of each of the values (b, h, n, d) to the `read` (b, s, D): (b, n).

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
