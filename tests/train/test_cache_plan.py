"""What a run needs of the cache is known before an image is read."""

from pathlib import Path

from engram import MemoryViT, Recipe, load_trunk
from engram.data.datasets import load
from engram.tasks.settings import TaskSettings
from engram.train.cache import row_bytes
from engram.train.cache_plan import CachePlan


def plan_of(trunk: Path, data: Path, recipe: Recipe, regime: str = "masked") -> CachePlan:
    splits = load(data).with_validation()
    spec = splits.task_spec("t", TaskSettings(regime=regime))
    return CachePlan(MemoryViT(load_trunk(trunk)), [spec], splits, recipe)


def test_the_disk_is_that_of_all_images_and_views(small_trunk: Path, colours: Path) -> None:
    plan = plan_of(small_trunk, colours, Recipe())
    row = row_bytes(plan.model.trunk, plan.model.preprocessing, plan.keeps)
    assert (plan.reason_against(), plan.bytes) == (None, 60 * row)
    views = plan_of(small_trunk, colours, Recipe(augment="pad-crop", views=3))
    assert (views.reason_against(), views.bytes) == (None, (3 * 54 + 6) * row)


def test_what_speaks_against_the_cache(small_trunk: Path, colours: Path) -> None:
    random = plan_of(small_trunk, colours, Recipe(augment="pad-crop"))
    assert "random every time (give views" in str(random.reason_against())
    full = plan_of(small_trunk, colours, Recipe(), "full")
    assert full.reason_against() == "the regime changes the trunk's own tokens"
    small = plan_of(small_trunk, colours, Recipe(cache_gb=1e-6))
    assert str(small.too_large()).endswith("and cache_gb is 1e-06")
