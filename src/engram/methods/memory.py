"""The paper: memory cells, streams that read each other by Table 1, and how a stream attends.

Sandler, Zhmoginov, Vladymyrov, Jackson, "Fine-tuning Image Transformers using Learnable Memory",
CVPR 2022. A ViT with N patches and a class token (the *backbone stream*) learns a new task through
its own class token (a *task stream*) and m *cells* at every layer. At layer l the cells E_l join
the tokens before the layer's first norm, give keys and values only, and are dropped: the next
layer has fresh ones (Figures 1-3). Who may read whom is Table 1, queries down, keys across:

               backbone   C1   C2   M1   M2
    backbone      x       -    -    -    -    it never sees a task: its output cannot change
    C1            x       x    -    x    -    a task reads the backbone, itself and its own cells
    C2            x       *    x    *    x    * and, if it extends task 1, that task and its cells

It is computed in three forms, which give the same:

    one class token      torch's fused attention: it may read all there is, so there is no mask;
                         2 to 8 % less time for one image
    several, by keys     `read_by_keys`: each reads its own few tokens and cells, which no mask over
                         all of them could say without computing what is then thrown away
    from normed tokens   `Memory._attend_tokens`: a cache has no keys, and for few class tokens
                         making none is less work than making all; half the memory in training

Axes, beside those of layers.py (b images, n backbone tokens, h heads, d, D, l layers):

    s class tokens of all tasks in the pass   a class tokens that one reads   m cells that one reads

forward.py runs the streams through the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.methods.adapters import AdapterBank, Adapters, PaddedAdapters
from engram.util.tensors import to_device
from engram.vit.layers import Block, merge_heads
from engram.vit.vit import ViT

QKV = tuple[Tensor, Tensor, Tensor]  # queries, keys and values


@dataclass(frozen=True)
class Stream:
    """One task's tokens and cells in a pass."""

    name: str
    token: Tensor  # (k, D); the paper has k = 1
    cells: Tensor  # (l, m, D); m may be 0
    reads: Sequence[int]  # streams of the pass: all its ancestors, in order, and itself, the last
    after_norm: bool = False  # the cells join behind the norm: the public re-implementations
    adapters: Adapters | None = None


class KeysValues(NamedTuple):
    """Keys and values: of the backbone at one layer, (b, h, n, d) each, if nothing else is said."""

    k: Tensor
    v: Tensor


#: The backbone as a task stream sees it at one layer; without keys, by its normed tokens (b, n, D).
BackboneView = KeysValues | Tensor
#: Called at each layer with its block, the attention weights (b, h, s, …), the backbone's values
#: (b, h, n, d), and what the class tokens read (b, s, D).
AttentionHook = Callable[[Block, Tensor, Tensor, Tensor], None]


class Streams(Protocol):
    """Class tokens that go through the layers: of a `Memory`, or routed by image."""

    whole: bool  # they are beside all images
    bank: AdapterBank | PaddedAdapters | None

    def start(self, images: int) -> Tensor:
        """The class tokens at the first layer: (b, s, D)."""

    def attend(self, layer: int, block: Block, normed: Tensor, backbone: BackboneView) -> Tensor:
        """Attention of class tokens, normed (b, s, D), beside a backbone that runs by itself."""

    def attend_keys(self, layer: int, block: Block, own: QKV, backbone: KeysValues) -> Tensor:
        """`attend` by keys and values; `own` are those of the class tokens."""


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
    parameter changes, for many passes). A `hook` is called with the attention weights of a pass.
    """

    whole = True
    hook: AttentionHook | None = None

    def __init__(self, vit: ViT, streams: Sequence[Stream]) -> None:
        self.token = vit.place(torch.cat([stream.token for stream in streams]))  # (s, D)
        self.streams = streams
        lengths = [len(stream.token) for stream in streams]
        self.spans = spans(lengths)
        cells = spans([stream.cells.shape[1] for stream in streams])
        reads = [stream.reads for stream in streams]
        self.token_table, tokens_missing = _table(reads, self.spans, lengths)
        cell_table, cells_missing = _table(reads, cells, lengths)
        self.tokens_read = self._index(self.token_table)  # (s, a)
        self.cells_read = self._index(cell_table)  # (s, m)
        missing = [[*a, *m] for a, m in zip(tokens_missing, cells_missing, strict=True)]
        self.missing: Tensor | None = None  # (s, a + m)
        if any(map(any, missing)):
            self.missing = to_device(torch.tensor(missing), self.token.device)
        s, a = self.tokens_read.shape
        self.reads_only_itself = a == 1 and s == len(streams)
        self._kept: dict[int, KeysValues] = {}  # of cells, by layer
        pairs = zip(self.spans, streams, strict=True)
        self.adapted = [(span, one.adapters) for span, one in pairs if one.adapters is not None]
        self.bank: AdapterBank | PaddedAdapters | None = None
        if self.adapted:
            self.bank = AdapterBank(self.adapted, s)

    def _index(self, rows: list[list[int]]) -> Tensor:
        index = torch.tensor(rows, dtype=torch.long).view(len(rows), len(rows[0]))
        return to_device(index, self.token.device)

    @classmethod
    def from_tensors(cls, tensors: MemoryTensors) -> Memory:
        """The memory that gave these tensors, for the passes only: no stream has a name in it."""
        memory = cls.__new__(cls)
        memory.token, memory.tokens_read = tensors.token, tensors.tokens_read
        memory.missing, memory.reads_only_itself = tensors.missing, False
        pairs = zip(tensors.keys, tensors.values, strict=True)
        memory._kept = {layer: KeysValues(*pair) for layer, pair in enumerate(pairs)}
        memory.bank = tensors.bank
        return memory

    def tensors(self, vit: ViT, adapters: bool) -> MemoryTensors:
        """All that a pass needs of this memory, as tensors with no empty axis.

        With `adapters`, there are some in any case: zeros, where no stream has any.
        """
        cells = [self.keys_values(layer, block) for layer, block in enumerate(vit.layers)]
        keys, values = torch.stack([one.k for one in cells]), torch.stack([one.v for one in cells])
        s, m = keys.shape[2:4]
        missing = self.missing
        if missing is None:
            missing = keys.new_zeros(s, self.tokens_read.shape[1] + m, dtype=torch.bool)
        if not m:
            keys, values = (F.pad(part, (0, 0, 0, 1)) for part in (keys, values))
            missing = F.pad(missing, (0, 1), value=True)
        own = self.token, self.tokens_read, missing, keys, values
        bank = (
            PaddedAdapters.create(self.adapted, len(vit.layers), self.token) if adapters else None
        )
        return MemoryTensors(*own, bank)

    def start(self, images: int) -> Tensor:
        return self.token.expand(images, -1, -1)

    def split(self, y: Tensor) -> dict[str, Tensor]:
        """The tokens (b, s, D) of all streams by name: (b, k, D) each."""
        pairs = zip(self.streams, self.spans, strict=True)
        return {stream.name: y[:, span.start : span.stop] for stream, span in pairs}

    def join(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `split`."""
        return torch.cat([tokens[stream.name] for stream in self.streams], dim=1)

    def attend(self, layer: int, block: Block, normed: Tensor, backbone: BackboneView) -> Tensor:
        if isinstance(backbone, KeysValues):
            return self.attend_keys(layer, block, block.project(normed), backbone)
        return self._attend_tokens(layer, block, normed, backbone)

    def attend_keys(self, layer: int, block: Block, own: QKV, backbone: KeysValues) -> Tensor:
        q, k, v = own  # (b, h, s, d)
        cells = self.keys_values(layer, block)
        if q.shape[2] == 1 and self.hook is None:
            k = torch.cat([backbone.k, k, cells.k[:, 0].expand(q.shape[0], -1, -1, -1)], dim=2)
            v = torch.cat([backbone.v, v, cells.v[:, 0].expand(q.shape[0], -1, -1, -1)], dim=2)
            return merge_heads(F.scaled_dot_product_attention(q, k, v))
        tokens = KeysValues(self._read(k, dim=2), self._read(v, dim=2))
        read, weights = read_by_keys(q, backbone, tokens, cells, self.missing)
        if self.hook is not None:
            self.hook(block, weights, backbone.v, read)
        return read

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

    def keys_values(self, layer: int, block: Block) -> KeysValues:
        """Keys and values of the cells that each class token reads: (h, s, m, d), kept."""
        if layer not in self._kept:
            k, v = block.keys_values(self._normed(layer, block).unsqueeze(0))
            k, v = F.pad(k[0], (0, 0, 0, 1)), F.pad(v[0], (0, 0, 0, 1))  # the row behind all, blank
            self._kept[layer] = KeysValues(k[:, self.cells_read], v[:, self.cells_read])
        return self._kept[layer]

    def _normed(self, layer: int, block: Block) -> Tensor:
        """The cells of all streams behind the norm, one stream after another."""
        cells = [
            stream.cells[layer] if stream.after_norm else block.norm1(stream.cells[layer])
            for stream in self.streams
        ]
        return torch.cat(cells)

    def _read(self, x: Tensor, dim: int) -> Tensor:
        """Gather the class tokens that each one reads: (…, s, …) -> (…, s, a, …) at `dim`."""
        if self.reads_only_itself:
            return x.unsqueeze(dim + 1)
        return x[(slice(None),) * dim + (self.tokens_read,)]


def read_by_keys(
    q: Tensor, backbone: KeysValues, tokens: KeysValues, cells: KeysValues, missing: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of class tokens with queries q (b, h, s, d), over what each of them may read.

    These are the backbone, class tokens (b, h, s, a, d), and cells (h, s, m, d), or (b, s, h, m, d)
    where each image has its own; `missing` is padding among tokens and cells, (…, s, a + m). Gives
    what was read (b, s, D), and the weights (b, h, s, n + a + m).
    """
    q = q * q.shape[-1] ** -0.5
    to_backbone = q @ backbone.k.mT
    to_tokens = (q.unsqueeze(3) * tokens.k).sum(-1)
    to_cells = _times_cells(q, cells.k.mT)
    lengths = [to_backbone.shape[-1], to_tokens.shape[-1], to_cells.shape[-1]]
    weights = _weigh(to_backbone, torch.cat([to_tokens, to_cells], dim=-1), missing)
    to_backbone, to_tokens, to_cells = torch.split(weights, lengths, dim=-1)
    read = to_backbone @ backbone.v + (to_tokens.unsqueeze(-1) * tokens.v).sum(3)
    return merge_heads(read + _times_cells(to_cells, cells.v)), weights


def _times_cells(x: Tensor, y: Tensor) -> Tensor:
    """x (b, h, s, i) and y (h, s, i, j), or (b, s, h, i, j), to (b, h, s, j).

    In an exported graph, every row is a product by itself, so that no bit depends on how many
    images there are: products of one row and of several add up in another order.
    """
    if y.ndim == 4 and torch.compiler.is_exporting():
        rows: Tensor = x.unsqueeze(3) @ y
        return rows.squeeze(3)
    return torch.einsum("bhsi,hsij->bhsj" if y.ndim == 4 else "bhsi,bshij->bhsj", x, y)


def _weigh(backbone: Tensor, memory: Tensor, missing: Tensor | None) -> Tensor:
    """Softmax over scores of the backbone (b, h, s, n) and the memory (b, h, s, a + m)."""
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
    reads: Sequence[Sequence[int]], spans: Sequence[range], lengths: Sequence[int]
) -> tuple[list[list[int]], list[list[bool]]]:
    """The rows that each class token reads, padded, and where it is padded.

    Padding repeats a row that it reads, or points behind all rows if there is none: never at a
    row of others, which would reach it (0 * NaN = NaN) if their task diverged. No tensor decides a
    shape here, so that torch.compile takes the table as a constant.
    """
    rows = [[row for other in read for row in spans[other]] for read in reads]
    most, blank = max(map(len, rows)), spans[-1].stop
    table, missing = [], []
    for row, length in zip(rows, lengths, strict=True):
        few = most - len(row)
        table += [row + (row[-1:] or [blank]) * few] * length
        missing += [[False] * len(row) + [True] * few] * length
    return table, missing
