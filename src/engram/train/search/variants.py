"""The variants of a sweep: points of its grid with their seeds, and how they are trained.

Masked tasks never read each other, so learning rates x weight decays x cell counts x seeds are
streams side by side: the images are read once for all of them. Each variant has its own optimiser,
clipping and schedule, and ends (but for rounding) as if it had been trained alone.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engram.data.datasets import Splits
from engram.errors import EngramError, Interrupted, flag
from engram.methods import Masked, method_class
from engram.methods.method import Needs
from engram.model import MemoryViT
from engram.store.engram import Engram
from engram.store.format import read_engram
from engram.tasks.spec import TaskSpec
from engram.tasks.task_settings import TaskSettings
from engram.train.fit import fit, with_test
from engram.train.loop.task_trainer import TaskTrainer
from engram.train.loop.training import Training
from engram.train.recipe import Recipe, learning_rate
from engram.train.runs.callbacks import Callback, Part
from engram.train.runs.identity import identity_of
from engram.train.runs.result import Ending, Result
from engram.train.runs.run import ResultT, Run, has_state
from engram.util.progress import Progress

_MOST_VARIANTS = 10_000


@dataclass(frozen=True)
class Setting:
    """One point of the grid, with the validation metric of each of its seeds.

    `metric` is the one that chooses: the accuracy, or what the kind of task has instead.
    """

    lr: float
    cells: int
    weight_decay: float
    values: tuple[float, ...] = ()
    metric: str = "accuracy"

    @classmethod
    def recorded(cls, record: Mapping[str, Any]) -> Setting:
        """From the fields that a run recorded, in JSON."""
        return cls(**{**record, "values": tuple(record["values"])})

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        """The standard deviation over seeds; 0 with one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "cells": self.cells,
            "weight_decay": self.weight_decay,
            f"val_{self.metric}": self.mean,
            "deviation": self.deviation,
            "values": list(self.values),
        }


@dataclass(frozen=True)
class Variant:
    """A task, and the recipe that trains it."""

    task: TaskSettings
    recipe: Recipe

    @property
    def setting(self) -> Setting:
        cells = self.task.method_settings.get("cells", 0)
        return Setting(self.recipe.lr, cells, self.recipe.weight_decay)

    @property
    def start(self) -> tuple[int, int]:
        """Settings that decide the weights that it begins with: cells and seed."""
        return self.setting.cells, self.recipe.seed


def grid_of(
    recipe: Recipe,
    task: TaskSettings,
    *,
    lrs: Sequence[float] = (),
    cells: Sequence[int] = (Masked().cells,),
    weight_decays: Sequence[float] = (),
    seeds: int = 1,
) -> list[Variant]:
    """Every setting with every seed; what makes no sense is an EngramError."""
    method = method_class(task.regime)
    if method.composed or (method.solved and Needs.STATISTICS in method().needs):
        raise EngramError(
            f"The regime {task.regime} is solved, not trained at a learning rate, and chooses its "
            f"own settings; use fit, without {flag('seeds')} and {flag('soup')}."
        )
    if seeds < 1:
        raise EngramError(f"{flag('seeds')} is {seeds}; at least one is needed.")
    if not cells:
        raise EngramError(f"{flag('cells')} is empty; give at least one number, such as 5.")
    for lr in lrs:
        if not 0 < lr < math.inf:
            raise EngramError(f"{flag('lr')} is {lr:g}; it must be a number above 0.")
    has_cells = "cells" in method.setting_names()
    points = list(
        itertools.product(
            dict.fromkeys(lrs) or (learning_rate(recipe, method),),
            [task.but(cells=count) for count in dict.fromkeys(cells)] if has_cells else [task],
            dict.fromkeys(weight_decays) or (recipe.weight_decay,),
        )
    )
    if len(points) * seeds > _MOST_VARIANTS:
        raise EngramError(
            f"{len(points):,} settings with {seeds:,} seeds each are more than the "
            f"{_MOST_VARIANTS:,} variants that a sweep can have; lower {flag('seeds')}."
        )
    return [
        Variant(own, recipe.but(lr=lr, weight_decay=decay, seed=recipe.seed + seed))
        for lr, own, decay in points
        for seed in range(seeds)
    ]


@dataclass(frozen=True)
class Trained:
    """A variant after training: its validation metrics, its engram, and how training ended."""

    variant: Variant
    metrics: Mapping[str, Any]
    engram: Engram
    ending: Ending | None
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, variant: Variant, result: Result, engram: Engram) -> Trained:
        return cls(variant, result.metrics["val"], engram, result.ending, result.unreadable)

    @property
    def measured_by(self) -> str:
        """The metric that chooses."""
        return self.engram.spec.kind_object.score_with(self.variant.recipe.balance)

    @property
    def score(self) -> float:
        return float(self.metrics[self.measured_by])


@dataclass(frozen=True)
class SweepRunner:
    """Trains variants, on models of their own with the same backbone and parents."""

    model: MemoryViT
    name: str
    splits: Splits
    recipe: Recipe
    task: TaskSettings
    run: Run

    def identity(self, variants: Sequence[Variant]) -> str:
        """Identity of the training of these variants, as a hash."""
        tasks = [
            (self._spec(self.name, variant), variant.recipe.lr, variant.recipe.weight_decay)
            for variant in variants
        ]
        return identity_of(self.model, tasks, self.splits, self.recipe)

    def check_names(self, variants: Sequence[Variant]) -> None:
        """Check that the model takes the task under its name: now, not after an hour."""
        for variant in {variant.setting.cells: variant for variant in variants}.values():
            self._add(self.model, self.name, variant)
            self.model.detach(self.name)

    def train(self, variants: Sequence[Variant]) -> tuple[list[Trained], Training | None]:
        """Train them as streams of one pass, in the training that is returned, or one by one.

        Where Ctrl-C stops the run, these are the variants so far.
        """
        if not variants[0].task.method().shares_pass:
            return self._one_by_one(variants), None
        scratch, trainers = self.scratch(), []
        for i, variant in enumerate(variants):
            called = f"{self.name[:50]}.{i}"
            self._add(scratch, called, variant)
            trainers.append(TaskTrainer(scratch, called, variant.recipe))
        training = Training(scratch, trainers, self.splits, self.recipe, self.run)
        training.whole(self.identity(variants))
        bad = training.unreadable
        trained = [
            Trained(variant, one.metrics, self._engram(one, scratch), one.ending, bad)
            for variant, one in zip(variants, trainers, strict=True)
        ]
        return trained, training

    def measure(self, averages: Sequence[Trained], training: Training | None) -> list[Trained]:
        """Measure averages of variants on the validation images, in the pass of their training."""
        if training is None and len(averages) > 1:  # each has a pass of its own
            return [self.measure([one], None)[0] for one in averages]
        scratch, others = self.scratch() if training is None else training.model, []
        for i, one in enumerate(averages):
            called = f"{self.name[:50]}.average-{i}"
            scratch.attach(one.engram.renamed(called))
            others.append(TaskTrainer(scratch, called, self.recipe))
        if training is None:
            run = Run(None, self.run.processes, progress=self.run.progress)
            training = Training(scratch, others, self.splits, self.recipe, run)
            training.prepare()
        training.measure(others)
        training.complete(others)
        return [
            replace(one, metrics=other.metrics, engram=self._engram(other, scratch))
            for one, other in zip(averages, others, strict=True)
        ]

    def _engram(self, trainer: TaskTrainer, scratch: MemoryViT) -> Engram:
        return scratch.engram(trainer.name).renamed(self.name)

    def _one_by_one(self, variants: Sequence[Variant]) -> list[Trained]:
        """Train each by itself, but not again what an interrupted sweep had finished."""
        run, trained, unreadable = self.run, list[Trained](), dict[str, str]()
        run.resumes()
        run.processes.wait()  # nobody begins what another process is about to clear
        for i, variant in enumerate(variants):
            try:
                part = Part(run.callbacks, i, len(variants))
                one = self.one(f"{i}", variant, run.progress, [part])
            except Interrupted as error:
                so_far = error.result
                if so_far is None or so_far.path is None:
                    raise
                one = Trained.of(variant, so_far, read_engram(so_far.path))
                run.stopped_at = f"variant {i + 1} of {len(variants)}"
            trained.append(one)
            unreadable |= one.unreadable
            if one.unreadable:
                run.list_unreadable(unreadable)
            if run.stopped_at:
                break
        steps = len(variants) * self.recipe.steps_for(len(self.splits["train"]))
        run.callbacks.started(steps, steps)  # if every variant had been trained before
        return trained

    def one(
        self,
        called: str,
        variant: Variant,
        progress: Progress,
        callbacks: Sequence[Callback] = (),
    ) -> Trained:
        """Train one variant, continue it, or read it from disk if it is done."""
        scratch, folder = self.scratch(), self.run.folder
        self._add(scratch, self.name, variant)
        out = None if folder is None else folder / f"variant-{called}.safetensors"
        resume = out is not None and has_state(out)
        result = fit(
            scratch, self.name, self.splits, variant.recipe,
            out=out, resume=resume, overwrite=not resume, processes=self.run.processes,
            progress=progress, callbacks=callbacks,
        )  # fmt: skip
        return Trained.of(variant, result, scratch.engram(self.name))

    def train_again(self, before: Trained, progress: Progress) -> Trained:
        """Train one variant once more, on other splits, for as many epochs as before.

        In a run with a folder, it can be interrupted and resumed. Its validation images may be
        among those it learns from, so that they decide nothing: it gets the temperature, thresholds
        and scale of familiarity that were found before.
        """
        variant, ending = before.variant, before.ending
        recipe = variant.recipe.but(patience=0, calibrate="off")
        if ending is not None and ending.early:
            per_epoch = recipe.per_epoch(len(self.splits["train"]))
            recipe = recipe.but(steps=max(1, round(ending.steps / ending.per_epoch * per_epoch)))
        again = self.one("again", replace(variant, recipe=recipe), progress)
        scratch, found = self.scratch(), before.engram.tensors
        task = scratch.attach(again.engram)
        task.head.divide(before.metrics.get("temperature", 1.0))
        if task.kind.calibrates:  # thresholds are of calibrated probabilities
            for name, value in task.head.fitted.items():
                value.copy_(found[f"head.{name}"])
        if task.statistics is not None:
            task.statistics.quantiles.copy_(found["statistics.quantiles"])
        return replace(again, variant=variant, engram=scratch.engram(self.name))

    def end(self, engram: Engram, result: ResultT, record: Mapping[str, Any]) -> ResultT:
        """Attach the engram that was kept, measure it on the test split, and end the run.

        After Ctrl-C the model is left without it, because a resumed run adds the task again.
        """
        model = self.scratch() if self.run.stopped_at else self.model
        model.attach(engram)
        result = with_test(result, model.eval(), self.splits, self.run, self.recipe.workers)
        return self.run.end(model, result, record)

    def scratch(self) -> MemoryViT:
        """A model for trials, with the tasks that theirs may extend."""
        scratch = MemoryViT(self.model.backbone)
        if self.task.extends:
            for name in self.model.tasks:
                scratch.attach(self.model.engram(name))
        return scratch

    def _add(self, scratch: MemoryViT, called: str, variant: Variant) -> None:
        spec = self._spec(called, variant)
        scratch.add(spec, class_init=variant.task.class_init, seed=variant.recipe.seed)

    def _spec(self, called: str, variant: Variant) -> TaskSpec:
        return self.splits.task_spec(called, variant.task.method(), variant.task.extends)
