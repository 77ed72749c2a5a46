"""A real ViT on real photographs: fit, then eval alone and together with another engram."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import engram
from engram.cli import main as cli

CLASSES, TRAIN, TEST = 5, 12, 6


@pytest.fixture(scope="module")
def pets(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first photographs of the first classes."""
    root = tmp_path_factory.mktemp("pets")
    for split, count in (("train", TRAIN), ("test", TEST)):
        for folder in sorted((assets / "data" / "pets" / split).iterdir())[:CLASSES]:
            target = root / split / folder.name
            target.mkdir(parents=True)
            for photo in sorted(folder.iterdir())[:count]:
                shutil.copy(photo, target)
    return root


def test_fit_learns_and_eval_together_is_eval_alone(
    pets: Path, assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backbone = assets / "weights" / "vit_tiny_patch16_224" / "timm.safetensors"
    out, other = tmp_path / "pets.safetensors", tmp_path / "coats.safetensors"
    common = ("--backbone", str(backbone), "--workers", "0", "--batch", "16", "--json")

    def run(*arguments: object) -> Any:
        assert cli.main([str(argument) for argument in arguments]) == 0
        return json.loads(capsys.readouterr().out)

    fitted = run(
        *("fit", pets, "--task", "pets", "-o", out, "--epochs", 8, "--test", *common),
        *("--regime", "masked"),
    )
    assert fitted["regime"] == "masked"
    test = fitted["metrics"]["test"]
    assert test["images"] == CLASSES * TEST
    assert test["accuracy"] >= 0.8  # chance: 0.2

    # From the cache of the first: the backbone does not run again for the second.
    masked = ("--regime", "masked", "--cells", 2, "--epochs", 1)
    run("fit", pets, "--task", "coats", "-o", other, *masked, *common)
    evaluation = ("--data", f"pets={pets}", "--workers", "0", "--json")
    alone = run("eval", out, *evaluation)["pets"]
    together = run("eval", other, out, *evaluation)["pets"]
    assert alone["accuracy"] == together["accuracy"] == test["accuracy"]
    assert alone["loss"] == pytest.approx(together["loss"], abs=1e-5)
    assert engram.inspect(out).metrics["test"]["accuracy"] == alone["accuracy"]
