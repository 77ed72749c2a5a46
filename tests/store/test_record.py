"""What an engram says about itself: how good it is, and the learning rate that was used."""

from dataclasses import replace
from typing import Any

import pytest

from engram import MemoryViT, Recipe, random_trunk
from engram.store.engram import Engram
from engram.store.record import (
    grown_from,
    lineage_rows,
    merged_from,
    score,
    score_rows,
    summarise_recipe,
    used_recipe,
)


def engram_with(regime: str = "masked", **about: Any) -> Engram:
    model = MemoryViT(random_trunk(image_size=16, patch=8, width=16, depth=2, heads=2))
    model.add_task("t", ["a", "b"], 2 if regime == "masked" else 0, regime=regime)
    return replace(model.engram("t"), **about)


VAL = {"accuracy": 0.948, "loss": 0.21, "images": 1530, "macro_f1": 0.94, "unreadable": ["x"]}


def test_a_row_for_every_split_begins_with_what_chooses() -> None:
    rows = score_rows(engram_with(metrics={"val": VAL, "test": {**VAL, "images": 1}}))
    assert rows == [
        ("val, 1,530 images", "accuracy 94.80%, macro F1 0.94, loss 0.21"),
        ("test, 1 image", "accuracy 94.80%, macro F1 0.94, loss 0.21"),
    ]


def test_balanced_accuracy_is_shown_as_accuracy_is() -> None:
    [(_, words)] = score_rows(engram_with(metrics={"val": {**VAL, "balanced_accuracy": 0.8}}))
    assert words.startswith("accuracy 94.80%, balanced accuracy 80.00%, macro F1 0.94")


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
def test_the_best_known_score_is_one_cell(metrics: dict[str, Any], cell: str) -> None:
    assert score(engram_with(metrics=metrics)) == cell


def test_old_files_show_the_rate_of_their_regime_or_none() -> None:
    old = Recipe(ema=0.0, patience=0).to_dict()
    assert used_recipe(engram_with(recipe=old))["lr"] == 5e-4
    assert used_recipe(engram_with(recipe={**old, "lr": 0.01}))["lr"] == 0.01
    assert "lr" not in used_recipe(engram_with("readout", recipe=old))
    assert "lr" not in used_recipe(engram_with("head", recipe={**old, "ema": 0.98, "patience": 12}))
    assert "lr" not in used_recipe(engram_with(recipe={"lr": 0, "optimizer": "lion"}))
    assert used_recipe(engram_with(recipe={"epochs": 3})) == {"epochs": 3}
    assert summarise_recipe(engram_with(recipe={"lr": 0, "a": [1], "b": "c"})) == "b c"


@pytest.mark.parametrize(
    "odd", [None, "both", 3, {"task": "a"}, ["a", {"weight": "much"}, {"weight": 10**400}, {}]]
)
def test_a_lineage_of_any_other_form_is_none(odd: object) -> None:
    assert merged_from(engram_with(recipe={"merged": odd})) == []
    assert grown_from(engram_with(recipe={"grown_from": odd})) == []


def test_what_a_task_grew_from_is_a_row() -> None:
    grown = {"grown_from": [{"task": "pets", "content": "0" * 64, "classes": 20}]}
    (row,) = lineage_rows(engram_with(recipe=grown))
    assert row == ("grown from", f"pets, content {'0' * 64}, its 20 classes come first")


def test_calibration_is_among_the_metrics() -> None:
    found = {**VAL, "ece": 0.02, "uncalibrated_ece": 0.05, "temperature": 1.25}
    [(_, words)] = score_rows(engram_with(metrics={"val": found}))
    assert words.endswith("loss 0.21, calibration error before 0.05, temperature 1.25")
