"""What was understood of a dataset, for `engram data`: splits, classes, sizes, what is wrong.

Nothing is written. The headers of some images are read, or with `check` every image is decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from engram.data.datasets import Dataset, Splits
from engram.data.duplicates import Duplicates, find_duplicates
from engram.data.source import SPLITS
from engram.images.decode import BadImage, image_size, read_image
from engram.tasks.kinds import KINDS
from engram.util.description import Description
from engram.util.progress import Progress, silent

#: How many images are looked at unless every one is checked.
SAMPLE = 5_000

_THREADS = 8
_UNEQUAL = 5  # times as many images of one class as of another: worth a word
_FEW = 5  # training images of a class


@dataclass(frozen=True)
class Overview:
    """A dataset, and what a look at its images showed."""

    splits: Splits
    looked_at: int
    sizes: npt.NDArray[np.int64]  # (images, 2): width and height of those that can be read
    unreadable: Sequence[str]  # "PATH: reason"
    checked: bool
    duplicates: Duplicates | None  # None: not looked for

    @property
    def images(self) -> int:
        return sum(len(dataset) for dataset in _datasets(self.splits).values())


def look_at(splits: Splits, *, check: bool = False, progress: Progress = silent) -> Overview:
    """Look at the images of a dataset.

    Args:
        splits: The dataset.
        check: Decode every image and look for all duplicates, which takes as long as it takes. By
            default the headers of at most 5,000 images are read, spread over the dataset.
        progress: Told how far it is.
    """
    datasets = list(_datasets(splits).values())
    samples = [(dataset, i) for dataset in datasets for i in range(len(dataset))]
    if not check and len(samples) > SAMPLE:
        chosen = np.linspace(0, len(samples) - 1, SAMPLE).astype(int)
        samples = [samples[i] for i in chosen]
    sizes: list[tuple[int, int]] = []
    unreadable: list[str] = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for done, found in enumerate(pool.map(partial(_look, check), samples), start=1):
            progress("images", done, len(samples))
            if isinstance(found, BadImage):
                unreadable.append(str(found))
            else:
                sizes.append(found)
    limit: dict[str, Any] = {"most": None} if check else {}
    duplicates = find_duplicates(datasets, progress=progress, **limit)
    pairs = np.array(sizes, dtype=np.int64).reshape(-1, 2)
    return Overview(splits, len(samples), pairs, unreadable, check, duplicates)


def _look(check: bool, sample: tuple[Dataset, int]) -> tuple[int, int] | BadImage:
    """The size of an image, or what is wrong with it."""
    dataset, i = sample
    try:
        if not check:
            return image_size(dataset.read(i), name=dataset.sample_name(i))
        if dataset.masks is not None:
            dataset.mask(i)
        return read_image(dataset.read(i), name=dataset.sample_name(i)).size
    except BadImage as error:
        return error


def _datasets(splits: Splits) -> dict[str, Dataset]:
    found = {name: getattr(splits, name) for name in SPLITS}
    return {name: dataset for name, dataset in found.items() if dataset is not None}


# Labels


def class_counts(splits: Splits) -> dict[str, npt.NDArray[np.int64]]:
    """How many images of each class every split has; nothing where images have no classes."""
    counts = {}
    for name, dataset in _datasets(splits).items():
        if splits.kind == "classification":
            counts[name] = np.bincount(dataset.labels, minlength=len(splits.classes))
        elif splits.kind == "multilabel":
            counts[name] = dataset.labels.sum(axis=0)
    return counts


def _hints(splits: Splits, counts: Mapping[str, npt.NDArray[np.int64]]) -> Iterator[str]:
    """What is worth knowing about the classes before training."""
    if splits.train is None or "train" not in counts:
        return
    train, names = counts["train"], splits.classes
    most, least = int(train.argmax()), int(train.argmin())
    if train[least] == 0:
        empty = [name for name, count in zip(names, train, strict=True) if count == 0]
        yield f"{_some(empty)} {'has' if len(empty) == 1 else 'have'} no training images"
    elif train[most] >= _UNEQUAL * train[least]:
        yield (
            f"{names[most]} has {train[most] / train[least]:.0f} times as many training images as "
            f"{names[least]} ({train[most]:,} and {train[least]:,}), so accuracy says little about "
            "the small classes; look at balanced_accuracy, and try fit with --balance weights"
        )
    few = [name for name, count in zip(names, train, strict=True) if 0 < count < _FEW]
    if few:
        yield f"fewer than {_FEW} training images: {_some(few)}"


def _some(names: Sequence[str], most: int = 5) -> str:
    others = len(names) - most
    return ", ".join(names[:most]) + (f" and {others:,} more" if others > 0 else "")


def _examples(splits: Splits, most: int = 5) -> Iterator[dict[str, str]]:
    """A few images with their labels, of as many classes as possible."""
    for name, dataset in _datasets(splits).items():
        if splits.kind == "classification":
            _, first = np.unique(dataset.labels, return_index=True)
        else:
            first = np.arange(len(dataset))
        spread = np.unique(np.linspace(0, len(first) - 1, most).astype(int))
        for i in first[spread].tolist():
            yield {"split": name, "image": dataset.sample_name(i), "label": _label(dataset, i)}
        return


def _label(dataset: Dataset, i: int) -> str:
    label = dataset.labels[i]
    if dataset.kind == "classification":
        return dataset.classes[int(label)]
    if dataset.kind == "multilabel":
        return ", ".join(dataset.classes[c] for c in np.flatnonzero(label)) or "none"
    if dataset.masks is not None:
        return dataset.masks.row_name(int(dataset.order[i]))
    return ", ".join(f"{name} {x:g}" for name, x in zip(dataset.classes, label, strict=True))


# For people and machines


def describe(overview: Overview) -> Description:
    """The overview as a document, rows and a table of classes."""
    splits = overview.splits
    counts, examples = class_counts(splits), list(_examples(splits))
    hints = list(_hints(splits, counts))
    document = {
        "data": splits.name,
        "kind": splits.kind,
        "splits": {name: len(dataset) for name, dataset in _datasets(splits).items()},
        "split_by": splits.split_by,
        "classes": [
            {"name": name} | {split: int(found[c]) for split, found in counts.items()}
            for c, name in enumerate(splits.classes)
        ],
        "images": overview.images,
        "looked_at": overview.looked_at,
        "sizes": _sizes(overview.sizes),
        "unreadable": list(overview.unreadable),
        "ignored": dict(splits.left_out),
        "duplicates": _duplicates(overview.duplicates),
        "hints": hints,
        "examples": examples,
    }
    rows = [*_split_rows(splits), *_image_rows(overview)]
    rows += [("worth knowing", hint) for hint in hints]
    lines = [f"  {one['image']}  {one['label']}" for one in examples]
    rows.append(("examples", "\n" + "\n".join(lines)))
    columns, table = _class_table(splits, counts)
    return Description(document, rows, columns, table)


def _split_rows(splits: Splits) -> Iterator[tuple[str, str]]:
    yield "data", splits.name
    noun = KINDS[splits.kind].nouns[len(splits.classes) != 1]
    yield "kind", f"{splits.kind}, {len(splits.classes):,} {noun}"
    sizes = ", ".join(f"{name} {len(found):,}" for name, found in _datasets(splits).items())
    by = "the data has no splits of its own" if splits.unsplit else f"by {splits.split_by}"
    yield "splits", f"{sizes}; {by}"
    if splits.val is None and splits.train is not None:
        yield "validation", "a tenth of train is held out when a task is trained (--val-share)"
    if splits.ignored:
        yield "ignored", splits.ignored_words


def _image_rows(overview: Overview) -> Iterator[tuple[str, str]]:
    sizes, bad = _sizes(overview.sizes), overview.unreadable
    part = overview.looked_at < overview.images
    seen = f" of {overview.looked_at:,} of {overview.images:,} images" if part else ""
    if sizes is not None:
        low, middle, high = (f"{size[0]:,}x{size[1]:,}" for size in sizes.values())
        same = low if low == high else f"{low} to {high}, median {middle}"
        yield "pixels", f"{same}, by the headers{seen}" if part else same
    if bad:
        lines = "".join(f"\n  {one}" for one in bad[:5])
        more = f"\n  and {len(bad) - 5:,} more" if len(bad) > 5 else ""
        yield "unreadable", f"\n  {len(bad):,}{seen}:{lines}{more}"
    elif overview.checked:
        yield "unreadable", "none; every image was decoded"
    else:
        yield "unreadable", f"none, by the headers{seen}; --check decodes every image"
    yield "duplicates", _duplicate_words(overview.duplicates)


def _sizes(sizes: npt.NDArray[np.int64]) -> dict[str, list[int]] | None:
    """The smallest and the largest image by area, and the median width and height."""
    if len(sizes) == 0:
        return None
    areas = sizes.prod(axis=1)
    return {
        "smallest": sizes[areas.argmin()].tolist(),
        "median": np.median(sizes, axis=0).astype(int).tolist(),
        "largest": sizes[areas.argmax()].tolist(),
    }


def _duplicates(found: Duplicates | None) -> dict[str, Any] | None:
    if found is None:
        return None

    def named(pairs: Sequence[tuple[tuple[Dataset, int], tuple[Dataset, int]]]) -> list[list[str]]:
        return [[one[0].sample_name(one[1]) for one in pair] for pair in pairs]

    return {
        "groups": len(found.groups),
        "across_splits": named(found.across()),
        "with_two_labels": named(found.contradictions()),
    }


def _duplicate_words(found: Duplicates | None) -> str:
    if found is None:
        return "not looked for among so many; --check does"
    if not found.groups:
        return "none, byte for byte"
    said = [f"{_images(len(found.groups))} more than once"]
    for pairs, what in (
        (found.across(), "of one split in another too"),
        (found.contradictions(), "with two labels"),
    ):
        if pairs:
            one, other = (dataset.sample_name(i) for dataset, i in pairs[0])
            said.append(f"{_images(len(pairs))} {what} ({one} and {other})")
    return "; ".join(said)


def _images(count: int) -> str:
    return f"{count:,} image{'s' * (count != 1)}"


def _class_table(
    splits: Splits, counts: Mapping[str, npt.NDArray[np.int64]], most: int = 40
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The classes with their images; of many, those with most and those with fewest."""
    if splits.kind == "regression":
        return ("number", "split", "least", "mean", "most"), tuple(_number_rows(splits))
    if not counts:
        return (KINDS[splits.kind].nouns[0],), tuple((name,) for name in splits.classes[:most])
    rows = [
        (name, *(f"{found[c]:,}" for found in counts.values()))
        for c, name in enumerate(splits.classes)
    ]
    if len(rows) > most:
        first = next(iter(counts.values()))
        order = np.argsort(-first, kind="stable").tolist()
        half = most // 2
        between = (f"… {len(rows) - 2 * half:,} others", *("" for _ in counts))
        rows = [*(rows[c] for c in order[:half]), between, *(rows[c] for c in order[-half:])]
    return ("class", *counts), tuple(rows)


def _number_rows(splits: Splits) -> Iterator[tuple[str, ...]]:
    for c, name in enumerate(splits.classes):
        for split, dataset in _datasets(splits).items():
            values = dataset.labels[:, c]
            yield name, split, *(f"{x:g}" for x in (values.min(), values.mean(), values.max()))
