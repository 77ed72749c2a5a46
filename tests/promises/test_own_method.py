"""A method that no file of the package knows has all that the methods of the package have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.attention_pooling import AttentionPooling
from tests.support.serving import Opened, picture
from tests.support.training import same

import engram
from engram import EngramError, MemoryViT, Recipe
from engram.backbones.shape import BackboneShape
from engram.data.datasets import Splits
from engram.methods import METHODS
from engram.report.run_page import write_run_report
from engram.store.compose import compose
from engram.tasks.costs import task_costs

REGIME = AttentionPooling.name
RECIPE = Recipe(steps=12, batch=16, workers=0, checkpoint_seconds=0.0, lr=0.02)


@pytest.fixture(autouse=True)
def registered() -> None:
    engram.register(AttentionPooling)


@pytest.fixture
def splits(colours: Path) -> Splits:
    return engram.data.load(colours)


def start(backbone: Path, splits: Splits, **settings: object) -> MemoryViT:
    model = MemoryViT(engram.load_backbone(backbone))
    model.add_task("pooled", splits.classes, regime=REGIME, seed=0, **settings)
    return model


@pytest.fixture
def beside_others(small_backbone: Path, splits: Splits) -> MemoryViT:
    """Beside masked and side tasks, none of whose values is trivial."""
    torch.manual_seed(0)
    model = start(small_backbone, splits).eval()
    model.add_task("second", 4, regime=REGIME, queries=2)
    for name, regime in (("cells", "masked"), ("thin", "side"), ("layers", "readout")):
        model.add_task(name, 3, regime=regime)
    with torch.no_grad():
        for task in model.tasks.values():
            for parameter in task.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def test_it_learns_through_the_backbone_and_from_the_cache_alike(
    small_backbone: Path, splits: Splits
) -> None:
    found = {}
    for cache in ("on", "off"):
        model = start(small_backbone, splits)
        result = engram.fit(model, "pooled", splits, RECIPE.but(cache=cache, calibrate="off"))
        assert result.metrics["val"]["accuracy"] > 0.8
        found[cache] = model.task("pooled").tensors()
    for name, value in found["on"].items():  # the cache has half precision
        torch.testing.assert_close(value, found["off"][name], rtol=0.05, atol=0.02)


def test_a_sweep_trains_its_variants_in_one_pass(small_backbone: Path, splits: Splits) -> None:
    model = MemoryViT(engram.load_backbone(small_backbone))
    result = engram.sweep(
        model, "pooled", splits, RECIPE.but(lr=0.0), lrs=[0.001, 0.02], seeds=2, regime=REGIME,
        queries=2,
    )  # fmt: skip
    assert len(result.settings) == 2
    assert all(len(setting.values) == 2 for setting in result.settings)
    assert model.task("pooled").spec.method == AttentionPooling(queries=2)


def test_a_stopped_run_resumes_bit_for_bit(
    small_backbone: Path, splits: Splits, tmp_path: Path
) -> None:
    class Stop(engram.Callback):
        def evaluated(self, line: object) -> None:
            raise EngramError("stopped for this test")

    whole = start(small_backbone, splits)
    recipe = RECIPE.but(evaluations=4)
    engram.fit(whole, "pooled", splits, recipe, out=tmp_path / "whole.safetensors")
    out = tmp_path / "stopped.safetensors"
    with pytest.raises(EngramError, match="stopped"):
        engram.fit(start(small_backbone, splits), "pooled", splits, recipe, out=out,
                   callbacks=[Stop()])  # fmt: skip
    resumed = start(small_backbone, splits)
    engram.fit(resumed, "pooled", splits, recipe, out=out, resume=True)
    assert same(whole.task("pooled").tensors(), resumed.task("pooled").tensors())


def test_it_shares_a_pass_with_others_and_keeps_the_promises(
    beside_others: MemoryViT, tmp_path: Path
) -> None:
    pixels = torch.rand(3, 3, 16, 16)
    file = beside_others.save("pooled", tmp_path / "pooled.safetensors")
    alone = MemoryViT(beside_others.backbone).eval()
    alone.attach(file)
    with torch.no_grad():
        exact, fast = beside_others(pixels, exact=True), beside_others(pixels)
        assert torch.equal(exact["base"], beside_others.backbone(pixels))
        assert torch.equal(exact["pooled"], alone(pixels, exact=True)["pooled"])
        for name, logits in fast.items():
            torch.testing.assert_close(logits, exact[name], rtol=1e-5, atol=1e-5)
        route = ["pooled", ["cells", "pooled"], "second"]
        routed = beside_others(pixels, route=route)
    for name, images in beside_others.rows(route).items():
        torch.testing.assert_close(routed[name], fast[name][images], rtol=1e-5, atol=1e-5)


def test_its_file_is_refused_by_name_where_it_is_not_registered(
    beside_others: MemoryViT, tmp_path: Path
) -> None:
    file = beside_others.save("pooled", tmp_path / "pooled.safetensors")
    assert engram.inspect(file).spec.method == AttentionPooling()
    del METHODS[REGIME]
    with pytest.raises(EngramError, match=REGIME):
        engram.inspect(file)


def test_it_is_exported(beside_others: MemoryViT, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    made = engram.export.export_onnx(beside_others, tmp_path / "model.onnx")
    pixels = torch.rand(2, 3, 16, 16)
    found = engram.export.OnnxModel(made.path).run(pixels, ["pooled", "second", "cells"])
    with torch.no_grad():
        wanted = beside_others(pixels)
    for name, logits in found.items():
        torch.testing.assert_close(torch.as_tensor(logits), wanted[name], rtol=1e-4, atol=1e-4)


def test_it_costs_what_it_says(beside_others: MemoryViT) -> None:
    spec = beside_others.task("pooled").spec
    costs = task_costs(BackboneShape.measure(beside_others.backbone), spec)
    assert costs.parameters == 4 * 32
    assert not costs.own_pass


def test_it_is_served_and_shown_in_the_report(
    small_backbone: Path, splits: Splits, tmp_path: Path
) -> None:
    model, out = start(small_backbone, splits), tmp_path / "pooled.safetensors"
    result = engram.fit(model, "pooled", splits, RECIPE, out=out)
    page = Path(write_run_report(model, result, splits, RECIPE)).read_text()
    assert REGIME in page
    compose([out], tmp_path / "bundle")
    opened = Opened(tmp_path / "bundle")
    try:
        client = opened()
        listed = client.get("/v1/tasks").json()["tasks"][0]
        assert (listed["regime"], listed["settings"]) == (REGIME, {"queries": 4})
        answered = client.post("/v1/predict", files={"image": ("a.png", picture(), "image/png")})
        assert answered.status_code == 200, answered.text
        assert "pooled" in answered.text
    finally:
        for one in opened.clients:
            one.__exit__(None, None, None)
