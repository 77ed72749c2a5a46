"""The request to a reader of data, and its result: images by row, and their labels.

The readers are `folders`, `tables`, `arrays`, `presets` and `python_data`. A reader lists images
without decoding them, and raises an EngramError that says what is wrong with the data.
`datasets.load` chooses the reader.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engram.errors import EngramError
from engram.tasks.kinds import KINDS
from engram.util.text import join_names

#: An image that is not decoded yet: its path, its encoded bytes, or its pixels.
StoredImage: TypeAlias = str | bytes | npt.NDArray[np.uint8]

#: The splits of this package, and the names that other people give them.
SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}


# Images


class Rows(ABC):
    """Images (or masks) by row number, and their names in messages."""

    name: str

    @abstractmethod
    def read(self, row: int) -> StoredImage:
        """The image, not decoded yet."""

    def row_name(self, row: int) -> str:
        return f"{self.name}[{row}]"


@dataclass(frozen=True)
class Files(Rows):
    paths: tuple[str, ...]

    def read(self, row: int) -> StoredImage:
        return self.paths[row]

    def row_name(self, row: int) -> str:
        return self.paths[row]


@dataclass(frozen=True, eq=False)
class Arrays(Rows):
    """Images in memory, uint8 (N, H, W, 3) or (N, H, W).

    A tensor, because torch hands tensors to worker processes through shared memory.
    """

    pixels: torch.Tensor
    name: str

    def read(self, row: int) -> StoredImage:
        array: npt.NDArray[np.uint8] = self.pixels[row].numpy()
        return array


@dataclass(frozen=True)
class DataRequest:
    """The kind of task that labels are for, and the names that the caller knows.

    `split_names` maps train, val and test to the names of these splits in the source.
    """

    kind: str = "classification"
    image_column: str | None = None
    label_columns: tuple[str, ...] = ()
    split_column: str | None = None
    split_names: Mapping[str, str] = field(default_factory=dict)
    classes: Sequence[str] = ()
    group_column: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise EngramError(
                f"There is no kind of task {self.kind!r}; choose one of {', '.join(KINDS)}."
            )
        for split in self.split_names:
            check_split(split)

    @property
    def has_masks(self) -> bool:
        return KINDS[self.kind].per_pixel


@dataclass
class FoundSplit:
    """One split as a reader found it: images, and for each the label before it is numbered."""

    rows: Rows
    labels: list[Any]  # None for segmentation
    masks: Rows | None = None  # of segmentation, perhaps of anomaly
    groups: Sequence[Any] | None = None  # cells that say which images belong together
    classes: Sequence[str] | None = None  # that the source lists
    label_columns: Sequence[str] = ("label",)
    left_out: Counter[str] = field(default_factory=Counter)  # files that were not used


@dataclass
class FoundData:
    """All splits that a reader found; `Splits` says what the other fields are."""

    splits: dict[str, FoundSplit]
    augment: str = "inception"
    flip: bool = True
    split_by: str = ""
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def first(self) -> FoundSplit:
        """The training data, or else the first split."""
        return self.splits.get("train") or next(iter(self.splits.values()))


def refuse_columns(source: str, **given: str | None) -> None:
    """Refuse the names of columns, by their roles, for data that has none."""
    for role, column in given.items():
        if column is not None:
            raise EngramError(
                f"{source} has no column {column!r}, and no {role} column at all: only tables and "
                "Hub datasets have columns to choose from; leave it out, or write a table."
            )


def spread(count: int, most: int) -> list[int]:
    """Pick at most so many of the numbers below `count`, evenly from the first to the last."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most))})


# Names of splits


def check_split(split: str) -> None:
    """Raise an EngramError unless `split` is train, val or test."""
    if split not in SPLITS:
        raise EngramError(f"There is no split {split!r}; choose train, val or test.")


def usual_split(name: str) -> str | None:
    """The split that is usually called `name`: train, val, test or None."""
    name = name.strip().lower()
    return next((split for split, names in SPLITS.items() if name in names), None)


def match_splits(names: Iterable[str], given: Mapping[str, str], source: str) -> dict[str, str]:
    """Map train, val and test to the source's names, as given or usual; a single split is train."""
    available = list(names)
    if given:
        for name in given.values():
            if name not in available:
                raise EngramError(f"{source} has no split {name!r}; it has {', '.join(available)}.")
        return dict(given)
    matched: dict[str, str] = {}
    for name in available:
        split = usual_split(name)
        if split in matched:
            raise EngramError(
                f"{source} has two {split} splits, {matched[split]} and {name}; keep one."
            )
        if split:
            matched[split] = name
    if not matched and len(available) == 1:
        return {"train": available[0]}
    if not matched:
        usual = ", ".join(name for names in SPLITS.values() for name in names)
        raise EngramError(
            f"{source} has the splits {join_names(available, 8)}; rename them to one of {usual}, "
            "or map them in Python with splits=."
        )
    return matched
