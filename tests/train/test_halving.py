"""Learners are dropped in two rounds; the best go on, and one of side network among them."""

from __future__ import annotations

import pytest

from engram import MemoryViT, Recipe
from engram.data.datasets import Splits
from engram.train.halving import SuccessiveHalving, Trial
from engram.train.learner import TaskTrainer
from engram.train.run import Run
from engram.util.processes import ProcessGroup

RECIPE = Recipe(steps=40, batch=16, workers=0, evaluations=20)


@pytest.fixture
def training(model: MemoryViT, splits: Splits) -> SuccessiveHalving:
    """Two rates of two regimes; the first rate of each moves nothing."""
    trials = []
    for regime in ("masked", "side"):
        for lr in (1e-50, 0.003):
            name = f"{regime}-{lr:g}"
            model.add_task(name, splits.classes, 2, regime=regime, seed=0)
            trials.append(Trial([TaskTrainer(model, name, RECIPE, lr)]))
    held = splits.with_validation()
    training = SuccessiveHalving(model, trials, held, RECIPE, Run(None, ProcessGroup()))
    training.prepare()
    training.begin("")
    return training


def test_the_best_go_on(training: SuccessiveHalving) -> None:
    training.go()
    training.end()
    epochs = [metrics["epochs"] for metrics in training.dropped.values()]
    assert sorted(epochs) == [2.0, 4.0]  # of ten
    assert set(training.names) == {"masked-0.003", "side-0.003"}
    assert all("accuracy" in metrics for metrics in training.dropped.values())
    assert all(learner.metrics["accuracy"] == 1 for learner in training.learners)


def test_what_is_dropped_trains_no_longer(training: SuccessiveHalving) -> None:
    training.go()
    trainable = {name for name, p in training.model.named_parameters() if p.requires_grad}
    assert len(trainable) == sum(len(learner.parameters) for learner in training.learners)


def test_one_of_side_patches_is_kept_for_the_average(training: SuccessiveHalving) -> None:
    """Even where it is the worst."""
    training.keep(["masked-1e-50", "masked-0.003", "side-1e-50"])
    training.go()
    assert "side-1e-50" in training.names
    assert len(training.names) == 2
