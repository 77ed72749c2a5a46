"""Parts on disk are the record of what is done, in whatever order they were written."""

from __future__ import annotations

from pathlib import Path

import pytest

from engram import EngramError
from engram.inference.bulk.answers import Batch
from engram.inference.bulk.items import Item
from engram.inference.bulk.parts import Collected, Parts
from engram.inference.bulk.tables import JsonLines

ROWS, IMAGES = 4, 3


def rows(*numbers: int) -> list[dict[str, str]]:
    return [{"image": f"{number}.png"} for number in numbers]


def missing(parts: Parts, images: int) -> list[tuple[int, int, list[str], bool]]:
    items = iter([Item(f"{i}.png") for i in range(images)])
    batches = parts.missing(items, ROWS, IMAGES, lambda found: None)
    return [(b.part, b.number, [item.name for item in b.items], b.last) for b in batches]


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path / "a.jsonl", JsonLines(), {"job": 1}, overwrite=False)


def test_batches_stay_within_their_part(parts: Parts) -> None:
    assert missing(parts, 9) == [
        (0, 0, ["0.png", "1.png", "2.png"], False),
        (0, 3, ["3.png"], True),
        (1, 4, ["4.png", "5.png", "6.png"], False),
        (1, 7, ["7.png"], True),
        (2, 8, ["8.png"], True),
    ]


def test_a_part_that_is_there_is_left_out_wherever_it_is(parts: Parts) -> None:
    parts.write(1, rows(4, 5, 6, 7))
    assert [batch[:2] for batch in missing(parts, 10)] == [(0, 0), (0, 3), (2, 8)]
    assert parts.resumed == 4
    parts.write(2, rows(8, 9))
    parts.write(0, rows(0, 1, 2, 3))
    assert missing(parts, 10) == []
    parts.finish()
    assert JsonLines().images(parts.out) == [f"{i}.png" for i in range(10)]


@pytest.mark.parametrize("images", [3, 4, 5])
def test_a_part_behind_the_end_is_of_other_images(parts: Parts, images: int) -> None:
    parts.write(2, rows(8))
    with pytest.raises(EngramError, match="part-000002"):
        missing(parts, images)


def test_rows_of_a_part_are_collected_in_any_order() -> None:
    collected = Collected()
    batches = [
        Batch(5, 20, number, tuple(map(Item, "abc"[: last - number])), last == 25)
        for number, last in ((20, 22), (22, 24), (24, 25))
    ]
    assert collected.add(batches[1], rows(22, 23)) == []
    assert collected.add(batches[2], rows(24)) == []
    assert collected.add(batches[2], rows(24)) == []  # twice
    assert collected.add(batches[0], rows(20, 21)) == rows(20, 21, 22, 23, 24)
