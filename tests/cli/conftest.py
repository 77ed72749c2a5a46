"""Folders in which commands run."""

from pathlib import Path

import pytest

from engram import MemoryViT, load_backbone, random_backbone, save_backbone
from engram.images.preprocessing import Preprocessing


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a backbone and two engrams: flowers, and roses, which extends it."""
    monkeypatch.chdir(tmp_path)
    backbone = random_backbone(image_size=16, patch=8, width=16, depth=2, heads=2)
    backbone.preprocessing = Preprocessing((16, 16), None)
    model = MemoryViT(load_backbone(save_backbone(backbone, "backbone")))
    model.add_task("flowers", classes=["rose", "tulip"], cells=3)
    model.add_task("roses", classes=7, cells=2, extends=["flowers"])
    model.save("flowers", "flowers.safetensors", metrics={"accuracy": 0.9125}, recipe={"lr": 0.01})
    model.save("roses", "roses.safetensors")
    return tmp_path
