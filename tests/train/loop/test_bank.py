"""A memory bank is a coreset of patches of good images, and its threshold does not flatter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.neighbors import NearestNeighbors
from tests.support.engrams import small_backbone

import engram
from engram import EngramError, MemoryViT, Recipe
from engram.data.datasets import Splits, load
from engram.inference.evaluate import answers
from engram.train.features.caches import info
from engram.train.loop.bank import coreset
from engram.util.processes import ProcessGroup

RECIPE = Recipe(workers=0)


def write_textures(root: Path, train: int = 12, test: int = 6) -> Path:
    """Gray stripes; in test/spot each has a bright red square, with its mask."""
    rng = np.random.default_rng(0)
    for folder, count in (("train/good", train), ("test/good", test), ("test/spot", test)):
        (root / folder).mkdir(parents=True)
        for i in range(count):
            pixels = np.full((16, 16, 3), 60, dtype=np.uint8)
            pixels[:, int(rng.integers(0, 4)) :: 4] = 120
            pixels += rng.integers(0, 8, pixels.shape, dtype=np.uint8)
            if folder.endswith("spot"):
                x, y = rng.integers(0, 3, 2) * 4
                pixels[y : y + 4, x : x + 4] = (250, 20, 20)
                mask = np.zeros((16, 16), dtype=np.uint8)
                mask[y : y + 4, x : x + 4] = 255
                (root / "ground_truth/spot").mkdir(parents=True, exist_ok=True)
                Image.fromarray(mask).save(root / f"ground_truth/spot/{i}_mask.png")
            Image.fromarray(pixels).save(root / folder / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_textures(tmp_path_factory.mktemp("textures"))


def fitted(splits: Splits, bank: int = 40, recipe: Recipe = RECIPE, **more: object) -> MemoryViT:
    torch.manual_seed(0)
    model = MemoryViT(small_backbone(patch=4))
    model.add_task("good", **splits.task, regime="patchcore", bank=bank)
    engram.fit(model, "good", splits, recipe, **more)  # type: ignore[arg-type]
    return model.eval()


# The coreset


def test_a_coreset_leaves_no_feature_farther_away_than_a_random_choice_does() -> None:
    torch.manual_seed(0)
    x = torch.randn(600, 8) * torch.tensor([4.0, *[0.1] * 7])
    chosen = coreset(x, 30)
    assert len(chosen) == 30
    assert {tuple(row) for row in chosen.tolist()} <= {tuple(row) for row in x.tolist()}
    farthest = torch.cdist(x, chosen).amin(1).max()
    assert farthest < 0.5 * torch.cdist(x, x[torch.randperm(600)[:30]]).amin(1).max()
    assert torch.equal(coreset(x, 30), chosen)
    assert not torch.equal(coreset(x, 30, seed=1), chosen)


def test_a_coreset_of_few_features_is_all_of_them() -> None:
    x = torch.rand(5, 3)
    assert torch.equal(coreset(x, 5), x)
    assert torch.equal(coreset(x, 9), x)


# The task


def test_distances_are_those_of_the_nearest_neighbour(data: Path) -> None:
    model = fitted(load(data, kind="anomaly"))
    pixels = torch.rand(3, 3, 16, 16)
    layer = model.task("good").method.settings()["layer"]
    seen: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        model.backbone.encode(model.backbone.embed(pixels), (16, 16), seen.__setitem__)
        maps = model(pixels)["good"]
    patches = seen[layer][:, model.backbone.config.prefix :].flatten(0, 1).numpy()
    bank = model.task("good").head.weight.detach().numpy()
    oracle = NearestNeighbors(n_neighbors=1, metric="cosine").fit(bank).kneighbors(patches)[0]
    assert np.allclose(maps.flatten().numpy(), oracle[:, 0], atol=1e-3)  # rows are in half


def test_spots_are_found_and_where_they_are(data: Path, tmp_path: Path) -> None:
    splits = load(data, kind="anomaly")
    model = fitted(splits, out=tmp_path / "good.safetensors", test=True)
    found = engram.inspect(tmp_path / "good.safetensors").metrics
    assert found["test"]["auroc"] > 0.95
    assert found["test"]["pixel_auroc"] > 0.9
    assert found["test"]["recall"] > 0.8
    assert found["val"]["folds"] == 5
    said = answers(model, splits["test"], "good", workers=0)
    scores, labels = said.logits[:, 0].numpy(), said.labels.numpy()
    assert found["test"]["auroc"] == pytest.approx(roc_auc_score(labels, scores))
    assert found["test"]["average_precision"] == pytest.approx(
        average_precision_score(labels, scores)
    )


def test_areas_are_those_of_scikit_learn_for_pixels_too(data: Path) -> None:
    splits = load(data, kind="anomaly")
    model, test = fitted(splits), splits["test"]
    maps, masks = [], []
    for i in range(len(test)):
        image = np.array(Image.open(str(test.read(i))))
        pixels = torch.from_numpy(image).permute(2, 0, 1)[None] / 255
        with torch.no_grad():
            field = model((pixels - 0.5) / 0.5)["good"][None]
        size = (16, 16)
        maps.append(torch.nn.functional.interpolate(field, size, mode="bilinear").numpy())
        masks.append(np.asarray(test.mask(i)) - 1 == 1)
    expected = roc_auc_score(np.stack(masks).ravel(), np.stack(maps).ravel())
    metrics = engram.evaluate(model, splits, "good", workers=0)
    assert metrics["pixel_auroc"] == pytest.approx(expected, abs=2e-3)


def test_the_threshold_comes_from_images_that_the_bank_has_not_seen(data: Path) -> None:
    splits = load(data, kind="anomaly")
    model = fitted(splits, bank=1_000)  # all patches: of its own images every distance is 0
    assert model.task("good").head.out_features == 12 * 16
    own = answers(model, splits["train"], "good", workers=0)
    threshold = float(model.task("good").head.fitted["thresholds"])
    assert float(own.logits.max()) < 1e-3 < threshold


def test_what_is_saved_answers_the_same_beside_others(data: Path, tmp_path: Path) -> None:
    model = fitted(load(data, kind="anomaly"), out=tmp_path / "good.safetensors")
    pixels = torch.rand(2, 3, 16, 16)
    other = MemoryViT(model.backbone).eval()
    other.add_task("flowers", 3, cells=2)
    other.add_task("birds", 3, regime="side")
    other.attach(tmp_path / "good.safetensors")
    with torch.no_grad():
        alone, together = model(pixels, exact=True), other(pixels, exact=True)
    assert torch.equal(alone["good"], together["good"])
    assert torch.equal(together["base"], model.backbone(pixels))
    assert str(engram.inspect(tmp_path / "good.safetensors").tensors["head.weight"].dtype) == (
        "torch.float16"
    )


def test_a_fit_is_the_same_again(data: Path) -> None:
    splits = load(data, kind="anomaly")
    first, again = fitted(splits), fitted(splits)
    assert first.engram("good").content == again.engram("good").content


def test_a_cache_that_has_the_images_is_read_and_none_is_filled(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = load(data, kind="anomaly")
    first = fitted(splits)
    assert not info()
    model = MemoryViT(first.backbone)
    train = splits["train"]
    labelled = replace(train, classes=("a", "b"), labels=np.arange(12) % 2, kind="classification")
    other = Splits("x", ("a", "b"), train=labelled)
    engram.sweep(model, "s", other, Recipe(steps=1, workers=0), lrs=[0.1], regime="side")
    monkeypatch.setattr(type(first.backbone), "embed", lambda *given: pytest.fail("it ran"))
    again = MemoryViT(first.backbone)
    again.add_task("good", **splits.task, regime="patchcore", bank=40)
    engram.fit(again, "good", splits, RECIPE)
    ours, theirs = (one.task("good").head.weight for one in (first, again))
    assert torch.allclose(ours, theirs, atol=2e-3)


def test_a_split_of_its_own_for_validation_decides_the_threshold(data: Path) -> None:
    splits = load(data, kind="anomaly")
    assert splits.test is not None
    val = splits.test.subset(np.arange(len(splits.test)), "val")
    torch.manual_seed(0)
    model = MemoryViT(small_backbone(patch=4))
    own = Splits(splits.name, splits.classes, train=splits.train, val=val, kind="anomaly")
    model.add_task("good", **own.task, regime="patchcore", bank=40)
    metrics = engram.fit(model, "good", own, RECIPE).metrics["val"]
    assert metrics["auroc"] > 0.95
    good = answers(model, val, "good", workers=0)
    assert metrics["threshold"] == pytest.approx(
        float(good.logits[good.labels == 0, 0].max()), abs=1e-3
    )


# What cannot be


@pytest.mark.parametrize(
    ("kind", "regime"), [("anomaly", "masked"), ("classification", "patchcore")]
)
def test_the_regime_and_the_kind_belong_together(kind: str, regime: str) -> None:
    with pytest.raises(EngramError, match="good images alone"):
        MemoryViT(small_backbone(patch=4)).add_task("t", 1, kind=kind, regime=regime)


def test_a_sweep_of_a_bank_is_refused(data: Path) -> None:
    model = MemoryViT(small_backbone(patch=4))
    with pytest.raises(EngramError, match="memory bank"):
        engram.sweep(
            model, "t", load(data, kind="anomaly"), Recipe(workers=0, steps=2),
            lrs=[0.1], regime="patchcore", processes=ProcessGroup("cpu"),
        )  # fmt: skip


def test_one_image_is_too_few(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "good" / "a.png")
    splits = load(tmp_path / "good", kind="anomaly")
    model = MemoryViT(small_backbone(patch=4))
    model.add_task("good", **splits.task, regime="patchcore")
    with pytest.raises(EngramError, match="too small"):
        engram.fit(model, "good", splits, RECIPE)


@pytest.mark.parametrize(
    "recipe", [{"augment": "inception"}, {"label_smoothing": 0.1}, {"mixup": 0.2}]
)
def test_settings_that_would_do_nothing_are_refused(data: Path, recipe: dict[str, object]) -> None:
    with pytest.raises(EngramError):
        fitted(load(data, kind="anomaly"), recipe=Recipe(workers=0, **recipe))  # type: ignore[arg-type]
