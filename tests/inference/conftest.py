"""A model, and images of which some cannot be read."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from engram import MemoryViT, load_backbone


@pytest.fixture
def model(small_backbone: Path) -> MemoryViT:
    model = MemoryViT(load_backbone(small_backbone))
    task = model.add_task("colours", ["red", "green", "blue"], seed=0)
    torch.nn.init.normal_(task.head.weight)
    return model


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve pictures to test on, three of which cannot be read."""
    rng = np.random.default_rng(0)
    for name in ("red", "green", "blue"):
        folder = tmp_path / "photos" / "test" / name
        folder.mkdir(parents=True)
        for i in range(3):
            Image.fromarray(rng.integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(
                folder / f"{i}.png"
            )
        (folder / "empty.png").write_bytes(b"")
    return tmp_path / "photos"
