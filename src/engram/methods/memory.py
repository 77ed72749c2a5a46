"""The paper: memory cells, streams that read each other by Table 1, and how a stream attends.

Sandler, Zhmoginov, Vladymyrov, Jackson, "Fine-tuning Image Transformers using Learnable Memory",
CVPR 2022. A ViT with N patches and a class token (the *backbone stream*) learns a new task through
its own class token (a *task stream*) and m *cells* at every layer. At layer l the cells E_l join
the tokens before the layer's first norm, give keys and values only, and are dropped: the next
layer has fresh ones (Figures 1-3). Who may read whom is Table 1, queries down, keys across:

            backbone   C1   C2   M1   M2
    backbone     x     -    -    -    -      the backbone never sees a task: its output cannot
    change C1        x     x    -    x    -      a task reads the backbone, itself and its own cells
    C2        x     *    x    *    x      * and, only if it extends task 1, that task and its cells

Axes, beside those of layers.py (b images, n backbone tokens, h heads, d, D, l layers):

    s class tokens of all tasks in the pass   a class tokens that one reads   m cells that one reads

forward.py runs the streams through the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engram.methods.adapters import (
    AdapterBank,
    AdapterProtocol,
    Adapters,
    PaddedAdapters,
)
from engram.util.devices import to_device
from engram.vit.layers import Block, merge_heads
from engram.vit.vit import ViT

_Row = TypeVar("_Row")
QKV = tuple[Tensor, Tensor, Tensor]  # queries, keys and values


@dataclass(frozen=True)
class Stream:
    """What one task brings into a pass."""

    name: str
    token: Tensor  # (k, D); the paper has k = 1
    cells: Tensor  # (l, m, D); m may be 0
    extends: tuple[int, ...] = ()  # the earlier streams of the pass that it reads, all ancestors
    after_norm: bool = False  # the cells join behind the norm: the public re-implementations
    adapters: Adapters | None = None


# The backbone, as a task stream sees it at one layer


@dataclass(frozen=True)
class KeysValues:
    """The backbone's keys and values, just computed."""

    k: Tensor  # (b, h, n, d)
    v: Tensor


@dataclass(frozen=True)
class Normed:
    """The backbone's normed tokens, as from a cache: no key or value is computed for them."""

    tokens: Tensor  # (b, n, D)
    checkpointed: bool = False  # recomputed in the backward pass (activation checkpointing)


BackboneView = KeysValues | Normed


# Table 1


class AttentionHook(Protocol):
    """Called with the attention weights of a layer: (b, h, s, n), (b, h, s, a), (b, h, s, m).

    Also with the backbone's values (b, h, n, d), and with what the class tokens read (b, s, D).
    """

    def __call__(
        self,
        layer: int,
        to_backbone: Tensor,
        to_tokens: Tensor,
        to_cells: Tensor,
        values: Tensor,
        read: Tensor,
        /,
    ) -> None: ...


class MemoryTensors(NamedTuple):
    """A `Memory` as inputs of an exported graph, which is then the same for any tasks."""

    token: Tensor  # (s, D)
    tokens_read: Tensor  # (s, a)
    missing: Tensor  # (s, a + m)
    keys: Tensor  # of cells, (l, h, s, m, d)
    values: Tensor
    bank: PaddedAdapters | None = None


class Memory:
    """The task streams of a pass and all they need to read: Table 1 as indices, and the cells.

    Cells depend on no image, so their keys and values are computed once for the pass (or, while no
    parameter changes, for many passes).
    """

    def __init__(self, vit: ViT, streams: Sequence[Stream]) -> None:
        self.token = vit.place(torch.cat([stream.token for stream in streams]))  # (s, D)
        self.streams = streams
        lengths = [len(stream.token) for stream in streams]
        self.spans = spans(lengths)
        cells = spans([stream.cells.shape[1] for stream in streams])
        reads = [(*stream.extends, i) for i, stream in enumerate(streams)]
        device = self.token.device
        self.tokens_read, tokens_missing = _table(reads, self.spans, lengths, device)  # (s, a)
        self.cells_read, cells_missing = _table(reads, cells, lengths, device)  # (s, m)
        missing = [[*a, *m] for a, m in zip(tokens_missing, cells_missing, strict=True)]
        self.missing: Tensor | None = None  # (s, a + m)
        if any(map(any, missing)):
            self.missing = to_device(torch.tensor(missing), device)
        s, a = self.tokens_read.shape
        self.reads_only_itself = a == 1 and s == len(streams)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values of cells, by layer
        self._stacked: tuple[Tensor, Tensor] | None = None
        members = [
            (span, stream.adapters)
            for span, stream in zip(self.spans, streams, strict=True)
            if stream.adapters is not None
        ]
        self.bank: AdapterProtocol | None = AdapterBank(members, s) if members else None

    @classmethod
    def of_tensors(cls, tensors: MemoryTensors) -> Memory:
        """The memory that gave these tensors, for the passes only: no stream has a name in it."""
        memory = cls.__new__(cls)
        memory.token, memory.tokens_read = tensors.token, tensors.tokens_read
        memory.missing, memory.reads_only_itself = tensors.missing, False
        memory._kept = dict(enumerate(zip(tensors.keys, tensors.values, strict=True)))
        memory.bank = tensors.bank
        return memory

    def tensors(self, vit: ViT, adapters: bool) -> MemoryTensors:
        """All that a pass needs of this memory, as tensors with no empty axis.

        With `adapters`, there are some in any case: zeros, where no stream has any.
        """
        keys, values = self.stacked(vit)
        s, m = keys.shape[2:4]
        missing = self.missing
        if missing is None:
            missing = keys.new_zeros(s, self.tokens_read.shape[1] + m, dtype=torch.bool)
        if not m:
            keys, values = (F.pad(part, (0, 0, 0, 1)) for part in (keys, values))
            missing = F.pad(missing, (0, 1), value=True)
        own = self.token, self.tokens_read, missing, keys, values
        if not adapters:
            return MemoryTensors(*own)
        bank = self.bank if isinstance(self.bank, AdapterBank) else AdapterBank([], s)
        return MemoryTensors(*own, bank.rows(len(vit.layers), self.token))

    def start(self, images: int) -> Tensor:
        """The class tokens at the first layer: (b, s, D)."""
        return self.token.expand(images, -1, -1)

    def split(self, y: Tensor) -> dict[str, Tensor]:
        """The tokens (b, s, D) of all streams by name: (b, k, D) each."""
        pairs = zip(self.streams, self.spans, strict=True)
        return {stream.name: y[:, span.start : span.stop] for stream, span in pairs}

    def attend(self, layer: int, block: Block, normed: Tensor, backbone: BackboneView) -> Tensor:
        """Every class token reads the backbone, the class tokens and the cells that Table 1 allows.

        `normed` (b, s, D) are the class tokens behind the norm; gives what they read, (b, s, D).
        """
        if isinstance(backbone, Normed):
            inputs = layer, block, normed, backbone.tokens
            if backbone.checkpointed:
                read: Tensor = checkpoint(
                    self._attend_tokens, *inputs, use_reentrant=False, preserve_rng_state=False
                )
                return read
            return self._attend_tokens(*inputs)
        return self.attend_keys(layer, block, block.project(normed), backbone)

    def attend_keys(
        self,
        layer: int,
        block: Block,
        own: QKV,
        backbone: KeysValues,
        hook: AttentionHook | None = None,
    ) -> Tensor:
        """`attend` by keys and values, as usual; `own` (b, h, s, d) are the tasks'."""
        q, k, v = own
        cell_k, cell_v = self.keys_values(layer, block)  # (h, s, m, d)
        if q.shape[2] == 1 and hook is None:  # it may read all there is: no mask
            k = torch.cat([backbone.k, k, cell_k[:, 0].expand(q.shape[0], -1, -1, -1)], dim=2)
            v = torch.cat([backbone.v, v, cell_v[:, 0].expand(q.shape[0], -1, -1, -1)], dim=2)
            return merge_heads(F.scaled_dot_product_attention(q, k, v))
        tokens = KeysValues(self._read(k, dim=2), self._read(v, dim=2))  # (b, h, s, a, d)
        cells = KeysValues(cell_k, cell_v)
        return read_by_keys(layer, q, backbone, tokens, cells, "hsmd", self.missing, hook)

    def _attend_tokens(self, layer: int, block: Block, normed: Tensor, backbone: Tensor) -> Tensor:
        """`attend` without any key or value, from the normed tokens and cells x themselves:

            q . (W_k x + b_k) = (W_k' q) . x + q . b_k
            sum w (W_v x + b_v) = W_v (sum w x) + b_v

        The softmax does not see q . b_k, which is the same for all that a class token reads.
        """
        b, s, width = normed.shape
        w_q, w_k, w_v = block.qkv.weight.view(3, block.heads, -1, width)  # each (h, d, D)
        b_q, _, b_v = (None,) * 3 if block.qkv.bias is None else block.qkv.bias.chunk(3)
        q = F.linear(normed, w_q.flatten(0, 1), b_q).view(b, s, block.heads, -1)
        q = torch.einsum("bshd,hdD->bshD", q * q.shape[-1] ** -0.5, w_k).reshape(b, -1, width)
        cells = F.pad(self._normed(layer, block), (0, 0, 0, 1))[self.cells_read]
        memory = torch.cat([self._read(normed, dim=1), cells.expand(b, -1, -1, -1)], dim=2)
        of_backbone = (q @ backbone.mT).view(b, s, block.heads, -1)
        of_memory = _scores(q.view(b, s, -1, width), memory)  # (b, s, h, a + m)
        weights = _weigh(of_backbone.transpose(1, 2), of_memory.transpose(1, 2), self.missing)
        lengths = [of_backbone.shape[-1], of_memory.shape[-1]]
        to_backbone, to_memory = torch.split(weights.transpose(1, 2), lengths, dim=-1)
        read = (to_memory @ memory).flatten(1, 2)
        read = torch.baddbmm(read, to_backbone.flatten(1, 2), backbone).view(b, s, -1, width)
        read = torch.einsum("bshD,hdD->bshd", read, w_v).flatten(2)
        return read if b_v is None else read + b_v

    def keys_values(self, layer: int, block: Block) -> tuple[Tensor, Tensor]:
        """Keys and values of the cells that each class token reads: twice (h, s, m, d), kept."""
        if layer not in self._kept:
            k, v = block.keys_values(self._normed(layer, block).unsqueeze(0))
            k, v = F.pad(k[0], (0, 0, 0, 1)), F.pad(v[0], (0, 0, 0, 1))  # the row behind all, blank
            self._kept[layer] = k[:, self.cells_read], v[:, self.cells_read]
        return self._kept[layer]

    def stacked(self, vit: ViT) -> tuple[Tensor, Tensor]:
        """The same of all layers: twice (l, h, s, m, d), kept."""
        if self._stacked is None:
            kept = [self.keys_values(layer, block) for layer, block in enumerate(vit.layers)]
            keys, values = (torch.stack(part) for part in zip(*kept, strict=True))
            self._kept = dict(enumerate(zip(keys, values, strict=True)))
            self._stacked = keys, values
        return self._stacked

    def _normed(self, layer: int, block: Block) -> Tensor:
        """The cells of all streams behind the norm, one stream after another."""
        cells = [
            stream.cells[layer] if stream.after_norm else block.norm1(stream.cells[layer])
            for stream in self.streams
        ]
        return torch.cat(cells)

    def _read(self, x: Tensor, dim: int) -> Tensor:
        """What each class token reads of the class tokens at `dim`: (…, s, …) -> (…, s, a, …)."""
        if self.reads_only_itself:
            return x.unsqueeze(dim + 1)
        return x[(slice(None),) * dim + (self.tokens_read,)]


def read_by_keys(
    layer: int,
    q: Tensor,
    backbone: KeysValues,
    tokens: KeysValues,
    cells: KeysValues,
    axes: str,
    missing: Tensor | None,
    hook: AttentionHook | None = None,
) -> Tensor:
    """What queries (b, h, s, d) read of the backbone, of class tokens and of cells: (b, s, D).

    The class tokens' keys and values are (b, h, s, a, d), `axes` are those of the cells'; `missing`
    (…, s, a + m) is what is only padding.
    """
    q = q * q.shape[-1] ** -0.5
    of_backbone = q @ backbone.k.mT
    of_tokens = (q.unsqueeze(3) * tokens.k).sum(-1)
    by_row = torch.compiler.is_exporting() and axes == "hsmd"
    of_cells = _by_row(q, cells.k.mT) if by_row else torch.einsum(f"bhsd,{axes}->bhsm", q, cells.k)
    weights = _weigh(of_backbone, torch.cat([of_tokens, of_cells], dim=-1), missing)
    lengths = [of_backbone.shape[-1], of_tokens.shape[-1], of_cells.shape[-1]]
    to_backbone, to_tokens, to_cells = torch.split(weights, lengths, dim=-1)
    read = to_backbone @ backbone.v + (to_tokens.unsqueeze(-1) * tokens.v).sum(3)
    of_cells = (
        _by_row(to_cells, cells.v)
        if by_row
        else torch.einsum(f"bhsm,{axes}->bhsd", to_cells, cells.v)
    )
    read = merge_heads(read + of_cells)
    if hook is not None:
        hook(layer, to_backbone, to_tokens, to_cells, backbone.v, read)
    return read


def _by_row(x: Tensor, y: Tensor) -> Tensor:
    """x (b, h, s, i) and y (h, s, i, j) to (b, h, s, j), every row by itself.

    So no bit of an exported graph depends on how many images there are: products of one row and of
    several add up in another order.
    """
    rows: Tensor = x.unsqueeze(3) @ y
    return rows.squeeze(3)


def _weigh(backbone: Tensor, memory: Tensor, missing: Tensor | None) -> Tensor:
    """From scores of the backbone (b, h, s, n) and the memory (b, h, s, a + m) to weights."""
    if missing is not None:
        memory = memory.masked_fill(missing, -torch.inf)
    return torch.cat([backbone, memory], dim=-1).softmax(-1)


def _scores(q: Tensor, x: Tensor) -> Tensor:
    """q (…, h, D) and x (…, m, D) to (…, h, m)."""
    scores: Tensor = _Scores.apply(q, x)  # type: ignore[no-untyped-call]
    return scores


class _Scores(torch.autograd.Function):
    """q @ x.mT, whose own gradient for x is slow: it comes as D rows of m."""

    @staticmethod
    def forward(context: Any, q: Tensor, x: Tensor) -> Tensor:
        context.save_for_backward(q, x)
        return q @ x.mT

    @staticmethod
    def backward(context: Any, back: Tensor) -> tuple[Tensor, Tensor]:
        q, x = context.saved_tensors
        return back @ x.to(back.dtype), back.mT @ q.to(back.dtype)


def spans(lengths: Sequence[int]) -> list[range]:
    """The places of so many rows each, one after another."""
    ends = accumulate(lengths)
    return [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def _table(
    reads: Sequence[Sequence[int]],
    spans: Sequence[range],
    repeat: Sequence[int],
    device: torch.device,
) -> tuple[Tensor, list[list[bool]]]:
    """For every class token, the rows it reads, padded, and where it is padded.

    Padding repeats a row that it reads, or points behind all rows if there is none: never at a
    row of others, which would reach it (0 * NaN = NaN) if their task diverged. No tensor decides a
    shape here, so that torch.compile takes the table as a constant.
    """
    rows = [[row for other in read for row in spans[other]] for read in reads]
    most, blank = max(map(len, rows)), spans[-1].stop
    index = [row + (row[-1:] or [blank]) * (most - len(row)) for row in rows]
    missing = [[False] * len(row) + [True] * (most - len(row)) for row in rows]
    table = to_device(torch.tensor(_repeated(index, repeat), dtype=torch.long), device)
    return table.view(sum(repeat), most), _repeated(missing, repeat)


def _repeated(rows: Sequence[_Row], counts: Sequence[int]) -> list[_Row]:
    return [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
