"""The service's ONNX engine answers as the model does, and takes tasks without an export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support.exports import EVERYTHING, largest, new_model
from tests.support.strategies import scatter

from engram import MemoryViT
from engram.export import onnx_engine
from engram.export.onnx_engine import OnnxEngine
from engram.export.verify import generated_pixels


@pytest.fixture(scope="module")
def model() -> MemoryViT:
    """Tasks of every kind that share a pass."""
    model = new_model(**EVERYTHING)
    model.add_task("masks", 3, 2, kind="segmentation", seed=3)
    scatter(model.task("masks"), by=0.3, seed=3)
    return model


@pytest.fixture(scope="module")
def int8(model: MemoryViT) -> OnnxEngine:
    return OnnxEngine(model, int8=True, threads=1)


def without(model: MemoryViT, *names: str) -> MemoryViT:
    other = MemoryViT(model.backbone).eval()
    for name in model.tasks:
        if name not in names:
            other.attach(model.engram(name))
    return other


def check(found: OnnxEngine, names: Sequence[str]) -> None:
    pixels = generated_pixels(found.model.preprocessing, 3, seed=5)
    with torch.inference_mode():
        assert largest(found.run(pixels, names), found.model(pixels, names)) < 1e-4


def test_tasks_come_and_go_without_an_export(
    model: MemoryViT, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = list[str](), onnx_engine.backbone_proto

    def counted(*given: Any) -> Any:
        made.append("graph")
        return make(*given)

    monkeypatch.setattr(onnx_engine, "backbone_proto", counted)
    few = without(model, "masks", "child.of-plain", "both", "child.of-thin", "layers")
    first = OnnxEngine(few, threads=1)
    assert made == ["graph"]
    full = OnnxEngine(model, threads=1, before=first)
    check(full, ["base", *model.tasks])
    check(full, ["child.of-thin", "masks"])
    again = OnnxEngine(few, threads=1, before=full)
    check(again, ["base", "plain"])
    check(OnnxEngine(without(model, *model.tasks), threads=1, before=again), ["base"])
    check(first, ["base", *few.tasks])  # a request that began before finishes with it
    assert made == ["graph"]


def test_int8_answers_bit_for_bit_the_same_whatever_shares_the_pass(int8: OnnxEngine) -> None:
    """For every kind of task, alone and in any place of batches of several sizes."""
    names = int8.names
    pixels = generated_pixels(int8.model.preprocessing, 9, seed=5)
    pixels[3] *= 40  # a neighbour that would change the scale of a batch
    together = int8.run(pixels, names)
    for i in range(9):
        alone = int8.run(pixels[i : i + 1], names)
        for name in names:
            assert torch.equal(alone[name][0], together[name][i]), name
    order = torch.tensor([4, 0, 8, 2, 7])
    some = int8.run(pixels[order], ["thin", "plain", "base"])
    assert list(some) == ["thin", "plain", "base"]
    for name, found in some.items():
        assert torch.equal(found, together[name][order]), name


def test_int8_is_near_the_model(int8: OnnxEngine) -> None:
    pixels = generated_pixels(int8.model.preprocessing, 20, seed=6)
    with torch.inference_mode():
        expected = int8.model(pixels, int8.names)
    for name, found in int8.run(pixels, int8.names).items():
        error = float((found - expected[name]).norm() / expected[name].norm())
        assert 0 < error < 0.1, (name, error)
