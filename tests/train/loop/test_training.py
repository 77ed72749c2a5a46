"""The training loop: what a recipe does, which weights are kept, which images are left out."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from tests.support.training import learned, same, start, state
from torch import Tensor

import engram
from engram import EngramError, MemoryViT, Recipe
from engram.data.datasets import Splits, load
from engram.train.loop.task_trainer import TaskTrainer
from engram.train.loop.training import Training
from engram.train.runs.run import Run
from engram.util.processes import ProcessGroup, dtype_for

QUICK = Recipe(steps=30, batch=16, evaluations=2, workers=0)


# From beginning to end


def test_a_training_changes_nothing_before_it_is_prepared(
    model: MemoryViT, splits: Splits, own_cache: Path
) -> None:
    for name in ("other", "colours"):
        model.add_task(name, splits.classes, 2, seed=0)
    model.eval()
    before, trains = state(model), [p.requires_grad for p in model.parameters()]
    trainer = TaskTrainer(model, "colours", QUICK)
    held = splits.with_validation()
    training = Training(model, [trainer], held, QUICK, Run(None, ProcessGroup()))
    assert same(before, state(model))
    assert [p.requires_grad for p in model.parameters()] == trains
    assert not model.training
    assert not list(own_cache.iterdir())
    training.prepare()
    assert model.training
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert trained == {id(p) for p in model.task("colours").parameters()}
    assert (training.steps, training.every) == (30, 15)
    assert list(own_cache.iterdir())
    assert same(before, state(model))


# What a recipe does


def test_the_number_of_workers_changes_no_bit(small_backbone: Path, colours: Path) -> None:
    recipe = QUICK.but(augment="inception", steps=6, evaluations=1)
    alone = learned(small_backbone, load(colours), recipe)
    assert same(alone, learned(small_backbone, load(colours), recipe.but(workers=2)))
    assert not same(alone, learned(small_backbone, load(colours), recipe.but(data_seed=1)))


def test_a_batch_is_the_same_in_parts(small_backbone: Path, colours: Path) -> None:
    recipe = QUICK.but(steps=8, optimizer="sgd", lr=0.1)
    whole = learned(small_backbone, load(colours), recipe)
    parts = learned(small_backbone, load(colours), recipe.but(micro_batch=5))
    for name, value in whole.items():
        assert (value - parts[name]).abs().max() <= 1e-5, name


def test_the_average_is_what_is_kept(small_backbone: Path, colours: Path) -> None:
    splits = load(colours)
    plain = learned(small_backbone, splits, QUICK.but(steps=6))
    kept = learned(small_backbone, splits, QUICK.but(steps=6, ema=0.5))
    first = start(small_backbone, splits).task("colours").tensors()
    average = dict(first)
    for steps in range(1, 7):
        now = learned_after(small_backbone, splits, steps)
        new = max(0.5, 9 / (9 + steps))  # what the first steps average is forgotten soon
        average = {name: (1 - new) * average[name] + new * now[name] for name in now}
    for name in plain:
        assert (kept[name] - average[name]).abs().max() <= 1e-6, name


def learned_after(backbone: Path, splits: Splits, steps: int) -> dict[str, Tensor]:
    """The tensors after some of six steps."""
    model = start(backbone, splits)
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


def test_patience_stops_and_keeps_the_best(small_backbone: Path, colours: Path) -> None:
    splits = load(colours)
    model = start(small_backbone, splits)
    recipe = QUICK.but(steps=400, evaluations=100, patience=2, calibrate="off")
    result = engram.fit(model, "colours", splits, recipe)
    best = max(row["val_accuracy"] for row in result.history)
    good = [row for row in result.history if row["val_accuracy"] > best - 1.5 / 6]  # of 6 images
    kept = min(good, key=lambda row: row["val_loss"])
    assert len(result.history) < 100
    assert result.metrics["val"]["held_out"] == kept["val_accuracy"]
    assert result.metrics["val"]["loss"] == pytest.approx(kept["val_loss"], abs=1e-6)
    ending, last = result.ending, result.history[-1]
    assert ending is not None
    assert (ending.early, ending.steps, ending.kept) == (True, last["step"], kept["step"])
    assert last["best_step"] == kept["step"]


def runs_here(precision: str) -> bool:
    try:
        dtype_for(precision, torch.device("cpu"))
    except EngramError:
        return False
    return True


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("cache", ["on", "off"])
def test_half_precision_trains_or_says_why_not(
    precision: str, cache: str, small_backbone: Path, colours: Path
) -> None:
    splits = load(colours)
    model = start(small_backbone, splits)
    recipe = QUICK.but(precision=precision, cache=cache)
    if not runs_here(precision):
        with pytest.raises(EngramError, match=f"precision is {precision}, but this CPU cannot"):
            engram.fit(model, "colours", splits, recipe)
    else:
        result = engram.fit(model, "colours", splits, recipe)
        assert result.metrics["val"]["accuracy"] >= 0.8
        kept = model.task("colours").tensors().values()
        assert all(value.dtype == torch.float32 for value in kept)


def test_a_cpu_that_dies_of_bf16_is_a_sentence_with_a_probe_made_to_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_backbone: Path, colours: Path
) -> None:
    dies = tmp_path / "python"
    dies.write_text("#!/bin/sh\nkill -ILL $$\n")
    dies.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dies))
    splits = load(colours)
    model = start(small_backbone, splits)
    with pytest.raises(EngramError, match="signal 4"):
        engram.fit(model, "colours", splits, QUICK.but(precision="bf16"))


def test_a_loss_that_is_not_finite_stops_the_run(small_backbone: Path, colours: Path) -> None:
    splits = load(colours)
    model = start(small_backbone, splits)
    with pytest.raises(EngramError, match="loss is not finite"):
        engram.fit(model, "colours", splits, QUICK.but(lr=1e30, optimizer="sgd", clip=0, warmup=0))


# Images that cannot be read


@pytest.mark.parametrize("cache", ["on", "off"])
def test_bad_files_are_listed_and_left_out(
    cache: str, small_backbone: Path, photos: Path, tmp_path: Path
) -> None:
    bad = [photos / "train" / "light" / f"{i:02}.png" for i in range(3)]
    bad[0].write_bytes(b"")
    bad[1].write_bytes(b"")  # the same bytes: it is counted all the same
    bad[2].write_bytes(bad[2].read_bytes()[:60])
    splits = load(photos)
    model = start(small_backbone, splits)
    out = tmp_path / "c.safetensors"
    recipe = QUICK.but(cache=cache, max_bad=0.06)
    result = engram.fit(model, "colours", splits, recipe, out=out)
    assert sorted(result.unreadable) == sorted(map(str, bad))
    lines = (tmp_path / "c.run" / "unreadable.txt").read_text().splitlines()
    assert [line.split(": ")[0] for line in lines] == sorted(map(str, bad))
    assert result.metrics["val"]["accuracy"] == 1.0

    model = start(small_backbone, splits)
    with pytest.raises(EngramError, match="of 50 images cannot be read"):
        engram.fit(model, "colours", splits, recipe.but(max_bad=0.05))
    with pytest.raises(EngramError, match=r"\(1\.0%\) allows\. The first: .*\.png: "):
        engram.fit(model, "colours", splits, Recipe(steps=30, workers=0, cache=cache))


def test_a_bad_file_is_listed_though_its_name_is_no_utf8(
    small_backbone: Path, photos: Path, tmp_path: Path
) -> None:
    bad = photos / "train" / "light" / os.fsdecode(b"caf\xe9.png")
    try:
        bad.write_bytes(b"")
    except OSError:
        pytest.skip("this disk takes no such name")
    splits = load(photos)
    recipe = QUICK.but(steps=2, max_bad=0.1)
    engram.fit(
        start(small_backbone, splits), "colours", splits, recipe, out=tmp_path / "c.safetensors"
    )
    assert r"caf\udce9.png: " in (tmp_path / "c.run" / "unreadable.txt").read_text()


@pytest.mark.parametrize("cache", ["on", "off"])
def test_a_broken_validation_split_shows_before_the_first_step(
    cache: str, small_backbone: Path, photos: Path
) -> None:
    for path in (photos / "val").rglob("*.png"):
        path.write_bytes(b"broken")
    splits = load(photos)
    model = start(small_backbone, splits)
    steps: list[int] = []

    def progress(what: str, done: int, total: int, note: str = "") -> None:
        if what == "training":
            steps.append(done)

    with pytest.raises(EngramError, match="10 of 50 images cannot be read"):
        engram.fit(model, "colours", splits, QUICK.but(cache=cache), progress=progress)
    assert steps == []
