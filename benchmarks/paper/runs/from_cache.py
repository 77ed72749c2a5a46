"""Training of masked tasks and heads from the cache, all settings and learning rates in one pass.

The first seed tries every rate. The best on validation is trained with the other seeds (another
order of the images, other initial weights) and tested once for each seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.paper.records import RATES, RUNS, Record
from benchmarks.paper.runs import datasets
from benchmarks.paper.runs.settings import SEEDS, Setting, chosen_rate, engram_path, scores
from engram.data.datasets import Splits
from engram.methods import METHODS
from engram.model import MemoryViT
from engram.tasks.metrics import classification_metrics
from engram.train.features.feeds import FeedPlan, open_feed
from engram.train.loop.task_trainer import TaskTrainer
from engram.train.loop.training import Training
from engram.train.recipe import Recipe
from engram.train.runs.run import Run
from engram.util.processes import ProcessGroup

EPOCHS, BATCH = 20, 64
MASKED_RATES = (3e-4, 1e-3, 3e-3)
HEAD_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
Variant = tuple[Setting, float]  # a setting and a learning rate


def learning_rates(setting: Setting) -> tuple[float, ...]:
    """The rates to try; variations of a row are tried at two rates near that row's best, 1e-3."""
    if not METHODS[setting.regime].streams:
        return HEAD_RATES
    if setting.head_rate > 1:
        return MASKED_RATES[:2]
    usual = setting.plain and setting.place == "both" and setting.width != 8
    return MASKED_RATES if usual else MASKED_RATES[1:]


@dataclass(frozen=True)
class CachedRuns:
    """Settings of one dataset, image size and number of views, which are trained together."""

    name: str
    settings: tuple[Setting, ...]
    seeds: tuple[int, ...] = SEEDS

    def missing(self) -> bool:
        return any(self._settings_without_record(seed) for seed in self.seeds)

    def _settings_without_record(self, seed: int) -> list[Setting]:
        return [setting for setting in self.settings if setting.run_name(seed) not in RUNS]

    def ready(self) -> bool:
        return True

    def work(self, say: Callable[[str], object]) -> None:
        for seed in self.seeds:
            if settings := self._settings_without_record(seed):
                self._train_and_test(settings, seed, say)

    def _train_and_test(
        self, settings: Sequence[Setting], seed: int, say: Callable[[str], object]
    ) -> None:
        untried = [s for s in settings if s.slug not in RATES]
        variants = [(s, lr) for s in untried for lr in learning_rates(s)]
        variants += [(s, chosen_rate(s)) for s in settings if s not in untried]
        began, cpu = time.perf_counter(), time.process_time()
        trained = TrainedVariants(variants, seed)
        trained.train()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        for setting in untried:
            RATES.append(setting.slug, trained.rates_record(setting))
        best = [(s, chosen_rate(s)) for s in settings]
        tested = trained.test(best)
        for variant in best:
            setting, lr = variant
            if setting.regime == "masked" and setting.cells == 5 and setting.plain:
                trained.save(variant, engram_path(setting, seed))
            record = {
                **asdict(setting),
                **trained.scores(variant, tested[variant]),
                "seconds": round(seconds / len(variants), 1),
                "cpu_seconds": round(cpu_seconds / len(variants), 1),
            }
            RUNS.append(setting.run_name(seed), record)
            say(f"{setting.slug} lr {lr:g} val {record['val']:.4f} test {record['test']:.4f}")
        say(
            f"seed {seed}: {len(variants)} variants, {seconds:.0f} s, {cpu_seconds:.0f} s of "
            "processor time"
        )


class TrainedVariants:
    """Variants of one seed on one model."""

    def __init__(self, variants: Sequence[Variant], seed: int) -> None:
        first, first_rate = variants[0]
        # a random crop needs the photograph
        raw = first.views > 0 and first.set in datasets.PHOTOGRAPHS
        self.splits = datasets.splits(first.set, first.pixels, first.images, raw)
        self.model = MemoryViT(first.load_backbone(raw))
        self.recipe = first.recipe(first_rate, seed)
        self.seed, self.processes = seed, ProcessGroup()
        self.names = {variant: f"v{i}" for i, variant in enumerate(variants)}
        self.parameters: dict[Variant, int] = {}
        self.val: dict[Variant, Mapping[str, Any]] = {}

    def train(self) -> None:
        self.parameters = {
            variant: variant[0].add_to(self.model, name, self.seed)
            for variant, name in self.names.items()
        }
        trainers = {variant: self._learner(variant) for variant in self.names}
        for masked in (False, True):  # heads read so little of the cache that they go separately
            group = [one for v, one in trainers.items() if METHODS[v[0].regime].streams == masked]
            if group:
                run = Run(None, self.processes)
                Training(self.model, group, self.splits, self.recipe, run).whole()
        self.val = {variant: trainer.metrics for variant, trainer in trainers.items()}

    def _learner(self, variant: Variant) -> TaskTrainer:
        setting, lr = variant
        trainer = TaskTrainer(self.model, self.names[variant], self.recipe.but(lr=lr))
        if setting.head_rate != 1:
            _scale_head_rate(trainer, setting.head_rate)
        return trainer

    def save(self, variant: Variant, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.model.save(self.names[variant], path)

    def rates_record(self, setting: Setting) -> Record:
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

    def scores(self, variant: Variant, test: Mapping[str, Any]) -> Record:
        _, lr = variant
        return {
            **scores(lr, self.seed, self.val[variant], test, self.parameters[variant]),
            "train_images": len(self.splits["train"]),
        }

    def test(self, variants: Sequence[Variant]) -> dict[Variant, Mapping[str, Any]]:
        """Metrics on the test images, for the variants that validation chose."""
        names = [self.names[variant] for variant in variants]
        recipe = self.recipe.but(views=0, augment="none")
        found = score_test_images(self.model, names, self.splits, recipe, self.processes)
        return {variant: found[self.names[variant]] for variant in variants}


def score_test_images(
    model: MemoryViT, names: Sequence[str], splits: Splits, recipe: Recipe, processes: ProcessGroup
) -> dict[str, Mapping[str, Any]]:
    """Metrics of tasks on the test images, read through the cache."""
    shown = replace(splits, train=splits["test"], val=splits["test"])
    specs = [model.task(name).spec for name in names]
    feed = open_feed(FeedPlan(model.eval(), specs, shown, recipe), processes)
    answers: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    labels = []
    with torch.no_grad():
        for share in feed.validation():
            labels.append(share.labels)
            for name, logits in feed.outputs(share.inputs, names).items():
                answers[name].append(logits)
    every = torch.cat(labels)
    return {name: classification_metrics((torch.cat(answers[name]), every)) for name in names}


def _scale_head_rate(trainer: TaskTrainer, factor: float) -> None:
    """Let the head learn at a multiple of the learning rate of everything else."""
    (group,) = trainer.optimizer.param_groups
    head = {id(p) for p in trainer.task.head.parameters()}
    both = [p for p in group["params"] if id(p) not in head], list(trainer.task.head.parameters())
    trainer.optimizer.param_groups[:] = [{**group, "params": params} for params in both]

    def scale(optimizer: torch.optim.Optimizer, *_: object) -> None:
        optimizer.param_groups[1]["lr"] *= factor

    trainer.optimizer.register_step_pre_hook(scale)


# Groups of settings that are trained together


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

#: On a ViT-B/16 of CLIP, restored from int8.
BASE: tuple[dict[str, Any], ...] = tuple({**row, "backbone": datasets.CLIP} for row in CORE[:6])
BASE_SETS = ("textures", "pets", "flowers")

#: Pixels, training images and rows of each group.
GROUPS: Mapping[str, tuple[int, int, Sequence[dict[str, Any]]]] = {
    "rows": (112, 1_000, CORE),
    "five": (112, 1_000, ({"regime": "masked"},)),
    "norm": (112, 1_000, NORM),
    "gap": (112, 1_000, GAP),
    "views": (112, 1_000, VIEWS),
    "crops": (112, 1_000, CROPS),
    "large": (224, 4_000, CORE),
    "large views": (224, 4_000, VIEWS[:2]),
    "base": (224, 1_000, BASE),
}


def cached_setting(dataset: str, group: str = "rows", **row: Any) -> Setting:
    """A row with the image size, number of images and epochs of its group."""
    pixels, images, _ = GROUPS[group]
    epochs = EPOCHS if pixels == 112 else EPOCHS // 2
    common = {"pixels": pixels, "images": images, "epochs": epochs, "batch": BATCH}
    return Setting(dataset, **{**common, **row})


def cached_runs(dataset: str, group: str, *seeds: int) -> CachedRuns:
    """All rows of a group on one dataset."""
    settings = tuple(cached_setting(dataset, group, **row) for row in GROUPS[group][2])
    return CachedRuns(f"cached {dataset} {group} seeds {seeds}", settings, seeds)
