"""Where a class token looks: what it reads at every layer, of the picture and of its cells."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.adapters import Bank
from engram.errors import EngramError
from engram.memory import together
from engram.model import MemoryViT
from engram.regimes import Task
from engram.vit import Block, ViT, merge_heads

#: What a class token can read. The shares of `Looks` are in this order and add up to 1.
PARTS = (
    "the picture's patches",
    "the ViT's own class token",
    "itself",
    "its cells",
    "the tasks it extends",
)


@dataclass(frozen=True, eq=False)
class Looks:
    """Attention of one task's class token, averaged over heads (and over its class tokens)."""

    patches: Tensor  # (b, l, rows, columns)
    shares: Tensor  # (l, len(PARTS)), averaged over the images


@torch.inference_mode()
def looks(model: MemoryViT, name: str, pixels: Tensor) -> Looks:
    """What the class token of a task, or of the trunk ("base"), reads of these images.

    An EngramError where the answer comes from no class token but from an average over patches.
    """
    task = None if name == "base" else model.task(name)
    trunk = model.trunk if task is None or task.trunk is None else task.trunk
    masked = task is not None and task.spec.parts.masked
    if not masked and not trunk.config.class_token and (task is None or task.class_token is None):
        raise EngramError(f"{name!r} has no class token on this trunk, so it looks nowhere.")
    if task is not None and masked:
        to_patches, shares = _masked(model, task, pixels)
    else:
        to_patches, shares = _plain(model, trunk, task, pixels)
    patch = trunk.config.patch
    rows, columns = pixels.shape[-2] // patch, pixels.shape[-1] // patch
    return Looks(to_patches.view(*to_patches.shape[:2], rows, columns), shares.mean(0))


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

    memory.watch = watch
    together(model.trunk, model.trunk.embed(pixels), memory, keep=0)
    return torch.stack(patches, 1), torch.stack(shares, 1)


def _plain(
    model: MemoryViT, trunk: ViT, task: Task | None, pixels: Tensor
) -> tuple[Tensor, Tensor]:
    """The same where all tokens read each other: of token 0, in the pass of `_answer_alone`.

    The pass is its own, without hooks: other models share the trunk, and may run at this moment.
    """
    prefix = trunk.config.prefix + (not trunk.config.class_token)  # an added one comes first
    x = trunk.embed(pixels, None if task is None else task.class_token)
    n, bank, cells, update = x.shape[1], None, None, "fresh"
    if task is not None and task.adapters is not None:
        bank = Bank([(range(1), task.adapters)], 1)
    if task is not None and task.cells is not None:
        others = [t.cells for t in model.tasks.values() if t is not task and t.cells is not None]
        cells, update = torch.cat([task.cells, *others], 1), task.spec.update
    patches: list[Tensor] = []
    shares: list[Tensor] = []

    def attend(block: Block, normed: Tensor) -> Tensor:
        layer = len(patches)
        q, k, v = block.project(normed)
        if cells is not None and update == "fresh":
            cell_k, cell_v = block.keys_values(block.norm1(cells[layer]).unsqueeze(0))
            k = torch.cat([k, cell_k.expand(len(k), -1, -1, -1)], dim=2)
            v = torch.cat([v, cell_v.expand(len(v), -1, -1, -1)], dim=2)
        scores = q[:, :, :1] @ k.mT * q.shape[-1] ** -0.5
        weights = scores.softmax(-1).mean(1)[:, 0]  # (b, n + m)
        patches.append(weights[:, prefix:n])
        read = (weights[:, prefix:n], weights[:, 1:prefix], weights[:, :1], weights[:, n:])
        shares.append(
            torch.stack([*(part.sum(1) for part in read), weights.new_zeros(len(weights))], 1)
        )
        return merge_heads(F.scaled_dot_product_attention(q, k, v))

    for layer, block in enumerate(trunk.layers):
        if cells is not None and update != "fresh" and layer == 0:
            x = torch.cat([x, cells[0].expand(len(x), -1, -1)], dim=1)
        elif cells is not None and update == "add":
            x = torch.cat([x[:, :n], x[:, n:] + cells[layer]], dim=1)
        x = block(x, attend, bank.beside(layer) if bank else None)
    return torch.stack(patches, 1), torch.stack(shares, 1)
