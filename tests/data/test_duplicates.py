"""The same picture in two splits, or with two labels, is found by its bytes."""

from pathlib import Path

import numpy as np
import pytest
from tests.support.datasets import write_class_folders, write_image

from engram.data.datasets import Dataset, Splits, load
from engram.data.overview import Duplicates, across_splits, contradictions, find_duplicates


def duplicates(splits: Splits, most: int | None = None) -> Duplicates | None:
    samples = [(split, i) for split in splits.datasets.values() for i in range(len(split))]
    return find_duplicates(samples, most)


def names(pairs: list[tuple[tuple[Dataset, int], tuple[Dataset, int]]]) -> list[list[str]]:
    return [["/".join(d.sample_name(i).split("/")[-3:]) for d, i in pair] for pair in pairs]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number, split in enumerate(("train", "test")):
        for colour in ("blue", "red"):
            for i in range(3):
                shade = 10 * number + 3 * (colour == "red") + i
                write_image(tmp_path / split / colour / f"{i}.png", colour, shade)
    return tmp_path


def test_different_pictures_are_no_duplicates(photos: Path) -> None:
    found = duplicates(load(photos))
    assert found is not None
    assert found == []


def test_copies_in_two_splits_and_with_two_labels_are_found(photos: Path) -> None:
    original = (photos / "train/red/0.png").read_bytes()
    (photos / "test/red/copy.png").write_bytes(original)
    (photos / "train/blue/copy.png").write_bytes(original)
    found = duplicates(load(photos))
    assert found is not None
    assert len(found) == 1
    assert names(across_splits(found)) == [["test/red/copy.png", "train/blue/copy.png"]]
    assert names(contradictions(found)) == [["train/blue/copy.png", "train/red/0.png"]]


def test_a_difference_outside_of_the_piece_that_is_compared_first_counts(photos: Path) -> None:
    noise = np.random.default_rng(0).bytes(20_000)
    (photos / "train/red/a.png").write_bytes(b"a" + noise)
    (photos / "test/red/a.png").write_bytes(b"b" + noise)
    found = duplicates(load(photos))
    assert found is not None
    assert found == []


def test_arrays_are_compared_too(tmp_path: Path) -> None:
    pixels = np.arange(4 * 64, dtype=np.uint8).reshape(4, 8, 8)
    labels = np.array([0, 1, 0, 1])
    path = tmp_path / "a.npz"
    np.savez(path, x_train=pixels, y_train=labels, x_test=pixels[1:3], y_test=labels[1:3])
    found = duplicates(load(path))
    assert found is not None
    assert len(across_splits(found)) == 2
    assert contradictions(found) == []


def test_too_many_candidates_are_not_read(tmp_path: Path) -> None:
    folder = write_class_folders(tmp_path, {"blue": 3, "red": 3})
    for path in folder.rglob("*.png"):
        path.write_bytes(bytes(100))
    splits = load(folder)
    assert duplicates(splits, most=5) is None
    found = duplicates(splits, most=6)
    assert found is not None
    assert [len(group) for group in found] == [6]


def test_a_file_that_is_gone_is_no_duplicate(photos: Path) -> None:
    (photos / "test/red/copy.png").write_bytes((photos / "train/red/0.png").read_bytes())
    splits = load(photos)
    (photos / "test/red/copy.png").unlink()
    found = duplicates(splits)
    assert found is not None
    assert found == []
