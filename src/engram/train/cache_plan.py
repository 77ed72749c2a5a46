"""What a run needs of the cache: whether it can be used, what it keeps, the disk that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engram.data.datasets import Splits
from engram.model import MemoryViT
from engram.tasks.spec import TaskSpec
from engram.train.cache import Keeps, row_bytes
from engram.train.recipe import Recipe
from engram.util.spelling import spell


@dataclass(frozen=True)
class CachePlan:
    """The tasks that are to train, on which data and how; no image is read."""

    model: MemoryViT
    specs: Sequence[TaskSpec]
    splits: Splits  # with a validation split
    recipe: Recipe
    own_transform: bool = False

    @property
    def augment(self) -> str:
        return self.splits.augment if self.recipe.augment == "auto" else self.recipe.augment

    @property
    def keeps(self) -> Keeps:
        """What the cache has to keep of an image for these tasks."""
        parts = [spec.parts for spec in self.specs]
        if all(has.moments and not has.side for has in parts):
            return "moments"
        final = any(has.reads_final for has in parts)
        return "all" if final or any(spec.does.per_pixel for spec in self.specs) else "layers"

    def reason_against(self) -> str | None:
        """Why the cache cannot be used, known from the settings alone; None if it can."""
        if any(spec.parts.changes_trunk for spec in self.specs):
            return "the regime changes the trunk's own tokens"
        if self.own_transform:
            return "what a transform of your own does cannot be known"
        if self.augment != "none" and not self.recipe.views:
            return (
                f"{spell('augment')} is {self.augment}, which is random every time (give "
                f"{spell('views')} to fix some)"
            )
        return None

    @property
    def bytes(self) -> int:
        """The disk that all images take, those included that are stored already."""
        views = self.recipe.views if self.augment != "none" else 1
        images = len(self.splits["train"]) * views + len(self.splits["val"])
        return images * row_bytes(self.model.trunk, self.model.preprocessing, self.keeps)

    def too_large(self) -> str | None:
        """Why the whole cache would be too large for `cache_gb`; None if it is not."""
        if self.bytes <= self.recipe.cache_gb * 1e9:
            return None
        return (
            f"it would take {self.bytes / 1e9:.2g} GB, and {spell('cache_gb')} is "
            f"{self.recipe.cache_gb:g}"
        )
