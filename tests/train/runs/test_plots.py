"""The learning curve of a run: one drawing for the run's folder and for the report."""

from __future__ import annotations

import pytest

from engram.train.runs.plots import learning_curves, validation_metric

HISTORY = [
    {"step": step, "loss": 2 / step, "val_loss": 3 / step, "val_miou": 1 - 1 / step}
    for step in (1, 2, 4)
]


def test_loss_and_score_have_a_chart_each() -> None:
    loss, score = learning_curves(HISTORY)
    assert loss.title == "Loss over steps"
    assert loss.svg.count('class="line') == 2
    assert score.title == "Validation miou, %, over steps"
    assert ">75.0</text>" in score.svg  # the last value


def test_a_score_may_have_a_name_for_people() -> None:
    assert learning_curves(HISTORY, "mean IoU")[1].title == "Validation mean IoU, %, over steps"


@pytest.mark.parametrize("row", [{"val_loss": 1, "val_r2": 2}, {"lr": 1, "val_r2": 2}])
def test_the_metric_is_what_stands_under_val_except_the_loss(row: dict[str, float]) -> None:
    assert validation_metric(row) == "r2"
