"""int8 is used in the linear layers, except where it would lose accuracy; or in weights alone."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.support.exports import Made

from engram import MemoryViT, random_backbone
from engram.export import OnnxModel, export_onnx
from engram.export.quantise import round_weights
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


def test_rounded_weights_alone_are_small_and_nearer_than_int8(made: Made) -> None:
    import onnx

    pixels = made.pixels(20)
    expected = OnnxModel(made.float32.path, threads=1).run(pixels)
    quantised = OnnxModel(made.int8.path, threads=1).run(pixels)
    sizes = [made.float32.bytes]
    for dtype in ("float16", "int8"):
        proto = onnx.load(made.float32.path)
        round_weights(proto, dtype)
        sizes.append(len(proto.SerializeToString()))
        found = OnnxModel(proto.SerializeToString(), threads=1).run(pixels)
        for name, logits in expected.items():
            error = float((found[name] - logits).norm())
            assert 0 < error < 0.7 * float((quantised[name] - logits).norm()), (dtype, name)
    assert sizes == sorted(sizes, reverse=True)


def test_an_image_is_rounded_by_itself(made: Made) -> None:
    """A neighbour with far larger values changes nothing but last bits of float32 in the heads."""
    exported, pixels = OnnxModel(made.int8.path, threads=1), made.pixels(4)
    pixels[1] *= 40
    together = exported.run(pixels)
    for i in range(4):
        for name, logits in exported.run(pixels[i : i + 1]).items():
            assert torch.allclose(logits[0], together[name][i], atol=1e-4), name


def test_a_layer_with_outliers_stays_in_float32(tmp_path: Path) -> None:
    """One channel behind an activation is thousands of times as large as the others."""
    import onnx

    backbone = random_backbone(image_size=8, patch=4, width=8, depth=1, heads=2, classes=3)
    backbone.preprocessing = Preprocessing((8, 8), None)
    with torch.no_grad():
        backbone.layers[0].mlp.fc1.bias[3] = 3000
    made = export_onnx(MemoryViT(backbone), tmp_path / "model.onnx", int8=True, tasks=["base"])
    weights = {one.name: one for one in onnx.load(made.path).graph.initializer}
    kinds = {tuple(one.dims): one.data_type for one in weights.values() if len(one.dims) == 2}
    assert kinds[32, 8] == onnx.TensorProto.FLOAT
    assert kinds[8, 32] == kinds[8, 24] == onnx.TensorProto.INT8
