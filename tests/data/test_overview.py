"""What is understood of data is said: splits, classes, sizes, and what is wrong with it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.support.datasets import write_class_folders, write_image
from tests.support.masks import write_masks

from engram.data import overview
from engram.data.datasets import Splits, load
from engram.data.overview import describe, find_leaks, warnings


def described(splits: Splits, **options: Any) -> tuple[Any, dict[str, str], list[Any]]:
    """The document, the rows and the table."""
    found = describe(splits, **options)
    return found.document, dict(found.rows), [found.columns, *found.table]


def test_splits_classes_sizes_and_examples_are_described(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train", {"blue": 12, "red": 5})
    write_class_folders(tmp_path / "test", {"blue": 1})
    write_image(tmp_path / "test" / "red" / "x.png", "red", 200)
    document, rows, table = described(load(tmp_path))
    assert rows["kind"] == "classification, 2 classes"
    assert rows["splits"] == "train 17, test 2; by the folders train/ and test/"
    assert "a tenth of train is held out" in rows["validation"]
    assert rows["pixels"] == "12x10"
    assert table == [("class", "train", "test"), ("blue", "12", "1"), ("red", "5", "1")]
    assert document["classes"][0] == {"name": "blue", "train": 12, "test": 1}
    assert [one["label"] for one in document["examples"]] == ["blue", "red"]
    assert document["sizes"]["median"] == [12, 10]
    same = [str(tmp_path / split / "blue" / "000.png") for split in ("test", "train")]
    assert document["duplicates"]["across_splits"] == [same]
    assert f"1 image of one split in another too ({same[0]} and {same[1]})" in rows["duplicates"]


def test_unreadable_images_are_named_and_truncated_ones_by_a_check(folder: Path) -> None:
    (folder / "red" / "empty.png").write_bytes(b"")
    whole = (folder / "red" / "000.png").read_bytes()
    (folder / "red" / "torn.png").write_bytes(whole[: len(whole) - 25])
    splits = load(folder)
    document, rows, _ = described(splits)
    assert document["unreadable"] == [f"{folder}/red/empty.png: the file is empty"]
    assert f"{folder}/red/empty.png: the file is empty" in rows["unreadable"]
    document, _, _ = described(splits, check=True)
    assert [one.split(":")[0] for one in document["unreadable"]] == [
        f"{folder}/red/empty.png",
        f"{folder}/red/torn.png",
    ]


def test_of_many_images_a_sample_is_looked_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "SAMPLE", 7)
    document, rows, _ = described(load(folder))
    assert (document["looked_at"], document["images"]) == (7, 30)
    assert "by the headers of 7 of 30 images" in rows["pixels"]
    assert described(load(folder), check=True)[0]["looked_at"] == 30


def test_unequal_and_small_classes_are_pointed_out(tmp_path: Path) -> None:
    folder = write_class_folders(tmp_path, {"blue": 24, "green": 6, "red": 3})
    hints = described(load(folder))[0]["hints"]
    assert hints[0].startswith("blue has 8 times as many training images as red (24 and 3)")
    assert hints[0].endswith("try fit with --balance weights")
    assert hints[1] == "fewer than 5 training images: red"
    assert described(load(folder, classes=["blue", "green", "red", "x"]))[0]["hints"][0] == (
        "x has no training images"
    )


def test_of_many_classes_the_largest_and_the_smallest_are_listed(tmp_path: Path) -> None:
    labels = np.repeat(np.arange(60), np.arange(60) + 1)
    pixels = np.zeros((len(labels), 2, 2), np.uint8)
    np.savez(tmp_path / "a.npz", images=pixels, labels=labels)
    document, _, table = described(load(tmp_path / "a.npz"))
    assert len(document["classes"]) == 60
    assert table[1] == ("59", "60")
    assert table[21][0] == "… 20 others"
    assert table[-1] == ("0", "1")
    assert len(table) == 42


@pytest.mark.parametrize("kind", ["multilabel", "regression", "segmentation"])
def test_every_kind_is_described(tmp_path: Path, kind: str) -> None:
    if kind == "segmentation":
        splits = load(write_masks(tmp_path, {"1": 1, "2": 2}), kind=kind, ignore=3)
        expected = [("class",), ("1",), ("2",)]
        label = str(tmp_path / "masks" / "1.png")
    else:
        labels = np.array([[0, 1], [1, 1]])
        np.savez(tmp_path / "a.npz", images=np.zeros((2, 2, 2), np.uint8), labels=labels)
        splits = load(tmp_path / "a.npz", kind=kind)
        names = splits.classes
        expected = [("class", "train"), (names[0], "1"), (names[1], "2")]
        label = names[1]
        if kind == "regression":
            rows = [(names[0], "train", "0", "0.5", "1"), (names[1], "train", "1", "1", "1")]
            expected = [("number", "split", "least", "mean", "most"), *rows]
            label = f"{names[0]} 0, {names[1]} 1"
    document, rows_of_text, table = described(splits, check=True)
    assert table == expected
    assert document["examples"][0]["label"] == label
    assert rows_of_text["splits"] == "train 2; the data has no splits of its own"


def test_images_of_test_that_are_in_train_are_leaks(tmp_path: Path) -> None:
    for split, names in (("train", "abcd"), ("test", "cdef")):
        for i, name in enumerate(names):
            folder = tmp_path / "photos" / split / ("one", "two")[i % 2]
            folder.mkdir(parents=True, exist_ok=True)
            tint = (ord(name) * 37) % 256
            Image.new("RGB", (8, 8), (tint, 255 - tint, 7)).save(folder / f"{split}-{name}.png")
    splits = load(tmp_path / "photos")
    leaked = [splits["test"].sample_name(i) for i in find_leaks(splits, "test")]
    assert sorted(Path(name).name for name in leaked) == ["test-c.png", "test-d.png"]
    assert find_leaks(splits, "train") == []
    assert any("2 images of test are also in train" in sentence for sentence in warnings(splits))
