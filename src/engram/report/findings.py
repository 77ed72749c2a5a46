"""The predictions of each kind of task on its page: metrics per class, plots, mistakes, masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from engram.images.decode import BadImage, Pixels
from engram.images.masks import mask_view, palette
from engram.inference.evaluate import Answers
from engram.model import MemoryViT
from engram.report.contents import (
    MAX_CLASSES,
    Bar,
    Bars,
    Charts,
    Content,
    ImageRow,
    ImageTable,
    Matrix,
    MatrixCell,
    Mistake,
    Mistakes,
    Section,
    Table,
    Text,
)
from engram.report.images import (
    backbone_view,
    backbone_views,
    paint_heat,
    paint_mask,
    thumbnail,
)
from engram.tasks.kind import IGNORED
from engram.tasks.metrics import average_precision, intersection_over_union, r_squared
from engram.util.charts import Chart, histogram, scatter
from engram.util.text import counted

MAX_MISTAKES = 12
MAX_POINTS = 1000
MAX_PLOTS = 6
MAX_MASKS = 8


def _mistake(
    model: MemoryViT,
    answers: Answers,
    row: int,
    predicted: Sequence[str],
    true: Sequence[str],
    **more: str,
) -> Mistake:
    """The image of a row of the answers, with labels; `more` is its output and confidence."""
    sample = int(answers.samples[row])
    view = backbone_view(model, answers.dataset, sample)
    image = thumbnail(view, ", ".join(true[:6]) or "no label")
    return Mistake(image, answers.dataset.sample_name(sample), predicted, true, **more)


def _mistakes_section(
    answers: Answers, mistakes: Sequence[Mistake], note: str, title: str = "Worst mistakes"
) -> Section:
    shown: Content = Mistakes(mistakes, note) if mistakes else Text("There are none.")
    return Section(f"mistakes-{answers.task}", title, [shown])


def _worst(rows: int) -> str:
    return f"The {MAX_CLASSES} worst of {rows:,} classes, the worst first."


def _bars(rows: list[tuple[float, str, str]], note: str = "") -> Bars:
    """A bar for each class: its score, name, and the text at the end; of many, the worst."""
    if len(rows) > MAX_CLASSES:
        note, rows = f"{note}{_worst(len(rows))}", sorted(rows)[:MAX_CLASSES]
    return Bars([Bar(name, score, text) for score, name, text in rows], note)


# Classification


def _classification(model: MemoryViT, answers: Answers) -> list[Section]:
    return [
        Section(f"confusion-{answers.task}", "Confusion matrix", [_confusion(answers)]),
        Section(f"classes-{answers.task}", "Accuracy per class", [_accuracies(answers)]),
        _confident_mistakes(model, answers),
    ]


def _confusion(answers: Answers) -> Matrix:
    classes, labels, predicted = answers.dataset.classes, answers.labels, answers.logits.argmax(1)
    shown = list(range(len(classes)))
    note = (
        "Rows are true classes, columns are predicted classes. The stronger the colour, the "
        "larger the share of the row."
    )
    if len(classes) > MAX_CLASSES:  # those with the most mistakes, as true or as predicted class
        wrong = predicted != labels
        involved = torch.cat([labels[wrong], predicted[wrong]])
        counts = torch.bincount(involved, minlength=len(classes))
        shown = sorted(counts.topk(MAX_CLASSES).indices.tolist())
        note += (
            f" Only the {MAX_CLASSES} of {len(classes):,} classes with the most mistakes are shown."
        )
    names = [classes[c] for c in shown]
    tall = len(names) * max(map(len, names)) > 60
    rows = [_matrix_row(classes, r, shown, predicted[labels == r]) for r in shown]
    return Matrix(names, rows, note, tall)


def _matrix_row(
    classes: Sequence[str], row: int, shown: Sequence[int], predicted: Tensor
) -> list[MatrixCell]:
    """The predictions for the images of class `row`, for each of the shown classes."""
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
    shares = [(c, float(hits[c] / images[c])) for c in range(len(classes)) if int(images[c])]
    return _bars([(one, classes[c], f"{one:.0%} of {int(images[c]):,}") for c, one in shares])


def _confident_mistakes(model: MemoryViT, answers: Answers) -> Section:
    classes, (probability, predicted) = answers.dataset.classes, answers.logits.softmax(1).max(1)
    wrong = torch.nonzero(predicted != answers.labels).flatten()
    worst = wrong[probability[wrong].argsort(descending=True)][:MAX_MISTAKES].tolist()
    shown = []
    for i in worst:
        labels = [classes[int(predicted[i])]], [classes[int(answers.labels[i])]]
        confidence = f"{float(probability[i]):.0%}"
        shown.append(_mistake(model, answers, i, *labels, confidence=confidence))
    note = f"{len(wrong):,} of {len(predicted):,} predictions are wrong"
    note += (
        ", the most confident first."
        if len(worst) == len(wrong)
        else f"; these are the {len(worst)} most confident ones."
    )
    return _mistakes_section(answers, shown, note)


# Several labels per image


def _multilabel(model: MemoryViT, answers: Answers) -> list[Section]:
    predicted = answers.logits.sigmoid() >= answers.fitted["thresholds"]
    per_class = _class_metrics(answers, predicted)
    return [
        Section(f"classes-{answers.task}", "Metrics per class", [per_class]),
        _wrong_labels(model, answers, predicted),
    ]


def _class_metrics(answers: Answers, predicted: Tensor) -> Table:
    true, thresholds = answers.labels.bool(), answers.fitted["thresholds"]
    precision = average_precision(answers.logits, answers.labels)
    hits, count, found = (x.sum(0).double() for x in (predicted & true, true, predicted))
    rows = [
        (
            name,
            f"{precision[c]:.1%}" if count[c] else "-",
            f"{2 * hits[c] / max(1, float(count[c] + found[c])):.1%}",
            f"{hits[c] / max(1, float(found[c])):.1%}",
            f"{hits[c] / max(1, float(count[c])):.1%}",
            f"{float(thresholds[c]):.1%}",
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
        note += f" {_worst(len(rows))}"
        rows = [rows[c] for c in worst]
    columns = ("class", "average precision", "F1", "precision", "recall", "threshold", "images")
    return Table(columns, rows, note)


def _wrong_labels(model: MemoryViT, answers: Answers, predicted: Tensor) -> Section:
    true, labels = answers.labels.bool(), answers.labels.float()
    wrong = torch.nonzero((predicted != true).any(1)).flatten()
    loss = binary_cross_entropy_with_logits(answers.logits, labels, reduction="none").mean(1)
    worst = wrong[loss[wrong].argsort(descending=True)][:MAX_MISTAKES].tolist()

    def names(row: Tensor) -> list[str]:
        return [answers.dataset.classes[c] for c in torch.nonzero(row).flatten().tolist()]

    shown = [_mistake(model, answers, i, names(predicted[i]), names(true[i])) for i in worst]
    note = (
        f"{len(wrong):,} of {len(predicted):,} images have a label too many or too few; these "
        "have the highest loss."
    )
    return _mistakes_section(answers, shown, note)


# Regression


def _regression(model: MemoryViT, answers: Answers) -> list[Section]:
    note = "The images with the largest errors, the worst first."
    return [
        Section(f"scatter-{answers.task}", "Predicted and true values", [_scatter(answers)]),
        Section(f"classes-{answers.task}", "Errors of each number", [_errors(answers)]),
        _mistakes_section(answers, _largest_errors(model, answers), note, "Largest errors"),
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
    """The images with the worst numbers, measured in standard deviations; one number of each."""
    error = ((answers.logits - answers.labels) / answers.fitted["std"]).abs()
    worst = error.max(1).values.argsort(descending=True)[:MAX_MISTAKES].tolist()
    shown = []
    for i in worst:
        c = int(error[i].argmax())
        values = ([f"{float(numbers[i, c]):.4g}"] for numbers in (answers.logits, answers.labels))
        shown.append(_mistake(model, answers, i, *values, output=answers.dataset.classes[c]))
    return shown


# Segmentation


def _segmentation(model: MemoryViT, answers: Answers) -> list[Section]:
    return [
        Section(f"masks-{answers.task}", "Masks", [_masks(model, answers)]),
        Section(f"classes-{answers.task}", "IoU per class", [_class_ious(answers)]),
    ]


def _masks(model: MemoryViT, answers: Answers) -> ImageTable:
    """Images from the worst to the best, with the true and the predicted mask over them.

    The images with the lowest IoU, and as many evenly spaced over the others, in order.
    """
    ious, dataset = intersection_over_union(answers.logits).nanmean(1), answers.dataset
    ordered = ious.argsort().tolist()
    count = min(MAX_MASKS, len(ordered))
    worst, rest = ordered[: count // 2], ordered[count // 2 :]
    steps = np.linspace(0, len(rest) - 1, count - len(worst)).round().astype(int)
    chosen = [*worst, *(rest[step] for step in steps)]
    rows = []
    for i, sample, view, output in _answered_again(model, answers, chosen):
        predicted = output.argmax(0).numpy().astype(np.uint8)
        images = [
            thumbnail(view, "image"),
            thumbnail(paint_mask(view, _true_mask(model, answers, sample)), "true mask"),
            thumbnail(paint_mask(view, predicted), "predicted mask"),
        ]
        name = Path(dataset.sample_name(sample)).name
        rows.append(ImageRow(f"IoU {float(ious[i]):.1%}", images, name))
    classes = dataset.classes
    note = (
        f"The {counted(len(worst), 'image')} with the lowest IoU, and {len(chosen) - len(worst)} "
        "from the next to the highest. Gray pixels of the true mask are ignored."
    )
    if len(classes) > MAX_CLASSES:
        note += f" The colours of the first {MAX_CLASSES} of {len(classes)} classes are listed."
    colours = [f"rgb({r} {g} {b})" for r, g, b in palette(len(classes)).tolist()]
    listed = list(zip(classes, colours, strict=True))[:MAX_CLASSES]
    return ImageTable(("image", "true", "predicted"), rows, note, "masks", listed)


def _answered_again(
    model: MemoryViT, answers: Answers, rows: Sequence[int]
) -> Iterable[tuple[int, int, Pixels, Tensor]]:
    """Rows of the answers, each with its sample, the image, and the output for it."""
    samples = [int(answers.samples[i]) for i in rows]
    views, pixels = backbone_views(model, answers.dataset, samples)
    with torch.inference_mode():
        outputs = model(pixels, tasks=[answers.task])[answers.task].cpu()
    return zip(rows, samples, views, outputs, strict=True)


def _true_mask(model: MemoryViT, answers: Answers, sample: int) -> Pixels:
    """The true mask at the size that the backbone sees; ignored pixels if it is gone by now."""
    try:
        mask = answers.dataset.mask(sample)
        return mask_view(mask, model.preprocessing, np.random.default_rng(0))
    except BadImage:
        return np.full(model.preprocessing.size, IGNORED, dtype=np.uint8)


def _class_ious(answers: Answers) -> Bars:
    total = answers.logits.sum(0)
    ious, pixels = intersection_over_union(total), total[2].double()
    shares = pixels / pixels.sum()
    rows = [
        (iou, answers.dataset.classes[c], f"{iou:.1%}, {float(shares[c]):.0%} of the pixels")
        for c, iou in enumerate(ious.tolist())
        if not math.isnan(iou)
    ]
    note = "Over the pixels of all images, at the size that the backbone sees. "
    return _bars(rows, note)


# Good images, and others


def _anomaly(model: MemoryViT, answers: Answers) -> list[Section]:
    return [
        Section(f"scores-{answers.task}", "Scores", [_score_histogram(answers)]),
        Section(f"maps-{answers.task}", "Heat maps", [_heat_maps(model, answers)]),
    ]


def _score_histogram(answers: Answers) -> Charts:
    scores, wrong = answers.logits[:, 0].double(), answers.labels.bool()
    threshold = float(answers.fitted["thresholds"])
    groups = [("good", scores[~wrong].tolist()), ("anomalous", scores[wrong].tolist())]
    chart = histogram([(name, own) for name, own in groups if own], "score", threshold)
    note = (
        "The score of an image is the mean distance of its worst patches to the nearest patches "
        f"of good images. Above the dashed line, at {threshold:.3f}, it is called anomalous."
    )
    return Charts([Chart("score", chart)], note)


def _heat_maps(model: MemoryViT, answers: Answers) -> ImageTable:
    """Images that are answered wrong, the farthest from the threshold first, then the highest."""
    scores, wrong = answers.logits[:, 0], answers.labels.bool()
    threshold = float(answers.fitted["thresholds"])
    missed = (scores > threshold) != wrong
    order = torch.where(missed, 10 + (scores - threshold).abs(), scores)
    chosen, rows = order.argsort(descending=True)[: 2 * MAX_MASKS].tolist(), []
    for i, sample, view, own in _answered_again(model, answers, chosen):
        images = [thumbnail(view, "image"), thumbnail(paint_heat(view, own / threshold), "map")]
        what = "false alarm" if missed[i] and not wrong[i] else "missed" if missed[i] else ""
        label = f"{float(scores[i]):.3f}" + (f", {what}" if what else "")
        rows.append(ImageRow(label, images, Path(answers.dataset.sample_name(sample)).name))
    note = (
        f"{int(missed.sum()):,} of {len(scores):,} images are answered wrong. They come first, "
        "then the images with the highest scores. Where the map is bright, patches are unlike all "
        "of the good images."
    )
    return ImageTable(("image", "heat map"), rows, note, "masks")


#: The sections of a task's section, by the name of its kind.
FINDINGS: Mapping[str, Callable[[MemoryViT, Answers], Sequence[Section]]] = {
    "classification": _classification,
    "multilabel": _multilabel,
    "regression": _regression,
    "segmentation": _segmentation,
    "anomaly": _anomaly,
}
