"""Hold out a share of the training data for validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from engram.errors import EngramError
from engram.util.text import counted

if TYPE_CHECKING:
    from engram.data.datasets import Dataset

Integers: TypeAlias = npt.NDArray[np.int64]


def split_validation(train: Dataset, share: float = 0.1, seed: int = 0) -> tuple[Dataset, Dataset]:
    """(train, val): a stratified share of the training data, the same for the same seed.

    Every class keeps at least one training image. Where an image has no single class, the share is
    drawn from all images. The choice depends on the samples' names, not on their order. If no
    sample can be spared, it is an EngramError.
    """
    if not 0 < share < 1:
        raise EngramError(f"The validation share is {share}; it must be between 0 and 1.")
    groups = _by_class(train)
    chosen = [
        np.random.default_rng([seed, c]).permutation(group)[:count]
        for c, (group, count) in enumerate(zip(groups, _held_out(groups, share, seed), strict=True))
    ]
    held_out = np.sort(np.concatenate(chosen))
    if len(held_out) == 0:
        raise EngramError(
            f"{train.name} is too small to hold out {share:.0%} for validation: "
            f"{counted(len(train), 'image')} in {counted(len(train.classes), 'class', 'classes')}; "
            "add images or a val split."
        )
    kept = np.setdiff1d(np.arange(len(train)), held_out)
    return train.subset(kept, "train"), train.subset(held_out, "val")


def _by_class(dataset: Dataset) -> list[Integers]:
    """The samples of every class, sorted by name; all in the first where there are no classes."""
    by_name = np.array(sorted(range(len(dataset)), key=dataset.sample_name), dtype=np.int64)
    labels = dataset.labels if dataset.labels.ndim == 1 else np.zeros(len(dataset), dtype=np.int64)
    by_class = by_name[np.argsort(labels[by_name], kind="stable")]
    sizes = np.bincount(labels, minlength=len(dataset.classes))
    return np.split(by_class, np.cumsum(sizes)[:-1])


def _held_out(groups: Sequence[Integers], share: float, seed: int) -> Integers:
    """How many samples of every group to hold out, so that all of them add up to the share."""
    sizes: Integers = np.array([len(group) for group in groups])
    wanted, spare = share * sizes, np.maximum(sizes - 1, 0)
    take: Integers = np.minimum(np.floor(wanted).astype(np.int64), spare)
    # What rounding down left over goes to the classes that lost most by it, ties by the seed.
    tie = np.random.default_rng([seed]).random(len(groups))
    for c in np.lexsort((tie, np.floor(wanted) - wanted)):
        if take.sum() < round(share * sizes.sum()) and take[c] < spare[c]:
            take[c] += 1
    return take
