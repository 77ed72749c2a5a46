"""A head that is solved for drawn old features and real new ones knows both."""

import pytest
import torch
from tests.support.engrams import small_backbone
from torch import Tensor

from engram import MemoryViT, Recipe
from engram.tasks.class_statistics import ClassStatistics
from engram.tasks.task import Task
from engram.train.replay import drawn, real, solve_head

WIDTH, RECIPE = 16, Recipe()


def features(labels: Tensor) -> Tensor:
    return torch.randn(len(labels), WIDTH) + 6 * torch.eye(4, WIDTH)[labels] + 3


def statistics(labels: Tensor, groups: int) -> ClassStatistics:
    found, x = ClassStatistics(groups, WIDTH), features(labels).double()
    sums = torch.zeros(groups, WIDTH, dtype=torch.float64).index_add_(0, labels, x)
    found.estimate(torch.bincount(labels, minlength=groups).double(), sums, x.square().sum(0))
    found.correlate(x, labels)
    return found


def task(regime: str = "head") -> Task:
    return MemoryViT(small_backbone()).add_task("t", 4, regime=regime, seed=0)


def test_old_classes_are_not_forgotten() -> None:
    old = statistics(torch.arange(60) % 2, 2)
    new = torch.arange(60) % 2 + 2
    for regime in ("head", "mlp-head"):
        learned = task(regime)
        train = real([(features(new).half(), new)]).plus(drawn(old, seed=1))
        solve_head(learned, train, real([(features(new).half(), new)]), RECIPE)
        every = torch.arange(200) % 4
        answers = learned.head(features(every)).argmax(1)
        assert float((answers == every).float().mean()) > 0.97


def test_drawn_images_count_for_as_many_as_there_were() -> None:
    old = statistics(torch.tensor([0] * 30 + [2] * 10), 3)  # none of class 1
    found = drawn(old, seed=1)
    totals = torch.zeros(3).index_add_(0, found.labels, found.weights)
    assert totals.tolist() == pytest.approx([30, 0, 10], abs=1e-3)
    assert len(drawn(old, 1, each=5).labels) == 10
    assert not torch.equal(drawn(old, 1).features, drawn(old, 2).features)


def test_balance_gives_every_class_the_same_weight() -> None:
    """Of two classes that are hard to tell apart, the rare one is answered more often."""
    labels = torch.tensor([0] * 190 + [1] * 10)
    x = torch.randn(200, WIDTH).half()
    said = {}
    for balance in ("none", "weights"):
        learned = task()
        solve_head(learned, real([(x, labels)]), real([(x, labels)]), RECIPE.but(balance=balance))
        said[balance] = int((learned.head(torch.randn(400, WIDTH)).argmax(1) == 1).sum())
    assert said["none"] < 40 < said["weights"]
