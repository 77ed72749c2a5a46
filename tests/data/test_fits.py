"""Data fits a task of the same kind, classes and mask values, and no other."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.datasets import in_memory
from tests.support.masks import write_masks

from engram.data.datasets import Splits, check_fits, load
from engram.errors import EngramError
from engram.tasks.spec import TaskSpec


def test_data_with_the_kind_and_the_classes_of_a_task_fits() -> None:
    data = in_memory([0, 1], 2)
    check_fits(TaskSpec("t", ("0", "1")), data)
    check_fits(TaskSpec("t", ("0", "1")), Splits("memory", ("0", "1"), data))


def test_data_of_another_kind_does_not_fit() -> None:
    with pytest.raises(EngramError, match="has the kind regression"):
        check_fits(TaskSpec("t", ("0", "1"), "regression"), in_memory([0, 1], 2))


@pytest.mark.parametrize(
    ("classes", "difference"),
    [
        (("0", "2"), r"'t' has 2 classes \(0, 2\)"),
        (("1", "0"), "in another order"),
        (tuple("01234"), r"has 5 classes \(0, 1, 2, 3 and 1 more\), but memory has 2"),
    ],
)
def test_data_of_other_classes_does_not_fit(classes: tuple[str, ...], difference: str) -> None:
    with pytest.raises(EngramError, match=difference + r".*like=model\.task"):
        check_fits(TaskSpec("t", classes), in_memory([0, 1], 2))


def test_masks_fit_by_their_values_and_for_training_by_what_they_ignore(tmp_path: Path) -> None:
    splits = load(write_masks(tmp_path, {"1": 1}), kind="segmentation", ignore=3)
    spec = TaskSpec("t", ("1", "2"), "segmentation", values=(1, 2), ignore=3)
    check_fits(spec, splits, same_ignore=True)
    check_fits(replace(spec, ignore=9), splits["train"])
    with pytest.raises(EngramError, match="values 1, 2 and ignores 9"):
        check_fits(replace(spec, ignore=9), splits, same_ignore=True)
    with pytest.raises(EngramError, match="the mask values 2, 1 and ignores 3"):
        check_fits(replace(spec, values=(2, 1)), splits)
