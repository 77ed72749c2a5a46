"""Tables of image paths and labels: CSV, TSV, JSON lines, parquet."""

import codecs
import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any, TypeAlias

from engram.data.labels import LABELS, find_column
from engram.data.source import SPLITS, DataRequest, Files, FoundData, FoundSplit
from engram.data.split_columns import divide_rows
from engram.errors import EngramError
from engram.util.documents import parse_json
from engram.util.files import open_regular
from engram.util.parquet import batches
from engram.util.text import counted, explained, first_line
from engram.util.zip_files import MAX_EXPANSION, MAX_SMALL

_Row: TypeAlias = tuple[tuple[str, ...], Any, Any]  # files, label, group
_ROW = 2**22  # characters of a row of a table, or of its head


def read_table(path: Path, request: DataRequest) -> FoundData:
    """Read rows of a path and labels, or the paths of an image and its mask.

    Relative paths start at the table's folder. Every path is checked.
    """
    records = _read_records(path)
    columns = list(dict.fromkeys(column for record in records for column in record))
    image = find_column(str(path), columns, "image", request.image_column)
    labels = LABELS[request.kind].columns(str(path), columns, request)
    group = request.group_column
    if group is not None:
        group = find_column(str(path), columns, "group", group)
    division = divide_rows(
        str(path), columns, lambda column: [record.get(column) for record in records],
        request, taken={image, *labels, group or image},
    )  # fmt: skip
    splits = division.splits if division else ["train"] * len(records)
    paths = [image, labels[0]] if request.has_masks else [image]
    found: dict[str, list[_Row]] = {name: [] for name in SPLITS if name in splits}
    missing: list[tuple[int, str]] = []
    for row, (name, record) in enumerate(zip(splits, records, strict=True), start=1):
        if name is None:  # a row of a split that was not asked for
            continue
        place = f"{path}, row {row}"
        files = tuple(_file(path, place, column, record) for column in paths)
        missing += [(row, file) for file in files if not os.path.isfile(file)]
        cells = {column: record.get(column) for column in labels}
        label = LABELS[request.kind].read(place, cells)
        found[name].append((files, label, None if group is None else record.get(group)))
    if missing:
        (row, file), *rest = missing
        others = f" (the same is true of {counted(len(rest), 'other path')})" if rest else ""
        raise EngramError(f"{path}, row {row}: {file} does not exist{others}.")
    return FoundData(
        {name: _found_split(rows, group is not None) for name, rows in found.items()},
        label_columns=labels,
        split_by=division.by if division else "",
        left_out={"rows of no split": splits.count(None)} if None in splits else {},
    )


def _found_split(rows: Sequence[_Row], grouped: bool) -> FoundSplit:
    files, labels, groups = zip(*rows, strict=True)
    images, *masks = map(Files, zip(*files, strict=True))
    mask = masks[0] if masks else None
    return FoundSplit(images, list(labels), mask, groups if grouped else None)


def _file(path: Path, place: str, column: str, record: Mapping[str, Any]) -> str:
    cell = record.get(column)
    if isinstance(cell, (bytes, Mapping)):
        raise EngramError(f"{path} holds images, not paths; load it as hf:{path}.")
    if cell in (None, ""):
        raise EngramError(f"{place}: the column {column!r} is empty.")
    return os.path.join(path.parent, str(cell))


# The formats


def _read_records(path: Path) -> list[dict[str, Any]]:
    def sentence(error: Exception) -> str:
        if isinstance(error, UnicodeDecodeError):
            at = f"byte {error.start:,}"
            return f"{path} is not text in UTF-8 ({at}); save the table as CSV UTF-8."
        return f"{path} cannot be read as a table: {first_line(error)}."

    with explained(sentence):
        records = TABLES[path.suffix.lower()](path)
    if not records:
        raise EngramError(f"{path} is an empty table.")
    return records


def _read_csv(path: Path) -> list[dict[str, Any]]:
    with open_regular(path) as file:
        return list(csv_rows(open_text(file)))


def open_text(file: IO[bytes], errors: str = "strict") -> IO[str]:
    """UTF-8 with or without a byte order mark, or UTF-16 with one."""
    utf16 = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    file.seek(0)
    return io.TextIOWrapper(file, "utf-16" if utf16 else "utf-8-sig", errors=errors, newline="")


def csv_rows(text: IO[str]) -> Iterator[dict[str, str]]:
    """The rows of a table, one after the other; what is wrong is a ValueError with its line."""
    lines = _BoundedLines(text)
    head = next(lines, "")
    separator = _separator(head)
    rows = csv.DictReader(
        chain([head], lines), delimiter=separator, skipinitialspace=True, strict=True
    )
    try:
        for row in rows:
            if None in row:
                raise csv.Error(
                    f"more fields than the first line has columns ({len(row) - 1}, with "
                    f"{separator!r} between them); put quotes around text that has this "
                    "character in it"
                )
            lines.size = 0
            yield row
    except csv.Error as error:
        raise ValueError(f"line {lines.number}: {error}") from error


class _BoundedLines(Iterator[str]):
    """The lines of a table, as long as a row of it does not get too long."""

    def __init__(self, text: IO[str]) -> None:
        self._text, self.size, self.number = text, 0, 0

    def __next__(self) -> str:
        line = self._text.readline(_ROW + 1 - self.size)
        self.size, self.number = self.size + len(line), self.number + bool(line)
        if self.size > _ROW:
            raise ValueError(f"line {self.number}: a row has more than {_ROW:,} characters")
        if not line:
            raise StopIteration
        return line


def _separator(first_line: str) -> str:
    """The separator that makes most columns of the first line: a comma, a semicolon or a tab."""

    def columns(separator: str) -> int:
        try:
            return len(next(csv.reader([first_line], delimiter=separator), []))
        except csv.Error:  # a field is longer than csv takes
            return 0

    return max(",;\t", key=columns)


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    records = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = parse_json(line.encode())
            except json.JSONDecodeError as error:  # its own line number is always 1
                raise ValueError(f"line {number} column {error.colno}: {error.msg}") from error
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"line {number}: every line must be an object with named columns")
            records.append(record)
    return records


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    size, most = 0, max(MAX_EXPANSION * path.stat().st_size, MAX_SMALL)
    with open_regular(path) as file:
        for batch in batches(file):
            size += batch.nbytes
            if size > most:
                raise ValueError(f"it expands to more than {most / 1e6:,.0f} MB")
            records += batch.to_pylist()
    return records


#: Readers of tables by the suffix of a file.
TABLES = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".parquet": _read_parquet,
}
