"""Where a training run gets its numbers from: pictures through the trunk, or the cache."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engram.data.datasets import Dataset, Integers, Splits
from engram.data.loader import Loader, Transform, shuffled
from engram.errors import EngramError, Notice
from engram.images.preprocessing import normalise
from engram.model import MemoryViT
from engram.train.cache import Cache, View, contents_of, prefetched, room, row_bytes
from engram.train.recipe import Recipe
from engram.util.processes import Team
from engram.util.progress import Progress, silent


@dataclass(frozen=True)
class Item:
    """A part of a batch, as this process sees it."""

    inputs: Tensor
    labels: Tensor
    failed: int = 0  # pictures of it that could not be read

    def split(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of at most this size; none of an empty batch."""
        if len(self.labels):
            yield from zip(
                torch.split(self.inputs, size), torch.split(self.labels, size), strict=True
            )


class Feed(Protocol):
    """Batches that depend on the seed and the epoch alone, and the logits they lead to."""

    cache: str  # on or off: what it would be with that setting
    contents: str  # a hash of all pictures' bytes, "" where they were not read for one
    per_epoch: int  # steps

    @property
    def bad(self) -> dict[str, str]:
        """Pictures that could not be read so far, with the reason."""

    def epoch(self, epoch: int, skip: int) -> Iterator[Item]:
        """The training batches of an epoch, from batch `skip` on."""

    def validation(self, batches: int | None = None) -> Iterator[Item]:
        """The validation images, or only the first batches of them."""

    def logits(self, inputs: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]: ...


def _steps(images: int, batch: int) -> int:
    return -(-images // batch)


class Pictures:
    """Pictures are decoded and go through the trunk, every time."""

    cache = "off"
    contents = ""

    def __init__(
        self,
        model: MemoryViT,
        train: Dataset,
        val: Dataset,
        recipe: Recipe,
        augment: str,
        flip: bool,
        team: Team,
        transform: Transform | None = None,
    ) -> None:
        self.model, self.team = model, team
        self.preprocessing = model.preprocessing
        self.per_epoch = _steps(len(train), recipe.batch)

        def loader(dataset: Dataset, mode: str) -> Loader:
            return Loader(
                dataset,
                self.preprocessing,
                recipe.batch,
                mode=mode,
                augment=augment,
                flip=flip,
                min_area=recipe.min_area,
                transform=transform,
                seed=recipe.data_seed,
                workers=recipe.workers,
                rank=team.rank,
                world=team.world,
            )

        self._train, self._val = loader(train, "train"), loader(val, "eval")

    @property
    def bad(self) -> dict[str, str]:
        return {**self._train.bad, **self._val.bad}

    def epoch(self, epoch: int, skip: int) -> Iterator[Item]:
        for found in self._train.epoch(epoch, skip=skip):
            yield Item(found.images, found.labels, len(found.failed))

    def validation(self, batches: int | None = None) -> Iterator[Item]:
        samples = None if batches is None else range(batches * self._val.batch_size)
        if samples is not None:
            samples = samples[: len(self._val.dataset)]
        for found in self._val.epoch(0, samples=samples):
            yield Item(found.images, found.labels, len(found.failed))

    def logits(self, inputs: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        logits: dict[str, Tensor] = self.model(
            normalise(inputs.to(self.team.device), self.preprocessing), tasks=tasks
        )
        return logits


class Cached:
    """The trunk runs once for every picture (and view); from then on its tokens are read."""

    cache = "on"

    def __init__(
        self,
        model: MemoryViT,
        train: Dataset,
        val: Dataset,
        recipe: Recipe,
        augment: str,
        flip: bool,
        team: Team,
        only_pooled: bool,
        patches: bool,
    ) -> None:
        self.model, self.team, self.recipe = model, team, recipe
        self.only_pooled = only_pooled
        self.train, self.val = train, val
        self.per_epoch = _steps(len(train), recipe.batch)
        self.bad: dict[str, str] = {}
        self._train_contents, self._val_contents = contents_of(train), contents_of(val)
        both = [*self._train_contents, *self._val_contents]
        self.contents = sha256("\n".join(both).encode()).hexdigest()
        preprocessing = model.preprocessing
        self._plain = Cache(model.trunk, preprocessing, patches=patches)
        if augment == "none":
            self._views = [self._plain]
        else:
            if train.masks is not None:  # pictures with the same bytes have views of their own
                self._train_contents = [
                    content and sha256(f"{i} {content}".encode()).hexdigest()
                    for i, content in enumerate(self._train_contents)
                ]
            of = sha256("".join(self._train_contents).encode()).hexdigest()
            self._views = [
                Cache(
                    model.trunk,
                    preprocessing,
                    View(augment, flip, recipe.min_area, recipe.data_seed, number, of),
                    patches=patches,
                )
                for number in range(recipe.views)
            ]
        self._stores = [(cache, train, self._train_contents) for cache in self._views]
        self._stores.append((self._plain, val, self._val_contents))
        self._masks: dict[tuple[Cache, Dataset], dict[int, bytes]] = {}

    def missing(self) -> int:
        """The bytes that filling will add."""
        rows: dict[Cache, set[str]] = {}
        for cache, _, contents in self._stores:
            rows.setdefault(cache, set()).update(c for c in contents if c and c not in cache)
        return sum(cache.row_bytes * len(absent) for cache, absent in rows.items())

    def fill(self, progress: Progress) -> None:
        """Run the trunk on what is not stored yet, and list what cannot be read."""
        for cache, dataset, contents in self._stores:
            self._fill(cache, dataset, contents, progress)
            if dataset.masks is not None:
                self._read_masks(cache, dataset, progress)

    def _fill(
        self, cache: Cache, dataset: Dataset, contents: list[str], progress: Progress
    ) -> None:
        done, missing = 0, len({c for c in contents if c and c not in cache})

        def count(images: int) -> None:
            nonlocal done
            done += images
            progress("caching", done * self.team.world, max(missing, done))

        found = cache.fill(
            dataset,
            contents,
            workers=self.recipe.workers,
            rank=self.team.rank,
            world=self.team.world,
            progress=count,
        )
        self.team.wait()
        cache.refresh()
        self.bad.update(pair for shared in self.team.gather([found]) for pair in shared.items())
        for i, content in enumerate(contents):  # of pictures with the same bytes one was tried
            if content not in cache and dataset.where(i) not in self.bad:
                self.bad[dataset.where(i)] = f"{dataset.where(i)}: the file cannot be read"

    def _read_masks(self, cache: Cache, dataset: Dataset, progress: Progress) -> None:
        """Keep every mask as the view shows it, compressed: a few hundred bytes each.

        Every process reads all of them: which it will need depends on the epoch.
        """
        kept: dict[int, bytes] = {}
        loader = cache.loader(dataset, self.recipe.workers, only="masks")
        for found in loader.epoch(cache.view.number, samples=range(len(dataset))):
            for i, mask in zip(found.indices.tolist(), found.labels, strict=True):
                kept[i] = zlib.compress(mask.numpy().tobytes(), 1)
            progress("masks", len(kept), len(dataset))
        self.bad.update(loader.bad)
        self._masks[cache, dataset] = kept

    def _labels(self, cache: Cache, dataset: Dataset, samples: list[int]) -> Tensor:
        if dataset.masks is None:
            return torch.from_numpy(dataset.labels[samples])
        kept, (height, width) = self._masks[cache, dataset], cache.preprocessing.size
        masks = bytearray().join(zlib.decompress(kept[i]) for i in samples)
        if not samples:
            return torch.zeros(0, height, width, dtype=torch.uint8)
        return torch.frombuffer(masks, dtype=torch.uint8).view(-1, height, width)

    def epoch(self, epoch: int, skip: int) -> Iterator[Item]:
        cache = self._views[epoch % len(self._views)]
        order = shuffled(len(self.train), self.recipe.data_seed, epoch)
        yield from self._items(cache, self.train, self._train_contents, order, skip)

    def validation(self, batches: int | None = None) -> Iterator[Item]:
        order = np.arange(len(self.val))
        if batches is not None:
            order = order[: batches * self.recipe.batch]
        yield from self._items(self._plain, self.val, self._val_contents, order, 0)

    def _items(
        self, cache: Cache, dataset: Dataset, contents: list[str], order: Integers, skip: int
    ) -> Iterator[Item]:
        size, masks = self.recipe.batch, self._masks.get((cache, dataset))

        def read() -> Iterator[Item]:
            for start in range(skip * size, len(order), size):
                batch = order[start : start + size][self.team.rank :: self.team.world]
                good = [int(i) for i in batch if contents[i] in cache]
                good = [i for i in good if masks is None or i in masks]
                rows = cache.read([contents[i] for i in good], self.only_pooled)
                yield Item(rows, self._labels(cache, dataset, good), len(batch) - len(good))

        return prefetched(read())

    def logits(self, inputs: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        inputs = inputs.to(self.team.device)
        layers, pooled = self._plain.split(inputs)
        return self.model.from_cache(layers, pooled, tasks, self._plain.patches_of(inputs))


def choose(
    model: MemoryViT,
    names: Sequence[str],
    splits: Splits,
    recipe: Recipe,
    team: Team,
    transform: Transform | None = None,
    progress: Progress = silent,
) -> Feed:
    """The cache where it can be used and fits, else the trunk; cache="on" insists on it."""
    train, val = splits["train"], splits["val"]
    augment = splits.augment if recipe.augment == "auto" else recipe.augment
    regimes = [model.task(name).spec.parts for name in names]
    patches = any(model.task(name).kind.per_pixel for name in names)
    views = recipe.views if augment != "none" else 1
    row = row_bytes(model.trunk, model.preprocessing, patches)
    need = row * (len(train) * views + len(val))
    against, large, cached = None, None, None
    if any(regime.changes_trunk for regime in regimes):
        against = "the regime changes the trunk's own tokens"
    elif transform is not None:
        against = "what a transform of your own does cannot be known"
    elif augment != "none" and not recipe.views:
        against = f"augment is {augment}, which is random every time (give views to fix some)"
    elif need > recipe.cache_gb * 1e9:
        against = large = f"it would take {need / 1e9:.2g} GB, and cache_gb is {recipe.cache_gb:g}"
    elif recipe.cache != "off":
        only_pooled = not any(regime.masked for regime in regimes)
        cached = Cached(model, train, val, recipe, augment, splits.flip, team, only_pooled, patches)
        if any(team.gather([cached.missing() > 0.8 * room()])):
            free = f"{room() / 1e9:.2g} GB are free"
            against = large = f"it would take {cached.missing() / 1e9:.2g} GB more, and {free}"
    if recipe.cache == "on" and against:
        raise EngramError(f"The cache cannot be used: {against}. Use cache auto or off.")
    if augment != "none" and recipe.views and (against or recipe.cache == "off"):
        raise EngramError(
            f"views is {recipe.views}, and views live in the cache, which is "
            + (f"not possible here: {against}." if against else "off.")
        )
    if recipe.cache == "auto" and large and team.main:
        told = f"The cache is not used: {large}. The ViT runs over all pictures in every epoch."
        warnings.warn(told, Notice, stacklevel=2)
    if cached is None or against:
        return Pictures(model, train, val, recipe, augment, splits.flip, team, transform)
    cached.fill(progress)
    return cached
