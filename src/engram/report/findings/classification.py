"""Classification: the confusion matrix, the accuracy of each class, the most confident mistakes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engram.inference.evaluate import Answers
from engram.model import MemoryViT
from engram.report.contents import MAX_CLASSES, Bar, Bars, Matrix, MatrixCell, Subsection
from engram.report.findings.mistakes import MAX_MISTAKES, mistake, mistakes_subsection


def classification_findings(model: MemoryViT, answers: Answers) -> list[Subsection]:
    return [
        Subsection(f"confusion-{answers.task}", "Confusion matrix", [_confusion(answers)]),
        Subsection(f"classes-{answers.task}", "Accuracy per class", [_accuracies(answers)]),
        _mistakes(model, answers),
    ]


def _confusion(answers: Answers) -> Matrix:
    classes = answers.dataset.classes
    shown = list(range(len(classes)))
    note = (
        "Rows are true classes, columns are predicted classes. The stronger the colour, the "
        "larger the share of the row."
    )
    if len(classes) > MAX_CLASSES:
        shown = _most_confused(answers)
        note += (
            f" Only the {MAX_CLASSES} of {len(classes):,} classes with the most mistakes are shown."
        )
    names = [classes[c] for c in shown]
    tall = len(names) * max(map(len, names)) > 60
    predicted = answers.logits.argmax(1)
    rows = [_matrix_row(classes, r, shown, predicted[answers.labels == r]) for r in shown]
    return Matrix(names, rows, note, tall)


def _most_confused(answers: Answers) -> list[int]:
    """The classes with the most mistakes, as the true or as the predicted class."""
    predicted = answers.logits.argmax(1)
    wrong = predicted != answers.labels
    involved = torch.cat([answers.labels[wrong], predicted[wrong]])
    counts = torch.bincount(involved, minlength=len(answers.dataset.classes))
    return sorted(counts.topk(MAX_CLASSES).indices.tolist())


def _matrix_row(
    classes: Sequence[str], row: int, shown: Sequence[int], predicted: Tensor
) -> list[MatrixCell]:
    """What was predicted for the images of class `row`, for each of the shown classes."""
    counts, total = torch.bincount(predicted, minlength=len(classes)), max(1, len(predicted))
    cells = []
    for column in shown:
        count = int(counts[column])
        share = count / total
        styles = ["right"] if row == column else []
        styles += ["deep"] if share > 0.5 else [] if count else ["none"]
        title = f"{count} of {total}: {classes[row]}, predicted {classes[column]}"
        cells.append(MatrixCell(count, math.sqrt(share), " ".join(styles), title))
    return cells


def _accuracies(answers: Answers) -> Bars:
    classes = answers.dataset.classes
    right = answers.logits.argmax(1) == answers.labels
    images = torch.bincount(answers.labels, minlength=len(classes))
    hits = torch.bincount(answers.labels[right], minlength=len(classes))
    rows = [
        (float(hits[c] / images[c]), classes[c], int(images[c]))
        for c in range(len(classes))
        if int(images[c])
    ]
    note = ""
    if len(rows) > MAX_CLASSES:
        note = f"The {MAX_CLASSES} worst of {len(rows):,} classes, the worst first."
        rows = sorted(rows)[:MAX_CLASSES]
    bars = [Bar(name, share, f"{share:.0%} of {count:,}") for share, name, count in rows]
    return Bars(bars, note)


def _mistakes(model: MemoryViT, answers: Answers) -> Subsection:
    probability, predicted = answers.logits.softmax(1).max(1)
    wrong = torch.nonzero(predicted != answers.labels).flatten()
    worst = wrong[probability[wrong].argsort(descending=True)][:MAX_MISTAKES].tolist()
    shown = []
    for i in worst:
        name = answers.dataset.classes[int(predicted[i])]
        true = answers.dataset.classes[int(answers.labels[i])]
        confidence, alt = f"{float(probability[i]):.0%}", f"{true}, predicted {name}"
        shown.append(
            mistake(model, answers, i, alt, predicted=[name], true=[true], confidence=confidence)
        )
    note = f"{len(wrong):,} of {len(predicted):,} predictions are wrong"
    note += (
        ", the most confident first."
        if len(worst) == len(wrong)
        else f"; these are the {len(worst)} most confident ones."
    )
    return mistakes_subsection(answers, shown, note)
