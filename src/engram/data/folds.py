"""Validation images: a share that is held out once, or folds for cross-validation.

A fold's task never learns from the images of its fold, so what all these tasks answer for their own
held-out images are answers for all images by tasks that had not seen them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engram.errors import EngramError
from engram.util.text import counted

if TYPE_CHECKING:
    from engram.data.datasets import Dataset

Integers: TypeAlias = npt.NDArray[np.int64]

NONE = -1  # the fold of an image that is never held out


@dataclass(eq=False)
class Folds:
    """The fold that holds out each training image, or `NONE`.

    The images are dealt into `parts`, of which the first `count` are folds.
    """

    count: int
    parts: int
    seed: int
    train: Tensor  # (training images), which are the validation images, too

    @property
    def learned_share(self) -> float:
        """The share of the training images that a fold's task learns from, on average."""
        return 1 - float((self.train != NONE).double().mean()) / self.count

    @property
    def all_held_out(self) -> Integers:
        """The images that some fold holds out."""
        found: Integers = (self.train != NONE).nonzero()[:, 0].numpy()
        return found

    def keep_together(self, dataset: Dataset, groups: Integers) -> bool:
        """Deal the images again, so that those of a group are held out together, or not at all.

        Returns whether that was possible: where no class has two groups, all stays as it was.
        """
        if self.parts > 1:
            dealt = deal(dataset, groups, self.count, self.parts, self.seed)
        else:
            dealt = join(dataset, groups, self.train.numpy())
        possible = bool((dealt != NONE).any())
        if possible:
            self.train = torch.from_numpy(dealt)
        return possible

    def samples(self, fold: int) -> Integers:
        """The numbers of the images that a fold holds out."""
        found: Integers = torch.eq(self.train, fold).nonzero()[:, 0].numpy()
        return found

    def learned_from(self, samples: Tensor, fold: int) -> Tensor:
        """The rows of these images that a fold does not hold out."""
        return torch.ne(self.train[samples], fold).nonzero()[:, 0]

    def weights(self, samples: Tensor, fold: int) -> Tensor:
        """Weights of training images in the loss of a fold's task: 0 if held out, 1 on average."""
        kept = self.train != fold
        return kept[samples] * (len(kept) / max(1, int(kept.sum())))


def make_folds(train: Dataset, count: int, share: float | None, seed: int) -> Folds:
    """Make so many folds, or one with a share; `Splits.with_folds` says more."""
    if count == 1:
        val = split_validation(train, share or 0.1, seed)[1]
        parts, dealt = 1, np.where(np.isin(train.order, val.order), 0, NONE)
    else:
        _, sizes = _labels(train)
        usual = int(np.median(sizes[sizes > 0]))  # the images of a class
        parts = max(2, min(round(1 / share) if share else count, usual))
        count = min(count, parts)
        dealt = deal(train, train.group_numbers(), count, parts, seed)
    if not (dealt != NONE).any():
        raise _too_small(train)
    return Folds(count, parts, seed, torch.from_numpy(dealt))


def split_validation(train: Dataset, share: float = 0.1, seed: int = 0) -> tuple[Dataset, Dataset]:
    """(train, val): a stratified share of the training data, the same for the same seed.

    Every class keeps at least one training image, and samples that belong together stay together.
    The choice depends on the samples' names, not on their order.
    """
    if not 0 < share < 1:
        raise EngramError(f"The validation share is {share}; it must be between 0 and 1.")
    labels, sizes = _labels(train)
    by_name = _by_name(train)
    by_class = np.split(by_name[np.argsort(labels[by_name], kind="stable")], np.cumsum(sizes)[:-1])
    chosen = [
        np.random.default_rng([seed, c]).permutation(group)[:count]
        for c, (group, count) in enumerate(
            zip(by_class, _held_out(sizes, share, seed), strict=True)
        )
    ]
    held_out = np.sort(np.concatenate(chosen))
    if train.groups is not None:
        folds = np.full(len(train), NONE)
        folds[held_out] = 0
        held_out = np.flatnonzero(join(train, train.groups, folds) != NONE)
    if len(held_out) == 0:
        raise _too_small(train)
    kept = np.setdiff1d(np.arange(len(train)), held_out)
    return train.subset(kept, "train"), train.subset(held_out, "val")


def _held_out(sizes: Integers, share: float, seed: int) -> Integers:
    """Samples to hold out of classes of these sizes, which add up to the share."""
    wanted, spare = share * sizes, np.maximum(sizes - 1, 0)
    take: Integers = np.minimum(np.floor(wanted).astype(np.int64), spare)
    # What rounding down left over goes to the classes that lost most by it, ties by the seed.
    tie = np.random.default_rng([seed]).random(len(sizes))
    for c in np.lexsort((tie, np.floor(wanted) - wanted)):
        if take.sum() < round(share * sizes.sum()) and take[c] < spare[c]:
            take[c] += 1
    return take


def _too_small(train: Dataset) -> EngramError:
    return EngramError(
        f"{train.name} is too small to hold out images for validation: "
        f"{counted(len(train), 'image')} in {counted(len(train.classes), 'class', 'classes')}; "
        "add images or a val split."
    )


def deal(dataset: Dataset, groups: Integers, count: int, parts: int, seed: int) -> Integers:
    """The fold of every image, for `count` of `parts`: classes in equal shares, groups together.

    A class with a single group is never held out. The result depends on the samples' names, not on
    their order.
    """
    labels, sizes = _labels(dataset)
    together: dict[int, list[int]] = {}
    for i in np.random.default_rng([seed, parts]).permutation(_by_name(dataset)).tolist():
        together.setdefault(int(groups[i]), []).append(i)
    filled = np.zeros((parts, len(sizes)), dtype=np.int64)
    folds = np.full(len(dataset), NONE, dtype=np.int64)
    for group in sorted(together.values(), key=len, reverse=True):  # the large ones first
        own = np.bincount(labels[group], minlength=len(sizes))
        if (own < sizes)[own > 0].all():
            most = int(own.argmax())
            fold = int(np.lexsort((filled.sum(1), filled[:, most]))[0])
            folds[group] = fold
            filled[fold] += own
    folds[folds >= count] = NONE
    return folds


def join(dataset: Dataset, groups: Integers, folds: Integers) -> Integers:
    """Folds in which every image of a group is where its first image by name is.

    A class that would have no image left to learn from is not held out.
    """
    first: dict[int, int] = {}
    for i in _by_name(dataset).tolist():
        first.setdefault(int(groups[i]), i)
    joined: Integers = folds[[first[group] for group in groups.tolist()]]
    labels, sizes = _labels(dataset)
    held_out = np.bincount(labels[joined != NONE], minlength=len(sizes))
    whole = {int(groups[i]) for i in range(len(dataset)) if held_out[labels[i]] == sizes[labels[i]]}
    joined[np.isin(groups, list(whole))] = NONE
    return joined


def single_groups(dataset: Dataset, groups: Integers) -> list[int]:
    """Classes with several images whose images are all in one group."""
    labels, sizes = _labels(dataset)
    return [
        c for c in np.flatnonzero(sizes > 1).tolist() if len(np.unique(groups[labels == c])) == 1
    ]


def _labels(dataset: Dataset) -> tuple[Integers, Integers]:
    """The class of every image, and the images of every class; one where there are no classes."""
    labels = dataset.labels if dataset.labels.ndim == 1 else np.zeros(len(dataset), dtype=np.int64)
    return labels, np.bincount(labels, minlength=max(1, len(dataset.classes)))


def _by_name(dataset: Dataset) -> Integers:
    return np.array(sorted(range(len(dataset)), key=dataset.sample_name), dtype=np.int64)
