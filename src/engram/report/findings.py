"""What each kind of task shows of its answers on a report's page: numbers, classes, mistakes.

`FINDINGS` has a function for every kind that gives the blocks of its section, and `examples`
chooses the pictures that a task's looks are shown on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engram.data.datasets import Dataset
from engram.images.decode import BadImage, Pixels
from engram.images.masks import mask_view, palette
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.inference.evaluate import Answers
from engram.model import MemoryViT
from engram.report.pieces import bars, charts, key, paragraph, picture, short, table
from engram.tasks.kinds import IGNORED
from engram.tasks.metrics import average_precision, intersection_over_union, r_squared
from engram.util.charts import Chart, scatter

MOST_CLASSES = 20  # in a confusion matrix and in the list of classes
MOST_MISTAKES = 12
MOST_MASKS = 8
MOST_POINTS = 1000

Blocks = list[tuple[str, str, str]]  # a key, a title, and HTML


def examples(said: Answers) -> list[tuple[int, str]]:
    """Pictures to show, as rows of the answers, each with a word about it.

    Of classification the first of every class that was answered right.
    """
    if said.labels.ndim == 1 and not said.kind.per_pixel:
        return [(i, said.dataset.classes[int(said.labels[i])]) for i in _one_of_each(said)]
    return [(i, _file(said, i)) for i in range(len(said.samples))]


def _one_of_each(said: Answers) -> list[int]:
    """The first picture of every class that was answered right; the first ones if none was."""
    labels, answer = said.labels.tolist(), said.logits.argmax(1).tolist()
    first: dict[int, int] = {}
    for i, (label, told) in enumerate(zip(labels, answer, strict=True)):
        if label == told:
            first.setdefault(label, i)
    return [first[label] for label in sorted(first)] or list(range(len(labels)))


def _file(said: Answers, row: int) -> str:
    return Path(said.dataset.sample_name(int(said.samples[row]))).name


def _figure(model: MemoryViT, said: Answers, row: int, alt: str, caption: str) -> str:
    """A picture with HTML below it, and then its name."""
    sample = int(said.samples[row])
    where = said.dataset.sample_name(sample)
    return (
        f"<figure>{picture(view_of(model, said.dataset, sample), alt)}<figcaption>{caption}<br>"
        f'<span title="{escape(where)}">{escape(short(Path(where).name, 30))}</span>'
        "</figcaption></figure>"
    )


def _pictures(figures: Sequence[str], note: str) -> str:
    return paragraph(note, quiet=True) + f'<div class="pictures">{"".join(figures)}</div>'


# One class a picture


def _classification(model: MemoryViT, said: Answers) -> Blocks:
    return [
        ("confusion", "Confusion matrix", _confusion(said)),
        ("classes", "Accuracy of each class", _per_class(said)),
        ("mistakes", "Worst mistakes", _mistakes(model, said)),
    ]


def _confusion(said: Answers) -> str:
    classes, answer = said.dataset.classes, said.logits.argmax(1)
    pictures = torch.bincount(said.labels, minlength=len(classes))
    note = (
        "Rows are the true classes, columns the answers; the stronger the colour, the larger the "
        "share of the row."
    )
    shown = list(range(len(classes)))
    if len(classes) > MOST_CLASSES:
        missed = answer != said.labels
        wrong = torch.bincount(
            torch.cat([said.labels[missed], answer[missed]]), minlength=len(classes)
        )
        shown = sorted(wrong.topk(MOST_CLASSES).indices.tolist())
        note += (
            f" Only the {MOST_CLASSES} of {len(classes):,} classes with most mistakes are shown."
        )
    tall = " tall" if len(shown) * max(len(classes[c]) for c in shown) > 60 else ""
    head = "".join(
        f'<th scope="col" title="{escape(classes[c])}">{escape(short(classes[c], 24))}</th>'
        for c in shown
    )
    rows = []
    for r in shown:
        told = torch.bincount(answer[said.labels == r], minlength=len(classes))
        total = max(1, int(pictures[r]))
        cells = []
        for c in shown:
            count = int(told[c])
            share = count / total
            kind = "right" if r == c else ""
            kind += " deep" if share > 0.5 else "" if count else " none"
            what = f"{count} of {total}: {classes[r]}, answered {classes[c]}"
            cells.append(
                f'<td class="{kind}" style="--share:{math.sqrt(share):.2f}" title="{escape(what)}">'
                f"{count}</td>"
            )
        rows.append(
            f'<tr><th scope="row">{escape(short(classes[r], 24))}</th>{"".join(cells)}</tr>'
        )
    return (
        f'{paragraph(note, quiet=True)}<div class="wide"><table class="matrix{tall}"><thead>'
        f"<tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _per_class(said: Answers) -> str:
    classes = said.dataset.classes
    right = said.logits.argmax(1) == said.labels
    seen = torch.bincount(said.labels, minlength=len(classes))
    hits = torch.bincount(said.labels[right], minlength=len(classes))
    rows = [
        (float(hits[c] / seen[c]), classes[c], int(seen[c]))
        for c in range(len(classes))
        if int(seen[c])
    ]
    note = ""
    if len(rows) > MOST_CLASSES:
        note = paragraph(
            f"The {MOST_CLASSES} worst of {len(rows):,} classes, the worst first.", quiet=True
        )
        rows = sorted(rows)[:MOST_CLASSES]
    return note + bars([(name, share, f"{share:.0%} of {count:,}") for share, name, count in rows])


def _mistakes(model: MemoryViT, said: Answers) -> str:
    probability, answer = said.logits.softmax(1).max(1)
    wrong = torch.nonzero(answer != said.labels).flatten()
    if not len(wrong):
        return paragraph("There are none.")
    worst = wrong[probability[wrong].argsort(descending=True)][:MOST_MISTAKES].tolist()
    classes, figures = said.dataset.classes, []
    for i in worst:
        told, true = classes[int(answer[i])], classes[int(said.labels[i])]
        caption = (
            f'<span class="bad">{escape(short(told, 40))}</span> {float(probability[i]):.0%}, '
            f'is <span class="good">{escape(short(true, 40))}</span>'
        )
        figures.append(_figure(model, said, i, f"{true}, taken for {told}", caption))
    note = (
        f"{len(wrong):,} of {len(answer):,} answers are wrong; "
        + ("these are" if len(worst) == len(wrong) else f"these {len(worst)} are")
        + " the ones it was surest of."
    )
    return _pictures(figures, note)


# Several labels a picture


def _multilabel(model: MemoryViT, said: Answers) -> Blocks:
    told = said.logits.sigmoid() >= said.settled["thresholds"]
    return [
        ("classes", "Every class", _label_table(said, told)),
        ("mistakes", "Worst mistakes", _wrong_labels(model, said, told)),
    ]


def _label_table(said: Answers, told: Tensor) -> str:
    true = said.labels.bool()
    precision = average_precision(said.logits, said.labels)
    hits, count, said_of = (x.sum(0).double() for x in (told & true, true, told))
    rows = [
        (
            name,
            f"{precision[c]:.3f}" if count[c] else "-",
            f"{2 * hits[c] / max(1, float(count[c] + said_of[c])):.3f}",
            f"{hits[c] / max(1, float(said_of[c])):.3f}",
            f"{hits[c] / max(1, float(count[c])):.3f}",
            f"{float(said.settled['thresholds'][c]):.3f}",
            f"{int(count[c]):,}",
        )
        for c, name in enumerate(said.dataset.classes)
    ]
    note = (
        "A class is said where its probability reaches its threshold, which was chosen on "
        "validation for the best F1. Average precision needs no threshold."
    )
    if len(rows) > MOST_CLASSES:
        worst = precision.where(count > 0, 2).argsort()[:MOST_CLASSES].tolist()
        note += f" The {MOST_CLASSES} worst of {len(rows):,} classes, the worst first."
        rows = [rows[c] for c in worst]
    columns = ("class", "average precision", "F1", "precision", "recall", "threshold", "pictures")
    return table(columns, rows, note)


def _wrong_labels(model: MemoryViT, said: Answers, told: Tensor) -> str:
    true = said.labels.bool()
    wrong = torch.nonzero((told != true).any(1)).flatten()
    if not len(wrong):
        return paragraph("There are none.")
    lost = torch.nn.functional.binary_cross_entropy_with_logits(
        said.logits, said.labels.float(), reduction="none"
    ).mean(1)
    worst = wrong[lost[wrong].argsort(descending=True)][:MOST_MISTAKES].tolist()

    def names(row: Tensor) -> str:
        held = [said.dataset.classes[c] for c in torch.nonzero(row).flatten().tolist()]
        return ", ".join(short(name, 24) for name in held[:6]) + (", …" if len(held) > 6 else "")

    figures = [
        _figure(
            model,
            said,
            i,
            names(true[i]) or "no label",
            f'<span class="bad">{escape(names(told[i]) or "none")}</span>, is '
            f'<span class="good">{escape(names(true[i]) or "none")}</span>',
        )
        for i in worst
    ]
    note = (
        f"{len(wrong):,} of {len(told):,} pictures have a label too many or too few; "
        "these are the ones it was surest of."
    )
    return _pictures(figures, note)


# Numbers


def _regression(model: MemoryViT, said: Answers) -> Blocks:
    return [
        ("scatter", "Answered and true", _scatters(said)),
        ("classes", "Every number", _number_table(said)),
        ("mistakes", "Largest errors", _errors(model, said)),
    ]


def _scatters(said: Answers) -> str:
    values, labels = said.logits[:MOST_POINTS], said.labels[:MOST_POINTS]
    plots = [
        Chart(name, scatter(labels[:, c].tolist(), values[:, c].tolist(), name))
        for c, name in enumerate(said.dataset.classes[:6])
    ]
    note = "A point for each picture; on the dashed line the answer is right."
    if len(said.labels) > MOST_POINTS:
        note += f" The first {MOST_POINTS:,} of {len(said.labels):,} pictures."
    if len(said.dataset.classes) > 6:
        note += f" The first 6 of {len(said.dataset.classes):,} numbers."
    return paragraph(note, quiet=True) + charts(plots)


def _number_table(said: Answers) -> str:
    values, labels = said.logits.double(), said.labels.double()
    error, explained = values - labels, r_squared(values, labels)
    rows = [
        (
            name,
            f"{explained[c]:.3f}",
            f"{error[:, c].abs().mean():.4g}",
            f"{error[:, c].square().mean().sqrt():.4g}",
            f"{error[:, c].mean():+.4g}",
            f"{labels[:, c].mean():.4g} ± {labels[:, c].std(correction=0):.4g}",
        )
        for c, name in enumerate(said.dataset.classes[: 2 * MOST_CLASSES])
    ]
    note = "Errors are in the units of the labels."
    if len(rows) < len(said.dataset.classes):
        note += f" The first {len(rows)} of {len(said.dataset.classes):,} numbers."
    columns = ("number", "R²", "mean absolute error", "RMSE", "mean error", "labels")
    return table(columns, rows, note)


def _errors(model: MemoryViT, said: Answers) -> str:
    error = ((said.logits - said.labels) / said.settled["std"]).abs()
    worst = error.max(1).values.argsort(descending=True)[:MOST_MISTAKES].tolist()
    figures = []
    for i in worst:
        c = int(error[i].argmax())
        name, told, true = (
            said.dataset.classes[c],
            float(said.logits[i, c]),
            float(said.labels[i, c]),
        )
        caption = (
            f'{escape(short(name, 24))} <span class="bad">{told:.4g}</span>, is '
            f'<span class="good">{true:.4g}</span>'
        )
        figures.append(_figure(model, said, i, f"{name} {true:.4g}", caption))
    return _pictures(figures, "The pictures with the largest errors, the worst first.")


# A class for every pixel


def _segmentation(model: MemoryViT, said: Answers) -> Blocks:
    return [
        ("masks", "Masks", _masks(model, said)),
        ("classes", "IoU of each class", _class_ious(said)),
    ]


def _class_ious(said: Answers) -> str:
    total = said.logits.sum(0)
    ious, pixels = intersection_over_union(total), total[2].double()
    rows = [
        (float(ious[c]), name, float(pixels[c] / pixels.sum()))
        for c, name in enumerate(said.dataset.classes)
        if not math.isnan(float(ious[c]))
    ]
    note = "Over the pixels of all pictures together, at the size that the trunk sees."
    if len(rows) > MOST_CLASSES:
        note += f" The {MOST_CLASSES} worst of {len(rows):,} classes, the worst first."
        rows = sorted(rows)[:MOST_CLASSES]
    drawn = bars([(n, iou, f"{iou:.3f}, {share:.0%} of the pixels") for iou, n, share in rows])
    return paragraph(note, quiet=True) + drawn


def _masks(model: MemoryViT, said: Answers) -> str:
    """Pictures from the worst to the best, with the true and the answered mask over them."""
    each = intersection_over_union(said.logits).nanmean(1)
    ordered = each.argsort().tolist()
    count = min(MOST_MASKS, len(ordered))
    worst, rest = ordered[: count // 2], ordered[count // 2 :]
    steps = np.linspace(0, len(rest) - 1, count - len(worst)).round().astype(int)
    chosen = [*worst, *(rest[step] for step in steps)]
    classes, preprocessing = said.dataset.classes, model.preprocessing
    views = [view_of(model, said.dataset, int(said.samples[i])) for i in chosen]
    device = model.trunk.position.device
    with torch.inference_mode():
        pixels = normalise(torch.from_numpy(np.stack(views)).to(device), preprocessing)
        answered = model(pixels, tasks=[said.task])[said.task].argmax(1).cpu()
    rows = []
    for i, view, answer in zip(chosen, views, answered, strict=True):
        try:
            mask = said.dataset.mask(int(said.samples[i]))
            true = mask_view(mask, preprocessing, np.random.default_rng(0))
        except BadImage:  # gone since
            true = np.full(view.shape[:2], IGNORED, dtype=np.uint8)
        shown = (
            (view, "picture"),
            (painted(view, true), "true"),
            (painted(view, answer.numpy().astype(np.uint8)), "answered"),
        )
        cells = "".join(f"<td>{picture(one, alt)}</td>" for one, alt in shown)
        name = _file(said, i)
        word = f'<span title="{escape(name)}">{escape(short(name, 30))}</span>'
        rows.append(f"<tr><td>IoU {float(each[i]):.3f}<br>{word}</td>{cells}</tr>")
    note = (
        f"The {len(worst)} worst pictures, and {len(chosen) - len(worst)} from the next to the "
        "best. Where the true mask is gray, pixels are ignored."
    )
    if len(classes) > MOST_CLASSES:
        note += f" Colours are told of the first {MOST_CLASSES} of {len(classes)} classes."
    colours = (f"rgb({r} {g} {b})" for r, g, b in palette(len(classes)).tolist())
    return (
        paragraph(note, quiet=True)
        + key(list(zip(classes, colours, strict=True))[:MOST_CLASSES])
        + '<div class="wide"><table class="looks masks"><thead><tr><th></th>'
        + "".join(f'<th scope="col">{word}</th>' for word in ("picture", "true", "answered"))
        + f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def painted(view: Pixels, mask: Pixels) -> Pixels:
    """A picture with the colour of each pixel's class over it, and gray where it is ignored."""
    colours = np.full((256, 3), 128, dtype=np.uint8)
    colours[:IGNORED] = palette(IGNORED)
    mixed: Pixels = np.rint(0.45 * view + 0.55 * colours[mask]).astype(np.uint8)
    return mixed


FINDINGS: Mapping[str, Callable[[MemoryViT, Answers], Blocks]] = {
    "classification": _classification,
    "multilabel": _multilabel,
    "regression": _regression,
    "segmentation": _segmentation,
}


# Pixels


def view_of(model: MemoryViT, dataset: Dataset, sample: int) -> Pixels:
    """The picture as the trunk sees it; gray where it cannot be read any more."""
    preprocessing = model.preprocessing
    try:
        return evaluation_view(dataset.read(sample), preprocessing)
    except BadImage:
        return np.full((*preprocessing.size, 3), 128, dtype=np.uint8)
