"""Exported files give the logits of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.exports import Made, largest

from engram import EngramError
from engram.export import Export, OnnxModel


@pytest.mark.parametrize("images", [1, 2, 7])
def test_onnx_answers_as_the_model_does(made: Made, images: int) -> None:
    pixels = made.pixels(images)
    with torch.inference_mode():
        expected = made.model(pixels)
    assert next(iter(expected)) == "base"
    assert largest(OnnxModel(made.float32.path, threads=1).run(pixels), expected) < 1e-4


def test_torch_export_answers_as_the_model_does(made: Made) -> None:
    program = torch.export.load(made.torch.path).module()
    for images in (1, 2, 7):
        pixels = made.pixels(images)
        with torch.inference_mode():
            assert largest(program(pixels), made.model(pixels)) < 1e-4


def test_only_the_requested_outputs_are_returned(made: Made) -> None:
    onnx, pixels = OnnxModel(made.float32.path, threads=1), made.pixels(2)
    every = onnx.run(pixels)
    some = onnx.run(pixels, ["no-cells", "base"])
    assert list(some) == ["no-cells", "base"]
    assert torch.equal(some["base"], every["base"])
    with pytest.raises(EngramError, match="no 'other' in this file"):
        onnx.run(pixels, ["other"])


def test_other_files_are_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngramError, match=r"gone\.onnx does not exist"):
        OnnxModel(tmp_path / "gone.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"not a graph")
    with pytest.raises(EngramError, match="not an ONNX file"):
        OnnxModel(tmp_path / "bad.onnx")


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_the_file_runs_in_openvino_as_it_is(made: Made, precision: str) -> None:
    """Without anything of this package: as a program in another language would run it."""
    openvino = pytest.importorskip("openvino")
    exported: Export = getattr(made, precision)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    program = openvino.Core().compile_model(str(exported.path), "CPU", settings)
    pixels = made.pixels(5)
    outputs = program(pixels.numpy())
    expected = OnnxModel(exported.path).run(pixels)
    for name, logits in expected.items():
        found = torch.from_numpy(outputs[name])
        largest_logit = max(1.0, float(logits.abs().max()))
        # Rounding to int8 turns a difference in the last digit into a step now and then.
        allowed = 1e-4 if precision == "float32" else 0.03
        assert (found - logits).abs().max() <= allowed * largest_logit
        best, other = logits.topk(2, dim=1).values.unbind(1)
        sure = best - other > 2 * allowed * largest_logit
        assert torch.equal(found.argmax(1)[sure], logits.argmax(1)[sure])
