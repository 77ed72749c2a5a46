"""Table formats of answers, written in parts: parquet, JSON lines or CSV."""

from __future__ import annotations

import csv
import io
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from engram.errors import EngramError
from engram.util.files import write_atomically
from engram.util.optional import require
from engram.util.text import first_line, visible

Row = Mapping[str, Any]

#: The beginning of a spreadsheet's formula; some take the wide forms, too.
_FORMULAS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
_RANKED = ("classification", "multilabel")  # kinds whose best answer has a probability


class TableFormat(ABC):
    """A format. A part is a whole table by itself, and parts can be joined into one.

    A part that cannot be read is an EngramError.
    """

    suffix: str

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


@contextmanager
def _reading(part: Path) -> Iterator[None]:
    """Raise an EngramError for any error of a reader: somebody else changed the part."""
    try:
        yield
    except Exception as error:
        raise EngramError(
            f"{part} is damaged ({type(error).__name__}: {first_line(error)}); remove it, and run "
            "the same command again: its images will be answered anew."
        ) from error


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
    """A column for each task: its best class, and its probability; lists are JSON in a cell.

    A row is a line, and a cell is what a terminal shows and no spreadsheet computes.
    """

    suffix, head = ".csv", 1

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = columns

    def write(self, path: Path, rows: Sequence[Row]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns, extrasaction="raise")
        writer.writeheader()
        writer.writerows(map(_flat, rows))
        write_atomically(path, text.getvalue().encode())

    def image_cell(self, image: str) -> str:
        return _safe_text(image)

    def images(self, path: Path) -> list[str]:
        with _reading(path), path.open(encoding="utf-8", newline="") as file:
            if not (text := file.read()).endswith("\n"):
                raise ValueError("its last line is cut")
            return [row["image"] for row in csv.DictReader(io.StringIO(text, newline=""))]


class Parquet(TableFormat):
    """A row group for each part; answers are lists of structs, vectors lists of numbers."""

    suffix = ".parquet"

    def __init__(self, schema: Any) -> None:
        self.schema = schema
        self._arrow, self._parquet = _pyarrow("pyarrow"), _pyarrow("pyarrow.parquet")

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


def _pyarrow(module: str) -> Any:
    return require(module, extra="hub-data", purpose="Writing parquet")


def table_format(
    suffix: str,
    answers: Mapping[str, str],
    vectors: Mapping[str, bool],
    numbers: Sequence[str] = (),
) -> TableFormat:
    """The format of a file name's suffix.

    `answers` are columns with their kind of task, `vectors` columns of lists of numbers with
    whether they are in half precision, `numbers` columns of one number.
    """
    if suffix == Csv.suffix:
        best = [f"{name}.probability" for name, kind in answers.items() if kind in _RANKED]
        return Csv(["image", *answers, *numbers, *vectors, "error", *best])
    if suffix == JsonLines.suffix:
        return JsonLines()
    if suffix == Parquet.suffix:
        return Parquet(_schema(answers, vectors, numbers))
    raise EngramError(
        f"Answers are written as .parquet, .jsonl or .csv, or into a folder, not as {suffix!r}."
    )


def _schema(answers: Mapping[str, str], vectors: Mapping[str, bool], numbers: Sequence[str]) -> Any:
    arrow = _pyarrow("pyarrow")
    text, number, truth = arrow.string(), arrow.float32(), arrow.bool_()
    rows: dict[str, Any] = {
        "classification": {"class": text, "probability": number},
        "multilabel": {"class": text, "probability": number, "threshold": number, "present": truth},
        "regression": {"name": text, "value": arrow.float64()},
        "segmentation": {"class": text, "share": number},
    }
    fields = [("image", text)]
    for name, kind in answers.items():
        listed = arrow.list_(arrow.struct(list(rows[kind].items())))
        if kind == "segmentation":
            size = arrow.list_(arrow.int32())
            listed = arrow.struct([("classes", listed), ("size", size), ("mask", text)])
        fields.append((name, listed))
    fields += [(name, number) for name in numbers]
    for name, half in vectors.items():
        fields.append((name, arrow.list_(arrow.float16() if half else number)))
    return arrow.schema([*fields, ("error", text)])


def _plain(value: Any) -> Any:
    """A row as JSON has it."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items() if one is not None}
    if isinstance(value, np.ndarray):
        return [None if not np.isfinite(x) else float(x) for x in value]
    return value


def _flat(row: Row) -> dict[str, Any]:
    """A row as a line of CSV has it."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        best = value[0] if isinstance(value, list) and value else None
        if isinstance(best, Mapping) and "probability" in best:
            flat[name], flat[f"{name}.probability"] = best["class"], best["probability"]
        elif isinstance(value, (list, Mapping, np.ndarray)):
            flat[name] = json.dumps(_plain(value))
        else:
            flat[name] = value
    return {n: _safe_text(value) if isinstance(value, str) else value for n, value in flat.items()}


def _safe_text(text: str) -> str:
    """Text as a cell: escapes are visible, and a quote keeps a spreadsheet from computing it."""
    text = visible(text)
    return f"'{text}" if text.lstrip().startswith(_FORMULAS) else text
