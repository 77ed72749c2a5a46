"""Rows for people before a run begins: its backbone, data and cache."""

from __future__ import annotations

from collections.abc import Sequence

from engram.data.datasets import Splits
from engram.errors import flag
from engram.model import MemoryViT
from engram.tasks.spec import TaskSpec
from engram.train.features.cache import row_bytes
from engram.train.features.caches import default_root
from engram.train.features.feeds import FeedPlan
from engram.train.loop.validation import with_held_out
from engram.train.recipe import Recipe
from engram.util.text import counted, storage

#: Said once a machine: when the folder of the cache does not exist yet.
_FIRST_TIME = (
    "what the backbone computes is kept there, so that later runs on the same images start at "
    "once; `engram cache info` lists it, `engram cache clear` removes it, ENGRAM_CACHE moves it"
)


def opening(
    model: MemoryViT, specs: Sequence[TaskSpec], whole: Splits, recipe: Recipe, why: str = ""
) -> list[tuple[str, str]]:
    """Backbone, data and cache of a run that trains tasks of these specs on this data.

    `why` says why it is this backbone.
    """
    shared = all(spec.method.shares_pass and not spec.kind_object.per_pixel for spec in specs)
    splits = with_held_out(whole, recipe, shared)
    kind = specs[0].kind_object
    one_class = kind.one_class  # what it needs of the images is kept in memory
    classes = "good images" if one_class else counted(len(splits.classes), *kind.nouns)
    height, width = model.preprocessing.size
    return [
        ("backbone", f"{model.backbone.source}, images of {height} x {width} pixels"),
        *([("", why)] if why else []),
        ("data", f"{whole.name}: {classes}; {_images(whole, splits, recipe)}"),
        *([] if one_class else _cache(FeedPlan(model, specs, splits, recipe))),
    ]


def _images(whole: Splits, splits: Splits, recipe: Recipe) -> str:
    """The images of every split, and where those for validation come from."""
    train, val = len(splits["train"]), len(splits.held_out)
    parts = [f"{counted(train, 'image')} to train"]
    seed = f"seed {recipe.data_seed}"
    if whole.val is not None:
        parts.append(f"{val:,} to validate (its own split)")
    elif splits.folds is None:
        parts.append(f"{val:,} held out of {train + val:,} to validate ({seed})")
    elif splits.folds.count == 1:
        parts.append(
            f"{val:,} of them held out to validate first, near-duplicates together ({seed})"
        )
    else:
        some = f"{val:,} of them " if val < train else ""
        turns = f"held out in turn in {splits.folds.count} folds, near-duplicates together"
        parts.append(f"{some}{turns} ({seed})")
    if splits.test is not None:
        parts.append(f"{len(splits.test):,} to test")
    return ", ".join(parts)


def _cache(plan: FeedPlan) -> list[tuple[str, str]]:
    reason = f"{flag('cache')} is off" if plan.recipe.cache == "off" else plan.reason_against()
    if reason:
        return [("cache", f"not used: {reason}")]
    row = row_bytes(plan.model.backbone, plan.model.preprocessing, plan.keeps)
    images, gb = int(plan.recipe.cache_gb * 1e9 / row), plan.recipe.cache_gb
    each = f"{storage(row)} an image: {flag('cache_gb')} {gb:g} holds {counted(images, 'image')}"
    if reason := plan.too_large():
        return [("cache", f"not used: {reason}; {each}")]
    root = default_root()
    rows = [("cache", f"{root}, {storage(plan.bytes)} for these images, {each}")]
    return rows if root.exists() else [*rows, ("", _FIRST_TIME)]
