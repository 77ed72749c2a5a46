"""Folders in which commands run."""

from pathlib import Path

import pytest

from engram import MemoryViT, load_trunk, random_trunk, save_trunk
from engram.images.preprocessing import Preprocessing


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a trunk and two engrams on it: flowers, and roses, which extends it."""
    monkeypatch.chdir(tmp_path)
    trunk = random_trunk(image_size=16, patch=8, width=16, depth=2, heads=2)
    trunk.preprocessing = Preprocessing((16, 16), None)
    model = MemoryViT(load_trunk(save_trunk(trunk, "trunk")))
    model.add_task("flowers", classes=["rose", "tulip"], cells=3)
    model.add_task("roses", classes=7, cells=2, extends=["flowers"])
    model.save("flowers", "flowers.safetensors", metrics={"accuracy": 0.9125}, recipe={"lr": 0.01})
    model.save("roses", "roses.safetensors")
    return tmp_path
