"""What a page shows of every kind of task, however strange its names and few its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.html import Checker

import engram
from engram.data.datasets import Dataset
from engram.data.source import Arrays
from engram.images.masks import Legend, palette
from engram.inference.evaluate import Answers, answers
from engram.model import MemoryViT
from engram.report.findings import FINDINGS, MOST_MASKS, painted
from engram.report.page import TaskPart, write_report
from engram.tasks.kinds import KINDS

NAMES = ("<script>alert(1)</script>", "a & b", "c" * 90)
BLOCKS = {
    "classification": {"confusion", "classes", "mistakes", "looks", "reads"},
    "multilabel": {"classes", "mistakes", "looks", "reads"},
    "regression": {"scatter", "classes", "mistakes", "looks", "reads"},
    "segmentation": {"masks", "classes", "looks", "reads"},
}


def noise(kind: str, images: int, names: tuple[str, ...] = NAMES) -> Dataset:
    rng = np.random.default_rng(0)
    classes = len(names)
    labels: dict[str, Any] = {
        "classification": np.arange(images) % classes,
        "multilabel": rng.integers(0, 2, (images, classes)),
        "regression": rng.normal(5, 30, (images, classes)).astype(np.float32),
        "segmentation": np.zeros((images, 0), dtype=np.int64),
    }
    rows = Arrays(torch.randint(0, 256, (images, 32, 32, 3), dtype=torch.uint8), "noise")
    masks = Arrays(torch.randint(0, classes, (images, 32, 32), dtype=torch.uint8), "masks")
    per_pixel = KINDS[kind].per_pixel
    return Dataset(
        "noise", "test", names, labels[kind], rows, np.arange(images), kind,
        masks if per_pixel else None, Legend(tuple(range(classes)), 255) if per_pixel else None,
    )  # fmt: skip


def page(kind: str, dataset: Dataset, path: Path, **settings: Any) -> tuple[str, Checker, Answers]:
    model = MemoryViT(engram.random_trunk())
    model.add_task("t", dataset.classes, kind=kind, **settings)
    said = answers(model.eval(), dataset, "t", workers=0)
    score = f"val_{KINDS[kind].score}"
    history = [{"step": s, "loss": 2 / s, "val_loss": 3 / s, score: 1 - 1 / s} for s in (1, 5, 9)]
    tried = [
        {"lr": 0.1, "cells": 1, "weight_decay": 0.0, score: 0.5, "deviation": 0.1, "scores": [1]}
    ]
    write_report(path, model, [TaskPart(said, history, tried)], title="A page")
    html = path.read_text(encoding="utf-8")
    return html, Checker(html), said


@pytest.mark.parametrize("kind", FINDINGS)
def test_every_kind_has_its_page(kind: str, tmp_path: Path) -> None:
    html, found, _ = page(kind, noise(kind, 14), tmp_path / "r.html")
    expected = {f"{block}-t" for block in (*BLOCKS[kind], "curves", "settings")}
    assert expected | {"task-t", "regimes"} <= set(found.ids)
    assert len(set(found.ids)) == len(found.ids)
    assert found.fetched == []
    assert "script" not in found.tags
    assert KINDS[kind].title in html


@pytest.mark.parametrize("kind", FINDINGS)
def test_one_picture_is_enough_for_a_page(kind: str, tmp_path: Path) -> None:
    page(kind, noise(kind, 1), tmp_path / "r.html")


@pytest.mark.parametrize("kind", FINDINGS)
def test_many_classes_are_cut(kind: str, tmp_path: Path) -> None:
    names = tuple(f"name {i}" for i in range(60))
    html, _, _ = page(kind, noise(kind, 20, names), tmp_path / "r.html", cells=1)
    assert len(html) < 1_500_000


@pytest.mark.parametrize("regime", ["head", "memory"])
def test_only_a_task_with_class_tokens_for_its_masks_looks(regime: str, tmp_path: Path) -> None:
    _, found, _ = page("segmentation", noise("segmentation", 4), tmp_path / "r.html", regime=regime)
    assert "masks-t" in found.ids
    assert "looks-t" not in found.ids


def test_masks_are_shown_from_the_worst_to_the_best(tmp_path: Path) -> None:
    html, _, said = page("segmentation", noise("segmentation", 30), tmp_path / "r.html")
    shown = [float(part[:5]) for part in html.split("<td>IoU ")[1:]]
    assert len(shown) == MOST_MASKS
    assert shown == sorted(shown)
    right, told, true = said.logits.double().unbind(1)
    each = (right / (told + true - right)).nanmean(1)
    assert shown[0] == pytest.approx(float(each.min()), abs=1e-3)
    assert shown[-1] == pytest.approx(float(each.max()), abs=1e-3)


def test_a_picture_is_painted_with_the_colours_of_its_classes() -> None:
    view = np.zeros((1, 3, 3), dtype=np.uint8)
    drawn = painted(view, np.array([[0, 1, 255]], dtype=np.uint8))
    colours = palette(2)
    assert drawn[0, 0].tolist() == np.rint(0.55 * colours[0]).tolist()
    assert drawn[0, 1].tolist() == np.rint(0.55 * colours[1]).tolist()
    assert len(set(drawn[0, 2].tolist())) == 1  # gray: ignored
    far = np.abs(palette(8)[:, None].astype(int) - palette(8)[None]).sum(-1)
    assert far[~np.eye(8, dtype=bool)].min() > 60


def test_the_matrix_counts_what_was_answered() -> None:
    """Of more classes than are shown, those with most mistakes."""
    names = tuple(f"n{i}" for i in range(60))
    dataset = noise("classification", 120, names)
    logits = torch.nn.functional.one_hot(torch.from_numpy(dataset.labels), 60).float()
    logits[[5, 65]] = 0
    logits[[5, 65], 7] = 1  # both of class 5 are taken for 7
    said = Answers(
        "t", dataset, logits, torch.from_numpy(dataset.labels), torch.arange(120), (), {}
    )
    model = MemoryViT(engram.random_trunk())
    (_, _, html), *_ = FINDINGS["classification"](model, said)
    assert "2 of 2: n5, answered n7" in html
    assert "2 of 2: n7, answered n7" in html
    assert html.count('scope="row"') == 20
