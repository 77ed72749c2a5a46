"""Table formats of answers, written in parts: parquet, JSON lines or CSV, with the same columns."""

from __future__ import annotations

import csv
import io
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import numpy as np

from engram.errors import EngramError
from engram.tasks.kind import ColumnType
from engram.util.files import write_atomically
from engram.util.parquet import pyarrow
from engram.util.text import explained, first_line, visible

Row = Mapping[str, Any]
_PARQUET = "Writing parquet"

#: The beginning of a spreadsheet's formula; some take the wide forms, too.
_FORMULAS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")


class TableFormat(ABC):
    """A format, in which parts are tables that can be joined; a damaged one is an EngramError."""

    suffix: str

    def __init__(self, columns: Mapping[str, ColumnType]) -> None:
        self.columns = columns

    @abstractmethod
    def write(self, path: Path, rows: Sequence[Row]) -> None:
        """Write a part, completely or not at all."""

    def image_cell(self, image: str) -> str:
        """The name of an image as `images` gives it."""
        return image

    @abstractmethod
    def images(self, path: Path) -> list[str]:
        """The names of the images of a part, in its order."""

    @abstractmethod
    def rows(self, path: Path) -> int:
        """The number of rows of a part."""

    @abstractmethod
    def join(self, parts: Sequence[Path], out: IO[bytes]) -> None:
        """Write all parts as one table, with one of them in memory."""


def _reading(part: Path) -> AbstractContextManager[None]:
    """Say so where somebody else has changed a part."""
    return explained(
        lambda error: (
            f"{part} is damaged ({type(error).__name__}: {first_line(error)}); remove "
            "it, and run the same command again: its images will be answered anew."
        )
    )


class _LineFormat(TableFormat):
    """A format with a line for each row."""

    head = 0  # lines before the first row

    def rows(self, path: Path) -> int:
        with _reading(path), path.open("rb") as file:
            pieces = iter(lambda: file.read(1 << 20), b"")
            return sum(piece.count(b"\n") for piece in pieces) - self.head

    def join(self, parts: Sequence[Path], out: IO[bytes]) -> None:
        for i, part in enumerate(parts):
            with part.open("rb") as file:
                for _ in range(self.head if i else 0):
                    file.readline()
                shutil.copyfileobj(file, out)


class JsonLines(_LineFormat):
    """One JSON object a line; numbers that JSON does not have are null."""

    suffix = ".jsonl"

    def write(self, path: Path, rows: Sequence[Row]) -> None:
        lines = (json.dumps(_plain(row), ensure_ascii=False) + "\n" for row in rows)
        write_atomically(path, "".join(lines).encode())

    def images(self, path: Path) -> list[str]:
        with _reading(path), path.open(encoding="utf-8") as file:
            return [json.loads(line)["image"] for line in file]


class Csv(_LineFormat):
    """Lists of texts are joined by `; `, as `fit` reads them; other lists are JSON in a cell.

    A row is a line, and a cell is what a terminal shows and no spreadsheet computes.
    """

    suffix, head = ".csv", 1

    def write(self, path: Path, rows: Sequence[Row]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(self.columns))
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
        write_atomically(path, text.getvalue().encode())

    def image_cell(self, image: str) -> str:
        return safe_text(image)

    def images(self, path: Path) -> list[str]:
        with _reading(path), path.open(encoding="utf-8", newline="") as file:
            if not (text := file.read()).endswith("\n"):
                raise ValueError("its last line is cut")
            return [row["image"] for row in csv.DictReader(io.StringIO(text, newline=""))]


class Parquet(TableFormat):
    """A row group for each part; vectors are lists of numbers, records lists of structs."""

    suffix = ".parquet"

    def __init__(self, columns: Mapping[str, ColumnType]) -> None:
        super().__init__(columns)
        self._arrow, self._parquet = pyarrow(_PARQUET), pyarrow(_PARQUET, "pyarrow.parquet")
        self.schema = self._arrow.schema([(n, self._type(type_)) for n, type_ in columns.items()])

    def _type(self, column: ColumnType) -> Any:
        arrow = self._arrow
        if not isinstance(column, str):
            fields = [(name, self._type(type_)) for name, type_ in column.items()]
            return arrow.list_(arrow.struct(fields))
        types = {"text": arrow.string(), "number": arrow.float64(), "truth": arrow.bool_()}
        of = {"texts": arrow.string(), "floats": arrow.float32(), "halves": arrow.float16()}
        return types[column] if column in types else arrow.list_(of[column])

    def write(self, path: Path, rows: Sequence[Row]) -> None:
        columns = {name: [row.get(name) for row in rows] for name in self.schema.names}
        file = io.BytesIO()
        self._parquet.write_table(self._arrow.table(columns, schema=self.schema), file)
        write_atomically(path, file.getvalue())

    def images(self, path: Path) -> list[str]:
        with _reading(path):
            table = self._parquet.read_table(path, columns=["image"])
            images: list[str] = table.column(0).to_pylist()
            return images

    def rows(self, path: Path) -> int:
        with _reading(path):
            return int(self._parquet.read_metadata(path).num_rows)

    def join(self, parts: Sequence[Path], out: IO[bytes]) -> None:
        with self._parquet.ParquetWriter(out, self.schema) as writer:
            for part in parts:
                with _reading(part):
                    rows = self._parquet.read_table(part, schema=self.schema)
                writer.write_table(rows)


_FORMATS: dict[str, type[TableFormat]] = {one.suffix: one for one in (Csv, JsonLines, Parquet)}


def table_format(suffix: str, columns: Mapping[str, ColumnType]) -> TableFormat:
    """The format of a file name's suffix, with these columns."""
    if suffix not in _FORMATS:
        raise EngramError(
            f"Answers are written as .parquet, .jsonl or .csv, or into a folder, not as {suffix!r}."
        )
    return _FORMATS[suffix](columns)


def _plain(value: Any) -> Any:
    """A row as JSON has it."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items() if one is not None}
    if isinstance(value, np.ndarray):
        return [None if not np.isfinite(x) else float(x) for x in value]
    return value


def _cell(value: Any) -> Any:
    """A value as a cell of CSV has it."""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        value = "; ".join(value)
    elif isinstance(value, (list, np.ndarray)):
        return json.dumps(_plain(value))
    return safe_text(value) if isinstance(value, str) else value


def safe_text(text: str) -> str:
    """Text as a cell: escapes are visible, and a quote keeps a spreadsheet from computing it."""
    text = visible(text)
    return f"'{text}" if text.lstrip().startswith(_FORMULAS) else text
