"""Features of all images of a dataset, from the cache that `fit` uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engram.data.datasets import Dataset, Splits
from engram.data.overview import Sample
from engram.errors import EngramError
from engram.model import MemoryViT
from engram.tasks.task_settings import TaskSettings
from engram.train.auto import trained_regimes
from engram.train.cache import Cache, contents_of
from engram.train.caches import room
from engram.train.feed_plan import FeedPlan
from engram.train.recipe import Recipe
from engram.util.progress import Progress, counter, silent
from engram.util.text import storage

_BATCH = 256  # rows that are read at once


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """Features of the images that can be read; rows are in the order of `samples`."""

    samples: Sequence[Sample]
    pooled: Tensor  # (images, width)
    class_tokens: Tensor  # (images, features): of all layers, in half precision
    unreadable: dict[str, str]  # the reason by name

    def rows(self, split: str) -> list[int]:
        """Rows of the images of a split."""
        return [row for row, (dataset, _) in enumerate(self.samples) if dataset.split == split]


def image_features(
    model: MemoryViT, splits: Splits, recipe: Recipe, progress: Progress = silent
) -> ImageFeatures:
    """Run the backbone on what is not cached yet, and read the features of all splits.

    Training and validation images are cached as `fit` caches them, so that it finds them there.
    Test images, which it does not cache, take less room.
    """
    samples: list[Sample] = []
    parts: list[tuple[Tensor, Tensor]] = []
    unreadable: dict[str, str] = {}
    for dataset in splits.datasets.values():
        count = counter(progress, "reading images", len(dataset))
        contents = contents_of(dataset, count)
        cache = _cache_for(model, splits, recipe, dataset)
        missing = len({c for c in contents if c and c not in cache})
        count = counter(progress, "caching", missing, storage(missing * cache.row_bytes))
        cache.forget(cache.damaged(contents))
        unreadable |= cache.fill(dataset, contents, workers=recipe.workers, progress=count)
        good = [i for i, content in enumerate(contents) if content in cache]
        samples += [(dataset, i) for i in good]
        for start in range(0, len(good), _BATCH):
            batch = [contents[i] for i in good[start : start + _BATCH]]
            pooled = cache.read(batch, only_pooled=True)[:, -1].float()
            parts.append((pooled, cache.class_tokens(batch)))
    if not parts:
        reason = next(iter(unreadable.values()), "there are no images")
        raise EngramError(f"No image of {splits.name} can be read: {reason}.")
    pooled, class_tokens = (torch.cat(rows) for rows in zip(*parts, strict=True))
    return ImageFeatures(samples, pooled, class_tokens, unreadable)


def _cache_for(model: MemoryViT, splits: Splits, recipe: Recipe, dataset: Dataset) -> Cache:
    """The cache of `fit`, or where it does not keep such images or has no room, a smaller one."""
    if splits.train is not None and len(splits.classes) > 1:
        settings, regimes = TaskSettings(), trained_regimes(model, splits, ())
        methods = [settings.method(regime, lenient=True) for regime in regimes]
        specs = [splits.task_spec("check", method) for method in methods]
        nothing = splits.train.subset([], "val")
        plan = FeedPlan(model, specs, replace(splits, val=splits.val or nothing), recipe)
        fits = plan.too_large() is None and plan.bytes <= 0.8 * room()
        smaller = plan.keeps == "all" and model.backbone.config.class_token  # has the same tokens
        if fits and not (dataset.split == "test" and smaller):
            return plan.cache()
    return Cache(model.backbone, model.preprocessing, keeps="statistics")
