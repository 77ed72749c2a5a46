"""Parquet files of strangers: read in batches whose size in memory has a limit.

A few kilobytes can hold gigabytes: pages are compressed, and a dictionary page has a value once
that a million rows repeat. The footer says how large all this becomes, but nobody checks that it
says the truth. So the header of every page is read first: a decoder takes as much memory as it
declares, and no value is larger than the page that holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, Any

from engram.util.optional import require

_ROWS = 256  # of a batch
_BATCH = 2**26  # bytes of a batch, unless a single row has more
_SMALL = 2**28  # bytes that a page may have, however small it is in the file
_EXPANSION = 2  # times its size in the file, above that: images do not get smaller
_HEADERS = (2**12, 2**24)  # bytes that are read of a page's header: a few, then enough for any
_DEEP = 16  # structs inside of each other


def batches(file: IO[bytes], columns: Sequence[str] | None = None) -> Iterator[Any]:
    """The record batches of a file, of these columns or of all.

    Raises:
        ValueError: The file is damaged, or a page of it is too large.
    """
    table = open_parquet(file)
    size = file.seek(0, 2)
    for group in range(table.metadata.num_row_groups):
        largest = 1
        for place in _chunks(table, group, columns):
            largest = max(largest, _largest_page(file, size, *place))
        rows = max(1, min(_ROWS, _BATCH // largest))
        yield from table.iter_batches(rows, row_groups=[group], columns=columns)


def open_parquet(file: IO[bytes]) -> Any:
    """The file's footer, and what reads the rest."""
    return pyarrow("Reading parquet", "pyarrow.parquet").ParquetFile(file)


def pyarrow(purpose: str, module: str = "pyarrow") -> Any:
    """The package, or a module of it; `purpose` begins the error where it is missing."""
    return require(module, extra="hub-data", purpose=purpose)


def _chunks(table: Any, group: int, columns: Sequence[str] | None) -> Iterator[tuple[int, int]]:
    """Positions of the columns' pages in the file: begin and length."""
    about = table.metadata.row_group(group)
    for i in range(about.num_columns):
        chunk = about.column(i)
        path = chunk.path_in_schema
        if columns is None or any(path == c or path.startswith(f"{c}.") for c in columns):
            begin = chunk.data_page_offset
            if chunk.dictionary_page_offset and 0 < chunk.dictionary_page_offset < begin:
                begin = chunk.dictionary_page_offset
            yield begin, chunk.total_compressed_size


def _largest_page(file: IO[bytes], size: int, begin: int, length: int) -> int:
    """The bytes of the largest page once it is decompressed."""
    end, largest = begin + length, 0
    if begin < 0 or length < 0 or end > size:
        raise ValueError("a column is outside of the file")
    while begin < end:
        header, taken = _page_header(file, begin)
        whole, compressed = header.get(2, -1), header.get(3, -1)
        if whole < 0 or compressed < 0:
            raise ValueError("the header of a page is damaged")
        if whole > max(_SMALL, _EXPANSION * compressed):
            raise ValueError(
                f"a page of {compressed:,} bytes becomes {whole:,} when it is decompressed; write "
                "the file again with smaller pages"
            )
        largest = max(largest, whole)
        begin += taken + compressed
    return largest


def _page_header(file: IO[bytes], begin: int) -> tuple[dict[int, int], int]:
    """The integers of a page's header by their number, and the bytes that it takes."""
    for most in _HEADERS:  # statistics in it may have long values
        file.seek(begin)
        data = _Thrift(file.read(most))
        try:
            return data.struct(), data.at
        except IndexError:
            continue
    raise ValueError("the header of a page is damaged")


class _Thrift:
    """Thrift's compact protocol, of which only integers are kept."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def struct(self, depth: int = 0) -> dict[int, int]:
        """The integers of a struct by their number; an IndexError if the bytes end before it."""
        if depth > _DEEP:
            raise ValueError("the header of a page is damaged")
        found: dict[int, int] = {}
        number = 0
        while kind := self._byte():
            step, kind = kind >> 4, kind & 15
            number = number + step if step else self._signed()
            value = self._value(kind, depth)
            if value is not None:
                found[number] = value
        return found

    def _value(self, kind: int, depth: int) -> int | None:
        if kind in (1, 2):  # true and false
            return None
        if kind == 3:
            self._byte()
        elif kind in (4, 5, 6):  # integers of 16, 32 and 64 bits
            return self._signed()
        elif kind == 7:  # a double
            self._skip(8)
        elif kind == 8:  # bytes
            self._skip(self._varint())
        elif kind == 12:
            self.struct(depth + 1)
        else:  # lists and maps, which a page's header has not
            raise ValueError("the header of a page is damaged")
        return None

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self.data):
            raise IndexError

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("the header of a page is damaged")

    def _signed(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
