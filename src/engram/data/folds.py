"""Cross-validation: the training images that every fold holds out.

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

if TYPE_CHECKING:
    from engram.data.datasets import Dataset

Integers: TypeAlias = npt.NDArray[np.int64]

NONE = -1  # the fold of an image that is never held out


@dataclass(eq=False)
class Folds:
    """The fold that holds out each training and each validation image, or `NONE`."""

    count: int
    seed: int
    train: Tensor  # (training images)
    val: Tensor  # (validation images): the training images, or those of the only fold

    @property
    def learned_share(self) -> float:
        """The share of the training images that a fold's task learns from, on average."""
        return 1 - float((self.train != NONE).double().mean()) / self.count

    def keep_together(self, dataset: Dataset, groups: Integers) -> None:
        """Deal the images to several folds again, so that those of a group are in one."""
        if self.count > 1:
            self.train = self.val = torch.from_numpy(deal(dataset, groups, self.count, self.seed))

    def samples(self, fold: int) -> Integers:
        """The numbers of the validation images that a fold holds out."""
        found: Integers = torch.eq(self.val, fold).nonzero()[:, 0].numpy()
        return found

    def learned_from(self, samples: Tensor, fold: int) -> Tensor:
        """The rows of these training images that a fold does not hold out."""
        return torch.ne(self.train[samples], fold).nonzero()[:, 0]

    def weights(self, samples: Tensor, fold: int) -> Tensor:
        """Weights of training images in the loss of a fold's task: 0 for what it holds out.

        Their mean over all images is 1, so that gradients are as large as without folds.
        """
        kept = self.train != fold
        return kept[samples] * (len(kept) / max(1, int(kept.sum())))


def deal(dataset: Dataset, groups: Integers, count: int, seed: int) -> Integers:
    """The fold of every image: every class in equal shares as far as groups allow.

    The only image of a class is never held out: its class could not be learned otherwise. For the
    same reason a group that has all images of a class is taken apart. The result depends on the
    samples' names, not on their order.
    """
    by_name = np.array(sorted(range(len(dataset)), key=dataset.sample_name), dtype=np.int64)
    labels = dataset.labels if dataset.labels.ndim == 1 else np.zeros(len(dataset), dtype=np.int64)
    sizes = np.bincount(labels, minlength=1)
    together: dict[int, list[int]] = {}
    for i in np.random.default_rng([seed, count]).permutation(by_name).tolist():
        together.setdefault(int(groups[i]), []).append(i)
    dealt: list[list[int]] = []
    for group in together.values():
        classes, own = np.unique(labels[group], return_counts=True)
        whole = bool((own == sizes[classes]).any())
        dealt += [[i] for i in group] if whole else [group]
    filled = np.zeros((count, len(sizes)), dtype=np.int64)
    folds = np.full(len(dataset), NONE, dtype=np.int64)
    for group in sorted(dealt, key=len, reverse=True):  # the large ones first
        own = np.bincount(labels[group], minlength=len(sizes))
        most = int(own.argmax())
        if sizes[most] > 1:
            fold = int(np.lexsort((filled.sum(1), filled[:, most]))[0])
            folds[group] = fold
            filled[fold] += own
    return folds


def usual_class_size(dataset: Dataset) -> int:
    """Images of the median class; all of them where an image has no single class."""
    if dataset.labels.ndim != 1:
        return len(dataset)
    counts = np.bincount(dataset.labels)
    return int(np.median(counts[counts > 0]))
