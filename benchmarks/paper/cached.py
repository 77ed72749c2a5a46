"""Masked tasks and heads: from the cache, all rates and rows as streams of one pass.

The first seed tries every rate; the best on validation is trained with the other seeds (another
order of the images, other first weights) and tested once for each seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import sets
import torch
from runs import SEEDS, Setting, chosen, described, engram_path, rates_path, run_path, write

from engram.model import MemoryViT
from engram.tasks.metrics import classification_metrics
from engram.tasks.regimes import REGIMES
from engram.train.feeds import choose
from engram.train.learner import Learner
from engram.train.training import train
from engram.util.processes import Team

EPOCHS, BATCH = 20, 64
MASKED = (3e-4, 1e-3, 3e-3)
HEAD = (1e-3, 3e-3, 1e-2, 3e-2)


def rates(setting: Setting) -> tuple[float, ...]:
    """Variations of a row are tried at two rates beside that row's best, which is 1e-3."""
    if not REGIMES[setting.regime].masked:
        return HEAD
    if setting.head_rate > 1:
        return MASKED[:2]
    usual = setting.plain and setting.place == "both" and setting.width != 8
    return MASKED if usual else MASKED[1:]


@dataclass(frozen=True)
class Together:
    """Settings of one set, size and number of views."""

    name: str
    settings: tuple[Setting, ...]
    seeds: tuple[int, ...] = SEEDS

    def missing(self) -> list[tuple[Setting, int]]:
        return [(s, seed) for seed in self.seeds for s in self.settings
                if not run_path(s, seed).exists()]  # fmt: skip

    def ready(self) -> bool:
        return True

    def work(self, say: Callable[[str], object]) -> None:
        for seed in self.seeds:
            if not (todo := [s for s, which in self.missing() if which == seed]):
                continue
            untried = [s for s in todo if not rates_path(s).exists()]
            grid = [(s, lr) for s in untried for lr in rates(s)]
            grid += [(s, chosen(s)) for s in todo if s not in untried]
            began, cpu = time.perf_counter(), time.process_time()
            learned = Learned(grid, seed)
            seconds, spent = time.perf_counter() - began, time.process_time() - cpu
            for setting in untried:
                write(rates_path(setting), learned.rates(setting))
            finals = [(s, chosen(s)) for s in todo]
            tested = learned.test(finals)
            for pair in finals:
                setting, lr = pair
                about = {
                    **asdict(setting),
                    **described(lr, seed, learned.val[pair], tested[pair], learned.sizes[pair]),
                    "train_images": len(learned.splits["train"]),
                    "seconds": round(seconds / len(grid), 1),
                    "cpu_seconds": round(spent / len(grid), 1),
                }
                if setting.regime == "masked" and setting.cells == 5 and setting.plain:
                    learned.save(pair, engram_path(setting, seed))
                write(run_path(setting, seed), about)
                say(f"{setting.slug} lr {lr:g} val {about['val']:.4f} test {about['test']:.4f}")
            say(f"seed {seed}: {len(grid)} variants, {seconds:.0f} s, {spent:.0f} s of processor")


class Learned:
    """Variants (a setting and a rate) of one seed, trained together."""

    def __init__(self, grid: Sequence[tuple[Setting, float]], seed: int) -> None:
        first = grid[0][0]
        raw = first.views > 0 and first.set in sets.PHOTOGRAPHS  # a crop needs the photograph
        self.splits = sets.splits(first.set, first.pixels, first.images, raw)
        self.model = MemoryViT(sets.trunk(first.pixels, raw))
        self.recipe = first.recipe(first_rate(grid), seed)
        self.seed, self.team = seed, Team()
        self.names = {pair: f"v{i}" for i, pair in enumerate(grid)}
        self.sizes = {p: p[0].add_to(self.model, name, seed) for p, name in self.names.items()}
        learners = {p: self._learner(p, name) for p, name in self.names.items()}
        for head in (True, False):  # they read so little of the cache that they go by themselves
            group = [one for p, one in learners.items() if REGIMES[p[0].regime].masked != head]
            if group:
                train(self.model, group, self.splits, self.recipe, team=self.team, progress=silent)
        self.val = {pair: one.metrics for pair, one in learners.items()}

    def _learner(self, pair: tuple[Setting, float], name: str) -> Learner:
        setting, lr = pair
        learner = Learner(self.model, name, self.recipe, lr)
        if setting.head_rate != 1:
            slow_or_fast_head(learner, setting.head_rate)
        return learner

    def save(self, pair: tuple[Setting, float], path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.model.save(self.names[pair], path)

    def rates(self, setting: Setting) -> dict[str, Any]:
        tried = {lr: metrics for (s, lr), metrics in self.val.items() if s == setting}
        return {
            **asdict(setting),
            "val": {
                f"{lr:g}": [{
                    "seed": self.seed,
                    "accuracy": metrics["accuracy"],
                    "loss": round(metrics["loss"], 4),
                }]
                for lr, metrics in tried.items()
            },
        }  # fmt: skip

    def test(
        self, pairs: Sequence[tuple[Setting, float]]
    ) -> Mapping[tuple[Setting, float], Mapping[str, Any]]:
        """The test images, once, for the variants that validation chose."""
        names = [self.names[pair] for pair in pairs]
        plain = self.recipe.but(views=0, augment="none")
        shown = replace(self.splits, train=self.splits["test"], val=self.splits["test"])
        feed = choose(self.model.eval(), names, shown, plain, self.team)
        answers: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in names}
        with torch.no_grad():
            for item in feed.validation():
                for name, logits in feed.logits(item.inputs, names).items():
                    answers[name].append((logits, item.labels))
        return {pair: classification_metrics(answers[self.names[pair]]) for pair in pairs}


def first_rate(grid: Sequence[tuple[Setting, float]]) -> float:
    return grid[0][1]


def silent(*_: object) -> None:
    pass


def slow_or_fast_head(learner: Learner, factor: float) -> None:
    """Let the head learn at a multiple of the rate of everything else."""
    (group,) = learner.optimizer.param_groups
    head = {id(p) for p in learner.task.head.parameters()}
    both = [p for p in group["params"] if id(p) not in head], list(learner.task.head.parameters())
    learner.optimizer.param_groups[:] = [{**group, "params": params} for params in both]

    def scale(optimizer: torch.optim.Optimizer, *_: object) -> None:
        optimizer.param_groups[1]["lr"] *= factor

    learner.optimizer.register_step_pre_hook(scale)


# The groups


CORE: tuple[dict[str, Any], ...] = (
    {"regime": "head"},
    *({"regime": "masked", "cells": cells} for cells in (0, 1, 5, 10, 20)),
    {"regime": "masked+adapter", "width": 32},
    {"regime": "masked+adapter", "width": 128},
)
NORM: tuple[dict[str, Any], ...] = ({"regime": "masked", "after_norm": True},)
GAP: tuple[dict[str, Any], ...] = (
    *NORM,
    {"regime": "masked", "head_rate": 4.0},
    {"regime": "masked", "head_rate": 0.25},
    {"regime": "masked+adapter", "width": 8},
    {"regime": "masked+adapter", "width": 64, "place": "attention"},
    {"regime": "masked+adapter", "width": 64, "place": "mlp"},
)
VIEWS: tuple[dict[str, Any], ...] = (
    {"regime": "masked", "views": 6},
    {"regime": "masked+adapter", "width": 32, "views": 6},
    {"regime": "masked+adapter", "width": 128, "views": 6},
)
CROPS: tuple[dict[str, Any], ...] = tuple({**row, "augment": "inception"} for row in VIEWS)


GROUPS: Mapping[str, tuple[int, int, Sequence[dict[str, Any]]]] = {
    "rows": (112, 1_000, CORE),
    "five": (112, 1_000, ({"regime": "masked"},)),
    "norm": (112, 1_000, NORM),
    "gap": (112, 1_000, GAP),
    "views": (112, 1_000, VIEWS),
    "crops": (112, 1_000, CROPS),
    "large": (224, 4_000, CORE),
    "large views": (224, 4_000, VIEWS[:2]),
}


def cached_setting(name: str, what: str = "rows", **row: Any) -> Setting:
    """A setting as the group `what` has it."""
    pixels, images, _ = GROUPS[what]
    epochs = EPOCHS if pixels == 112 else EPOCHS // 2
    common = {"pixels": pixels, "images": images, "epochs": epochs, "batch": BATCH}
    return Setting(name, **{**common, **row})


def group(name: str, what: str, *seeds: int) -> Together:
    settings = tuple(cached_setting(name, what, **row) for row in GROUPS[what][2])
    return Together(f"cached {name} {what} seeds {seeds}", settings, seeds)
