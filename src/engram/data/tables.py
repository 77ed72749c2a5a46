"""Tables of image paths and labels: CSV, TSV, JSON lines, parquet."""

import codecs
import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any

from engram.data.labels import LABELS, find_column
from engram.data.source import SPLITS, DataRequest, Files, FoundData, FoundSplit
from engram.data.split_columns import divide_rows
from engram.errors import EngramError
from engram.util.documents import parse_json
from engram.util.files import open_regular
from engram.util.parquet import batches
from engram.util.text import counted, explained, first_line
from engram.util.zip_files import MAX_EXPANSION, MAX_SMALL

_ROW = 2**22  # characters of a row of a table, or of its head


def read_table(path: Path, request: DataRequest) -> FoundData:
    """Read rows of labels and a path from the table's folder, which has to exist."""
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
    found: dict[str, FoundSplit] = {}
    for name in SPLITS:
        rows = [i for i, split in enumerate(splits) if split == name]
        if not rows:
            continue
        files = [_files(path, records, rows, column) for column in paths]
        cells = [{column: records[i].get(column) for column in labels} for i in rows]
        places = (f"{path}, row {i + 1}" for i in rows)
        read = map(LABELS[request.kind].read, places, cells)
        groups = None if group is None else [records[i].get(group) for i in rows]
        masks = files[1] if request.has_masks else None
        found[name] = FoundSplit(files[0], list(read), masks, groups, label_columns=labels)
    return FoundData(
        found,
        split_by=division.by if division else "",
        left_out={"rows of no split": splits.count(None)} if None in splits else {},
    )


def _files(
    path: Path, records: Sequence[Mapping[str, Any]], rows: Iterable[int], column: str
) -> Files:
    """The files that a column names in these rows."""
    found: list[str] = []
    missing: list[str] = []
    for i in rows:
        cell = records[i].get(column)
        if isinstance(cell, (bytes, Mapping)):
            raise EngramError(f"{path} holds images, not paths; load it as hf:{path}.")
        if cell in (None, ""):
            raise EngramError(f"{path}, row {i + 1}: the column {column!r} is empty.")
        found.append(os.path.join(path.parent, str(cell)))
        if not os.path.isfile(found[-1]):
            missing.append(f"{path}, row {i + 1}: {found[-1]} does not exist")
    if missing:
        more = len(missing) - 1
        others = f" (the same is true of {counted(more, 'other path')})" if more else ""
        raise EngramError(f"{missing[0]}{others}.")
    return Files(tuple(found))


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
