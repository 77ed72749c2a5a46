"""A real ViT and real photographs through an exported file and the script beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

import engram
from engram import MemoryViT, load_backbone
from engram.export import export_onnx
from engram.export.onnx_engine import OnnxEngine
from engram.export.runtime import RUNTIMES


def test_int8_answers_about_photographs_as_the_model_does(assets: Path, tmp_path: Path) -> None:
    backbone = load_backbone(assets / "weights" / "vit_tiny_patch16_224" / "transformers")
    model = MemoryViT(backbone)
    model.add_task("pets", 37, regime="head")
    made = export_onnx(model, tmp_path / "model.onnx", int8=True)
    assert made.script is not None
    assert made.differences["base"].agreement >= 0.75  # drawn scenes are nothing it was trained on
    photos = sorted((assets / "data" / "pets" / "test").rglob("*.jpg"))[::40]
    command = [sys.executable, made.script, *photos, "--task", "base", "--top-k", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = [one["tasks"]["base"][0] for one in json.loads(done.stdout)]
    expected = [one["tasks"]["base"][0] for one in engram.predict(model, photos, tasks=["base"])]
    assert len(said) == len(photos) == 19
    same = [a["class"] == b["class"] for a, b in zip(said, expected, strict=True)]
    assert sum(same) >= 16
    for a, b, agree in zip(said, expected, same, strict=True):
        assert not agree or abs(a["probability"] - b["probability"]) < 0.25


def test_int8_in_the_service_is_near_what_transformers_computes(assets: Path) -> None:
    """Logits within a tenth of their norm for photographs, whatever shares the batch."""
    folder = assets / "weights" / "vit_tiny_patch16_224"
    reference = load_file(folder / "reference.safetensors")
    pixels, expected = reference["pixel_values"], reference["logits"]
    model = MemoryViT(load_backbone(folder / "transformers"))
    engine = OnnxEngine(model, RUNTIMES["onnx-int8"])
    found = engine.run(pixels, ["base"])["base"]
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert 0.001 < float(errors.max()) < 0.1
    assert torch.equal(found.argmax(1), expected.argmax(1))
    assert torch.equal(engine.run(pixels[[5, 2]], ["base"])["base"], found[[5, 2]])
