"""Data that is in Python already: datasets of torch and of `datasets`, lists, arrays, tensors.

    {"train": …, "val": …, "test": …}   splits, each one of the following
    (images, labels)                     arrays, tensors or lists
    a Dataset or DataLoader of torch     items (image, label), or mappings with columns
    [(image, label), …]                  a list of such items
    a Dataset of `datasets`              or a DatasetDict

An image is anything that `images.given` takes. Nothing is copied but arrays that are not uint8.
"""

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from torch.utils import data as torch_data

from engram.data.arrays import Array, label_columns, read_arrays
from engram.data.items import (
    Items,
    MaskItems,
    class_names,
    labels_of,
    names_for,
    parts_of,
    plain,
)
from engram.data.labels import read_labels
from engram.data.presets import UNSPLIT, read_tables
from engram.data.source import DataRequest, Files, FoundData, FoundSplit, Rows, match_splits
from engram.errors import EngramError, Notice
from engram.images.given import as_array

#: What `read_objects` takes; see above.
PythonData: TypeAlias = Any

_EXPECTED = (
    "give a path, a dataset of torch or of the package datasets, (images, labels), a list of "
    "(image, label), or a dict of train, val and test"
)


def object_name(data: PythonData) -> str:
    """What messages and engrams call this data."""
    return "images" if isinstance(data, tuple) else type(data).__name__


def read_objects(data: PythonData, request: DataRequest) -> FoundData:
    """Read data that is in memory. What cannot be taken is an EngramError."""
    tables = _tables(data)
    if tables is not None:
        whole = list(tables) == [UNSPLIT]
        by = "" if whole else f"the keys of the {object_name(data)}"
        return read_tables(sys.modules["datasets"], tables, object_name(data), request, by)
    if request.split_column is not None:
        raise EngramError(
            f"A {object_name(data)} has no column of splits; give a dict of train, val and test."
        )
    if not isinstance(data, Mapping):
        return _read_one(object_name(data), data, request)
    given = {str(key): part for key, part in data.items() if part is not None}
    if not given:
        raise EngramError("The dict of splits is empty; give train, and val and test if you can.")
    matched = match_splits(given, request.split_names, "The dict")
    found = {split: _read_one(name, given[name], request) for split, name in matched.items()}
    first = found.get("train") or next(iter(found.values()))
    return replace(
        first,
        splits={split: part.splits["train"] for split, part in found.items()},
        unsplit=False,
        split_by="the keys of the dict",
    )


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
    if isinstance(data, datasets.Dataset):
        return {UNSPLIT: data.with_format(None)}
    tables = data if isinstance(data, Mapping) else {}
    if not tables or not all(isinstance(table, datasets.Dataset) for table in tables.values()):
        return None
    return {str(name): table.with_format(None) for name, table in tables.items()}


def _read_one(title: str, data: Any, request: DataRequest) -> FoundData:
    """One split, whichever it is."""
    if isinstance(data, torch_data.DataLoader):
        return _read_one(title, _dataset_of(data), request)
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
    return _read_items(title, data, request)


def _dataset_of(loader: "torch_data.DataLoader[Any]") -> Any:
    """What a DataLoader reads. One that leaves samples out, or repeats them, is refused."""
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


# Images and labels apart


def _read_pair(title: str, images: Any, labels: Any, request: DataRequest) -> FoundData:
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
        array = numbers if numbers is not None else _stacked(title, values)
        classes = _names(values, None, request)
        if array.ndim == 2:
            classes = list(request.classes) or None
        split = read_arrays(title, pixels, array, classes, request)
        columns = label_columns(array, classes, request)
        return FoundData({"train": split}, classes, columns, unsplit=True)
    rows: Rows = Items(images, None, title)
    if all(isinstance(image, (str, os.PathLike)) for image in images):
        rows = Files(tuple(map(os.fspath, images)))
    if request.has_masks:
        return _masked(rows, MaskItems(values, None, f"{title}, mask"))
    return _labelled(title, rows, [[value] for value in values], ["label"], None, request)


def _stacked(title: str, labels: Sequence[Any]) -> Array:
    try:
        return np.asarray(labels)
    except ValueError as error:
        raise EngramError(f"{title}: the labels differ in length.") from error


# Items that have an image and a label


def _read_items(title: str, data: Any, request: DataRequest) -> FoundData:
    image, parts, columns = parts_of(title, data, request)
    rows = Items(data, image, title)
    rows.refuse_random()
    if request.has_masks:
        return _masked(rows, MaskItems(data, parts[0], f"{title}, mask"))
    labels = labels_of(title, data, parts)
    return _labelled(title, rows, labels, columns, class_names(data), request)


def _masked(rows: Rows, masks: MaskItems) -> FoundData:
    return FoundData({"train": FoundSplit(rows, [None] * len(masks), masks)}, unsplit=True)


def _labelled(
    title: str,
    rows: Rows,
    labels: Sequence[Sequence[Any]],
    columns: Sequence[str],
    listed: list[str] | None,
    request: DataRequest,
) -> FoundData:
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
    names = _names([label for row in labels for label in row], listed, request)
    cells = (dict(zip(columns, row, strict=True)) for row in labels)
    split = FoundSplit(rows, read_labels(title, cells, names, request))
    return FoundData({"train": split}, names, columns, unsplit=True)


def _names(
    labels: Sequence[Any], listed: list[str] | None, request: DataRequest
) -> list[str] | None:
    if all(isinstance(label, int) for label in labels):
        return names_for(labels, listed, request)
    return listed
