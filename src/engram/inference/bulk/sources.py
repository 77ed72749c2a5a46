"""Sources of many images, read one after the other: nothing is listed before it is needed.

A source is a folder, an image, a list of paths (`.txt`), a table with a column of paths (`.csv`,
`.tsv`, `.parquet`), a table of images (`.parquet`), an archive (`.tar`, as WebDataset has them), or
`-` for paths on standard input. Each may be a path, or an address such as `s3://bucket/folder/`.
"""

from __future__ import annotations

import io
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import IO, Any

from engram.data.folders import SUFFIXES
from engram.data.labels import find_column
from engram.data.tables import csv_rows, open_text
from engram.inference.bulk.addresses import NOWHERE, Allowed, file_systems, is_address, open_source
from engram.inference.bulk.decoders import Item
from engram.inference.bulk.tar_files import is_image, tar_items
from engram.util.parquet import batches, open_parquet, pyarrow
from engram.util.text import explained, first_line

_LINE = 2**16  # characters of a line of a list: a path has 4,096 bytes, an address some thousands
_SHOWN = 80  # characters of a line that is too long
STDIN = "-"
_ARCHIVES = (".tar", ".tgz", ".gz")


def read_items(
    sources: Sequence[str], image_column: str = "", allowed: Allowed = NOWHERE
) -> Iterator[Item]:
    """The images of all sources in their order, which is the same every time.

    `allowed` are the addresses that lists and tables may name; of the sources any may be one.
    """
    for source in sources:
        yield from _items(source, image_column, allowed)


def count_items(sources: Sequence[str], image_column: str = "") -> int:
    """The number of images; 0 if only reading all of them would tell."""
    total = 0
    for source in sources:
        suffix = os.path.splitext(source)[1].lower()
        if source == STDIN or is_address(source) or suffix in _ARCHIVES:
            return 0
        if suffix == ".parquet":
            with _reading(source), open_source(source) as file:
                total += open_parquet(file).metadata.num_rows
        else:
            total += sum(1 for _ in _items(source, image_column, NOWHERE))
    return total


def _reading(source: str) -> AbstractContextManager[None]:
    return explained(lambda error: f"{source} cannot be read: {first_line(error)}.")


def _items(source: str, image_column: str, allowed: Allowed) -> Iterator[Item]:
    suffix = os.path.splitext(source)[1].lower()
    with _reading("Standard input" if source == STDIN else source):
        if source == STDIN:
            if isinstance(sys.stdin, io.TextIOWrapper):
                sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")
            yield from _listed(sys.stdin, "", allowed)
        elif suffix in _LISTS:
            near = allowed.beside(source) if is_address(source) else allowed
            with open_source(source) as file:
                yield from _LISTS[suffix](file, source, near, image_column)
        elif suffix in _ARCHIVES:
            yield from tar_items(source)
        elif is_address(source):
            yield from _below_address(source, suffix)
        elif os.path.isdir(source):
            yield from _below(source)
        else:
            yield Item(source)  # an image, or a row that says that it is none


# Folders


def _below(folder: str) -> Iterator[Item]:
    """The images in a folder at any depth, by name; only one folder is listed at a time.

    A folder below it that cannot be listed is an image that cannot be read.
    """
    waiting = [(folder, True)]
    while waiting:
        path, is_folder = waiting.pop()
        if not is_folder:
            yield Item(path)
            continue
        try:
            waiting += reversed(_entries(path))
        except OSError as error:
            if path == folder:
                raise
            yield Item(path, problem=f"the folder cannot be read ({error.strerror or error})")


def _entries(folder: str) -> list[tuple[str, bool]]:
    """The images and folders in a folder by name, each with whether it is a folder."""
    found = []
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            if entry.name.startswith("."):
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
            if not is_folder and entry.is_symlink() and os.path.isdir(entry.path):
                continue  # it could lead back up
            if is_folder or is_image(entry.name):
                found.append((entry.path, is_folder))
    return found


def _below_address(source: str, suffix: str) -> Iterator[Item]:
    if suffix in SUFFIXES:
        yield Item(source)
        return
    system, path = file_systems().core.url_to_fs(source)
    yield from (Item(system.unstrip_protocol(p)) for p in sorted(system.find(path)) if is_image(p))


# Files that list images, or hold them


def _listed(text: IO[str], source: str, allowed: Allowed) -> Iterator[Item]:
    """The paths of a list; of a line that is too long for one, only the beginning is kept."""
    while line := text.readline(_LINE + 2):
        if line.startswith(("\udcff\udcfe", "\udcfe\udcff")):
            raise ValueError("it is text in UTF-16; save it as UTF-8")
        rest = line
        while rest and not rest.endswith("\n"):
            rest = text.readline(_LINE)
        if line.strip():
            yield _named(source, line.strip("\r\n"), allowed)


def _csv_file(file: IO[bytes], source: str, allowed: Allowed, image_column: str) -> Iterator[Item]:
    column = ""
    for row in csv_rows(open_text(file, "surrogateescape")):  # as names of files may have any bytes
        column = column or find_column(source, list(row), "image", image_column or None)
        yield _named(source, row[column] or "", allowed)


def _parquet_file(
    file: IO[bytes], source: str, allowed: Allowed, image_column: str
) -> Iterator[Item]:
    schema = open_parquet(file).schema_arrow
    column = find_column(source, schema.names, "image", image_column or None)
    _check_type(column, schema.field(column).type)
    number = itertools.count()
    for batch in batches(file, [column]):
        for cell in batch.column(0):
            yield _cell(source, next(number), _value(cell), allowed)


def _check_type(column: str, kind: Any) -> None:
    """A column has text, bytes, nothing, or structs of these; anything else is a ValueError."""
    types = pyarrow("Reading parquet").types
    plain = ("is_string", "is_large_string", "is_binary", "is_large_binary", "is_null")
    kinds = [field.type for field in kind] if types.is_struct(kind) else [kind]
    kinds = [one.value_type if types.is_dictionary(one) else one for one in kinds]
    for one in kinds:
        if not any(getattr(types, check)(one) for check in plain):
            raise ValueError(f"the column {column!r} holds {one}, neither paths nor images")


def _value(cell: Any) -> Any:
    """A cell as Python has it; text that is no UTF-8 keeps its bytes."""
    if hasattr(cell, "items"):  # a struct
        return {name: _value(one) for name, one in cell.items()} if cell.is_valid else None
    try:
        return cell.as_py()
    except UnicodeDecodeError:
        return cell.as_buffer().to_pybytes().decode(errors="surrogateescape")


def _cell(source: str, row: int, value: Any, allowed: Allowed) -> Item:
    """A path, bytes, or both, as datasets of the Hub have them."""
    name = f"{source}#{row}"
    if isinstance(value, bytes):
        return Item(name, value)
    if isinstance(value, Mapping) and value.get("bytes") is not None:
        return Item(name, value["bytes"])
    path = value.get("path") if isinstance(value, Mapping) else value
    return _named(source, str(path), allowed) if path else Item(name, b"")


def _named(source: str, path: str, allowed: Allowed) -> Item:
    """An image that a list or table names; a path is relative to the folder of that file."""
    if len(path) > _LINE:
        return Item(f"{path[:_SHOWN]}…", problem=f"the path has more than {_LINE:,} characters")
    if not (is_address(path) or os.path.isabs(path)):
        folder = source.rpartition("/")[0] if is_address(source) else os.path.dirname(source)
        path = f"{folder}/{path}" if folder else path
    return Item(path, allowed=allowed)


#: Readers of files that name images, by suffix; a Parquet file may hold them too.
_LISTS: dict[str, Callable[[IO[bytes], str, Allowed, str], Iterator[Item]]] = {
    ".txt": lambda file, source, allowed, _: _listed(
        open_text(file, "surrogateescape"), source, allowed
    ),
    ".csv": _csv_file,
    ".tsv": _csv_file,
    ".parquet": _parquet_file,
}
