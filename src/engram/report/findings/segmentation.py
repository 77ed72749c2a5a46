"""Segmentation: masks from the worst to the best, and the IoU of each class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engram.images.decode import BadImage, Pixels
from engram.images.masks import mask_view, palette
from engram.images.preprocessing import normalise
from engram.inference.evaluate import Answers
from engram.model import MemoryViT
from engram.report.contents import MAX_CLASSES, Bar, Bars, ImageRow, ImageTable, Subsection
from engram.report.images import backbone_view, paint_mask, thumbnail
from engram.tasks.kinds import IGNORED
from engram.tasks.metrics import intersection_over_union
from engram.util.text import counted

MAX_MASKS = 8


def segmentation_findings(model: MemoryViT, answers: Answers) -> list[Subsection]:
    return [
        Subsection(f"masks-{answers.task}", "Masks", [_masks(model, answers)]),
        Subsection(f"classes-{answers.task}", "IoU per class", [_class_ious(answers)]),
    ]


def _masks(model: MemoryViT, answers: Answers) -> ImageTable:
    """Images from the worst to the best, with the true and the predicted mask over them."""
    ious = intersection_over_union(answers.logits).nanmean(1)
    worst, others = _choose(ious)
    chosen = [*worst, *others]
    views = [backbone_view(model, answers.dataset, int(answers.samples[i])) for i in chosen]
    rows = []
    for i, view, predicted in zip(chosen, views, _predict(model, answers.task, views), strict=True):
        images = [
            thumbnail(view, "image"),
            thumbnail(paint_mask(view, _true_mask(model, answers, i)), "true mask"),
            thumbnail(paint_mask(view, predicted), "predicted mask"),
        ]
        name = Path(answers.dataset.sample_name(int(answers.samples[i]))).name
        rows.append(ImageRow(f"IoU {float(ious[i]):.3f}", images, name))
    classes = answers.dataset.classes
    note = (
        f"The {counted(len(worst), 'image')} with the lowest IoU, and {len(others)} from the next "
        "to the highest. Gray pixels of the true mask are ignored."
    )
    if len(classes) > MAX_CLASSES:
        note += f" The colours of the first {MAX_CLASSES} of {len(classes)} classes are listed."
    colours = [f"rgb({r} {g} {b})" for r, g, b in palette(len(classes)).tolist()]
    listed = list(zip(classes, colours, strict=True))[:MAX_CLASSES]
    return ImageTable(("image", "true", "predicted"), rows, note, "masks", listed)


def _choose(ious: Tensor) -> tuple[list[int], list[int]]:
    """The images with the lowest IoU, and as many evenly spaced over the others, in order."""
    ordered = ious.argsort().tolist()
    count = min(MAX_MASKS, len(ordered))
    worst, rest = ordered[: count // 2], ordered[count // 2 :]
    steps = np.linspace(0, len(rest) - 1, count - len(worst)).round().astype(int)
    return worst, [rest[step] for step in steps]


@torch.inference_mode()
def _predict(model: MemoryViT, task: str, views: Sequence[Pixels]) -> list[Pixels]:
    device = model.backbone.device
    pixels = normalise(torch.from_numpy(np.stack(views)).to(device), model.preprocessing)
    classes = model(pixels, tasks=[task])[task].argmax(1).cpu()
    return [mask.numpy().astype(np.uint8) for mask in classes]


def _true_mask(model: MemoryViT, answers: Answers, row: int) -> Pixels:
    """The true mask at the size that the backbone sees; ignored pixels if it is gone by now."""
    try:
        mask = answers.dataset.mask(int(answers.samples[row]))
        return mask_view(mask, model.preprocessing, np.random.default_rng(0))
    except BadImage:
        return np.full(model.preprocessing.size, IGNORED, dtype=np.uint8)


def _class_ious(answers: Answers) -> Bars:
    total = answers.logits.sum(0)
    ious, pixels = intersection_over_union(total), total[2].double()
    rows = [
        (float(ious[c]), name, float(pixels[c] / pixels.sum()))
        for c, name in enumerate(answers.dataset.classes)
        if not math.isnan(float(ious[c]))
    ]
    note = "Over the pixels of all images, at the size that the backbone sees."
    if len(rows) > MAX_CLASSES:
        note += f" The {MAX_CLASSES} worst of {len(rows):,} classes, the worst first."
        rows = sorted(rows)[:MAX_CLASSES]
    bars = [Bar(name, iou, f"{iou:.3f}, {share:.0%} of the pixels") for iou, name, share in rows]
    return Bars(bars, note)
