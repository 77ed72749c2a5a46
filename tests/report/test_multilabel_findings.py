"""The scores of each class and the wrong labels of a multilabel task."""

from __future__ import annotations

import torch
from tests.support.reports import model_with, noise

from engram.inference.evaluate import Answers
from engram.report.contents import Mistakes, Table
from engram.report.findings import FINDINGS

NAMES = ("cat", "dog")


def some_answers() -> Answers:
    """Four images: both labels right, one too many, one too few, no label."""
    labels = torch.tensor([[1, 1], [1, 0], [0, 1], [0, 0]])
    predicted = torch.tensor([[1, 1], [1, 1], [0, 0], [0, 0]])
    logits = 4.0 * (2 * predicted - 1)
    thresholds = {"thresholds": torch.tensor([0.5, 0.5])}
    data = noise(4, NAMES, "multilabel")
    return Answers("t", data, logits, labels, torch.arange(4), (), thresholds)


def test_scores_are_those_of_the_thresholds() -> None:
    scores = FINDINGS["multilabel"](model_with(NAMES, "multilabel"), some_answers())[0].contents[0]
    assert isinstance(scores, Table)
    assert scores.columns[2:] == ("F1", "precision", "recall", "threshold", "images")
    assert scores.rows[0] == ("cat", "100.0%", "100.0%", "100.0%", "100.0%", "50.0%", "2")
    assert scores.rows[1][2:] == ("50.0%", "50.0%", "50.0%", "50.0%", "2")


def test_a_label_too_many_or_too_few_is_a_mistake() -> None:
    shown = FINDINGS["multilabel"](model_with(NAMES, "multilabel"), some_answers())[1].contents[0]
    assert isinstance(shown, Mistakes)
    assert shown.note.startswith("2 of 4 images have a label too many or too few")
    assert sorted((tuple(m.predicted), tuple(m.true)) for m in shown.mistakes) == [
        ((), ("dog",)),
        (("cat", "dog"), ("cat",)),
    ]
