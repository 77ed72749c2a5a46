"""A task gets more classes from their images alone, and keeps the old ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import engram
from engram import EngramError, MemoryViT, Recipe, load_backbone
from engram.data.datasets import Splits, load
from engram.train.add_classes import add_classes

RECIPE = Recipe(steps=20, batch=16, evaluations=1, workers=0)


def some(colours: Path, *names: str, folder: Path) -> Path:
    """The images of some colours, as a dataset of its own."""
    with np.load(colours) as data:
        found = dict(data)
    kept: dict[str, Any] = {"class_names": np.array(names)}
    wanted = [list(found["class_names"]).index(name) for name in names]
    for split in ("train", "test"):
        mine = np.isin(found[f"y_{split}"], wanted)
        kept[f"x_{split}"] = found[f"x_{split}"][mine]
        kept[f"y_{split}"] = np.array([wanted.index(y) for y in found[f"y_{split}"][mine]])
    path = folder / f"{'-'.join(names)}.npz"
    np.savez(path, **kept)
    return path


@pytest.fixture
def old(small_backbone: Path, colours: Path, tmp_path: Path) -> Path:
    """A task that knows red and green."""
    splits, model = load(some(colours, "red", "green", folder=tmp_path)), new_model(small_backbone)
    model.add_task("colours", splits.classes, 2, seed=0)
    engram.fit(model, "colours", splits, RECIPE, out=tmp_path / "old.safetensors")
    return tmp_path / "old.safetensors"


def new_model(backbone: Path) -> MemoryViT:
    return MemoryViT(load_backbone(backbone))


def test_it_knows_old_and_new_classes(
    small_backbone: Path, colours: Path, old: Path, splits: Splits, tmp_path: Path
) -> None:
    blue, out = some(colours, "blue", folder=tmp_path), tmp_path / "new.safetensors"
    model, before = new_model(small_backbone), engram.inspect(old)
    model.attach(old)
    result = add_classes(model, old, blue, RECIPE, out=out, test=True)
    assert model.task("colours").spec.classes == ("red", "green", "blue")
    whole = engram.evaluate(model, replace(splits, name="all"), "colours", workers=0)
    assert whole["accuracy"] >= 0.85  # chance: 0.33
    assert result.metrics["test"]["accuracy"] >= 0.7
    assert result.metrics["replay"]["accuracy"] >= 0.7
    written = engram.inspect(out)
    for name in ("cells", "class_token"):
        assert torch.equal(written.tensors[name], before.tensors[name])
    lineage = {"task": "colours", "content": before.content, "classes": 2}
    assert written.recipe["grown_from"] == [lineage]
    assert written.tensors["statistics.counts"].tolist() == [20, 20, 18]
    assert old.read_bytes() == (tmp_path / "old.safetensors").read_bytes()
    assert engram.inspect(old).content == before.content


def test_it_can_grow_again_and_has_the_means_of_all(
    small_backbone: Path, colours: Path, splits: Splits, tmp_path: Path
) -> None:
    model = new_model(small_backbone)
    first = load(some(colours, "red", folder=tmp_path), classes=["red"])
    model.add_task("a", first.classes, regime="readout", seed=0)
    engram.fit(model, "a", first, RECIPE)
    for name in ("green", "blue"):
        more = some(colours, name, folder=tmp_path)
        add_classes(model, model.engram("a"), more, RECIPE)
    assert model.task("a").spec.classes == ("red", "green", "blue")
    kept = model.task("a").statistics
    assert kept is not None
    assert kept.counts.tolist() == [20, 18, 18]
    assert engram.evaluate(model, splits, "a", workers=0)["accuracy"] >= 0.85
    familiarity = model.eval().with_familiarity(torch.rand(2, 3, 16, 16))[1]["a"]
    assert bool((familiarity < 0).all())  # noise is like none of them


def test_another_name_leaves_the_old_task_attached(
    small_backbone: Path, colours: Path, old: Path, tmp_path: Path
) -> None:
    model = new_model(small_backbone)
    model.attach(old)
    add_classes(model, old, some(colours, "blue", folder=tmp_path), RECIPE, task="more")
    assert list(model.tasks) == ["colours", "more"]


def test_a_task_that_extends_another_grows_in_its_place(
    small_backbone: Path, colours: Path, old: Path, tmp_path: Path
) -> None:
    model, data = new_model(small_backbone), load(some(colours, "red", "green", folder=tmp_path))
    model.attach(old)
    model.add_task("child", data.classes, 2, extends=["colours"], seed=0)
    child = engram.fit(model, "child", data, RECIPE, out=tmp_path / "child.safetensors").path
    blue = some(colours, "blue", folder=tmp_path)
    with pytest.raises(EngramError, match="'colours' is extended by child"):
        add_classes(model, old, blue, RECIPE)
    assert child is not None
    add_classes(model, child, blue, RECIPE)
    assert model.task("child").spec.classes == ("red", "green", "blue")
    assert list(model.tasks) == ["colours", "child"]
    with pytest.raises(EngramError, match="'child' is attached already"):
        add_classes(model, old, blue, RECIPE, task="child")


def test_what_cannot_grow_is_a_sentence(
    small_backbone: Path, colours: Path, old: Path, tmp_path: Path
) -> None:
    model, blue = new_model(small_backbone), some(colours, "blue", folder=tmp_path)
    green = some(colours, "green", "blue", folder=tmp_path)
    with pytest.raises(EngramError, match=r"green.* that 'colours' knows already"):
        add_classes(model, old, green, RECIPE)
    model.add_task("plain", 2, seed=0)
    with pytest.raises(EngramError, match="no statistics"):
        add_classes(model, model.engram("plain"), blue, RECIPE)
    model.add_task("tags", 2, kind="multilabel", seed=0)
    with pytest.raises(EngramError, match="only classification"):
        add_classes(model, model.engram("tags"), blue, RECIPE)
    assert "colours" not in model.tasks


def test_an_mlp_head_keeps_what_it_knew(
    small_backbone: Path, colours: Path, splits: Splits, tmp_path: Path
) -> None:
    model = new_model(small_backbone)
    first = load(some(colours, "red", "green", folder=tmp_path))
    model.add_task("a", first.classes, regime="mlp-head", seed=0)
    engram.fit(model, "a", first, RECIPE)
    add_classes(model, model.engram("a"), some(colours, "blue", folder=tmp_path), RECIPE)
    assert engram.evaluate(model, splits, "a", workers=0)["accuracy"] >= 0.85


def test_balance_gives_every_class_the_same_weight(small_backbone: Path) -> None:
    """Of classes that are hard to tell apart, the rare one is answered more often."""

    def noise(*labels: str) -> list[tuple[torch.Tensor, str]]:
        return [(torch.rand(3, 16, 16), label) for label in labels]

    model = new_model(small_backbone)
    model.add_task("a", ("one", "two"), regime="head", seed=0)
    engram.fit(model, "a", noise(*["one", "two"] * 40), RECIPE)
    rare, said = noise(*["rare"] * 8), {}
    for balance in ("none", "weights"):
        recipe = RECIPE.but(balance=balance, calibrate="off")
        add_classes(model, model.engram("a"), rare, recipe, task=balance)
        pixels = 4 * torch.rand(100, 3, 16, 16) - 2
        said[balance] = int((model.eval()(pixels)[balance].argmax(1) == 2).sum())
    assert said["none"] < said["weights"]
