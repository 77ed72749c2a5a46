"""Every training setting is there once: checked where it is made, and a row of the guide."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import Any

import pytest
from tests.support.paths import ROOT

from engram import EngramError, Recipe
from engram.methods import METHODS
from engram.tasks.kinds import KINDS
from engram.train.recipe import RECIPES, learning_rate

GUIDE = ROOT / "docs" / "training.md"


def test_the_default_recipe_is_the_dataclass() -> None:
    assert RECIPES["default"] == Recipe()


def test_the_paper_recipe_is_the_papers() -> None:
    paper = RECIPES["paper"]
    assert (paper.optimizer, paper.momentum, paper.clip) == ("sgd", 0.9, 1.0)
    assert (paper.batch, paper.steps, paper.warmup, paper.schedule) == (512, 20_000, 5, "cosine")
    assert (paper.augment, paper.weight_decay, paper.ema, paper.label_smoothing) == (
        "auto",
        0,
        0,
        0,
    )
    assert paper.micro_batch < paper.batch  # accumulated
    assert paper.patience == 0  # all steps are taken, and the last weights are kept


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("epochs", 0, "epochs is 0"),
        ("epochs", 1.5, "epochs is 1.5"),
        ("batch", True, "batch is True"),
        ("lr", -0.1, "lr is -0.1"),
        ("lr", math.nan, "lr is nan"),
        ("lr", math.inf, "lr is inf"),
        ("lr", "fast", "lr is 'fast'"),
        ("seed", -1, "seed is -1"),
        ("momentum", 1, "momentum is 1"),
        ("label_smoothing", 1.0, "label_smoothing is 1.0"),
        ("ema", 2.0, "ema is 2.0"),
        ("val_share", 1.0, "val_share is 1.0"),
        ("min_area", 1.5, "min_area is 1.5"),
        ("optimizer", "adam", "optimizer is 'adam'"),
        ("precision", "int8", "precision is 'int8'"),
        ("cache", True, "cache is True"),
        ("views", 2, "views is 2"),
    ],
)
def test_a_value_out_of_range_is_a_sentence(setting: str, value: object, expected: str) -> None:
    with pytest.raises(EngramError) as caught:
        Recipe(**{setting: value})
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("multilabel", {"balance": "sampler"}, "balance is sampler"),
        ("regression", {"balance": "weights"}, "balance is weights"),
        ("segmentation", {"balance": "weights"}, "can only have none."),
        ("regression", {"label_smoothing": 0.1}, "regression learns from numbers"),
        ("segmentation", {"mixup": 0.2}, "mixed pixels have none"),
    ],
)
def test_what_makes_no_sense_for_a_kind_is_a_sentence(
    kind: str, settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(EngramError) as caught:
        Recipe(**settings).check_for(KINDS[kind])
    assert expected in str(caught.value)
    Recipe(**settings).check_for(KINDS["classification"])


def test_an_unknown_setting_is_a_sentence() -> None:
    with pytest.raises(EngramError, match="no setting learning_rate"):
        Recipe().but(learning_rate=0.1)


def test_the_rate_warms_up_linearly_and_falls_as_a_cosine() -> None:
    recipe = Recipe(warmup=5)
    rates = [recipe.rate_at(step, 105, 1.0) for step in range(106)]
    assert rates[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates[55] == pytest.approx(0.5)  # half-way
    assert rates[105] == pytest.approx(0.0, abs=1e-12)
    assert Recipe(warmup=0, schedule="constant").rate_at(90, 100, 0.3) == 0.3


@pytest.mark.parametrize(
    ("steps", "per_epoch", "expected"),
    [(300, 10, 10), (900, 10, 30), (50, 10, 5), (4, 10, 1), (100_000, 80_000, 10_000)],
)
def test_by_default_a_validation_follows_every_epoch_but_10_to_30_in_a_run(
    steps: int, per_epoch: int, expected: int
) -> None:
    assert Recipe().steps_between_evaluations(steps, per_epoch) == expected
    assert Recipe(evaluations=4).steps_between_evaluations(400, per_epoch) == 100


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("regime", METHODS)
def test_every_regime_has_a_rate(regime: str, optimizer: str) -> None:
    assert 0 < learning_rate(Recipe(optimizer=optimizer), METHODS[regime]) < 1
    assert learning_rate(Recipe(optimizer=optimizer, lr=0.7), METHODS[regime]) == 0.7


def test_the_guide_has_a_row_for_every_setting() -> None:
    """A row says the setting, its default, and what the dataclass says about it."""
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", GUIDE.read_text(), re.MULTILINE))
    for item in fields(Recipe):
        choices = item.metadata["choices"]
        about = item.metadata["about"] + (f" ({', '.join(choices)})" if choices else "")
        assert rows.get(item.name) == f"{item.metadata['shown']} | {about}"
