"""A task per image: the streams of a pass in which images ask for different tasks.

The backbone runs once for the whole batch. Beside it, every image has the class tokens of its own
tasks and of those that they extend, in *slots*: as many for every image as the one with the most
needs. Keys and values of cells come from the tasks' own memories, which are kept, and are gathered
by slot, so that all images share each product: no loop over tasks.

Axes, beside those of memory.py: s slots of an image, c slots that one adapter has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.errors import EngramError
from engram.methods.adapters import AdapterProtocol, Adapters
from engram.methods.memory import (
    QKV,
    AttentionHook,
    BackboneView,
    KeysValues,
    Memory,
    read_by_keys,
    spans,
)
from engram.methods.method import Batch, Branch, Features, HeadInput, TaskInput
from engram.util.devices import to_device
from engram.vit.layers import Block
from engram.vit.vit import ViT

#: What one image is asked for: a task, several, or None for the backbone's own answer.
Entry = str | Sequence[str] | None
#: A task, images that asked for it, and its tokens for them (rows, k, D).
Part = tuple[str, list[int], Tensor]
_DENSE = 0.75  # above this density, compute all tasks for all images
_PADDING = 0.125  # empty slots, as a share of the backbone's tokens, that one pass may have


class Route:
    """Which tasks the images of a batch are asked for, checked."""

    def __init__(self, entries: Sequence[Entry], every: Sequence[str] = ()) -> None:
        """`every` are tasks that all images are asked for."""
        if isinstance(entries, str) or not isinstance(entries, Sequence):
            raise EngramError(
                f"route is {entries!r}; give a list with one entry for each image: a task, a "
                "list of tasks, or None for the backbone's own answer."
            )
        self.asked = [
            tuple(dict.fromkeys((*every, *_names(i, entry)))) for i, entry in enumerate(entries)
        ]
        self.rows: dict[str, list[int]] = {name: [] for name in every}
        for image, names in enumerate(self.asked):
            for name in names:
                self.rows.setdefault(name, []).append(image)

    def check(self, images: int) -> None:
        """Refuse a route that has not one entry for each image."""
        if len(self.asked) != images:
            raise EngramError(
                f"route has {len(self.asked)} entries for a batch of {images} images; give one "
                "entry for each image."
            )

    def only(self, wanted: Callable[[str], bool]) -> list[list[str]]:
        """For every image, those of its tasks that are wanted."""
        return [[name for name in names if wanted(name)] for names in self.asked]


def _names(image: int, entry: Entry) -> tuple[str, ...]:
    names = (entry,) if isinstance(entry, str) else ("base",) if entry is None else entry
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise EngramError(
            f"route[{image}] is {entry!r}; give the name of a task, a list of names, or None for "
            "the backbone's own answer."
        )
    return tuple(names)


def is_dense(asked: Sequence[Sequence[str]]) -> bool:
    """Whether nearly every image asks for nearly all that any of them asks for."""
    union = {name for names in asked for name in names}
    return sum(map(len, asked)) >= _DENSE * len(asked) * len(union)


def buckets(slots: Sequence[int], tokens: int) -> list[list[int]]:
    """The images, by how many slots they need, in groups that share a number of slots.

    One group, if that leaves few slots empty beside so many tokens of the backbone. Else images
    that need about as many; those that need none are in no group.
    """
    empty = len(slots) * max(slots) - sum(slots)
    if empty <= _PADDING * len(slots) * tokens:
        return [list(range(len(slots)))]
    groups: dict[int, list[int]] = {}
    for image, count in enumerate(slots):
        if count:
            groups.setdefault((count - 1).bit_length() // 2, []).append(image)
    return [groups[size] for size in sorted(groups)]


class RoutedBranch(Branch):
    """The class tokens of masked tasks, of every image its own."""

    routed = True

    def __init__(
        self, memories: Mapping[str, Memory], batch: Batch, tasks: Mapping[str, TaskInput]
    ) -> None:
        """`memories` are of single tasks with their ancestors, by name, parents first."""
        assert batch.route is not None
        self.route, self.tasks = batch.route, tasks
        order = {name: i for i, name in enumerate(memories)}
        asked = []
        for names in batch.route.only(memories.__contains__):
            own = {one.name for name in names for one in memories[name].streams}
            asked.append(sorted(own, key=order.__getitem__))
        adapters = {
            name: found
            for name, one in memories.items()
            if (found := one.streams[-1].adapters) is not None
        }
        slots = [sum(_own_tokens(memories[name]) for name in own) for own in asked]
        patches = (side // batch.backbone.config.patch for side in batch.size)
        tokens = batch.backbone.config.prefix + math.prod(patches)
        self.groups = [
            RoutedMemory(batch.backbone, memories, adapters, asked, images)
            for images in buckets(slots, tokens)
        ]
        self.together = self.beside = RoutedGroups(self.groups)
        if len(self.groups[0].images) == len(asked):
            self.fast = self.groups[0]

    def last_tokens(self, n: int) -> int:
        return n if any(task.per_pixel for task in self.tasks.values()) else 0

    def head_inputs(self, features: Features) -> dict[str, HeadInput]:
        assert self.final is not None
        streams = self.groups[0] if self.ran_fast else self.together
        found = merged(streams.split(self.final, self.route.rows))
        norm = features.batch.backbone.norm
        inputs = {}
        for name, tokens in found.items():
            patches = features.patches_for(self.tasks[name])
            if patches is not None:
                rows = to_device(torch.tensor(self.route.rows[name]), tokens.device)
                patches = replace(patches, tokens=patches.tokens[rows])
            inputs[name] = HeadInput(norm(tokens), patches)
        return inputs


class RoutedMemory:
    """The streams that some images of a batch ask for, each image its own."""

    def __init__(
        self,
        vit: ViT,
        memories: Mapping[str, Memory],
        adapters: Mapping[str, Adapters],
        asked: Sequence[Sequence[str]],
        images: Sequence[int],
    ) -> None:
        """`memories` and `adapters` are of single tasks, by name.

        `asked` are for every image of the batch its tasks and those that they extend, parents
        first; `images` those of the batch that are here.
        """
        self.images = list(images)
        here = [asked[image] for image in images]
        self._memories = {name: memories[name] for names in here for name in names}
        tokens = {name: one.token[_own(one)] for name, one in self._memories.items()}
        lengths = {name: len(token) for name, token in tokens.items()}
        self._device = next(iter(tokens.values())).device
        self._select = None if len(here) == len(asked) else self._index(self.images)
        self._slots = [_placed(names, lengths) for names in here]
        self.count = max(sum(map(len, own.values())) for own in self._slots)
        rows_of = _placed(list(tokens), lengths)
        empty = [0] * self.count  # what is read there goes nowhere
        rows = [[row for name in own for row in rows_of[name]] for own in self._slots]
        table = [row + empty[len(row) :] for row in rows]
        #: (b, s), into the tokens of all tasks here; None: in their order, as of a task per image
        in_order = list(chain(*table)) == list(range(sum(lengths.values())))
        self._table = None if in_order else self._index(table)
        self._tokens = self._by_slot(torch.cat(list(tokens.values())))  # (b, s, D)
        self._cells = max(_cells_read(one) for one in self._memories.values())
        self._keys, self._values = self._keys_values(vit)
        self._reads, self._missing = self._read_tables()
        self.bank: AdapterProtocol | None = None
        if any(name in adapters for name in self._memories):
            self.bank = RoutedBank(adapters, self._slots, self.count)

    def _index(self, rows: object) -> Tensor:
        return to_device(torch.tensor(rows), self._device)

    def _keys_values(self, vit: ViT) -> tuple[Tensor, Tensor]:
        """Of the cells that the tokens of all tasks here read: twice (l, tokens, h, m, d)."""
        keys, values = [], []
        for memory in self._memories.values():
            k, v = (cells[:, :, _own(memory)].transpose(1, 2) for cells in memory.stacked(vit))
            gap = (0, 0, 0, self._cells - _cells_read(memory))
            keys.append(F.pad(k, gap) if any(gap) else k)
            values.append(F.pad(v, gap) if any(gap) else v)
        return torch.cat(keys, 1), torch.cat(values, 1)

    def _read_tables(self) -> tuple[Tensor | None, Tensor | None]:
        """Table 1 by slot: which slots it reads (b, s, a), and what is padding (b, 1, s, a + m).

        None where each slot reads only itself, and where there is no padding.
        """
        most = max(_tokens_read(one) for one in self._memories.values())
        reads = [[[slot] * most for slot in range(self.count)] for _ in self._slots]
        gaps = [[[False] * (most + self._cells)] * self.count for _ in self._slots]
        for own, read, gap in zip(self._slots, reads, gaps, strict=True):
            for name, place in own.items():
                memory = self._memories[name]
                seen = [slot for other in _streams_read(memory) for slot in own[other]]
                few, cells = most - len(seen), _cells_read(memory)
                absent = [False] * len(seen) + [True] * few
                absent += [False] * cells + [True] * (self._cells - cells)
                for slot in place:
                    read[slot], gap[slot] = seen + seen[-1:] * few, absent
        missing = self._index(gaps).unsqueeze(1) if any(map(any, chain(*gaps))) else None
        return self._index(reads) if most > 1 else None, missing

    def start(self, images: int) -> Tensor:
        """The class tokens at the first layer: (b, s, D)."""
        return self._tokens

    def attend_keys(
        self,
        layer: int,
        block: Block,
        own: QKV,
        backbone: KeysValues,
        hook: AttentionHook | None = None,
    ) -> Tensor:
        """Every class token reads the backbone, the class tokens and the cells that Table 1 allows.

        `own` (b, h, s, d) are the tasks'.
        """
        q, k, v = own
        tokens = KeysValues(self._read(k), self._read(v))
        cells = KeysValues(*(self._by_slot(part[layer]) for part in (self._keys, self._values)))
        return read_by_keys(layer, q, backbone, tokens, cells, "bshmd", self._missing, hook)

    def select(self, backbone: KeysValues) -> KeysValues:
        """The backbone of the images that are here."""
        if self._select is None:
            return backbone
        return KeysValues(backbone.k[self._select], backbone.v[self._select])

    def _read(self, x: Tensor) -> Tensor:
        """What each slot reads of the slots of its image: (b, h, s, d) -> (b, h, s, a, d)."""
        if self._reads is None:
            return x.unsqueeze(3)
        at = self._reads.flatten(1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        return x.gather(2, at).view(*x.shape[:2], *self._reads.shape[1:], -1)

    def _by_slot(self, x: Tensor) -> Tensor:
        """From all tokens of the tasks here (…) to the slots (b, s, …)."""
        if self._table is None:
            return x.reshape(len(self.images), self.count, *x.shape[1:])
        return x[self._table]

    def split(self, y: Tensor, rows: Mapping[str, Sequence[int]]) -> Iterator[Part]:
        """From the tokens (b, s, D): of each task, the images that asked and their (rows, k, D).

        `rows` are all images that asked for a task, by name.
        """
        at = {image: i for i, image in enumerate(self.images)}
        for name in self._memories:
            images = [image for image in rows.get(name, ()) if image in at]
            if images:
                places = [
                    (at[image] * self.count, self._slots[at[image]][name]) for image in images
                ]
                index = self._index([[first + slot for slot in own] for first, own in places])
                yield name, images, y.flatten(0, 1)[index]


class RoutedGroups:
    """Several of them, with other numbers of slots: their tokens in one row, (1, all slots, D).

    So that the layers' products run once for all, and no slot of a group is empty for the others.
    """

    def __init__(self, groups: Sequence[RoutedMemory]) -> None:
        self.groups = groups
        self._lengths = [len(group.images) * group.count for group in groups]
        self.bank: AdapterProtocol | None = self if any(group.bank for group in groups) else None

    def start(self, images: int) -> Tensor:
        """The class tokens at the first layer: (1, all slots, D)."""
        return torch.cat([group.start(images).flatten(0, 1) for group in self.groups])[None]

    def attend(self, layer: int, block: Block, normed: Tensor, backbone: BackboneView) -> Tensor:
        """What class tokens, behind the norm, read; both (1, all slots, D)."""
        assert isinstance(backbone, KeysValues)
        parts = zip(
            *(torch.split(x[0], self._lengths, 1) for x in block.project(normed)), strict=True
        )
        read = []
        for group, own in zip(self.groups, parts, strict=True):
            shape = (block.heads, len(group.images), group.count, -1)
            q, k, v = (x.reshape(shape).transpose(0, 1) for x in own)  # (b, h, s, d)
            read.append(group.attend_keys(layer, block, (q, k, v), group.select(backbone)))
        return torch.cat([one.flatten(0, 1) for one in read])[None]

    def add(self, x: Tensor, normed: Tensor, layer: int, place: int) -> Tensor:
        """x (1, all slots, D) plus what the adapters make of normed."""
        parts = zip(self.groups, self._parts(x), self._parts(normed), strict=True)
        added = [
            own if group.bank is None else group.bank.add(own, behind, layer, place)
            for group, own, behind in parts
        ]
        return torch.cat([one.flatten(0, 1) for one in added])[None]

    def _parts(self, x: Tensor) -> list[Tensor]:
        """The tokens (1, all slots, D) of each group: (b, s, D)."""
        parts = zip(self.groups, torch.split(x[0], self._lengths), strict=True)
        return [own.view(len(group.images), group.count, -1) for group, own in parts]

    def split(self, y: Tensor, rows: Mapping[str, Sequence[int]]) -> Iterator[Part]:
        """As that of a group, of all."""
        for group, own in zip(self.groups, self._parts(y), strict=True):
            yield from group.split(own, rows)


def merged(parts: Iterable[Part]) -> dict[str, Tensor]:
    """The rows of each task, by name, in the order of the images."""
    found: dict[str, list[tuple[list[int], Tensor]]] = {}
    for name, images, tokens in parts:
        found.setdefault(name, []).append((images, tokens))
    streams = {}
    for name, pieces in found.items():
        images = [image for own, _ in pieces for image in own]
        tokens = torch.cat([own for _, own in pieces]) if len(pieces) > 1 else pieces[0][1]
        if images != sorted(images):
            order = sorted(range(len(images)), key=images.__getitem__)
            tokens = tokens[to_device(torch.tensor(order), tokens.device)]
        streams[name] = tokens
    return streams


def _own_tokens(memory: Memory) -> int:
    return len(memory.spans[-1])


def _own(memory: Memory) -> slice:
    """The class tokens of a single task in its memory: all that it reads comes before them."""
    return slice(memory.spans[-1].start, memory.spans[-1].stop)


def _streams_read(memory: Memory) -> list[str]:
    """The streams that a single task reads, itself last."""
    own = memory.streams[-1]
    return [*(memory.streams[i].name for i in own.extends), own.name]


def _tokens_read(memory: Memory) -> int:
    return sum(len(span) for span in memory.spans)


def _cells_read(memory: Memory) -> int:
    return memory.cells_read.shape[1]


def _placed(names: Sequence[str], lengths: Mapping[str, int]) -> dict[str, range]:
    """The places of so many tokens each, one task after another."""
    return dict(zip(names, spans([lengths[name] for name in names]), strict=True))


@dataclass(frozen=True)
class _RoutedAdapters:
    """Adapters of one width, run as one batched product."""

    adapters: list[Adapters]
    slots: Tensor  # of each adapter, the last again where it has fewer: (t, c)
    taken: Tensor  # which of these t * c are no repetition
    to: Tensor  # the slots of those


class RoutedBank:
    """Adapters of the tasks that images ask for: each has the slots of its task in all images."""

    def __init__(
        self,
        adapters: Mapping[str, Adapters],
        places: Sequence[Mapping[str, range]],
        slots: int,
    ) -> None:
        found: dict[str, list[int]] = {}  # by task: its slots among those of all images
        for image, own in enumerate(places):
            for name, place in own.items():
                if name in adapters:
                    found.setdefault(name, []).extend(image * slots + slot for slot in place)
        shapes: dict[int, list[str]] = {}
        for name in found:
            shapes.setdefault(adapters[name].down.shape[-1], []).append(name)
        self._groups: list[_RoutedAdapters] = []
        for names in shapes.values():
            device, most = adapters[names[0]].down.device, max(len(found[n]) for n in names)
            table = [found[n] + found[n][-1:] * (most - len(found[n])) for n in names]
            taken = [t * most + i for t, n in enumerate(names) for i in range(len(found[n]))]
            to = [slot for n in names for slot in found[n]]
            index = [to_device(torch.tensor(rows), device) for rows in (table, taken, to)]
            self._groups.append(_RoutedAdapters([adapters[n] for n in names], *index))

    def add(self, x: Tensor, normed: Tensor, layer: int, place: int) -> Tensor:
        """x (b, s, D) plus what the adapters make of normed (b, s, D)."""
        flat, rows = x.flatten(0, 1), normed.flatten(0, 1)
        for group in self._groups:
            down = torch.stack([one.down[layer, place] for one in group.adapters])  # (t, D, w)
            up = torch.stack([one.up[layer, place] for one in group.adapters])
            out = F.gelu(rows[group.slots] @ down) @ up  # (t, c, D)
            out = out.flatten(0, 1)[group.taken]
            flat = flat.index_add(0, group.to, out.to(flat.dtype))
        return flat.view_as(x)
