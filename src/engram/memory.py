"""The paper: memory cells, streams that read each other by Table 1, and how a stream attends.

Sandler, Zhmoginov, Vladymyrov, Jackson, "Fine-tuning Image Transformers using Learnable Memory",
CVPR 2022. A ViT with N patches and a class token (the *trunk stream*) learns a new task through
its own class token (a *task stream*) and m *cells* at every layer. At layer l the cells E_l join
the tokens before the layer's first norm, give keys and values only, and are dropped: the next
layer has fresh ones (Figures 1-3). Who may read whom is Table 1, queries down, keys across:

            trunk   C1   C2   M1   M2
    trunk     x     -    -    -    -      the trunk never sees a task: its output cannot change
    C1        x     x    -    x    -      a task reads the trunk, itself and its own cells
    C2        x     *    x    *    x      * and, only if it extends task 1, that task and its cells

Axes, beside those of vit.py (b images, n trunk tokens, h heads, d, D, l layers):

    s class tokens of all tasks in the pass   a class tokens that one reads   m cells that one reads

Long because the whole method of the paper stands in this one file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engram.adapters import Adapters, Adding, Bank, LayerAdapters, RowBank
from engram.positions import Rotation
from engram.util.devices import to_device
from engram.vit import Attend, Block, See, ViT, merge_heads

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


# The trunk, as a task stream sees it at one layer


@dataclass(frozen=True)
class KeysValues:
    """The trunk's keys and values, just computed."""

    k: Tensor  # (b, h, n, d)
    v: Tensor


@dataclass(frozen=True)
class Normed:
    """The trunk's normed tokens, as from a cache: no key or value is computed for them."""

    tokens: Tensor  # (b, n, D)
    lean: bool = False  # while they are read, autograd keeps nothing: it reads them again


TrunkView = KeysValues | Normed


# Table 1


class Watch(Protocol):
    """Called with the attention weights of a layer: (b, h, s, n), (b, h, s, a), (b, h, s, m).

    Also with the trunk's values (b, h, n, d), and with what the class tokens read (b, s, D).
    """

    def __call__(
        self,
        layer: int,
        to_trunk: Tensor,
        to_tokens: Tensor,
        to_cells: Tensor,
        values: Tensor,
        read: Tensor,
        /,
    ) -> None: ...


#: The same where all tokens read each other, of token 0: weights (b, h, n + m), values, (b, 1, D).
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


class MemoryTensors(NamedTuple):
    """A `Memory` as inputs of an exported graph, which is then the same for any tasks."""

    token: Tensor  # (s, D)
    tokens_read: Tensor  # (s, a)
    missing: Tensor  # (s, a + m)
    keys: Tensor  # of cells, (l, h, s, m, d)
    values: Tensor
    bank: RowBank | None = None


class Memory:
    """The task streams of a pass and all they need to read: Table 1 as indices, and the cells.

    Cells depend on no image, so their keys and values are computed once for the pass (or, while no
    parameter changes, for many passes).
    """

    def __init__(self, vit: ViT, streams: Sequence[Stream]) -> None:
        self.token = vit.place(torch.cat([stream.token for stream in streams]))  # (s, D)
        self.streams = streams
        self.spans = _spans([len(stream.token) for stream in streams])
        cells = _spans([stream.cells.shape[1] for stream in streams])
        reads = [(*stream.extends, i) for i, stream in enumerate(streams)]
        device = self.token.device
        lengths = [len(stream.token) for stream in streams]
        self.tokens_read, tokens_missing = _table(reads, self.spans, lengths, device)  # (s, a)
        self.cells_read, cells_missing = _table(reads, cells, lengths, device)  # (s, m)
        missing = [[*a, *m] for a, m in zip(tokens_missing, cells_missing, strict=True)]
        self.missing: Tensor | None = None  # (s, a + m)
        if any(map(any, missing)):
            self.missing = to_device(torch.tensor(missing), device)
        s, a = self.tokens_read.shape
        self.reads_only_itself = a == 1 and s == len(streams)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values of cells, by layer
        members = [
            (span, stream.adapters)
            for span, stream in zip(self.spans, streams, strict=True)
            if stream.adapters is not None
        ]
        self.bank: Adding | None = Bank(members, s) if members else None

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
        kept = [self.keys_values(layer, block) for layer, block in enumerate(vit.layers)]
        keys, values = (torch.stack(part) for part in zip(*kept, strict=True))
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
        bank = self.bank if isinstance(self.bank, Bank) else Bank([], s)
        return MemoryTensors(*own, bank.rows(len(vit.layers), self.token))

    def start(self, images: int) -> Tensor:
        """The class tokens at the first layer: (b, s, D)."""
        return self.token.expand(images, -1, -1)

    def split(self, y: Tensor) -> dict[str, Tensor]:
        """The tokens (b, s, D) of all streams by name: (b, k, D) each."""
        pairs = zip(self.streams, self.spans, strict=True)
        return {stream.name: y[:, span.start : span.stop] for stream, span in pairs}

    def attend(self, layer: int, block: Block, normed: Tensor, trunk: TrunkView) -> Tensor:
        """Every class token reads the trunk, the class tokens and the cells that Table 1 allows.

        `normed` (b, s, D) are the class tokens behind the norm; gives what they read, (b, s, D).
        """
        if isinstance(trunk, Normed):
            given = layer, block, normed, trunk.tokens
            if trunk.lean:
                read: Tensor = checkpoint(
                    self._attend_tokens, *given, use_reentrant=False, preserve_rng_state=False
                )
                return read
            return self._attend_tokens(*given)
        return self.attend_keys(layer, block, block.project(normed), trunk)

    def attend_keys(
        self, layer: int, block: Block, own: QKV, trunk: KeysValues, watch: Watch | None = None
    ) -> Tensor:
        """`attend` by keys and values, as usual; `own` (b, h, s, d) are the tasks'."""
        q, k, v = own
        cell_k, cell_v = self.keys_values(layer, block)  # (h, s, m, d)
        if q.shape[2] == 1 and watch is None:  # it may read all there is: no mask
            k = torch.cat([trunk.k, k, cell_k[:, 0].expand(q.shape[0], -1, -1, -1)], dim=2)
            v = torch.cat([trunk.v, v, cell_v[:, 0].expand(q.shape[0], -1, -1, -1)], dim=2)
            return merge_heads(F.scaled_dot_product_attention(q, k, v))
        tokens = KeysValues(self._read(k, dim=2), self._read(v, dim=2))  # (b, h, s, a, d)
        cells = KeysValues(cell_k, cell_v)
        return read_by_keys(layer, q, trunk, tokens, cells, "hsmd", self.missing, watch)

    def _attend_tokens(self, layer: int, block: Block, normed: Tensor, trunk: Tensor) -> Tensor:
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
        of_trunk = (q @ trunk.mT).view(b, s, block.heads, -1)
        of_memory = _scores(q.view(b, s, -1, width), memory)  # (b, s, h, a + m)
        weights = _weigh(of_trunk.transpose(1, 2), of_memory.transpose(1, 2), self.missing)
        lengths = [of_trunk.shape[-1], of_memory.shape[-1]]
        to_trunk, to_memory = torch.split(weights.transpose(1, 2), lengths, dim=-1)
        read = (to_memory @ memory).flatten(1, 2)
        read = torch.baddbmm(read, to_trunk.flatten(1, 2), trunk).view(b, s, -1, width)
        read = torch.einsum("bshD,hdD->bshd", read, w_v).flatten(2)
        return read if b_v is None else read + b_v

    def keys_values(self, layer: int, block: Block) -> tuple[Tensor, Tensor]:
        """Keys and values of the cells that each class token reads: twice (h, s, m, d), kept."""
        if layer not in self._kept:
            k, v = block.keys_values(self._normed(layer, block).unsqueeze(0))
            k, v = F.pad(k[0], (0, 0, 0, 1)), F.pad(v[0], (0, 0, 0, 1))  # the row behind all, blank
            self._kept[layer] = k[:, self.cells_read], v[:, self.cells_read]
        return self._kept[layer]

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
    trunk: KeysValues,
    tokens: KeysValues,
    cells: KeysValues,
    axes: str,
    missing: Tensor | None,
    watch: Watch | None = None,
) -> Tensor:
    """What queries (b, h, s, d) read of the trunk, of class tokens and of cells: (b, s, D).

    The class tokens' keys and values are (b, h, s, a, d), `axes` are those of the cells'; `missing`
    (…, s, a + m) is what is only padding.
    """
    q = q * q.shape[-1] ** -0.5
    of_trunk = q @ trunk.k.mT
    of_tokens = (q.unsqueeze(3) * tokens.k).sum(-1)
    by_row = torch.compiler.is_exporting() and axes == "hsmd"
    of_cells = _by_row(q, cells.k.mT) if by_row else torch.einsum(f"bhsd,{axes}->bhsm", q, cells.k)
    weights = _weigh(of_trunk, torch.cat([of_tokens, of_cells], dim=-1), missing)
    lengths = [of_trunk.shape[-1], of_tokens.shape[-1], of_cells.shape[-1]]
    to_trunk, to_tokens, to_cells = torch.split(weights, lengths, dim=-1)
    read = to_trunk @ trunk.v + (to_tokens.unsqueeze(-1) * tokens.v).sum(3)
    of_cells = (
        _by_row(to_cells, cells.v)
        if by_row
        else torch.einsum(f"bhsm,{axes}->bhsd", to_cells, cells.v)
    )
    read = merge_heads(read + of_cells)
    if watch is not None:
        watch(layer, to_trunk, to_tokens, to_cells, trunk.v, read)
    return read


def _by_row(x: Tensor, y: Tensor) -> Tensor:
    """x (b, h, s, i) and y (h, s, i, j) to (b, h, s, j), every row by itself.

    So no bit of an exported graph depends on how many images there are: products of one row and of
    several add up in another order.
    """
    rows: Tensor = x.unsqueeze(3) @ y
    return rows.squeeze(3)


def _weigh(trunk: Tensor, memory: Tensor, missing: Tensor | None) -> Tensor:
    """From scores of the trunk (b, h, s, n) and the memory (b, h, s, a + m) to weights."""
    if missing is not None:
        memory = memory.masked_fill(missing, -torch.inf)
    return torch.cat([trunk, memory], dim=-1).softmax(-1)


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


def _spans(lengths: Sequence[int]) -> list[range]:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
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


# The passes: each takes the trunk's embedded tokens x (b, n, D) and gives the last layer's tokens


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

        def attend(
            block: Block, normed: Tensor, layer: int = layer, view: TrunkView = view
        ) -> Tensor:
            return memory.attend(layer, block, normed, view)

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


def from_normed(
    vit: ViT, layers: Sequence[Tensor], memory: Memory, rotation: Rotation | None = None
) -> Tensor:
    """`forward_tasks` for a trunk that was cached: its normed tokens (b, n, D) of every layer."""
    passes = 2 if torch.is_grad_enabled() else 1  # forward, and back through the same products
    views: Iterable[TrunkView]
    if reads_tokens(vit, layers[0].shape[1], len(memory.token), passes):
        views = map(Normed, layers)
    else:
        pairs = zip(layers, vit.layers, strict=True)
        views = (KeysValues(*block.keys_values(normed, rotation)) for normed, block in pairs)
    return forward_tasks(vit, views, memory, len(layers[0]))


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
