"""Reports about noise: datasets of every kind of task, a model for them, and its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support.html import Checker

import engram
from engram.data.datasets import Dataset
from engram.data.source import Arrays
from engram.images.masks import Legend
from engram.inference.evaluate import Answers, answers
from engram.model import MemoryViT
from engram.report.contents import Section
from engram.report.page import write_sections
from engram.report.task_section import TaskPart, task_sections
from engram.tasks.kinds import KINDS
from engram.train.search.sweep import SweepResult
from engram.train.search.variants import Setting

NAMES = ("<script>alert(1)</script>", "a & b", "c" * 90)


def noise(
    images: int, names: Sequence[str] = NAMES, kind: str = "classification", size: int = 32
) -> Dataset:
    rng = np.random.default_rng(0)
    names = names[:1] if KINDS[kind].one_class else names
    classes = len(names)
    labels: dict[str, Any] = {
        "classification": np.arange(images) % classes,
        "multilabel": rng.integers(0, 2, (images, classes)),
        "regression": rng.normal(5, 30, (images, classes)).astype(np.float32),
        "segmentation": np.zeros((images, 0), dtype=np.int64),
        "anomaly": np.arange(images) % 2,
    }
    rows = Arrays(torch.randint(0, 256, (images, size, size, 3), dtype=torch.uint8), "noise")
    dataset = Dataset("noise", "test", tuple(names), labels[kind], rows, np.arange(images), kind)
    if not KINDS[kind].per_pixel:
        return dataset
    masks = torch.randint(0, classes, (images, size, size), dtype=torch.uint8)
    legend = Legend(tuple(range(classes)), 255)
    return replace(dataset, masks=Arrays(masks, "masks"), legend=legend)


def model_with(classes: Sequence[str], kind: str = "classification", **settings: Any) -> MemoryViT:
    """A random backbone with an untrained task `t`."""
    model = MemoryViT(engram.random_backbone())
    if KINDS[kind].one_class:
        settings = {"regime": "patchcore", "bank": 4}
    model.add_task("t", list(classes), kind=kind, **settings)
    return model.eval()


def answered(dataset: Dataset, **settings: Any) -> tuple[MemoryViT, Answers]:
    """A model for a dataset, and its answers."""
    model = model_with(dataset.classes, dataset.kind, **settings)
    return model, answers(model, dataset, "t", workers=0)


def history_of(kind: str) -> list[dict[str, float]]:
    score = f"val_{KINDS[kind].score}"
    return [{"step": s, "loss": 2 / s, "val_loss": 3 / s, score: 1 - 1 / s} for s in (1, 5, 9)]


def sweep_of(kind: str, count: int = 1) -> SweepResult:
    """A sweep, with settings from the worst to the best."""
    metric = KINDS[kind].score
    settings = tuple(Setting(i + 1, 1, 0.0, (i / 100,), metric) for i in range(count))
    return SweepResult(
        task="t", regime="masked", parameters=1, seconds=1.0, metrics={},
        settings=settings, best=settings[-1], seed=0,
    )  # fmt: skip


def write_page(
    path: Path,
    model: MemoryViT,
    of: Answers,
    tried: Section | None = None,
    lead: str = "",
    first: Sequence[Section] = (),
) -> tuple[str, Checker]:
    """The page about these answers, as text and read."""
    part = TaskPart(of, history_of(of.dataset.kind), tried=tried)
    sections = [*first, *task_sections(model, [part])]
    write_sections(path, "A page", lead, sections, model.backbone)
    html = path.read_text(encoding="utf-8")
    return html, Checker(html)
