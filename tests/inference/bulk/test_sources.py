"""Images come from folders, tables, archives, lists and addresses, in the same order every time."""

from __future__ import annotations

import gc
import inspect
import io
import os
import sys
import tarfile
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from tests.support.images import encoded, gradient

from engram import EngramError
from engram.images.decode import BadImage
from engram.inference.bulk.decoders import Item, some_of
from engram.inference.bulk.sources import count_items, read_items

PNG = encoded(gradient(), "PNG")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b/2.png", "b/1.JPG", "a.webp", ".hidden.png", "notes.md", "b/.x/3.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PNG)
    return tmp_path / "photos"


def names(*sources: object, column: str = "") -> list[str]:
    return [item.name for item in read_items([str(source) for source in sources], column)]


def test_a_folder_is_read_by_name_at_any_depth(folder: Path) -> None:
    expected = [str(folder / name) for name in ("a.webp", "b/1.JPG", "b/2.png")]
    assert names(folder) == expected
    assert names(folder / "b", folder / "a.webp") == [*expected[1:], expected[0]]


def test_images_are_counted_where_that_is_cheap(folder: Path) -> None:
    (folder / "list.txt").write_text("a.webp\nb/2.png\n")
    cells = pyarrow.table({"image": ["a.webp"] * 5})
    pyarrow.parquet.write_table(cells, folder / "t.parquet")
    given = [str(folder / "b"), str(folder / "list.txt"), str(folder / "t.parquet")]
    assert count_items(given) == 2 + 2 + 5
    assert count_items([*given, "-"]) == 0
    assert count_items(["shards/0.tar"]) == 0


def test_a_link_to_a_folder_above_ends_nowhere(folder: Path) -> None:
    (folder / "b" / "up").symlink_to(folder)
    assert len(names(folder)) == 3


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".tsv", ".parquet"])
def test_paths_in_a_file_start_at_its_folder(folder: Path, suffix: str) -> None:
    table = folder / f"list{suffix}"
    paths = ["b/2.png", str(folder / "a.webp")]
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"image": paths, "n": [1, 2]}), table)
    elif suffix == ".txt":
        table.write_text("\n".join(paths) + "\n\n")
    else:
        mark = "\t" if suffix == ".tsv" else ";"
        table.write_text("\n".join(["﻿image" + mark + "n", *(p + mark + "1" for p in paths)]))
    assert names(table) == [str(folder / "b/2.png"), str(folder / "a.webp")]


def test_a_column_can_be_named(folder: Path) -> None:
    table = folder / "t.csv"
    table.write_text("first,second\na.webp,b/2.png\n")
    assert names(table, column="second") == [str(folder / "b/2.png")]


@pytest.mark.parametrize("struct", [True, False])
def test_a_parquet_file_may_hold_the_images(tmp_path: Path, struct: bool) -> None:
    cells = [{"bytes": PNG, "path": None}] * 3 if struct else [PNG] * 3
    table = tmp_path / "images.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"image": cells}), table)
    found = list(read_items([str(table)]))
    assert [item.name for item in found] == [f"{table}#{i}" for i in range(3)]
    assert all(item.read() == PNG for item in found)


@pytest.mark.parametrize(("name", "mode"), [("a.tar", "w"), ("a.tar.gz", "w:gz")])
def test_an_archive_is_read_from_front_to_back(tmp_path: Path, name: str, mode: str) -> None:
    with tarfile.open(tmp_path / name, mode) as archive:  # type: ignore[call-overload]
        for member in ("0001.jpg", "0001.json", "0000.png"):
            info = tarfile.TarInfo(member)
            info.size = len(PNG)
            archive.addfile(info, io.BytesIO(PNG))
    found = list(read_items([str(tmp_path / name)]))
    assert [item.name.rpartition("/")[2] for item in found] == ["0001.jpg", "0000.png"]
    assert found[0].read() == PNG


def test_addresses_are_read_by_fsspec(folder: Path) -> None:
    system = fsspec.filesystem("memory")
    for name in ("one/b.png", "one/a.jpg", "one/notes.txt"):
        system.pipe(f"/{name}", PNG)
    system.pipe("/list.txt", b"one/a.jpg\n")
    found = list(read_items(["memory://one"]))
    assert [item.name for item in found] == ["memory:///one/a.jpg", "memory:///one/b.png"]
    assert found[0].read() == PNG
    [listed] = read_items(["memory://list.txt"])
    assert listed.read() == PNG


def test_standard_input_is_a_list_of_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a.png\nb.png\n"))
    assert names("-") == ["a.png", "b.png"]


# Entries of strangers


def test_odd_entries_of_a_folder_are_images_that_cannot_be_read(folder: Path) -> None:
    os.mkfifo(folder / "b" / "pipe.png")
    (folder / "b" / "self.png").symlink_to(folder / "b" / "self.png")
    (folder / "b" / "zero.png").symlink_to("/dev/zero")
    Path(os.fsdecode(os.fsencode(folder) + b"/b/\xff.png")).write_bytes(PNG)
    found = {os.path.basename(item.name): item for item in read_items([str(folder)])}
    assert found.pop("\\udcff.png").read() == PNG
    for name in ("pipe.png", "self.png", "zero.png"):
        with pytest.raises(BadImage, match=name):
            found.pop(name).read()
    assert list(found) == ["a.webp", "1.JPG", "2.png"]


def test_a_folder_may_be_deeper_than_python_calls(folder: Path) -> None:
    deep = folder.joinpath(*"d" * 200)
    deep.mkdir(parents=True)
    (deep / "deep.png").write_bytes(PNG)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 100)
    try:
        assert names(folder)[-1] == str(deep / "deep.png")
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".parquet", "-"])
def test_names_that_are_no_utf8_are_read(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(os.fsdecode(b"\xff.png")).write_bytes(PNG)
    source = tmp_path / f"list{suffix}"
    if suffix == ".parquet":
        cells = pyarrow.array([b"\xff.png"]).view(pyarrow.string())
        pyarrow.parquet.write_table(pyarrow.table({"image": cells}), source)
    elif suffix == "-":
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff.png\n"), "utf-8"))
    else:
        source.write_bytes((b"image\n" if suffix == ".csv" else b"") + b"\xff.png\n")
    [item] = read_items(["-" if suffix == "-" else str(source)])
    assert item.read() == PNG
    assert item.name.encode().endswith(b"\\udcff.png")


def test_a_line_that_is_too_long_is_an_image_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long = "x" * 3_000_000
    monkeypatch.setattr("sys.stdin", io.StringIO(f"a.png\n{long}\nb.png\n{long}"))
    found = list(read_items(["-"]))
    assert [item.problem == "" for item in found] == [True, False, True, False]
    assert all(len(item.name) < 200 for item in found)


@pytest.mark.parametrize("row", ["x" * 5_000_000, '"a\n",' * 1_000_000])
def test_a_row_of_a_table_has_a_limit(tmp_path: Path, row: str) -> None:
    (tmp_path / "t.csv").write_text(f"image,n\na.png,1\n{row}\n")
    found = read_items([str(tmp_path / "t.csv")])
    assert next(found).name.endswith("a.png")
    with pytest.raises(EngramError, match=r"t\.csv .* line"):
        next(found)


def test_a_small_parquet_file_does_not_become_gigabytes(tmp_path: Path) -> None:
    """One value in the dictionary, and rows that repeat it: 1 kB in the file."""
    table = tmp_path / "t.parquet"
    cells = pyarrow.DictionaryArray.from_arrays([0] * 256, [b"\0" * 8_000_000])
    options = {"compression": "zstd", "dictionary_pagesize_limit": 2**30, "store_schema": False}
    pyarrow.parquet.write_table(pyarrow.table({"image": cells}), table, **options)
    before = pyarrow.total_allocated_bytes()
    items = read_items([str(table)])
    assert [len(next(items).read()) for _ in range(3)] == [8_000_000] * 3
    assert pyarrow.total_allocated_bytes() - before < 600_000_000


def test_a_column_holds_paths_or_images(tmp_path: Path) -> None:
    table = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"image": [[b"x"]]}), table)
    with pytest.raises(EngramError, match="neither paths nor images"):
        names(table)


def test_images_that_are_held_together_have_a_limit() -> None:
    items = (Item(str(i), b"\0" * 2**25) for i in range(20))
    assert len(some_of(items, 8)) == 2
    assert len(some_of((Item(str(i)) for i in range(20)), 8)) == 8


@pytest.mark.parametrize(("name", "head"), [("t.txt", ""), ("t.csv", "image\r\n")])
def test_text_in_utf16_is_read(tmp_path: Path, name: str, head: str) -> None:
    (tmp_path / name).write_bytes(f"{head}ä.png\r\nb.png".encode("utf-16"))
    found = [item.name for item in read_items([str(tmp_path / name)])]
    assert found == [f"{tmp_path}/ä.png", f"{tmp_path}/b.png"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("t.csv", b"nothing,of\nuse,here\n"),
        ("a.tar", b"no archive"),
        ("p.parquet", b"PAR1"),
    ],
)
def test_what_cannot_be_read_is_a_sentence(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(EngramError, match=name):
        names(tmp_path / name)


def test_an_archive_is_forgotten_as_it_is_read(tmp_path: Path) -> None:
    """A tar file of a million images must not become a list of a million members."""
    archive = tmp_path / "many.tar"
    with tarfile.open(archive, "w") as tar:
        for i in range(50):
            info = tarfile.TarInfo(f"{i}.png")
            info.size = len(PNG)
            tar.addfile(info, io.BytesIO(PNG))
    del tar, info
    gc.collect()  # what was written, and what other tests left
    items = read_items([str(archive)])
    assert [next(items).name for _ in range(49)][-1].endswith("48.png")
    assert sum(type(one) is tarfile.TarInfo for one in gc.get_objects()) < 5
