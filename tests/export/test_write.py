"""A file that was exported answers as the model it came from, or there is no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.exports import Made, largest, new_model, refuse_to_trace, small, trace_once
from tests.support.regimes import known
from tests.support.strategies import FAMILY_OPTIONS, ROTARY, scatter, tiny_backbone

import engram
from engram import EngramError, MemoryViT, random_backbone
from engram.export import OnnxModel, export_onnx, export_torch, standalone, write
from engram.export.verify import generated_pixels
from engram.images.preprocessing import Preprocessing


def test_the_model_is_left_as_it_was(made: Made) -> None:
    model = new_model()
    assert model.backbone.config.image_size == made.model.backbone.config.image_size == (16, 16)
    for name in model.tasks:
        assert made.model.engram(name).content == model.engram(name).content
    assert made.model.backbone.fingerprint == model.backbone.fingerprint
    assert any(p.requires_grad for p in made.model.parameters())


def test_what_families_of_backbones_differ_in_is_exported(tmp_path: Path) -> None:
    """Rotary positions and waves are constants of the graph, at another size than its own."""
    options = {
        **FAMILY_OPTIONS["aimv2"],
        "activation": "swiglu",
        "positions": "waves",
        "rotary": ROTARY["pe"],
        "mlp_norm": True,
        "read_norm": True,
    }
    backbone = tiny_backbone(torch.float32, depth=1, **options)
    backbone.preprocessing = Preprocessing((8, 12), None)
    model = MemoryViT(backbone)
    scatter(model.add_task("one", 2, 1))
    pixels = generated_pixels(backbone.preprocessing, 2, 9)
    with torch.inference_mode():
        expected = model.eval()(pixels)
    exported = OnnxModel(export_onnx(model, tmp_path / "model.onnx").path, threads=1)
    assert largest(exported.run(pixels), expected) < 1e-4


def test_every_kind_is_exported_with_what_its_answers_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace_once(monkeypatch)
    backbone = random_backbone(image_size=8, patch=4, width=8, depth=1, heads=2, classes=3)
    backbone.preprocessing = Preprocessing((8, 8), None)
    model = MemoryViT(backbone)
    model.add_task("labels", ["a", "b", "c"], 1, kind="multilabel")
    model.add_task("numbers", ["age", "size"], 1, kind="regression")
    model.add_task("masks", ["pet", "rest"], 1, kind="segmentation", values=[1, 2])
    model.add_task("thin", 2, 1, kind="segmentation", regime="side", rank=4)
    model.add_task("good", 1, kind="anomaly", regime="patchcore", bank=3)
    for task in model.tasks.values():
        scatter(task)
    model.task("numbers").head.fitted["mean"].fill_(20)
    model.task("labels").head.fitted["thresholds"].fill_(0.25)
    model.eval()
    pixels = generated_pixels(backbone.preprocessing, 3, 9)
    with torch.inference_mode():
        expected = model(pixels)
    made = export_onnx(model, tmp_path / "model.onnx")
    exported = OnnxModel(made.path, threads=1)
    assert largest(exported.run(pixels), expected) < 1e-4
    assert exported.run(pixels)["masks"].shape == (3, 2, 8, 8)
    assert exported.run(pixels[:1])["thin"].shape == (1, 2, 8, 8)
    tasks = exported.about["tasks"]
    assert tasks["labels"]["thresholds"] == [0.25] * 3
    assert tasks["numbers"]["mean"] == [20, 20]
    assert tasks["masks"]["values"] == [1, 2]
    assert export_onnx(model, tmp_path / "int8.onnx", int8=True).differences["masks"].relative < 0.3
    picture = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "picture.ppm")
    (result,) = engram.predict(model, [tmp_path / "picture.ppm"])
    script = standalone.Model(made.path)
    logits, _ = script.outputs(tmp_path / "picture.ppm", list(tasks))
    for name, answer in result["tasks"].items():
        per_pixel = tasks[name]["kind"] == "segmentation"
        wanted = answer["classes"] if per_pixel else answer
        if "map" in answer:
            wanted = [{key: answer[key] for key in ("score", "threshold", "anomalous")}]
        given = script.answer(name, logits[name], 5)
        assert len(given) == len(wanted)
        if per_pixel:
            assert len(script.answer(name, logits[name], 1)) == 1
        for one, other in zip(given, wanted, strict=True):
            assert one == pytest.approx(other, abs=1e-3)
            assert standalone.in_words(one)


@pytest.mark.parametrize("regime", ["full", "memory+adapter"])
def test_a_task_that_changes_the_backbone_is_exported_beside_base(
    regime: str, tmp_path: Path
) -> None:
    backbone = random_backbone(image_size=8, patch=4, width=8, depth=1, heads=2, classes=3)
    model = MemoryViT(backbone)
    scatter(model.add_task("alone", 4, regime=regime, **known(regime, cells=2)))
    pixels = generated_pixels(Preprocessing((8, 8), None), 3, 9)
    with torch.inference_mode():
        expected = model(pixels)
    made = export_onnx(model, tmp_path / "model.onnx")
    assert largest(OnnxModel(made.path, threads=1).run(pixels), expected) < 1e-4


def test_a_file_that_answers_otherwise_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(b"what was there")
    trace = write.trace

    def wrong(model: MemoryViT, names: list[str], pixels: torch.Tensor) -> Any:
        other = MemoryViT(model.backbone)
        scatter(other.add_task("one", 2, 1))
        return trace(other, names, pixels)

    monkeypatch.setattr(write, "trace", wrong)
    with pytest.raises(EngramError, match="'one' does not answer"):
        export_torch(small(), path)
    assert path.read_bytes() == b"what was there"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_exported_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_trace(monkeypatch)
    path = tmp_path / "model.onnx"
    with pytest.raises(EngramError, match=r"torch\.bfloat16"):
        export_onnx(small().bfloat16(), path)
    nothing = MemoryViT(
        random_backbone(image_size=8, patch=4, width=8, depth=1, heads=2, classes=0)
    )
    with pytest.raises(EngramError, match="nothing to export"):
        export_onnx(nothing, path)
    model = small()
    model.add_task("pixels", 2, 1)
    with pytest.raises(EngramError, match="A task is called 'pixels'"):
        export_onnx(model, path)
    monkeypatch.setattr(write, "MAX_ONNX_BYTES", 10)
    with pytest.raises(EngramError, match="at most 2 GB"):
        export_onnx(small(), path)
    assert not list(tmp_path.iterdir())


def test_somebody_elses_script_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "predict.py").write_text("print('mine')\n")
    assert write.write_script(tmp_path / "model.onnx") is None
    assert (tmp_path / "predict.py").read_text() == "print('mine')\n"
    (tmp_path / "predict.py").unlink()
    assert write.write_script(tmp_path / "a.onnx") == tmp_path / "predict.py"
    assert "MODEL = 'a.onnx'" in (tmp_path / "predict.py").read_text()
    assert write.write_script(tmp_path / "b.onnx") is not None  # its own is replaced
    assert "MODEL = 'b.onnx'" in (tmp_path / "predict.py").read_text()
    (tmp_path / "folder" / "predict.py").mkdir(parents=True)
    assert write.write_script(tmp_path / "folder" / "model.onnx") is None
