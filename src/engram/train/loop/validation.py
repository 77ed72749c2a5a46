"""Estimates of how good a task is on images it has not learned from, with an interval.

Where images are few, every candidate of a run is trained once for each fold of the training images
and once with all of them (`engram.data.folds`), as parallel tasks of one pass. What is printed is
an estimate for the task that learned from all images:

    accuracy   of the answers for held-out images, less what choosing the best of several candidates
               on the same images flatters (bootstrap bias corrected cross-validation: Tsamardinos,
               Greasidou and Borboudakis, 2018), with the error scaled from the images that a fold
               learns from to all of them: errors fall with about the power 0.3 of their number
    interval   90 %: Wilson's, for as many images as the answers are worth. Answers of folds whose
               tasks share training images are worth fewer than they are (Nadeau and Bengio, 2003)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engram.data.datasets import Splits
from engram.tasks.heads import Fitted
from engram.tasks.kind import Kind
from engram.tasks.metrics import Pairs, false_alarm_estimate, wilson
from engram.train.recipe import Recipe

#: Held-out images that are enough: the interval of an accuracy of 85 % is then 8 points wide.
ENOUGH = 300
LARGEST, SMALLEST = 1 / 5, 1 / 10  # share of the images that a fold holds out
#: Of the error, as the number of images grows: 0.13 to 0.54 on six datasets (ViT-Ti/16, linear
#: heads, 1 to 32 images a class), mostly near 0.3.
POWER = 0.3
_RESAMPLES = 200


def with_held_out(whole: Splits, recipe: Recipe, cross: bool = True, test: bool = False) -> Splits:
    """Splits with held-out images: the data's own validation split, folds, or a share.

    `cross` says whether several tasks can train together, which folds need. With `test`, there has
    to be a test split: that should show now, not after an hour.
    """
    if test:
        whole["test"]
    images, seed = len(whole["train"]), recipe.data_seed
    if whole.val is not None or not cross or not recipe.refit or recipe.mixup:
        return whole.with_validation(recipe.val_share or SMALLEST, seed)
    if recipe.folds > 1:
        return whole.with_folds(recipe.folds, seed=seed)
    if recipe.folds or recipe.val_share:
        return whole.with_folds(1, recipe.val_share or SMALLEST, seed)
    share = max(SMALLEST, min(LARGEST, ENOUGH / images))
    count = min(round(ENOUGH / (share * images)), round(1 / LARGEST))
    return whole.with_folds(count, share, seed)


class HeldOut(NamedTuple):
    """Answers for all held-out images (`Kind.keep`), in the order of the images."""

    outputs: Tensor
    labels: Tensor
    samples: Tensor  # their numbers in the validation split
    failed: int = 0  # images that cannot be read

    @property
    def pairs(self) -> Pairs:
        """Argument of `Kind.metrics`."""
        return self.outputs, self.labels

    @classmethod
    def joined(cls, kept: Sequence[tuple[Tensor, Tensor, Tensor]], failed: int = 0) -> HeldOut:
        """From outputs, labels and sample numbers of several batches."""
        if not kept:  # no image can be read
            return cls(torch.zeros(0, 1), torch.zeros(0).long(), torch.zeros(0).long(), failed)
        outputs, labels, samples = (torch.cat(parts) for parts in zip(*kept, strict=True))
        order = samples.argsort()
        return cls(outputs[order], labels[order], samples[order], failed)


# The best of several trained tasks, and which differences are ties


def tie_margin(share: Tensor | float, images: int) -> Any:
    """Half a standard error of a share of so many images: smaller differences are ties."""
    return 0.5 * (share * (1 - share) / max(1, images)) ** 0.5


def noise(score: str, metrics: Mapping[str, Any]) -> float:
    """Differences of the score below this are ties; every score is, or is like, a share."""
    share = min(1.0, max(0.0, _number(metrics, score, 0.0)))
    return float(tie_margin(share, int(metrics["images"])))


def ties(score: str, tried: Sequence[Mapping[str, Any]]) -> list[int]:
    """The best by a metric, and those that it is not clearly better than."""
    scores = [_number(metrics, score, -math.inf) for metrics in tried]
    best = scores.index(max(scores))
    least = scores[best] - noise(score, tried[best])
    return [i for i, value in enumerate(scores) if value >= least]


def best_of(score: str, tried: Sequence[Mapping[str, Any]]) -> int:
    """The one with the lowest loss among those that tie for the best."""
    return min(ties(score, tried), key=lambda i: _number(tried[i], "loss", math.inf))


def _number(metrics: Mapping[str, Any], name: str, worst: float) -> float:
    """A metric; the worst there is where it is not a number, or nothing could be measured."""
    value = float(metrics.get(name, worst))
    return worst if math.isnan(value) else value


# Estimates


@dataclass(frozen=True, eq=False)
class Estimator:
    """Makes estimates for one run: of a kind of task, by the metric that chooses."""

    kind: Kind
    score: str
    splits: Splits

    def __call__(
        self, metrics: Mapping[str, Any], answers: HeldOut, tried: Sequence[HeldOut], fitted: Fitted
    ) -> dict[str, Any]:
        """The metrics of the answers, with the score as an estimate for all images.

        The answers are those of the best of all that was `tried`. `interval` holds the true score
        in nine of ten runs, `held_out` is the score as it was measured, `folds` how many there
        were, and `learned_all` whether the task learned from the held-out images in the end.
        """
        folds, measured = self.splits.folds, float(metrics[self.score])
        found: dict[str, Any] = {
            **metrics,
            "held_out": measured,
            "folds": 1 if folds is None else folds.count,
            "learned_all": folds is not None,
        }
        if not len(answers.labels) or math.isnan(measured):
            return {**found, "interval": None}
        train, val = len(self.splits["train"]), len(self.splits["val"])
        learned = train / (train + val) if folds is None else folds.learned_share
        worth = 1 + found["folds"] * (1 - learned) / learned  # answers that are worth one
        if self.kind.one_class and not bool(answers.labels.any()):
            share, low, high = false_alarm_estimate(len(answers.labels))
            own = {self.score: 1 - share, "interval": [1 - high, 1 - low]}
            return {**found, "false_alarms": share, **own}
        if self.score != "accuracy":
            return {**found, "interval": self._resampled(answers, fitted, worth)}
        right = _right(answers).mean().item() if len(tried) < 2 else _less_flattery(tried)
        right *= len(answers.labels) / metrics["images"]  # those that cannot be read are wrong
        images = metrics["images"] / worth
        if folds is None:
            return {**found, self.score: right, "interval": list(wilson(right, images))}
        right, interval = _for_all_images(right, images, learned)
        return {**found, self.score: right, "interval": interval}

    def _resampled(self, answers: HeldOut, fitted: Fitted, worth: float) -> list[float]:
        """The interval of any score, from resampled images, widened by what answers are worth."""
        random, images = torch.Generator().manual_seed(0), len(answers.labels)
        scores = torch.zeros(_RESAMPLES, dtype=torch.float64)
        for i in range(_RESAMPLES):
            rows = torch.randint(images, (images,), generator=random)
            kept = answers.outputs[rows], answers.labels[rows]
            scores[i] = self.kind.metrics(kept, fitted)[self.score]
        middle = self.kind.metrics(answers.pairs, fitted)[self.score]
        away = (scores - middle).nan_to_num(0.0) * math.sqrt(worth)
        return [middle + float(away.quantile(q)) for q in (0.05, 0.95)]


def leave_one_out_estimate(metrics: Mapping[str, Any], learned: int) -> dict[str, Any]:
    """Metrics of answers for images that were left out one by one, as an `Estimator` gives them.

    `learned` is the number of images that the task learned from, these among them.
    """
    measured, share = float(metrics["accuracy"]), 1 - 1 / learned
    worth = metrics["images"] / (1 + 1 / share)
    right, interval = _for_all_images(measured, worth, share)
    estimate = {"accuracy": right, "interval": interval, "held_out": measured}
    return {**metrics, **estimate, "folds": metrics["images"], "learned_all": True}


def _for_all_images(right: float, images: float, learned: float) -> tuple[float, list[float]]:
    """The accuracy of a task that learned from all images, and its interval.

    `right` is that of tasks that learned from a share of them, from answers that are worth as many
    independent ones as `images` says.
    """
    right = 1 - (1 - right) * learned**POWER
    interval = list(wilson(right, images))
    # Jeffreys' prior: all of a few answers are not all answers
    return (right * images + 0.5) / (images + 1), interval


def _right(answers: HeldOut) -> Tensor:
    return (answers.outputs.argmax(1) == answers.labels).double()


def _less_flattery(tried: Sequence[HeldOut]) -> float:
    """The accuracy of the best candidate on images that did not choose it.

    It is chosen again and again on resampled images, and measured on those left out.
    """
    right = torch.stack([_right(answers) for answers in tried], 1)  # (images, candidates)
    losses = torch.stack(
        [F.cross_entropy(one.outputs, one.labels, reduction="none").double() for one in tried], 1
    )
    images = len(right)
    random = torch.Generator().manual_seed(0)
    drawn = torch.randint(images, (_RESAMPLES, images), generator=random)
    counts = torch.zeros(_RESAMPLES, images, dtype=torch.float64)
    counts.scatter_add_(1, drawn, torch.ones_like(counts))
    scores, lost = counts @ right / images, counts @ losses / images  # (resamples, candidates)
    best = scores.amax(1, keepdim=True)
    ties = scores >= best - tie_margin(best, images)
    chosen = torch.where(ties, lost, torch.inf).argmin(1)
    left_out = (counts == 0).double()
    hits = (left_out * right.mT[chosen]).sum(1) / left_out.sum(1).clamp(min=1)
    return float(hits[left_out.sum(1) > 0].mean())
