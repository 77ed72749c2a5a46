"""Folders in which commands run."""

import os
from pathlib import Path

import pytest
from PIL import Image

from engram import MemoryViT, load_trunk, random_trunk, save_trunk
from engram.images.preprocessing import Preprocessing


@pytest.fixture
def work(tmp_path: Path, small_trunk: Path, colours: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a trunk, data, a picture and an engram, as a user would have it."""
    monkeypatch.chdir(tmp_path)
    os.symlink(small_trunk, "vit")
    os.symlink(colours, "colours.npz")
    Image.new("RGB", (20, 16), (210, 50, 60)).save("red.png")
    model = MemoryViT(load_trunk("vit"))
    model.add_task("old", ["red", "green", "blue"], 2, seed=0)
    model.save("old", "old.safetensors")
    return tmp_path


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
