"""int8 is used in the linear layers, except where it would lose accuracy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.exports import Made

from engram import MemoryViT, random_trunk
from engram.export import OnnxModel, export_onnx, quantise
from engram.images.preprocessing import Preprocessing


def test_int8_is_near_and_its_difference_is_reported(made: Made) -> None:
    pixels = made.pixels(20)
    found = OnnxModel(made.int8.path, threads=1).run(pixels)
    with torch.inference_mode():
        expected = made.model(pixels)
    for name, logits in expected.items():
        error = float((found[name] - logits).norm() / logits.norm())
        assert 0 < error < 0.3, name
        assert 0 < made.int8.differences[name].relative < 0.3
        assert made.float32.differences[name].largest < 1e-4
    assert made.int8.bytes < made.float32.bytes


def test_a_layer_with_outliers_stays_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One channel behind an activation is far larger than the other 31, so sqrt(32) = 5.7 times
    as large as their root mean square."""
    import onnx

    monkeypatch.setattr(quantise, "OUTLIER_RATIO", 5.5)
    trunk = random_trunk(image_size=8, patch=4, width=8, depth=1, heads=2, classes=3)
    trunk.preprocessing = Preprocessing((8, 8), None)
    with torch.no_grad():
        trunk.layers[0].mlp.fc1.bias[3] = 3000
    made = export_onnx(MemoryViT(trunk), tmp_path / "model.onnx", int8=True, tasks=["base"])
    graph = onnx.load(made.path).graph
    weights = {one.name: list(one.dims) for one in graph.initializer}
    kinds = {
        tuple(weights[node.input[1]]): node.op_type
        for node in graph.node
        if node.op_type.startswith("MatMul") and len(weights.get(node.input[1], [])) == 2
    }
    assert kinds[32, 8] == "MatMul"
    assert kinds[8, 32] == kinds[8, 24] == "MatMulInteger"
