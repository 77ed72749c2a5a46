"""What an engram says about itself: how good it is, and what it was made from."""

from dataclasses import replace
from typing import Any

import pytest

from engram import MemoryViT, random_backbone
from engram.store.engram import Engram
from engram.store.record import (
    lineage_rows,
    metric_cell,
    metric_rows,
    summarise_recipe,
)


def engram_with(**about: Any) -> Engram:
    model = MemoryViT(random_backbone(image_size=16, patch=8, width=16, depth=2, heads=2))
    model.add_task("t", ["a", "b"], 2)
    return replace(model.engram("t"), **about)


VAL = {"accuracy": 0.948, "loss": 0.21, "images": 1530, "macro_f1": 0.94, "unreadable": ["x"]}


def test_a_row_for_every_split_begins_with_what_chooses() -> None:
    rows = metric_rows(engram_with(metrics={"val": VAL, "test": {**VAL, "images": 1}}))
    assert rows == [
        ("val, 1,530 images", "accuracy 94.80%, macro F1 94.00%, loss 0.21"),
        ("test, 1 image", "accuracy 94.80%, macro F1 94.00%, loss 0.21"),
    ]


def test_balanced_accuracy_is_shown_as_accuracy_is() -> None:
    [(_, words)] = metric_rows(engram_with(metrics={"val": {**VAL, "balanced_accuracy": 0.8}}))
    assert words.startswith("accuracy 94.80%, balanced accuracy 80.00%, macro F1 94.00%")


@pytest.mark.parametrize(
    ("metrics", "cell"),
    [
        ({"val": VAL}, "accuracy 94.80% (val, 1,530 images)"),
        ({"val": VAL, "test": {"accuracy": 0.5}}, "accuracy 50.00% (test)"),
        ({"accuracy": 0.9125}, "accuracy 91.25%"),
        ({"val": {"loss": 0.1}}, ""),
        ({"val": "good", "test": {"accuracy": 10**400, "images": "many"}}, ""),
    ],
)
def test_the_best_known_metric_is_one_cell(metrics: dict[str, Any], cell: str) -> None:
    assert metric_cell(engram_with(metrics=metrics)) == cell


def test_a_recipe_is_summed_up_without_its_lists() -> None:
    assert summarise_recipe(engram_with(recipe={"lr": 0.5, "a": [1], "b": "c"})) == "lr 0.5, b c"


@pytest.mark.parametrize(
    "odd", [None, "both", 3, {"task": "a"}, ["a", {"weight": "much"}, {"weight": 10**400}, {}]]
)
def test_a_lineage_of_any_other_form_is_none(odd: object) -> None:
    assert lineage_rows(engram_with(recipe={"merged": odd, "grown_from": odd})) == []


def test_what_a_task_grew_from_is_a_row() -> None:
    grown = {"grown_from": [{"task": "pets", "content": "0" * 64, "classes": 20}]}
    (row,) = lineage_rows(engram_with(recipe=grown))
    assert row == ("grown from", f"pets, content {'0' * 64}, its 20 classes come first")


def test_calibration_is_among_the_metrics() -> None:
    found = {**VAL, "ece": 0.02, "uncalibrated_ece": 0.05, "temperature": 1.25}
    [(_, words)] = metric_rows(engram_with(metrics={"val": found}))
    assert words.endswith("loss 0.21, calibration error before 5.00%, temperature 1.25")
