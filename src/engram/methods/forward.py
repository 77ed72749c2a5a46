"""The forward pass: how the backbone and the branches of tasks go through the layers.

`run` takes the backbone's embedded tokens x (b, n, D), `run_cached` what a cache kept of them or
another engine computed; both leave every branch ready to give its head inputs. Below them are the
ways of streams through the layers, which give the last layer's tokens before the final norm. Those
of masked tasks compute the same: `FastPass` is for inference, `forward_tasks` beside a
`BackbonePass` for training, `from_cached` for training from a cache. In `full_attention` every
token reads the cells. Axes as in memory.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engram.methods.adapters import AdapterBank, find_adapters, layer_adapters
from engram.methods.memory import AttentionHook, BackboneView, KeysValues, Memory, Streams
from engram.methods.method import Batch, Branch, Cached, Features
from engram.methods.readout import LayerStatistics
from engram.vit.layers import Attend, Block, LayerHook, merge_heads
from engram.vit.pos_embed import Rotation
from engram.vit.vit import ViT


def run(
    batch: Batch,
    x: Tensor,
    branches: Sequence[Branch],
    statistics: LayerStatistics | None,
    exact: bool = False,
) -> Features:
    """Run the backbone once from its embedded tokens x (b, n, D), with all branches beside it.

    `exact` runs the backbone alone, so that no bit depends on the branches.
    """
    backbone, hook, n = batch.backbone, _layer_hook(branches, statistics), x.shape[1]
    rotation = backbone.rotation(batch.size, n)
    # of the last tokens, the first that are wanted: the last layer computes no others
    keep = n if exact or hook is not None else max(branch.last_tokens(n) for branch in branches)
    beside = [streams for branch in branches for streams in branch.streams]
    trains = any(branch.trains for branch in branches if branch.streams)
    final: Sequence[Tensor] = ()
    if not beside:
        raw = backbone.encode(x, batch.size, hook)
    elif len(beside) == 1 and beside[0].whole and not exact and not trains:
        raw, *final = FastPass(beside[0], n, rotation, hook).run(backbone, x, keep)
    else:
        checkpointed = not exact and reads_checkpointed(backbone, n, beside[0])
        plain = BackbonePass(backbone, x, keep, checkpointed, rotation, hook)
        final = forward_tasks(backbone, plain, beside, len(x), checkpointed)
        raw = plain.tokens
    rest = iter(final)
    for branch in branches:
        branch.final = [next(rest) for _ in branch.streams]
    features = Features(batch, Cached(raw=raw))
    if hook is not None:
        hook(backbone.config.depth, features.tokens)
    if statistics is not None:
        features.statistics = statistics.all()
    return features


def run_cached(
    batch: Batch, cached: Cached, branches: Sequence[Branch], statistics: LayerStatistics | None
) -> Features:
    """`run` from features of the backbone that are there already."""
    backbone = batch.backbone
    normed = [layer for layer in cached.layers if isinstance(layer, Tensor)]
    rotation = backbone.rotation(batch.size, normed[0].shape[1]) if normed else None
    for branch in branches:
        if cached.streams is not None:
            memories = [one for one in branch.streams if isinstance(one, Memory)]
            branch.final = [memory.join(cached.streams) for memory in memories]
        elif branch.streams:
            branch.final = from_cached(backbone, cached.layers, branch.streams, rotation)
    features = Features(batch, cached)
    hook = _layer_hook(branches, statistics)
    if hook is not None and cached.layers:
        for index, tokens in enumerate([*normed, features.tokens]):
            hook(index, tokens)
        if statistics is not None:
            features.statistics = statistics.all()
    return features


def _layer_hook(branches: Sequence[Branch], statistics: LayerStatistics | None) -> LayerHook | None:
    """Calls everything that reads the tokens of every layer."""
    hooks: list[LayerHook] = [branch.layer for branch in branches if branch.reads_layers]
    hooks += [] if statistics is None else [statistics.layer]

    def hook(index: int, tokens: Tensor, /) -> None:
        for one in hooks:
            one(index, tokens)

    return hook if hooks else None


@dataclass(frozen=True, eq=False)
class FastPass:
    """The backbone and task streams share each layer's matrix products: for inference.

    The `rotation` is the backbone's, for its n tokens; class tokens and cells are not turned.
    `layer_hook` is called with the backbone's normed tokens.
    """

    streams: Streams
    n: int
    rotation: Rotation | None = None
    layer_hook: LayerHook | None = None

    def run(self, vit: ViT, x: Tensor, keep: int) -> tuple[Tensor, Tensor]:
        """Run all layers: the backbone's first `keep` last tokens, and the streams'."""
        x = torch.cat([x, self.streams.start(x.shape[0])], dim=1)
        for layer, block in enumerate(vit.layers):
            x = self.layer(layer, block, x, keep if layer + 1 == len(vit.layers) else self.n)
        return x[:, :keep], x[:, keep:]

    def layer(self, layer: int, block: Block, x: Tensor, wanted: int) -> Tensor:
        """One layer: x (b, n + s, D) to its first `wanted` tokens and the last s."""
        n = self.n

        def attend(block: Block, normed: Tensor) -> Tensor:
            if self.layer_hook is not None:
                self.layer_hook(layer, normed[:, :n])
            q, k, v = block.project(normed, self.rotation)
            backbone = KeysValues(k[:, :, :n], v[:, :, :n])
            own = q[:, :, n:], k[:, :, n:], v[:, :, n:]
            read = self.streams.attend_keys(layer, block, own, backbone)
            if not wanted:
                return read
            plain = F.scaled_dot_product_attention(q[:, :, :wanted], backbone.k, backbone.v)
            return torch.cat([merge_heads(plain), read], dim=1)

        adapters = layer_adapters(self.streams.bank, layer, wanted)
        out: Tensor = block(x, attend, adapters, None if wanted == n else range(wanted, n))
        return out


class BackbonePass:
    """The plain backbone, layer by layer, bit for bit: gives what a task can read at each layer.

    That is its keys and values or, with `normed`, the normed tokens they are made from. Once it is
    exhausted, `tokens` holds the first `keep` tokens of the last layer; with `keep` 0 the last
    layer computes nothing but what is read. `layer_hook` gets every layer's normed tokens.
    """

    def __init__(
        self,
        vit: ViT,
        x: Tensor,
        keep: int,
        normed: bool = False,
        rotation: Rotation | None = None,
        layer_hook: LayerHook | None = None,
    ) -> None:
        self.vit, self.tokens, self.keep, self.normed = vit, x, keep, normed
        self.rotation, self.layer_hook = rotation, layer_hook

    def __iter__(self) -> Iterator[BackboneView]:
        x = self.tokens
        view: BackboneView = x

        def attend(block: Block, normed: Tensor, layer: int) -> Tensor:
            nonlocal view
            if self.layer_hook is not None:
                self.layer_hook(layer, normed)
            q, k, v = block.project(normed, self.rotation)
            view = normed if self.normed else KeysValues(k, v)
            return merge_heads(F.scaled_dot_product_attention(q, k, v))

        for layer, block in enumerate(self.vit.layers):
            if not self.keep and layer + 1 == len(self.vit.layers):
                last = block.norm1(x)
                yield last if self.normed else KeysValues(*block.keys_values(last, self.rotation))
                return
            x = block(x, partial(attend, layer=layer))
            self.tokens = x[:, : self.keep]
            yield view


def forward_tasks(
    vit: ViT,
    backbone: Iterable[BackboneView],
    streams: Sequence[Streams],
    images: int,
    checkpointed: bool = False,
) -> list[Tensor]:
    """The tasks' own tokens at the last layer (b, s, D), reading a backbone that runs by itself.

    The way to train a task: with the backbone frozen, only the tasks' tokens build a graph.
    `checkpointed` attention is recomputed in the backward pass (activation checkpointing).
    """
    tokens = [one.start(images) for one in streams]
    for layer, (block, view) in enumerate(zip(vit.layers, backbone, strict=True)):
        for i, one in enumerate(streams):
            attend: Attend = partial(one.attend, layer, backbone=view)
            if checkpointed:
                attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
            tokens[i] = block(tokens[i], attend, layer_adapters(one.bank, layer))
    return tokens


def reads_checkpointed(vit: ViT, n: int, streams: Streams) -> bool:
    """Whether training beside a running backbone of n tokens should use activation checkpointing.

    Autograd keeps what is read. Keys and values are two numbers where the normed token is one, so
    this halves the memory of a step; it is done while it adds less than a twentieth of work. Keys
    that are turned cannot be left out: each has a query of its own.
    """
    if vit.config.rotary is not None or not isinstance(streams, Memory):
        return False
    work = 3 * _in_width(vit, n, len(streams.token))  # forward, once more, and back
    return work < 12 * n * vit.config.width**2 / 20


def reads_tokens(vit: ViT, n: int, s: int, passes: int) -> bool:
    """Whether it is cheaper that s class tokens read n cached tokens as they are.

    With many class tokens it is cheaper to make keys and values of the backbone, once for all. Keys
    that are turned have to be made.
    """
    if vit.config.rotary is not None:
        return False
    width = vit.config.width
    keys = 2 * n * width**2 + passes * s * 2 * n * width
    return passes * _in_width(vit, n, s) < keys


def _in_width(vit: ViT, n: int, s: int) -> int:
    """Multiply-accumulates of a layer, an image, that every head does in the width of tokens then:

    queries are taken there and what was read is taken back, and the backbone is read.
    """
    width = vit.config.width
    return s * (2 * width**2 + 2 * vit.config.heads * n * width)


def from_cached(
    vit: ViT,
    layers: Sequence[BackboneView],
    streams: Sequence[Streams],
    rotation: Rotation | None = None,
) -> list[Tensor]:
    """`forward_tasks` for a backbone of which a cache kept tokens, or keys and values."""
    normed = [layer for layer in layers if isinstance(layer, Tensor)]
    images = len(normed[0] if normed else layers[0][0])
    passes = 2 if torch.is_grad_enabled() else 1  # forward, and back through the same products
    s = sum(one.start(1).shape[1] for one in streams)
    views: Iterable[BackboneView] = layers
    if normed and not reads_tokens(vit, normed[0].shape[1], s, passes):
        pairs = zip(normed, vit.layers, strict=True)
        views = (KeysValues(*block.keys_values(tokens, rotation)) for tokens, block in pairs)
    return forward_tasks(vit, views, streams, images)


def full_attention(
    vit: ViT,
    pixels: Tensor,
    tensors: Mapping[str, Tensor],
    update: str = "fresh",
    hook: AttentionHook | None = None,
) -> Tensor:
    """Every token reads the cells: best for one task, and the old outputs change.

    `tensors` are a task's: cells (l, m, D), class token and adapters, as far as it has them. The
    paper's way is `fresh`. Figure 2b has two that its authors found worse: `propagate`, where the
    first layer's cells are ordinary tokens from there on, and `add`, where every layer adds its own
    learned cells to the propagated ones. The cells are dropped at the end. `hook` is called for
    token 0, with the values of all that it reads.
    """
    x = vit.embed(pixels, tensors.get("class_token"))
    n = x.shape[1]
    rotation, adapters = vit.rotation(pixels.shape[-2:], n), find_adapters(tensors)
    bank = None if adapters is None else AdapterBank([(range(1), adapters)], 1)
    cells = tensors.get("cells", x.new_empty(vit.config.depth, 0, vit.config.width))

    def attend(block: Block, normed: Tensor, fresh: Tensor | None) -> Tensor:
        q, k, v = block.project(normed, rotation)
        if fresh is not None and len(fresh):
            cell_k, cell_v = block.keys_values(block.norm1(fresh).unsqueeze(0))
            k = torch.cat([k, cell_k.expand(k.shape[0], -1, -1, -1)], dim=2)
            v = torch.cat([v, cell_v.expand(v.shape[0], -1, -1, -1)], dim=2)
        read = merge_heads(F.scaled_dot_product_attention(q, k, v))
        if hook is not None:
            weights = (q[:, :, 0:1] @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
            hook(block, weights, v, read[:, :1])
        return read

    for layer, block in enumerate(vit.layers):
        if update != "fresh" and layer == 0:
            x = torch.cat([x, cells[0].expand(x.shape[0], -1, -1)], dim=1)
        elif update == "add":
            x = torch.cat([x[:, :n], x[:, n:] + cells[layer]], dim=1)
        fresh = cells[layer] if update == "fresh" else None
        x = block(x, partial(attend, fresh=fresh), layer_adapters(bank, layer))
    return x[:, :n]
