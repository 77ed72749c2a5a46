"""Keep statistics of the training images with tasks whose training has ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram.tasks.class_statistics import ClassStatistics
from engram.train.feeds import BatchShard
from engram.train.learner import TaskTrainer
from engram.util.processes import ProcessGroup

if TYPE_CHECKING:
    from engram.train.training import Training

_KEPT = 2_048  # images whose features are in memory, for correlations


def keep_statistics(
    training: Training, learners: Sequence[TaskTrainer], old: ClassStatistics | None = None
) -> None:
    """Go over the training images once more, and keep what their features are like.

    `old` are statistics of the first classes, whose images are not there any more. Nothing happens
    where the recipe turned it off.
    """
    if training.recipe.statistics == "off":
        return
    training.model.eval()
    names = [learner.name for learner in learners]
    training.progress("keeping statistics", 0, 0)
    sums = {
        one.name: Sums(one.task.keep_statistics(), training.team, _KEPT // training.team.world)
        for one in learners
    }
    for added in sums.values():
        if old is not None and training.team.main:
            added.remember(old)
    shares = training.feed.epoch(0, 0, balanced=False)
    for found, labels in _features(training, shares, names):
        for one in learners:
            sums[one.name].add(found[one.name], one.task.kind.group(labels))
    for one in learners:
        sums[one.name].finish()
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    for found, _ in _features(training, training.feed.validation(), names):
        for name in names:
            seen[name].append(sums[name].statistics.likeness(found[name]).cpu())
    for one in learners:
        statistics, likeness = sums[one.name].statistics, training.team.gather(seen[one.name])
        if not likeness:  # no image can be read, so there is nothing to measure by
            one.task.statistics = None
            continue
        statistics.adjust(torch.cat(likeness))
        if old is not None:  # as usual for images of both
            share = float(old.counts.sum() / statistics.counts.sum())
            statistics.quantiles.lerp_(old.quantiles, share)
    training.model.train()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def features_of(
    training: Training, shares: Iterable[BatchShard], name: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """What the head of a task is given of images, in half precision, and their labels."""
    for found, labels in _features(training, shares, [name]):
        yield found[name].half().cpu(), labels


def _features(
    training: Training, shares: Iterable[BatchShard], names: Sequence[str]
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    for share in shares:
        for inputs, labels in share.split(training.recipe.micro_batch):
            with torch.no_grad():
                yield training.feed.features(inputs, names), labels


class Sums:
    """Adds up features, over the images of all processes, until `finish` makes statistics of it."""

    def __init__(self, statistics: ClassStatistics, team: ProcessGroup, kept: int) -> None:
        self.statistics, self.team, self._room = statistics, team, kept
        groups, features = statistics.means.shape
        self._counts = torch.zeros(groups, dtype=torch.float64)
        self._sums = torch.zeros(groups, features, dtype=torch.float64)
        self._squares = torch.zeros(features, dtype=torch.float64)
        self._kept: list[tuple[Tensor, Tensor]] = []

    def add(self, features: Tensor, groups: Tensor) -> None:
        """One batch."""
        x = features.detach().cpu().double()
        self._counts.index_add_(0, groups, torch.ones(len(x), dtype=torch.float64))
        self._sums.index_add_(0, groups, x)
        self._squares += x.square().sum(0)
        if self._room > 0:
            self._kept.append((x[: self._room].half(), groups[: self._room]))
            self._room -= len(x)

    def remember(self, old: ClassStatistics) -> None:
        """Images of the first classes that are not there any more, as their statistics say."""
        counts, sums, squares = (part.cpu() for part in old.sums())
        self._counts[: len(counts)] += counts
        self._sums[: len(counts)] += sums
        self._squares += squares
        groups = torch.multinomial(counts, self._room // 2, True, generator=_generator())
        self._kept.append((old.draw(groups, _generator()).half().cpu(), groups))
        self._room -= len(groups)

    def finish(self) -> None:
        """Set the statistics."""
        device = self.statistics.centre.device
        parts = (self._counts, self._sums.flatten(), self._squares)
        added = self.team.sum(torch.cat(parts)).cpu()
        counts, sums, squares = torch.split(added, [len(part) for part in parts])
        self.statistics.estimate(*(x.to(device) for x in (counts, sums.view_as(self._sums),
                                                          squares)))  # fmt: skip
        kept = self.team.gather(self._kept)
        if kept:
            features, groups = (torch.cat(rows) for rows in zip(*kept, strict=True))
            self.statistics.correlate(features.float(), groups)
