"""Regression: predicted over true values, the errors of each number, the largest errors."""

from __future__ import annotations

from engram.inference.evaluate import Answers
from engram.model import MemoryViT
from engram.report.contents import MAX_CLASSES, Charts, Mistake, Subsection, Table
from engram.report.findings.mistakes import MAX_MISTAKES, mistake, mistakes_subsection
from engram.tasks.metrics import r_squared
from engram.util.charts import Chart, scatter

MAX_POINTS = 1000
MAX_PLOTS = 6


def regression_findings(model: MemoryViT, answers: Answers) -> list[Subsection]:
    note = "The images with the largest errors, the worst first."
    return [
        Subsection(f"scatter-{answers.task}", "Predicted and true values", [_scatter(answers)]),
        Subsection(f"classes-{answers.task}", "Errors of each number", [_errors(answers)]),
        mistakes_subsection(answers, _largest_errors(model, answers), note, "Largest errors"),
    ]


def _scatter(answers: Answers) -> Charts:
    values, labels = answers.logits[:MAX_POINTS], answers.labels[:MAX_POINTS]
    names = answers.dataset.classes
    charts = [
        Chart(name, scatter(labels[:, c].tolist(), values[:, c].tolist(), name))
        for c, name in enumerate(names[:MAX_PLOTS])
    ]
    note = "One point per image. On the dashed line the prediction is exact."
    if len(answers.labels) > MAX_POINTS:
        note += f" The first {MAX_POINTS:,} of {len(answers.labels):,} images."
    if len(names) > MAX_PLOTS:
        note += f" The first {MAX_PLOTS} of {len(names):,} numbers."
    return Charts(charts, note)


def _errors(answers: Answers) -> Table:
    values, labels = answers.logits.double(), answers.labels.double()
    names, error, explained = answers.dataset.classes, values - labels, r_squared(values, labels)
    rows = [
        (
            name,
            f"{explained[c]:.3f}",
            f"{error[:, c].abs().mean():.4g}",
            f"{error[:, c].square().mean().sqrt():.4g}",
            f"{error[:, c].mean():+.4g}",
            f"{labels[:, c].mean():.4g} ± {labels[:, c].std(correction=0):.4g}",
        )
        for c, name in enumerate(names[: 2 * MAX_CLASSES])
    ]
    note = "Errors are in the units of the labels."
    if len(rows) < len(names):
        note += f" The first {len(rows)} of {len(names):,} numbers."
    columns = ("number", "R²", "mean absolute error", "RMSE", "mean error", "labels")
    return Table(columns, rows, note)


def _largest_errors(model: MemoryViT, answers: Answers) -> list[Mistake]:
    """Of each image the worst of its numbers, measured in standard deviations."""
    error = ((answers.logits - answers.labels) / answers.fitted["std"]).abs()
    worst = error.max(1).values.argsort(descending=True)[:MAX_MISTAKES].tolist()
    shown = []
    for i in worst:
        c = int(error[i].argmax())
        name, true = answers.dataset.classes[c], f"{float(answers.labels[i, c]):.4g}"
        predicted = f"{float(answers.logits[i, c]):.4g}"
        alt = f"{name} {true}"
        shown.append(
            mistake(model, answers, i, alt, predicted=[predicted], true=[true], output=name)
        )
    return shown
