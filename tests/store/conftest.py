"""A trunk with an engram, and a folder of engrams that are ready to be shared."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.support.engrams import randomised, small_trunk

import engram
from engram import MemoryViT, ViT, save_trunk


@pytest.fixture
def trunk() -> ViT:
    return small_trunk()


@pytest.fixture
def path(trunk: ViT, tmp_path: Path) -> Path:
    """The file of an engram for the trunk."""
    model = MemoryViT(trunk)
    randomised(model.add_task("a", classes=["rose", "tulip", "é"], cells=3))
    return model.save("a", tmp_path / "a.safetensors", metrics={"accuracy": 0.5})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: a trunk that is known by its path, flowers, and roses, which extends it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    where = save_trunk(small_trunk(), tmp_path / "secret-project" / "our-vit")
    model = MemoryViT(engram.load_trunk(where))
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
