"""Training ends with calibrated probabilities, unless that is turned off."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.training import start

import engram
from engram import MemoryViT, Recipe, load_backbone
from engram.data.datasets import Splits, load
from engram.inference.evaluate import answers

#: Smoothed labels leave it much too unsure of itself.
SHORT = Recipe(
    steps=60,
    lr=0.03,
    batch=16,
    evaluations=1,
    workers=0,
    val_share=0.4,
    refit=False,
    patience=0,
    label_smoothing=0.4,
)


@pytest.fixture(scope="module")
def hard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shades of gray, with labels of which some are wrong."""
    rng = np.random.default_rng(0)
    labels = np.arange(400) % 2
    pixels = 60 + 120 * labels[:, None, None, None] + rng.integers(-60, 60, (400, 16, 16, 3))
    wrong = rng.random(400) < 0.05
    path = tmp_path_factory.mktemp("hard") / "hard.npz"
    said = np.where(wrong, 1 - labels, labels)
    names = np.array(["dark", "light"])
    np.savez(
        path, x_train=pixels[:300].astype(np.uint8), y_train=said[:300],
        x_test=pixels[300:].astype(np.uint8), y_test=said[300:], class_names=names,
    )  # fmt: skip
    return path


def fitted(
    backbone: Path, splits: Splits, recipe: Recipe, **settings: object
) -> tuple[object, ...]:
    model = start(backbone, splits, **settings)
    result = engram.fit(model, "colours", splits, recipe, test=True)
    kept = answers(model, splits["test"], "colours", workers=0)
    return result.metrics, kept.logits, model


@pytest.mark.parametrize("regime", ["masked", "mlp-head"])
def test_logits_are_divided_by_the_temperature(
    regime: str, small_backbone: Path, hard: Path
) -> None:
    splits = load(hard)
    metrics, logits, _ = fitted(small_backbone, splits, SHORT, regime=regime)
    raw, raw_logits, _ = fitted(small_backbone, splits, SHORT.but(calibrate="off"), regime=regime)
    temperature = metrics["val"]["temperature"]
    assert abs(temperature - 1) > 0.01
    assert torch.allclose(logits * temperature, raw_logits, atol=1e-4)
    for split in ("val", "test"):
        assert metrics[split]["accuracy"] == raw[split]["accuracy"]
        assert metrics[split]["uncalibrated_ece"] == pytest.approx(raw[split]["ece"], abs=1e-4)
        assert not {"temperature", "uncalibrated_ece"} & raw[split].keys()
    assert metrics["val"]["loss"] <= raw["val"]["loss"]


def test_the_engram_has_it_and_says_so(small_backbone: Path, hard: Path, tmp_path: Path) -> None:
    splits = load(hard)
    model = start(small_backbone, splits, regime="mlp-head")
    out = tmp_path / "colours.safetensors"
    result = engram.fit(model, "colours", splits, SHORT, out=out)
    written = engram.inspect(out)
    assert written.metrics["val"]["temperature"] == result.metrics["val"]["temperature"]
    assert written.recipe["calibrate"] == "on"
    pixels, other = torch.rand(2, 3, 16, 16), MemoryViT(load_backbone(small_backbone)).eval()
    other.attach(out)
    model.eval()
    assert torch.equal(other(pixels)["colours"], model(pixels)["colours"])


def several_labels() -> Splits:
    images = [(torch.rand(3, 16, 16) * (0.3 + 0.7 * (i % 2))).clamp(0, 1) for i in range(160)]
    table = [{"image": one, "label": [["dark"], ["light", "any"]][i % 2]} for i, one in
             enumerate(images)]  # fmt: skip
    return load(table, kind="multilabel")


def test_thresholds_of_labels_are_those_of_calibrated_probabilities(small_backbone: Path) -> None:
    splits, model = several_labels(), MemoryViT(load_backbone(small_backbone))
    model.add_task("colours", **splits.task, regime="head", seed=0)
    result = engram.fit(model, "colours", splits, SHORT)
    val = result.metrics["val"]
    whole = splits.with_validation(SHORT.val_share, 0)
    again = engram.evaluate(model, whole, "colours", split="val", workers=0)
    for name in ("macro_f1", "micro_f1", "ece", "loss"):
        assert again[name] == pytest.approx(val[name], abs=1e-3)  # the cache is in half precision
    assert "temperature" in val


def test_a_refit_has_the_thresholds_of_the_temperature_that_it_takes(small_backbone: Path) -> None:
    splits, model = several_labels(), MemoryViT(load_backbone(small_backbone))
    for name, refit in (("once", False), ("again", True)):
        engram.sweep(model, name, splits, SHORT, lrs=[0.01], regime="mlp-head", refit=refit)
    once, again = (model.task(name).head.fitted["thresholds"] for name in ("once", "again"))
    assert torch.equal(once, again)


def test_a_sweep_and_auto_calibrate_what_they_keep(small_backbone: Path, hard: Path) -> None:
    splits, model = load(hard), MemoryViT(load_backbone(small_backbone))
    swept = engram.sweep(model, "a", splits, SHORT, lrs=[0.03, 0.05], regime="mlp-head")
    chosen = engram.auto(model, "b", splits, SHORT.but(steps=4))
    again = engram.sweep(model, "c", splits, SHORT, lrs=[0.03], regime="mlp-head", refit=True)
    whole = splits.with_validation(SHORT.val_share, 0)
    for name, result in (("a", swept), ("b", chosen)):
        measured = engram.evaluate(model, whole, name, split="val", workers=0)
        assert result is chosen or result.metrics["val"]["temperature"] != 1
        assert measured["ece"] == pytest.approx(result.metrics["val"]["ece"], abs=1e-4)
    assert (
        again.metrics["val"]["temperature"] > 0
    )  # found before the validation images were learned


def test_numbers_have_no_temperature(small_backbone: Path) -> None:
    table = [{"image": torch.rand(3, 16, 16), "label": float(i)} for i in range(20)]
    splits = load(table, kind="regression")
    model = MemoryViT(load_backbone(small_backbone))
    model.add_task("colours", **splits.task, regime="head", seed=0)
    result = engram.fit(model, "colours", splits, SHORT.but(steps=2, label_smoothing=0))
    assert "temperature" not in result.metrics["val"]
