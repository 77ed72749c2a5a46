"""What a run needs of the cache is known before an image is read."""

from pathlib import Path

import pytest
import torch

from engram import MemoryViT, Recipe, load_backbone
from engram.backbones.shape import BackboneShape
from engram.data.datasets import load
from engram.methods import METHODS
from engram.tasks.costs import backbone_macs
from engram.train.features import feeds
from engram.train.features.cache import row_bytes
from engram.train.features.feeds import FeedPlan


def plan_of(
    backbone: Path, data: Path, recipe: Recipe, regime: str = "masked", tasks: int = 1
) -> FeedPlan:
    splits = load(data).with_validation()
    specs = [splits.task_spec(f"t{i}", METHODS[regime]()) for i in range(tasks)]
    return FeedPlan(MemoryViT(load_backbone(backbone)), specs, splits, recipe)


def test_the_disk_is_that_of_all_images_and_views(small_backbone: Path, colours: Path) -> None:
    plan = plan_of(small_backbone, colours, Recipe())
    row = row_bytes(plan.model.backbone, plan.model.preprocessing, plan.keeps)
    assert (plan.reason_against(), plan.bytes) == (None, 60 * row)
    views = plan_of(small_backbone, colours, Recipe(augment="pad-crop", views=3))
    assert (views.reason_against(), views.bytes) == (None, (3 * 54 + 6) * row)


@pytest.mark.parametrize(
    ("regime", "tasks", "keeps"),
    [
        ("masked", 1, "layers"),
        ("masked", 200, "keys"),
        ("head", 200, "layers"),
        ("side", 200, "all"),
        ("readout", 200, "statistics"),
    ],
)
def test_the_keys_and_values_are_kept_for_many_masked_tasks(
    regime: str, tasks: int, keeps: str, small_backbone: Path, colours: Path
) -> None:
    assert plan_of(small_backbone, colours, Recipe(), regime, tasks).keeps == keeps


def test_tokens_are_kept_where_keys_and_values_would_take_too_much_disk(
    small_backbone: Path, colours: Path
) -> None:
    plan = plan_of(small_backbone, colours, Recipe(), tasks=200)
    row = row_bytes(plan.model.backbone, plan.model.preprocessing, "layers")
    little = plan_of(small_backbone, colours, Recipe(cache_gb=60 * row / 1e9), tasks=200)
    assert (little.keeps, little.too_large()) == ("layers", None)


def test_what_speaks_against_the_cache(small_backbone: Path, colours: Path) -> None:
    random = plan_of(small_backbone, colours, Recipe(augment="pad-crop"))
    assert "random every time (give views" in str(random.reason_against())
    full = plan_of(small_backbone, colours, Recipe(), "full")
    assert full.reason_against() == "the regime changes the backbone's own tokens"
    small = plan_of(small_backbone, colours, Recipe(cache_gb=1e-6))
    assert str(small.too_large()).endswith("and cache_gb is 1e-06")


@pytest.mark.parametrize(
    ("precision", "has", "images", "dtype"),
    [
        ("auto", True, 59, torch.bfloat16),
        ("auto", True, 60, torch.float32),  # the pass is not longer than that
        ("auto", False, 59, torch.float32),
        ("fp32", True, 59, torch.float32),
    ],
)
def test_a_long_pass_is_computed_in_bf16_where_the_cpu_has_it(
    precision: str,
    has: bool,
    images: int,
    dtype: torch.dtype,
    small_backbone: Path,
    colours: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of(small_backbone, colours, Recipe(precision=precision))
    shape, size = BackboneShape.measure(plan.model.backbone), plan.model.preprocessing.size
    monkeypatch.setattr(feeds, "_LONG_PASS", images * backbone_macs(shape, size))
    monkeypatch.setattr(feeds, "cpu_has_bf16", lambda: has)
    assert plan.cache().dtype == dtype
