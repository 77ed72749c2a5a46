"""Data that is in Python already: datasets of torch and of `datasets`, lists, arrays, tensors.

    {"train": …, "val": …, "test": …}   splits, each one of the following
    (images, labels)                     arrays, tensors or lists
    a Dataset or DataLoader of torch     items (image, label), or mappings with columns
    [(image, label), …]                  a list of such items
    a Dataset of `datasets`              or a DatasetDict

An image is anything that `images.inputs` takes. Nothing is copied but arrays that are not uint8.
Images are read when they are needed. Labels are needed at once: they come from what an object
declares (`targets`, as in torchvision), if its items agree, or from reading every item.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from torch.utils import data as torch_data

from engram.data.arrays import read_arrays, to_mask_values
from engram.data.labels import LABELS, find_column, read_labels
from engram.data.presets import UNSPLIT, read_tables
from engram.data.source import (
    DataRequest,
    Files,
    FoundData,
    FoundSplit,
    Rows,
    StoredImage,
    match_splits,
    refuse_columns,
    spread,
)
from engram.errors import EngramError, Notice
from engram.images.decode import BadImage, read_image
from engram.images.inputs import as_array, decodable
from engram.images.masks import read_mask
from engram.util.text import explained, first_line

#: The objects that `read_objects` takes; see above.
PythonData: TypeAlias = Any

_EXPECTED = (
    "give a path, a dataset of torch or of the package datasets, (images, labels), a list of "
    "(image, label), or a dict of train, val and test"
)
_CHECKED = 8  # items that are read twice, to see whether they are the same
_HASHED = 32  # images that stand for all of them in the identity of a run


def object_name(data: PythonData) -> str:
    """The name of this data in messages and engrams."""
    return "images" if isinstance(data, tuple) else type(data).__name__


def read_objects(data: PythonData, request: DataRequest) -> FoundData:
    """Read data that is in memory; other objects are an EngramError."""
    tables = _tables(data)
    if tables is not None:
        by = f"the keys of the {object_name(data)}"
        return read_tables(tables, object_name(data), request, by)
    columns = {"split": request.split_column, "group": request.group_column}
    refuse_columns(f"A {object_name(data)}", **columns)
    if not isinstance(data, Mapping):
        return FoundData({"train": _read_one(object_name(data), data, request)})
    given = {str(key): part for key, part in data.items() if part is not None}
    if not given:
        raise EngramError("The dict of splits is empty; give train, and val and test if you can.")
    matched = match_splits(given, request.split_names, "The dict")
    found = {split: _read_one(name, given[name], request) for split, name in matched.items()}
    return FoundData(found, split_by="the keys of the dict")


def _tables(data: Any) -> dict[str, Any] | None:
    """The tables of a Dataset or a DatasetDict of the package `datasets`; None if it is neither."""
    datasets = sys.modules.get("datasets")  # who gives one has imported it
    if datasets is None or not hasattr(datasets, "IterableDataset"):
        return None
    if isinstance(data, (datasets.IterableDataset, datasets.IterableDatasetDict)):
        raise EngramError(
            f"A {object_name(data)} of the package datasets is read in order only; load it without "
            "streaming=True, so that it can be split, shuffled and cached."
        )
    tables = {UNSPLIT: data} if isinstance(data, datasets.Dataset) else data
    if not isinstance(tables, Mapping) or not tables:
        return None
    if not all(isinstance(table, datasets.Dataset) for table in tables.values()):
        return None
    return {str(name): table.with_format(None) for name, table in tables.items()}


def _read_one(title: str, data: Any, request: DataRequest) -> FoundSplit:
    """One split, whichever it is."""
    if isinstance(data, torch_data.DataLoader):
        data = _dataset_in(data)
    if isinstance(data, torch_data.IterableDataset):
        raise EngramError(
            f"{title} is an IterableDataset, which is read in order only; give a dataset with a "
            "length and numbered items, such as list(dataset)."
        )
    if isinstance(data, torch_data.TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    if isinstance(data, tuple) and len(data) == 2:
        return _read_pair(title, *data, request)
    numbered = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if not numbered or isinstance(data, (str, bytes, os.PathLike, Mapping)):
        raise EngramError(
            f"Data was given as {type(data).__name__}, which is no data; {_EXPECTED}."
        )
    if as_array(data) is not None:
        raise EngramError(f"{title} holds images without labels; give (images, labels).")
    if not len(data):
        raise EngramError(f"{title} is empty.")
    image, parts, columns = item_parts(title, data, request)
    rows = Items(data, image, title)
    rows.refuse_random()
    if request.has_masks:
        return FoundSplit(rows, [None] * len(data), MaskItems(data, parts[0], f"{title}, mask"))
    labels = item_labels(title, data, parts)
    return _labelled(title, rows, columns, labels, class_names(data), request)


def _dataset_in(loader: torch_data.DataLoader[Any]) -> Any:
    """The dataset of a DataLoader. One that leaves samples out, or repeats them, is refused."""
    dataset, sampler = loader.dataset, loader.sampler
    if isinstance(dataset, torch_data.IterableDataset):
        return dataset
    plain_batches = type(loader.batch_sampler) in (torch_data.BatchSampler, type(None))
    ordinary = isinstance(sampler, (torch_data.SequentialSampler, torch_data.DistributedSampler))
    if isinstance(sampler, torch_data.RandomSampler):
        ordinary = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    if not ordinary or not plain_batches:
        chooser = sampler if plain_batches else loader.batch_sampler
        raise EngramError(
            f"The DataLoader chooses its samples by a {type(chooser).__name__}, which would not be "
            "used; give the dataset itself, or torch.utils.data.Subset(dataset, indices)."
        )
    warnings.warn(
        "Of the DataLoader its dataset is used. Batch size, order and workers are those of the "
        "recipe, and its collate_fn is not called.",
        Notice,
        stacklevel=2,
    )
    return dataset


def _read_pair(title: str, images: Any, labels: Any, request: DataRequest) -> FoundSplit:
    """A split of images and labels apart from each other."""
    pixels, numbers = as_array(images), as_array(labels)
    if pixels is None and not isinstance(images, (list, tuple)):
        raise EngramError(
            f"{title}: a tuple is (images, labels), and its first part is a "
            f"{type(images).__name__}; {_EXPECTED}."
        )
    if numbers is None and not isinstance(labels, (list, tuple)):
        raise EngramError(
            f"{title}: a tuple is (images, labels), and the labels are a {type(labels).__name__}; "
            "give an array, a tensor or a list."
        )
    values = [plain(label) for label in (labels if numbers is None else numbers)]
    if len(values) != len(images):
        raise EngramError(
            f"{title}: {len(images)} images and {len(values)} labels; give one for each image."
        )
    if not values:
        raise EngramError(f"{title} is empty.")
    if pixels is not None:
        try:
            array = numbers if numbers is not None else np.asarray(values)
        except ValueError as error:
            raise EngramError(f"{title}: the labels differ in length.") from error
        classes = names_for(values, None, request)
        if array.ndim == 2:
            classes = list(request.classes) or None
        return read_arrays(title, pixels, array, classes, request)
    rows: Rows = Items(images, None, title)
    if all(isinstance(image, (str, os.PathLike)) for image in images):
        rows = Files(tuple(map(os.fspath, images)))
    if request.has_masks:
        masks = MaskItems(values, None, f"{title}, mask")
        return FoundSplit(rows, [None] * len(values), masks)
    return _labelled(title, rows, ["label"], [[value] for value in values], None, request)


def _labelled(
    title: str,
    rows: Rows,
    columns: Sequence[str],
    labels: Sequence[Sequence[Any]],
    listed: list[str] | None,
    request: DataRequest,
) -> FoundSplit:
    """A split whose labels are numbered later; rows of 0 and 1 have a column for each class."""
    if len(columns) == 1 and request.kind == "multilabel" and isinstance(labels[0][0], np.ndarray):
        labels = [list(row) for (row,) in labels]
        count = len(labels[0])
        columns = listed or list(request.classes) or [str(i) for i in range(count)]
        if any(len(row) != len(columns) for row in labels):
            raise EngramError(
                f"{title}: {len(columns)} classes need as many labels of 0 or 1 for each image; "
                f"{title}[0] has {count}."
            )
    names = names_for([label for row in labels for label in row], listed, request)
    cells = (dict(zip(columns, row, strict=True)) for row in labels)
    found = read_labels(title, cells, names, request)
    return FoundSplit(rows, found, classes=names, label_columns=columns)


# Items that have an image and a label


@dataclass(frozen=True, eq=False)
class Items(Rows):
    """Images by row, each a part of an item; the part None is the item itself."""

    data: Any
    part: int | str | None
    name: str

    def read(self, row: int) -> StoredImage:
        name = self.row_name(row)
        source = decodable(self._value(row), name)
        if isinstance(source, (str, bytes, np.ndarray)):
            return source
        return np.asarray(read_image(source, name=name))

    def _value(self, row: int) -> Any:
        try:
            item = self.data[row]
            return item if self.part is None else item[self.part]
        except Exception as error:  # code of users
            raise BadImage(f"{self.row_name(row)}: {str(error) or type(error).__name__}") from error

    def refuse_random(self) -> None:
        """Raise an EngramError if an image is another one when it is read again."""
        for row in spread(len(self.data), _CHECKED):
            try:
                first, second = self.read(row), self.read(row)
            except BadImage:  # counted when it is to be trained on
                continue
            if not np.array_equal(np.asarray(first), np.asarray(second)):
                raise EngramError(
                    f"{self.row_name(row)} is another image each time it is read; take random "
                    "transforms out of the dataset, and augment with Recipe(augment=…) or "
                    "transform= instead."
                )

    def content(self) -> str:
        """A hash of some of the images."""
        digest = hashlib.sha256()
        for row in spread(len(self.data), _HASHED):
            image = np.asarray(self.read(row))
            digest.update(f"{image.dtype}{image.shape}".encode() + image.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class MaskItems(Items):
    def read(self, row: int) -> StoredImage:
        name, value = self.row_name(row), self._value(row)
        array = as_array(value)
        if array is None:
            source = decodable(value, name)
            if isinstance(source, (str, bytes)):
                return source
            array = read_mask(source, name=name)
        if array.ndim == 3 and array.shape[0] == 1:
            array = array[0]
        values: StoredImage = to_mask_values(name, array).numpy()
        return values


def item_parts(
    title: str, data: Any, request: DataRequest
) -> tuple[int | str, Sequence[int | str], Sequence[str]]:
    """The part of an item that is the image, those that are labels, and names of the latter."""
    item = _item(title, data, 0)
    if isinstance(item, Mapping):
        columns = [str(key) for key in item]
        image = find_column(title, columns, "image", request.image_column)
        labels = LABELS[request.kind].columns(title, columns, request)
        return image, labels, labels
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        many = f" of {len(item)}" if isinstance(item, (tuple, list)) else ""
        raise EngramError(
            f"{title}[0] is a {type(item).__name__}{many}; expected (image, label), or a mapping "
            "such as {'image': …, 'label': …}."
        )
    return 0, [1], ["label"]


def _item(title: str, data: Any, row: int) -> Any:
    with explained(lambda error: f"{title}[{row}] cannot be read: {first_line(error)}."):
        return data[row]


def item_labels(title: str, data: Any, parts: Sequence[int | str]) -> list[list[Any]]:
    """The labels of every item, one for each part."""
    found = _declared(data) if parts == [1] else None
    if found is not None and len(found) == len(data):
        rows = spread(len(data), _CHECKED)
        if all(_same(found[row], _item(title, data, row)[1]) for row in rows):
            return [[plain(label)] for label in found]
    labels = []
    for row in range(len(data)):
        item = _item(title, data, row)
        try:
            labels.append([plain(item[part]) for part in parts])
        except (KeyError, IndexError, TypeError) as error:
            raise EngramError(f"{title}[{row}] has no {parts[0]!r}, as {title}[0] has.") from error
    return labels


def _declared(data: Any) -> Sequence[Any] | None:
    """The labels that a dataset of torchvision, or a part or a sum of such, says it has."""
    if not hasattr(data, "targets") and hasattr(data, "indices") and hasattr(data, "dataset"):
        whole = _declared(data.dataset)
        return None if whole is None else [whole[i] for i in data.indices]
    found = getattr(data, "targets", None)
    return found if hasattr(found, "__len__") and hasattr(found, "__getitem__") else None


def plain(label: Any) -> Any:
    """A label without its tensor: a number of Python, or an array."""
    array = np.asarray(label) if isinstance(label, np.generic) else as_array(label)
    if array is None:
        return label
    return array.item() if array.ndim == 0 else array


def _same(one: Any, other: Any) -> bool:
    one, other = plain(one), plain(other)
    return type(one) is type(other) and bool(np.array_equal(one, other))


def class_names(data: Any) -> list[str] | None:
    """The names that an object gives its classes, in the order of their numbers."""
    names = getattr(data, "classes", None)
    if isinstance(names, (list, tuple)) and names:  # ImageNet has tuples of synonyms
        return [name if isinstance(name, str) else ", ".join(map(str, name)) for name in names]
    inner = getattr(data, "dataset", None)  # of a Subset
    return None if inner is None else class_names(inner)


def names_for(
    labels: Sequence[Any], listed: list[str] | None, request: DataRequest
) -> list[str] | None:
    """The names of classes that are given as numbers: the source's or the task's; None if none."""
    wanted = list(request.classes)
    numbers = all(isinstance(label, int) for label in labels)
    if not numbers or not wanted or (listed and set(listed) == set(wanted)):
        return listed
    if {str(label) for label in labels} <= set(wanted):
        return None
    return listed or wanted
