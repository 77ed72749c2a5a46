"""Answers as rows of a table, in parts: parquet, JSON lines or CSV."""

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


class Table(ABC):
    """A format. A part is a whole table by itself, and parts can be joined into one."""

    suffix: str

    @abstractmethod
    def write(self, path: Path, rows: Sequence[Row]) -> None:
        """Write a part, completely or not at all."""

    def name_of(self, image: str) -> str:
        """The name of an image as `images` gives it."""
        return image

    @abstractmethod
    def images(self, path: Path) -> list[str]:
        """The names of the images of a part, in its order; a damaged part is an EngramError."""

    @abstractmethod
    def rows(self, path: Path) -> int:
        """The number of rows of a part; a damaged part is an EngramError."""

    @abstractmethod
    def join(self, parts: Sequence[Path], out: IO[bytes]) -> None:
        """Write all parts as one table, with one of them in memory."""


@contextmanager
def _reading(part: Path) -> Iterator[None]:
    """Whatever readers raise is an EngramError: somebody else changed the part."""
    try:
        yield
    except Exception as error:
        raise EngramError(
            f"{part} is damaged ({type(error).__name__}: {first_line(error)}); remove it, and run "
            "the same command again: its images will be answered anew."
        ) from error


def _lines(path: Path) -> int:
    with _reading(path), path.open("rb") as file:
        return sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 20), b""))


class JsonLines(Table):
    """One JSON object a line; numbers that JSON does not have are null."""

    suffix = ".jsonl"

    def write(self, path: Path, rows: Sequence[Row]) -> None:
        lines = (json.dumps(_plain(row), ensure_ascii=False) + "\n" for row in rows)
        write_atomically(path, "".join(lines).encode())

    def images(self, path: Path) -> list[str]:
        with _reading(path), path.open(encoding="utf-8") as file:
            return [json.loads(line)["image"] for line in file]

    def rows(self, path: Path) -> int:
        return _lines(path)

    def join(self, parts: Sequence[Path], out: IO[bytes]) -> None:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, out)


class Csv(Table):
    """A column for each task: its best class, and its probability; lists are JSON in a cell.

    A row is a line, and a cell is what a terminal shows and no spreadsheet computes.
    """

    suffix = ".csv"

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = columns

    def write(self, path: Path, rows: Sequence[Row]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns, extrasaction="raise")
        writer.writeheader()
        for row in rows:
            flat = _flat(row)
            writer.writerow({n: _cell(x) if isinstance(x, str) else x for n, x in flat.items()})
        write_atomically(path, text.getvalue().encode())

    def name_of(self, image: str) -> str:
        return _cell(image)

    def images(self, path: Path) -> list[str]:
        with _reading(path), path.open(encoding="utf-8", newline="") as file:
            if not (text := file.read()).endswith("\n"):
                raise ValueError("its last line is cut")
            return [row["image"] for row in csv.DictReader(io.StringIO(text, newline=""))]

    def rows(self, path: Path) -> int:
        return _lines(path) - 1

    def join(self, parts: Sequence[Path], out: IO[bytes]) -> None:
        for i, part in enumerate(parts):
            with part.open("rb") as file:
                if i:
                    file.readline()
                shutil.copyfileobj(file, out)


class Parquet(Table):
    """A row group for each part; answers are lists of structs, vectors lists of numbers."""

    suffix = ".parquet"

    def __init__(self, schema: Any) -> None:
        self.schema = schema

    def write(self, path: Path, rows: Sequence[Row]) -> None:
        arrow, parquet = _arrow()
        columns = {name: [row.get(name) for row in rows] for name in self.schema.names}
        file = io.BytesIO()
        parquet.write_table(arrow.table(columns, schema=self.schema), file)
        write_atomically(path, file.getvalue())

    def images(self, path: Path) -> list[str]:
        _, parquet = _arrow()
        with _reading(path):
            images: list[str] = parquet.read_table(path, columns=["image"]).column(0).to_pylist()
        return images

    def rows(self, path: Path) -> int:
        _, parquet = _arrow()
        with _reading(path):
            return int(parquet.read_metadata(path).num_rows)

    def join(self, parts: Sequence[Path], out: IO[bytes]) -> None:
        _, parquet = _arrow()
        with parquet.ParquetWriter(out, self.schema) as writer:
            for part in parts:
                with _reading(part):
                    rows = parquet.read_table(part, schema=self.schema)
                writer.write_table(rows)


def _arrow() -> tuple[Any, Any]:
    arrow = require("pyarrow", extra="hub-data", purpose="Writing parquet")
    return arrow, require("pyarrow.parquet", extra="hub-data", purpose="Writing parquet")


def table_for(
    suffix: str,
    answers: Mapping[str, str],
    vectors: Mapping[str, bool],
    numbers: Sequence[str] = (),
) -> Table:
    """The format of a file name's suffix.

    Args:
        suffix: `.parquet`, `.jsonl` or `.csv`.
        answers: The tasks that answer, each with the name of its kind.
        vectors: Columns of lists of numbers, each with whether they are in half precision.
        numbers: Columns of one number.
    """
    columns = ["image", *answers, *numbers, *vectors, "error"]
    if suffix == Csv.suffix:
        best = [f"{name}.{_BEST[kind]}" for name, kind in answers.items() if kind in _BEST]
        return Csv([*columns, *best])
    if suffix == JsonLines.suffix:
        return JsonLines()
    if suffix == Parquet.suffix:
        return Parquet(_schema(answers, vectors, numbers))
    raise EngramError(
        f"Answers are written as .parquet, .jsonl or .csv, or into a folder, not as {suffix!r}."
    )


#: What a formula of a spreadsheet begins with; some take the wide forms, too.
_FORMULAS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")

#: What a kind says of its best answer.
_BEST = {"classification": "probability", "multilabel": "probability"}


def _schema(answers: Mapping[str, str], vectors: Mapping[str, bool], numbers: Sequence[str]) -> Any:
    arrow, _ = _arrow()
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
            flat[name] = json.dumps(_plain(value) if not isinstance(value, list) else value)
        else:
            flat[name] = value
    return flat


def _cell(text: str) -> str:
    """Text as a cell: escapes are visible, and a quote keeps a spreadsheet from computing it."""
    text = visible(text)
    return f"'{text}" if text.lstrip().startswith(_FORMULAS) else text


def part_name(number: int, suffix: str) -> str:
    return f"part-{number:06}{suffix}"
