"""Batches of a training run: images through the backbone, or rows of the cache."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

import torch
from torch import Tensor

from engram.data.datasets import Dataset
from engram.data.folds import Integers
from engram.data.loader import Loader
from engram.data.near_duplicates import SIMILAR, dataset_groups, directions
from engram.errors import EngramError, Notice, flag
from engram.images.preprocessing import normalise
from engram.methods.method import Cached
from engram.model.passes import HeadInputs
from engram.train.cache import Cache, View, contents_of, prefetched
from engram.train.caches import limit, make_room, room
from engram.train.feed_plan import FeedPlan
from engram.util.processes import ProcessGroup
from engram.util.progress import Progress, counter, silent
from engram.util.tensors import to_device
from engram.util.text import storage


@dataclass(frozen=True)
class BatchShard:
    """This process's share of a batch."""

    inputs: Tensor
    labels: Tensor
    samples: Tensor  # their numbers in the dataset
    failed: int = 0  # pictures of it that could not be read

    def split(self, size: int) -> Iterator[BatchShard]:
        """Parts of at most this size; none of an empty batch."""
        if len(self.labels):
            parts = (torch.split(x, size) for x in (self.inputs, self.labels, self.samples))
            for inputs, labels, samples in zip(*parts, strict=True):
                yield BatchShard(inputs, labels, samples)


class FeatureFeed(Protocol):
    """Batches that depend on the seed and the epoch alone, and their features: for solvers."""

    plain: bool  # training images are seen as validation images are: nothing is random

    @property
    def bad(self) -> dict[str, str]:
        """Pictures that could not be read so far, with the reason."""

    def epoch(self, epoch: int, skip: int, balanced: bool = True) -> Iterator[BatchShard]:
        """The training batches of an epoch, from batch `skip` on.

        Not `balanced`: every image once, also where the recipe has a sampler.
        """

    def validation(self, samples: Integers | None = None) -> Iterator[BatchShard]:
        """The validation images, or only these, in this order."""

    def features(self, inputs: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        """Head inputs by task for the inputs of a share: (b, features) each."""


class Feed(FeatureFeed, Protocol):
    """A feed for training, which needs the outputs of tasks as well."""

    cache: str  # on or off
    contents: str  # a hash of all images' bytes, "" where they were not hashed
    per_epoch: int  # steps

    def outputs(self, inputs: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        """Outputs by task for the inputs of a share."""


class KnownFeatures:
    """Features in memory, as a solver reads them; by default, the validation images are the same.

    All of them are the first epoch.
    """

    plain = True

    def __init__(self, train: BatchShard, val: BatchShard | None = None) -> None:
        self.bad: dict[str, str] = {}
        self._train, self._val = train, val or train

    def epoch(self, epoch: int, skip: int, balanced: bool = True) -> Iterator[BatchShard]:
        if not epoch:
            yield self._train

    def validation(self, samples: Integers | None = None) -> Iterator[BatchShard]:
        yield self._val

    def features(self, inputs: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        return dict.fromkeys(tasks, inputs)


class BackboneFeed:
    """Images are decoded and go through the backbone, every time."""

    cache = "off"
    contents = ""

    def __init__(self, plan: FeedPlan, processes: ProcessGroup) -> None:
        self.plan, self.model, self.processes, recipe = plan, plan.model, processes, plan.recipe
        self.preprocessing = plan.model.preprocessing
        self.plain = plan.augment == "none" and plan.transform is None
        self.per_epoch = plan.per_epoch

        def loader(dataset: Dataset, mode: str) -> Loader:
            return Loader(
                dataset, self.preprocessing, recipe.batch, mode=mode,
                augment=plan.augment, flip=plan.splits.flip, min_area=recipe.min_area,
                transform=plan.transform, seed=recipe.data_seed, workers=recipe.workers,
                rank=processes.rank, world=processes.world,
            )  # fmt: skip

        self._train = loader(plan.splits["train"], "train")
        self._val = loader(plan.splits["val"], "eval")

    @property
    def bad(self) -> dict[str, str]:
        return {**self._train.bad, **self._val.bad}

    def epoch(self, epoch: int, skip: int, balanced: bool = True) -> Iterator[BatchShard]:
        order = self.plan.order(epoch, balanced)
        for found in self._train.epoch(epoch, skip=skip, samples=order):
            yield BatchShard(found.images, found.labels, found.indices, len(found.failed))

    def validation(self, samples: Integers | None = None) -> Iterator[BatchShard]:
        samples = self.plan.splits.held_out if samples is None else samples
        for found in self._val.epoch(0, samples=samples):
            yield BatchShard(found.images, found.labels, found.indices, len(found.failed))

    def outputs(self, inputs: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = self.model(self._pixels(inputs), tasks=tasks)
        return outputs

    def features(self, inputs: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        return self.model.embed(self._pixels(inputs), tasks)

    def _pixels(self, inputs: Tensor) -> Tensor:
        return normalise(to_device(inputs, self.processes.device), self.preprocessing)


class CacheFeed:
    """The backbone runs once for every image (and view); from then on its tokens are read.

    `scan` and `fill` come first, in this order: they read and compute what is not stored yet.
    """

    cache = "on"
    sees_all: bool  # every training image as it is, so that all can be compared

    def __init__(self, plan: FeedPlan, processes: ProcessGroup) -> None:
        self.plan, self.model, self.recipe = plan, plan.model, plan.recipe
        self.processes = processes
        self.train, self.val = plan.splits["train"], plan.splits["val"]
        self.per_epoch = plan.per_epoch
        self.plain = plan.augment == "none"
        self.bad: dict[str, str] = {}
        self._masks: dict[tuple[Cache, Dataset], dict[int, bytes]] = {}

    def scan(self, progress: Progress) -> None:
        """Hash every image, and open the caches that belong to them."""
        folds = self.plan.splits.folds
        same = folds is not None  # validation images are the training images
        images = len(self.train) + (0 if same else len(self.val))
        count = counter(progress, "hashing images", images)
        self._train_contents = contents_of(self.train, count)
        self._val_contents = self._train_contents if same else contents_of(self.val, count)
        val, contents = self.val, self._val_contents
        if folds is not None and not self.plain:  # others are only seen augmented
            val = val.subset(folds.all_held_out)
            contents = [contents[i] for i in folds.all_held_out]
        self.sees_all = self.plain or (same and len(val) == len(self.train))
        both = [*self._train_contents, *contents]
        self.contents = sha256("\n".join(both).encode()).hexdigest()
        self._plain = self.plan.cache()
        self.views = [self._plain] if self.plan.augment == "none" else self._augmented_views()
        self._stores = [(cache, self.train, self._train_contents) for cache in self.views]
        self._stores.append((self._plain, val, contents))

    def _augmented_views(self) -> list[Cache]:
        if self.train.masks is not None:  # images with the same bytes have views of their own
            self._train_contents = [
                content and sha256(f"{i} {content}".encode()).hexdigest()
                for i, content in enumerate(self._train_contents)
            ]
        of = sha256("".join(self._train_contents).encode()).hexdigest()
        given = self.plan.augment, self.plan.splits.flip, self.recipe.min_area
        seed, views = self.recipe.data_seed, self.recipe.views
        return [self.plan.cache(View(*given, seed, number, of)) for number in range(views)]

    def _absent(self) -> dict[Cache, set[str]]:
        """Hashes of images that are not stored yet, by cache."""
        rows: dict[Cache, set[str]] = {}
        for cache, _, contents in self._stores:
            rows.setdefault(cache, set()).update(c for c in contents if c and c not in cache)
        return rows

    def missing(self) -> int:
        """The bytes that filling will add."""
        return sum(cache.row_bytes * len(absent) for cache, absent in self._absent().items())

    def fill(self, progress: Progress) -> None:
        """Run the backbone on what is not stored yet, and list what cannot be read."""
        progress("checking the cache", 0, 0)
        self._forget_damaged()
        missing = sum(map(len, self._absent().values()))
        count = counter(progress, "caching", missing, storage(self.missing()), self.processes.world)
        for cache, dataset, contents in self._stores:
            found = cache.fill(
                dataset, contents,
                workers=self.recipe.workers, processes=self.processes, progress=count,
            )  # fmt: skip
            self.bad = found | self.bad
            if dataset.masks is not None:
                self._read_masks(cache, dataset, progress)

    def _forget_damaged(self) -> None:
        """Check every stored row that will be read; damaged ones are computed again."""
        rank, world = self.processes.rank, self.processes.world
        for cache, _, contents in self._stores:
            own = [c for c in contents if c and int(c[:8], 16) % world == rank]
            damaged = self.processes.gather(cache.damaged(own))
            cache.forget(damaged)
            if damaged and self.processes.main:
                notice = (
                    f"The cache in {cache.folder} is damaged: {len(damaged)} of its rows are not "
                    "what was written. They are computed again."
                )
                warnings.warn(notice, Notice, stacklevel=2)

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

    def epoch(self, epoch: int, skip: int, balanced: bool = True) -> Iterator[BatchShard]:
        cache, order = self.views[epoch % len(self.views)], self.plan.order(epoch, balanced)
        for used in (cache, self._plain):
            used.touch()
        yield from self._shares(cache, self.train, self._train_contents, order, skip)

    def validation(self, samples: Integers | None = None) -> Iterator[BatchShard]:
        order = self.plan.splits.held_out if samples is None else samples
        yield from self._shares(self._plain, self.val, self._val_contents, order, 0)

    def _shares(
        self, cache: Cache, dataset: Dataset, contents: list[str], order: Integers, skip: int
    ) -> Iterator[BatchShard]:
        size, masks = self.recipe.batch, self._masks.get((cache, dataset))

        def read() -> Iterator[BatchShard]:
            for start in range(skip * size, len(order), size):
                batch = order[start : start + size][self.processes.rank :: self.processes.world]
                good = [int(i) for i in batch if contents[i] in cache]
                good = [i for i in good if masks is None or i in masks]
                rows = cache.read([contents[i] for i in good], self.plan.only_pooled)
                labels = self._labels(cache, dataset, good)
                yield BatchShard(rows, labels, torch.tensor(good).long(), len(batch) - len(good))

        return prefetched(read())

    def outputs(self, inputs: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        return self._head_inputs(inputs, tasks).outputs()

    def features(self, inputs: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        return self._head_inputs(inputs, tasks).vectors()

    def _head_inputs(self, inputs: Tensor, tasks: Sequence[str]) -> HeadInputs:
        return self.model.from_cache(self.cached(inputs), tasks, self._plain.preprocessing.size)

    def cached(self, inputs: Tensor) -> Cached:
        """Features of the backbone from the inputs of a share."""
        return self._plain.features(to_device(inputs, self.processes.device))

    def near_duplicates(self) -> Integers:
        """Group numbers of the training images.

        Near-duplicates are in one group, as are images that belong together by a column.
        """
        found = self._class_tokens(self.train, self._train_contents)
        return dataset_groups(self.train, *found)

    def known_in_validation(self) -> int:
        """How many images of a validation split are near-duplicates of training images."""
        _, train = self._class_tokens(self.train, self._train_contents)
        _, val = self._class_tokens(self.val, self._val_contents)
        if not len(train) or not len(val):
            return 0
        unit = directions(torch.cat([val, train]))
        nearest = (part @ unit[len(val) :].mT for part in torch.split(unit[: len(val)], 1_024))
        return sum(int((cosines.amax(1) >= SIMILAR).sum()) for cosines in nearest)

    def _class_tokens(self, dataset: Dataset, contents: list[str]) -> tuple[Tensor, Tensor]:
        """Sample numbers of a dataset's images as they are, and their class tokens."""
        good = [i for i in range(len(dataset)) if contents[i] in self._plain]
        own = good[self.processes.rank :: self.processes.world]
        tokens = self._plain.class_tokens([contents[i] for i in own])
        found = self.processes.gather([(torch.tensor(own), tokens)])
        samples, parts = zip(*found, strict=True)
        return torch.cat(samples), torch.cat(parts)


def open_feed(plan: FeedPlan, processes: ProcessGroup, progress: Progress = silent) -> Feed:
    """The cache where it can be used and fits, filled now; else the backbone.

    Where the recipe insists on the cache, or needs it, and it cannot be used is an EngramError.
    """
    recipe, reason = plan.recipe, plan.reason_against()
    large = None if reason else plan.too_large()
    if not (reason or large or recipe.cache == "off"):
        feed = CacheFeed(plan, processes)
        feed.scan(progress)
        fits = not processes.main or make_room(feed.missing())
        if not any(processes.gather([not fits or feed.missing() > 0.8 * room()])):
            feed.fill(progress)
            return feed
        free = f"{room() / 1e9:.2g} GB are free"
        if limit() < math.inf:
            free += f", and ENGRAM_CACHE_LIMIT is {limit() / 1e9:g}"
        large = f"it would take {feed.missing() / 1e9:.2g} GB more, and {free}"
    reason = reason or large
    if recipe.cache == "on" and reason:
        raise EngramError(
            f"The cache cannot be used: {reason}. Use {flag('cache', 'auto')} or "
            f"{flag('cache', 'off')}."
        )
    if plan.augment != "none" and recipe.views:
        raise EngramError(
            f"{flag('views')} is {recipe.views}, and views live in the cache, which is "
            + (f"not possible here: {reason}." if reason else "off.")
        )
    if recipe.cache == "auto" and large and processes.main:
        notice = f"The cache is not used: {large}. The ViT runs over all images in every epoch."
        warnings.warn(notice, Notice, stacklevel=2)
    return BackboneFeed(plan, processes)
