"""A bundle to serve."""

from pathlib import Path

import pytest

import engram


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory, small_backbone: Path) -> Path:
    folder = tmp_path_factory.mktemp("deployed")
    model = engram.MemoryViT(engram.load_backbone(small_backbone))
    model.add_task("colour", ["red", "green"])
    return engram.compose([model.save("colour", folder / "c.safetensors")], folder / "b").folder
