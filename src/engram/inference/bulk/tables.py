"""Answers as rows of a table, in parts: parquet, JSON lines or CSV."""

from __future__ import annotations

import csv
import io
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from engram.errors import EngramError
from engram.util.files import write_atomically
from engram.util.optional import require

Row = Mapping[str, Any]


class Table(ABC):
    """A format. A part is a whole table by itself, and parts can be joined into one."""

    suffix: str

    @abstractmethod
    def write(self, path: Path, rows: Sequence[Row]) -> None:
        """Write a part, completely or not at all."""

    @abstractmethod
    def images(self, path: Path) -> list[str]:
        """The images of a part, in its order."""

    @abstractmethod
    def join(self, parts: Sequence[Path], out: IO[bytes]) -> None:
        """Write all parts as one table, with one of them in memory."""


class JsonLines(Table):
    """One JSON object a line; numbers that JSON does not have are null."""

    suffix = ".jsonl"

    def write(self, path: Path, rows: Sequence[Row]) -> None:
        lines = (json.dumps(_plain(row), ensure_ascii=False) + "\n" for row in rows)
        write_atomically(path, "".join(lines).encode())

    def images(self, path: Path) -> list[str]:
        with path.open(encoding="utf-8") as file:
            return [json.loads(line)["image"] for line in file]

    def join(self, parts: Sequence[Path], out: IO[bytes]) -> None:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, out)


class Csv(Table):
    """A column for each task: its best class, and its probability; lists are JSON in a cell."""

    suffix = ".csv"

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = columns

    def write(self, path: Path, rows: Sequence[Row]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns, extrasaction="raise")
        writer.writeheader()
        writer.writerows(_flat(row) for row in rows)
        write_atomically(path, text.getvalue().encode())

    def images(self, path: Path) -> list[str]:
        with path.open(encoding="utf-8", newline="") as file:
            return [row["image"] for row in csv.DictReader(file)]

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
        images: list[str] = parquet.read_table(path, columns=["image"]).column(0).to_pylist()
        return images

    def join(self, parts: Sequence[Path], out: IO[bytes]) -> None:
        _, parquet = _arrow()
        with parquet.ParquetWriter(out, self.schema) as writer:
            for part in parts:
                writer.write_table(parquet.read_table(part, schema=self.schema))


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


def part_name(number: int, suffix: str) -> str:
    return f"part-{number:06}{suffix}"
