"""Folds are stratified, keep groups together, and depend on names alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.datasets import in_memory, sample_names

from engram.data.datasets import Splits
from engram.data.folds import NONE, deal, single_groups
from engram.errors import EngramError


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(2, 5), st.integers(0, 99))
def test_every_class_is_in_all_folds_in_equal_shares(
    labels: list[int], count: int, seed: int
) -> None:
    found = deal(in_memory(labels, 4), np.arange(len(labels)), count, count, seed)
    for c, size in enumerate(np.bincount(labels, minlength=4)):
        own = found[np.array(labels) == c]
        if size == 1:
            assert own.tolist() == [NONE]  # its class could not be learned otherwise
        elif size:
            shares = np.bincount(own, minlength=count)
            assert shares.max() - shares.min() <= 1


def test_groups_stay_together() -> None:
    dataset = in_memory([i % 2 for i in range(40)], 2)
    groups = np.arange(40)
    groups[[0, 2, 4, 7]] = 0
    found = deal(dataset, groups, 5, 5, 0)
    assert len(set(found[[0, 2, 4, 7]])) == 1
    assert NONE not in found


def test_a_class_with_one_group_is_never_held_out() -> None:
    dataset = in_memory([i % 2 for i in range(40)], 2)
    groups = np.arange(40)
    groups[::2] = 0
    found = deal(dataset, groups, 5, 5, 0)
    assert set(found[::2]) == {NONE}
    assert np.bincount(found[1::2]).tolist() == [4] * 5
    assert single_groups(dataset, groups) == [0]
    assert single_groups(dataset, np.arange(40)) == []


def test_a_single_fold_holds_out_whole_groups() -> None:
    dataset = in_memory([i // 30 for i in range(60)], 2)
    splits = Splits("memory", ("0", "1"), train=dataset).with_folds(1, share=0.5)
    assert splits.folds is not None
    before = splits.held_out
    assert len(before) == 30
    splits.folds.keep_together(dataset, np.arange(60))
    assert splits.held_out.tolist() == before.tolist()
    groups = np.arange(60) // 3
    splits.folds.keep_together(dataset, groups)
    by_group = np.isin(np.arange(60), splits.held_out).reshape(20, 3)
    assert (by_group.all(1) == by_group.any(1)).all()
    assert 0 < by_group[:10, 0].sum() < 10
    groups[:30] = 0
    splits.folds.keep_together(dataset, groups)
    assert splits.held_out.min() >= 30  # a class with one group could not be learned without it


def test_folds_depend_on_names_and_the_seed_and_not_on_the_order() -> None:
    dataset = in_memory([i % 3 for i in range(30)], 3)
    shuffled = dataset.subset(np.random.default_rng(1).permutation(30))
    first, again = (deal(one, np.arange(30), 3, 3, 0) for one in (dataset, shuffled))
    assert dict(zip(sample_names(dataset), first, strict=True)) == dict(
        zip(sample_names(shuffled), again, strict=True)
    )
    assert deal(dataset, np.arange(30), 3, 3, 1).tolist() != first.tolist()


def test_one_image_of_each_class_is_too_small() -> None:
    splits = Splits("memory", ("0", "1", "2"), train=in_memory([0, 1, 2], 3))
    with pytest.raises(EngramError, match="too small to hold out"):
        splits.with_folds(5)


def test_there_are_no_more_folds_than_images_of_a_class() -> None:
    splits = Splits("memory", ("0", "1"), train=in_memory([0, 0, 0, 1, 1, 1], 2)).with_folds(5)
    assert splits.folds is not None
    assert splits.folds.count == 3
    assert splits.folds.learned_share == pytest.approx(2 / 3)


def test_some_of_five_parts_are_folds_where_that_is_enough() -> None:
    """The folds are those of all five: what is left is learned by all."""
    dataset = in_memory([i % 2 for i in range(40)], 2)
    whole = deal(dataset, np.arange(40), 5, 5, 0)
    splits = Splits("memory", ("0", "1"), train=dataset).with_folds(2, share=0.2)
    assert splits.folds is not None
    expected = np.where(whole < 2, whole, NONE)
    assert splits.folds.train.tolist() == expected.tolist()
    assert splits.folds.learned_share == pytest.approx(0.8)
    assert len(splits.held_out) == 16
    splits.folds.keep_together(dataset, np.arange(40))
    assert splits.folds.train.tolist() == expected.tolist()
