"""Which images an epoch has, in which order, and what of the backbone they need."""

from pathlib import Path

import numpy as np
from tests.support.training import start

from engram import Recipe
from engram.data.datasets import Splits
from engram.train.feed_plan import FeedPlan
from engram.util.processes import ProcessGroup


def test_an_epoch_has_every_image_once_unless_a_sampler_balances(
    small_backbone: Path, splits: Splits
) -> None:
    splits = splits.with_validation(0.1, 0)
    recipe = Recipe(batch=16, balance="sampler")
    plan = FeedPlan(start(small_backbone, splits), ["colours"], splits, recipe, ProcessGroup())
    assert sorted(plan.order(1, even=False)) == list(range(54))
    labels = plan.train.labels[plan.order(1, even=True)]
    assert np.ptp(np.bincount(labels)) <= 1
    assert plan.per_epoch == 4
    assert not plan.only_pooled
