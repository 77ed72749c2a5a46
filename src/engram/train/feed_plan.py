"""What a feed of batches is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engram.data.datasets import Dataset, Integers, Splits
from engram.data.loader import Transform, balanced, shuffled
from engram.model import MemoryViT
from engram.tasks.spec import TaskSpec
from engram.train.cache_plan import CachePlan
from engram.train.recipe import Recipe
from engram.util.processes import ProcessGroup


@dataclass(frozen=True)
class FeedPlan:
    """What a feed is made from, and what speaks against the cache."""

    model: MemoryViT
    names: Sequence[str]
    splits: Splits
    recipe: Recipe
    team: ProcessGroup
    transform: Transform | None = None

    @property
    def augment(self) -> str:
        return self.cache.augment

    @property
    def train(self) -> Dataset:
        return self.splits["train"]

    @property
    def val(self) -> Dataset:
        return self.splits["val"]

    @property
    def per_epoch(self) -> int:
        """Optimiser steps in an epoch."""
        return -(-len(self.train) // self.recipe.batch)

    def order(self, epoch: int, even: bool) -> Integers:
        """The training samples of an epoch; `even` where a sampler may balance the classes."""
        if even and self.recipe.balance == "sampler":
            return balanced(self.train.labels, self.recipe.data_seed, epoch)
        return shuffled(len(self.train), self.recipe.data_seed, epoch)

    @property
    def specs(self) -> list[TaskSpec]:
        return [self.model.task(name).spec for name in self.names]

    @property
    def only_pooled(self) -> bool:
        """Whether every task reads nothing but the backbone's pooled token."""
        return not any(spec.method.needs for spec in self.specs)

    @property
    def cache(self) -> CachePlan:
        """What the cache is to hold."""
        return CachePlan(
            self.model, self.specs, self.splits, self.recipe, self.transform is not None
        )
