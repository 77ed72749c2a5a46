"""Labels of every kind: columns, lists, numbers, arrays, masks; wrong ones are refused."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engram.data.datasets import load
from engram.errors import EngramError
from engram.tasks.spec import TaskSpec


@pytest.fixture(autouse=True)
def images(tmp_path: Path) -> None:
    for i in range(6):
        Image.new("RGB", (4, 4), (40 * i, 0, 0)).save(tmp_path / f"{i}.png")


def table(tmp_path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    path = tmp_path / "t.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", *columns])
        writer.writerows([f"{i}.png", *row] for i, row in enumerate(rows))
    return path


def lines(tmp_path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path = tmp_path / "t.jsonl"
    text = (json.dumps({"path": f"{i}.png", **r}) for i, r in enumerate(records))
    path.write_text("\n".join(text))
    return path


# Several labels


def test_a_column_per_class(tmp_path: Path) -> None:
    path = table(tmp_path, ["cat", "dog", "x"], [[1, 0, 9], ["true", "yes", 9], ["0", "no", 9]])
    splits = load(path, kind="multilabel", label=["cat", "dog"])
    assert splits.classes == ("cat", "dog")
    assert splits["train"].labels.tolist() == [[1, 0], [1, 1], [0, 0]]
    spec = TaskSpec("t", ("dog", "cat"), kind="multilabel")
    again = load(path, like=spec)  # the task's classes are columns here
    assert again["train"].labels.tolist() == [[0, 1], [1, 1], [0, 0]]


def test_lists_of_labels(tmp_path: Path) -> None:
    expected = [[1, 0, 1], [0, 1, 0], [0, 0, 0]]
    texts = table(tmp_path, ["labels"], [["sea; sand"], ["sky"], [""]])
    lists = lines(tmp_path, [{"label": ["sea", "sand"]}, {"label": ["sky"]}, {"label": []}])
    for path in (texts, lists):
        splits = load(path, kind="multilabel")
        assert splits.classes == ("sand", "sea", "sky")
        order = [splits.classes.index(name) for name in ("sea", "sky", "sand")]
        assert splits["train"].labels[:, order].tolist() == expected


def test_an_array_of_labels(tmp_path: Path) -> None:
    x = np.zeros((3, 4, 4), dtype=np.uint8)
    y = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0]])
    np.savez(tmp_path / "a.npz", images=x, labels=y, class_names=["a", "b", "never"])
    splits = load(tmp_path / "a.npz", kind="multilabel")
    assert splits.classes == ("a", "b", "never")
    assert splits["train"].labels.tolist() == y.tolist()
    np.savez(tmp_path / "b.npz", images=x, labels=y.astype(bool))
    assert load(tmp_path / "b.npz", kind="multilabel").classes == ("0", "1", "2")


# Numbers


def test_columns_of_numbers(tmp_path: Path) -> None:
    path = table(tmp_path, ["age", "weight"], [["3", "1e1"], ["-4.5", "0"], ["7", "2"]])
    splits = load(path, kind="regression", label=["age", "weight"])
    assert splits.classes == ("age", "weight")
    assert splits["train"].labels.tolist() == [[3, 10], [-4.5, 0], [7, 2]]
    assert splits["train"].labels.dtype == np.float32
    one = load(path, kind="regression", label="weight")
    assert one["train"].labels.tolist() == [[10], [0], [2]]
    like = load(path, like=TaskSpec("t", ("weight",), kind="regression"))
    assert like["train"].labels.tolist() == [[10], [0], [2]]


def test_arrays_and_digits_are_numbers_too(tmp_path: Path) -> None:
    x = np.zeros((2, 4, 4), dtype=np.uint8)
    for y, expected in (
        (np.array([1.5, 2]), [[1.5], [2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    ):
        np.savez(tmp_path / "a.npz", images=x, labels=y)
        assert load(tmp_path / "a.npz", kind="regression")["train"].labels.tolist() == expected
    assert load("digits", kind="regression")["train"].labels[:3].ravel().tolist() == [0, 1, 2]


# What is refused


@pytest.mark.parametrize(
    ("columns", "rows", "options", "sentence"),
    [
        (["a", "b"], [[1, 2]], {"kind": "multilabel", "label": ["a", "b"]}, "row 1: the column"),
        (["a", "b"], [[1, ""]], {"kind": "multilabel", "label": ["a", "b"]}, "expected 0 or 1"),
        (["a", "b"], [[1, 1]], {"label": ["a", "b"]}, "multilabel or regression"),
        (["a"], [[1]], {"kind": "multilabel", "label": ["c"]}, "has no column 'c'"),
        (["a"], [["old"]], {"kind": "regression", "label": "a"}, "holds 'old'; expected a number"),
        (["a"], [["nan"]], {"kind": "regression", "label": "a"}, "the column 'a' holds 'nan'"),
        (["a"], [[1e39]], {"kind": "regression", "label": "a"}, "the column 'a' holds '1e.39'"),
        (["a"], [[""]], {"kind": "regression", "label": "a"}, "holds ''; expected a number"),
        (["a"], [[1]], {"kind": "guess"}, "no kind of task 'guess'"),
    ],
)  # fmt: skip
def test_wrong_labels_are_refused(
    tmp_path: Path,
    columns: list[str],
    rows: list[list[Any]],
    options: dict[str, Any],
    sentence: str,
) -> None:
    with pytest.raises(EngramError, match=sentence):
        load(table(tmp_path, columns, rows), **options)


def test_a_label_that_is_not_a_list_or_a_class_is_refused(tmp_path: Path) -> None:
    path = lines(tmp_path, [{"label": ["a", "b"]}, {"label": 3}])
    with pytest.raises(EngramError, match="row 2 is 3; expected a list"):
        load(path, kind="multilabel")
    path = lines(tmp_path, [{"label": ["a", "b"]}])
    with pytest.raises(EngramError, match="label 'b'"):
        load(path, kind="multilabel", classes=["a"])


def test_a_label_column_is_refused_where_there_are_no_columns(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "photos" / name / "1.png")
    x = np.zeros((2, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=x, labels=np.array([0, 1]))
    for spec in (tmp_path / "photos", tmp_path / "a.npz", "digits"):
        with pytest.raises(EngramError, match="has no column 'nonsense'"):
            load(spec, label="nonsense")
