"""Memory banks of good images: one pass over the images, then a coreset of their patches.

The features of all patches are kept in memory, in half precision. For every fold, and for all
images, `coreset` chooses those that the bank has: greedily the one that is farthest from all chosen
so far (k-center; Sener and Savarese, 2018), in a random projection, as PatchCore does it. What a
fold's bank says about the images that it did not see decides the threshold.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram.data.folds import Integers
from engram.data.loader import Loader
from engram.data.near_duplicates import dataset_groups
from engram.errors import EngramError, Notice
from engram.images.preprocessing import normalise
from engram.methods.method import HeadInput, Patches
from engram.methods.patchcore import PatchCore
from engram.model.passes import head_inputs
from engram.train.features.caches import info
from engram.train.features.feeds import BatchShard, CacheFeed, FeedPlan
from engram.util.processes import ProcessGroup
from engram.util.progress import Progress, counter
from engram.util.tensors import to_device
from engram.util.text import counted, storage

if TYPE_CHECKING:
    from engram.train.loop.training import Training

_IN_MEMORY = 2_000_000_000  # bytes of patch features; of more images, as many as fit are read
_BATCH = 16
_CANDIDATES = 20  # times as many patches as the bank has: the coreset is chosen from these
_PROJECTED = 64  # width of the random projection in which it is chosen


class PatchFeed:
    """The backbone runs once for every image; from then on its patches are in memory.

    A cache that has the tokens of all images already is read instead; none is filled. All tasks
    have the same features: those of one method, with the same settings.
    """

    cache, contents = "off", ""
    plain = sees_all = True

    def __init__(self, plan: FeedPlan, processes: ProcessGroup, progress: Progress) -> None:
        self.plan, self.model, self.processes = plan, plan.model, processes
        self.bad: dict[str, str] = {}
        self._size, self._grid = plan.model.preprocessing.size, (0, 0)
        stored, folds = _stored(plan, processes, progress), plan.splits.folds
        self.train = self._read("train", stored, progress)
        # with folds, validation images are training images
        self.val = self.train if folds else self._read("val", stored, progress)

    def _read(self, split: str, stored: CacheFeed | None, progress: Progress) -> BatchShard:
        """Read the patches of a split in half precision, as many as fit into memory."""
        dataset = self.plan.splits[split]
        count = counter(progress, "reading patches", len(dataset))
        found, room = [], _IN_MEMORY
        for share in self._patches(split, stored):
            found.append((share.inputs.half().cpu(), share.labels, share.samples))
            room -= 2 * share.inputs.numel()
            count(len(share.samples) + share.failed)
            if room < 0:
                break
        if not found:
            raise EngramError(f"{dataset.name}: no image of the {split} split can be read.")
        patches, labels, samples = (torch.cat(parts) for parts in zip(*found, strict=True))
        if room < 0 and self.processes.main:
            notice = (
                f"{len(patches):,} of {counted(len(dataset), 'image')} of the {split} split are "
                f"read, drawn at random: their patches take {storage(_IN_MEMORY)} of memory."
            )
            warnings.warn(notice, Notice, stacklevel=2)
        return BatchShard(patches, labels, samples)

    def _patches(self, split: str, stored: CacheFeed | None) -> Iterator[BatchShard]:
        """Patches (images, patches, features) of a split, in batches."""
        model, plan, names = self.model, self.plan, [self.plan.specs[-1].name]
        if stored is not None:
            self.bad |= stored.bad
            for share in stored.epoch(0, 0) if split == "train" else stored.validation():
                with torch.inference_mode():
                    cached = stored.cached(share.inputs)
                    found = model.from_cache(cached, names, self._size).by_task
                yield replace(share, inputs=self._tokens(found))
            return
        loader = Loader(
            plan.splits[split], model.preprocessing, _BATCH,
            transform=plan.transform, workers=plan.recipe.workers,
        )  # fmt: skip
        order = plan.order(0, even=False) if split == "train" else None
        for batch in loader.epoch(0, samples=order):
            self.bad |= loader.bad
            if len(batch.indices):
                pixels = to_device(batch.images, self.processes.device)
                with torch.inference_mode():
                    found = head_inputs(model, names, normalise(pixels, model.preprocessing))
                patches, failed = self._tokens(found), len(batch.failed)
                yield BatchShard(patches, batch.labels, batch.indices, failed)

    def _tokens(self, found: Mapping[str, HeadInput]) -> Tensor:
        (inputs,) = found.values()
        assert inputs.patches is not None
        self._grid = inputs.patches.grid
        return inputs.patches.tokens

    def near_duplicates(self) -> Integers:
        """Group numbers of the training images: near-duplicates are in one group."""
        means = [patches.float().mean(0) for patches in self.train.inputs]
        return dataset_groups(self.plan.splits["train"], self.train.samples, torch.stack(means))

    def epoch(self, epoch: int, skip: int, balanced: bool = True) -> Iterator[BatchShard]:
        rows = torch.arange(skip * self.plan.recipe.batch, len(self.train.samples))
        return self._shares(self.train, rows)

    def validation(self, samples: Integers | None = None) -> Iterator[BatchShard]:
        rows = {sample: row for row, sample in enumerate(self.val.samples.tolist())}
        wanted = sorted(rows) if samples is None else samples.tolist()
        return self._shares(self.val, torch.tensor([rows[i] for i in wanted if i in rows]).long())

    def _shares(self, images: BatchShard, rows: Tensor) -> Iterator[BatchShard]:
        for batch in torch.split(rows, self.plan.recipe.batch):
            own = batch[self.processes.rank :: self.processes.world]
            yield BatchShard(images.inputs[own], images.labels[own], images.samples[own])

    def outputs(self, inputs: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        tokens = to_device(inputs, self.processes.device).float()
        seen = HeadInput(tokens.mean(1), Patches(tokens, self._grid, self._size))
        return {name: self.model.task(name).head.read(seen) for name in tasks}

    def features(self, inputs: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        return dict.fromkeys(tasks, to_device(inputs, self.processes.device).float().mean(1))


def _stored(plan: FeedPlan, processes: ProcessGroup, progress: Progress) -> CacheFeed | None:
    """The cache, if it has what is needed of every image already."""
    if plan.recipe.cache == "off" or plan.reason_against() or processes.world > 1:
        return None
    kept = plan.model.backbone.fingerprint, plan.keeps
    caches = [one for one in info() if (one["fingerprint"], one.get("keeps")) == kept]
    if not any(one["images"] for one in caches):
        return None
    feed = CacheFeed(plan, processes)
    feed.scan(progress)
    if any(feed.missing()):
        return None
    feed.fill(progress)  # checks what is there
    return feed


def fill_banks(training: Training, names: Sequence[str]) -> None:
    """Fill the banks of tasks from the patches of good images, of each fold and the last of all.

    A bank has no more patches than there are.
    """
    model, feed, folds = training.model, training.feed, training.splits.folds
    assert isinstance(feed, PatchFeed)
    seen = feed.train
    for fold, name in enumerate(names):
        training.progress("choosing patches", fold, len(names))
        task = model.task(name)
        own = seen.inputs
        if folds is not None and name != names[-1]:
            own = own[folds.learned_from(seen.samples, fold)]
        chosen = coreset(own.flatten(0, 1), task.head.out_features, training.recipe.seed)
        if len(chosen) != task.head.out_features:
            assert isinstance(task.method, PatchCore)
            method = replace(task.method, bank=len(chosen))
            task = model.swap(replace(task.spec, method=method))
        with torch.no_grad():
            task.head.weight.copy_(chosen)
    training.progress("choosing patches", len(names), len(names))


def coreset(features: Tensor, size: int, seed: int = 0) -> Tensor:
    """At most so many of the features (n, width), so that none is far from all of them.

    Chosen from a random part of many, in a random projection; the same for the same seed.
    """
    random = torch.Generator().manual_seed(seed)
    if len(features) <= size:
        return features
    some = torch.randperm(len(features), generator=random)[: _CANDIDATES * size]
    width = features.shape[1]
    projection = torch.randn(width, min(_PROJECTED, width), generator=random) * width**-0.5
    x = features[some].float() @ projection
    chosen = torch.empty(min(size, len(x)), dtype=torch.long)
    distance = torch.full((len(x),), torch.inf)
    far = 0
    for i in range(len(chosen)):
        chosen[i] = far
        distance = torch.minimum(distance, (x - x[far]).square().sum(1))
        far = int(distance.argmax())
    return features[some[chosen]]
