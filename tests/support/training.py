"""A small task to train, and what to compare before and after."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.regimes import known
from torch import Tensor, nn

import engram
from engram import MemoryViT, Recipe, load_backbone
from engram.data.datasets import Splits, load
from engram.train.features.cache import Cache, Keeps, contents_of
from engram.train.loop.trainable import train_only


def start(backbone: Path, splits: Splits, name: str = "colours", **settings: Any) -> MemoryViT:
    """A model with one untrained task."""
    model = MemoryViT(load_backbone(backbone))
    cells = known(settings.get("regime", "masked"), cells=3)
    model.add_task(name, splits.classes, seed=0, **cells, **settings)
    return model


def learned(backbone: Path, splits: Splits, recipe: Recipe, **settings: Any) -> dict[str, Tensor]:
    """The tensors after training, as it left them."""
    model = start(backbone, splits, **settings)
    engram.fit(model, "colours", splits, recipe.but(calibrate="off", statistics="off"))
    return model.task("colours").tensors()


def state(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def filled(backbone: Path, photos: Path, keeps: Keeps = "layers") -> Cache:
    dataset = load(photos)["train"]
    model = load_backbone(backbone)
    assert model.preprocessing is not None
    kept = Cache(model, model.preprocessing, keeps=keeps)
    assert kept.fill(dataset, contents_of(dataset), batch=4) == {}
    return kept


def alone(model: MemoryViT, splits: Splits, recipe: Recipe, cells: int, **task: Any) -> MemoryViT:
    single = MemoryViT(model.backbone)
    for name in task.get("extends", ()):
        single.attach(model.engram(name))
    own = known(task.get("regime", "masked"), cells=cells)
    single.add_task("t", splits.classes, seed=recipe.seed, **own, **task)
    engram.fit(single, "t", splits, recipe)
    return single


def as_written(metrics: Mapping[str, Mapping[str, Any]]) -> Any:
    """Metrics by split as a file has them: how many images are unreadable, and not their names."""
    found = json.loads(json.dumps(metrics))
    for values in found.values():
        if "unreadable" in values:
            values["unreadable"] = len(values["unreadable"])
    return found


class Steps:
    """Counts the optimiser steps of runs from their progress, and stops after so many."""

    def __init__(self, stop: int = 0) -> None:
        self.stop, self.done, self._at = stop, list[int](), -1

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        if what != "training":
            return
        one_more, self._at = self._at >= 0 and done == self._at + 1, done
        if one_more:
            self.done.append(done)
            if len(self.done) == self.stop:
                raise KeyboardInterrupt


class Interrupting(engram.Callback):
    """Presses Ctrl-C after a step of a run."""

    def __init__(self, at: int) -> None:
        self.at = at

    def step(self, step: int, loss: float) -> None:
        if step == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def fit_until(
    backbone: Path, data: Path | str, out: Path, *, stop: int = 0, **settings: Any
) -> int:
    """Fit, perhaps until a step is done; gives the steps that it took."""
    splits = load(data)
    model = engram.MemoryViT(engram.load_backbone(backbone, **settings.pop("read", {})))
    model.add_task("parent", 2, seed=settings.pop("parent", 0))
    model.add_task("t", splits.classes, extends=["parent"], seed=0)
    resume = settings.pop("resume", False)
    recipe = engram.Recipe(steps=6, batch=8, workers=0, checkpoint_seconds=0, patience=0).but(
        **settings
    )
    steps = Steps(stop)
    with pytest.raises(KeyboardInterrupt) if stop else contextlib.nullcontext():
        engram.fit(model, "t", splits, recipe, out=out, resume=resume, progress=steps)
    return len(steps.done)


def steps(
    model: MemoryViT,
    name: str,
    pixels: Tensor,
    optimiser: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    count: int = 3,
) -> None:
    """Train one task beside the others for a few steps."""
    model.train()
    updates = optimiser([parameter for _, parameter in train_only(model, name)])
    labels = torch.arange(len(pixels)) % len(model.task(name).spec.classes)
    for _ in range(count):
        updates.zero_grad()
        nn.functional.cross_entropy(model(pixels, tasks=[name])[name], labels).backward()
        updates.step()
    model.eval()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)
