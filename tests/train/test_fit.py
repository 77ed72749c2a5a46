"""Every regime learns what it should and changes nothing else; a run is what its recipe says."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import engram
from engram import EngramError, MemoryViT, Recipe, load_trunk
from engram.data.datasets import Splits, load
from engram.tasks.regimes import REGIMES
from engram.train.learner import Learner
from engram.train.recipe import RECIPES
from engram.train.sweep import sweep
from engram.util.processes import dtype_for

CPU = torch.device("cpu")
QUICK = Recipe(steps=30, batch=16, evaluations=2, workers=0)


def start(trunk: Path, splits: Splits, name: str = "colours", **settings: Any) -> MemoryViT:
    model = MemoryViT(load_trunk(trunk))
    model.add_task(name, splits.classes, 3, seed=0, **settings)
    return model


def state(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def learned(trunk: Path, splits: Splits, recipe: Recipe, **settings: Any) -> dict[str, Tensor]:
    """The tensors after training."""
    model = start(trunk, splits, **settings)
    engram.fit(model, "colours", splits, recipe)
    return model.task("colours").tensors()


# What a regime learns, and what it leaves alone


@pytest.mark.parametrize("regime", REGIMES)
def test_every_regime_beats_chance_by_far(regime: str, small_trunk: Path, colours: Path) -> None:
    splits = load(colours)
    model = start(small_trunk, splits, regime=regime)
    before = state(model.trunk)
    first = model.task("colours").tensors()
    first = {name: value.clone() for name, value in first.items()}
    recipe = QUICK.but(steps=60, lr=0.003) if regime == "full" else QUICK.but(steps=60)
    result = engram.fit(model, "colours", splits, recipe, test=True)
    assert result.metrics["test"]["accuracy"] >= 0.85  # chance: 0.33
    assert result.regime == regime
    assert result.parameters == sum(value.numel() for value in first.values())
    assert same(before, state(model.trunk))  # a full task has a trunk of its own
    changed = {
        name
        for name, now in model.task("colours").tensors().items()
        if not torch.equal(now, first[name])
    }
    frozen = {"trunk.class_token"} if regime == "full" else set()
    assert changed >= first.keys() - frozen - {n for n in first if ".bias" in n}


def test_full_and_memory_change_what_the_trunk_says(small_trunk: Path, colours: Path) -> None:
    """Their own pass differs from the plain trunk's; a masked task's leaves it as it was."""
    splits, pixels = load(colours), torch.rand(2, 3, 16, 16)
    plain = load_trunk(small_trunk).tokens(pixels)

    full = start(small_trunk, splits, regime="full")
    engram.fit(full, "colours", splits, QUICK.but(lr=0.003))
    own = full.task("colours").trunk
    assert own is not None
    moved = [
        name
        for name, value in own.state_dict().items()
        if not torch.equal(value, full.trunk.state_dict()[name])
    ]
    assert any(name.startswith("blocks.0.") for name in moved)
    assert any(name.startswith("patch.") for name in moved)
    assert (own.tokens(pixels) - plain).abs().max() > 1e-2

    memory = start(small_trunk, splits, regime="memory")
    engram.fit(memory, "colours", splits, QUICK)
    task = memory.task("colours")
    assert task.cells is not None
    before = memory(pixels, tasks=["colours"])["colours"]
    with torch.no_grad():
        task.cells.zero_()
    assert (memory(pixels, tasks=["colours"])["colours"] - before).abs().max() > 1e-3


@pytest.mark.parametrize("cache", ["on", "off"])
@pytest.mark.parametrize("regime", ["masked", "masked+adapter", "head"])
def test_training_changes_no_other_bit(
    regime: str, cache: str, small_trunk: Path, colours: Path
) -> None:
    splits, pixels = load(colours), torch.rand(3, 3, 16, 16)
    model = start(small_trunk, splits, name="other")
    model.add_task("parent", splits.classes, 2, seed=1)
    extends = ["parent"] if regime != "head" else []
    model.add_task("colours", splits.classes, 2, regime=regime, extends=extends, seed=2)
    with torch.no_grad():
        for name in ("other", "parent"):
            model.task(name).head.weight.normal_()
    model.eval()
    trunk, others = state(model.trunk), [state(model.task(n)) for n in ("other", "parent")]
    said = model(pixels, tasks=["base", "other", "parent"], exact=True)
    engram.fit(model, "colours", splits, QUICK.but(cache=cache))
    assert same(trunk, state(model.trunk))
    assert all(
        same(a, state(model.task(n))) for a, n in zip(others, ("other", "parent"), strict=True)
    )
    assert same(said, model(pixels, tasks=["base", "other", "parent"], exact=True))
    assert all(p.grad is None for p in model.trunk.parameters())


# What a recipe does


def test_the_number_of_workers_changes_no_bit(small_trunk: Path, colours: Path) -> None:
    recipe = QUICK.but(augment="inception", steps=6, evaluations=1)
    alone = learned(small_trunk, load(colours), recipe)
    assert same(alone, learned(small_trunk, load(colours), recipe.but(workers=2)))
    assert not same(alone, learned(small_trunk, load(colours), recipe.but(data_seed=1)))


def test_a_batch_is_the_same_in_parts(small_trunk: Path, colours: Path) -> None:
    recipe = QUICK.but(steps=8, optimizer="sgd", lr=0.1)
    whole = learned(small_trunk, load(colours), recipe)
    parts = learned(small_trunk, load(colours), recipe.but(micro_batch=5))
    for name, value in whole.items():
        assert (value - parts[name]).abs().max() <= 1e-5, name


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_is_clipped_and_as_large_as_the_rate_says(
    optimizer: str, small_trunk: Path, colours: Path
) -> None:
    splits = load(colours)
    model = start(small_trunk, splits)
    recipe = Recipe(optimizer=optimizer, lr=0.5, warmup=0, weight_decay=0, clip=1.0)
    learner = Learner(model, "colours", recipe)
    before = [p.detach().clone() for p in learner.parameters]
    for parameter in learner.parameters:
        parameter.grad = torch.full_like(parameter, 3.0)
    learner.step(0, 10)
    moved = torch.cat([(p - b).flatten() for p, b in zip(learner.parameters, before, strict=True)])
    if optimizer == "sgd":
        assert moved.norm().item() == pytest.approx(0.5, rel=1e-4)  # rate × clipped norm
    else:
        assert moved.abs().max().item() == pytest.approx(0.5, rel=1e-2)


def test_the_average_is_what_is_kept(small_trunk: Path, colours: Path) -> None:
    splits = load(colours)
    plain = learned(small_trunk, splits, QUICK.but(steps=6))
    kept = learned(small_trunk, splits, QUICK.but(steps=6, ema=0.5))
    first = start(small_trunk, splits).task("colours").tensors()
    average = dict(first)
    for steps in range(1, 7):
        now = learned_after(small_trunk, splits, steps)
        average = {name: 0.5 * average[name] + 0.5 * now[name] for name in now}
    for name in plain:
        assert (kept[name] - average[name]).abs().max() <= 1e-6, name


def learned_after(trunk: Path, splits: Splits, steps: int) -> dict[str, Tensor]:
    """The tensors after some of six steps."""
    model = start(trunk, splits)
    taken = 0

    def stop(what: str, done: int, total: int, note: str = "") -> None:
        nonlocal taken
        if what == "training":
            taken = done
            if done == steps:
                raise StopIteration

    with pytest.raises(StopIteration):
        engram.fit(model, "colours", splits, QUICK.but(steps=6), progress=stop)
    assert taken == steps
    return {name: value.clone() for name, value in model.task("colours").tensors().items()}


def test_patience_stops_and_keeps_the_best(small_trunk: Path, colours: Path) -> None:
    splits = load(colours)
    model = start(small_trunk, splits)
    recipe = QUICK.but(steps=400, evaluations=100, patience=2)
    result = engram.fit(model, "colours", splits, recipe)
    accuracies = [row["val_accuracy"] for row in result.history]
    assert len(accuracies) < 100
    assert accuracies[-3:] == [max(accuracies)] * 3 or max(accuracies) > accuracies[-1]
    assert result.metrics["val"]["accuracy"] == max(accuracies)
    best = accuracies.index(max(accuracies))
    assert len(accuracies) == best + 3


def test_label_smoothing_is_that_of_torch(small_trunk: Path, colours: Path) -> None:
    model = start(small_trunk, load(colours))
    learner = Learner(model, "colours", Recipe(label_smoothing=0.2))
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    expected = torch.nn.CrossEntropyLoss(label_smoothing=0.2, reduction="sum")(logits, labels)
    assert torch.equal(learner.loss(logits, labels), expected)


def test_a_loss_that_is_not_finite_stops_the_run(small_trunk: Path, colours: Path) -> None:
    splits = load(colours)
    model = start(small_trunk, splits)
    with pytest.raises(EngramError, match=r"The loss is not finite at step .*; use a lower one"):
        engram.fit(model, "colours", splits, QUICK.but(lr=1e30, optimizer="sgd", clip=0, warmup=0))


def test_a_transform_of_ones_own_replaces_the_views(small_trunk: Path, colours: Path) -> None:
    splits = load(colours)
    model = start(small_trunk, splits)
    seen: list[tuple[int, int]] = []

    def transform(picture: Image.Image) -> np.ndarray:
        seen.append(picture.size)
        return np.asarray(picture.resize((16, 16)))

    engram.fit(model, "colours", splits, QUICK.but(steps=2), transform=transform)
    assert len(seen) >= 32


# What is written


def test_the_engram_records_the_recipe_and_the_metrics(
    small_trunk: Path, colours: Path, tmp_path: Path
) -> None:
    splits, out = load(colours), tmp_path / "deep" / "colours.safetensors"
    model = start(small_trunk, splits)
    recipe = QUICK.but(steps=4, label_smoothing=0.1)
    result = engram.fit(model, "colours", splits, recipe, out=out, test=True)
    header = engram.inspect(out)
    about_data = {"data": splits.name, "train_images": 54}
    assert header.recipe == {**recipe.to_dict(), **about_data}
    assert json.loads(json.dumps(header.metrics)) == json.loads(json.dumps(result.metrics))
    run = out.parent / "colours.run"
    names = {path.name for path in run.iterdir() if not path.name.startswith("events.out")}
    assert names == {"history.csv", "history.svg"}
    assert any(path.name.startswith("events.out") for path in run.iterdir())  # TensorBoard's
    lines = (run / "history.csv").read_text().splitlines()
    assert lines[0] == "step,epoch,loss,lr,val_loss,val_accuracy"
    assert [line.split(",")[0] for line in lines[1:]] == ["2", "4"]
    drawn = ElementTree.parse(run / "history.svg").getroot()
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    assert int(drawn.attrib["viewBox"].split()[2]) > 500


def test_a_plot_that_cannot_be_written_fails_no_run(
    small_trunk: Path, colours: Path, tmp_path: Path
) -> None:
    splits, out = load(colours), tmp_path / "c.safetensors"
    for name in ("history.svg", "sweep.png"):
        (tmp_path / "c.run" / name).mkdir(parents=True)  # no file can be written there
    recipe = QUICK.but(steps=2)
    engram.fit(start(small_trunk, splits), "colours", splits, recipe, out=out)
    assert out.exists()
    model = MemoryViT(load_trunk(small_trunk))
    assert sweep(model, "t", splits, recipe, out=out, overwrite=True).path == out


def test_the_test_split_is_asked_for_before_training(
    small_trunk: Path, tmp_path: Path, colours: Path
) -> None:
    with np.load(colours) as arrays:
        np.savez(
            tmp_path / "c.npz",
            x_train=arrays["x_train"],
            y_train=arrays["y_train"],
            class_names=arrays["class_names"],
        )
    splits = load(tmp_path / "c.npz")
    model = start(small_trunk, splits)

    def never(what: str, done: int, total: int, note: str = "") -> None:
        raise AssertionError(what)

    with pytest.raises(EngramError, match="has no test split"):
        engram.fit(model, "colours", splits, QUICK, test=True, progress=never)


# Bad files


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Solid PNGs in class folders: 20 + 20 to train on, 5 + 5 to validate."""
    for split, count in (("train", 20), ("val", 5)):
        for name, colour in (("light", 200), ("dark", 50)):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (18, 16), (colour + i, colour - i, colour)).save(
                    folder / f"{i:02}.png"
                )
    return tmp_path / "photos"


@pytest.mark.parametrize("cache", ["on", "off"])
def test_bad_files_are_listed_and_left_out(
    cache: str, small_trunk: Path, photos: Path, tmp_path: Path
) -> None:
    bad = [photos / "train" / "light" / f"{i:02}.png" for i in range(3)]
    bad[0].write_bytes(b"")
    bad[1].write_bytes(b"")  # the same bytes: it is counted all the same
    bad[2].write_bytes(bad[2].read_bytes()[:60])
    splits = load(photos)
    model = start(small_trunk, splits)
    out = tmp_path / "c.safetensors"
    recipe = QUICK.but(cache=cache, max_bad=0.06)
    result = engram.fit(model, "colours", splits, recipe, out=out)
    assert sorted(result.unreadable) == sorted(map(str, bad))
    lines = (tmp_path / "c.run" / "unreadable.txt").read_text().splitlines()
    assert [line.split(": ")[0] for line in lines] == sorted(map(str, bad))
    assert result.metrics["val"]["accuracy"] == 1.0

    model = start(small_trunk, splits)
    with pytest.raises(EngramError, match=r"\d of 50 images cannot be read, more than max_bad"):
        engram.fit(model, "colours", splits, recipe.but(max_bad=0.05))
    with pytest.raises(EngramError, match=r"\(1\.0%\) allows\. The first: .*\.png: "):
        engram.fit(model, "colours", splits, Recipe(steps=30, workers=0, cache=cache))


def test_a_bad_file_is_listed_though_its_name_is_no_utf8(
    small_trunk: Path, photos: Path, tmp_path: Path
) -> None:
    bad = photos / "train" / "light" / os.fsdecode(b"caf\xe9.png")
    try:
        bad.write_bytes(b"")
    except OSError:
        pytest.skip("this disk takes no such name")
    splits = load(photos)
    recipe = QUICK.but(steps=2, max_bad=0.1)
    engram.fit(start(small_trunk, splits), "colours", splits, recipe, out=tmp_path / "c")
    assert r"caf\udce9.png: " in (tmp_path / "c.run" / "unreadable.txt").read_text()


def test_a_new_run_keeps_nothing_of_the_one_it_replaces(
    small_trunk: Path, photos: Path, tmp_path: Path
) -> None:
    out, folder = tmp_path / "c.safetensors", tmp_path / "c.run"
    folder.mkdir()
    older = ("unreadable.txt", "sweep.csv", "sweep.png", "report.html", "notes.txt")
    for name in older:
        (folder / name).write_text("of an older run")
    splits = load(photos)
    recipe = QUICK.but(steps=2)
    engram.fit(start(small_trunk, splits), "colours", splits, recipe, out=out)
    assert [name for name in older if (folder / name).exists()] == ["notes.txt"]
    assert (folder / "history.csv").exists()


@pytest.mark.parametrize("cache", ["on", "off"])
def test_a_broken_validation_split_shows_before_the_first_step(
    cache: str, small_trunk: Path, photos: Path
) -> None:
    for path in (photos / "val").rglob("*.png"):
        path.write_bytes(b"broken")
    splits = load(photos)
    model = start(small_trunk, splits)
    steps: list[int] = []

    def progress(what: str, done: int, total: int, note: str = "") -> None:
        if what == "training":
            steps.append(done)

    with pytest.raises(EngramError, match="10 of 50 images cannot be read"):
        engram.fit(model, "colours", splits, QUICK.but(cache=cache), progress=progress)
    assert steps == []


# Precision


def test_auto_is_fp32_on_a_cpu() -> None:
    assert dtype_for("auto", CPU) == torch.float32
    assert dtype_for("fp32", CPU) == torch.float32


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("cache", ["on", "off"])
def test_half_precision_trains_or_says_why_not(
    precision: str, cache: str, small_trunk: Path, colours: Path
) -> None:
    splits = load(colours)
    model = start(small_trunk, splits)
    recipe = QUICK.but(precision=precision, cache=cache)
    said = ""
    try:
        result = engram.fit(model, "colours", splits, recipe)
    except EngramError as error:
        said = str(error)
    if said:
        assert f"precision is {precision}, but this CPU cannot run it" in said
        return
    assert result.metrics["val"]["accuracy"] >= 0.8
    assert all(value.dtype == torch.float32 for value in model.task("colours").tensors().values())


def test_a_cpu_that_dies_of_bf16_is_a_sentence_with_a_probe_made_to_fail(
    monkeypatch: pytest.MonkeyPatch, small_trunk: Path, colours: Path
) -> None:
    dies = "import os, signal; os.kill(os.getpid(), signal.SIGILL)  # {0}"
    monkeypatch.setattr(sys.modules["engram.util.processes"], "_PROBE", dies)
    splits = load(colours)
    model = start(small_trunk, splits)
    with pytest.raises(EngramError, match=r"cannot run it \(a trial ended with signal 4\); use"):
        engram.fit(model, "colours", splits, QUICK.but(precision="bf16"))


def test_fp16_halves_its_scale_when_gradients_overflow(small_trunk: Path, colours: Path) -> None:
    model = start(small_trunk, load(colours))
    learner = Learner(model, "colours", Recipe(precision="fp16", warmup=0, clip=0))
    before = copy.deepcopy(learner.parameters)
    for parameter in learner.parameters:
        parameter.grad = torch.full_like(parameter, torch.inf)
    learner.step(0, 10)
    assert learner.scale == 32768
    assert all(torch.equal(a, b) for a, b in zip(before, learner.parameters, strict=True))
    for parameter in learner.parameters:
        parameter.grad = torch.full_like(parameter, 32768.0)
    learner.step(1, 10)
    assert learner.scale == 32768
    assert not torch.equal(before[0], learner.parameters[0])
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in learner.parameters)


# Mistakes


def test_data_of_other_classes_is_refused(small_trunk: Path, colours: Path) -> None:
    model = start(small_trunk, load(colours))
    with pytest.raises(EngramError, match=r"'colours' has 3 classes .*, but digits has 10"):
        engram.fit(model, "colours", load("digits"), QUICK)
    with pytest.raises(EngramError, match="There is no task 'flowers'"):
        engram.fit(model, "flowers", load(colours), QUICK)


def test_the_paper_recipe_runs(small_trunk: Path, colours: Path) -> None:
    """Two of its 20,000 steps: a batch of 512 from 54 images is what there is."""
    splits = load(colours)
    model = start(small_trunk, splits)
    result = engram.fit(model, "colours", splits, RECIPES["paper"].but(steps=2, workers=0))
    assert [row["step"] for row in result.history] == [1, 2]
