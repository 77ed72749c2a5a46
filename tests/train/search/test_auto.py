"""auto tries the regimes that leave the backbone alone, keeps the best, and says what it tried."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.training import as_written, same, state

import engram
from engram import EngramError, MemoryViT, Recipe
from engram.data.datasets import Splits
from engram.tasks.kinds import KINDS
from engram.tasks.task_settings import TaskSettings
from engram.train.runs.run import Run
from engram.train.search import auto as module
from engram.train.search.auto import RATES, AutoResult, Portfolio, Rates
from engram.train.search.variants import SweepRunner
from engram.util.processes import ProcessGroup

QUICK = Recipe(steps=20, batch=16, workers=0)


def tried(result: AutoResult, how: str) -> dict[str, int]:
    """How many tasks of each regime were tried in this way."""
    regimes = [one.regime for one in result.tried if one.how == how]
    return {regime: regimes.count(regime) for regime in regimes}


def trained_rates(result: AutoResult) -> dict[str, set[float]]:
    """The learning rates of each regime that was trained."""
    trained = [one for one in result.tried if one.how == "trained"]
    return {one.regime: {o.lr for o in trained if o.regime == one.regime} for one in trained}


def has_first(rates: dict[str, set[float]], regimes: Iterable[str] = RATES) -> bool:
    """Whether these regimes, and no others, were trained at the rates that are always tried."""
    return set(rates) == set(regimes) and all(
        set(RATES[one].first) <= rates[one] <= {*RATES[one].first, *RATES[one].further}
        for one in regimes
    )


# What is tried, and what is kept


def test_the_best_is_kept_and_all_that_was_tried_is_listed(
    model: MemoryViT, splits: Splits, tmp_path: Path, computed: list[int]
) -> None:
    out, before = tmp_path / "t.safetensors", state(model.backbone)
    result = engram.auto(model, "t", splits, QUICK, out=out, test=True)
    assert sum(computed) == 60  # the backbone ran once for every training image
    assert has_first(trained_rates(result))
    assert tried(result, "solved") == {"head": 1, "readout": 1}
    (kept,) = (one for one in result.tried if one.kept)
    assert (kept.regime, kept.parameters) == (result.regime, result.parameters)
    assert kept.value == pytest.approx(result.metrics["val"]["held_out"])
    assert result.metrics["test"]["accuracy"] >= 0.85  # chance: 0.33
    assert list(model.tasks) == ["t"]
    assert same(before, state(model.backbone))

    written = engram.inspect(out)
    assert (written.spec.regime, written.parameters) == (kept.regime, kept.parameters)
    assert written.metrics == as_written(result.metrics)
    other = MemoryViT(model.backbone)
    other.attach(out)
    again = engram.evaluate(other, splits, "t", workers=0)
    assert again["accuracy"] == result.metrics["test"]["accuracy"]
    assert again["loss"] == pytest.approx(result.metrics["test"]["loss"], abs=1e-3)
    assert written.recipe is not None
    assert written.recipe.get("lr", 0.0) == kept.lr
    assert not (tmp_path / "t.run" / "checkpoint.safetensors").exists()

    # The best is the first in the table, and short trainings are the last.
    columns, rows = result.table(KINDS["classification"])
    assert columns[-2] == "validation accuracy"
    assert len(rows) == len(result.tried)
    shown = [float(row[-2].removesuffix("%")) for row in rows]
    short = sum(one.dropped for one in result.tried)
    assert shown[:-short] == sorted(shown[:-short], reverse=True)
    assert shown[-short:] == sorted(shown[-short:], reverse=True)
    assert sum(row[-1].startswith("kept") for row in rows) == 1
    assert short == sum(tried(result, "trained").values()) - 1
    assert all("12 images" in row[-1] for row in rows[-short:])
    assert result.to_dict()["tried"] == [asdict(one) for one in result.tried]


@pytest.mark.parametrize("refit", [True, False], ids=["folds", "share"])
def test_only_the_trial_of_the_best_scout_is_trained_to_the_end(
    refit: bool, model: MemoryViT, splits: Splits
) -> None:
    recipe = QUICK.but(epochs=12, steps=40, patience=20, evaluations=20, refit=refit)
    result = engram.auto(model, "t", splits, recipe)
    trained = [one for one in result.tried if one.how == "trained"]
    assert [one.epochs for one in trained if not one.dropped] == [10.0]
    assert {one.epochs for one in trained if one.dropped} == {2.0}


def test_a_small_difference_goes_to_the_lowest_loss(
    model: MemoryViT, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram.train.loop.validation.noise", lambda kind, metrics: 1.0)
    losses: list[float] = []
    measured = module.ties

    def seen(score: str, tried: Any) -> list[int]:
        losses.extend(metrics["loss"] for metrics in tried)
        return measured(score, tried)

    monkeypatch.setattr(module, "ties", seen)
    result = engram.auto(model, "t", splits, QUICK.but(calibrate="off"))
    assert result.metrics["val"]["loss"] == min(losses)
    finished = [one for one in result.tried if not one.dropped]
    assert all(one.tied for one in finished)


def portfolio(model: MemoryViT, splits: Splits, **recipe: Any) -> Portfolio:
    held_out, own = splits.with_validation(), QUICK.but(patience=4, evaluations=20, **recipe)
    return Portfolio(
        SweepRunner(model, "t", held_out, own, TaskSettings(), Run(None, ProcessGroup()))
    )


@pytest.mark.parametrize("regime", ["masked", "masked+adapter", "side"])
def test_the_average_of_two_tasks_is_one_task(
    regime: str, model: MemoryViT, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output is the mean of theirs."""
    monkeypatch.setattr(module, "RATES", {"side": Rates((1e-9,)), regime: Rates((0.003,))})
    candidates = portfolio(model, splits, calibrate="off")
    candidates.best()
    answers = candidates.model.eval()(torch.rand(5, 3, 16, 16))
    finals = {one.final.task.spec.regime: one.final.name for one in candidates.finished}
    trained, readout = answers[finals[regime]], answers[finals["readout"]]
    average = answers[finals[f"{regime}+readout"]]
    assert torch.allclose(average, (trained + readout) / 2, atol=1e-5)


def test_an_average_is_written_measured_and_attached(
    model: MemoryViT, splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RATES", {"side": Rates((0.003,))})
    monkeypatch.setattr(module, "best_of", lambda score, tried: len(tried) - 1)
    out = tmp_path / "t.safetensors"
    result = engram.auto(model, "t", splits, QUICK.but(refit=False), out=out)
    (kept,) = (one for one in result.tried if one.kept)
    assert kept.how == "averaged"
    assert result.regime == "side+readout"
    other = MemoryViT(model.backbone)
    other.attach(out)
    again = engram.evaluate(other, splits.with_validation(), "t", split="val", workers=0)
    assert again["accuracy"] == result.metrics["val"]["accuracy"]
    assert again["loss"] == pytest.approx(result.metrics["val"]["loss"], abs=1e-3)


# Settings


def test_a_learning_rate_that_is_given_is_the_only_one(model: MemoryViT, splits: Splits) -> None:
    result = engram.auto(model, "t", splits, QUICK.but(lr=0.002))
    assert tried(result, "trained") == {"masked": 1, "masked+adapter": 1, "side": 1}
    assert {one.lr for one in result.tried if one.how == "trained"} == {0.002}


def test_sgd_has_rates_of_its_own(model: MemoryViT, splits: Splits) -> None:
    result = engram.auto(model, "t", splits, QUICK.but(optimizer="sgd"))
    assert {one.lr for one in result.tried if one.how == "trained"} == {0.3, 0.1}


@pytest.mark.parametrize(
    "settings",
    [{"cache": "off"}, {"augment": "pad-crop", "views": 2}, {"augment": "pad-crop"}],
    ids=["off", "views", "augmented"],
)
def test_it_learns_with_and_without_the_cache(
    settings: dict[str, Any], model: MemoryViT, splits: Splits
) -> None:
    result = engram.auto(model, "t", splits, QUICK.but(**settings), test=True)
    assert result.metrics["test"]["accuracy"] >= 0.85


@pytest.mark.parametrize("evaluations", [1, 100])
def test_patience_may_run_out_before_one_is_left(
    evaluations: int, model: MemoryViT, splits: Splits
) -> None:
    recipe = QUICK.but(steps=100, patience=1, evaluations=evaluations)
    result = engram.auto(model, "t", splits, recipe)
    assert sum(one.kept for one in result.tried) == 1
    assert has_first(trained_rates(result))


def test_one_validation_image_is_enough(model: MemoryViT, splits: Splits) -> None:
    held = splits.with_validation()
    one = replace(held, val=held["val"].subset(np.array([0]), "val"))
    assert engram.auto(model, "t", one, QUICK).metrics["val"]["images"] == 1


def test_images_that_cannot_be_read_count_as_wrong(model: MemoryViT, photos: Path) -> None:
    (photos / "val" / "dark" / "00.png").write_bytes(b"broken")
    result = engram.auto(model, "t", photos, QUICK.but(max_bad=0.1))
    assert len(result.unreadable) == 1
    assert {one.value for one in result.tried} <= {i / 10 for i in range(10)}
    assert result.metrics["val"]["images"] == 10


# Parents


@pytest.mark.parametrize("regime", ["masked", "side"])
def test_a_child_is_of_its_parents_kind(
    regime: str, model: MemoryViT, splits: Splits, tmp_path: Path
) -> None:
    """One parent has the name that candidates would have."""
    for name in ("parent", "tried-1", "other"):
        model.add_task(name, 2, 2, regime=regime, seed=1)
    before = model.engram("parent").content
    out = tmp_path / "t.safetensors"
    result = engram.auto(model, "t", splits, QUICK, extends=["parent", "tried-1"], out=out)
    expected = [name for name in RATES if name.startswith(regime)]
    assert has_first(trained_rates(result), expected)
    assert {one.how for one in result.tried} == {"trained"}
    assert list(model.tasks) == ["parent", "tried-1", "other", "t"]
    assert model.task("t").spec.extends == ("parent", "tried-1")
    assert engram.inspect(out).parents["parent"] == before == model.engram("parent").content


def test_a_parent_of_another_rank_is_a_sentence(model: MemoryViT, splits: Splits) -> None:
    model.add_task("parent", 2, regime="side", rank=4)
    with pytest.raises(EngramError, match=r"'t' cannot extend 'parent'.* rank 16 .* choose rank 4"):
        engram.auto(model, "t", splits, QUICK, extends=["parent"])
    engram.auto(model, "t", splits, QUICK, extends=["parent"], rank=4)


# Mistakes


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("taken", {}, "'taken' is attached already"),
        ("UPPER", {}, "'UPPER' cannot name a task"),
        ("t", {"cells": -1}, "cells is -1"),
        ("t", {"rank": 0}, "rank is 0"),
        ("t", {"class_init": "zero"}, "class_init is 'zero'"),
        ("t", {"extends": ["gone"]}, "no task 'gone'"),
        ("t", {"extends": ["plain"]}, "'t' cannot extend 'plain'.* 'head'"),
    ],
)
def test_a_mistake_is_refused_before_training(
    name: str, settings: dict[str, Any], sentence: str, model: MemoryViT, splits: Splits
) -> None:
    model.add_task("taken", 2)
    model.add_task("plain", 2, regime="head")

    def never(what: str, done: int, total: int, note: str = "") -> None:
        raise AssertionError(what)

    with pytest.raises(EngramError, match=sentence):
        engram.auto(model, name, splits, QUICK, progress=never, **settings)
    assert list(model.tasks) == ["taken", "plain"]


# Runs that end early, and again


def stopping(at: int) -> Any:
    def progress(what: str, done: int, total: int, note: str = "") -> None:
        if what == "training" and done == at:
            raise KeyboardInterrupt

    return progress


def test_an_interrupted_run_ends_with_the_same_content(
    model: MemoryViT, splits: Splits, tmp_path: Path
) -> None:
    stops, out = (2, 7, 12), tmp_path / "t.safetensors"
    recipe = QUICK.but(checkpoint_seconds=0, patience=20, evaluations=20)
    whole = engram.auto(
        MemoryViT(model.backbone), "t", splits, recipe, out=tmp_path / "w.safetensors"
    )
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            engram.auto(
                MemoryViT(model.backbone), "t", splits, recipe,
                out=out, resume=stop != stops[0], progress=stopping(stop),
            )  # fmt: skip
    with pytest.raises(EngramError, match="holds an interrupted run"):
        engram.auto(MemoryViT(model.backbone), "t", splits, recipe, out=out)
    result = engram.auto(model, "t", splits, recipe, out=out, resume=True)
    assert engram.inspect(out).content == engram.inspect(tmp_path / "w.safetensors").content
    assert result.tried == whole.tried
    assert result.history == whole.history


def test_a_finished_run_is_resumed_as_a_success(
    model: MemoryViT, splits: Splits, tmp_path: Path
) -> None:
    out = tmp_path / "t.safetensors"
    first = engram.auto(MemoryViT(model.backbone), "t", splits, QUICK, out=out, test=True)
    written = out.stat().st_mtime_ns
    second = engram.auto(model, "t", splits, QUICK, out=out, test=True, resume=True)
    assert out.stat().st_mtime_ns == written
    assert second.tried == first.tried
    assert second.metrics == first.metrics
    assert model.engram("t").content == engram.inspect(out).content
    with pytest.raises(EngramError, match="exists already"):
        engram.auto(MemoryViT(model.backbone), "t", splits, QUICK, out=out)
