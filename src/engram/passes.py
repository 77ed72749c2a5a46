"""The passes: how the trunk and the streams of tasks go through the layers.

Each takes the trunk's embedded tokens x (b, n, D), or what was cached of them, and gives the last
layer's tokens before the final norm. The masked ones compute the same: `forward_fast` is for
inference, `forward_tasks` beside a `TrunkPass` for training, `from_cached` for training from a
cache. In `full_attention` every token reads the cells. Axes as in memory.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.adapters import Adding, Bank, LayerAdapters
from engram.layers import Attend, Block, See, merge_heads
from engram.memory import QKV, KeysValues, Memory, Normed, TrunkView, Watch
from engram.positions import Rotation
from engram.vit import ViT

#: Of every layer, the trunk's normed tokens (b, n, D), or its keys and values.
CachedLayers = Sequence[Tensor] | Sequence[KeysValues]
#: A `Watch` where all tokens read each other, of token 0: weights (b, h, n + m), values, (b, 1, D).
WatchFirst = Callable[[Block, Tensor, Tensor, Tensor], None]


class Streams(Protocol):
    """Task streams: of a `Memory`, or routed by image."""

    bank: Adding | None

    def start(self, images: int) -> Tensor:
        """The class tokens at the first layer: (b, s, D)."""


class BesideTrunk(Streams, Protocol):
    """Streams that read a trunk that runs by itself."""

    def attend(self, layer: int, block: Block, normed: Tensor, trunk: TrunkView) -> Tensor:
        """What class tokens (b, s, D), behind the norm, read: (b, s, D)."""


class WithTrunk(Streams, Protocol):
    """Streams that go through the layers together with the trunk."""

    def attend_keys(
        self, layer: int, block: Block, own: QKV, trunk: KeysValues, watch: Watch | None = None
    ) -> Tensor:
        """What class tokens read, (b, s, D), by keys and values; `own` are theirs, (b, h, s, d)."""


def forward_fast(
    vit: ViT,
    x: Tensor,
    memory: WithTrunk,
    keep: int,
    watch: Watch | None = None,
    see: See | None = None,
    rotation: Rotation | None = None,
) -> tuple[Tensor, Tensor]:
    """All streams share each layer's matrix products: the fast path, for inference.

    Only the first `keep` trunk tokens are wanted at the end, so the last layer computes no others.
    `watch` is called with every layer's attention weights, `see` with the trunk's normed tokens.
    The `rotation` is the trunk's, for these n tokens; class tokens and cells are not turned.
    """
    n = x.shape[1]
    x = torch.cat([x, memory.start(x.shape[0])], dim=1)
    for layer, block in enumerate(vit.layers):
        wanted = keep if layer + 1 == len(vit.layers) else n
        x = layer_fast(layer, block, x, memory, n, wanted, watch, see, rotation)
    return x[:, :keep], x[:, keep:]


def layer_fast(
    layer: int,
    block: Block,
    x: Tensor,
    memory: WithTrunk,
    n: int,
    wanted: int,
    watch: Watch | None = None,
    see: See | None = None,
    rotation: Rotation | None = None,
) -> Tensor:
    """One layer of `forward_fast`: x (b, n + s, D) to its first `wanted` tokens and the last s."""

    def attend(block: Block, normed: Tensor) -> Tensor:
        if see is not None:
            see(layer, normed[:, :n])
        q, k, v = block.project(normed, rotation)
        trunk = KeysValues(k[:, :, :n], v[:, :, :n])
        own = q[:, :, n:], k[:, :, n:], v[:, :, n:]
        read = memory.attend_keys(layer, block, own, trunk, watch)
        if not wanted:
            return read
        plain = F.scaled_dot_product_attention(q[:, :, :wanted], trunk.k, trunk.v)
        return torch.cat([merge_heads(plain), read], dim=1)

    adapters = LayerAdapters(memory.bank, layer, wanted) if memory.bank else None
    out: Tensor = block(x, attend, adapters, None if wanted == n else range(wanted, n))
    return out


class TrunkPass:
    """The plain trunk, layer by layer, bit for bit: gives what a task can read at each layer.

    That is its keys and values, or with `lean` the normed tokens they are made from. Once it is
    exhausted, `tokens` holds the first `keep` tokens of the last layer; with `keep` 0 the last
    layer computes nothing but what is read. `see` is called with every layer's normed tokens.
    """

    def __init__(
        self,
        vit: ViT,
        x: Tensor,
        keep: int,
        lean: bool = False,
        see: See | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        self.vit, self.tokens, self.keep, self.lean, self.see = vit, x, keep, lean, see
        self.rotation = rotation

    def __iter__(self) -> Iterator[TrunkView]:
        x = self.tokens
        for layer, block in enumerate(self.vit.layers[:-1] if not self.keep else self.vit.layers):
            taken: list[TrunkView] = []

            def attend(
                block: Block, normed: Tensor, layer: int = layer, taken: list[TrunkView] = taken
            ) -> Tensor:
                if self.see is not None:
                    self.see(layer, normed)
                q, k, v = block.project(normed, self.rotation)
                taken.append(Normed(normed, lean=True) if self.lean else KeysValues(k, v))
                return merge_heads(F.scaled_dot_product_attention(q, k, v))

            x = block(x, attend)
            self.tokens = x[:, : self.keep]
            yield taken[0]
        if not self.keep:
            block = self.vit.layers[-1]
            last = block.norm1(x)
            if self.lean:
                yield Normed(last, lean=True)
            else:
                yield KeysValues(*block.keys_values(last, self.rotation))


def forward_tasks(vit: ViT, trunk: Iterable[TrunkView], memory: BesideTrunk, images: int) -> Tensor:
    """The tasks' own tokens at the last layer (b, s, D), reading a trunk that runs by itself.

    The way to train a task: with the trunk frozen, only the tasks' tokens build a graph.
    """
    y = memory.start(images)
    for layer, (block, view) in enumerate(zip(vit.layers, trunk, strict=True)):
        attend = partial(memory.attend, layer, trunk=view)
        y = block(y, attend, LayerAdapters(memory.bank, layer) if memory.bank else None)
    return y


def reads_lean(vit: ViT, n: int, memory: Memory) -> bool:
    """Whether tasks that train beside a running trunk of n tokens should read it `lean`.

    Autograd keeps what is read. Keys and values are two numbers where the normed token is one, so
    this halves the memory of a step; it is done while it adds less than a twentieth of work. Keys
    that are turned cannot be left out: each has a query of its own.
    """
    if vit.config.rotary is not None:
        return False
    work = 3 * _in_width(vit, n, len(memory.token))  # forward, once more, and back
    return work < 12 * n * vit.config.width**2 / 20


def reads_tokens(vit: ViT, n: int, s: int, passes: int) -> bool:
    """Whether it is cheaper that s class tokens read n cached tokens as they are.

    With many class tokens it is cheaper to make keys and values of the trunk, once for all. Keys
    that are turned have to be made.
    """
    if vit.config.rotary is not None:
        return False
    width = vit.config.width
    keys = 2 * n * width**2 + passes * s * 2 * n * width
    return passes * _in_width(vit, n, s) < keys


def _in_width(vit: ViT, n: int, s: int) -> int:
    """Multiply-accumulates of a layer, an image, that every head does in the width of tokens then:

    queries are taken there and what was read is taken back, and the trunk is read.
    """
    width = vit.config.width
    return s * (2 * width**2 + 2 * vit.config.heads * n * width)


def from_cached(
    vit: ViT, layers: CachedLayers, memory: Memory, rotation: Rotation | None = None
) -> Tensor:
    """`forward_tasks` for a trunk of which a cache kept tokens, or keys and values."""
    keys = [layer for layer in layers if isinstance(layer, KeysValues)]
    if keys:
        return forward_tasks(vit, keys, memory, len(keys[0].k))
    normed = [layer for layer in layers if isinstance(layer, Tensor)]
    passes = 2 if torch.is_grad_enabled() else 1  # forward, and back through the same products
    views: Iterable[TrunkView]
    if reads_tokens(vit, normed[0].shape[1], len(memory.token), passes):
        views = map(Normed, normed)
    else:
        pairs = zip(normed, vit.layers, strict=True)
        views = (KeysValues(*block.keys_values(tokens, rotation)) for tokens, block in pairs)
    return forward_tasks(vit, views, memory, len(normed[0]))


def full_attention(
    vit: ViT,
    x: Tensor,
    cells: Tensor,
    update: str = "fresh",
    bank: Bank | None = None,
    watch: WatchFirst | None = None,
    rotation: Rotation | None = None,
) -> Tensor:
    """Every token reads the cells (l, m, D): best for one task, and the old outputs change.

    The paper's way is `fresh`. Figure 2b has two that its authors found worse: `propagate`, where
    the first layer's cells are ordinary tokens from there on, and `add`, where every layer adds
    its own learned cells to the propagated ones. The cells are dropped at the end. `watch` is
    called at each layer.
    """
    n = x.shape[1]
    for layer, block in enumerate(vit.layers):
        if update != "fresh" and layer == 0:
            x = torch.cat([x, cells[0].expand(x.shape[0], -1, -1)], dim=1)
        elif update == "add":
            x = torch.cat([x[:, :n], x[:, n:] + cells[layer]], dim=1)
        fresh = cells[layer] if update == "fresh" else None
        adapters = LayerAdapters(bank, layer) if bank else None
        x = block(x, _reads_cells(fresh, watch, rotation), adapters)
    return x[:, :n]


def _reads_cells(
    cells: Tensor | None, watch: WatchFirst | None, rotation: Rotation | None
) -> Attend:
    def attend(block: Block, normed: Tensor) -> Tensor:
        q, k, v = block.project(normed, rotation)
        if cells is not None and len(cells):
            cell_k, cell_v = block.keys_values(block.norm1(cells).unsqueeze(0))
            k = torch.cat([k, cell_k.expand(k.shape[0], -1, -1, -1)], dim=2)
            v = torch.cat([v, cell_v.expand(v.shape[0], -1, -1, -1)], dim=2)
        read = merge_heads(F.scaled_dot_product_attention(q, k, v))
        if watch is not None:
            weights = (q[:, :, 0:1] @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
            watch(block, weights.squeeze(2), v, read[:, :1])
        return read

    return attend
