"""Whatever already names a backbone keeps it: a flag, a parent, a run that is resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants
from PIL import Image
from tests.support.commands import QUICK, run
from tests.support.hubs import cached

from engram import MemoryViT, inspect, load_backbone, random_backbone, save_backbone
from engram.data.datasets import Splits, load
from engram.images.preprocessing import Preprocessing
from engram.train.backbone import backbone_for
from engram.train.options import RunOptions

BEST = "facebook/dinov2-small"


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Splits:
    """Images of 64 pixels, and a cache of the Hub in which nothing is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for name, colour in (("red", (200, 50, 50)), ("blue", (50, 50, 200))):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(6):
            Image.new("RGB", (64, 48), colour).save(tmp_path / "photos" / name / f"{i}.png")
    return load("photos")


def put_into_the_cache(repo: str) -> None:
    """A small backbone, as if it were this one."""
    backbone = random_backbone(image_size=16, patch=4, width=32, depth=2, heads=2, seed=3)
    backbone.preprocessing = Preprocessing((16, 16), None)
    folder = save_backbone(backbone, "made")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    cached(Path(constants.HF_HUB_CACHE), repo, files)


def test_a_backbone_that_is_given_is_taken(photos: Splits) -> None:
    put_into_the_cache(BEST)
    backbone, reason = backbone_for(RunOptions("pico"), photos)
    assert (backbone.source, reason) == ("pico", "It was given with --backbone.")
    assert backbone_for(RunOptions(), photos)[0].source == BEST


def test_a_parent_decides_with_its_image_size(photos: Splits) -> None:
    put_into_the_cache(BEST)
    model = MemoryViT(load_backbone("pico", image_size=48))
    model.add_task("colours", ["red", "blue"], 1)
    model.save("colours", "colours.safetensors")
    backbone, reason = backbone_for(RunOptions(), photos, parents=["colours.safetensors"])
    assert (backbone.source, reason) == (
        "pico",
        "The task extends colours, which was trained on it.",
    )
    assert backbone.preprocessing is not None
    assert backbone.preprocessing.size == (48, 48)


def test_a_resumed_run_keeps_its_backbone(
    photos: Splits, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """It began without a network; meanwhile a better backbone has been fetched."""
    command = ("fit", "photos", "--task", "a", "-o", "a.safetensors", "--regime", "masked", *QUICK)
    assert run(*command) == 0
    assert any("far lower accuracy" in str(warning.message) for warning in recwarn)
    assert inspect("a.safetensors").backbone.source == "pico"
    put_into_the_cache(BEST)
    capsys.readouterr()
    assert run(*command, "--resume", "--json") == 0
    assert json.loads(capsys.readouterr().out)["metrics"]
    assert inspect("a.safetensors").backbone.source == "pico"
    assert run(*command, "--overwrite") == 0
    assert inspect("a.safetensors").backbone.source == BEST
