"""Samples that a Python object gives one by one: (image, label), or mappings with columns.

The object has a length and gives the same item for the same number, as map-style datasets of torch
and lists do. Images are read when they are needed. Labels are needed at once: they come from what
the object declares (`targets`, as in torchvision), if its items agree, or from reading every item.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engram.data.arrays import to_mask_values
from engram.data.labels import LABELS, find_column
from engram.data.source import DataRequest, StoredImage
from engram.errors import EngramError
from engram.images.decode import BadImage, read_image
from engram.images.given import as_array, decodable
from engram.images.masks import read_mask

_CHECKED = 8  # items that are read twice, to see whether they are the same
_HASHED = 32  # images that stand for all of them in the identity of a run


@dataclass(frozen=True, eq=False)
class Items:
    """Images by row, each a part of an item; the part None is the item itself."""

    data: Any
    part: int | str | None
    name: str

    def __len__(self) -> int:
        return len(self.data)

    def row_name(self, row: int) -> str:
        return f"{self.name}[{row}]"

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
        for row in spread(len(self), _CHECKED):
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
        for row in spread(len(self), _HASHED):
            image = np.asarray(self.read(row))
            digest.update(f"{image.dtype}{image.shape}".encode() + image.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class MaskItems(Items):
    """The masks of items."""

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


def spread(count: int, most: int) -> list[int]:
    """At most so many of the numbers below `count`, from the first to the last."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most))})


# The parts of an item


def parts_of(
    title: str, data: Any, request: DataRequest
) -> tuple[int | str, Sequence[int | str], Sequence[str]]:
    """Which part of an item is the image, which are labels, and the names of the latter."""
    item = _item(title, data, 0)
    if isinstance(item, Mapping):
        columns = [str(key) for key in item]
        image = find_column(title, columns, "image", request.image_column)
        labels = LABELS[request.kind].columns(
            title, columns, request.label_columns, request.classes
        )
        return image, labels, labels
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        many = f" of {len(item)}" if isinstance(item, (tuple, list)) else ""
        raise EngramError(
            f"{title}[0] is a {type(item).__name__}{many}; expected (image, label), or a mapping "
            "such as {'image': …, 'label': …}."
        )
    return 0, [1], ["label"]


def _item(title: str, data: Any, row: int) -> Any:
    try:
        return data[row]
    except Exception as error:  # code of users
        reason = str(error) or type(error).__name__
        raise EngramError(f"{title}[{row}] cannot be read: {reason.rstrip('.')}.") from error


# Labels


def labels_of(title: str, data: Any, parts: Sequence[int | str]) -> list[list[Any]]:
    """The labels of every item, one for each part."""
    found = declared(data) if parts == [1] else None
    if found is not None and len(found) == len(data):
        agree = (_same(found[row], _item(title, data, row)[1]) for row in spread(len(data), 8))
        if all(agree):
            return [[plain(label)] for label in found]
    labels = []
    for row in range(len(data)):
        item = _item(title, data, row)
        try:
            labels.append([plain(item[part]) for part in parts])
        except (KeyError, IndexError, TypeError) as error:
            raise EngramError(f"{title}[{row}] has no {parts[0]!r}, as {title}[0] has.") from error
    return labels


def declared(data: Any) -> Sequence[Any] | None:
    """The labels that a dataset of torchvision, or a part or a sum of such, says it has."""
    if not hasattr(data, "targets") and hasattr(data, "indices") and hasattr(data, "dataset"):
        whole = declared(data.dataset)
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
    numbers: Iterable[Any], declared_names: list[str] | None, request: DataRequest
) -> list[str] | None:
    """The names of classes that are given as numbers; None: they are called by their numbers.

    Those of the source, unless the task has others: then its classes are meant, in its order.
    """
    wanted = list(request.classes)
    if not wanted or (declared_names and set(declared_names) == set(wanted)):
        return declared_names
    if {str(number) for number in numbers} <= set(wanted):
        return None
    return declared_names or wanted
