"""Every regime learns what it should and changes nothing else; a run is what its recipe says."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from tests.support.regimes import SUPERVISED, known
from tests.support.training import as_written, same, start, state

import engram
from engram import EngramError, Recipe, load_backbone
from engram.data.datasets import load
from engram.methods import METHODS
from engram.train.recipe import RECIPES

QUICK = Recipe(steps=30, batch=16, evaluations=2, workers=0)


# What a regime learns, and what it leaves alone


@pytest.mark.parametrize("regime", [one for one in SUPERVISED if not METHODS[one].composed])
def test_every_regime_beats_chance_by_far(regime: str, small_backbone: Path, colours: Path) -> None:
    splits = load(colours)
    model = start(small_backbone, splits, regime=regime)
    before = state(model.backbone)
    first = model.task("colours").tensors()
    first = {name: value.clone() for name, value in first.items()}
    recipe = QUICK.but(steps=60, lr=0.003) if regime == "full" else QUICK.but(steps=60)
    result = engram.fit(model, "colours", splits, recipe, test=True)
    assert result.metrics["test"]["accuracy"] >= 0.85  # chance: 0.33
    assert result.regime == regime
    if regime != "readout":  # validation chooses what it sees
        assert result.parameters == sum(value.numel() for value in first.values())
    assert same(before, state(model.backbone))  # a full task has a backbone of its own
    changed = {
        name
        for name, now in model.task("colours").tensors().items()
        if name in first and not torch.equal(now, first[name])
    }
    frozen = {"backbone.class_token"} if regime == "full" else set()
    assert changed >= first.keys() - frozen - {n for n in first if ".bias" in n}


def test_full_and_memory_change_what_the_backbone_says(small_backbone: Path, colours: Path) -> None:
    """Their own pass differs from the plain backbone's; a masked task's leaves it as it was."""
    splits, pixels = load(colours), torch.rand(2, 3, 16, 16)
    plain = load_backbone(small_backbone).tokens(pixels)

    full = start(small_backbone, splits, regime="full")
    engram.fit(full, "colours", splits, QUICK.but(lr=0.003))
    own = full.task("colours").backbone
    assert own is not None
    moved = [
        name
        for name, value in own.state_dict().items()
        if not torch.equal(value, full.backbone.state_dict()[name])
    ]
    assert any(name.startswith("blocks.0.") for name in moved)
    assert any(name.startswith("patch.") for name in moved)
    assert (own.tokens(pixels) - plain).abs().max() > 1e-2

    memory = start(small_backbone, splits, regime="memory")
    engram.fit(memory, "colours", splits, QUICK)
    task = memory.task("colours")
    assert task.cells is not None
    before = memory(pixels, tasks=["colours"])["colours"]
    with torch.no_grad():
        task.cells.zero_()
    assert (memory(pixels, tasks=["colours"])["colours"] - before).abs().max() > 1e-3


@pytest.mark.parametrize("cache", ["on", "off"])
@pytest.mark.parametrize("regime", ["masked", "masked+adapter", "head"])
def test_training_changes_no_other_bit(
    regime: str, cache: str, small_backbone: Path, colours: Path
) -> None:
    splits, pixels = load(colours), torch.rand(3, 3, 16, 16)
    model = start(small_backbone, splits, name="other")
    model.add_task("parent", splits.classes, 2, seed=1)
    extends = ["parent"] if regime != "head" else []
    cells = known(regime, cells=2)
    model.add_task("colours", splits.classes, regime=regime, extends=extends, seed=2, **cells)
    with torch.no_grad():
        for name in ("other", "parent"):
            model.task(name).head.weight.normal_()
    model.eval()
    backbone, others = state(model.backbone), [state(model.task(n)) for n in ("other", "parent")]
    said = model(pixels, tasks=["base", "other", "parent"], exact=True)
    engram.fit(model, "colours", splits, QUICK.but(cache=cache))
    assert same(backbone, state(model.backbone))
    assert all(
        same(a, state(model.task(n))) for a, n in zip(others, ("other", "parent"), strict=True)
    )
    assert same(said, model(pixels, tasks=["base", "other", "parent"], exact=True))
    assert all(p.grad is None for p in model.backbone.parameters())


# Classes of unequal size


@pytest.mark.parametrize("balance", ["weights", "sampler"])
@pytest.mark.parametrize("cache", ["on", "off"])
def test_balanced_classes_are_chosen_by_balanced_accuracy(
    balance: str, cache: str, small_backbone: Path, photos: Path, tmp_path: Path
) -> None:
    for i in range(2, 20):
        (photos / "train" / "light" / f"{i:02}.png").unlink()  # 2 are left, beside 20
    splits, out = load(photos), tmp_path / "out.safetensors"
    model = start(small_backbone, splits)
    recipe = QUICK.but(steps=8, balance=balance, cache=cache)
    result = engram.fit(model, "colours", splits, recipe, out=out)
    assert "val_balanced_accuracy" in result.history[0]
    assert result.metrics["val"]["balanced_accuracy"] >= 0.5
    assert engram.inspect(out).recipe["balance"] == balance


# What is written


def test_the_engram_records_the_recipe_and_the_metrics(
    small_backbone: Path, colours: Path, tmp_path: Path
) -> None:
    splits, out = load(colours), tmp_path / "deep" / "colours.safetensors"
    model = start(small_backbone, splits)
    recipe = QUICK.but(steps=4, label_smoothing=0.1)
    result = engram.fit(model, "colours", splits, recipe, out=out, test=True)
    header = engram.inspect(out)
    about_data = {"data": Path(splits.name).name, "train_images": 60}
    assert result.ending is not None
    ended = {"training": result.ending.to_dict()}
    used = recipe.but(lr=1e-3).to_dict()  # what suits the regime
    assert header.recipe == {**used, **about_data, **ended}
    assert header.metrics == as_written(result.metrics)
    run = out.parent / "colours.run"
    names = {path.name for path in run.iterdir() if not path.name.startswith("events.out")}
    assert names >= {"history.csv", "history.svg", "finished.json", "lock"}
    assert any(path.name.startswith("events.out") for path in run.iterdir())  # TensorBoard's
    lines = (run / "history.csv").read_text().splitlines()
    assert lines[0] == "step,epoch,loss,lr,val_loss,val_accuracy,best_step"
    assert [line.split(",")[0] for line in lines[1:]] == ["2", "4"]
    drawn = ElementTree.parse(run / "history.svg").getroot()
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    assert int(drawn.attrib["viewBox"].split()[2]) > 500


def test_the_test_split_is_asked_for_before_training(
    small_backbone: Path, tmp_path: Path, colours: Path
) -> None:
    with np.load(colours) as arrays:
        np.savez(
            tmp_path / "c.npz",
            x_train=arrays["x_train"],
            y_train=arrays["y_train"],
            class_names=arrays["class_names"],
        )
    splits = load(tmp_path / "c.npz")
    model = start(small_backbone, splits)

    def never(what: str, done: int, total: int, note: str = "") -> None:
        raise AssertionError(what)

    with pytest.raises(EngramError, match="has no test split"):
        engram.fit(model, "colours", splits, QUICK, test=True, progress=never)


# Mistakes


def test_data_of_other_classes_is_refused(small_backbone: Path, colours: Path) -> None:
    model = start(small_backbone, load(colours))
    with pytest.raises(EngramError, match="'colours' has 3 classes"):
        engram.fit(model, "colours", load("digits"), QUICK)
    with pytest.raises(EngramError, match="There is no task 'flowers'"):
        engram.fit(model, "flowers", load(colours), QUICK)


def test_the_paper_recipe_runs(small_backbone: Path, colours: Path) -> None:
    """Two of its 20,000 steps: a batch of 512 from 54 images is what there is."""
    splits = load(colours)
    model = start(small_backbone, splits)
    result = engram.fit(model, "colours", splits, RECIPES["paper"].but(steps=2, workers=0))
    assert [row["step"] for row in result.history] == [1, 2]
