"""A table that says which rows are test data never trains on them, whatever the column's name."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.datasets import write_class_folders

from engram.data.datasets import Splits, load
from engram.errors import EngramError

LABELS = ("blue", "red")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_class_folders(tmp_path, {"blue": 3, "red": 3})


def table(root: Path, **columns: list[Any]) -> Path:
    """Six rows with a path, a label and these columns."""
    names = ["path", "label", *columns]
    paths = [f"{label}/{i:03}.png" for i in range(3) for label in LABELS]
    rows = zip(paths, LABELS * 3, *columns.values(), strict=True)
    lines = [",".join(map(str, row)) for row in (names, *rows)]
    path = root / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def sizes(splits: Splits) -> dict[str, int]:
    every = {"train": splits.train, "val": splits.val, "test": splits.test}
    return {name: len(split) for name, split in every.items() if split is not None}


@pytest.mark.parametrize(
    ("column", "cells", "expected"),
    [
        ("fold", ["train", "train", "val", "val", "test", "test"], (2, 2, 2)),
        ("which", ["Training", " train", "DEV", "valid", "Test", "test"], (2, 2, 2)),
        ("is_test", [0, 0, 0, 0, 1, 1], (4, 0, 2)),
        ("isTest", ["no", "no", "no", "no", "yes", "YES"], (4, 0, 2)),
        ("Is Test", ["", "", "", "", "True", "True"], (4, 0, 2)),
        ("is_train", ["True"] * 4 + ["False"] * 2, (4, 0, 2)),
        ("is_val", [0, 0, 0, 0, 1, 1], (4, 2, 0)),
    ],
)
def test_a_column_that_divides_the_rows_is_used(
    pictures: Path, column: str, cells: list[Any], expected: tuple[int, int, int]
) -> None:
    splits = load(table(pictures, **{column: cells}))
    wanted = zip(("train", "val", "test"), expected, strict=True)
    assert sizes(splits) == {name: count for name, count in wanted if count}
    assert splits.split_by == f"the column {column!r}"
    assert not splits.unsplit


def test_flags_divide_the_rows_together(pictures: Path) -> None:
    test, val = [0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0]
    splits = load(table(pictures, is_test=test, is_val=val))
    assert sizes(splits) == {"train": 2, "val": 2, "test": 2}
    assert splits.split_by == "the columns 'is_test' and 'is_val'"
    with pytest.raises(EngramError, match="row 5 is marked for test and val"):
        load(table(pictures, is_test=test, is_val=test))


@pytest.mark.parametrize(
    ("column", "cells"),
    [
        ("fold", [0, 1, 2, 0, 1, 2]),  # of cross-validation: no split is named
        ("is_test", [0, 0, 0, 0, 1, "maybe"]),
        ("is_sharp", [0, 0, 0, 0, 1, 1]),
        ("place", ["train", "bus", "bus", "train", "test", "bus"]),
    ],
)
def test_other_columns_divide_nothing(pictures: Path, column: str, cells: list[Any]) -> None:
    splits = load(table(pictures, **{column: cells}))
    assert sizes(splits) == {"train": 6}
    assert splits.unsplit
    assert splits.split_by == ""


def test_columns_that_contradict_each_other_are_asked_about(pictures: Path) -> None:
    fold = ["train"] * 4 + ["test"] * 2
    path = table(pictures, fold=fold, is_test=[1, 1, 0, 0, 0, 0])
    sentence = r"'fold' and 'is_test' say different .* split_column='fold'.* split_column='none'"
    with pytest.raises(EngramError, match=sentence):
        load(path)
    assert sizes(load(path, split_column="fold")) == {"train": 4, "test": 2}
    assert load(path, split_column="is_test")["test"].labels.tolist() == [0, 1]
    assert sizes(load(path, split_column="none")) == {"train": 6}
    with pytest.raises(EngramError, match="no column 'folds'"):
        load(path, split_column="folds")


def test_columns_that_agree_are_not_asked_about(pictures: Path) -> None:
    path = table(pictures, fold=["train"] * 4 + ["test"] * 2, is_test=[0, 0, 0, 0, 1, 1])
    assert sizes(load(path)) == {"train": 4, "test": 2}


def test_empty_cells_are_asked_about(pictures: Path) -> None:
    path = table(pictures, fold=["", "", "train", "train", "test", "test"])
    with pytest.raises(EngramError, match="'fold' names splits"):
        load(path)
    splits = load(path, split_column="fold")
    assert sizes(splits) == {"train": 2, "test": 2}
    assert splits.left_out == {"rows of no split": 2}


def test_a_label_that_is_called_like_a_split_is_a_label(pictures: Path) -> None:
    splits = load(table(pictures, stage=["dev", "test"] * 3), label="stage")
    assert splits.classes == ("dev", "test")
    assert splits.unsplit


def test_rows_of_the_hub_are_divided_too(pictures: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [pictures / label / f"{i:03}.png" for i in range(3) for label in LABELS]
    columns = {
        "image": [{"bytes": path.read_bytes(), "path": None} for path in rows],
        "label": list(LABELS) * 3,
        "note": ["a picture"] * 6,
        "fold": ["train"] * 4 + ["test"] * 2,
    }
    features = datasets.Features(
        {name: datasets.Value("string") for name in columns} | {"image": datasets.Image()}
    )
    dataset = datasets.Dataset.from_dict(columns, features=features)
    dataset.save_to_disk(pictures / "single")
    datasets.DatasetDict({"train": dataset}).save_to_disk(pictures / "named")
    for name in ("single", "named"):
        splits = load(f"hf:{pictures / name}")
        assert sizes(splits) == {"train": 4, "test": 2}
        assert splits.split_by == "the column 'fold'"
    assert sizes(load(f"hf:{pictures / 'single'}", split_column="none")) == {"train": 6}
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(pictures / "both")
    with pytest.raises(EngramError, match="has the splits train, test"):
        load(f"hf:{pictures / 'both'}", split_column="fold")
