"""Which task is the best, and which differences are noise."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engram.train.loop.validation import best_of, noise, ties

SCORE = "accuracy"


def measured(accuracy: float, loss: float = 1.0, images: int = 100) -> dict[str, Any]:
    return {"accuracy": accuracy, "loss": loss, "images": images}


def test_noise_is_half_a_standard_error() -> None:
    assert noise(SCORE, measured(0.5, images=100)) == pytest.approx(0.025)
    assert noise(SCORE, measured(0.9, images=400)) == pytest.approx(0.0075)
    assert noise(SCORE, measured(1.0)) == noise(SCORE, measured(0.0)) == 0


def test_a_score_below_zero_has_no_noise() -> None:
    """R² of a model that is worse than the mean."""
    assert noise("r2", {"r2": -3.0, "loss": 4.0, "images": 10}) == 0


def test_the_lowest_loss_decides_between_scores_that_differ_by_noise() -> None:
    assert best_of(SCORE, [measured(0.90, 0.5), measured(0.895, 0.3), measured(0.5, 0.1)]) == 1
    assert best_of(SCORE, [measured(0.90, 0.5), measured(0.80, 0.3)]) == 0


def test_scores_that_differ_by_noise_are_ties() -> None:
    tried = [measured(0.895), measured(0.90), measured(0.5)]
    assert ties(SCORE, tried) == [0, 1]
    assert ties(SCORE, tried[1:]) == [0]


def test_few_images_leave_more_to_noise() -> None:
    few = [measured(0.90, images=10), measured(0.86, images=10)]
    many = [measured(0.90, images=1000), measured(0.86, images=1000)]
    assert ties(SCORE, few) == [0, 1]
    assert ties(SCORE, many) == [0]


def test_the_first_of_equals_is_chosen() -> None:
    assert best_of(SCORE, [measured(0.9), measured(0.9)]) == 0


def test_what_is_not_a_number_is_the_worst() -> None:
    assert best_of(SCORE, [measured(math.nan), measured(0.1)]) == 1
    assert best_of(SCORE, [measured(0.5, math.nan), measured(0.5, 3.0)]) == 1
    assert best_of(SCORE, [measured(math.nan, math.nan)]) == 0


def test_where_nothing_could_be_measured_one_is_chosen() -> None:
    """All validation images are unreadable: there is no loss."""
    assert best_of(SCORE, [{"accuracy": 0.0, "images": 3}] * 2) == 0
