"""A share of the training data is held out for validation, and never anything else."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.datasets import in_memory, sample_names, write_class_folders

from engram.data.datasets import load
from engram.data.folds import split_validation
from engram.errors import EngramError


@given(
    st.lists(st.integers(0, 4), min_size=8, max_size=80),
    st.floats(0.05, 0.6),
    st.integers(0, 1000),
)
def test_the_validation_split_is_stratified_disjoint_and_seeded(
    labels: list[int], share: float, seed: int
) -> None:
    whole = in_memory(labels, 5)
    assume(round(share * len(labels)) > 0 and max(np.bincount(labels)) > 1)
    train, val = split_validation(whole, share, seed)
    assert sorted(sample_names(train) + sample_names(val)) == sorted(sample_names(whole))
    before, kept, held = (np.bincount(d.labels, minlength=5) for d in (whole, train, val))
    assert (kept[before > 0] >= 1).all()
    assert (np.abs(held - share * before) < 1).all() or (
        kept[held < np.floor(share * before)] == 1
    ).all()
    assert len(val) <= round(share * len(labels))
    assert sample_names(split_validation(whole, share, seed)[1]) == sample_names(val)
    assert (train.split, val.split) == ("train", "val")


def test_the_validation_split_depends_on_the_seed_and_not_on_the_order(folder: Path) -> None:
    train = load(folder)["train"]
    shuffled = train.subset(np.random.default_rng(3).permutation(len(train)))
    _, val = split_validation(train, 0.2, seed=5)
    names = set(sample_names(val))
    assert set(sample_names(split_validation(shuffled, 0.2, seed=5)[1])) == names
    assert set(sample_names(split_validation(train, 0.2, seed=6)[1])) != names
    assert np.bincount(val.labels).tolist() == [2, 2, 2]


def test_validation_is_never_taken_from_the_test_split(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "train", {"red": 10, "blue": 10})
    write_class_folders(tmp_path / "test", {"red": 10, "blue": 10})
    splits = load(tmp_path).with_validation(0.1, seed=0)
    assert len(splits["test"]) == 20
    assert all("/train/" in file for file in sample_names(splits.val) + sample_names(splits.train))
    assert splits.with_validation(0.5) is splits


def test_a_share_is_held_out_where_there_are_no_classes(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=np.zeros((6, 4, 4), np.uint8), labels=np.arange(6.0))
    first = load(tmp_path / "a.npz", kind="regression").with_validation(0.34)
    again = load(tmp_path / "a.npz", kind="regression").with_validation(0.34)
    assert (len(first["train"]), len(first["val"])) == (4, 2)
    assert first["val"].labels.tolist() == again["val"].labels.tolist()
    seen = [*first["train"].labels.ravel(), *first["val"].labels.ravel()]
    assert sorted(seen) == list(range(6))


@pytest.mark.parametrize("labels", [[0, 1, 2], [0, 1, 2, 0]])
def test_too_little_data_to_hold_out_is_refused(labels: list[int]) -> None:
    count = len(labels)
    with pytest.raises(EngramError, match=rf"hold out.* {count} images"):
        split_validation(in_memory(labels, 3))


def test_the_validation_share_is_between_0_and_1() -> None:
    for share in (0.0, 1.0):
        with pytest.raises(EngramError, match=rf"share is {share}"):
            split_validation(in_memory([0, 1, 2], 3), share)
