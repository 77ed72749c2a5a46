"""Images that are the same file, byte for byte: in two splits, or with two labels.

Only images of the same number of bytes are read, first a piece from the middle, and whole only if
that is the same too.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from engram.data.datasets import Dataset
from engram.images.decode import BadImage
from engram.util.files import open_regular
from engram.util.progress import Progress, silent

#: Where more images than these would have to be read, nothing is looked for unless asked to.
MOST_READ = 20_000

_PIECE = 4096
_THREADS = 8

Sample: TypeAlias = tuple[Dataset, int]


@dataclass(frozen=True)
class Duplicates:
    """Groups of samples that are the same; each of them has at least two."""

    groups: Sequence[Sequence[Sample]]

    def across(self) -> list[tuple[Sample, Sample]]:
        """Every sample of val and test that is in train too (or of test, in val), with that one."""
        order = ("train", "val", "test")
        pairs = []
        for group in self.groups:
            ranked = sorted(group, key=lambda sample: order.index(sample[0].split))
            first = ranked[0]
            pairs += [(one, first) for one in ranked if one[0].split != first[0].split]
        return pairs

    def contradictions(self) -> list[tuple[Sample, Sample]]:
        """A pair of each group whose samples differ in their labels."""
        pairs = []
        for group in self.groups:
            first, *others = group
            pairs += [(first, other) for other in others if _label(other) != _label(first)][:1]
        return pairs


def find_duplicates(
    datasets: Sequence[Dataset], *, most: int | None = MOST_READ, progress: Progress = silent
) -> Duplicates | None:
    """The samples that are the same; None if more than `most` would have to be read for it."""
    samples = [(dataset, i) for dataset in datasets for i in range(len(dataset))]
    if not isinstance(samples[0][0].read(samples[0][1]), str):  # in memory, or on the Hub
        groups: list[list[Sample]] = [samples]
    else:
        groups = _grouped([samples], _sizes)
    for digest in (_piece, _whole):
        count = sum(map(len, groups))
        if most is not None and count > most:
            return None
        groups = _grouped(groups, partial(_in_threads, digest, progress))
    return Duplicates(groups)


def _grouped(
    groups: Iterable[Sequence[Sample]],
    keys: Callable[[Sequence[Sample]], Iterable[Hashable]],
) -> list[list[Sample]]:
    """The groups, divided by a key of each sample; without those of one sample or without a key."""
    samples = [(number, sample) for number, group in enumerate(groups) for sample in group]
    found: dict[Hashable, list[Sample]] = defaultdict(list)
    for (number, sample), key in zip(samples, keys([one for _, one in samples]), strict=True):
        if key is not None:
            found[number, key].append(sample)
    return [group for group in found.values() if len(group) > 1]


def _sizes(samples: Sequence[Sample]) -> Iterable[int | None]:
    for dataset, i in samples:
        path = dataset.read(i)
        assert isinstance(path, str)
        try:
            yield os.path.getsize(path)
        except OSError:
            yield None


def _in_threads(
    digest: Callable[[Sample], Hashable], progress: Progress, samples: Sequence[Sample]
) -> Iterable[Hashable]:
    with ThreadPoolExecutor(_THREADS) as pool:
        for done, key in enumerate(pool.map(digest, samples), start=1):
            progress("duplicates", done, len(samples))
            yield key


def _piece(sample: Sample) -> Hashable:
    """A piece of a file; nothing of what is in memory, which is quick to hash as a whole."""
    dataset, i = sample
    path = dataset.read(i)
    if not isinstance(path, str):
        return ""
    try:
        with open_regular(path) as file:
            file.seek(max(0, (os.path.getsize(path) - _PIECE) // 2))
            return hashlib.blake2b(file.read(_PIECE)).digest()
    except OSError:
        return None


def _whole(sample: Sample) -> Hashable:
    dataset, i = sample
    try:
        return dataset.sample_hash(i)
    except BadImage:
        return None


def _label(sample: Sample) -> Hashable:
    dataset, i = sample
    return tuple(dataset.labels[i].ravel().tolist())
