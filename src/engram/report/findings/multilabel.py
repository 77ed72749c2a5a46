"""Several labels per image: the scores of each class, and the images with wrong labels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from engram.inference.evaluate import Answers
from engram.model import MemoryViT
from engram.report.contents import MAX_CLASSES, Subsection, Table
from engram.report.findings.mistakes import MAX_MISTAKES, mistake, mistakes_subsection
from engram.tasks.metrics import average_precision


def multilabel_findings(model: MemoryViT, answers: Answers) -> list[Subsection]:
    predicted = answers.logits.sigmoid() >= answers.fitted["thresholds"]
    return [
        Subsection(f"classes-{answers.task}", "Scores per class", [_scores(answers, predicted)]),
        _mistakes(model, answers, predicted),
    ]


def _scores(answers: Answers, predicted: Tensor) -> Table:
    true, thresholds = answers.labels.bool(), answers.fitted["thresholds"]
    precision = average_precision(answers.logits, answers.labels)
    hits, count, found = (x.sum(0).double() for x in (predicted & true, true, predicted))
    rows = [
        (
            name,
            f"{precision[c]:.3f}" if count[c] else "-",
            f"{2 * hits[c] / max(1, float(count[c] + found[c])):.3f}",
            f"{hits[c] / max(1, float(found[c])):.3f}",
            f"{hits[c] / max(1, float(count[c])):.3f}",
            f"{float(thresholds[c]):.3f}",
            f"{int(count[c]):,}",
        )
        for c, name in enumerate(answers.dataset.classes)
    ]
    note = (
        "A class is predicted where its probability reaches its threshold, which was chosen on "
        "the validation images for the best F1. Average precision needs no threshold."
    )
    if len(rows) > MAX_CLASSES:
        worst = precision.where(count > 0, 2).argsort()[:MAX_CLASSES].tolist()
        note += f" The {MAX_CLASSES} worst of {len(rows):,} classes, the worst first."
        rows = [rows[c] for c in worst]
    columns = ("class", "average precision", "F1", "precision", "recall", "threshold", "images")
    return Table(columns, rows, note)


def _mistakes(model: MemoryViT, answers: Answers, predicted: Tensor) -> Subsection:
    true = answers.labels.bool()
    wrong = torch.nonzero((predicted != true).any(1)).flatten()
    labels = answers.labels.float()
    loss = binary_cross_entropy_with_logits(answers.logits, labels, reduction="none").mean(1)
    worst = wrong[loss[wrong].argsort(descending=True)][:MAX_MISTAKES].tolist()

    def names(row: Tensor) -> list[str]:
        return [answers.dataset.classes[c] for c in torch.nonzero(row).flatten().tolist()]

    shown = []
    for i in worst:
        here = names(true[i])
        alt = ", ".join(here[:6]) or "no label"
        shown.append(mistake(model, answers, i, alt, predicted=names(predicted[i]), true=here))
    note = (
        f"{len(wrong):,} of {len(predicted):,} images have a label too many or too few; these "
        "have the highest loss."
    )
    return mistakes_subsection(answers, shown, note)
