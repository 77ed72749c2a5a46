"""Exported files and their predict.py give the familiarity of the model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.engrams import familiar
from tests.support.exports import Made, trace_once

import engram
from engram import MemoryViT, random_backbone
from engram.export import OnnxModel, export_onnx, export_torch, standalone
from engram.export.runtime import TorchProgram
from engram.export.verify import generated_pixels


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    torch.manual_seed(0)
    backbone = random_backbone(image_size=16, patch=8, width=32, depth=1, heads=2, classes=3)
    model = MemoryViT(backbone).eval()
    for name, regime in (("known", "masked"), ("other", "side")):
        familiar(model.add_task(name, 4, 1, regime=regime, seed=0))
    model.task("known").statistics.counts[1] = 0  # type: ignore[union-attr]
    model.add_task("plain", 2, 1, seed=0)
    folder = tmp_path_factory.mktemp("familiarity")
    with pytest.MonkeyPatch.context() as patch:
        trace_once(patch)
        program = export_torch(model, folder / "model.pt2")
        float32 = export_onnx(model, folder / "model.onnx")
        int8 = export_onnx(model, folder / "int8.onnx", int8=True)
    return Made(model, float32, int8, program)


def test_the_graph_gives_the_familiarity_of_the_model(made: Made) -> None:
    model = made.model
    assert set(made.float32.differences) == {
        *model.output_names(),
        "known:familiarity",
        "other:familiarity",
    }
    pixels = generated_pixels(model.preprocessing, 5, seed=3)
    names = ["base", "plain", "known", "other"]
    with torch.inference_mode():
        logits, expected = model.with_familiarity(pixels, names)
    for exported in (OnnxModel(made.float32.path), TorchProgram(made.torch.path)):
        found = exported.run(pixels, names, familiarity=True)
        familiarity = {name: found.pop(f"{name}:familiarity") for name in expected}
        assert list(found) == names
        assert expected.keys() == {"known", "other"}
        torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(familiarity, expected, atol=1e-3, rtol=1e-3)
    assert list(OnnxModel(made.float32.path).run(pixels, ["known"])) == ["known"]


def test_int8_leaves_the_product_with_class_means_alone(made: Made) -> None:
    assert made.int8.differences["known:familiarity"].relative < 0.1


def test_the_script_says_it_with_a_legend(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    arguments = [str(tmp_path / "x.png"), "--model", str(made.float32.path)]
    assert standalone.main([*arguments, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    (expected,) = engram.predict(made.model, [tmp_path / "x.png"])
    assert found["familiarity"] == pytest.approx(expected["familiarity"], rel=1e-4, abs=1e-3)
    assert standalone.main(arguments) == 0
    said = capsys.readouterr().out
    assert f"(familiarity {found['familiarity']['known']:.2f})" in said
    assert said.count(standalone.LEGEND) == 1
    assert standalone.main([*arguments, "--task", "plain"]) == 0
    assert "familiarity" not in capsys.readouterr().out
