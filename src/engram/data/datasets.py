"""Datasets for training and evaluation: `load` reads them, as `Splits` of a `Dataset` each.

A `Dataset` lists samples without decoding them; `loader.Loader` reads them in batches.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NotRequired, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt
from PIL import Image

from engram.data.arrays import read_digits, read_npz
from engram.data.folders import read_class_folders, read_mask_folders
from engram.data.labels import LABELS, find_legend
from engram.data.objects import PythonData, object_name, read_objects
from engram.data.presets import PRESETS, read_hub, read_preset
from engram.data.source import SPLITS, DataRequest, FoundData, Rows, StoredImage, check_split
from engram.data.tables import TABLES, read_table
from engram.data.validation import split_validation
from engram.errors import EngramError
from engram.images.decode import image_size, read_image_file
from engram.images.masks import Legend
from engram.methods import Method
from engram.tasks.kinds import IGNORED, KINDS
from engram.tasks.spec import TaskSpec

Integers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples of one split: images that are read one at a time, and a label for each.

    `labels[i]` is the class of sample i, an index into `classes`; for multilabel a row of 0 and
    1, for regression a row of numbers, one per class. For segmentation it is empty: there `mask`
    has the classes of the pixels.
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

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, {self.kind}: {self.split} {len(self):,}; {_shown(self)})"

    def read(self, i: int) -> StoredImage:
        """The image of sample i, not yet decoded: `images.decode.read_image` takes it."""
        return self.rows.read(int(self.order[i]))

    def sample_name(self, i: int) -> str:
        """What messages call sample i: its path, or its row."""
        return self.rows.row_name(int(self.order[i]))

    def mask(self, i: int) -> Image.Image:
        """The mask of sample i: class + 1 in every pixel, 0 where it is ignored.

        A mask that cannot be used is a BadImage.
        """
        assert self.masks is not None
        assert self.legend is not None
        row = int(self.order[i])
        size = image_size(self.read(i), name=self.sample_name(i))
        return self.legend.read(self.masks.read(row), size, self.masks.row_name(row))

    def sample_hash(self, i: int) -> str:
        """SHA-256 of the image's bytes: the same image has the same hash wherever it is stored."""
        image = self.read(i)
        if isinstance(image, bytes):
            content = image
        elif isinstance(image, str):
            content = read_image_file(image, image)
        else:
            content = str(image.shape).encode() + image.tobytes()
        return hashlib.sha256(content).hexdigest()

    def subset(self, samples: Sequence[int] | Integers, split: str | None = None) -> "Dataset":
        """Only these samples, in this order. No image is copied."""
        chosen = np.asarray(samples, dtype=np.int64)
        return replace(
            self,
            split=split or self.split,
            labels=self.labels[chosen],
            order=self.order[chosen],
        )


def _shown(data: "Dataset | Splits") -> str:
    """The classes for `repr`: their number and the first of them."""
    one, several = KINDS[data.kind].nouns
    names = ", ".join(data.classes[:3]) + (", …" if len(data.classes) > 3 else "")
    return f"{len(data.classes)} {one if len(data.classes) == 1 else several}: {names}"


class TaskArguments(TypedDict):
    """Arguments of `MemoryViT.add_task` that follow from the data."""

    classes: tuple[str, ...]
    kind: str
    values: NotRequired[tuple[int, ...]]
    ignore: NotRequired[int]


@dataclass(frozen=True)
class Splits:
    """What `load` found: a Dataset for each split, or None, and how to augment the training data.

    `augment` and `flip` are what suits this data ("inception" or "pad-crop", mirrored or not).
    `left_out` counts the files and rows that were not used, by what they are. `unsplit` means that
    the source has no splits; otherwise `split_by` is what says them, such as "the column 'fold'".
    """

    name: str
    classes: tuple[str, ...]
    train: Dataset | None = None
    val: Dataset | None = None
    test: Dataset | None = None
    augment: str = "inception"
    flip: bool = True
    left_out: Mapping[str, int] = field(default_factory=dict)
    unsplit: bool = False
    split_by: str = ""
    kind: str = "classification"
    legend: Legend | None = None  # of segmentation: what the values in masks mean

    def __repr__(self) -> str:
        found = {name: getattr(self, name) for name in SPLITS}
        sizes = [f"{name} {len(part):,}" for name, part in found.items() if part is not None]
        return f"Splits({self.name!r}, {self.kind}: {', '.join(sizes)}; {_shown(self)})"

    def __getitem__(self, split: str) -> Dataset:
        """The split by name; an EngramError if there is none."""
        dataset = getattr(self, split) if split in SPLITS else None
        if not isinstance(dataset, Dataset):
            available = [name for name in SPLITS if getattr(self, name) is not None]
            raise EngramError(_no_split(self.name, split, available))
        return dataset

    @property
    def ignored(self) -> int:
        """How many files and rows were left out."""
        return sum(self.left_out.values())

    @property
    def ignored_words(self) -> str:
        """What was left out, for people: "3: 2 .mov, 1 hidden"."""
        kinds = [f"{count:,} {what}" for what, count in self.left_out.items() if count]
        return f"{self.ignored:,}: {', '.join(kinds[:6])}{', …' if len(kinds) > 6 else ''}"

    @property
    def task(self) -> TaskArguments:
        """What a task for this data is: `model.add_task("name", **splits.task)`."""
        if self.legend is None:
            return {"classes": self.classes, "kind": self.kind}
        return {
            "classes": self.classes,
            "kind": self.kind,
            "values": self.legend.values,
            "ignore": self.legend.ignore,
        }

    def task_spec(self, name: str, method: Method, extends: Sequence[str] = ()) -> TaskSpec:
        """The spec of a task that learns from this data."""
        return TaskSpec.create(name, method=method, extends=extends, **self.task)

    def with_validation(self, share: float = 0.1, seed: int = 0) -> "Splits":
        """These splits, with a validation split taken from the training data if there is none."""
        if self.val is not None:
            return self
        train, val = split_validation(self["train"], share, seed)
        return replace(self, train=train, val=val)


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
    request = DataRequest(kind, image, columns, split_column, splits or {}, classes or ())
    if isinstance(spec, (str, os.PathLike)):
        name = os.fspath(spec)
        found = _read(name, request)
    else:
        name, found = object_name(spec), read_objects(spec, request)
    _refuse_unused_columns(name, columns, found)
    legend = None
    if request.has_masks:
        legend = find_legend(name, found, values, ignore, classes)
        found.classes = [str(value) for value in legend.values]
    names = classes or _classes(name, found, kind, one_class)
    if split is not None:
        _keep_only(name, found, split)
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
    if name == "digits":
        _refuse_columns(name, request)
        return read_digits(request)
    if prefix in PRESETS:
        return read_preset(prefix, rest, request)
    if not path.exists():
        raise EngramError(
            f"{name} does not exist; data can be a folder, a table, an .npz file, "
            f"hf:owner/name, digits, or one of {', '.join(PRESETS)}."
        )
    return _read_path(path, request)


def _read_path(path: Path, request: DataRequest) -> FoundData:
    if path.suffix.lower() in TABLES and path.is_file():
        return read_table(path, request)
    _refuse_columns(str(path), request)
    if path.is_dir():
        if request.has_masks:
            return read_mask_folders(path, None)
        return read_class_folders(path, request)
    if path.suffix.lower() == ".npz":
        return read_npz(path, request)
    raise EngramError(
        f"{path} is not data of a known kind; give a folder of class folders, "
        f"a table ({', '.join(TABLES)}) or an .npz file."
    )


def _refuse_columns(name: str, request: DataRequest) -> None:
    for flag, given in (
        ("--image-column", request.image_column),
        ("--split-column", request.split_column),
    ):
        if given is not None:
            raise EngramError(
                f"{name} has no columns, so {flag} {given} has no meaning here; only tables and "
                "Hub datasets have columns to choose from."
            )


def _refuse_unused_columns(name: str, given: Sequence[str], found: FoundData) -> None:
    for column in given:
        if column not in found.label_columns:
            raise EngramError(
                f"{name} has no column {column!r} of labels; only tables and Hub datasets have "
                "columns to choose from, so leave the label out here."
            )


def _classes(name: str, found: FoundData, kind: str, one_class: bool) -> Sequence[str]:
    """The classes of the training data, or of all data where there is none."""
    train = found.splits.get("train")
    splits = [train] if train else found.splits.values()
    labels = [label for split in splits for label in split.labels]
    classes = LABELS[kind].classes(name, found.label_columns, labels, found.classes)
    if not one_class:
        LABELS[kind].check(name, classes)
    return classes


def _keep_only(name: str, found: FoundData, split: str) -> None:
    """Drop the other splits; data without splits is used as this one."""
    if found.unsplit:
        found.splits = {split: found.splits["train"]}
    if split not in found.splits:
        raise EngramError(_no_split(name, split, found.splits))
    found.splits = {split: found.splits[split]}


def _no_split(name: str, split: str, available: Iterable[str]) -> str:
    """That there is no such split, and how to choose another one."""
    there = [other for other in SPLITS if other in available]
    sentence = f"{name} has no {split} split; it has {' and '.join(there)}"
    others = [other for other in there if other != "train"]
    if others and split != "train":
        return f"{sentence}. Choose with --split {others[0]} (split={others[0]!r} in Python)."
    return f"{sentence}."


def _numbered(
    name: str, found: FoundData, classes: Sequence[str], kind: str, legend: Legend | None
) -> Splits:
    """Replace labels by class indices; a label that is no class is an EngramError."""
    if len(set(classes)) != len(classes):
        raise EngramError(f"{name}: the list of classes has the same name twice.")
    datasets = {}
    for split, part in found.splits.items():
        location = f"{name}: the {split} split"
        if not part.labels:
            raise EngramError(f"{location} is empty.")
        labels = LABELS[kind].numbered(location, part.labels, classes)
        order = np.arange(len(labels))
        datasets[split] = Dataset(
            name, split, tuple(classes), labels, part.rows, order, kind, part.masks, legend
        )
    return Splits(
        name,
        tuple(classes),
        **datasets,
        augment=found.augment,
        flip=found.flip,
        left_out=found.left_out,
        unsplit=found.unsplit,
        split_by=found.split_by,
        kind=kind,
        legend=legend,
    )
