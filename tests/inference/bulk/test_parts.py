"""Parts on disk are the record of what is done, in whatever order they were written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engram import EngramError
from engram.inference.bulk.decoders import HELD, Item
from engram.inference.bulk.parts import Parts
from engram.inference.bulk.table_formats import JsonLines

ROWS, IMAGES = 4, 3


def rows(*numbers: int) -> list[dict[str, str]]:
    return [{"image": f"{number}.png"} for number in numbers]


def write(parts: Parts, part: int, some: list[dict[str, str]]) -> None:
    parts.table.write(parts.folder / f"part-{part:06}.jsonl", some)


def missing(parts: Parts, images: int) -> list[tuple[int, int, list[str]]]:
    items = iter([Item(f"{i}.png") for i in range(images)])
    batches = parts.missing(items, ROWS, IMAGES, lambda found: None)
    return [(b.part, b.number, [item.name for item in b.items]) for b in batches]


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    with Parts(tmp_path / "a.jsonl", JsonLines({}), {"job": 1}, overwrite=False) as parts:
        yield parts


def test_batches_stay_within_their_part(parts: Parts) -> None:
    assert missing(parts, 9) == [
        (0, 0, ["0.png", "1.png", "2.png"]),
        (0, 3, ["3.png"]),
        (1, 4, ["4.png", "5.png", "6.png"]),
        (1, 7, ["7.png"]),
        (2, 8, ["8.png"]),
    ]


def test_a_part_that_is_there_is_left_out_wherever_it_is(parts: Parts) -> None:
    write(parts, 1, rows(4, 5, 6, 7))
    assert [batch[:2] for batch in missing(parts, 10)] == [(0, 0), (0, 3), (2, 8)]
    assert parts.resumed == 4
    write(parts, 2, rows(8, 9))
    write(parts, 0, rows(0, 1, 2, 3))
    assert missing(parts, 10) == []
    parts.finish()
    assert JsonLines({}).images(parts.out) == [f"{i}.png" for i in range(10)]


@pytest.mark.parametrize("images", [3, 4, 5])
def test_a_part_behind_the_end_is_of_other_images(parts: Parts, images: int) -> None:
    write(parts, 2, rows(8))
    with pytest.raises(EngramError, match="part-000002"):
        missing(parts, images)


def test_batches_become_parts_in_any_order(parts: Parts) -> None:
    items = iter([Item(f"{i}.png") for i in range(9)])
    batches = list(parts.missing(items, ROWS, IMAGES, lambda found: None))
    for batch in (batches[1], batches[1], batches[2], batches[4], batches[0]):  # one of them twice
        parts.add(batch, rows(*range(batch.number, batch.number + len(batch.items))))
    assert [path.name for path in parts.folder.glob("part-*")] == ["part-000000.jsonl"]
    parts.add(batches[3], rows(7))
    parts.add_last()
    assert parts.done == 9
    parts.finish()
    assert JsonLines({}).images(parts.out) == [f"{i}.png" for i in range(9)]


# One job at a time, and nothing lost


def other(parts: Parts, overwrite: bool = False) -> Parts:
    return Parts(parts.out, parts.table, parts.identity, overwrite)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_job_on_the_same_output_is_refused(parts: Parts, overwrite: bool) -> None:
    write(parts, 0, rows(0, 1, 2, 3))
    with pytest.raises(EngramError, match="Another process"), other(parts, overwrite):
        pass
    assert missing(parts, 4) == []
    parts.finish()
    with pytest.raises(EngramError, match="exists"), other(parts):
        pass
    assert [path.name for path in parts.out.parent.iterdir()] == ["a.jsonl"]


def test_a_job_without_a_part_leaves_nothing(tmp_path: Path) -> None:
    for job in (1, 2):  # another one may follow
        with Parts(tmp_path / "a.jsonl", JsonLines({}), {"job": job}, overwrite=False):
            pass
        assert list(tmp_path.iterdir()) == []


def test_what_a_killed_job_left_is_no_obstacle(tmp_path: Path) -> None:
    folder = tmp_path / "a.jsonl.parts"
    folder.mkdir()
    (folder / ".engram-0123456789abcdef.tmp").write_bytes(b"{")
    (folder / "_lock").touch()
    with Parts(tmp_path / "a.jsonl", JsonLines({}), {"job": 1}, overwrite=False) as parts:
        assert len(missing(parts, 9)) == 5


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_no_table_is_made_of_fewer_rows_than_images(parts: Parts, lost: int) -> None:
    for part, numbers in enumerate(((0, 1, 2, 3), (4, 5, 6, 7), (8,))):
        write(parts, part, rows(*numbers))
    assert missing(parts, 9) == []
    path = parts.folder / f"part-00000{lost}.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    with pytest.raises(EngramError, match=f"{path.name} has"):
        parts.finish()
    path.unlink()
    with pytest.raises(EngramError, match=f"{path.name} has 0 rows"):
        parts.finish()
    assert not parts.out.exists()


@pytest.mark.parametrize("state", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"9" * 5001])
def test_a_damaged_record_of_the_job_is_a_sentence(tmp_path: Path, state: bytes) -> None:
    def job(overwrite: bool) -> Parts:
        return Parts(tmp_path / "a.jsonl", JsonLines({}), {"job": 1}, overwrite)

    with job(False) as parts:
        write(parts, 0, rows(0))
    (parts.folder / "_job.json").write_bytes(state)
    with pytest.raises(EngramError, match=r"_job\.json.*--overwrite"), job(False):
        pass
    with job(True) as parts:
        assert len(missing(parts, 1)) == 1


@pytest.mark.parametrize("name", ["part-abc", "part-1", "part-٣", "part-", "part-0000001"])
def test_a_file_that_is_no_part_is_a_sentence(parts: Parts, name: str) -> None:
    (parts.folder / f"{name}.jsonl").touch()
    with pytest.raises(EngramError, match="no part"):
        missing(parts, 3)


def test_images_before_an_error_of_the_sources_are_answered(parts: Parts) -> None:
    def items() -> Iterator[Item]:
        yield from map(Item, ("0.png", "1.png"))
        raise EngramError("Damaged.")

    batches = parts.missing(items(), ROWS, IMAGES, lambda found: None)
    assert [len(batch.items) for batch in batches] == [2]
    write(parts, 0, rows(0, 1))
    with pytest.raises(EngramError, match=r"Damaged\. .*2 images are kept"):
        parts.finish()
    assert [batch[:2] for batch in missing(parts, 5)] == [(1, 2)]


def test_large_images_do_not_fill_a_batch(parts: Parts) -> None:
    data = bytes(HELD // 2)
    items = iter([Item(f"{i}.png", data) for i in range(4)])
    batches = parts.missing(items, ROWS, IMAGES, lambda found: None)
    assert [len(batch.items) for batch in batches] == [2, 2]
