"""Where many images come from, one after the other: nothing is listed before it is needed.

A source is a folder, an image, a list of paths (`.txt`), a table with a column of paths (`.csv`,
`.tsv`, `.parquet`), a table of images (`.parquet`), an archive (`.tar`, as WebDataset has them), or
`-` for paths on standard input. Each may be a path, or an address such as `s3://bucket/folder/`.
"""

from __future__ import annotations

import csv
import io
import itertools
import os
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

from engram.data.folders import SUFFIXES
from engram.data.labels import find_column
from engram.errors import EngramError
from engram.images.heic import HEIC_SUFFIXES
from engram.inference.bulk.items import Item, file_systems, is_address, opened
from engram.util.optional import require

_IMAGES = (*SUFFIXES, *HEIC_SUFFIXES)
_ROWS = 256  # of a parquet file that are read at once
STDIN = "-"


def items_of(sources: Sequence[str], image_column: str = "") -> Iterator[Item]:
    """The images of all sources in their order, which is the same every time."""
    for source in sources:
        yield from _items(source, image_column)


def count_of(sources: Sequence[str], image_column: str = "") -> int:
    """The number of images; 0 if only reading all of them would tell."""
    total = 0
    for source in sources:
        suffix = os.path.splitext(source)[1].lower()
        if source == STDIN or is_address(source) or _READERS.get(suffix) is _archive:
            return 0
        if suffix == ".parquet":
            with _sentence(source):
                total += _parquet(source).metadata.num_rows
        else:
            total += sum(1 for _ in _items(source, image_column))
    return total


@contextmanager
def _sentence(source: str) -> Iterator[None]:
    """What goes wrong while a source is read is an EngramError."""
    try:
        yield
    except (OSError, ValueError, tarfile.TarError, csv.Error) as error:
        raise EngramError(f"{source} cannot be read: {error}.") from error


def _items(source: str, image_column: str) -> Iterator[Item]:
    if source == STDIN:
        yield from _listed(sys.stdin, "")
        return
    suffix = os.path.splitext(source)[1].lower()
    read = _READERS.get(suffix)
    with _sentence(source):
        if read is not None:
            yield from read(source, image_column)
        elif is_address(source):
            yield from _below_address(source, suffix)
        elif os.path.isdir(source):
            yield from _below(source)
        else:
            yield Item(source)  # an image, or a row that says that it is none


# Folders


def _below(folder: str) -> Iterator[Item]:
    """The images in a folder at any depth, by name; only one folder is listed at a time."""
    with os.scandir(folder) as entries:
        names = sorted((e.name, e.is_dir()) for e in entries if not e.name.startswith("."))
    for name, is_folder in names:
        path = os.path.join(folder, name)
        if is_folder:
            if not os.path.islink(path):  # it could lead back up
                yield from _below(path)
        elif _is_image(name):
            yield Item(path)


def _below_address(source: str, suffix: str) -> Iterator[Item]:
    if suffix in _IMAGES:
        yield Item(source)
        return
    system, path = file_systems().core.url_to_fs(source)
    for found in sorted(system.find(path)):
        if _is_image(found):
            yield Item(system.unstrip_protocol(found))


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in _IMAGES


# Files that list images, or hold them


def _list_file(source: str, image_column: str) -> Iterator[Item]:
    with opened(source) as file:
        yield from _listed(io.TextIOWrapper(file, encoding="utf-8-sig"), source)


def _listed(lines: Iterator[str] | IO[str], source: str) -> Iterator[Item]:
    for line in lines:
        if line.strip():
            yield Item(_beside(source, line.strip("\r\n")))


def _csv_file(source: str, image_column: str) -> Iterator[Item]:
    with opened(source) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        head = text.readline()
        separator = max(",;\t", key=head.count)
        rows = csv.DictReader(itertools.chain([head], text), delimiter=separator, strict=True)
        column = find_column(source, list(rows.fieldnames or ()), "image", image_column or None)
        for row in rows:
            yield Item(_beside(source, row[column] or ""))


def _parquet_file(source: str, image_column: str) -> Iterator[Item]:
    with opened(source) as file:
        table = _parquet(file)
        names = table.schema_arrow.names
        column = find_column(source, names, "image", image_column or None)
        number = itertools.count()
        for batch in table.iter_batches(_ROWS, columns=[column]):
            for value in batch.column(0).to_pylist():
                yield _cell(source, next(number), value)


def _parquet(source: str | IO[bytes]) -> Any:
    parquet = require("pyarrow.parquet", extra="hub-data", purpose="Reading parquet")
    return parquet.ParquetFile(source)


def _cell(source: str, row: int, value: Any) -> Item:
    """A path, bytes, or both, as datasets of the Hub have them."""
    name = f"{source}#{row}"
    if isinstance(value, bytes):
        return Item(name, value)
    if isinstance(value, Mapping) and value.get("bytes") is not None:
        return Item(name, value["bytes"])
    path = value.get("path") if isinstance(value, Mapping) else value
    return Item(_beside(source, str(path))) if path else Item(name, b"")


def _archive(source: str, image_column: str) -> Iterator[Item]:
    """The images in a tar file in its own order, which is read once from front to back."""
    with opened(source) as file, tarfile.open(fileobj=file, mode="r|*") as archive:
        for member in archive:
            if member.isfile() and _is_image(member.name):
                content = archive.extractfile(member)
                assert content is not None
                yield Item(f"{source}/{member.name}", content.read())
            archive.members = []  # type: ignore[attr-defined]  # it would keep them all


def _beside(source: str, path: str) -> str:
    """A path in a file, which is relative to the file's folder."""
    if is_address(path) or os.path.isabs(path) or not source:
        return path
    folder = source.rpartition("/")[0] if is_address(source) else os.path.dirname(source)
    return f"{folder}/{path}" if folder else path


_READERS: dict[str, Callable[[str, str], Iterator[Item]]] = {
    ".txt": _list_file,
    ".csv": _csv_file,
    ".tsv": _csv_file,
    ".parquet": _parquet_file,
    ".tar": _archive,
    ".tgz": _archive,
    ".gz": _archive,
}
