"""Archives: what is damaged is said with its place, and nothing is read beyond a limit."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.images import encoded, gradient

from engram.images.decode import MAX_IMAGE_BYTES, BadImage
from engram.inference.bulk.decoders import Item
from engram.inference.bulk.sources import read_items
from engram.inference.bulk.tar_files import DamagedArchive

PNG = encoded(gradient(), "PNG")
STEP = 512 + len(PNG) + -len(PNG) % 512  # from one header to the next


def member(name: str, data: bytes = PNG, size: int | None = None, **fields: object) -> bytes:
    """A header and its data; `size` is what the header declares."""
    info = tarfile.TarInfo(name)
    info.size = len(data) if size is None else size
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


END = bytes(1024)
FIVE = b"".join(member(f"{i}.png") for i in range(5)) + END


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def read(path: Path, data: bytes) -> list[Item]:
    path.write_bytes(data)
    return list(read_items([str(path)]))


def read_until_damage(path: Path, data: bytes) -> tuple[list[str], DamagedArchive]:
    path.write_bytes(data)
    read: list[Item] = []
    with pytest.raises(DamagedArchive, match=f"{path.name} is damaged at byte") as caught:
        read.extend(read_items([str(path)]))
    assert all(item.read() == PNG for item in read)
    return [item.name.rpartition("/")[2] for item in read], caught.value


@pytest.mark.parametrize(
    ("data", "images", "place"),
    [
        (b"tar", 0, 0),
        (b"", 0, 0),
        (flipped(FIVE, 2 * STEP + 10), 1, 2 * STEP),
        (FIVE[: 2 * STEP + 100], 1, 2 * STEP),
        (FIVE[: 2 * STEP], 1, 2 * STEP),
        (FIVE[: 2 * STEP + 600], 2, 2 * STEP + 600),
        (FIVE[: 2 * STEP] + bytes(512) + FIVE[2 * STEP + 512 :], 1, 2 * STEP),
        (FIVE[:700] + bytes(2 * STEP) + FIVE[700 + 2 * STEP :], 0, STEP),
        (FIVE + FIVE, 4, 5 * STEP),
        (FIVE[: 2 * STEP] + bytes(3 << 20), 1, 2 * STEP),
        (FIVE[: 2 * STEP] + member("x", b"", type=b"x", size=-5) + END, 1, 2 * STEP + 512),
        (FIVE[: 2 * STEP] + member("x", b"9 path=", type=b"x") + END, 2, 2 * STEP + 1024),
    ],
    ids=[
        *("three bytes", "empty", "flipped header", "cut header", "cut between members"),
        *(
            "cut member",
            "header of zeros",
            "zeros from a file on",
            "two archives",
            "zeros",
            "negative size",
            "bad fields",
        ),
    ],
)
def test_damage_is_said_with_its_place(
    tmp_path: Path, data: bytes, images: int, place: int
) -> None:
    names, error = read_until_damage(tmp_path / "a.tar", data)
    assert names == [f"{i}.png" for i in range(images)]
    assert f"byte {place:,}:" in str(error)
    assert error.doubtful == 0


def test_one_wrong_byte_in_gzip_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    """At any place: images before it may be wrong, for gzip compares its checksum at the end."""
    stored = gzip.compress(FIVE, 0)  # a wrong byte is one of a picture, and no error of deflate
    for place in range(20, len(stored), 97):
        path = tmp_path / "a.tar.gz"
        path.write_bytes(flipped(stored, place))
        read = []
        with pytest.raises(DamagedArchive, match="damaged at byte") as caught:
            read.extend(read_items([str(path)]))
        assert caught.value.doubtful in (0, len(read))
        assert caught.value.doubtful or all(item.data == PNG for item in read)


def test_a_gzip_that_ends_early_has_good_images_before(tmp_path: Path) -> None:
    data = gzip.compress(FIVE, 0)
    names, error = read_until_damage(tmp_path / "a.tgz", data[: len(data) // 2])
    assert (len(names), error.doubtful) == (2, 0)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_are_those_of_tarfile(tmp_path: Path, format: int) -> None:
    path, pictures = tmp_path / "a.tar", ["a.png", "f" * 90 + "/" + "g" * 90 + ".png"]
    if format != tarfile.USTAR_FORMAT:
        pictures += ["h" * 300 + ".png", "é" * 60 + ".png"]
    with tarfile.open(path, "w", format=format) as archive:
        for name in ("folder.png", *pictures):
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if name == "folder.png" else tarfile.REGTYPE
            info.size = 0 if info.isdir() else len(PNG)
            archive.addfile(info, io.BytesIO(PNG))
    found = list(read_items([str(path)]))
    assert [item.name for item in found] == [f"{path}/{name}" for name in pictures]
    assert all(item.read() == PNG for item in found)


def sparse(real: int) -> bytes:
    """A member of an old GNU archive that has a byte and holes: all in all `real` bytes."""
    block = bytearray(member("x.png", b"", size=512, type=tarfile.GNUTYPE_SPARSE))
    block[386:410] = b"%011o\0%011o\0" % (0, 512)
    block[483:495] = b"\x80" + struct.pack(">3xQ", real)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + bytes(512)


def pax_sparse(real: int) -> bytes:
    field = b"GNU.sparse.realsize=%d\n" % real
    whole = b"%d %s" % (len(field) + 3, field)
    return member("x", whole, type=b"x") + member("x.png", bytes(512))


@pytest.mark.parametrize(
    "hostile",
    [
        sparse(10**18),
        sparse(3 * 10**9),
        pax_sparse(10**18),
        member("x.png", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        member("x.png", b"", type=tarfile.LNKTYPE, linkname="0.png", size=77),
        member("x.png", b"", type=tarfile.FIFOTYPE),
    ],
    ids=["10^18 bytes of holes", "3 GB of holes", "fields", "link", "hard link", "FIFO"],
)
def test_an_entry_that_is_no_file_is_a_row_with_an_error(tmp_path: Path, hostile: bytes) -> None:
    data = member("0.png") + hostile + member("1.png") + END
    first, odd, last = read(tmp_path / "a.tar", data)
    assert (first.read(), last.read()) == (PNG, PNG)
    with pytest.raises(BadImage, match=r"x\.png"):
        odd.read()


def test_an_image_above_the_limit_is_skipped_and_those_behind_it_are_read(tmp_path: Path) -> None:
    size = MAX_IMAGE_BYTES + 1
    zeros = gzip.compress(bytes(1 << 24))
    large = gzip.compress(member("x.png", b"", size=size)) + zeros * (size >> 24)
    rest = gzip.compress(bytes(512) + member("1.png") + END)
    (tmp_path / "a.tar.gz").write_bytes(large + rest)
    tracemalloc.start()
    odd, last = read_items([str(tmp_path / "a.tar.gz")])
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()
    assert last.read() == PNG
    with pytest.raises(BadImage, match="more than the limit"):
        odd.read()


@pytest.mark.parametrize(
    "hostile",
    [
        lambda: member("x.png", b"", size=10**18),
        lambda: member("x", b"", size=10**18),
        lambda: member("x", b"", size=3 * 10**9, type=tarfile.GNUTYPE_LONGNAME),
        lambda: member("x", b"", size=3 * 10**9, type=tarfile.XHDTYPE),
        lambda: member("x", b"5 a=\n" * 30_000, type=tarfile.XHDTYPE),
        lambda: member("x", b"", type=tarfile.XHDTYPE) * 5000,
    ],
    ids=["image", "file", "long name", "fields", "many fields", "many headers"],
)
def test_what_is_declared_costs_nothing(tmp_path: Path, hostile: Callable[[], bytes]) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(hostile())
    tracemalloc.start()
    with pytest.raises(DamagedArchive):
        list(read_items([str(path)]))
    assert tracemalloc.get_traced_memory()[1] < 40e6
    tracemalloc.stop()
