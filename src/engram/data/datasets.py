"""Datasets for training and evaluation: `load` reads them, as `Splits` of a `Dataset` each.

A `Dataset` lists samples without decoding them; `loader.Loader` reads them in batches.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from engram.data.arrays import read_digits, read_npz
from engram.data.folders import DEFECTS, read_class_folders, read_good_folders, read_mask_folders
from engram.data.folds import Folds, Integers, make_folds, split_validation
from engram.data.labels import LABELS, find_legend
from engram.data.presets import PRESETS, read_hub, read_preset
from engram.data.python_data import PythonData, object_name, read_objects
from engram.data.source import (
    SPLITS,
    DataRequest,
    FoundData,
    Rows,
    StoredImage,
    check_split,
    refuse_columns,
)
from engram.data.tables import TABLES, read_table
from engram.errors import EngramError, flag
from engram.images.decode import image_size, read_image_file
from engram.images.masks import Legend
from engram.methods import Method
from engram.tasks.kind import IGNORED
from engram.tasks.kinds import KINDS
from engram.tasks.spec import TaskSpec
from engram.util.text import counted, join_names


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples of one split: images that are read one at a time, and a label for each.

    `labels[i]` is an index into `classes`; for multilabel a row of 0 and 1, for regression a row of
    numbers. For segmentation it is empty: there `mask` has the classes of the pixels.
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
    groups: Integers | None = None  # images that belong together, as a column of a table says

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, {self.kind}: {self.split} {len(self):,}; {_shown(self)})"

    def read(self, i: int) -> StoredImage:
        """The image of sample i, not yet decoded: `images.decode.read_image` takes it."""
        return self.rows.read(int(self.order[i]))

    def sample_name(self, i: int) -> str:
        """The name of sample i in messages: its path, or its row."""
        return self.rows.row_name(int(self.order[i]))

    def mask(self, i: int) -> Image.Image:
        """The mask of sample i: class + 1 in every pixel, 0 where it is ignored; or a BadImage."""
        assert self.masks is not None
        assert self.legend is not None
        row = int(self.order[i])
        size = image_size(self.read(i), name=self.sample_name(i))
        return self.legend.read(self.masks.read(row), size, self.masks.row_name(row))

    def sample_hash(self, i: int) -> str:
        """SHA-256 of the image's bytes: the same image has the same hash wherever it is stored."""
        image = self.read(i)
        if isinstance(image, str):
            image = read_image_file(image, image)
        elif not isinstance(image, bytes):
            image = str(image.shape).encode() + image.tobytes()
        return hashlib.sha256(image).hexdigest()

    def subset(self, samples: Sequence[int] | Integers, split: str | None = None) -> Dataset:
        """A dataset of these samples only, in this order. No image is copied."""
        chosen = np.asarray(samples, dtype=np.int64)
        labels, order = self.labels[chosen], self.order[chosen]
        groups = None if self.groups is None else self.groups[chosen]
        split = split or self.split
        return replace(self, split=split, labels=labels, order=order, groups=groups)

    def group_numbers(self) -> Integers:
        """A number for every sample, the same for those that belong together."""
        return np.arange(len(self)) if self.groups is None else self.groups


def _shown(data: Dataset | Splits) -> str:
    """The classes for `repr`: their number and the first of them."""
    one, several = KINDS[data.kind].nouns
    names = ", ".join(data.classes[:3]) + (", …" if len(data.classes) > 3 else "")
    return f"{len(data.classes)} {one if len(data.classes) == 1 else several}: {names}"


@dataclass(frozen=True)
class Splits:
    """A Dataset for each split, or None, and how to augment the training data.

    `augment` and `flip` suit this data ("inception" or "pad-crop", mirrored or not). `left_out`
    counts the files and rows that were not used. `split_by` is what says the splits, such as "the
    column 'fold'"; empty if the source has none.
    """

    name: str
    classes: tuple[str, ...]
    train: Dataset | None = None
    val: Dataset | None = None
    test: Dataset | None = None
    augment: str = "inception"
    flip: bool = True
    left_out: Mapping[str, int] = field(default_factory=dict)
    split_by: str = ""
    kind: str = "classification"
    legend: Legend | None = None  # of segmentation: what the values in masks mean
    folds: Folds | None = None  # of cross-validation: then validation images are training images

    def __repr__(self) -> str:
        sizes = [f"{name} {len(part):,}" for name, part in self.datasets.items()]
        return f"Splits({self.name!r}, {self.kind}: {', '.join(sizes)}; {_shown(self)})"

    def __getitem__(self, split: str) -> Dataset:
        """The split by name; an EngramError if there is none."""
        if split not in self.datasets:
            raise EngramError(_no_split(self.name, split, self.datasets))
        return self.datasets[split]

    @property
    def datasets(self) -> dict[str, Dataset]:
        found = {"train": self.train, "val": self.val, "test": self.test}
        return {name: dataset for name, dataset in found.items() if dataset is not None}

    @property
    def unsplit(self) -> bool:
        """Whether the source has no splits."""
        return not self.split_by and len(self.datasets) == 1

    @property
    def held_out(self) -> Integers:
        """The validation images that are measured: in cross-validation those of the folds."""
        return np.arange(len(self["val"])) if self.folds is None else self.folds.all_held_out

    @property
    def ignored(self) -> int:
        return sum(self.left_out.values())

    @property
    def ignored_words(self) -> str:
        """The files and rows that were left out, for people: "3: 2 .mov, 1 hidden"."""
        kinds = [f"{count:,} {what}" for what, count in self.left_out.items() if count]
        return f"{self.ignored:,}: {', '.join(kinds[:6])}{', …' if len(kinds) > 6 else ''}"

    @property
    def task(self) -> dict[str, Any]:
        """Arguments of a task for this data: `model.add_task("name", **splits.task)`."""
        masks = {} if self.legend is None else vars(self.legend)
        return {"classes": self.classes, "kind": self.kind, **masks}

    def task_spec(self, name: str, method: Method, extends: Sequence[str] = ()) -> TaskSpec:
        return TaskSpec.create(name, method=method, extends=extends, **self.task)

    def with_validation(self, share: float = 0.1, seed: int = 0) -> Splits:
        """These splits, with a validation split taken from the training data if there is none."""
        if self.val is not None:
            return self
        train, val = split_validation(self["train"], share, seed)
        return replace(self, train=train, val=val)

    def with_folds(self, count: int, share: float | None = None, seed: int = 0) -> Splits:
        """These splits with folds of the training data, each with a share of it.

        Args:
            count: How many; there are fewer where classes have fewer images.
            share: What a fold holds out. By default all images are held out once.
            seed: Draws the images of every fold.
        """
        train = self["train"]
        folds = make_folds(train, count, share, seed)
        return replace(self, val=replace(train, split="val"), folds=folds)


# Loading


def load(
    spec: str | os.PathLike[str] | PythonData,
    *,
    split: str | None = None,
    kind: str = "classification",
    classes: Sequence[str] | None = None,
    like: TaskSpec | None = None,
    image: str | None = None,
    label: str | Sequence[str] | None = None,
    split_column: str | None = None,
    group_column: str | None = None,
    splits: Mapping[str, str] | None = None,
    values: Sequence[int] | None = None,
    ignore: int = IGNORED,
    one_class: bool = False,
) -> Splits:
    """Load a dataset as train, val and test splits.

    Args:
        spec: A folder of class folders, a .csv/.tsv/.jsonl/.parquet table, an .npz file,
            "hf:owner/name[:config]" or "hf:PATH", "digits", or a preset ("cifar100", or
            "cifar100:PATH" for a copy on disk). For segmentation also a folder with images/ and
            masks/, or "IMAGES::MASKS" for two folders of the same shape. Or data that is in Python:
            a Dataset or DataLoader of torch, a Dataset or DatasetDict of the package `datasets`,
            a list of (image, label), (images, labels) as arrays, tensors or lists, or a dict of
            train, val and test.
        split: Keep only this split. A source without splits becomes this split as a whole.
        kind: The kind of task that the labels are for.
        classes: The names of the classes, in the order that numbers them.
        like: The spec of a trained task: sets kind, classes, values and ignore to fit it.
        image: The column of images.
        label: The column of labels or masks; several for multilabel and regression.
        split_column: The column that names the split of each row.
        group_column: The column whose rows with the same value belong together (a patient, a
            video): they are never on both sides of a validation split.
        splits: Maps train, val and test to the names that the source uses.
        values: The value of each class in masks. By default every value that occurs is a class.
        ignore: The value of pixels in masks that are neither trained on nor evaluated.
        one_class: Accept data of a single class, which `add_classes` can learn.

    Returns:
        The splits that were found. Images are read when they are needed.

    Raises:
        EngramError: The data cannot be read; the message says what is wrong with it.

    Examples:
        >>> engram.data.load("photos").classes
        ('rose', 'tulip')
        >>> images, labels = torch.rand(8, 3, 32, 32), torch.arange(8) % 2
        >>> engram.data.load((images, labels), classes=["rose", "tulip"])
        Splits('images', classification: train 8; 2 classes: rose, tulip)
    """
    if like is not None:
        kind, classes = like.kind, like.classes
        values, ignore = like.values or None, like.ignore
    if split is not None:
        check_split(split)
    columns = (label,) if isinstance(label, str) else tuple(label or ())
    known = () if kind in KINDS and KINDS[kind].one_class else classes or ()
    request = DataRequest(kind, image, columns, split_column, splits or {}, known, group_column)
    if isinstance(spec, (str, os.PathLike)):
        name = os.fspath(spec)
        found = _read(name, request)
    else:
        name, found = object_name(spec), read_objects(spec, request)
    for column in set(columns) - set(found.first.label_columns):
        refuse_columns(name, label=column)
    legend = None
    if request.has_masks:
        legend = find_legend(name, found, values, ignore, classes)
        found.first.classes = [str(value) for value in legend.values]
    names = classes or _classes(name, found, kind, one_class)
    if split is not None:
        if not found.split_by:
            found.splits = {split: found.splits["train"]}
        if split not in found.splits:
            raise EngramError(_no_split(name, split, found.splits))
        found.splits = {split: found.splits[split]}
    return _numbered(name, found, names, kind, legend)


def _read(name: str, request: DataRequest) -> FoundData:
    """Choose the reader by the name of the data, and read it."""
    prefix, _, rest = name.partition(":")
    path = Path(name)
    if request.has_masks and "::" in name:
        images, _, masks = name.partition("::")
        if not Path(images).is_dir():
            raise EngramError(f"{images} is not a folder; give two folders as IMAGES::MASKS.")
        return read_mask_folders(Path(images), Path(masks))
    if prefix == "hf" and rest:
        return read_hub(rest, request)
    if (name == "digits" or name in PRESETS) and path.exists():
        raise EngramError(
            f"{name} is the name of a dataset and of a path here; write ./{name} for the path."
        )
    if prefix in PRESETS:
        return read_preset(prefix, rest, request)
    if name != "digits" and not path.exists():
        raise EngramError(
            f"{name} does not exist; data can be a folder, a table, an .npz file, "
            f"hf:owner/name, digits, or one of {', '.join(PRESETS)}."
        )
    if path.suffix.lower() in TABLES and path.is_file():
        return read_table(path, request)
    refuse_columns(
        name, image=request.image_column, split=request.split_column, group=request.group_column
    )
    if name == "digits":
        return read_digits(request)
    if path.is_dir():
        if request.has_masks:
            return read_mask_folders(path)
        if KINDS[request.kind].one_class:
            return read_good_folders(path)
        return read_class_folders(path, request)
    if path.suffix.lower() == ".npz":
        return read_npz(path, request)
    raise EngramError(
        f"{path} is not data of a known kind; give a folder of class folders, "
        f"a table ({', '.join(TABLES)}) or an .npz file."
    )


def _classes(name: str, found: FoundData, kind: str, one_class: bool) -> Sequence[str]:
    """The classes of the training data, or of all data where there is none."""
    train = found.splits.get("train")
    splits = [train] if train else found.splits.values()
    labels = [label for split in splits for label in split.labels]
    first = found.first
    classes = LABELS[kind].classes(first.label_columns, labels, first.classes)
    if LABELS[kind].exclusive and len(classes) == 1 and not one_class:
        raise EngramError(f"{name} has only one class ({classes[0]}); a task needs at least two.")
    return classes


def _no_split(name: str, split: str, available: Iterable[str]) -> str:
    there = [other for other in SPLITS if other in available]
    sentence = f"{name} has no {split} split; it has {' and '.join(there)}"
    others = [other for other in there if other != "train"]
    if others and split != "train":
        return f"{sentence}. Choose with {flag('split', others[0])}."
    return f"{sentence}."


def _numbered(
    name: str, found: FoundData, classes: Sequence[str], kind: str, legend: Legend | None
) -> Splits:
    """Number the labels; one that is no class is an EngramError."""
    if len(set(classes)) != len(classes):
        raise EngramError(f"{name}: the list of classes has the same name twice.")
    datasets: dict[str, Any] = {}
    for split, part in found.splits.items():
        location = f"{name}: the {split} split"
        if not part.labels:
            raise EngramError(f"{location} is empty.")
        labels = LABELS[kind].numbered(location, part.labels, classes)
        own_legend = legend
        if KINDS[kind].one_class:
            own_legend = None if part.masks is None else DEFECTS
            if split == "train" and labels.any():
                _refuse_anomalous(name, part.labels, labels)
        order = np.arange(len(labels))
        datasets[split] = Dataset(
            name, split, tuple(classes), labels, part.rows, order, kind, part.masks, own_legend,
            _group_numbers(part.groups),
        )  # fmt: skip
    return Splits(
        name,
        tuple(classes),
        **datasets,
        augment=found.augment,
        flip=found.flip,
        left_out=found.left_out,
        split_by=found.split_by,
        kind=kind,
        legend=legend,
    )


def _refuse_anomalous(name: str, names: Sequence[str], labels: npt.NDArray[Any]) -> None:
    wrong = sorted({str(names[i]) for i in np.flatnonzero(labels).tolist()})
    raise EngramError(
        f"{name} has {counted(int(labels.sum()), 'training image')} that "
        f"{'is' if labels.sum() == 1 else 'are'} not good ({join_names(wrong, 4)}), and anomaly "
        "learns from good images alone; put these into a test split, or leave them out."
    )


def _group_numbers(cells: Sequence[Any] | None) -> Integers | None:
    """A number for every different cell; an empty one is a group by itself."""
    if cells is None:
        return None
    known: dict[Any, int] = {}
    keys = [(i,) if cell in (None, "") else str(cell) for i, cell in enumerate(cells)]
    return np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)


# Data and tasks


def check_fits(spec: TaskSpec, data: Splits | Dataset, *, same_ignore: bool = False) -> None:
    """Raise an EngramError unless the data has the kind, classes and mask values of the task.

    With `same_ignore` the value of ignored pixels must be the same too: training stores it.
    """
    legend = data.legend or Legend((), spec.ignore)
    if spec.kind_object.one_class:  # its masks have the same values in all data
        legend = Legend(spec.values, spec.ignore)
    if data.kind != spec.kind:
        difference = f"has the kind {spec.kind}, but {data.name} has the kind {data.kind}"
    elif data.classes != spec.classes:
        noun, same = spec.kind_object.nouns[1], sorted(data.classes) == sorted(spec.classes)
        order = " in another order" if same else ""
        difference = (
            f"has {len(spec.classes)} {noun} ({join_names(spec.classes, 4)}), but {data.name} has "
            f"{len(data.classes)}{order} ({join_names(data.classes, 4)})"
        )
    elif legend.values != spec.values or (same_ignore and legend.ignore != spec.ignore):
        difference = (
            f"has the mask values {join_names(spec.values, 4)} and ignores {spec.ignore}, but "
            f"{data.name} has {join_names(legend.values, 4)} and ignores {legend.ignore}"
        )
    else:
        return
    raise EngramError(
        f"The task {spec.name!r} {difference}; load the data with "
        f"like=model.task({spec.name!r}).spec, or add the task with **splits.task."
    )
