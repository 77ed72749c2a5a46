"""A real ViT on real masks: outlines are learned, and answered in one pass with the breed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import engram
from engram.cli import main as cli
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view

CLASSES, TRAIN, TEST = 5, 8, 4


@pytest.fixture(scope="module")
def pets(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first photographs of the first classes, their masks, and a table of cats and dogs."""
    root = tmp_path_factory.mktemp("pets")
    rows = ["path,split,cat,dog"]
    for split, count in (("train", TRAIN), ("test", TEST)):
        for folder in sorted((assets / "data" / "pets" / split).iterdir())[:CLASSES]:
            for name in ("photos", "masks"):
                (root / name / split / folder.name).mkdir(parents=True)
            for photo in sorted(folder.iterdir())[:count]:
                place = f"{split}/{folder.name}"
                mask = assets / "data" / "pets_masks" / place / f"{photo.stem}.png"
                shutil.copy(photo, root / "photos" / place)
                shutil.copy(mask, root / "masks" / place)
                cat = int(photo.name[0].isupper())
                rows.append(f"photos/{place}/{photo.name},{split},{cat},{1 - cat}")
    (root / "species.csv").write_text("\n".join(rows) + "\n")
    return root


def test_outline_breed_and_species_answer_in_one_pass_as_alone(
    pets: Path, assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backbone = assets / "weights" / "vit_tiny_patch16_224" / "timm.safetensors"

    def run(*arguments: object) -> Any:
        assert cli.main([str(argument) for argument in arguments]) == 0
        return json.loads(capsys.readouterr().out)

    outline = ("--kind", "segmentation", "--classes", "pet=1,background=2", "--ignore", 3)
    tasks: dict[str, tuple[object, ...]] = {
        "outline": (
            *(f"{pets}/photos::{pets}/masks", *outline, "--epochs", 6, "--lr", 0.003),
            *("--regime", "masked"),
        ),
        "breed": (f"{pets}/photos", "--epochs", 1),
        "species": (
            *(f"{pets}/species.csv", "--kind", "multilabel", "--label", "cat,dog"),
            *("--epochs", 4, "--regime", "masked"),
        ),
    }
    common = ("--backbone", backbone, "--workers", 0, "--batch", 10, "--test", "--json")
    found = {}
    for name, (data, *flags) in tasks.items():
        out = tmp_path / f"{name}.safetensors"
        fitted = run("fit", data, "--task", name, "-o", out, *flags, *common)
        found[name] = fitted["metrics"]["test"]
    assert found["outline"]["miou"] > 0.75  # one class everywhere: 0.5 at most
    assert found["outline"]["images"] == CLASSES * TEST
    assert found["species"]["map"] > 0.8

    model = engram.MemoryViT(engram.load_backbone(backbone)).eval()
    plain = engram.MemoryViT(engram.load_backbone(backbone)).eval()
    for name in tasks:
        model.attach(tmp_path / f"{name}.safetensors")
    photos = sorted((pets / "photos" / "test").glob("*/*"))[::5]
    views = [torch.from_numpy(evaluation_view(p, model.preprocessing)) for p in photos]
    pixels = normalise(torch.stack(views), model.preprocessing)
    with torch.no_grad():
        together, exact = model(pixels), model(pixels, exact=True)
        assert torch.equal(exact["base"], plain.backbone(pixels))
        assert together["outline"].shape == (len(photos), 2, 224, 224)
        for name in tasks:
            alone = engram.MemoryViT(plain.backbone).eval()
            alone.attach(tmp_path / f"{name}.safetensors")
            assert torch.equal(alone(pixels, exact=True)[name], exact[name])
            # A mask's logits reach the hundreds, and rounding grows with them.
            scale = max(1.0, float(together[name].abs().max()))
            assert torch.allclose(alone(pixels)[name], together[name], rtol=0, atol=1e-5 * scale)
