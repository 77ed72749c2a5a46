"""A backbone with an engram, and a folder of engrams that are ready to be shared."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.support.engrams import randomised, small_backbone

import engram
from engram import MemoryViT, ViT, save_backbone


@pytest.fixture
def backbone() -> ViT:
    return small_backbone()


@pytest.fixture
def path(backbone: ViT, tmp_path: Path) -> Path:
    """The file of an engram for the backbone."""
    model = MemoryViT(backbone)
    randomised(model.add_task("a", classes=["rose", "tulip", "é"], cells=3))
    return model.save("a", tmp_path / "a.safetensors", metrics={"accuracy": 0.5})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: a backbone known by its path, flowers, and roses, which extends it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    where = save_backbone(small_backbone(), tmp_path / "secret-project" / "our-vit")
    model = MemoryViT(engram.load_backbone(where))
    model.add_task("flowers", classes=["rose", "tulip"], cells=3)
    model.add_task("roses", classes=7, cells=2, extends=["flowers"])
    model.save(
        "flowers",
        "flowers.safetensors",
        metrics={
            "val": {"accuracy": 0.9125, "loss": 0.3, "images": 100},
            "test": {"accuracy": 0.9, "macro_f1": 0.88, "unreadable": ["/home/ann/me.jpg"]},
        },
        recipe={
            "lr": 0.01,
            "data": str(tmp_path / "secret-project" / "photos"),
            "train_images": 1020,
            "note": r"see /home/ann/notes.txt, C:\Users\ann\x.txt and w/o https://a.org/b",
        },
    )
    model.save("roses", "roses.safetensors")
    return tmp_path
