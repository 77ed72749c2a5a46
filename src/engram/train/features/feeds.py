"""Batches of a training run: images through the backbone, or rows of the cache.

A `FeedPlan` knows from the settings alone whether a cache can be used and what it keeps;
`open_feed` decides, as the room on the disk allows.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeAlias

import torch
from torch import Tensor

from engram.backbones.shape import BackboneShape
from engram.data.datasets import Dataset, Splits
from engram.data.folds import Integers
from engram.data.loader import Loader, Transform, balanced, shuffled
from engram.data.near_duplicates import SIMILAR, dataset_groups, directions
from engram.errors import EngramError, Notice, flag
from engram.images.preprocessing import normalise
from engram.methods.forward import reads_tokens
from engram.methods.method import Cached, Needs
from engram.model import MemoryViT
from engram.model.passes import HeadInputs
from engram.tasks.costs import backbone_macs
from engram.tasks.spec import TaskSpec
from engram.train.features.cache import (
    Cache,
    Keeps,
    View,
    contents_of,
    prefetched,
    row_bytes,
    tokens_of,
)
from engram.train.features.caches import limit, make_room, room
from engram.train.recipe import Recipe
from engram.util.processes import ProcessGroup, cpu_has_bf16, dtype_for
from engram.util.progress import Progress, counter, silent
from engram.util.tensors import to_device
from engram.util.text import storage

#: Multiplications of a pass that is long enough for a trial of the CPU, which takes two seconds:
#: 180 images on a DINOv2-small, 800 on a ViT-Ti.
_LONG_PASS = 1e12


@dataclass(frozen=True)
class FeedPlan:
    """The tasks that are to train, on which data and how; no image is read."""

    model: MemoryViT
    specs: Sequence[TaskSpec]
    splits: Splits  # with a validation split
    recipe: Recipe
    transform: Transform | None = None

    @property
    def augment(self) -> str:
        return self.splits.augment if self.recipe.augment == "auto" else self.recipe.augment

    def order(self, epoch: int, even: bool) -> Integers:
        """The training samples of an epoch; `even` where a sampler may balance the classes."""
        train, seed = self.splits["train"], self.recipe.data_seed
        if even and self.recipe.balance == "sampler":
            return balanced(train.labels, seed, epoch)
        return shuffled(len(train), seed, epoch)

    @property
    def only_pooled(self) -> bool:
        """Whether every task reads nothing but the backbone's pooled token."""
        return not any(spec.method.needs for spec in self.specs)

    @property
    def keeps(self) -> Keeps:
        """Kind of row that these tasks need."""
        needs = Needs.POOLED
        for spec in self.specs:
            needs |= spec.method.needs
            needs |= Needs.FINAL if spec.kind_object.per_pixel else Needs.POOLED
        if needs is Needs.STATISTICS:
            return "statistics"
        if needs is Needs.FINAL:
            return "final"
        if needs & (Needs.FINAL | Needs.STATISTICS):
            return "all"
        return "keys" if self._reads_keys and self._fits("keys") else "layers"

    @property
    def _reads_keys(self) -> bool:
        """Whether every step would make the keys and values of the backbone, once for all tasks.

        They take more disk than tokens, and a sixth of a pass to make: with them a step of many
        masked tasks takes a fifth less time.
        """
        backbone = self.model.backbone
        streams = [spec for spec in self.specs if spec.method.streams]
        shape = BackboneShape.measure(backbone)
        tokens = sum(spec.shapes(shape)["class_token"][0] for spec in streams)
        n = tokens_of(backbone, self.model.preprocessing)
        return bool(streams) and not reads_tokens(backbone, n, tokens, passes=2)

    def cache(self, view: View | None = None) -> Cache:
        """The cache for these tasks, of images as they are or as augmentation shows them."""
        model = self.model
        dtype = self._pass_dtype
        return Cache(model.backbone, model.preprocessing, view, keeps=self.keeps, dtype=dtype)

    @property
    def _pass_dtype(self) -> torch.dtype:
        """The type that the pass which fills the cache computes in.

        By default that is bf16 for a long pass on a CPU that has it: tasks learn as much from such
        features (benchmarks/cache_precision.py).
        """
        backbone, auto = self.model.backbone, self.recipe.precision == "auto"
        shape, size = BackboneShape.measure(backbone), self.model.preprocessing.size
        macs = self._images * backbone_macs(shape, size)
        if auto and backbone.device.type == "cpu" and macs > _LONG_PASS and cpu_has_bf16():
            return torch.bfloat16
        return dtype_for(self.recipe.precision, backbone.device)

    def reason_against(self) -> str | None:
        """Why the cache cannot be used, known from the settings alone; None if it can."""
        if not all(spec.method.shares_pass for spec in self.specs):
            return "the regime changes the backbone's own tokens"
        if self.transform is not None:
            return "what a transform of your own does cannot be known"
        if self.augment != "none" and not self.recipe.views:
            return (
                f"{flag('augment')} is {self.augment}, which is random every time (give "
                f"{flag('views')} to fix some)"
            )
        return None

    @property
    def bytes(self) -> int:
        """The disk that all images take, those included that are stored already."""
        return self._bytes_of(self.keeps)

    @property
    def _images(self) -> int:
        """Rows of the cache: images, and views of them."""
        images = len(self.splits["train"])
        if self.augment != "none":
            return images * self.recipe.views + len(self.splits.held_out)
        if self.splits.folds is None:  # else validation images are training images
            images += len(self.splits["val"])
        return images

    def _bytes_of(self, keeps: Keeps) -> int:
        return self._images * row_bytes(self.model.backbone, self.model.preprocessing, keeps)

    def _fits(self, keeps: Keeps) -> bool:
        return self._bytes_of(keeps) <= self.recipe.cache_gb * 1e9

    def too_large(self) -> str | None:
        """Why the whole cache would be too large for `cache_gb`; None if it is not."""
        if self._fits(self.keeps):
            return None
        return (
            f"it would take {self.bytes / 1e9:.2g} GB, and {flag('cache_gb')} is "
            f"{self.recipe.cache_gb:g}"
        )


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


class BackboneFeed:
    """Images are decoded and go through the backbone, every time.

    As every feed, it gives batches that depend on the seed and the epoch alone, and what tasks make
    of them: `outputs`, and head inputs (`features`). It is `plain` if training images are seen as
    validation images are: nothing is random.
    """

    cache, contents = "off", ""  # whether there is a cache, and a hash of the images in it

    def __init__(self, plan: FeedPlan, processes: ProcessGroup) -> None:
        self.plan, self.model, self.processes, recipe = plan, plan.model, processes, plan.recipe
        self.preprocessing = plan.model.preprocessing
        self.plain = plan.augment == "none" and plan.transform is None

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
        """The training batches of an epoch, from batch `skip` on.

        Not `balanced`: every image once, also where the recipe has a sampler.
        """
        order = self.plan.order(epoch, balanced)
        for found in self._train.epoch(epoch, skip=skip, samples=order):
            yield BatchShard(found.images, found.labels, found.indices, len(found.failed))

    def validation(self, samples: Integers | None = None) -> Iterator[BatchShard]:
        """The validation images, or only these, in this order."""
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


@dataclass(eq=False)
class CachedImages:
    """Images of a dataset as a cache has them: `contents` are their hashes, "" for bad ones."""

    cache: Cache
    dataset: Dataset
    contents: Sequence[str]
    masks: dict[int, bytes] | None = None  # as the view shows them, compressed: some hundred bytes

    def absent(self) -> set[tuple[Cache, str]]:
        """Rows that are not stored yet."""
        return {(self.cache, one) for one in self.contents if one and one not in self.cache}

    def forget_damaged(self, processes: ProcessGroup) -> None:
        """Check every stored row; damaged ones are computed again."""
        rank, world = processes.rank, processes.world
        own = [one for one in self.contents if one and int(one[:8], 16) % world == rank]
        damaged = processes.gather(self.cache.damaged(own))
        self.cache.forget(damaged)
        if damaged and processes.main:
            notice = (
                f"The cache in {self.cache.folder} is damaged: {len(damaged)} of its rows are not "
                "what was written. They are computed again."
            )
            warnings.warn(notice, Notice, stacklevel=2)

    def read_masks(self, workers: int, progress: Progress) -> dict[str, str]:
        """Keep every mask, in every process: which it will need depends on the epoch.

        Gives those that cannot be read, by name.
        """
        kept, loader = dict[int, bytes](), self.cache.loader(self.dataset, workers, only="masks")
        for found in loader.epoch(self.cache.view.number, samples=range(len(self.dataset))):
            for i, mask in zip(found.indices.tolist(), found.labels, strict=True):
                kept[i] = zlib.compress(mask.numpy().tobytes(), 1)
            progress("masks", len(kept), len(self.dataset))
        self.masks = kept
        return loader.bad

    def read(self, samples: Integers, only_pooled: bool) -> BatchShard:
        """Rows and labels of those of these images that could be read."""
        good = [int(i) for i in samples if self.contents[i] in self.cache]
        good = [i for i in good if self.masks is None or i in self.masks]
        rows = self.cache.read([self.contents[i] for i in good], only_pooled)
        chosen = torch.tensor(good).long()
        return BatchShard(rows, self._labels(good), chosen, len(samples) - len(good))

    def _labels(self, samples: list[int]) -> Tensor:
        if self.masks is None:
            return torch.from_numpy(self.dataset.labels[samples])
        masks = bytearray().join(zlib.decompress(self.masks[i]) for i in samples)
        found = torch.frombuffer(masks, dtype=torch.uint8) if samples else torch.zeros(0).byte()
        return found.view(-1, *self.cache.preprocessing.size)

    def class_tokens(self, processes: ProcessGroup) -> tuple[Tensor, Tensor]:
        """Sample numbers of the images that are stored, and their class tokens."""
        good = [i for i, content in enumerate(self.contents) if content in self.cache]
        own = good[processes.rank :: processes.world]
        tokens = self.cache.class_tokens([self.contents[i] for i in own])
        samples, parts = zip(*processes.gather([(torch.tensor(own), tokens)]), strict=True)
        return torch.cat(samples), torch.cat(parts)


class CacheFeed:
    """The backbone runs once for every image (and view); from then on its tokens are read.

    `scan` and `fill` come first, in this order: they read and compute what is not stored yet.
    """

    cache = "on"
    views: list[CachedImages]  # training images, in turn by epoch
    train: CachedImages  # as they are
    val: CachedImages
    sees_all: bool  # every training image as it is, so that all can be compared

    def __init__(self, plan: FeedPlan, processes: ProcessGroup) -> None:
        self.plan, self.model, self.recipe = plan, plan.model, plan.recipe
        self.processes = processes
        self.plain = plan.augment == "none"
        self.bad: dict[str, str] = {}

    def scan(self, progress: Progress) -> None:
        """Hash every image, and open the caches that belong to them."""
        splits, cache = self.plan.splits, self.plan.cache()
        train, val, folds = splits["train"], splits["val"], splits.folds
        same = folds is not None  # validation images are the training images
        count = counter(progress, "hashing images", len(train) + (0 if same else len(val)))
        contents = contents_of(train, count)
        self.train = CachedImages(cache, train, contents)
        self.val = CachedImages(cache, val, contents if same else contents_of(val, count))
        self.views, held_out = [self.train], self.val
        if not self.plain:
            self.views = self._augmented_views(contents)
            if folds is not None:  # others are only seen augmented
                some = folds.all_held_out
                held_out = CachedImages(cache, val.subset(some), [contents[i] for i in some])
        self.sees_all = self.plain or (same and len(held_out.dataset) == len(train))
        both = [*contents, *held_out.contents]
        self.contents = sha256("\n".join(both).encode()).hexdigest()
        self._stored = [*self.views, held_out]

    def _augmented_views(self, contents: Sequence[str]) -> list[CachedImages]:
        train, recipe = self.plan.splits["train"], self.recipe
        if train.masks is not None:  # images with the same bytes have views of their own
            contents = [
                content and sha256(f"{i} {content}".encode()).hexdigest()
                for i, content in enumerate(contents)
            ]
        of = sha256("".join(contents).encode()).hexdigest()
        given = self.plan.augment, self.plan.splits.flip, recipe.min_area, recipe.data_seed
        views = [View(*given, number, of) for number in range(recipe.views)]
        return [CachedImages(self.plan.cache(view), train, contents) for view in views]

    def missing(self) -> tuple[int, int]:
        """Rows that filling will add, and their bytes."""
        rows = len(set[tuple[Cache, str]]().union(*(one.absent() for one in self._stored)))
        return rows, rows * self.val.cache.row_bytes

    def fill(self, progress: Progress) -> None:
        """Run the backbone on what is not stored yet, and list what cannot be read."""
        progress("checking the cache", 0, 0)
        for one in self._stored:
            one.forget_damaged(self.processes)
        (rows, size), workers = self.missing(), self.recipe.workers
        count = counter(progress, "caching", rows, storage(size), self.processes.world)
        for one in self._stored:
            found = one.cache.fill(
                one.dataset, one.contents,
                workers=workers, processes=self.processes, progress=count,
            )  # fmt: skip
            self.bad = found | self.bad
            if one.dataset.masks is not None:
                self.bad |= one.read_masks(workers, progress)

    def epoch(self, epoch: int, skip: int, balanced: bool = True) -> Iterator[BatchShard]:
        view = self.views[epoch % len(self.views)]
        for used in (view, self.val):
            used.cache.touch()
        yield from self._shares(view, self.plan.order(epoch, balanced), skip)

    def validation(self, samples: Integers | None = None) -> Iterator[BatchShard]:
        order = self.plan.splits.held_out if samples is None else samples
        yield from self._shares(self.val, order)

    def _shares(self, images: CachedImages, order: Integers, skip: int = 0) -> Iterator[BatchShard]:
        size, own = self.recipe.batch, slice(self.processes.rank, None, self.processes.world)
        starts = range(skip * size, len(order), size)
        return prefetched(
            images.read(order[start : start + size][own], self.plan.only_pooled) for start in starts
        )

    def outputs(self, inputs: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        return self._head_inputs(inputs, tasks).outputs()

    def features(self, inputs: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        return self._head_inputs(inputs, tasks).vectors()

    def _head_inputs(self, inputs: Tensor, tasks: Sequence[str]) -> HeadInputs:
        return self.model.from_cache(self.cached(inputs), tasks, self.model.preprocessing.size)

    def cached(self, inputs: Tensor) -> Cached:
        """Features of the backbone from the inputs of a share."""
        return self.val.cache.features(to_device(inputs, self.processes.device))

    def near_duplicates(self) -> Integers:
        """Group numbers of the training images.

        Near-duplicates are in one group, as are images that belong together by a column.
        """
        return dataset_groups(self.train.dataset, *self.train.class_tokens(self.processes))

    def known_in_validation(self) -> int:
        """How many images of a validation split are near-duplicates of training images."""
        (_, train), (_, val) = (x.class_tokens(self.processes) for x in (self.train, self.val))
        if not len(train) or not len(val):
            return 0
        unit = directions(torch.cat([val, train]))
        nearest = (part @ unit[len(val) :].mT for part in torch.split(unit[: len(val)], 1_024))
        return sum(int((cosines.amax(1) >= SIMILAR).sum()) for cosines in nearest)


Feed: TypeAlias = BackboneFeed | CacheFeed


def open_feed(plan: FeedPlan, processes: ProcessGroup, progress: Progress = silent) -> Feed:
    """The cache where it can be used and fits, filled now; else the backbone.

    Where the recipe insists on the cache, or needs it, and it cannot be used is an EngramError.
    """
    recipe, reason = plan.recipe, plan.reason_against()
    large = None if reason else plan.too_large()
    if not (reason or large or recipe.cache == "off"):
        feed = CacheFeed(plan, processes)
        feed.scan(progress)
        _, missing = feed.missing()
        fits = not processes.main or make_room(missing)
        if not any(processes.gather([not fits or missing > 0.8 * room()])):
            feed.fill(progress)
            return feed
        free = f"{room() / 1e9:.2g} GB are free"
        if limit() < math.inf:
            free += f", and ENGRAM_CACHE_LIMIT is {limit() / 1e9:g}"
        large = f"it would take {missing / 1e9:.2g} GB more, and {free}"
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
