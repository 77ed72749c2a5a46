"""Tasks from a handful of images: taught, taught more, made to forget, merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import engram
from engram import EngramError, MemoryViT, load_backbone
from engram.data.datasets import Splits
from engram.tasks.class_statistics import ClassStatistics

Pictures = dict[str, list[Any]]


@pytest.fixture
def pictures(splits: Splits) -> Pictures:
    """Five images of each of three colours."""
    train = splits["train"]
    found: Pictures = {name: [] for name in splits.classes}
    for i in range(15):
        found[splits.classes[train.labels[i]]].append(np.asarray(train.read(i)))
    return found


def some(pictures: Pictures, *names: str, first: int = 0, last: int = 5) -> Pictures:
    return {name: pictures[name][first:last] for name in names or pictures}


def assert_same(one: MemoryViT, two: MemoryViT, atol: float = 1e-4) -> None:
    """The two tasks `t` answer the same, up to the rounding of features in single precision."""
    mine, theirs = one.task("t"), two.task("t")
    assert set(mine.spec.classes) == set(theirs.spec.classes)
    order = [mine.spec.classes.index(name) for name in theirs.spec.classes]
    for key in ("weight", "bias"):
        ours, others = getattr(mine.head, key)[order], getattr(theirs.head, key)
        torch.testing.assert_close(ours, others, rtol=1e-4, atol=atol)


@pytest.fixture
def whole(model: MemoryViT, pictures: Pictures) -> MemoryViT:
    """A model that was taught all of it at once."""
    engram.teach(model, "t", pictures)
    return model


@pytest.fixture
def other(small_backbone: Path) -> MemoryViT:
    return MemoryViT(load_backbone(small_backbone))


def test_a_task_answers_after_five_images_a_class(whole: MemoryViT, splits: Splits) -> None:
    assert whole.task("t").method.shares_pass
    assert engram.evaluate(whole, splits, "t", workers=0)["accuracy"] >= 0.9  # chance: 0.33


def test_images_may_be_files_pillow_images_and_tensors(model: MemoryViT, tmp_path: Path) -> None:
    red = Image.new("RGB", (16, 16), (200, 20, 20))
    red.save(tmp_path / "red.png")
    blue = torch.zeros(3, 16, 16)
    blue[2] = 0.8
    taught = engram.teach(model, "t", {"red": [red, tmp_path / "red.png"], "blue": [blue]})
    assert taught.regime == "head"
    assert engram.predict(model, red, tasks=["t"])["tasks"]["t"][0]["class"] == "red"


def test_accuracy_is_that_of_images_left_out(model: MemoryViT, pictures: Pictures) -> None:
    val = engram.teach(model, "t", pictures).metrics["val"]
    assert val["images"] == 15
    assert val["held_out"] >= 0.8
    assert val["interval"][0] < val["accuracy"] < val["interval"][1]
    assert model.engram("t").metrics["val"] == val


def test_no_accuracy_is_claimed_from_one_image_a_class(
    model: MemoryViT, pictures: Pictures
) -> None:
    assert engram.teach(model, "t", some(pictures, last=1)).metrics == {}


def test_learning_later_is_learning_at_once(
    whole: MemoryViT, other: MemoryViT, pictures: Pictures
) -> None:
    engram.teach(other, "t", some(pictures, "red", "green", last=2))
    engram.teach(other, "t", some(pictures, "blue", "green", first=2))
    engram.teach(other, "t", {**some(pictures, "red", first=2), **some(pictures, "blue", last=2)})
    assert other.task("t").spec.classes == ("red", "green", "blue")
    assert_same(other, whole)


def test_forgetting_is_never_having_seen(
    whole: MemoryViT, other: MemoryViT, pictures: Pictures
) -> None:
    engram.forget(whole, "t", some(pictures, "red", "blue", first=3))
    engram.teach(other, "t", {**some(pictures, last=3), **some(pictures, "green")})
    assert_same(whole, other)


def test_a_class_whose_images_are_forgotten_is_gone(
    whole: MemoryViT, other: MemoryViT, pictures: Pictures
) -> None:
    engram.forget(whole, "t", some(pictures, "green"))
    engram.teach(other, "t", some(pictures, "red", "blue"))
    assert_same(whole, other)
    with pytest.raises(EngramError, match="needs two"):
        engram.forget(whole, "t", some(pictures, "red"))


def test_what_was_not_learned_cannot_be_forgotten(whole: MemoryViT, pictures: Pictures) -> None:
    before = whole.engram("t").content
    with pytest.raises(EngramError, match="has not learned"):
        engram.forget(whole, "t", {"red": [np.zeros((16, 16, 3), np.uint8)]})
    with pytest.raises(EngramError, match="no class"):
        engram.forget(whole, "t", {"violet": pictures["red"]})
    assert whole.engram("t").content == before


def test_it_goes_on_from_its_file(
    whole: MemoryViT, other: MemoryViT, pictures: Pictures, tmp_path: Path
) -> None:
    engram.teach(other, "t", some(pictures, last=3), out=tmp_path / "t.safetensors")
    other.detach("t")
    other.attach(tmp_path / "t.safetensors")
    engram.teach(other, "t", some(pictures, first=3))
    assert_same(other, whole)


def test_merged_engrams_are_what_all_images_at_once_give(
    whole: MemoryViT, other: MemoryViT, pictures: Pictures, tmp_path: Path
) -> None:
    files = [tmp_path / "mine.safetensors", tmp_path / "theirs.safetensors"]
    engram.teach(other, "t", some(pictures, "red", "green"), out=files[0])
    other.detach("t")
    engram.teach(other, "t", some(pictures, "blue", "green", last=1), out=files[1])
    merged = engram.merge(files, tmp_path / "both.safetensors", task="both")
    engram.forget(whole, "t", some(pictures, "blue", first=1))
    engram.teach(whole, "t", some(pictures, "green", last=1))  # both had it: it counts twice
    other.detach("t")
    other.attach(merged.renamed("t"))
    assert_same(other, whole)
    assert [source["weight"] for source in merged.recipe["merged"]] == [0.833333, 0.166667]


def test_engrams_without_sums_are_not_added_up(
    other: MemoryViT, pictures: Pictures, tmp_path: Path
) -> None:
    files = [tmp_path / f"{on}.safetensors" for on in ("on", "off")]
    for path in files:
        engram.teach(other, "t", some(pictures, last=2), statistics=path.stem, out=path)
        other.detach("t")
    with pytest.raises(EngramError, match="no sums"):
        engram.merge(files, tmp_path / "both.safetensors")
    average = engram.merge(files, tmp_path / "both.safetensors", weights=[0.5, 0.5])
    assert not average.has_sums


@pytest.mark.parametrize("what", ["off", "added"])
def test_a_task_without_sums_can_neither_learn_nor_forget(
    what: str, model: MemoryViT, pictures: Pictures
) -> None:
    if what == "off":
        engram.teach(model, "t", pictures, statistics="off")
    else:
        model.add_task("t", ["red", "green"])
    for change in (engram.teach, engram.forget):
        with pytest.raises(EngramError, match="no sums"):
            change(model, "t", pictures)


def test_other_images_are_less_familiar_than_those_of_a_class(
    whole: MemoryViT, splits: Splits, tmp_path: Path
) -> None:
    strange = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0))
    images = [splits["test"].read(i) for i in range(10)]
    usual = [engram.predict(whole, image, tasks=["t"])["familiarity"]["t"] for image in images]
    assert np.mean(np.array(usual) > 0) >= 0.7
    assert engram.predict(whole, strange, tasks=["t"])["familiarity"]["t"] < min(0, *usual)
    whole.save("t", tmp_path / "t.safetensors")
    whole.detach("t")
    whole.attach(tmp_path / "t.safetensors")
    again = [engram.predict(whole, image, tasks=["t"])["familiarity"]["t"] for image in images]
    assert again == pytest.approx(usual, abs=1e-3)


def test_familiarity_is_absent_where_nobody_knows_what_is_usual(
    model: MemoryViT, pictures: Pictures
) -> None:
    image = pictures["red"][0]
    engram.teach(model, "t", some(pictures, last=3))  # fewer than four a class
    engram.teach(model, "off", pictures, statistics="off")
    engram.teach(model, "two", some(pictures, "red", "blue", last=4))  # fewer than ten
    assert "familiarity" not in engram.predict(model, image)
    engram.teach(model, "two", some(pictures, "green"))
    assert model.task("two").statistics is None  # five images were left out
    engram.teach(model, "t", some(pictures, first=1))
    assert list(engram.predict(model, image)["familiarity"]) == ["t"]


def test_familiarity_stays_when_more_is_learned_forgotten_and_merged(
    whole: MemoryViT, other: MemoryViT, pictures: Pictures, tmp_path: Path
) -> None:
    def statistics(one: MemoryViT) -> ClassStatistics:
        found = one.task("t").statistics
        assert found is not None
        return found

    usual = statistics(whole).quantiles.clone()
    engram.teach(other, "t", pictures)
    engram.teach(whole, "t", some(pictures, "red", last=1))
    assert statistics(whole).counts.tolist() == [6, 5, 5]
    engram.forget(whole, "t", some(pictures, "red", last=1))
    for name, tensor in statistics(other).tensors().items():
        torch.testing.assert_close(statistics(whole).tensors()[name], tensor, rtol=0.01, atol=0.01)
    assert torch.equal(statistics(whole).quantiles, usual)
    for i, one in enumerate((whole, other)):
        engram.teach(one, "t", {"violet": [np.full((16, 16, 3), 90 + i, np.uint8)]})
        one.save("t", tmp_path / f"{i}.safetensors")
    both = [tmp_path / f"{i}.safetensors" for i in range(2)]
    engram.merge(both, tmp_path / "both.safetensors", task="both")
    merged = whole.attach(tmp_path / "both.safetensors").statistics
    assert merged is not None
    assert merged.counts.tolist() == [10, 10, 10, 2]
    torch.testing.assert_close(merged.quantiles, usual)
    engram.forget(whole, "t", some(pictures, last=2))
    assert whole.task("t").statistics is None


def test_training_drops_the_sums(whole: MemoryViT, splits: Splits) -> None:
    engram.train_only(whole, "t")
    assert whole.task("t").sums is None
    assert whole.task("t").statistics is None


@pytest.mark.parametrize(
    ("images", "sentence"),
    [
        ({"red": [np.zeros((16, 16, 3), np.uint8)]}, "at least 2"),
        ({"red": [], "blue": [np.zeros((16, 16, 3), np.uint8)]}, "has no image"),
        ({"red": np.zeros((16, 16, 3), np.uint8), "blue": []}, "give a list"),
        ({"red": [b"no image"], "blue": [np.zeros((16, 16, 3), np.uint8)]}, "can be read"),
    ],
)
def test_what_cannot_be_taught_is_a_sentence(
    images: Pictures, sentence: str, model: MemoryViT
) -> None:
    with pytest.raises(EngramError, match=sentence):
        engram.teach(model, "t", images)
    assert "t" not in model.tasks


def test_features_are_what_the_head_is_given(whole: MemoryViT) -> None:
    pixels = torch.rand(2, 3, 16, 16)
    found = whole.eval().embed(pixels)
    assert torch.equal(found["base"], found["t"])


def test_a_damaged_sum_is_refused(whole: MemoryViT, tmp_path: Path) -> None:
    sums = whole.task("t").sums
    assert sums is not None
    sums.images[0] = -1
    whole.save("t", tmp_path / "t.safetensors")
    with pytest.raises(EngramError, match="sums"):
        engram.inspect(tmp_path / "t.safetensors")
