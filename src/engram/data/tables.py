"""Tables of image paths and labels: CSV, TSV, JSON lines, parquet."""

import codecs
import csv
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram.data.labels import LABELS, find_column
from engram.data.source import SPLITS, DataRequest, Files, FoundData, FoundSplit
from engram.data.split_columns import divide_rows
from engram.errors import EngramError
from engram.util.archives import MAX_EXPANSION, MAX_SMALL
from engram.util.documents import parse_json
from engram.util.files import open_regular
from engram.util.parquet import batches
from engram.util.text import counted, first_line


@dataclass(frozen=True)
class _Sample:
    image: str
    label: Any
    mask: str | None
    row: int


def read_table(path: Path, request: DataRequest) -> FoundData:
    """Read rows of a path and labels, or the paths of an image and its mask.

    Relative paths start at the table's folder. Every path is checked.
    """
    records = _read_records(path)
    columns = list(dict.fromkeys(column for record in records for column in record))
    image = find_column(str(path), columns, "image", request.image_column)
    labels = LABELS[request.kind].columns(
        str(path), columns, request.label_columns, request.classes
    )
    division = divide_rows(
        str(path), columns, lambda column: [record.get(column) for record in records],
        request, taken={image, *labels},
    )  # fmt: skip
    splits = division.splits if division else ["train"] * len(records)
    samples: dict[str, list[_Sample]] = {name: [] for name in SPLITS if name in splits}
    for row, (name, record) in enumerate(zip(splits, records, strict=True), start=1):
        if name is not None:  # else a row of a split that was not asked for
            samples[name].append(_read_sample(path, row, record, image, labels, request))
    _refuse_missing(path, [sample for found in samples.values() for sample in found])
    return FoundData(
        {name: _found_split(found, request) for name, found in samples.items()},
        label_columns=labels,
        unsplit=division is None,
        split_by=division.by if division else "",
        left_out={"rows of no split": splits.count(None)} if None in splits else {},
    )


def _read_sample(
    path: Path,
    row: int,
    record: Mapping[str, Any],
    image: str,
    labels: Sequence[str],
    request: DataRequest,
) -> _Sample:
    if isinstance(record.get(image), (bytes, Mapping)):
        raise EngramError(f"{path} holds images, not paths; load it as hf:{path}.")

    def file(column: str) -> str:
        cell = record.get(column)
        if cell in (None, ""):
            raise EngramError(f"{path}, row {row}: the column {column!r} is empty.")
        return os.path.join(path.parent, str(cell))

    found = file(image)
    if request.has_masks:
        return _Sample(found, None, file(labels[0]), row)
    cells = {name: record.get(name) for name in labels}
    return _Sample(found, LABELS[request.kind].read(f"{path}, row {row}", cells), None, row)


def _refuse_missing(path: Path, samples: Sequence[_Sample]) -> None:
    files = [(s.row, file) for s in samples for file in (s.image, s.mask) if file is not None]
    missing = sorted((row, file) for row, file in files if not os.path.isfile(file))
    if missing:
        row, file = missing[0]
        more = counted(len(missing) - 1, "other path")
        others = f" (the same is true of {more})" if missing[1:] else ""
        raise EngramError(f"{path}, row {row}: {file} does not exist{others}.")


def _found_split(samples: Sequence[_Sample], request: DataRequest) -> FoundSplit:
    images = Files(tuple(sample.image for sample in samples))
    masks = Files(tuple(s.mask for s in samples if s.mask is not None))
    labels = [sample.label for sample in samples]
    return FoundSplit(images, labels, masks if request.has_masks else None)


# The formats


def _read_records(path: Path) -> list[dict[str, Any]]:
    try:
        records = TABLES[path.suffix.lower()](path)
    except UnicodeDecodeError as error:
        raise EngramError(
            f"{path} is not text in UTF-8 (byte {error.start:,}); save the table as CSV UTF-8."
        ) from error
    except EngramError:
        raise
    except Exception as error:  # on hostile bytes the libraries raise nearly anything
        raise EngramError(f"{path} cannot be read as a table: {first_line(error)}.") from error
    if not records:
        raise EngramError(f"{path} is an empty table.")
    return records


def _read_csv(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="", encoding=_encoding(path)) as file:
        separator = _separator(file.readline())
        file.seek(0)
        reader = csv.DictReader(file, delimiter=separator, skipinitialspace=True, strict=True)
        records: list[dict[str, Any]] = []
        try:
            for record in reader:
                if None in record:
                    raise csv.Error(
                        f"more fields than the first line has columns ({len(record) - 1}, with "
                        f"{separator!r} between them); put quotes around text that has this "
                        "character in it"
                    )
                records.append(record)
        except csv.Error as error:
            raise ValueError(f"line {reader.reader.line_num}: {error}") from error
        return records


def _encoding(path: Path) -> str:
    """UTF-8, with or without a byte order mark, unless the mark is that of UTF-16."""
    with path.open("rb") as file:
        return (
            "utf-16" if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
        )


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


#: What reads a table, by the suffix of its file.
TABLES = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".parquet": _read_parquet,
}
