"""The variants of a sweep: a grid that makes sense, each as if it had been trained alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.training import alone

from engram import EngramError, MemoryViT, Recipe
from engram.data.datasets import Splits
from engram.methods.head import MlpHead
from engram.tasks.task_settings import TaskSettings
from engram.train.recipe import learning_rate
from engram.train.runs.run import Run
from engram.train.search.sweep import sweep
from engram.train.search.variants import Setting, SweepRunner, Variant, grid_of
from engram.util.processes import ProcessGroup

QUICK = Recipe(steps=12, batch=16, evaluations=3, workers=0)


def test_a_grid_has_every_combination_with_every_seed_once() -> None:
    recipe = Recipe(weight_decay=0.3, seed=7)
    variants = grid_of(
        recipe, TaskSettings("masked"), lrs=(0.1, 0.01, 0.1), cells=(1, 5, 1), seeds=2
    )
    points = [(v.setting.lr, v.setting.cells, v.recipe.seed) for v in variants]
    assert points == [(lr, m, s) for lr in (0.1, 0.01) for m in (1, 5) for s in (7, 8)]
    assert {variant.setting.weight_decay for variant in variants} == {0.3}


def test_an_empty_grid_is_the_recipe_and_heads_have_no_cells() -> None:
    [variant] = grid_of(Recipe(), TaskSettings("mlp-head"), cells=(5, 10))
    assert variant.setting.lr == learning_rate(Recipe(), MlpHead)
    assert variant.setting.cells == 0


@pytest.mark.parametrize(
    ("recipe", "task"),
    [
        (QUICK.but(optimizer="sgd"), {}),
        (QUICK.but(optimizer="sgd", cache="off"), {"regime": "masked+adapter"}),
        (QUICK.but(optimizer="sgd", steps=40, evaluations=20, patience=2), {}),
        (QUICK.but(optimizer="sgd"), {"regime": "mlp-head"}),
        (QUICK.but(optimizer="sgd"), {"extends": ["parent"]}),
    ],
    ids=["cached", "uncached-adapters", "patience", "heads", "extends"],
)
def test_a_variant_ends_as_if_it_had_been_alone(
    recipe: Recipe, task: dict[str, Any], model: MemoryViT, splits: Splits
) -> None:
    if task.get("extends"):
        model.add_task("parent", 4, 2, seed=5)
    recipe = recipe.but(calibrate="off", statistics="off", refit=False)
    settings = TaskSettings.create(task)
    counts = (0, 3) if task.get("regime") != "mlp-head" else (0,)
    variants = [
        Variant(
            settings.but(cells=cells) if cells or len(counts) > 1 else settings,
            recipe.but(lr=lr, weight_decay=decay, seed=seed),
        )
        for lr in (0.02, 0.3)
        for cells in counts
        for decay in (0.0, 0.1)
        for seed in (0, 1)
    ]
    whole = splits.with_validation()
    runner = SweepRunner(model, "t", whole, recipe, settings, Run(None, ProcessGroup()))
    scores, _ = runner.train(variants)
    for variant, score in list(zip(variants, scores, strict=True))[::3]:
        single = alone(model, splits, variant.recipe, variant.setting.cells, **task)
        assert score.engram.spec == single.task("t").spec
        for name, value in single.task("t").tensors().items():
            found = score.engram.tensors[name]
            # many variants read keys and values from the cache, one alone reads tokens
            assert torch.allclose(found, value, rtol=0, atol=1e-4), (variant, name)


def test_deviation_is_over_seeds() -> None:
    setting = Setting(0.1, 5, 0.0, (0.5, 0.7, 0.9))
    assert setting.mean == pytest.approx(0.7)
    assert setting.deviation == pytest.approx(0.2)
    assert Setting(0.1, 5, 0.0, (0.5,)).deviation == 0.0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lrs": [-1.0]}, r"lr is -1; it must be a number above 0\."),
        ({"lrs": [float("nan")]}, "lr is nan; it must be"),
        ({"weight_decays": [-1.0]}, "weight_decay is -1.0; it must be a number, at least 0"),
        ({"cells": [-1]}, "cells is -1; it must be a whole number"),
        ({"cells": []}, "cells is empty; give at least one number"),
        ({"seeds": 0}, "seeds is 0; at least one is needed"),
        ({"seeds": 10**20}, "variants that a sweep can have"),
        ({"lrs": [1e308]}, "lr is 1e.308; it can be"),
        ({"regime": "some"}, "There is no regime 'some'; choose one of masked"),
    ],
)
def test_a_grid_that_makes_no_sense_is_a_sentence(
    settings: dict[str, Any], expected: str, model: MemoryViT, splits: Splits
) -> None:
    with pytest.raises(EngramError, match=expected):
        sweep(model, "t", splits, QUICK, **settings)
