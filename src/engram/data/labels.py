"""Labels of each kind of task: where they are found, how they are read and numbered.

classification   the name of a class                   one column
multilabel       the names of any number of classes    one column of lists, or a column per class
regression       numbers                               a column for each
segmentation     a mask                                one column of paths; read as an image
anomaly          good, or the name of what is wrong    one column, or none if all images are good
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from engram.data.source import DataRequest, FoundData
from engram.errors import EngramError, flag
from engram.images.decode import BadImage
from engram.images.masks import MASK_VALUES, Legend, read_mask
from engram.tasks.kind import IGNORED
from engram.util.text import counted, join_names, printable

Names: TypeAlias = Sequence[str]
Labels: TypeAlias = Iterable[Any]  # as `LabelReader.read` returns them

_LARGEST_NUMBER = float(np.finfo(np.float32).max)  # labels are trained on as float32

# Without a name from the caller, the first of these columns that exists is used.
USUAL_COLUMNS = {
    "image": ("image", "img", "path", "file", "filename", "file_name", "filepath", "image_path"),
    "label": ("label", "labels", "class", "class_name", "category", "target", "fine_label"),
    "mask": ("mask", "masks", "mask_path", "segmentation", "annotation"),
    "split": ("split", "set", "subset", "partition"),
}


def find_column(
    source: str, columns: Names, role: str, given: str | None, needed: bool = True
) -> str:
    """The column of images, labels, masks or splits: as given, or by its usual name, or ""."""
    if given is not None and given in columns:
        return given
    hint = ""
    if given is None:
        by_name = {str(column).lower(): column for column in columns}
        usual = [by_name[name] for name in USUAL_COLUMNS[role] if name in by_name]
        if usual or not needed:
            return usual[0] if usual else ""
        option = "--image-column (image= in Python)" if role == "image" else flag("label")
        names = ", ".join(USUAL_COLUMNS[role])
        hint = f"; name one of them with {option}, or rename it to one of {names}"
    there = join_names([printable(str(column), 60) for column in columns], 20)
    raise EngramError(f"{source} has no column {given or role!r}; it has {there}{hint}.")


def read_labels(
    source: str, rows: Iterable[Mapping[str, Any]], listed: Names | None, request: DataRequest
) -> list[Any]:
    """The label of every row, from the cells of its label columns."""
    reader = LABELS[request.kind]
    return [reader.read(f"{source}: row {i}", cells, listed) for i, cells in enumerate(rows)]


# One reader of labels for each kind of task


class LabelReader:
    """Reads and numbers labels: the name of one class. Those of other kinds are subclasses."""

    dimensions: tuple[int, ...] = (1,)  # that an array of labels may have
    exclusive = True  # whether each image, or pixel, has one class: then a task needs several
    role = "label"  # of their column, in `USUAL_COLUMNS`
    several = False  # whether they can be in several columns
    required = True  # whether there has to be a column

    def columns(self, source: str, available: Names, request: DataRequest) -> list[str]:
        """The columns of labels: as given, or named after the classes of the task, or the usual."""
        given, classes = request.label_columns, request.classes
        if self.several and not given and classes and set(classes) <= set(available):
            return list(classes)
        if len(given) > 1 and not self.several:
            raise EngramError(
                f"{source}: got {len(given)} columns of labels ({', '.join(given)}), but "
                f"{request.kind} has one label per image; name one column, or choose the kind "
                "multilabel or regression."
            )
        needed = self.required or bool(given)
        names = given or (None,)
        found = [find_column(source, available, self.role, name, needed) for name in names]
        return [name for name in found if name]

    def read(self, location: str, cells: Mapping[str, Any], listed: Names | None = None) -> Any:
        """The label in the cells of one row. Integers are indices into `listed`, if it is given."""
        ((name, cell),) = cells.items()
        if isinstance(cell, str) and not cell:
            raise EngramError(f"{location}: the column {name!r} is empty.")
        return _class_name(location, cell, listed)

    def classes(self, columns: Names, labels: Labels, listed: Names | None) -> Names:
        """The names of all classes: as the source lists them, or those that occur, sorted."""
        return listed or sorted(set(labels), key=class_order)

    def numbered(self, location: str, labels: Sequence[Any], classes: Names) -> npt.NDArray[Any]:
        """All labels as an array of class indices, or of whatever the kind trains on.

        A label that is none of the classes is an EngramError.
        """
        index = {label: i for i, label in enumerate(classes)}
        _refuse_unknown(location, set(labels) - set(index), classes)
        return np.array([index[label] for label in labels], dtype=np.int64)


class MultilabelLabels(LabelReader):
    """The names of any number of classes, as a tuple."""

    dimensions = (2,)
    exclusive = False
    several = True

    def read(self, location: str, cells: Mapping[str, Any], listed: Names | None = None) -> Any:
        if len(cells) > 1:
            values = {name: truth(cell) for name, cell in cells.items()}
            if wrong := [name for name, value in values.items() if value is None]:
                raise EngramError(
                    f"{location}: the column {wrong[0]!r} holds {cells[wrong[0]]!r}; expected 0 "
                    "or 1."
                )
            return tuple(name for name, value in values.items() if value)
        cell = next(iter(cells.values()))
        if cell is None:
            raise EngramError(f"{location} is empty; an image without labels has an empty list.")
        if isinstance(cell, str):
            cell = [part.strip() for part in re.split(r"[;|,]", cell) if part.strip()]
        if not isinstance(cell, (list, tuple, np.ndarray)):
            raise EngramError(
                f"{location} is {cell!r}; expected a list of labels, or text with ';' between them."
            )
        return tuple(_class_name(location, label, listed) for label in cell)

    def classes(self, columns: Names, labels: Labels, listed: Names | None) -> Names:
        if len(columns) > 1:
            return columns
        return listed or sorted({name for label in labels for name in label}, key=class_order)

    def numbered(self, location: str, labels: Sequence[Any], classes: Names) -> npt.NDArray[Any]:
        index = {label: i for i, label in enumerate(classes)}
        _refuse_unknown(location, {one for label in labels for one in label} - set(index), classes)
        array = np.zeros((len(labels), len(classes)), dtype=np.int64)
        for row, label in zip(array, labels, strict=True):
            row[[index[name] for name in label]] = 1
        return array


class NumberLabels(LabelReader):
    """One or several numbers, as a tuple; the columns' names are the classes."""

    dimensions = (1, 2)
    exclusive = False
    several = True

    def read(self, location: str, cells: Mapping[str, Any], listed: Names | None = None) -> Any:
        return tuple(
            _number(location, name, part)
            for name, cell in cells.items()
            for part in (cell if isinstance(cell, (list, tuple, np.ndarray)) else [cell])
        )

    def classes(self, columns: Names, labels: Labels, listed: Names | None) -> Names:
        count = len(next(iter(labels), ()))
        if listed is not None and len(listed) == count:
            return listed
        if count == len(columns):
            return columns
        return [f"{columns[0]}{i}" for i in range(count)]  # a column of lists

    def numbered(self, location: str, labels: Sequence[Any], classes: Names) -> npt.NDArray[Any]:
        for i, label in enumerate(labels):
            if len(label) != len(classes):
                raise EngramError(
                    f"{location} has {len(label)} numbers in row {i}; expected {len(classes)} "
                    f"({', '.join(classes[:4])})."
                )
        return np.array(labels, dtype=np.float32).reshape(len(labels), len(classes))


class MaskLabels(LabelReader):
    """Nothing: the masks of the images are the labels."""

    dimensions = (3,)
    role = "mask"

    def read(self, location: str, cells: Mapping[str, Any], listed: Names | None = None) -> Any:
        return None

    def numbered(self, location: str, labels: Sequence[Any], classes: Names) -> npt.NDArray[Any]:
        return np.zeros((len(labels), 0), dtype=np.int64)


#: What good images are called, in lower case; every other name is that of something wrong.
GOOD = ("good", "normal", "ok", "0", "false", "no")


class AnomalyLabels(LabelReader):
    """`good`, or the name of what is wrong with an image."""

    exclusive = False
    required = False

    def read(self, location: str, cells: Mapping[str, Any], listed: Names | None = None) -> Any:
        return _class_name(location, next(iter(cells.values()), GOOD[0]), listed)

    def classes(self, columns: Names, labels: Labels, listed: Names | None) -> Names:
        return ["anomalous"]

    def numbered(self, location: str, labels: Sequence[Any], classes: Names) -> npt.NDArray[Any]:
        return np.array([label.strip().lower() not in GOOD for label in labels], dtype=np.int64)


LABELS: Mapping[str, LabelReader] = {
    "classification": LabelReader(),
    "multilabel": MultilabelLabels(),
    "regression": NumberLabels(),
    "segmentation": MaskLabels(),
    "anomaly": AnomalyLabels(),
}


def class_order(label: str) -> tuple[int, int, str, str]:
    """The key that sorts classes: numbers by value, then names alphabetically."""
    if not (label.isascii() and label.isdigit()):
        return 1, 0, label, label
    digits = label.lstrip("0")  # of any number: Python converts no more than 4,300
    return 0, len(digits), digits, label


def _class_name(location: str, label: Any, listed: Names | None) -> str:
    if label is None or isinstance(label, (list, tuple, np.ndarray, Mapping)):
        raise EngramError(f"{location} has the label {label}; expected one label per image.")
    if listed is None or isinstance(label, str):
        return str(label)
    if not 0 <= int(label) < len(listed):
        hint = "; -1 means that the labels are not public" if label == -1 else ""
        raise EngramError(f"{location}: label {label} is none of {len(listed)} classes{hint}.")
    return listed[int(label)]


def truth(cell: Any) -> bool | None:
    """Whether a cell says true or false: 1, true and yes, or 0, false and no; else None."""
    text = str(cell).strip().lower()
    if text in ("1", "1.0", "true", "yes"):
        return True
    return False if text in ("0", "0.0", "false", "no") else None


def _number(location: str, column: str, cell: Any) -> float:
    try:
        number = float(cell)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _LARGEST_NUMBER:
        held = printable(repr(cell))
        raise EngramError(f"{location}: the column {column!r} holds {held}; expected a number.")
    return number


def _refuse_unknown(location: str, unknown: Iterable[str], classes: Names) -> None:
    names = sorted(unknown)
    if names:
        more = len(names) - 1
        verb = "is" if more == 1 else "are"
        others = f", nor {verb} {counted(more, 'other label')}" if more else ""
        raise EngramError(
            f"{location} has the label {names[0]!r}, which is none of the {len(classes)} "
            f"classes{others}."
        )


# The values in masks


def find_legend(
    source: str, found: FoundData, values: Sequence[int] | None, ignore: int, classes: Names | None
) -> Legend:
    """The values that are classes, as given or all that occur, and the one that is ignored."""
    for value in (ignore, *(values or ())):
        if not 0 <= value < MASK_VALUES:
            raise EngramError(f"{value} is not a value of a mask; they go from 0 to 65,535.")
    legend = Legend(tuple(values or _values_in_masks(source, found, ignore)), ignore)
    if classes is not None and len(classes) != len(legend.values):
        raise EngramError(
            f"{source}: {len(classes)} names for {len(legend.values)} classes (the values "
            f"{', '.join(map(str, legend.values[:8]))} in its masks); name each of them, or give "
            "the values of the classes."
        )
    return legend


def _values_in_masks(source: str, found: FoundData, ignore: int) -> list[int]:
    """The values in the training masks, sorted, without the ignored one. Reads every mask."""
    split = found.first
    masks = split.masks
    assert masks is not None

    def occurring(row: int) -> set[int] | BadImage:
        try:
            mask = read_mask(masks.read(row), name=masks.row_name(row))
            return set(np.flatnonzero(np.bincount(mask.ravel())).tolist())
        except BadImage as error:  # reported when the mask is to be trained on
            return error

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(occurring, range(len(split.labels))))
    errors = [one for one in results if isinstance(one, BadImage)]
    good = [one for one in results if not isinstance(one, BadImage)]
    values = sorted(set().union(*good) - {ignore})
    if not values:
        nothing = f"{source}: the masks hold nothing but {ignore}, which is ignored."
        raise errors[0] if errors else EngramError(nothing)
    if len(values) > IGNORED:
        raise EngramError(
            f"{source}: the masks hold {len(values)} values, and at most {IGNORED} classes are "
            "possible; are these masks, with a class for every pixel?"
        )
    return values
