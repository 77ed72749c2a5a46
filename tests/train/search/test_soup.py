"""A soup is kept where validation says that it helps, is of one start, and names its variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import engram
from engram import EngramError, MemoryViT, Recipe
from engram.data.datasets import Splits
from engram.tasks.kinds import KINDS
from engram.tasks.task_settings import TaskSettings
from engram.train.search.sweep import Soup, best_soup, spread, sweep
from engram.train.search.variants import Trained, Variant

QUICK = Recipe(steps=12, batch=16, evaluations=3, workers=0)
GOOD, BETTER = {"accuracy": 0.8, "loss": 0.5}, {"accuracy": 0.9, "loss": 0.3}


def trained(model: MemoryViT, variant: Variant, value: float, accuracy: float) -> Trained:
    engram = model.engram("t")
    tensors = {name: torch.full_like(tensor, value) for name, tensor in engram.tensors.items()}
    metrics = {"accuracy": accuracy, "loss": 0.5, "images": 100}
    return Trained(variant, metrics, replace(engram, tensors=tensors), None)


def choose(model: MemoryViT, metrics: dict[str, float]) -> tuple[Soup, Trained]:
    """The soup of three variants and one of another seed, where averages have these metrics."""
    model.add_task("t", 2, 2)
    task, begun = TaskSettings(method_settings={"cells": 2}), ((1, 0), (2, 0), (3, 0), (1, 1))
    variants = [Variant(task, Recipe(lr=lr, weight_decay=0.0, seed=seed)) for lr, seed in begun]
    scores = (0.8, 0.6, 0.7, 0.8)
    pairs = zip(variants, scores, strict=True)
    all_of_them = [trained(model, variant, i, score) for i, (variant, score) in enumerate(pairs)]

    def measure(averages: Sequence[Trained]) -> list[Trained]:
        measured = [metrics if i else GOOD for i in range(len(averages))]
        return [
            replace(one, metrics={**own, "images": 100})
            for one, own in zip(averages, measured, strict=True)
        ]

    return best_soup(all_of_them, all_of_them[0], 3, measure)


def test_the_best_of_one_start_are_averaged_if_that_is_better(model: MemoryViT) -> None:
    soup, chosen = choose(model, BETTER)
    assert soup.kept == 3
    assert [one["lr"] for one in soup.members] == [1, 3, 2]  # the best first, none of seed 1
    assert [one["weight"] for one in soup.lineage] == [pytest.approx(1 / 3, abs=1e-5)] * 3
    head = chosen.engram.tensors["head.weight"]
    assert torch.allclose(head, torch.full_like(head, 1.0))  # of 0, 2 and 1
    summary = soup.summary(KINDS["classification"])
    assert summary.startswith("the best alone 80.00% (loss 0.500), average of 2 80.00%")
    assert summary.endswith("average of 3 90.00% (loss 0.300); kept the average of 3")


def test_the_best_alone_is_kept_if_no_average_is_better(model: MemoryViT) -> None:
    soup, chosen = choose(model, {"accuracy": 0.8, "loss": 0.6})
    assert soup.kept == 1
    assert not bool(chosen.engram.tensors["head.weight"].any())


def test_rates_are_spread_around_the_given_one() -> None:
    assert spread(0.001, 3) == [0.0005, 0.001, 0.002]
    assert spread(0.001, 2) == [0.0005, 0.002]


@pytest.mark.parametrize("regime", ["masked", "memory"])
def test_a_sweep_writes_what_validation_kept(
    regime: str, model: MemoryViT, splits: Splits, tmp_path: Path
) -> None:
    out, rates = tmp_path / "t.safetensors", [0.01, 0.02, 0.03]
    given: dict[str, Any] = {"lrs": rates, "cells": [2], "soup": 3, "regime": regime, "out": out}
    result = sweep(model, "t", splits, QUICK, **given)
    assert result.soup is not None
    assert len(result.soup.tried) == 3
    kept = result.soup.tried[result.soup.kept - 1]
    assert kept["val_accuracy"] == result.metrics["val"]["accuracy"]
    found = engram.inspect(out)
    merged = found.recipe.get("merged", [])
    assert len(merged) == (result.soup.kept if result.soup.kept > 1 else 0)
    again = sweep(MemoryViT(model.backbone), "t", splits, QUICK, **given, resume=True)
    assert again.soup == result.soup
    assert again.to_dict()["soup"]["kept"] == result.soup.kept
    scores = engram.evaluate(model, splits.with_validation(0.1), "t", split="val")
    assert scores["accuracy"] == result.metrics["val"]["accuracy"]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"soup": 1}, "soup is 1"),
        ({"soup": 3}, "only 2 of the 4 variants"),
        ({"soup": 2, "refit": True}, "refit trains one variant again"),
    ],
)
def test_a_soup_that_cannot_be_is_refused(
    given: dict[str, Any], problem: str, model: MemoryViT, splits: Splits
) -> None:
    with pytest.raises(EngramError, match=problem):
        sweep(model, "t", splits, QUICK, lrs=[0.01, 0.02], cells=[2], seeds=2, **given)
