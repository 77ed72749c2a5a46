"""What a label is for each kind of task: found in the columns of a table, and numbered by class.

classification   a name                                one column
multilabel       the names that hold                   one column of lists, or a column a class
regression       numbers                               a column each
segmentation     a mask                                one column of paths; see `sources`
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engram.errors import EngramError

_LARGEST = float(np.finfo(np.float32).max)  # of a number that is learned

# The column that is meant when none is given: the first of these that there is.
COLUMNS = {
    "image": ("image", "img", "path", "file", "filename", "file_name", "filepath", "image_path"),
    "label": ("label", "labels", "class", "class_name", "category", "target", "fine_label"),
    "mask": ("mask", "masks", "mask_path", "segmentation", "annotation"),
    "split": ("split", "set", "subset", "partition"),
}


def column(
    where: str | Path, columns: Sequence[str], kind: str, given: str | None, needed: bool = True
) -> str:
    """The column that holds this kind of thing: the given one, or the first usual name."""
    if given is not None and given in columns:
        return given
    by_name = {str(column).lower(): column for column in columns}
    usual = [by_name[name] for name in COLUMNS[kind] if name in by_name] if given is None else []
    if usual:
        return usual[0]
    if given is None and not needed:
        return ""
    hint = ""
    if given is None:
        say = "in Python with image=" if kind == "image" else "with --label (in Python label=)"
        hint = f"; rename one to {' or '.join(COLUMNS[kind])}, or say {say} which it is"
    raise EngramError(
        f"{where} has no column {given or kind!r}; it has {', '.join(map(str, columns))}{hint}"
    )


def class_order(label: str) -> tuple[int, int, str]:
    """Numbers by their value, then names by the alphabet."""
    is_number = label.isascii() and label.isdigit()
    return (0, int(label), label) if is_number else (1, 0, label)


class Labels:
    """How one kind reads its labels. Here: one name a picture."""

    least = 2  # classes
    dimensions: tuple[int, ...] = (1,)  # of an array of labels

    def columns(
        self, where: str | Path, there: Sequence[str], given: Sequence[str], classes: Sequence[str]
    ) -> list[str]:
        """Which columns hold the labels: those given, or what can be guessed."""
        if len(given) > 1:
            raise EngramError(
                f"{where}: {len(given)} columns of labels ({', '.join(given)}), but one label a "
                "picture is learned; name one column, or choose the kind multilabel or regression"
            )
        return [column(where, there, "label", given[0] if given else None)]

    def read(
        self, where: str, cells: Mapping[str, Any], listed: Sequence[str] | None = None
    ) -> Any:
        """The label in the cells of one row; `listed` are names that numbers count in."""
        ((name, cell),) = cells.items()
        if isinstance(cell, str) and not cell:
            raise EngramError(f"{where}: the column {name!r} is empty")
        return _named(where, cell, listed)

    def classes(
        self, name: str, columns: Sequence[str], labels: Iterable[Any], listed: Sequence[str] | None
    ) -> Sequence[str]:
        """The names of all classes: as the source lists them, or those that occur, sorted."""
        classes = listed or sorted(set(labels), key=class_order)
        if 0 < len(classes) < self.least:
            raise EngramError(
                f"{name} has only one class ({classes[0]}); a task needs at least two"
            )
        return classes

    def numbered(
        self, where: str, labels: Sequence[Any], classes: Sequence[str]
    ) -> npt.NDArray[Any]:
        """All labels as an array; one that is no class is an EngramError."""
        number = {label: i for i, label in enumerate(classes)}
        self._check(where, set(labels) - set(number), classes)
        return np.array([number[label] for label in labels], dtype=np.int64)

    def _check(self, where: str, strange: Iterable[str], classes: Sequence[str]) -> None:
        names = sorted(strange)
        if names:
            raise EngramError(
                f"{where} has the label {names[0]!r}, which is none of the {len(classes)} classes"
                + (f" (nor are {len(names) - 1} others)" if len(names) > 1 else "")
            )


class ManyLabels(Labels):
    """The names that hold, as a tuple."""

    least = 1
    dimensions = (2,)

    def columns(
        self, where: str | Path, there: Sequence[str], given: Sequence[str], classes: Sequence[str]
    ) -> list[str]:
        if not given and len(classes) > 0 and set(classes) <= set(there):
            return list(classes)  # of a task that was learned from such columns
        return [column(where, there, "label", name) for name in given or (None,)]

    def read(
        self, where: str, cells: Mapping[str, Any], listed: Sequence[str] | None = None
    ) -> Any:
        if len(cells) > 1:
            return tuple(name for name, cell in cells.items() if self._holds(where, name, cell))
        cell = next(iter(cells.values()))
        if cell is None:
            raise EngramError(f"{where} is empty; a picture without labels has an empty list")
        if isinstance(cell, str):
            cell = [part.strip() for part in re.split(r"[;|,]", cell) if part.strip()]
        if not isinstance(cell, (list, tuple, np.ndarray)):
            raise EngramError(
                f"{where} is {cell!r}; expected a list of labels, or texts with ';' between them"
            )
        return tuple(_named(where, label, listed) for label in cell)

    def _holds(self, where: str, name: str, cell: Any) -> bool:
        text = str(cell).strip().lower()
        if text in ("1", "1.0", "true", "yes"):
            return True
        if text in ("0", "0.0", "false", "no"):
            return False
        raise EngramError(f"{where}: the column {name!r} holds {cell!r}; expected 0 or 1")

    def classes(
        self, name: str, columns: Sequence[str], labels: Iterable[Any], listed: Sequence[str] | None
    ) -> Sequence[str]:
        if len(columns) > 1:
            return columns
        return super().classes(name, columns, [one for label in labels for one in label], listed)

    def numbered(
        self, where: str, labels: Sequence[Any], classes: Sequence[str]
    ) -> npt.NDArray[Any]:
        number = {label: i for i, label in enumerate(classes)}
        self._check(where, {one for label in labels for one in label} - set(number), classes)
        array = np.zeros((len(labels), len(classes)), dtype=np.int64)
        for row, label in zip(array, labels, strict=True):
            row[[number[one] for one in label]] = 1
        return array


class Numbers(Labels):
    """One or several numbers, as a tuple; the columns' names are the classes."""

    least = 1
    dimensions = (1, 2)

    def columns(
        self, where: str | Path, there: Sequence[str], given: Sequence[str], classes: Sequence[str]
    ) -> list[str]:
        if not given and len(classes) > 0 and set(classes) <= set(there):
            return list(classes)
        return [column(where, there, "label", name) for name in given or (None,)]

    def read(
        self, where: str, cells: Mapping[str, Any], listed: Sequence[str] | None = None
    ) -> Any:
        numbers = []
        for name, cell in cells.items():
            for part in cell if isinstance(cell, (list, tuple, np.ndarray)) else [cell]:
                try:
                    number = float(part)
                except (TypeError, ValueError):
                    number = math.nan
                if not abs(number) <= _LARGEST:
                    raise EngramError(
                        f"{where}: the column {name!r} holds {part!r}; expected a number"
                    )
                numbers.append(number)
        return tuple(numbers)

    def classes(
        self, name: str, columns: Sequence[str], labels: Iterable[Any], listed: Sequence[str] | None
    ) -> Sequence[str]:
        count = len(next(iter(labels), ()))
        if listed is not None and len(listed) == count:
            return listed
        if count == len(columns):
            return columns
        return [f"{columns[0]}{i}" for i in range(count)]  # a column of lists

    def numbered(
        self, where: str, labels: Sequence[Any], classes: Sequence[str]
    ) -> npt.NDArray[Any]:
        for i, label in enumerate(labels):
            if len(label) != len(classes):
                raise EngramError(
                    f"{where} has {len(label)} numbers in row {i}; expected {len(classes)} "
                    f"({', '.join(classes[:4])})"
                )
        return np.array(labels, dtype=np.float32).reshape(len(labels), len(classes))


class NoLabels(Labels):
    """Masks take the place of labels: an array without columns."""

    dimensions = (3,)

    def columns(
        self, where: str | Path, there: Sequence[str], given: Sequence[str], classes: Sequence[str]
    ) -> list[str]:
        return [column(where, there, "mask", given[0] if given else None)]

    def numbered(
        self, where: str, labels: Sequence[Any], classes: Sequence[str]
    ) -> npt.NDArray[Any]:
        return np.zeros((len(labels), 0), dtype=np.int64)


LABELS: Mapping[str, Labels] = {
    "classification": Labels(),
    "multilabel": ManyLabels(),
    "regression": Numbers(),
    "segmentation": NoLabels(),
}


def _named(where: str, label: Any, listed: Sequence[str] | None) -> str:
    """A label's name; a number counts in the list of classes where there is one."""
    if label is None or isinstance(label, (list, tuple, np.ndarray, Mapping)):
        raise EngramError(f"{where} has the label {label}; expected one label each")
    if listed is None or isinstance(label, str):
        return str(label)
    if not 0 <= int(label) < len(listed):
        hint = "; -1 means that the labels are not public" if label == -1 else ""
        raise EngramError(f"{where}: label {label} is none of {len(listed)} classes{hint}")
    return listed[int(label)]
