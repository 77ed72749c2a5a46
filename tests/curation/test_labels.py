"""Labels look wrong where heads that did not learn the image find another class far likelier."""

from __future__ import annotations

import pytest
import torch

from engram.curation.check import label_odds, suspected_labels

PROBABILITIES = torch.tensor(
    [[0.9, 0.09, 0.01], [0.009, 0.99, 0.001], [0.3, 0.6, 0.1], [0.01, 0.01, 0.98]]
)


def test_odds_are_those_of_the_probabilities() -> None:
    labels = torch.tensor([0, 0, 0, 0])
    assert label_odds(PROBABILITIES.log(), labels).tolist() == pytest.approx([1, 110, 2, 98])


def test_the_most_suspicious_comes_first_with_the_class_that_is_likelier() -> None:
    found = suspected_labels(PROBABILITIES.log(), torch.tensor([0, 0, 0, 1]), least=30)
    assert [(one.row, one.suggested) for one in found] == [(1, 1), (3, 2)]
    assert suspected_labels(PROBABILITIES.log(), torch.tensor([0, 1, 1, 2])) == []
