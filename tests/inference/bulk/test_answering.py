"""A batch of images becomes rows, here as on a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import engram
from engram import EngramError, MemoryViT
from engram.inference.bulk.answering import ItemBatch, Questions, answered_here, column
from engram.inference.bulk.bulk_settings import BulkSettings
from engram.inference.bulk.decoders import Item


@pytest.fixture
def questions(small_backbone: Path, tmp_path: Path) -> Questions:
    model = MemoryViT(engram.load_backbone(small_backbone)).eval()
    model.add_task("error", ["one", "two"])
    model.add_task("ground", ["one", "two"], kind="segmentation")
    settings = BulkSettings(decoders=0, logits=True)
    return Questions(model, ["error", "ground"], settings, tmp_path)


def test_columns_have_names_of_their_own(questions: Questions) -> None:
    assert column("error") == "error_"
    assert [*questions.columns] == [
        "image", "error_", "error_.probability", "error_.top", "ground", "ground.share",
        "ground.top", "ground.mask", "error_.logits", "ground.logits", "error",
    ]  # fmt: skip
    assert questions.masked == {"ground.mask": "ground"}


def test_a_number_may_have_the_name_of_a_column_but_two_tasks_may_not(
    questions: Questions,
) -> None:
    model = questions.model
    model.add_task("age", ["years", "logits"], kind="regression")
    columns = replace(questions, names=["age"]).columns
    assert [*columns] == ["image", "age.years", "age.logits_", "age.logits", "error"]
    model.add_task("age.years", ["one", "two"])
    with pytest.raises(EngramError, match=r"age\.years"):
        replace(questions, names=["age", "age.years"]).columns  # noqa: B018


def test_batches_keep_their_images_and_masks_become_files(
    questions: Questions, tmp_path: Path
) -> None:
    for i in range(4):
        Image.fromarray(np.full((8, 8, 3), 60 * i, np.uint8)).save(tmp_path / f"{i}.png")
    (tmp_path / "1.png").write_bytes(b"")
    items = [Item(str(tmp_path / f"{i}.png")) for i in range(4)]
    batches = [ItemBatch(0, 0, tuple(items[:3])), ItemBatch(0, 3, (items[3],))]
    found = list(answered_here(questions, iter(batches)))
    assert [(batch.number, len(some)) for batch, some in found] == [(0, 3), (3, 1)]
    rows = [row for _, some in found for row in some]
    assert [row["image"] for row in rows] == [item.name for item in items]
    assert [row["error"] is not None for row in rows] == [False, True, False, False]
    questions.keep_masks(rows, 40)
    assert rows[3]["ground.mask"] == str(tmp_path / "000000043-3.ground.png")
    assert Image.open(tmp_path / "000000043-3.ground.png").size == (16, 16)
    assert not list(tmp_path.glob("000000041*"))
