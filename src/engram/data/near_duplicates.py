"""Near-duplicates: copies of one picture and frames of one scene, found from cached features.

The class tokens of all layers point in nearly the same direction for copies that were stored again,
made smaller, cropped a little or mirrored, and for frames of one scene.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engram.data.datasets import Dataset
from engram.data.folds import Integers
from engram.util.text import join_names

#: Cosine of standardised features from which two images show the same thing.
SIMILAR = 0.9
_NEAREST = 32  # images that are looked at for each: a scene may have thousands of frames
_ROWS = 2_048  # of the matrix of cosines that are in memory at once


class Pair(NamedTuple):
    """Two images, by their rows, and the cosine of their features."""

    first: int
    second: int
    cosine: float


def directions(features: Tensor) -> Tensor:
    """Unit vectors of standardised features (n, features), whose products are cosines."""
    x = features.float()
    return F.normalize((x - x.mean(0)) / x.std(0, unbiased=False).clamp(min=1e-6), dim=1)


def nearest_rows(unit: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Cosines of the nearest other rows of unit vectors (n, features), and these rows: (n, k)."""
    found = []
    for start in range(0, len(unit), _ROWS):
        cosines = unit[start : start + _ROWS] @ unit.mT
        cosines.diagonal(start).fill_(-1)  # each with itself
        found.append(cosines.topk(min(count, len(unit) - 1)))
    return torch.cat([top.values for top in found]), torch.cat([top.indices for top in found])


def similar_pairs(unit: Tensor, least: float = SIMILAR) -> list[Pair]:
    """Pairs of unit vectors (n, features) whose cosine is at least this, among the nearest."""
    found: dict[tuple[int, int], float] = {}
    if len(unit) < 2:
        return []
    cosines, others = nearest_rows(unit, _NEAREST)
    for row, place in (cosines >= least).nonzero().tolist():
        first, second = sorted((row, int(others[row, place])))
        found[first, second] = float(cosines[row, place])
    return [Pair(first, second, cosine) for (first, second), cosine in sorted(found.items())]


def held_out_groups(features: Tensor, labels: Integers, known: Integers | None = None) -> Integers:
    """Group numbers of images (n, features): near-duplicates are to be held out together.

    Images of a class are compared by what differs from the class's mean: where classes are easy to
    tell apart, all images of one look alike beside the others. A class without groups, whose images
    all look alike, may be of one thing, and is one group. `known` groups are joined with these.
    """
    if labels.ndim != 1:
        return groups_of(len(features), similar_pairs(directions(features)), known)
    x, own = features.float(), torch.from_numpy(labels)
    counts = own.bincount().clamp(min=1)[:, None]
    means = torch.zeros(len(counts), x.shape[1]).index_add_(0, own, x) / counts
    pairs = [
        pair
        for pair in similar_pairs(directions(x - means[own]))
        if labels[pair.first] == labels[pair.second]
    ]
    alike = groups_of(len(x), similar_pairs(directions(x)))
    divided = {int(labels[pair.first]) for pair in pairs}
    for c in set(labels.tolist()) - divided:
        first, *others = np.flatnonzero(labels == c).tolist()
        if len(np.unique(alike[labels == c])) == 1:
            pairs += [Pair(first, other, SIMILAR) for other in others]
    return groups_of(len(x), pairs, known)


def dataset_groups(train: Dataset, samples: Tensor, features: Tensor) -> Integers:
    """Group numbers of a dataset's images, by a column and the features (n, f) of some of them."""
    groups: Integers = len(train) + np.arange(len(train))  # of what could not be read
    if len(samples) > 1:
        known = train.group_numbers()[samples]
        groups[samples] = held_out_groups(features, train.labels[samples], known)
    return groups


def groups_of(count: int, pairs: Iterable[Pair], known: Integers | None = None) -> Integers:
    """Group numbers of so many images: those that pairs or known groups connect are in one."""
    parent = list(range(count))
    if known is not None:
        _, places, numbers = np.unique(known, return_index=True, return_inverse=True)
        parent = places[numbers].tolist()

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for pair in pairs:
        first, second = sorted((root(pair.first), root(pair.second)))
        parent[second] = first
    return np.array([root(i) for i in range(count)], dtype=np.int64)


def known_notice(images: int) -> str:
    """A sentence about validation images that are near-duplicates of training images."""
    if not images:
        return ""
    are = "image is a near-duplicate" if images == 1 else "images are near-duplicates"
    return f"{images:,} validation {are} of training images, so validation flatters the task."


def together_notice(groups: Integers, alone: Sequence[str], kept: bool) -> str:
    """A sentence about near-duplicates in training data; nothing where there are none."""
    _, sizes = np.unique(groups, return_counts=True)
    images = int(sizes[sizes > 1].sum())
    if not images:
        return ""
    found = f"{images:,} of {len(groups):,} training images are near-duplicates of others"
    if not kept:
        return (
            f"{found}, and no class has images of two different things, so validation flatters "
            "the task; add images of other things."
        )
    sentence = f"{found}; they are held out together, so that validation does not flatter."
    if alone:
        are = "is" if len(alone) == 1 else "are"
        sentence += f" {join_names(alone, 5)}, with images of one thing alone, {are} not measured."
    return sentence
