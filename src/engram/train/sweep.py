"""Many variants in one pass: tasks that cannot interact are trained together.

Masked tasks never read each other, so learning rates x weight decays x cell counts x seeds are
streams side by side: the images are read once for all of them. Each variant has its own optimiser,
clipping and schedule, and ends (but for rounding) as if it had been trained alone.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engram.data.datasets import Splits, load
from engram.errors import EngramError
from engram.inference.evaluate import evaluate
from engram.model import MemoryViT
from engram.store.engram import Engram
from engram.store.format import read_engram
from engram.tasks.kinds import KINDS
from engram.tasks.regimes import REGIMES
from engram.train.fit import fit, identity_of, told, train
from engram.train.learner import Learner
from engram.train.plots import draw_sweep
from engram.train.recipe import Recipe, learning_rate
from engram.train.run import Run
from engram.util.processes import Team
from engram.util.progress import Progress, silent

#: In the run's folder: what the variants that are done could not read, for those who resume.
_UNREADABLE = "variant-unreadable.json"


@dataclass(frozen=True)
class Setting:
    """One point of the grid, with the validation score of each of its seeds.

    `measure` names the metric that chooses: the accuracy, or what the kind of task has instead.
    """

    lr: float
    cells: int
    weight_decay: float
    scores: tuple[float, ...] = ()
    measure: str = "accuracy"

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)

    @property
    def deviation(self) -> float:
        """The standard deviation over seeds; 0 with one."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "cells": self.cells,
            "weight_decay": self.weight_decay,
            f"val_{self.measure}": self.mean,
            "deviation": self.deviation,
            "accuracies" if self.measure == "accuracy" else "scores": list(self.scores),
        }


@dataclass(frozen=True)
class SweepResult:
    """All settings, the best on validation, and the engram that was kept of it."""

    task: str
    regime: str
    settings: tuple[Setting, ...]
    best: Setting
    seed: int  # of the engram that was kept
    parameters: int
    seconds: float
    metrics: dict[str, dict[str, Any]]
    path: Path | None
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "path": None if self.path is None else str(self.path),
            "regime": self.regime,
            "parameters": self.parameters,
            "seconds": round(self.seconds, 2),
            "best": self.best.to_dict(),
            "seed": self.seed,
            "metrics": self.metrics,
            "settings": [setting.to_dict() for setting in self.settings],
        }


def sweep(
    model: MemoryViT,
    name: str,
    data: str | os.PathLike[str] | Splits,
    recipe: Recipe | None = None,
    *,
    lrs: Sequence[float] = (),
    cells: Sequence[int] = (5,),
    weight_decays: Sequence[float] = (),
    seeds: int = 1,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    refit: bool = False,
    test: bool = False,
    team: Team | None = None,
    progress: Progress = silent,
    **task: Any,
) -> SweepResult:
    """Train every combination and add the best as a task `name` to the model.

    The best setting has the highest mean validation accuracy (or what its kind of task has in its
    place, `Kind.score`) over its seeds; of its seeds the one with the highest is kept. `refit`
    trains it once more with the validation images that were taken from the training data. `task`
    are further arguments of `MemoryViT.add_task`.
    """
    recipe, team = recipe or Recipe(), team or Team()
    kind = str(task.get("kind", "classification"))
    whole = data if isinstance(data, Splits) else load(data, kind=kind)
    splits = whole.with_validation(recipe.val_share, recipe.data_seed)
    regime = str(task.get("regime", "masked"))
    if regime not in REGIMES:
        raise EngramError(f"There is no regime {regime!r}; choose one of {', '.join(REGIMES)}.")
    if seeds < 1:
        raise EngramError(f"seeds is {seeds}; at least one is needed.")
    if not cells:
        raise EngramError("cells is an empty list; give at least one number, such as 5.")
    if refit and whole.val is not None:
        raise EngramError(
            "refit uses the validation images that were taken from the training data, but "
            f"{whole.name} has a validation split of its own; leave refit out."
        )
    for lr in lrs:
        if not 0 < lr < math.inf:
            raise EngramError(f"lr is {lr:g}; it must be a number above 0.")
    for decay in weight_decays:
        recipe.but(weight_decay=decay)  # is checked there
    if test:
        splits["test"]  # whether there is one should show now, not after an hour
    grid = itertools.product(
        dict.fromkeys(lrs) or (learning_rate(recipe, regime),),
        dict.fromkeys(cells) if REGIMES[regime].cells else (0,),
        dict.fromkeys(weight_decays) or (recipe.weight_decay,),
    )
    variants = [
        Variant(Setting(*point), recipe.seed + seed) for point in grid for seed in range(seeds)
    ]
    scratch = _Scratch(model, name, splits, recipe, task, team)
    scratch.try_out(variants)
    began = time.perf_counter()
    run = Run(Path(out), team, overwrite) if out is not None else None
    with run or contextlib.nullcontext():
        if REGIMES[regime].changes_trunk:
            scores, unreadable = scratch.one_by_one(variants, run, resume, progress)
        else:
            scores, unreadable = scratch.together(variants, run, resume, progress)
        settings = _by_setting(variants, [score.score for score in scores], splits.kind)
        best = max(settings, key=lambda setting: setting.mean)
        of_best = [
            (score.score, -i)
            for i, (variant, score) in enumerate(zip(variants, scores, strict=True))
            if variant.setting == replace(best, scores=(), measure="accuracy")
        ]
        chosen = -max(of_best)[1]
        variant, score = variants[chosen], scores[chosen]
        engram = score.engram
        metrics = {"val": {**score.metrics, "mean": best.mean, "deviation": best.deviation}}
        if refit:
            engram = scratch.again(variant, replace(splits, train=whole.train), progress)
        model.attach(engram)
        if test:
            metrics["test"] = evaluate(model, splits, name, workers=recipe.workers, team=team)
        if run is not None and team.main:
            final = recipe.but(lr=best.lr, weight_decay=best.weight_decay, seed=variant.seed)
            learned = replace(splits, train=whole.train) if refit else splits
            model.save(name, run.out, metrics=metrics, recipe=told(final, learned))
            run.write("sweep.csv", _csv(settings))
            with contextlib.suppress(OSError):  # a full disk: the engram is what was asked for
                draw_sweep([setting.to_dict() for setting in settings], run.folder / "sweep.png")
            run.finish([])
            scratch.clear(run)
    return SweepResult(
        name,
        regime,
        tuple(settings),
        best,
        variant.seed,
        engram.parameters,
        time.perf_counter() - began,
        metrics,
        None if run is None else run.out,
        unreadable,
    )


@dataclass(frozen=True)
class Variant:
    setting: Setting
    seed: int


@dataclass(frozen=True)
class _Score:
    metrics: dict[str, Any]
    engram: Engram

    @property
    def score(self) -> float:
        return float(self.metrics[self.engram.spec.does.score])


@dataclass(frozen=True)
class _Scratch:
    """Where variants are trained: models of their own on the same trunk, with the same parents."""

    model: MemoryViT
    name: str
    splits: Splits
    recipe: Recipe
    task: Mapping[str, Any]
    team: Team

    def try_out(self, variants: Sequence[Variant]) -> None:
        """See that the model takes the task by its own name: now, not after an hour."""
        for variant in {variant.setting.cells: variant for variant in variants}.values():
            self._add(self.model, self.name, variant)
            self.model.detach(self.name)

    def together(
        self, variants: Sequence[Variant], run: Run | None, resume: bool, progress: Progress
    ) -> tuple[list[_Score], dict[str, str]]:
        """All as streams of one pass; gives the pictures that could not be read, too."""
        scratch = self._fresh()
        learners = []
        for i, variant in enumerate(variants):
            called = f"{self.name[:50]}.{i}"
            self._add(scratch, called, variant)
            decay = variant.setting.weight_decay
            learners.append(Learner(scratch, called, self.recipe, variant.setting.lr, decay))
        _, unreadable = train(
            scratch, learners, self.splits, self.recipe,
            run=run, resume=resume, team=self.team, progress=progress,
        )  # fmt: skip
        scores = [_Score(o.metrics, scratch.engram(o.name).renamed(self.name)) for o in learners]
        return scores, unreadable

    def one_by_one(
        self, variants: Sequence[Variant], run: Run | None, resume: bool, progress: Progress
    ) -> tuple[list[_Score], dict[str, str]]:
        """Each by itself; those that an interrupted sweep finished are not trained again."""
        scores: list[_Score] = []
        unreadable: dict[str, str] = {}
        if run is not None:
            begun = any(run.folder.glob("variant-*.safetensors"))
            begun = begun or any(run.folder.glob("variant-*/checkpoint.safetensors"))
            resume = run.goes_on(begun, resume)
            if resume and (run.folder / _UNREADABLE).exists():
                unreadable = json.loads((run.folder / _UNREADABLE).read_bytes())
            if not resume and self.team.main:
                self.clear(run)
            self.team.wait()  # what is cleared is not to be what another process begins
        for i, variant in enumerate(variants):
            out = None if run is None else run.folder / f"variant-{i}.safetensors"
            scratch = self._fresh()
            self._add(scratch, self.name, variant)
            recipe = self._recipe(variant)
            learner = Learner(scratch, self.name, recipe)
            identity = identity_of(scratch, [learner], self.splits, recipe)
            if run is not None and out is not None:
                known = run.folder / f"variant-{i}.identity"
                was = known.read_text() if known.exists() else ""
                if resume and was != identity and (was or out.exists()):
                    raise EngramError(
                        f"{out} was trained with other settings, data or trunk; repeat the command "
                        "of that sweep with --resume, or begin anew with --overwrite."
                    )
                if self.team.main:
                    run.write(known.name, identity)
            if out is not None and out.exists() and resume:
                engram = read_engram(out)
                scores.append(_Score(dict(engram.metrics["val"]), engram))
                continue
            anew = resume or run is None or run.overwrite
            result = fit(
                scratch, self.name, self.splits, recipe,
                out=out, resume=resume, overwrite=anew, team=self.team, progress=progress,
            )  # fmt: skip
            scores.append(_Score(dict(result.metrics["val"]), scratch.engram(self.name)))
            unreadable |= result.unreadable
            if run is not None and self.team.main and unreadable:
                run.list_unreadable(unreadable)
                run.write(_UNREADABLE, json.dumps(unreadable))
        return scores, unreadable

    def again(self, variant: Variant, splits: Splits, progress: Progress) -> Engram:
        """One variant once more, on other splits."""
        scratch = self._fresh()
        self._add(scratch, self.name, variant)
        fit(scratch, self.name, splits, self._recipe(variant), team=self.team, progress=progress)
        return scratch.engram(self.name)

    def clear(self, run: Run) -> None:
        """Remove what `one_by_one` wrote: the best is kept elsewhere by now."""
        for path in run.folder.glob("variant-*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _recipe(self, variant: Variant) -> Recipe:
        setting = variant.setting
        return self.recipe.but(lr=setting.lr, weight_decay=setting.weight_decay, seed=variant.seed)

    def _fresh(self) -> MemoryViT:
        scratch = MemoryViT(self.model.trunk)
        if self.task.get("extends"):
            for name in self.model.tasks:
                scratch.attach(self.model.engram(name))
        return scratch

    def _add(self, scratch: MemoryViT, called: str, variant: Variant) -> None:
        terms = {**self.splits.task, **self.task}
        scratch.add_task(called, cells=variant.setting.cells, seed=variant.seed, **terms)


def _by_setting(variants: Sequence[Variant], scores: Sequence[float], kind: str) -> list[Setting]:
    found: dict[Setting, list[float]] = {}
    for variant, score in zip(variants, scores, strict=True):
        found.setdefault(variant.setting, []).append(score)
    measure = KINDS[kind].score
    return [replace(s, scores=tuple(values), measure=measure) for s, values in found.items()]


def _csv(settings: Sequence[Setting]) -> str:
    text = io.StringIO()
    rows = csv.DictWriter(text, list(settings[0].to_dict()))
    rows.writeheader()
    rows.writerows(setting.to_dict() for setting in settings)
    return text.getvalue()
