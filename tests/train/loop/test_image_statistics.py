"""Fit keeps statistics of exactly the features that the head is given."""

from pathlib import Path

import pytest
import torch
from tests.support.training import start

import engram
from engram import Recipe
from engram.data.datasets import Splits, load
from engram.images.preprocessing import normalise
from engram.images.views import evaluation_view
from engram.train.loop.trainable import train_only
from engram.train.loop.validation import with_held_out

SHORT = Recipe(steps=4, batch=16, evaluations=1, workers=0)
HELD_OUT = SHORT.but(val_share=0.25, refit=False)


@pytest.mark.parametrize(
    ("regime", "cache"),
    [("masked", "on"), ("masked", "off"), ("head", "on"), ("readout", "on"), ("side", "on"),
     ("memory", "off")],
)  # fmt: skip
def test_means_are_those_of_the_embedding(
    regime: str, cache: str, small_backbone: Path, splits: Splits
) -> None:
    model = start(small_backbone, splits, regime=regime)
    recipe = (HELD_OUT if regime == "memory" else SHORT).but(cache=cache)
    engram.fit(model, "colours", splits, recipe)
    found = model.task("colours").statistics
    assert found is not None
    train = with_held_out(splits, recipe)["train"]
    views = [torch.from_numpy(evaluation_view(train.read(i), model.preprocessing))
             for i in range(len(train))]  # fmt: skip
    pixels = normalise(torch.stack(views), model.preprocessing)
    with torch.no_grad():
        vectors = model.embed(pixels, ["colours"])["colours"]
    means = torch.stack([vectors[train.labels == c].mean(0) for c in range(3)])
    assert torch.allclose(found.means * found.deviation + found.centre, means, atol=0.02)
    assert found.counts.tolist() == [len(train) // 3] * 3


def test_they_are_left_out_where_too_few_images_say_what_is_usual(
    small_backbone: Path, splits: Splits
) -> None:
    model = start(small_backbone, splits, regime="head")
    engram.fit(model, "colours", splits, HELD_OUT.but(val_share=0.1))  # six images
    assert model.task("colours").statistics is None


def test_scores_tell_noise_from_colours(
    small_backbone: Path, splits: Splits, tmp_path: Path
) -> None:
    out = tmp_path / "colours.safetensors"
    model = start(small_backbone, splits, regime="head")
    engram.fit(model, "colours", splits, SHORT, out=out)
    again = engram.load_model(out, small_backbone)
    pixels = torch.rand(3, 3, 16, 16)
    for exact in (False, True):
        outputs, familiarity = again.with_familiarity(pixels, exact=exact)
        assert torch.equal(outputs["colours"], again(pixels, exact=exact)["colours"])
        assert torch.equal(
            familiarity["colours"], model.with_familiarity(pixels, exact=exact)[1]["colours"]
        )
        assert familiarity.keys() == {"colours"}
    test = load(splits.name)["test"] if Path(splits.name).exists() else splits["test"]
    known = [engram.predict(again, test.read(i))["familiarity"]["colours"] for i in range(8)]
    strange = engram.predict(again, torch.rand(3, 16, 16))["familiarity"]["colours"]
    assert min(known) > strange
    assert sorted(known)[4] == pytest.approx(1, abs=1)


def test_statistics_can_be_left_out(small_backbone: Path, splits: Splits) -> None:
    model = start(small_backbone, splits, regime="head")
    engram.fit(model, "colours", splits, SHORT.but(statistics="off"))
    assert model.task("colours").statistics is None
    assert not model.engram("colours").has_statistics
    assert "familiarity" not in engram.predict(model, torch.rand(3, 16, 16))


def test_a_sweep_and_auto_keep_them(small_backbone: Path, splits: Splits) -> None:
    model = engram.MemoryViT(engram.load_backbone(small_backbone))
    engram.sweep(model, "a", splits, HELD_OUT, lrs=[0.001, 0.01], refit=True)
    engram.auto(model, "b", splits, SHORT)
    assert model.with_familiarity(torch.rand(1, 3, 16, 16))[1].keys() == {"a", "b"}


def test_training_on_drops_what_is_no_longer_true(small_backbone: Path, splits: Splits) -> None:
    model = start(small_backbone, splits, regime="head")
    engram.fit(model, "colours", splits, SHORT)
    train_only(model, "colours")
    assert model.task("colours").statistics is None
