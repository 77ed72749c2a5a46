"""The backbone's graph takes the streams of any tasks, and computes what the model's pass does."""

from __future__ import annotations

import pytest
import torch
from tests.support.exports import EVERYTHING, new_model
from torch import Tensor

from engram import MemoryViT
from engram.export.onnx_engine import BackboneGraph
from engram.export.runtime import Runtime
from engram.export.verify import generated_pixels
from engram.methods.forward import FastPass
from engram.methods.masked import Masked
from engram.model.passes import task_inputs

SELECTIONS = [["plain", "child.of-plain", "no-cells", "adapted"], ["child.of-plain"], ["no-cells"]]


@pytest.fixture(scope="module")
def model() -> MemoryViT:
    """Layers are copies of one graph: what is optional in a ViT has to be in every copy."""
    return new_model(**EVERYTHING)


@pytest.fixture(scope="module")
def graph(model: MemoryViT) -> BackboneGraph:
    return BackboneGraph(model.backbone, pixels_for(model, 1), adapters=True)


def pixels_for(model: MemoryViT, images: int) -> Tensor:
    return generated_pixels(model.preprocessing, images)


@pytest.mark.parametrize("names", SELECTIONS, ids=" ".join)
def test_streams_of_any_tasks_are_inputs(
    model: MemoryViT, graph: BackboneGraph, names: list[str]
) -> None:
    backbone = model.backbone
    with torch.no_grad():
        memory = Masked.memory(task_inputs(model, names), backbone)
    for images in (1, 3):
        pixels, seen = pixels_for(model, images), dict[int, Tensor]()
        with torch.no_grad():
            x = backbone.embed(pixels)
            n, rotation = x.shape[1], backbone.rotation(pixels.shape[-2:], x.shape[1])
            expected = FastPass(memory, n, rotation, seen.__setitem__).run(backbone, x, n)
            raw, streams, layers = graph.run(pixels, memory.tensors(backbone, True), layers=True)
        assert torch.allclose(raw, expected[0], atol=1e-4)
        assert torch.allclose(streams, expected[1], atol=1e-4)
        assert len(layers) == len(seen) == 2
        assert all(torch.allclose(layers[i], seen[i], atol=1e-4) for i in seen)


def test_without_tasks_it_is_the_plain_backbone(model: MemoryViT, graph: BackboneGraph) -> None:
    pixels = pixels_for(model, 3)
    raw, _, layers = graph.run(pixels)
    with torch.no_grad():
        x = model.backbone.encode(model.backbone.embed(pixels), pixels.shape[-2:])
    assert torch.allclose(raw, x, atol=1e-4)
    assert not layers
    assert graph.fits(model.backbone, Runtime(), adapters=True)
    assert graph.fits(model.backbone, Runtime(), adapters=False)
    assert not graph.fits(new_model().backbone, Runtime(), adapters=False)
