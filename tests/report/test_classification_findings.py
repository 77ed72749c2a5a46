"""The confusion matrix, the accuracy of each class, and the mistakes of a classification."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.support.reports import model_with, noise, write_page

from engram.inference.evaluate import Answers
from engram.report.contents import MAX_CLASSES, Bars, Matrix, Mistakes
from engram.report.findings import FINDINGS, MAX_MISTAKES


def with_logits(names: tuple[str, ...], predicted: dict[int, int]) -> Answers:
    """Two images of each class, all predicted correctly but for these rows."""
    dataset = noise(2 * len(names), names)
    labels = torch.from_numpy(dataset.labels)
    answers = labels.clone()
    for row, label in predicted.items():
        answers[row] = label
    logits = 3 * torch.nn.functional.one_hot(answers, len(names)).float()
    return Answers("t", dataset, logits, labels, torch.arange(len(labels)), ())


def test_the_matrix_counts_what_was_predicted(tmp_path: Path) -> None:
    """Of more classes than are shown, those with most mistakes."""
    names = tuple(f"n{i}" for i in range(60))
    answers = with_logits(names, {5: 7, 65: 7})  # both of class 5 are taken for 7
    html, _ = write_page(tmp_path / "r.html", model_with(names), answers)
    assert "2 of 2: n5, predicted n7" in html
    assert "2 of 2: n7, predicted n7" in html
    assert html.count('scope="row"') == MAX_CLASSES == 20


def test_a_cell_has_the_colour_of_its_share() -> None:
    answers = with_logits(("a", "b"), {0: 1})  # one of the two of a is taken for b
    matrix = FINDINGS["classification"](model_with("ab"), answers)[0].contents[0]
    assert isinstance(matrix, Matrix)
    assert [[cell.count for cell in row] for row in matrix.rows] == [[1, 1], [0, 2]]
    assert [[cell.style for cell in row] for row in matrix.rows] == [
        ["right", ""],
        ["none", "right deep"],
    ]


def test_accuracy_is_per_class() -> None:
    answers = with_logits(("a", "b"), {0: 1})
    bars = FINDINGS["classification"](model_with("ab"), answers)[1].contents[0]
    assert isinstance(bars, Bars)
    assert [(bar.label, bar.share, bar.text) for bar in bars.bars] == [
        ("a", 0.5, "50% of 2"),
        ("b", 1.0, "100% of 2"),
    ]


def test_the_most_confident_mistakes_come_first() -> None:
    names = tuple(f"n{i}" for i in range(10))
    answers = with_logits(names, {i: (i + 1) % 10 for i in range(20)})
    answers.logits[7] *= 5
    mistakes = FINDINGS["classification"](model_with(names), answers)[2].contents[0]
    assert isinstance(mistakes, Mistakes)
    assert len(mistakes.mistakes) == MAX_MISTAKES
    first = mistakes.mistakes[0]
    assert (first.predicted, first.true, first.confidence) == (["n8"], ["n7"], "100%")
    assert mistakes.note.startswith("20 of 20 predictions are wrong")


def test_without_mistakes_the_page_says_so(tmp_path: Path) -> None:
    html, _ = write_page(tmp_path / "r.html", model_with("ab"), with_logits(("a", "b"), {}))
    assert "There are none." in html
