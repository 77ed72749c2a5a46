"""Bottleneck adapters in parallel to attention and MLP: the paper's comparison (its Table 4).

An adapter is x + up(gelu(down(normed))) with no biases, one parallel to the attention and one
parallel to the MLP of every layer. In the regimes `adapter` and `memory+adapter` every token passes
through them; in `masked+adapter` only the tokens of the task they belong to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.methods.method import Initial
from engram.util.devices import to_device


class Adapters(NamedTuple):
    """One task's adapters for all layers; place 0 is parallel to attention, 1 to the MLP."""

    down: Tensor  # (l, 2, D, w)
    up: Tensor  # (l, 2, w, D)


def adapter_parameters(depth: int, width: int, bottleneck: int) -> dict[str, Initial]:
    """`up` starts at zero, so that adapters change nothing at first."""
    return {
        "adapters.down": Initial((depth, 2, width, bottleneck), std=width**-0.5),
        "adapters.up": Initial((depth, 2, bottleneck, width)),
    }


def adapters_of(tensors: Mapping[str, Tensor]) -> Adapters | None:
    """The adapters among a task's parameters."""
    if "adapters.down" not in tensors:
        return None
    return Adapters(tensors["adapters.down"], tensors["adapters.up"])


@dataclass(frozen=True)
class _AdapterGroup:
    """Adapters of one shape, run as one batched product."""

    tokens: Tensor | None  # which tokens of the pass, (t * k,); None: all of them, in order
    count: int  # t adapters
    down: Tensor  # (l, 2, t, D, w)
    up: Tensor  # (l, 2, t, w, D)
    maps: list[tuple[Tensor, Tensor]]  # both by layer and place: one gradient for all


class AdapterProtocol(Protocol):
    """Adapters of streams: of an `AdapterBank`, or routed by image."""

    def add(self, x: Tensor, normed: Tensor, layer: int, place: int) -> Tensor:
        """x (b, s, D) plus what the adapters make of normed (b, s, D)."""


class AdapterBank:
    """The adapters of several streams, applied to their tokens in batched products."""

    def __init__(self, members: Sequence[tuple[range, Adapters]], tokens: int) -> None:
        """`members`: which tokens of the pass, of `tokens` in all, go through which adapters."""
        self.tokens = tokens
        shapes: dict[tuple[int, int], list[tuple[range, Adapters]]] = {}
        for rows, adapters in members:
            shapes.setdefault((len(rows), adapters.down.shape[-1]), []).append((rows, adapters))
        self.groups = []
        for group in shapes.values():
            taken = [row for span, _ in group for row in span]
            device = group[0][1].down.device
            every = taken == list(range(tokens))
            index = None if every else to_device(torch.tensor(taken), device)
            down = torch.stack([adapters.down for _, adapters in group], dim=2)
            up = torch.stack([adapters.up for _, adapters in group], dim=2)
            maps = zip(down.flatten(0, 1).unbind(), up.flatten(0, 1).unbind(), strict=True)
            self.groups.append(_AdapterGroup(index, len(group), down, up, list(maps)))

    def add(self, x: Tensor, normed: Tensor, layer: int, place: int) -> Tensor:
        """x (b, s, D) plus what the adapters make of normed (b, s, D)."""
        for group in self.groups:
            rows = normed if group.tokens is None else normed[:, group.tokens]
            b, s, width = rows.shape
            rows = rows.reshape(b, group.count, -1, width).transpose(0, 1)  # (t, b, k, D)
            rows = rows.reshape(group.count, -1, width)
            down, up = group.maps[2 * layer + place]
            out = F.gelu(rows @ down) @ up
            out = out.view(group.count, b, -1, width).transpose(0, 1).reshape(b, s, width)
            out = out.to(x.dtype)  # autocast's products are in half precision
            x = x + out if group.tokens is None else x.index_add(1, group.tokens, out)
        return x

    def rows(self, depth: int, like: Tensor) -> PaddedAdapters:
        """The same with an adapter for each token that has one: narrow ones are padded.

        Where there are none, one of zeros is at the first token, which changes nothing.
        """
        if not self.groups:
            zeros = like.new_zeros(depth, 2, 1, like.shape[-1], 1)
            return PaddedAdapters(torch.tensor([0], device=like.device), zeros, zeros.mT)
        width = max(group.down.shape[-1] for group in self.groups)
        tokens, downs, ups = [], [], []
        for group in self.groups:
            taken = torch.arange(self.tokens) if group.tokens is None else group.tokens
            each, pad = len(taken) // group.count, width - group.down.shape[-1]
            tokens.append(taken)
            downs.append(F.pad(group.down, (0, pad)).repeat_interleave(each, 2))
            ups.append(F.pad(group.up, (0, 0, 0, pad)).repeat_interleave(each, 2))
        return PaddedAdapters(torch.cat(tokens), torch.cat(downs, 2), torch.cat(ups, 2))


class PaddedAdapters(NamedTuple):
    """A bank with one adapter for each of some tokens, all of one width.

    Every product is of one row, so that no number depends on how many images there are.
    """

    tokens: Tensor  # (r)
    down: Tensor  # (l, 2, r, D, w)
    up: Tensor  # (l, 2, r, w, D)

    def add(self, x: Tensor, normed: Tensor, layer: int, place: int) -> Tensor:
        """x (b, s, D) plus what the adapters make of normed (b, s, D)."""
        rows = normed.index_select(1, self.tokens).unsqueeze(2)  # (b, r, 1, D)
        out = F.gelu(rows @ self.down[layer, place]) @ self.up[layer, place]
        return x.index_add(1, self.tokens, out.squeeze(2))


@dataclass(frozen=True)
class LayerAdapters:
    """The bank at one layer, for the tokens from `start` on; `layers.Block` calls it."""

    bank: AdapterProtocol
    layer: int
    start: int = 0

    def attention(self, x: Tensor, normed: Tensor) -> Tensor:
        return self._add(x, normed, 0)

    def mlp(self, x: Tensor, normed: Tensor) -> Tensor:
        return self._add(x, normed, 1)

    def _add(self, x: Tensor, normed: Tensor, place: int) -> Tensor:
        if not self.start:
            return self.bank.add(x, normed, self.layer, place)
        own = self.bank.add(x[:, self.start :], normed[:, self.start :], self.layer, place)
        return torch.cat([x[:, : self.start], own], dim=1)
