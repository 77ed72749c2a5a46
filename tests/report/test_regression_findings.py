"""The points, errors and largest errors of a regression."""

from __future__ import annotations

import torch
from tests.support.reports import model_with, noise

from engram.inference.evaluate import Answers
from engram.report.contents import Charts, Mistakes, Table
from engram.report.findings import FINDINGS

NAMES = ("height", "width")


def some_answers() -> Answers:
    """Two numbers of three images, the last of which is wrong by 3 and 1 standard deviations."""
    labels = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
    values = labels + torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 10.0]])
    fitted = {"mean": torch.tensor([2.0, 20.0]), "std": torch.tensor([1.0, 10.0])}
    data = noise(3, NAMES, "regression")
    return Answers("t", data, values, labels, torch.arange(3), (), fitted)


def test_every_number_has_its_points_and_errors() -> None:
    points, errors, _ = FINDINGS["regression"](model_with(NAMES, "regression"), some_answers())
    charts, table = points.contents[0], errors.contents[0]
    assert isinstance(charts, Charts)
    assert isinstance(table, Table)
    assert [chart.title for chart in charts.charts] == list(NAMES)
    assert [chart.svg.count("<circle") for chart in charts.charts] == [3, 3]
    assert table.rows[0] == ("height", "-3.500", "1", "1.732", "+1", "2 ± 0.8165")


def test_the_largest_error_comes_first_by_its_worst_number() -> None:
    found = FINDINGS["regression"](model_with(NAMES, "regression"), some_answers())
    shown = found[2].contents[0]
    assert isinstance(shown, Mistakes)
    first = shown.mistakes[0]
    assert (first.output, first.predicted, first.true) == ("height", ["6"], ["3"])
    assert len(shown.mistakes) == 3
