"""Overview of a dataset, for `engram data`: splits, classes, sizes, duplicates, what is wrong.

Nothing is written. The headers of some images are read, or with `check` every image is decoded.
"""

from __future__ import annotations

import hashlib
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from engram.data.datasets import Dataset, Splits
from engram.data.source import SPLITS, spread
from engram.images.decode import BadImage, image_size, read_image
from engram.tasks.kinds import KINDS
from engram.util.files import open_regular
from engram.util.progress import Progress, silent
from engram.util.text import Description, counted, join_names

#: Images that are looked at unless every one is checked.
SAMPLE = 5_000
#: Where more images than these would have to be read, duplicates are looked for only if asked to.
MOST_READ = 20_000

_PIECE = 4096  # bytes of a file that are compared first
_THREADS = 8
_UNEQUAL = 5  # times as many images of one class as of another: worth a word
_FEW = 5  # training images of a class

Sample: TypeAlias = tuple[Dataset, int]


def _in_threads(
    work: Callable[[Sample], Any], samples: Sequence[Sample], what: str, progress: Progress
) -> list[Any]:
    results = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for done, result in enumerate(pool.map(work, samples), start=1):
            progress(what, done, len(samples))
            results.append(result)
    return results


def typical_side(splits: Splits) -> float | None:
    """The median of the longer sides of some images, by their headers; None if none is readable."""
    sides = []
    for dataset in list(splits.datasets.values())[:1]:
        for i in spread(len(dataset), 32):
            try:
                sides.append(max(image_size(dataset.read(i))))
            except BadImage:  # training will list it
                continue
    return statistics.median(sides) if sides else None


# Images that are the same file, byte for byte


#: Groups of samples that are the same; each of them has at least two.
Duplicates: TypeAlias = Sequence[Sequence[Sample]]


def across_splits(groups: Duplicates) -> list[tuple[Sample, Sample]]:
    """Every sample of val and test that is in train too (or of test, in val), with that one."""
    pairs = []
    for group in groups:
        first, *others = sorted(group, key=lambda sample: list(SPLITS).index(sample[0].split))
        pairs += [(one, first) for one in others if one[0].split != first[0].split]
    return pairs


def contradictions(groups: Duplicates) -> list[tuple[Sample, Sample]]:
    """A pair of each group whose samples differ in their labels."""
    pairs = []
    for first, *others in groups:
        pairs += [(first, one) for one in others if _labels(one) != _labels(first)][:1]
    return pairs


def find_duplicates(
    samples: Sequence[Sample], most: int | None = MOST_READ, progress: Progress = silent
) -> Duplicates | None:
    """Samples that are the same; None if more than `most` would have to be read for it.

    Images of the same size are read: a piece from the middle, and whole only if that is the same.
    """
    groups: Duplicates = [samples]
    dataset, first = samples[0]
    files = isinstance(dataset.read(first), str)  # others are in memory, or on the Hub
    for digest in (_size, _piece, _whole) if files else (_whole,):
        candidates = [(group, sample) for group, own in enumerate(groups) for sample in own]
        chosen = [sample for _, sample in candidates]
        look: Callable[[Sample], Hashable] = partial(_digest_or_none, digest)
        if digest is _size:  # too quick for threads
            keys = list(map(look, chosen))
        elif most is not None and len(chosen) > most:
            return None
        else:
            keys = _in_threads(look, chosen, "duplicates", progress)
        found: dict[Hashable, list[Sample]] = defaultdict(list)
        for (group, sample), key in zip(candidates, keys, strict=True):
            if key is not None:
                found[group, key].append(sample)
        groups = [own for own in found.values() if len(own) > 1]
    return groups


def _digest_or_none(digest: Callable[[Dataset, int], Hashable], sample: Sample) -> Hashable:
    try:
        return digest(*sample)
    except (OSError, BadImage):
        return None


def _size(dataset: Dataset, i: int) -> Hashable:
    return os.path.getsize(str(dataset.read(i)))


def _piece(dataset: Dataset, i: int) -> Hashable:
    with open_regular(str(dataset.read(i))) as file:
        file.seek(max(0, (os.fstat(file.fileno()).st_size - _PIECE) // 2))
        return hashlib.blake2b(file.read(_PIECE)).digest()


def _whole(dataset: Dataset, i: int) -> Hashable:
    return dataset.sample_hash(i)


def find_leaks(splits: Splits, split: str) -> list[int]:
    """Samples of a split that are among the training images; none if there are too many to read."""
    train, other = splits.train, splits.datasets.get(split)
    if train is None or other is None or split == "train":
        return []
    found = find_duplicates([(part, i) for part in (train, other) for i in range(len(part))])
    return sorted(i for (dataset, i), _ in across_splits(found or ()) if dataset is other)


def warnings(splits: Splits) -> Iterator[str]:
    """Warnings about leaks and classes, which touch the measured accuracy of a task."""
    for split in ("val", "test"):
        if count := len(find_leaks(splits, split)):
            are = "image of {0} is" if count == 1 else "images of {0} are"
            yield f"{count:,} {are.format(split)} also in train, so {split} flatters the task"
    yield from _hints(splits, class_counts(splits))


def _labels(sample: Sample) -> Any:
    return sample[0].labels[sample[1]].tolist()


# Labels


def class_counts(splits: Splits) -> dict[str, npt.NDArray[np.int64]]:
    """Images of each class by split; nothing where images have no classes."""
    counts = {}
    for name, dataset in splits.datasets.items():
        if splits.kind == "classification":
            counts[name] = np.bincount(dataset.labels, minlength=len(splits.classes))
        elif splits.kind == "multilabel":
            counts[name] = dataset.labels.sum(axis=0)
    return counts


def class_list(splits: Splits) -> list[dict[str, Any]]:
    """The classes with their images by split, for machines."""
    counts = class_counts(splits)
    return [
        {"name": name} | {split: int(found[c]) for split, found in counts.items()}
        for c, name in enumerate(splits.classes)
    ]


def class_rows(splits: Splits) -> list[tuple[str, ...]]:
    """The classes with their images by split, for people."""
    counts = class_counts(splits).values()
    return [(name, *(f"{found[c]:,}" for found in counts)) for c, name in enumerate(splits.classes)]


def _hints(splits: Splits, counts: Mapping[str, npt.NDArray[np.int64]]) -> Iterator[str]:
    """Warnings about the classes before training."""
    if "train" not in counts:
        return
    train, names = counts["train"], splits.classes
    most, least = int(train.argmax()), int(train.argmin())
    if train[least] == 0:
        empty = [name for name, count in zip(names, train, strict=True) if count == 0]
        yield f"{join_names(empty, 5)} {'has' if len(empty) == 1 else 'have'} no training images"
    elif train[most] >= _UNEQUAL * train[least]:
        yield (
            f"{names[most]} has {train[most] / train[least]:.0f} times as many training images as "
            f"{names[least]} ({train[most]:,} and {train[least]:,}), so accuracy says little about "
            "the small classes; look at balanced_accuracy, and try fit with --balance weights"
        )
    few = [name for name, count in zip(names, train, strict=True) if 0 < count < _FEW]
    if few:
        yield f"fewer than {_FEW} training images: {join_names(few, 5)}"


def _examples(splits: Splits, most: int = 5) -> Iterator[dict[str, str]]:
    """A few images with their labels, of as many classes as possible."""
    for name, dataset in splits.datasets.items():
        if splits.kind == "classification":
            _, first = np.unique(dataset.labels, return_index=True)
        else:
            first = np.arange(len(dataset))
        for i in first[spread(len(first), most)].tolist():
            yield {"split": name, "image": dataset.sample_name(i), "label": label_words(dataset, i)}
        return


def label_words(dataset: Dataset, i: int) -> str:
    label = dataset.labels[i]
    if dataset.kind == "classification":
        return dataset.classes[int(label)]
    if dataset.kind == "multilabel":
        return ", ".join(dataset.classes[c] for c in np.flatnonzero(label)) or "none"
    if dataset.masks is not None:
        return dataset.masks.row_name(int(dataset.order[i]))
    return ", ".join(f"{name} {x:g}" for name, x in zip(dataset.classes, label, strict=True))


# For people and machines


def describe(splits: Splits, *, check: bool = False, progress: Progress = silent) -> Description:
    """The dataset as a document, rows and a table of classes.

    The headers of at most 5,000 images are read, spread over the dataset. With `check`, every image
    is decoded and all duplicates are looked for, however long that takes.
    """
    datasets = list(splits.datasets.values())
    samples = [(dataset, i) for dataset in datasets for i in range(len(dataset))]
    images = len(samples)
    found = find_duplicates(samples, None if check else MOST_READ, progress)
    samples = samples if check else [samples[i] for i in spread(images, SAMPLE)]
    sizes = _in_threads(partial(_look_at, check=check), samples, "images", progress)
    bad = [str(one) for one in sizes if isinstance(one, BadImage)]
    pixels = _sizes([one for one in sizes if not isinstance(one, BadImage)])
    seen = f" of {len(samples):,} of {images:,} images" if len(samples) < images else ""
    counts, examples = class_counts(splits), list(_examples(splits))
    hints = list(_hints(splits, counts))
    duplicates, duplicates_in_words = _duplicates(found)
    document = {
        "data": splits.name,
        "kind": splits.kind,
        "splits": {name: len(dataset) for name, dataset in splits.datasets.items()},
        "split_by": splits.split_by,
        "classes": class_list(splits),
        "images": images,
        "looked_at": len(samples),
        "sizes": pixels,
        "unreadable": bad,
        "ignored": dict(splits.left_out),
        "duplicates": duplicates,
        "hints": hints,
        "examples": examples,
    }
    rows = list(_split_rows(splits))
    if pixels is not None:
        low, middle, high = (f"{width:,}x{height:,}" for width, height in pixels.values())
        same = low if low == high else f"{low} to {high}, median {middle}"
        rows.append(("pixels", f"{same}, by the headers{seen}" if seen else same))
    rows.append(("unreadable", _unreadable(bad, seen, check)))
    rows.append(("duplicates", duplicates_in_words))
    rows += [("worth knowing", hint) for hint in hints]
    lines = [f"  {one['image']}  {one['label']}" for one in examples]
    rows.append(("examples", "\n" + "\n".join(lines)))
    columns, table = _class_table(splits, counts)
    return Description(document, rows, columns, table)


def _look_at(sample: Sample, check: bool) -> tuple[int, int] | BadImage:
    """Width and height of an image, or what is wrong with it."""
    dataset, i = sample
    try:
        if not check:
            return image_size(dataset.read(i), name=dataset.sample_name(i))
        if dataset.masks is not None:
            dataset.mask(i)
        return read_image(dataset.read(i), name=dataset.sample_name(i)).size
    except BadImage as error:
        return error


def _split_rows(splits: Splits) -> Iterator[tuple[str, str]]:
    yield "data", splits.name
    yield "kind", f"{splits.kind}, {counted(len(splits.classes), *KINDS[splits.kind].nouns)}"
    sizes = ", ".join(f"{name} {len(found):,}" for name, found in splits.datasets.items())
    by = f"by {splits.split_by}" if splits.split_by else "the data has no splits of its own"
    yield "splits", f"{sizes}; {by}"
    if splits.val is None and splits.train is not None:
        yield "validation", "a tenth of train is held out when a task is trained (--val-share)"
    if splits.ignored:
        yield "ignored", splits.ignored_words


def _unreadable(bad: Sequence[str], seen: str, checked: bool) -> str:
    if bad:
        lines = "".join(f"\n  {one}" for one in bad[:5])
        more = f"\n  and {len(bad) - 5:,} more" if len(bad) > 5 else ""
        return f"\n  {len(bad):,}{seen}:{lines}{more}"
    if checked:
        return "none; every image was decoded"
    return f"none, by the headers{seen}; --check decodes every image"


def _sizes(sizes: Sequence[tuple[int, int]]) -> dict[str, list[int]] | None:
    """The smallest and the largest image by area, and the median width and height."""
    if not sizes:
        return None
    areas = np.prod(sizes, axis=1)
    return {
        "smallest": list(sizes[areas.argmin()]),
        "median": np.median(sizes, axis=0).astype(int).tolist(),
        "largest": list(sizes[areas.argmax()]),
    }


def _duplicates(found: Duplicates | None) -> tuple[dict[str, Any] | None, str]:
    """Duplicates as a document, and in words."""
    if found is None:
        return None, "not looked for among so many; --check does"
    kinds = {"across_splits": across_splits(found), "with_two_labels": contradictions(found)}
    document = {
        name: [[one[0].sample_name(one[1]) for one in pair] for pair in pairs]
        for name, pairs in kinds.items()
    }
    said = [f"{counted(len(found), 'image')} more than once"]
    what = {"across_splits": "of one split in another too", "with_two_labels": "with two labels"}
    for name, pairs in document.items():
        if pairs:
            said.append(f"{counted(len(pairs), 'image')} {what[name]} ({' and '.join(pairs[0])})")
    words = "; ".join(said) if found else "none, byte for byte"
    return {"groups": len(found), **document}, words


def _class_table(
    splits: Splits, counts: Mapping[str, npt.NDArray[np.int64]], most: int = 40
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The classes with their images; of many, those with most and those with fewest."""
    if splits.kind == "regression":
        return ("number", "split", "least", "mean", "most"), tuple(_number_rows(splits))
    if not counts:
        return (KINDS[splits.kind].nouns[0],), tuple((name,) for name in splits.classes[:most])
    rows = class_rows(splits)
    if len(rows) > most:
        order = np.argsort(-next(iter(counts.values())), kind="stable").tolist()
        half = most // 2
        between = (f"… {len(rows) - 2 * half:,} others", *("" for _ in counts))
        rows = [*(rows[c] for c in order[:half]), between, *(rows[c] for c in order[-half:])]
    return ("class", *counts), tuple(rows)


def _number_rows(splits: Splits) -> Iterator[tuple[str, ...]]:
    for c, name in enumerate(splits.classes):
        for split, dataset in splits.datasets.items():
            values = dataset.labels[:, c]
            yield name, split, *(f"{x:g}" for x in (values.min(), values.mean(), values.max()))
