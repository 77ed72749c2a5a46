"""Data for training and evaluation: what `load` finds, in splits.

A `Dataset` lists samples and decodes none of them; `batches.Loader` reads them.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from engram.data import presets, sources
from engram.data.labels import LABELS
from engram.data.presets import PRESETS
from engram.data.sources import SPLITS, Columns, Picture, Rows, Source
from engram.errors import EngramError
from engram.images.decode import BadImage, image_size
from engram.images.masks import MASK_VALUES, Legend, read_mask
from engram.tasks.kinds import IGNORED, KINDS
from engram.tasks.settings import TaskSettings
from engram.tasks.spec import TaskSpec

Integers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples of one split: pictures that are read one at a time, and a label for each.

    `labels[i]` is the class of sample i, a number below `len(classes)`; for multilabel a row of
    0 and 1, for regression a row of numbers, one a class. For segmentation it is empty: there
    `mask` has the classes of the pixels.
    """

    name: str
    split: str
    classes: tuple[str, ...]
    labels: npt.NDArray[Any]
    rows: Rows
    order: Integers  # sample -> row
    kind: str = "classification"
    masks: Rows | None = None
    legend: Legend | None = None  # of the masks

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, i: int) -> Picture:
        """The picture of sample i, not yet decoded: `images.read_image` takes it."""
        return self.rows.read(int(self.order[i]))

    def where(self, i: int) -> str:
        """What to call sample i: its path, or its row."""
        return self.rows.where(int(self.order[i]))

    def mask(self, i: int) -> Image.Image:
        """The mask of sample i: class + 1 a pixel, 0 for ignored. A bad one is a BadImage."""
        assert self.masks is not None
        assert self.legend is not None
        row = int(self.order[i])
        size = image_size(self.read(i), name=self.where(i))
        return self.legend.read(self.masks.read(row), size, self.masks.where(row))

    def sample_hash(self, i: int) -> str:
        """SHA-256 of the picture's bytes: the same picture has the same hash wherever it lies."""
        picture = self.read(i)
        if isinstance(picture, bytes):
            content = picture
        elif isinstance(picture, str):
            try:
                content = Path(picture).read_bytes()
            except OSError as error:
                raise BadImage(f"{picture}: {error.strerror}") from error
        else:
            content = str(picture.shape).encode() + picture.tobytes()
        return hashlib.sha256(content).hexdigest()

    def subset(self, samples: Sequence[int] | Integers, split: str | None = None) -> "Dataset":
        """Only these samples, in this order; nothing is copied but their numbers."""
        chosen = np.asarray(samples, dtype=np.int64)
        return replace(
            self,
            split=split or self.split,
            labels=self.labels[chosen],
            order=self.order[chosen],
        )


@dataclass(frozen=True)
class Splits:
    """What `load` found: the splits it has (None for those it has not) and how to augment them.

    `augment` and `flip` are what suits this data ("inception" or "pad-crop", mirrored or not);
    `ignored` counts the files that are no images by their name.
    """

    name: str
    classes: tuple[str, ...]
    train: Dataset | None = None
    val: Dataset | None = None
    test: Dataset | None = None
    augment: str = "inception"
    flip: bool = True
    ignored: int = 0
    unsplit: bool = False  # the source knew no splits
    kind: str = "classification"
    legend: Legend | None = None  # of segmentation: what the values in masks mean

    def __getitem__(self, split: str) -> Dataset:
        """The split by name; an EngramError if there is none."""
        dataset = getattr(self, split) if split in SPLITS else None
        if not isinstance(dataset, Dataset):
            have = ", ".join(name for name in SPLITS if getattr(self, name) is not None)
            raise EngramError(f"{self.name} has no {split} split; it has {have}")
        return dataset

    @property
    def task(self) -> dict[str, Any]:
        """What a task for this data is: arguments of `MemoryViT.add_task`."""
        terms: dict[str, Any] = {"classes": self.classes, "kind": self.kind}
        if self.legend is not None:
            terms |= {"values": self.legend.values, "ignore": self.legend.ignore}
        return terms

    def task_spec(self, name: str, settings: TaskSettings) -> TaskSpec:
        """The spec of a task that learns from this data."""
        values, ignore = None, IGNORED
        if self.legend is not None:
            values, ignore = self.legend.values, self.legend.ignore
        return TaskSpec.create(
            name, self.classes, settings, kind=self.kind, values=values, ignore=ignore
        )

    def with_validation(self, share: float = 0.1, seed: int = 0) -> "Splits":
        """These splits, with a validation split taken from the training data if there is none."""
        if self.val is not None:
            return self
        train, val = split_validation(self["train"], share, seed)
        return replace(self, train=train, val=val)


def split_validation(train: Dataset, share: float = 0.1, seed: int = 0) -> tuple[Dataset, Dataset]:
    """(train, val): a stratified share of the training data, the same for the same seed.

    Every class keeps at least one training image; where a picture has no one class, pictures are
    drawn from all of them. The choice depends on the samples' names, not
    on their order. If no sample can be spared, an EngramError.
    """
    if not 0 < share < 1:
        raise EngramError(f"the validation share must lie between 0 and 1, not {share}")
    by_name = np.array(sorted(range(len(train)), key=train.where), dtype=np.int64)
    strata = train.labels if train.labels.ndim == 1 else np.zeros(len(train), dtype=np.int64)
    by_class = by_name[np.argsort(strata[by_name], kind="stable")]
    sizes = np.bincount(strata, minlength=len(train.classes))
    groups = np.split(by_class, np.cumsum(sizes)[:-1])
    wanted, spare = share * sizes, np.maximum(sizes - 1, 0)
    take = np.minimum(np.floor(wanted).astype(np.int64), spare)
    # What rounding down left over goes to the classes that lost most by it, ties by the seed.
    tie = np.random.default_rng([seed]).random(len(groups))
    for c in np.lexsort((tie, np.floor(wanted) - wanted)):
        if take.sum() < round(share * len(train)) and take[c] < spare[c]:
            take[c] += 1
    chosen = [
        np.random.default_rng([seed, c]).permutation(group)[: take[c]]
        for c, group in enumerate(groups)
    ]
    held_out = np.sort(np.concatenate(chosen))
    if len(held_out) == 0:
        raise EngramError(
            f"{train.name} is too small to hold out {share:.0%} for validation: "
            f"{len(train)} images in {len(train.classes)} classes; add images or a val split"
        )
    kept = np.setdiff1d(np.arange(len(train)), held_out)
    return train.subset(kept, "train"), train.subset(held_out, "val")


# -------------------------------------------------------------------------------- loading


def load(
    spec: str | os.PathLike[str],
    *,
    split: str | None = None,
    kind: str = "classification",
    classes: Sequence[str] | None = None,
    like: TaskSpec | None = None,
    image: str | None = None,
    label: str | Sequence[str] | None = None,
    split_column: str | None = None,
    splits: Mapping[str, str] | None = None,
    values: Sequence[int] | None = None,
    ignore: int = IGNORED,
) -> Splits:
    """The dataset that `spec` names, as train / val / test; what is wrong with it is a sentence.

    `spec` is a folder of class folders, a .csv/.tsv/.jsonl/.parquet table, an .npz file,
    "hf:owner/name[:config]" or "hf:" and a local path, "digits", or a preset ("cifar100", or
    "cifar100:PATH" for a copy on disk). For segmentation it is a folder with images/ and masks/,
    "PICTURES::MASKS" for two folders of the same shape, a table, an .npz file or a Hub dataset.

    With `split`, only that split is kept, and a source without splits becomes it as a whole.
    `classes` fixes the names and their order. `like`, a task's spec, fixes all that data must have
    to fit a task already learned. `image`, `label` (one or several; of a mask too) and
    `split_column` name columns; `splits` maps train/val/test to the names that the source uses.
    `values` are what the classes are in masks, if not all that occur, and `ignore` is the value
    of pixels that count nowhere.
    """
    if like is not None:
        kind, classes, ignore = like.kind, like.classes, like.ignore
        values = like.values or None
    if kind not in KINDS:
        raise EngramError(f"There is no kind of task {kind!r}; choose one of {', '.join(KINDS)}.")
    for name in (*(splits or ()), *([split] if split else ())):
        if name not in SPLITS:
            raise EngramError(f"unknown split {name!r}; it can be train, val or test")
    text = os.fspath(spec)
    given = (label,) if isinstance(label, str) else tuple(label or ())
    wanted = Columns(image, given, split_column, splits or {}, kind, classes or ())
    found = _find(text, wanted)
    for name in given:
        if name not in found.columns:  # folders and arrays have none to choose from
            raise EngramError(
                f"{text} has no column {name!r} to learn from; a label names columns of tables "
                "and Hub datasets, so leave it out here"
            )
    legend = None
    if wanted.masks:
        for value in (ignore, *(values or ())):
            if not 0 <= value < MASK_VALUES:
                raise EngramError(f"{value} is no value of a mask; they go from 0 to 65,535")
        legend = Legend(tuple(values or _values(text, found, ignore)), ignore)
        found.classes = [str(value) for value in legend.values]
        if classes is not None and len(classes) != len(legend.values):
            raise EngramError(
                f"{text}: {len(classes)} names for {len(legend.values)} classes (the values "
                f"{', '.join(found.classes[:8])} in its masks); name each, or give their values"
            )
    train = found.splits.get("train")
    labels = train.labels if train else [x for s in found.splits.values() for x in s.labels]
    names = list(classes or LABELS[kind].classes(text, found.columns, labels, found.classes))
    if split is not None:
        if found.unsplit:
            found.splits = {split: found.splits["train"]}
        if split not in found.splits:
            have = ", ".join(found.splits)
            raise EngramError(f"{text} has no {split} split; it has {have}")
        found.splits = {split: found.splits[split]}
    return _numbered(text, found, names, kind, legend)


def _find(text: str, names: Columns) -> Source:
    kind, _, rest = text.partition(":")
    path = Path(text)
    if names.masks and "::" in text:
        pictures, _, masks = text.partition("::")
        if not Path(pictures).is_dir():
            raise EngramError(f"{pictures} is not a folder; give PICTURES::MASKS, two folders")
        return sources.mask_folders(Path(pictures), Path(masks))
    if kind == "hf" and rest:
        return presets.hub(rest, names)
    if (text == "digits" or text in PRESETS) and path.exists():
        raise EngramError(
            f"{text} is a dataset's name and a path here; write ./{text} for the path"
        )
    if text == "digits":
        return sources.digits(names)
    if kind in PRESETS:
        return presets.preset(kind, rest, names)
    if not path.exists():
        raise EngramError(
            f"{text} does not exist; data can be a folder, a table, an .npz file, "
            f"hf:owner/name, digits, or one of {', '.join(PRESETS)}"
        )
    if path.is_dir():
        return sources.mask_folders(path, None) if names.masks else sources.folder(path, names)
    if path.suffix.lower() in sources.TABLES:
        return sources.table(path, names)
    if path.suffix.lower() == ".npz":
        return sources.arrays(path, names)
    raise EngramError(
        f"{text} is not data of a known kind: give a folder of class folders, "
        f"a table ({', '.join(sources.TABLES)}) or an .npz file"
    )


def _values(name: str, source: Source, ignore: int) -> list[int]:
    """The values that the training masks hold, sorted, but the ignored one: every mask is read."""
    found = source.splits.get("train") or next(iter(source.splits.values()))
    masks = found.masks
    assert masks is not None

    def of(row: int) -> npt.NDArray[np.bool_] | BadImage:
        try:
            mask = read_mask(masks.read(row), name=masks.where(row))
        except BadImage as error:  # will be told when it is to be learned from
            return error
        return np.bincount(mask.ravel(), minlength=MASK_VALUES) > 0

    seen = np.zeros(MASK_VALUES, dtype=bool)
    bad: BadImage | None = None
    with ThreadPoolExecutor(4) as pool:
        for one in pool.map(of, range(len(masks))):
            if isinstance(one, BadImage):
                bad = bad or one
            else:
                seen |= one
    seen[ignore] = False
    values = [int(value) for value in np.flatnonzero(seen)]
    if not values:
        raise bad or EngramError(f"{name}: the masks hold nothing but {ignore}, which is ignored")
    if len(values) > IGNORED:
        raise EngramError(
            f"{name}: the masks hold {len(values)} values, and {IGNORED} classes are the most; "
            "are they masks, with a class for every pixel?"
        )
    return values


def _numbered(
    name: str, source: Source, classes: Sequence[str], kind: str, legend: Legend | None
) -> Splits:
    """Number the labels by class; a label that is no class is an EngramError."""
    if len(set(classes)) != len(classes):
        raise EngramError(f"{name}: the list of classes names one of them twice")
    datasets = {}
    for split, found in source.splits.items():
        where = f"{name}: the {split} split"
        if not found.labels:
            raise EngramError(f"{where} is empty")
        labels = LABELS[kind].numbered(where, found.labels, classes)
        order = np.arange(len(labels))
        datasets[split] = Dataset(
            name, split, tuple(classes), labels, found.rows, order, kind, found.masks, legend
        )
    return Splits(
        name,
        tuple(classes),
        **datasets,
        augment=source.augment,
        flip=source.flip,
        ignored=source.ignored,
        unsplit=source.unsplit,
        kind=kind,
        legend=legend,
    )
