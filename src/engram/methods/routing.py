"""A task per image: passes in which images ask for different tasks.

The backbone runs once for the whole batch. Beside it, every image has the class tokens of its own
tasks and of those that they extend, in *slots*: as many for every image as the one with the most
needs. Table 1 and the keys and values of cells are those of the tasks' common `Memory`, gathered by
slot, so that all images share each product: no loop over tasks.

Axes, beside those of memory.py: s slots of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from engram.errors import EngramError
from engram.methods.adapters import AdapterBank, PaddedAdapters
from engram.methods.memory import QKV, BackboneView, KeysValues, Memory, read_by_keys, spans
from engram.util.tensors import to_device
from engram.vit.layers import Block

#: What one image is asked for: a task, several, or None for the backbone's own answer.
Entry = str | Sequence[str] | None
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
        """The tasks that each image asks for and that are wanted."""
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


def routed_streams(memory: Memory, route: Route, tokens: int) -> list[RoutedStreams]:
    """The class tokens that images ask for, in groups of images that need about as many.

    The memory has all the streams that images ask for, and maybe more; `tokens` are the backbone's
    of an image.
    """
    at = {stream.name: i for i, stream in enumerate(memory.streams)}
    needed = [
        sorted({i for name in names for i in memory.streams[at[name]].reads})
        for names in route.only(at.__contains__)
    ]
    slots = [sum(len(memory.spans[i]) for i in own) for own in needed]
    return [
        RoutedStreams(memory, {image: needed[image] for image in images}, len(needed))
        for images in buckets(slots, tokens)
    ]


class RoutedStreams:
    """The class tokens (b, s, D) of some images, each of which has its own.

    Args:
        memory: All the streams that images ask for.
        needed: The streams of each image that is here.
        batch: How many images there are in all.
    """

    def __init__(self, memory: Memory, needed: Mapping[int, Sequence[int]], batch: int) -> None:
        self.memory, self.whole = memory, len(needed) == batch
        self.slots: dict[int, dict[str, range]] = {}  # of every image, by stream
        for image, streams in needed.items():
            names = (memory.streams[i].name for i in streams)
            places = spans([len(memory.spans[i]) for i in streams])
            self.slots[image] = dict(zip(names, places, strict=True))
        rows = [[row for i in own for row in memory.spans[i]] for own in needed.values()]
        self.count = max(map(len, rows))
        self._images = self._index([*needed])
        self._table = self._index([own + [0] * (self.count - len(own)) for own in rows])  # (b, s)
        self._tokens = memory.token[self._table]  # what is read in an empty slot goes nowhere
        self._reads: Tensor | None = None  # the slots that each one reads, (b, s, a)
        if not memory.reads_only_itself:
            reads = []
            for own in rows:
                slot = {row: i for i, row in enumerate(own)}
                empty = [[i] * len(memory.token_table[0]) for i in range(len(own), self.count)]
                reads.append([[slot[r] for r in memory.token_table[row]] for row in own] + empty)
            self._reads = self._index(reads)
        missing = memory.missing  # to (b, 1, s, a + m)
        self._missing = None if missing is None else missing[self._table].unsqueeze(1)
        adapters = {one.name: one.adapters for one in memory.streams if one.adapters is not None}
        found: dict[str, list[int]] = {name: [] for name in adapters}
        for i, slots in enumerate(self.slots.values()):
            for name in slots.keys() & adapters.keys():
                found[name] += [i * self.count + slot for slot in slots[name]]
        members = [(places, adapters[name]) for name, places in found.items() if places]
        self.bank: AdapterBank | PaddedAdapters | None = None
        if members:
            self.bank = AdapterBank(members, len(rows) * self.count, routed=True)

    def _index(self, rows: object) -> Tensor:
        return to_device(torch.tensor(rows), self.memory.token.device)

    def start(self, images: int) -> Tensor:
        return self._tokens

    def attend(self, layer: int, block: Block, normed: Tensor, backbone: BackboneView) -> Tensor:
        assert isinstance(backbone, KeysValues)
        if not self.whole:
            backbone = KeysValues(*(x[self._images] for x in backbone))
        return self.attend_keys(layer, block, block.project(normed), backbone)

    def attend_keys(self, layer: int, block: Block, own: QKV, backbone: KeysValues) -> Tensor:
        q, k, v = own
        cells = self.memory.keys_values(layer, block)
        cells = KeysValues(*(x.transpose(0, 1)[self._table] for x in cells))
        tokens = KeysValues(self._read(k), self._read(v))
        return read_by_keys(q, backbone, tokens, cells, self._missing)[0]

    def _read(self, x: Tensor) -> Tensor:
        """Gather the slots that each slot of an image reads: (b, h, s, d) -> (b, h, s, a, d)."""
        if self._reads is None:
            return x.unsqueeze(3)
        at = self._reads.flatten(1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        return x.gather(2, at).view(*x.shape[:2], *self._reads.shape[1:], -1)


def split_routed(
    groups: Sequence[RoutedStreams], tokens: Sequence[Tensor], rows: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    """The last tokens (b, s, D) of groups by task: of the images that asked, (rows, k, D)."""
    places: dict[int, dict[str, list[int]]] = {}  # by image and task, of the slots of all groups
    first = 0
    for group in groups:
        for image, slots in group.slots.items():
            places[image] = {n: [first + slot for slot in own] for n, own in slots.items()}
            first += group.count
    every, found = torch.cat([one.flatten(0, 1) for one in tokens]), {}
    for name, images in rows.items():
        if images and name in places.get(images[0], ()):
            index = torch.tensor([places[image][name] for image in images])
            found[name] = every[to_device(index, every.device)]
    return found
