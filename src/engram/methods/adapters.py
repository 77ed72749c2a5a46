"""Bottleneck adapters in parallel to attention and MLP: the paper's comparison (its Table 4).

An adapter is x + up(gelu(down(normed))) with no biases, one parallel to the attention and one
parallel to the MLP of every layer. In the regimes `adapter` and `memory+adapter` every token passes
through them; in `masked+adapter` only the tokens of the task they belong to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.methods.method import Initial
from engram.util.tensors import to_device
from engram.vit.layers import Adapt


class Adapters(NamedTuple):
    """One task's adapters for all layers; place 0 is parallel to attention, 1 to the MLP."""

    down: Tensor  # (l, 2, D, w)
    up: Tensor  # (l, 2, w, D)


#: The tokens that go through adapters.
Member = tuple[Sequence[int], Adapters]


def adapter_parameters(depth: int, width: int, bottleneck: int) -> dict[str, Initial]:
    """`up` starts at zero, so that adapters change nothing at first."""
    return {
        "adapters.down": Initial((depth, 2, width, bottleneck), std=width**-0.5),
        "adapters.up": Initial((depth, 2, bottleneck, width)),
    }


def find_adapters(tensors: Mapping[str, Tensor]) -> Adapters | None:
    """The adapters among a task's parameters."""
    if "adapters.down" not in tensors:
        return None
    return Adapters(tensors["adapters.down"], tensors["adapters.up"])


@dataclass(frozen=True)
class _AdapterGroup:
    """t adapters of one width with c tokens each, run as one batched product."""

    tokens: Tensor | None  # (t * c), the last again where one has fewer; None: all, in order
    kept: Tensor | None  # which of these are no repetition; None: all
    to: Tensor | None  # the tokens of those
    maps: list[tuple[Tensor, Tensor]]  # (t, D, w), (t, w, D) by layer and place: one gradient


class AdapterBank:
    """The adapters of several streams, applied to their tokens in batched products.

    Args:
        members: Which tokens go through which adapters.
        tokens: How many tokens the pass has in all.
        routed: Tokens count through all images (image * s + token), so that adapters have
            different numbers of them.
    """

    def __init__(self, members: Sequence[Member], tokens: int, routed: bool = False) -> None:
        self.routed = routed
        shapes: dict[tuple[int, int], list[tuple[list[int], Adapters]]] = {}
        for rows, adapters in members:
            shape = (0 if routed else len(rows), adapters.down.shape[-1])
            shapes.setdefault(shape, []).append((list(rows), adapters))
        self.groups = []
        for group in shapes.values():
            most, device = max(len(rows) for rows, _ in group), group[0][1].down.device
            taken = [row for rows, _ in group for row in rows + rows[-1:] * (most - len(rows))]
            kept = [i * most + j for i, (rows, _) in enumerate(group) for j in range(len(rows))]
            index = keep = to = None
            if taken != list(range(tokens)):
                index = to = to_device(torch.tensor(taken), device)
            if index is not None and len(kept) < len(taken):
                keep = to_device(torch.tensor(kept), device)
                to = index[keep]
            down = torch.stack([adapters.down for _, adapters in group], dim=2)
            up = torch.stack([adapters.up for _, adapters in group], dim=2)
            maps = zip(down.flatten(0, 1).unbind(), up.flatten(0, 1).unbind(), strict=True)
            self.groups.append(_AdapterGroup(index, keep, to, list(maps)))

    def add(self, x: Tensor, normed: Tensor, layer: int, place: int) -> Tensor:
        """x (b, s, D) plus what the adapters make of normed (b, s, D)."""
        shape = x.shape
        if self.routed:
            x, normed = x.flatten(0, 1)[None], normed.flatten(0, 1)[None]
        for group in self.groups:
            rows = normed if group.tokens is None else normed[:, group.tokens]
            b, s, width = rows.shape
            down, up = group.maps[2 * layer + place]
            rows = rows.reshape(b, len(down), -1, width).transpose(0, 1)  # (t, b, c, D)
            out = F.gelu(rows.reshape(len(down), -1, width) @ down) @ up
            out = out.view(len(down), b, -1, width).transpose(0, 1).reshape(b, s, width)
            out = out if group.kept is None else out[:, group.kept]
            out = out.to(x.dtype)  # autocast's products are in half precision
            x = x + out if group.to is None else x.index_add(1, group.to, out)
        return x.view(shape)


class PaddedAdapters(NamedTuple):
    """One adapter for each of some tokens, all padded to one width.

    Every product is of one row, so that no number depends on how many images there are.
    """

    tokens: Tensor  # (r)
    down: Tensor  # (l, 2, r, D, w)
    up: Tensor  # (l, 2, r, w, D)

    @classmethod
    def create(cls, members: Sequence[Member], depth: int, like: Tensor) -> PaddedAdapters:
        """Where there are none, one of zeros is at the first token, which changes nothing."""
        width, each = like.shape[-1], [own for rows, own in members for _ in rows]
        if not each:
            zeros = like.new_zeros(depth, 2, width, 1)
            return cls.create([([0], Adapters(zeros, zeros.mT))], depth, like)
        most = max(own.down.shape[-1] for own in each)
        pads = [most - own.down.shape[-1] for own in each]
        downs = [F.pad(own.down, (0, pad)) for own, pad in zip(each, pads, strict=True)]
        ups = [F.pad(own.up, (0, 0, 0, pad)) for own, pad in zip(each, pads, strict=True)]
        tokens = torch.tensor([row for rows, _ in members for row in rows], device=like.device)
        return cls(tokens, torch.stack(downs, 2), torch.stack(ups, 2))

    def add(self, x: Tensor, normed: Tensor, layer: int, place: int) -> Tensor:
        """x (b, s, D) plus what the adapters make of normed (b, s, D)."""
        rows = normed.index_select(1, self.tokens).unsqueeze(2)  # (b, r, 1, D)
        out = F.gelu(rows @ self.down[layer, place]) @ self.up[layer, place]
        return x.index_add(1, self.tokens, out.squeeze(2))


def layer_adapters(
    bank: AdapterBank | PaddedAdapters | None, layer: int, start: int = 0
) -> Adapt | None:
    """The bank at one layer, for the tokens from `start` on, as `layers.Block` calls it."""
    if bank is None:
        return None

    def adapt(x: Tensor, normed: Tensor, place: int) -> Tensor:
        if not start:
            return bank.add(x, normed, layer, place)
        own = bank.add(x[:, start:], normed[:, start:], layer, place)
        return torch.cat([x[:, :start], own], dim=1)

    return adapt
