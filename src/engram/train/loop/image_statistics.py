"""Keep statistics of the training images with tasks whose training has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram.tasks.class_statistics import ClassStatistics
from engram.train.loop.task_trainer import TaskTrainer
from engram.train.loop.validation import HeldOut
from engram.util.processes import ProcessGroup

if TYPE_CHECKING:
    from engram.train.loop.training import Training

_KEPT = 2_048  # images whose features are in memory, for correlations


def keep_statistics(
    training: Training, trainers: Sequence[TaskTrainer], old: ClassStatistics | None = None
) -> None:
    """Go over the training images once more, and keep what the features of tasks are like.

    The distances that are usual are those of held-out images: in cross-validation, from the
    statistics of a fold's own task. `old` are statistics of the first classes, whose images are not
    there any more. Nothing happens where the recipe turned it off.
    """
    if training.recipe.statistics == "off" or trainers[0].task.kind.one_class:
        return
    training.model.eval()
    training.progress("keeping statistics", 0, 0)
    final, folds = [one for one in trainers if one.name == one.trial], training.splits.folds
    sums = {
        one.name: _Sums(_statistics(one, training.processes), training.processes)
        for one in trainers
    }
    if old is not None and training.processes.main:
        for one in final:
            sums[one.name].remember(old)
    epoch = training.feed.epoch(0, 0, balanced=False)
    for shard, found in training.features(epoch, list(sums)):
        groups = final[0].task.kind.group(shard.labels)
        for one in trainers:
            rows = torch.arange(len(groups))
            if folds is not None and one.fold is not None:
                rows = folds.learned_from(shard.samples, one.fold)
            sums[one.name].add(found[one.name][rows], groups[rows])
    for added in sums.values():
        added.finish()
    measured: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {one.name: [] for one in final}
    for some, samples in training.asked(trainers):
        held_out = training.feed.validation(samples)
        for shard, found in training.features(held_out, [one.name for one in some]):
            for one in some:
                likeness = sums[one.name].statistics.likeness(found[one.name]).cpu()
                measured[one.trial].append((likeness, shard.samples, shard.samples))
    for one in final:
        statistics = sums[one.name].statistics
        likeness = HeldOut.joined(training.processes.gather(measured[one.name])).outputs
        known = statistics.adjust(likeness)
        if old is not None:  # as usual for images of both, or of the first alone
            share = float(old.counts.sum() / statistics.counts.sum()) if known else 1.0
            statistics.quantiles.lerp_(old.quantiles, share)
        elif not known:
            one.task.statistics = None
        low, middle = statistics.quantiles.cpu()
        one.familiarity = (likeness - low) / (middle - low) if known else None
    training.model.train()


def _statistics(trainer: TaskTrainer, processes: ProcessGroup) -> ClassStatistics:
    """Room for the statistics of a task; those of a fold's task are only measured with."""
    task = trainer.task
    if trainer.fold is None:
        return task.keep_statistics()
    groups = task.kind.groups(len(task.spec.classes))
    return ClassStatistics(groups, task.head.in_features).to(processes.device)


class _Sums:
    """Adds up features, over the images of all processes, until `finish` makes statistics of it."""

    def __init__(self, statistics: ClassStatistics, processes: ProcessGroup) -> None:
        self.statistics, self.processes = statistics, processes
        self._room = _KEPT // processes.world
        groups, features = statistics.means.shape
        self._counts = torch.zeros(groups, dtype=torch.float64)
        self._sums = torch.zeros(groups, features, dtype=torch.float64)
        self._squares = torch.zeros(features, dtype=torch.float64)
        self._kept: list[tuple[Tensor, Tensor]] = []

    def add(self, features: Tensor, groups: Tensor) -> None:
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
        seeds = (torch.Generator().manual_seed(0) for _ in range(2))
        groups = torch.multinomial(counts, self._room // 2, True, generator=next(seeds))
        self._kept.append((old.draw(groups, next(seeds)).half().cpu(), groups))
        self._room -= len(groups)

    def finish(self) -> None:
        device = self.statistics.centre.device
        parts = (self._counts, self._sums.flatten(), self._squares)
        added = self.processes.sum(torch.cat(parts)).cpu()
        counts, sums, squares = torch.split(added, [len(part) for part in parts])
        self.statistics.estimate(*(x.to(device) for x in (counts, sums.view_as(self._sums),
                                                          squares)))  # fmt: skip
        kept = self.processes.gather(self._kept)
        if kept:
            features, groups = (torch.cat(rows) for rows in zip(*kept, strict=True))
            self.statistics.correlate(features.float(), groups)
