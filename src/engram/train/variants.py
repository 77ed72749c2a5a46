"""The variants of a sweep: points of its grid with their seeds, and how they are trained.

Masked tasks never read each other, so learning rates x weight decays x cell counts x seeds are
streams side by side: the images are read once for all of them. Each variant has its own optimiser,
clipping and schedule, and ends (but for rounding) as if it had been trained alone.
"""

from __future__ import annotations

import itertools
import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from engram.train.callbacks import Callback, Part
from engram.train.fit import fit
from engram.train.identity import identity_of, identity_of_fit
from engram.train.recipe import Recipe, learning_rate
from engram.train.result import Ending, Result
from engram.train.run import Run, has_run_of_another, has_state
from engram.train.task_trainer import TaskTrainer
from engram.train.training import Training
from engram.util.processes import ProcessGroup
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
    """A recipe, with its own learning rate, weight decay and seed, and a number of cells."""

    recipe: Recipe
    cells: int

    @property
    def setting(self) -> Setting:
        return Setting(self.recipe.lr, self.cells, self.recipe.weight_decay)


def grid_of(
    recipe: Recipe,
    regime: str,
    *,
    lrs: Sequence[float] = (),
    cells: Sequence[int] = (Masked().cells,),
    weight_decays: Sequence[float] = (),
    seeds: int = 1,
) -> list[Variant]:
    """Every setting with every seed; what makes no sense is an EngramError."""
    method = method_class(regime)
    if method.composed or (method.solved and Needs.STATISTICS in method().needs):
        raise EngramError(
            f"The regime {regime} is solved, not trained at a learning rate, and chooses its "
            f"own settings; use fit, without {flag('seeds')} and {flag('soup')}."
        )
    if seeds < 1:
        raise EngramError(f"{flag('seeds')} is {seeds}; at least one is needed.")
    if not cells:
        raise EngramError(f"{flag('cells')} is empty; give at least one number, such as 5.")
    for lr in lrs:
        if not 0 < lr < math.inf:
            raise EngramError(f"{flag('lr')} is {lr:g}; it must be a number above 0.")
    points = list(
        itertools.product(
            dict.fromkeys(lrs) or (learning_rate(recipe, method),),
            dict.fromkeys(cells) if "cells" in method.setting_names() else (0,),
            dict.fromkeys(weight_decays) or (recipe.weight_decay,),
        )
    )
    if len(points) * seeds > _MOST_VARIANTS:
        raise EngramError(
            f"{len(points):,} settings with {seeds:,} seeds each are more than the "
            f"{_MOST_VARIANTS:,} variants that a sweep can have; lower {flag('seeds')}."
        )
    return [
        Variant(recipe.but(lr=lr, weight_decay=decay, seed=recipe.seed + seed), count)
        for lr, count, decay in points
        for seed in range(seeds)
    ]


@dataclass(frozen=True)
class Trained:
    """A variant after training: its validation metrics, its engram, and how training ended."""

    variant: Variant
    metrics: Mapping[str, Any]
    engram: Engram
    ending: Ending | None

    @property
    def measured_by(self) -> str:
        """The metric that chooses."""
        return self.engram.spec.kind_object.score_with(self.variant.recipe.balance)

    @property
    def score(self) -> float:
        return float(self.metrics[self.measured_by])


#: Measures variants on the validation images, whose engrams are other ones than before.
Measure = Callable[[Sequence[Trained]], list[Trained]]


@dataclass(frozen=True)
class Finished:
    """All variants, what could not be read with the reasons, and how to measure other engrams."""

    trained: list[Trained]
    unreadable: dict[str, str]
    measure: Measure
    stopped_at: str = ""  # where Ctrl-C stopped it: these are the variants so far


@dataclass(frozen=True)
class SweepRunner:
    """Trains variants, on models of their own with the same backbone and parents."""

    model: MemoryViT
    name: str
    splits: Splits
    recipe: Recipe
    task: TaskSettings
    processes: ProcessGroup

    def identity(self, variants: Sequence[Variant]) -> str:
        """Identity of the training of these variants, as a hash."""
        tasks = [
            (self._spec(self.name, variant), variant.recipe.lr, variant.recipe.weight_decay)
            for variant in variants
        ]
        return identity_of(self.model, tasks, self.splits, self.recipe)

    def check_names(self, variants: Sequence[Variant]) -> None:
        """Check that the model takes the task under its name: now, not after an hour."""
        for variant in {variant.cells: variant for variant in variants}.values():
            self._add(self.model, self.name, variant)
            self.model.detach(self.name)

    def train(self, variants: Sequence[Variant], run: Run) -> Finished:
        if not self.task.method().shares_pass:
            return self._one_by_one(variants, run)
        return self._in_one_pass(variants, run)

    def _in_one_pass(self, variants: Sequence[Variant], run: Run) -> Finished:
        """Train all as streams of one pass."""
        scratch = self.scratch()
        trainers = []
        for i, variant in enumerate(variants):
            called = f"{self.name[:50]}.{i}"
            self._add(scratch, called, variant)
            trainers.append(TaskTrainer(scratch, called, variant.recipe))
        training = Training(scratch, trainers, self.splits, self.recipe, run)
        training.whole(self.identity(variants))

        def engram_of(trainer: TaskTrainer) -> Engram:
            return scratch.engram(trainer.name).renamed(self.name)

        def measure(averages: Sequence[Trained]) -> list[Trained]:
            others = []
            for i, one in enumerate(averages, start=len(variants)):
                scratch.attach(one.engram.renamed(f"{self.name[:50]}.{i}"))
                others.append(TaskTrainer(scratch, f"{self.name[:50]}.{i}", self.recipe))
            training.measure(others)
            training.complete(others)
            pairs = zip(averages, others, strict=True)
            return [replace(one, metrics=o.metrics, engram=engram_of(o)) for one, o in pairs]

        trained = [
            Trained(variant, one.metrics, engram_of(one), one.ending)
            for variant, one in zip(variants, trainers, strict=True)
        ]
        return Finished(trained, training.unreadable, measure, training.stopped_at)

    def _one_by_one(self, variants: Sequence[Variant], run: Run) -> Finished:
        """Train each by itself, but not again what an interrupted sweep had finished."""
        unreadable: dict[str, str] = {}
        self._begin(run)
        trained, stopped_at = list[Trained](), ""
        for i, variant in enumerate(variants):
            try:
                part = [Part(run.callbacks, i, len(variants))]
                one, bad = self.one(f"{i}", variant, run, run.progress, part)
            except Interrupted as error:
                so_far = error.result
                if so_far is None or so_far.path is None:
                    raise
                engram, bad = read_engram(so_far.path), so_far.unreadable
                one = Trained(variant, so_far.metrics["val"], engram, so_far.ending)
                stopped_at = f"variant {i + 1} of {len(variants)}"
            trained.append(one)
            if bad:
                unreadable |= bad
                run.list_unreadable(unreadable)
            if stopped_at:
                break
        steps = len(variants) * self.recipe.steps_for(len(self.splits["train"]))
        run.callbacks.started(steps, steps)  # if every variant had been trained before

        def measure(averages: Sequence[Trained]) -> list[Trained]:
            return [self._measured(one, run.progress) for one in averages]

        return Finished(trained, unreadable, measure, stopped_at)

    def _measured(self, one: Trained, progress: Progress) -> Trained:
        """Measure an engram of this task on the validation images."""
        scratch = self.scratch()
        scratch.attach(one.engram)
        trainer = TaskTrainer(scratch, self.name, self.recipe)
        run = Run(None, self.processes, progress=progress)
        training = Training(scratch, [trainer], self.splits, self.recipe, run)
        training.prepare()
        training.measure([trainer])
        training.complete([trainer])
        return replace(one, metrics=trainer.metrics, engram=scratch.engram(self.name))

    def _begin(self, run: Run) -> None:
        """Resume an interrupted sweep, or clear the folder for a new one."""
        folder = run.folder
        interrupted = folder is not None and any(
            has_state(path.with_suffix(".safetensors")) for path in folder.glob("variant-*.run")
        )
        if not run.continues(interrupted):
            run.clear()
            self.clear(run)
        self.processes.wait()  # nobody begins what another process is about to clear

    def one(
        self,
        called: str,
        variant: Variant,
        run: Run,
        progress: Progress,
        callbacks: Sequence[Callback] = (),
    ) -> tuple[Trained, Mapping[str, str]]:
        """Train one variant, or read it from disk if it is done; and what it could not read."""
        scratch, recipe = self.scratch(), variant.recipe
        self._add(scratch, self.name, variant)
        out = None if run.folder is None else run.folder / f"variant-{called}.safetensors"
        resume = out is not None and has_state(out)
        if out is not None and resume:
            spec = scratch.task(self.name).spec
            identity = identity_of_fit(scratch, spec, self.splits, recipe, test=False)
            if has_run_of_another(out, identity):
                raise EngramError(
                    f"{out} was trained with other settings, data or backbone; repeat the command "
                    f"of that sweep with {flag('resume', True)}, or start again with "
                    f"{flag('overwrite', True)}."
                )
        result = fit(
            scratch, self.name, self.splits, recipe,
            out=out, resume=resume, overwrite=True, processes=self.processes, progress=progress,
            callbacks=callbacks,
        )  # fmt: skip
        engram = scratch.engram(self.name)
        trained = Trained(variant, result.metrics["val"], engram, result.ending)
        return trained, result.unreadable

    def train_again(self, before: Trained, splits: Splits, run: Run, progress: Progress) -> Trained:
        """Train one variant once more, on other splits, for as many epochs as before.

        In a run with a folder, it can be interrupted and resumed. Its validation images may be
        among those it learns from, so that they decide nothing: it gets the temperature, thresholds
        and scale of familiarity that were found before.
        """
        scratch, variant, ending = self.scratch(), before.variant, before.ending
        recipe = variant.recipe.but(patience=0, calibrate="off")
        self._add(scratch, self.name, variant)
        if ending is not None and ending.early:
            per_epoch = -(-len(splits["train"]) // recipe.batch)
            recipe = recipe.but(steps=max(1, round(ending.steps / ending.per_epoch * per_epoch)))
        out = None if run.folder is None else run.folder / "variant-again.safetensors"
        result = fit(
            scratch, self.name, splits, recipe, out=out, resume=out is not None and has_state(out),
            overwrite=True, processes=self.processes, progress=progress,
        )  # fmt: skip
        task, found = scratch.task(self.name), before.engram.tensors
        task.head.divide(before.metrics.get("temperature", 1.0))
        if task.kind.calibrates:  # thresholds are of calibrated probabilities
            for name, value in task.head.fitted.items():
                value.copy_(found[f"head.{name}"])
        if task.statistics is not None:
            task.statistics.quantiles.copy_(found["statistics.quantiles"])
        engram = scratch.engram(self.name)
        return Trained(variant, result.metrics["val"], engram, result.ending)

    def end(self, run: Run, result: Result, training: Mapping[str, Any], stopped_at: str) -> None:
        """`Run.end`, and remove what was kept of variants; a resumed run adds the task again."""
        try:
            run.end(self.model, result, training, stopped_at)
        except Interrupted:
            self.model.detach(self.name)
            raise
        self.clear(run)

    def clear(self, run: Run) -> None:
        """Remove what was kept of every variant: the best is written elsewhere by now."""
        for path in run.file("").glob("variant-*") if run.writes else ():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def scratch(self) -> MemoryViT:
        """A model for trials, with the tasks that theirs may extend."""
        scratch = MemoryViT(self.model.backbone)
        if self.task.extends:
            for name in self.model.tasks:
                scratch.attach(self.model.engram(name))
        return scratch

    def _add(self, scratch: MemoryViT, called: str, variant: Variant) -> None:
        spec = self._spec(called, variant)
        scratch.add(spec, class_init=self.task.class_init, seed=variant.recipe.seed)

    def _spec(self, called: str, variant: Variant) -> TaskSpec:
        settings = self.task
        if "cells" in method_class(settings.regime).setting_names():
            settings = settings.but(cells=variant.cells)
        return self.splits.task_spec(called, settings.method(), settings.extends)
