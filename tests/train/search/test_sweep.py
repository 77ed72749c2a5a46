"""A sweep gives each variant what it would be alone, and picks on validation."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tests.support.training import Interrupting, Steps, alone

import engram
from engram import EngramError, MemoryViT, Recipe
from engram.data.datasets import Splits, load
from engram.errors import Interrupted
from engram.train.search.sweep import sweep

QUICK = Recipe(steps=12, batch=16, evaluations=3, workers=0)


def test_the_best_on_validation_is_kept_and_recorded(
    model: MemoryViT, splits: Splits, tmp_path: Path
) -> None:
    out = tmp_path / "best.safetensors"
    result = sweep(
        model, "t", splits, QUICK, lrs=[1e-50, 0.01], cells=[1, 3], seeds=2, out=out, test=True
    )  # fmt: skip
    assert len(result.settings) == 4
    assert all(len(setting.values) == 2 for setting in result.settings)
    assert result.best.mean == max(setting.mean for setting in result.settings)
    assert result.best.lr == 0.01  # the other moves nothing
    assert result.metrics["val"]["accuracy"] == max(result.best.values)
    assert result.metrics["test"]["accuracy"] > 0.8
    header = engram.inspect(out)
    assert header.recipe is not None
    assert (header.recipe["lr"], header.recipe["seed"]) == (0.01, result.seed)
    assert header.spec.method.settings()["cells"] == result.best.cells
    assert list(model.tasks) == ["t"]
    assert torch.equal(model.task("t").head.weight, header.tensors["head.weight"])
    rows = list(csv.DictReader((tmp_path / "best.run" / "sweep.csv").open()))
    assert [(float(row["lr"]), int(row["cells"])) for row in rows] == [
        (s.lr, s.cells) for s in result.settings
    ]
    assert float(rows[2]["val_accuracy"]) == result.settings[2].mean
    assert Image.open(tmp_path / "best.run" / "sweep.png").width > 500
    assert not (tmp_path / "best.run" / "checkpoint.safetensors").exists()


def test_a_rate_that_diverges_is_named(model: MemoryViT, splits: Splits) -> None:
    recipe = QUICK.but(optimizer="sgd", clip=0, warmup=0)
    with pytest.raises(EngramError, match=r"1e\+30"):
        sweep(model, "t", splits, recipe, lrs=[0.001, 1e30, 0.01], cells=[2])


def test_refit_learns_from_the_validation_images_too(
    model: MemoryViT, splits: Splits, tmp_path: Path
) -> None:
    out = tmp_path / "t.safetensors"
    recipe = QUICK.but(calibrate="off")
    result = sweep(model, "t", splits, recipe, lrs=[0.01], cells=[2], refit=True, out=out)
    assert engram.inspect(out).recipe["train_images"] == len(splits["train"])
    assert result.metrics["val"]["images"] == 6
    whole = MemoryViT(model.backbone)
    whole.add_task("t", splits.classes, 2, seed=0)
    held = splits.with_validation()
    everything = Splits(splits.name, splits.classes, splits.train, held.val, splits.test)
    engram.fit(whole, "t", everything, recipe.but(lr=0.01))
    own = whole.task("t").head.weight
    assert torch.allclose(own, model.task("t").head.weight, rtol=1e-6)
    with pytest.raises(EngramError, match="validation split of its own"):
        sweep(model, "u", everything, QUICK, lrs=[0.01], refit=True)


@pytest.mark.parametrize("regime", ["masked", "memory"])
def test_ctrl_c_keeps_the_best_so_far(
    regime: str, model: MemoryViT, splits: Splits, tmp_path: Path
) -> None:
    """Variants train together, or one by one."""
    whole, out = tmp_path / "whole.safetensors", tmp_path / "t.safetensors"
    grid = {"lrs": [0.01, 0.003, 0.001], "cells": [2], "regime": regime, "refit": True}
    sweep(MemoryViT(model.backbone), "t", splits, QUICK, **grid, out=whole)
    at = 5 if regime == "masked" else 17  # of the second variant it is 5, too
    with pytest.raises(Interrupted) as stopped:
        sweep(model, "t", splits, QUICK, **grid, out=out, callbacks=[Interrupting(at)])
    result = stopped.value.result
    assert result.interrupted
    assert len(result.settings) == (3 if regime == "masked" else 2)
    assert engram.inspect(out).metrics["val"]["accuracy"] == max(result.best.values)
    assert list(model.tasks) == []
    resumed = sweep(model, "t", splits, QUICK, **grid, out=out, resume=True)
    assert len(resumed.settings) == 3
    assert engram.inspect(out).content == engram.inspect(whole).content


def test_regimes_that_change_the_backbone_run_one_by_one(
    model: MemoryViT, splits: Splits, tmp_path: Path
) -> None:
    out, settings = tmp_path / "m.safetensors", {"lrs": [1e-50, 0.003], "cells": [2]}
    steps = Steps(stop=15)  # three steps into the second variant
    recipe = QUICK.but(checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        sweep(model, "t", splits, recipe, out=out, progress=steps, regime="memory", **settings)
    assert list(model.tasks) == []
    with pytest.raises(EngramError, match="holds an interrupted run"):
        sweep(model, "t", splits, recipe, out=out, regime="memory", **settings)
    with pytest.raises(EngramError, match="other settings"):
        sweep(model, "t", splits, recipe, out=out, resume=True, regime="memory", lrs=[0.1, 0.003])
    other = replace(splits, train=replace(splits["train"], labels=splits["train"].labels[::-1]))
    with pytest.raises(EngramError, match="other settings"):
        sweep(model, "t", other, recipe, out=out, resume=True, regime="memory", **settings)
    steps = Steps()
    steered = recipe.but(workers=1, cache_gb=1.0, max_bad=0.5)  # which decides nothing
    result = sweep(
        model, "t", splits, steered,
        out=out, resume=True, progress=steps, regime="memory", **settings,
    )  # fmt: skip
    assert len(steps.done) == 10  # nothing of the first, and what the second lacked
    assert result.best.lr == 0.003
    expected = alone(model, splits, recipe.but(lr=0.003), 2, regime="memory")
    assert torch.equal(expected.task("t").head.weight, model.task("t").head.weight)
    assert not list((tmp_path / "m.run").glob("variant-*"))


@pytest.mark.parametrize("regime", ["masked", "class"])
def test_a_sweep_lists_what_cannot_be_read(regime: str, model: MemoryViT, tmp_path: Path) -> None:
    for i in range(8):
        folder = tmp_path / "photos" / ("light", "dark")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (16, 16), 30 * i).save(folder / f"{i}.png")
    bad = tmp_path / "photos" / "dark" / "3.png"
    bad.write_bytes(b"broken")
    steps = Steps(stop=5)  # of the second variant, if they are trained one after the other
    recipe = QUICK.but(steps=4, max_bad=0.2)
    out = tmp_path / "t.safetensors"
    given = {"lrs": [0.001, 0.01], "out": out, "regime": regime}
    stopped = regime == "class"
    if stopped:
        with pytest.raises(KeyboardInterrupt):
            sweep(model, "t", load(tmp_path / "photos"), recipe, progress=steps, **given)
    result = sweep(model, "t", load(tmp_path / "photos"), recipe, resume=stopped, **given)
    assert list(result.unreadable) == [str(bad)]
    listed = (tmp_path / "t.run" / "unreadable.txt").read_text()
    assert listed == f"{result.unreadable[str(bad)]}\n"
    assert not list((tmp_path / "t.run").glob("variant-*"))


@pytest.mark.parametrize("regime", ["masked", "class"])
def test_a_sweep_keeps_no_history_of_a_fit_that_it_replaces(
    regime: str, model: MemoryViT, splits: Splits, tmp_path: Path
) -> None:
    (tmp_path / "t.run").mkdir()
    history = tmp_path / "t.run" / "history.csv"
    history.write_text("of the fit")
    recipe, out = QUICK.but(steps=1, evaluations=1), tmp_path / "t.safetensors"
    sweep(model, "t", splits, recipe, lrs=[0.01], out=out, overwrite=True, regime=regime)
    assert not history.exists() or "of the fit" not in history.read_text()


def test_an_interrupted_sweep_goes_on(model: MemoryViT, splits: Splits, tmp_path: Path) -> None:
    recipe = QUICK.but(checkpoint_seconds=0)
    grid = {"lrs": [0.001, 0.01], "cells": [1, 2]}
    whole = sweep(MemoryViT(model.backbone), "t", splits, recipe, **grid)
    steps = Steps(stop=7)
    out = tmp_path / "t.safetensors"
    with pytest.raises(KeyboardInterrupt):
        sweep(model, "t", splits, recipe, out=out, progress=steps, **grid)
    with pytest.raises(EngramError, match="holds an interrupted run"):
        sweep(model, "t", splits, recipe, out=out, **grid)
    result = sweep(model, "t", splits, recipe, out=out, resume=True, progress=steps, **grid)
    assert steps.done[7:] == [*range(7, 13)]  # step 7 was not in a checkpoint yet
    assert result.settings == whole.settings


def test_a_parent_is_read_and_left_alone(model: MemoryViT, splits: Splits) -> None:
    parent = model.add_task("parent", 4, 2, seed=5)
    before = {name: value.clone() for name, value in parent.tensors().items()}
    sweep(model, "t", splits, QUICK, lrs=[0.01], cells=[1], extends=["parent"])
    assert model.task("t").spec.extends == ("parent",)
    after = model.task("parent").tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("parent", {"extends": ["parent"]}, "'parent' is attached already"),
        ("parent", {}, "'parent' is attached already"),
        ("base", {}, "'base' cannot name a task"),
        ("t" * 65, {}, "cannot name a task"),
        ("t", {"regime": "memory"}, "cannot share a pass"),
    ],
)
def test_a_task_that_the_model_will_not_take_is_refused_before_training(
    name: str, settings: dict[str, Any], expected: str, model: MemoryViT, splits: Splits
) -> None:
    model.add_task("parent", 4, 2, seed=5)

    def never(what: str, done: int, total: int, note: str = "") -> None:
        raise AssertionError(what)

    with pytest.raises(EngramError, match=expected):
        sweep(model, name, splits, QUICK, lrs=[0.01], progress=never, **settings)
    assert list(model.tasks) == ["parent"]
