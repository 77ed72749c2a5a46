"""Data and models that several tests train on."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import Tensor

from engram import MemoryViT, load_backbone
from engram.data.datasets import Splits, load
from engram.train.features.cache import Cache


@pytest.fixture
def splits(colours: Path) -> Splits:
    return load(colours)


@pytest.fixture
def model(small_backbone: Path) -> MemoryViT:
    return MemoryViT(load_backbone(small_backbone))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images the backbone ran on for the cache, batch by batch."""
    counts: list[int] = []
    rows = Cache.compute

    def counted(self: Cache, images: Tensor) -> Tensor:
        counts.append(len(images))
        return rows(self, images)

    monkeypatch.setattr(Cache, "compute", counted)
    return counts


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Solid PNGs in class folders: 20 + 20 to train on, 5 + 5 to validate."""
    for split, count in (("train", 20), ("val", 5)):
        for name, colour in (("light", 200), ("dark", 50)):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (18, 16), (colour + i, colour - i, colour)).save(
                    folder / f"{i:02}.png"
                )
    return tmp_path / "photos"


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    """Two classes of twelve pictures each; no file has the size of another."""
    rng = np.random.default_rng(0)
    for i in range(24):
        folder = tmp_path / "flowers" / ("rose", "tulip")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 255, (16, 16 + i, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i // 2}.png")
    return tmp_path / "flowers"
