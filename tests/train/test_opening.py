"""What a run says before it begins."""

from pathlib import Path

import numpy as np
import pytest

from engram import MemoryViT, Recipe, load_backbone
from engram.data.datasets import load
from engram.methods import METHODS
from engram.train.opening import opening


def rows_of(
    model: MemoryViT, data: Path, recipe: Recipe | None = None, regime: str = "masked"
) -> dict[str, str]:
    splits = load(data)
    spec = splits.task_spec("t", METHODS[regime]())
    return dict(opening(model, [spec], splits, recipe or Recipe()))


@pytest.fixture
def model(small_backbone: Path) -> MemoryViT:
    return MemoryViT(load_backbone(small_backbone))


def test_backbone_data_and_cache_are_said(
    model: MemoryViT, colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGRAM_CACHE", str(tmp_path / "cache"))
    rows = rows_of(model, colours)
    assert rows["backbone"] == f"{model.backbone.source}, images of 16 x 16 pixels"
    assert rows["data"] == (
        f"{colours}: 3 classes; 60 images to train, held out in turn in 5 folds, near-duplicates "
        "together (seed 0), 21 to test"
    )
    for recipe, said in (
        (Recipe(val_share=0.2), "60 images to train, 12 of them held out to validate first"),
        (Recipe(refit=False), "54 images to train, 6 held out of 60 to validate"),
    ):
        assert said in rows_of(model, colours, recipe)["data"]
    assert rows["cache"].startswith(f"{tmp_path / 'cache'}, ")
    assert "kB for these images, " in rows["cache"]
    assert rows["cache"].endswith("cache_gb 20 holds 8,928,571 images")


def test_the_cache_is_explained_once(
    model: MemoryViT, colours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGRAM_CACHE", str(tmp_path / "cache"))
    assert "engram cache clear" in rows_of(model, colours)[""]
    (tmp_path / "cache").mkdir()
    assert "" not in rows_of(model, colours)


@pytest.mark.parametrize(
    ("recipe", "regime", "reason"),
    [
        (Recipe(cache="off"), "masked", "cache is off"),
        (Recipe(), "full", "own tokens"),
        (Recipe(cache_gb=0.0), "masked", "it would take"),
    ],
)
def test_why_there_is_no_cache(
    recipe: Recipe, regime: str, reason: str, model: MemoryViT, colours: Path
) -> None:
    said = rows_of(model, colours, recipe, regime)["cache"]
    assert said.startswith("not used: ")
    assert reason in said


def test_a_validation_split_of_its_own_is_named(model: MemoryViT, tmp_path: Path) -> None:
    pixels, labels = np.zeros((4, 16, 16, 3), np.uint8), np.array(["a", "b", "a", "b"])
    arrays = {f"{name}_{split}": value for split in ("train", "val")
              for name, value in (("x", pixels), ("y", labels))}  # fmt: skip
    np.savez(tmp_path / "own.npz", **arrays)
    said = rows_of(model, tmp_path / "own.npz")["data"]
    assert said.endswith("2 classes; 4 images to train, 4 to validate (its own split)")
