"""Images in tar files, which are read once from front to back and may be compressed with gzip.

Python's tarfile takes a damaged header for the end of an archive, does not compare the checksum of
gzip, and reads whatever a header declares. Here all that is damaged is an error that says where it
is, and nothing is read before its size is known to be within a limit.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zlib
from collections.abc import Iterator
from typing import IO

from engram.data.folders import SUFFIXES
from engram.errors import EngramError
from engram.images.decode import MAX_IMAGE_BYTES
from engram.inference.bulk.addresses import open_source
from engram.inference.bulk.decoders import Item
from engram.util.text import storage, utf8

_BLOCK = tarfile.BLOCKSIZE
_PIECE = 1 << 20  # bytes that are read at once
_MOST_EXTENSION = 1 << 20  # bytes of a long name, or of the fields in front of a member
_MOST_PADDING = 1 << 16  # bytes of zeros at the end; tar writes about 10,000, for tapes some more
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_WITHOUT_DATA = (
    tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
)  # fmt: skip


class DamagedArchive(EngramError):
    """An archive that cannot be read to its end."""

    doubtful = 0  # images read before, which may be wrong: gzip has its checksum at the end


def is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def tar_items(source: str) -> Iterator[Item]:
    """The images in a tar file, in its own order, until its end or a DamagedArchive."""
    with open_source(source) as file:
        archive = _Archive(source, file)
        try:
            yield from archive.items()
        except EOFError:
            raise archive.damaged("the compressed data end there") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            damaged = archive.damaged(f"its compressed data are wrong there or before ({error})")
            damaged.doubtful = archive.images
            raise damaged from error


class _Archive:
    """A tar file and how far it was read; `place` is counted in what was unpacked."""

    def __init__(self, source: str, file: IO[bytes]) -> None:
        magic = file.read(2)
        file.seek(0)
        self.compressed = magic == b"\x1f\x8b"
        self.file: IO[bytes] = gzip.GzipFile(fileobj=file) if self.compressed else file  # type: ignore[assignment]
        self.source, self.place, self.images = source, 0, 0

    def items(self) -> Iterator[Item]:
        """The images, each after the header behind it: damage to that may begin in the image.

        An image that was given is not held any longer: the next may be as large.
        """
        image, long_name, fields = list[Item](), b"", dict[bytes, bytes]()
        while (header := self._header()) is not None:
            yield from self._pop(image)
            block, member = header
            if member.type == tarfile.GNUTYPE_LONGNAME:
                long_name = self._extension(member.size).partition(b"\0")[0]
                continue
            if member.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
                fields = self._fields(self._extension(member.size))
                continue
            if member.type in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
                self._member(member.size, keep=False)
                continue
            sparse = self._is_sparse(block, member.type, fields)
            size = self._size(fields.get(b"size"), member.size)
            other = fields.get(b"GNU.sparse.name") or fields.get(b"path") or long_name
            name = other.decode(errors="surrogateescape") if other else member.name
            long_name, fields = b"", {}
            wanted = member.type != tarfile.DIRTYPE and is_image(name)
            problem = _problem(member.type, size, sparse)
            read = member.type not in _WITHOUT_DATA
            data = self._member(size, keep=wanted and not problem) if read else b""
            if wanted:
                place = f"{self.source}/{utf8(name).decode()}"
                image.append(Item(place, None if problem else data, problem=problem))
            del data
        yield from self._pop(image)

    def _pop(self, image: list[Item]) -> Iterator[Item]:
        if image:
            self.images += 1
            yield image.pop()

    # Headers

    def _header(self) -> tuple[bytes, tarfile.TarInfo] | None:
        """The next header, as it is and parsed; None at the end of the archive."""
        place, block = self.place, self._read(_BLOCK)
        if block == bytes(_BLOCK):
            self._check_end(place)
            return None
        if not block:
            add = f" (if that is all, add it: head -c {2 * _BLOCK} /dev/zero >> {self.source})"
            what = "its end is missing" + ("" if self.compressed or not place else add)
            raise self.damaged(what, place)
        if len(block) < _BLOCK:
            raise self.damaged("it ends inside of a header", place)
        try:
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise self.damaged(f"the header there is not valid ({error})", place) from None
        self._size(None, member.size)
        return block, member

    def _check_end(self, place: int) -> None:
        """Refuse anything but zeros behind the end; a header that became zeros is none."""
        while piece := self._read(_PIECE):
            if piece.count(0) < len(piece):
                what = "an end is there, and more behind it: a lost header, or a second archive"
                raise self.damaged(what, place)
            if self.place - place > _MOST_PADDING:  # a file that was never written to its end
                raise self.damaged("from there on it has nothing but zeros", place)

    def _is_sparse(self, block: bytes, kind: bytes, fields: dict[bytes, bytes]) -> bool:
        """Whether the member has holes; the blocks that list more of them are read."""
        if kind == tarfile.GNUTYPE_SPARSE:
            more = block[482]
            while more:
                more = self._member(_BLOCK)[504]
            return True
        return any(name.startswith(b"GNU.sparse.") for name in fields)

    def _extension(self, size: int) -> bytes:
        """A long name, or fields, in front of a member."""
        if size > _MOST_EXTENSION:
            raise self.damaged(f"{storage(size)} in front of a file are no name")
        return self._member(size)

    def _fields(self, data: bytes) -> dict[bytes, bytes]:
        """The fields of pax, such as `18 path=photo.png` with a line break."""
        fields, begin = dict[bytes, bytes](), 0
        while begin < len(data) and data[begin]:
            digits = data[begin : begin + 20].partition(b" ")[0]
            end = begin + (int(digits) if digits.isdigit() else 0)
            name, equals, value = data[begin + len(digits) + 1 : end - 1].partition(b"=")
            if not equals or end > len(data) or data[end - 1 : end] != b"\n":
                raise self.damaged("the fields before it are not valid")
            fields[name], begin = value, end
        return fields

    def _size(self, written: bytes | None, size: int) -> int:
        """The size of a member; a field of pax may replace that of the header."""
        if written is not None:
            size = int(written) if written.isdigit() and len(written) < 20 else -1
        if size < 0:
            raise self.damaged("the header before it has no valid size")
        return size

    # Bytes

    def _read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.place += len(data)
        return data

    def _member(self, size: int, keep: bool = True) -> bytes:
        """The bytes of a member without its padding: in memory once, or never if not kept."""
        data, left = io.BytesIO(), size + -size % _BLOCK
        while left:
            piece = self._read(min(left, _PIECE))
            if not piece:
                raise self.damaged("it ends inside of a file")
            left -= len(piece)
            if keep:
                data.write(piece)
        data.truncate(size)
        return data.getvalue()

    def damaged(self, what: str, place: int | None = None) -> DamagedArchive:
        at = self.place if place is None else place
        unpacked = " (unpacked)" if self.compressed else ""
        if not at:
            what += "; a .tar or .tar.gz file was expected"
        return DamagedArchive(f"{self.source} is damaged at byte {at:,}{unpacked}: {what}.")


def _problem(kind: bytes, size: int, sparse: bool) -> str:
    """Why a member with the name of an image is none, as the end of a sentence."""
    if sparse:
        return "it is packed as a sparse file; pack the archive without --sparse"
    if kind not in _REGULAR:
        return "the archive has a link or a device there, and no file"
    if size > MAX_IMAGE_BYTES:
        limit = storage(MAX_IMAGE_BYTES)
        return f"it has {storage(size)}, which is more than the limit of {limit}"
    return ""
