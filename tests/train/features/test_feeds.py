"""Batches come from the cache where they can, and lead where the backbone leads."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.regimes import known
from tests.support.training import learned, same, start
from torch import Tensor

import engram
from engram import EngramError, MemoryViT, Recipe, load_backbone
from engram.data.datasets import Splits, load
from engram.errors import Notice
from engram.train.features.feeds import BackboneFeed, BatchShard, CacheFeed, FeedPlan, open_feed
from engram.util.processes import ProcessGroup
from engram.util.progress import silent

QUICK = Recipe(steps=20, batch=16, evaluations=2, workers=0, cache="on")


def feed(
    backbone: Path, splits: Splits, recipe: Recipe, regime: str = "masked", **more: Any
) -> Any:
    model = MemoryViT(load_backbone(backbone))
    model.add_task("t", splits.classes, regime=regime)
    plan = FeedPlan(model, [model.task("t").spec], splits.with_validation(), recipe, **more)
    return open_feed(plan, ProcessGroup())


# Where batches come from


def plan_of(model: MemoryViT, splits: Splits, recipe: Recipe) -> FeedPlan:
    return FeedPlan(model, [task.spec for task in model.tasks.values()], splits, recipe)


def test_a_feed_reads_no_image_before_it_is_used(
    small_backbone: Path, photos: Path, own_cache: Path
) -> None:
    splits = load(photos)
    for path in photos.rglob("*.png"):
        path.unlink()
    plan = plan_of(start(small_backbone, splits), splits, Recipe(workers=0))
    cached, plain = CacheFeed(plan, ProcessGroup()), BackboneFeed(plan, ProcessGroup())
    assert cached.bad == plain.bad == {}
    assert not list(own_cache.iterdir())
    cached.scan(silent)
    cached.fill(silent)
    assert [share.failed for share in plain.epoch(0, 0)] == [40]
    assert len(cached.bad) == 50
    assert len(plain.bad) == 40


def test_a_share_is_split_into_parts_of_a_size_and_an_empty_one_into_none() -> None:
    share = BatchShard(torch.arange(10).view(5, 2), torch.arange(5), torch.arange(5) + 7)
    parts = list(share.split(2))
    assert [part.labels.tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert [part.samples.tolist() for part in parts] == [[7, 8], [9, 10], [11]]
    assert torch.equal(torch.cat([part.inputs for part in parts]), share.inputs)
    assert list(BatchShard(torch.zeros(0, 2), torch.zeros(0), torch.zeros(0)).split(2)) == []


def test_the_cache_is_used_where_it_can_be(small_backbone: Path, colours: Path) -> None:
    splits, auto = load(colours), Recipe(workers=0)
    assert isinstance(feed(small_backbone, splits, auto), CacheFeed)
    for regime in ("head", "side", "readout"):
        assert isinstance(feed(small_backbone, splits, auto, regime), CacheFeed)
    for recipe, regime, more in (
        (auto.but(cache="off"), "masked", {}),
        (auto.but(augment="auto"), "masked", {}),
        (auto, "memory", {}),
        (auto, "full", {}),
        (auto, "masked", {"transform": np.asarray}),
    ):
        assert isinstance(feed(small_backbone, splits, recipe, regime, **more), BackboneFeed)
    with pytest.warns(Notice, match="The cache is not used.* cache_gb is 1e-06"):
        assert isinstance(feed(small_backbone, splits, auto.but(cache_gb=1e-6)), BackboneFeed)


def test_a_run_says_that_its_pictures_do_not_fit_the_cache(
    nursery: Any, small_backbone: Path, colours: Path, tmp_path: Path
) -> None:
    out = tmp_path / "t.safetensors"
    done = nursery.run(
        *("fit", colours, "--task", "t", "--backbone", small_backbone, "-o", out, "--json"),
        *("--steps", 1, "--workers", 0, "--cache-gb", 1e-6),
    )
    assert done.code == 0, done.stderr
    assert re.fullmatch(r"The cache is not used: it would take .+ every epoch\.\n", done.stderr)
    assert json.loads(done.stdout)["path"] == str(out)


def test_a_full_disk_is_no_place_for_a_cache_unless_it_is_there_already(
    small_backbone: Path, colours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits, auto = load(colours), Recipe(workers=0)
    monkeypatch.setattr("engram.train.features.feeds.room", lambda: 1000)
    with pytest.warns(Notice, match="GB are free"):
        assert isinstance(feed(small_backbone, splits, auto), BackboneFeed)
    with pytest.raises(EngramError, match="are free"):
        feed(small_backbone, splits, auto.but(cache="on"))
    monkeypatch.setattr("engram.train.features.feeds.room", lambda: 10**12)
    assert isinstance(feed(small_backbone, splits, auto), CacheFeed)
    monkeypatch.setattr("engram.train.features.feeds.room", lambda: 1000)
    assert isinstance(feed(small_backbone, splits, auto), CacheFeed)


@pytest.mark.parametrize(
    ("settings", "regime", "expected"),
    [
        (
            {"cache_gb": 1e-6},
            "masked",
            "cache_gb is 1e-06",
        ),
        ({"augment": "inception"}, "masked", "augment is inception"),
        ({}, "memory", "own tokens"),
        ({"augment": "auto", "views": 2, "cache": "off"}, "masked", "views live in the cache"),
        ({"augment": "auto", "views": 2, "cache": "auto"}, "full", "not possible here"),
    ],
)
def test_a_cache_that_cannot_be_is_a_sentence(
    settings: dict[str, Any], regime: str, expected: str, small_backbone: Path, colours: Path
) -> None:
    recipe = Recipe(**{"workers": 0, "cache": "on", **settings})
    with pytest.raises(EngramError) as caught:
        feed(small_backbone, load(colours), recipe, regime)
    assert expected in str(caught.value)


KEEPS = [
    (["masked"], "layers"),
    (["head"], "layers"),
    (["masked", "head"], "layers"),
    (["side"], "all"),
    (["side", "masked"], "all"),
    (["side+readout"], "all"),
    (["readout"], "statistics"),
    (["readout", "readout"], "statistics"),
    (["readout", "head"], "statistics"),
    (["readout", "side"], "all"),
    (["masked"] * 40, "keys"),
]


@pytest.mark.parametrize(("regimes", "keeps"), KEEPS, ids=lambda item: str(item)[:40])
def test_the_cache_keeps_what_the_tasks_read(
    regimes: list[str], keeps: str, small_backbone: Path, colours: Path
) -> None:
    """And from what it keeps come the outputs of the backbone, within half precision."""
    splits, model = load(colours).with_validation(), MemoryViT(load_backbone(small_backbone))
    names = [f"t{i}" for i in range(len(regimes))]
    for name, regime in zip(names, regimes, strict=True):
        task = model.add_task(name, splits.classes, regime=regime, seed=0)
        torch.nn.init.normal_(task.head.weight)
    plan = plan_of(model, splits, Recipe(workers=0, batch=4))
    assert plan.keeps == keeps
    assert plan.only_pooled == (regimes == ["head"])
    made = open_feed(plan, ProcessGroup())
    assert isinstance(made, CacheFeed)
    live = BackboneFeed(plan, ProcessGroup())
    cached, plain = next(iter(made.validation())), next(iter(live.validation()))
    with torch.no_grad():
        stored = made.outputs(cached.inputs, names)
        for name, direct in live.outputs(plain.inputs, names).items():
            scale = direct.abs().max().item()
            assert (stored[name] - direct).abs().max().item() <= 2e-3 * scale
        if keeps in ("layers", "keys"):
            return
        model.add_task("all", splits.classes, regime="readout", grid=True)
        found, wanted = (
            one.features(share.inputs, ["all"])["all"]
            for one, share in ((made, cached), (live, plain))
        )
        assert (found - wanted).abs().max().item() <= 2e-3 * wanted.abs().max().item()


@pytest.mark.parametrize(
    ("regime", "keeps"), [("masked", "all"), ("head", "final"), ("side", "all")]
)
def test_segmentation_reads_the_final_tokens(
    regime: str, keeps: str, small_backbone: Path, colours: Path
) -> None:
    model, splits = MemoryViT(load_backbone(small_backbone)), load(colours)
    model.add_task("t", 3, kind="segmentation", regime=regime)
    plan = plan_of(model, splits, Recipe())
    assert plan.keeps == keeps
    assert plan.only_pooled == (regime == "head")


# What they lead to


@pytest.mark.parametrize("regime", ["masked", "masked+adapter", "head", "mlp-head", "side"])
def test_learning_from_the_cache_is_learning_from_the_backbone(
    regime: str, small_backbone: Path, colours: Path
) -> None:
    """Within what half precision loses: 5e-4 of the largest change after 20 steps of SGD."""
    splits, recipe = load(colours), QUICK.but(optimizer="sgd", lr=0.1)
    first = MemoryViT(load_backbone(small_backbone))
    start = first.add_task(
        "t", splits.classes, seed=0, regime=regime, **known(regime, cells=3)
    ).tensors()
    cached = learned(small_backbone, splits, recipe, regime=regime)
    plain = learned(small_backbone, splits, recipe.but(cache="off"), regime=regime)
    moved = max((plain[name] - start[name]).abs().max().item() for name in plain)
    assert moved > 0.05
    for name in plain:
        assert (cached[name] - plain[name]).abs().max().item() <= 5e-4 * moved, name


def test_a_second_task_never_runs_the_backbone(
    small_backbone: Path, colours: Path, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = load(colours)
    learned(small_backbone, splits, QUICK)
    assert sum(computed) == 60  # every image once, validation included
    for name in ("embed", "encode", "tokens"):
        monkeypatch.setattr(engram.ViT, name, lambda *_: pytest.fail("the backbone ran"))
    another_split = QUICK.but(lr=0.01, data_seed=3)  # of the same images
    learned(small_backbone, splits, another_split)
    assert sum(computed) == 60


def test_views_are_the_epochs_of_augmentation(
    small_backbone: Path, colours: Path, computed: list[int]
) -> None:
    """The first two epochs see what augmented training would, and the third the first again."""
    splits = load(colours)
    recipe = Recipe(
        steps=6, batch=20, workers=0, augment="pad-crop", optimizer="sgd", lr=0.1, evaluations=1,
        refit=False,
    )  # fmt: skip
    fixed = learned(small_backbone, splits, recipe.but(views=2))
    assert sum(computed) == 2 * 54 + 6
    fresh = learned(small_backbone, splits, recipe)
    for name in fixed:
        assert (fixed[name] - fresh[name]).abs().max().item() <= 1e-4, name
    longer = recipe.but(steps=12)
    again = learned(small_backbone, splits, longer.but(views=2))
    assert sum(computed) == 2 * 54 + 6
    fresh = learned(small_backbone, splits, longer)
    assert max((again[name] - fresh[name]).abs().max().item() for name in fresh) > 1e-4


def test_a_picture_that_is_there_twice_keeps_the_mask_of_its_own_view(
    small_backbone: Path, tmp_path: Path
) -> None:
    values = np.random.default_rng(0).integers(0, 2, (16, 16), dtype=np.uint8)
    for folder, pixels in (("images", np.repeat(values[..., None] * 255, 3, 2)), ("masks", values)):
        (tmp_path / folder).mkdir()
        for i in range(6):
            Image.fromarray(pixels).save(tmp_path / folder / f"{i}.png")
    splits = load(tmp_path, kind="segmentation")
    model = MemoryViT(load_backbone(small_backbone))
    model.add_task("t", **splits.task)
    recipe = Recipe(augment="inception", views=1, workers=0, batch=8)
    made: Any = open_feed(plan_of(model, splits.with_validation(), recipe), ProcessGroup())
    [item] = made.epoch(0, 0)
    whole = BackboneFeed(made.plan, ProcessGroup())
    [plain] = whole.epoch(0, 0)
    assert torch.equal(item.labels, plain.labels)
    rows = made.views[0].cache.compute(plain.inputs)
    assert torch.equal(item.inputs, rows)


def test_what_no_fold_holds_out_is_only_seen_augmented(small_backbone: Path, colours: Path) -> None:
    """It is not stored as it is, and is not listed as unreadable."""
    splits = replace(load(colours), val=None).with_folds(1, 0.3)
    model = start(small_backbone, splits)
    recipe = Recipe(augment="pad-crop", views=1, workers=0)
    made: Any = open_feed(plan_of(model, splits, recipe), ProcessGroup())
    assert made.bad == {}
    assert not made.sees_all
    seen = torch.cat([share.samples for share in made.validation()])
    assert sorted(seen.tolist()) == splits.held_out.tolist()


def test_a_transform_of_ones_own_replaces_the_views(small_backbone: Path, colours: Path) -> None:
    """One that gives the pixels of the view leads to the same weights, another one does not."""
    plainly = {"calibrate": "off", "statistics": "off"}
    splits, recipe = load(colours), QUICK.but(steps=2, cache="auto", **plainly)
    seen: list[tuple[int, int]] = []

    def transform(picture: Image.Image) -> np.ndarray:
        seen.append(picture.size)
        return np.asarray(picture.resize((16, 16)))

    def learned_with(transform: Any) -> dict[str, Tensor]:
        model = start(small_backbone, splits)
        engram.fit(model, "colours", splits, recipe, transform=transform)
        return model.task("colours").tensors()

    plain = learned(small_backbone, splits, recipe.but(cache="off"))
    assert same(plain, learned_with(transform))
    assert len(seen) >= 32
    assert set(seen) == {(16, 16)}
    assert not same(plain, learned_with(lambda picture: 255 - transform(picture)))


def test_an_epoch_has_every_image_once_unless_a_sampler_balances(
    small_backbone: Path, splits: Splits
) -> None:
    splits = splits.with_validation(0.1, 0)
    recipe = Recipe(batch=16, balance="sampler")
    plan = plan_of(start(small_backbone, splits), splits, recipe)
    assert sorted(plan.order(1, even=False)) == list(range(54))
    labels = splits["train"].labels[plan.order(1, even=True)]
    assert np.ptp(np.bincount(labels)) <= 1
    assert recipe.per_epoch(54) == 4
    assert not plan.only_pooled
