"""Images by row, and the names of splits."""

import numpy as np
import pytest
import torch

from engram.data.source import Arrays, DataRequest, Files, match_splits, usual_split
from engram.errors import EngramError


def test_rows_are_read_and_named() -> None:
    files = Files(("a.png", "b.png"))
    assert (files.read(1), files.row_name(1)) == ("b.png", "b.png")
    pixels = torch.arange(12, dtype=torch.uint8).reshape(3, 2, 2)
    arrays = Arrays(pixels, "x")
    assert arrays.row_name(2) == "x[2]"
    assert np.array_equal(arrays.read(2), [[8, 9], [10, 11]])


@pytest.mark.parametrize(
    ("name", "split"),
    [("train", "train"), ("Training", "train"), ("dev", "val"), ("VALID", "val"), ("test", "test")],
)
def test_usual_names_of_splits_are_recognised(name: str, split: str) -> None:
    assert usual_split(name) == split
    assert usual_split(f"{name}-set") is None


def test_splits_are_matched_by_their_usual_names_or_as_given() -> None:
    assert match_splits(["training", "dev", "extra"], {}, "t") == {
        "train": "training",
        "val": "dev",
    }
    assert match_splits(["a", "b"], {"test": "b"}, "t") == {"test": "b"}
    assert match_splits(["all"], {}, "t") == {"train": "all"}


@pytest.mark.parametrize(
    ("names", "given", "sentence"),
    [
        (["a", "b"], {"test": "c"}, "t has no split 'c'"),
        (["val", "dev"], {}, "t has two val splits, val and dev"),
        (list("abcdefghi"), {}, "t has the splits a, b, c, d, e, f, g, h and 1 more"),
    ],
)
def test_splits_that_cannot_be_matched_are_refused(
    names: list[str], given: dict[str, str], sentence: str
) -> None:
    with pytest.raises(EngramError) as caught:
        match_splits(names, given, "t")
    assert str(caught.value).startswith(sentence)


def test_a_request_for_an_unknown_kind_or_split_is_refused() -> None:
    with pytest.raises(EngramError, match="no kind of task 'guess'"):
        DataRequest("guess")
    with pytest.raises(EngramError, match="There is no split 'training'"):
        DataRequest(split_names={"training": "a"})
    assert DataRequest("segmentation").has_masks
    assert not DataRequest("regression").has_masks
