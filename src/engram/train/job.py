"""One training as the command line and files of jobs describe it: data, a backbone, settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engram.data.datasets import Splits
from engram.data.overview import warnings
from engram.errors import EngramError, flag
from engram.methods import method_class
from engram.methods.method_flags import DEFAULT_REGIME, ONE_CLASS_REGIME
from engram.model import MemoryViT
from engram.tasks.kinds import KINDS
from engram.tasks.spec import TaskSpec
from engram.tasks.task_settings import TaskSettings
from engram.train.backbone import backbone_for
from engram.train.fit import fit, with_test
from engram.train.opening import opening
from engram.train.options import DataOptions, RunOptions, named, names_file, recipe_from
from engram.train.recipe import Recipe, learning_rate
from engram.train.runs.callbacks import Callback
from engram.train.runs.result import Result
from engram.train.runs.run import Run, check_out
from engram.train.runs.trackers import RecipeFile, trackers_named
from engram.train.search.auto import auto, trained_regimes
from engram.train.search.sweep import SweepResult, spread, sweep
from engram.train.teach import teach
from engram.util.processes import ProcessGroup
from engram.util.progress import Progress
from engram.util.settings import Given
from engram.util.text import words
from engram.vit import ViT


@dataclass(frozen=True)
class Sources:
    """A source of the data and the backbone of a job; it may give what it has already."""

    read: Callable[[DataOptions, str], Splits] = DataOptions.load
    find_backbone: Callable[..., tuple[ViT, str]] = backbone_for


@dataclass(frozen=True)
class TrainingJob:
    """A run of `fit` or `sweep`: data, a backbone with the parents attached, and settings."""

    splits: Splits
    model: MemoryViT
    settings: TaskSettings
    options: RunOptions
    recipe: Recipe
    callbacks: Sequence[Callback]
    processes: ProcessGroup
    why_backbone: str  # a sentence: why it is this backbone
    own_pass: bool = False  # whether `auto` tries regimes that need a pass of their own

    @classmethod
    def start(
        cls,
        data: str,
        out: Path,
        given: Given,
        progress: Progress,
        announce: Callable[[str], object],
        sources: Sources | None = None,
    ) -> TrainingJob:
        """Read the data and load the backbone; what does not fit is an EngramError.

        `announce` is called with a sentence that the user should see.
        """
        sources = sources or Sources()
        settings = TaskSettings.create(given[TaskSettings])
        options = RunOptions(**given[RunOptions])
        name = "default" if names_file(options.recipe) else options.recipe
        recipe, reading = recipe_from(name, given[Recipe]), DataOptions(**given[DataOptions])
        extends = [_portable(text) for text in settings.extends]
        known = {"image_size": options.image_size, "class_init": settings.class_init}
        more = {**asdict(reading), **known, "extends": extends}
        if options.backbone_dtype != "fp32":
            more["backbone_dtype"] = options.backbone_dtype
        callbacks = [*trackers_named(words(options.log)), RecipeFile(more)]
        check_out(out, overwrite=options.overwrite, resume=options.resume)  # before a download
        progress("reading the data", 0, 0)
        processes, splits = ProcessGroup(options.device), sources.read(reading, data)
        progress("loading the backbone", 0, 0)
        backbone, why = sources.find_backbone(
            options, splits, parents=[named(text)[1] for text in settings.extends], out=out,
            announce=announce if processes.main else lambda sentence: None, progress=progress,
        )  # fmt: skip
        model = MemoryViT(backbone)
        parents = tuple(_attach(model, text) for text in settings.extends)
        settings = replace(settings, extends=parents)
        return cls(splits, model, settings, options, recipe, callbacks, processes, why)

    def choose(self, regime: str | None, seeds: int | None, soup: int = 0) -> tuple[str, int]:
        """The regime and the number of seeds of `fit`, where they may not have been given."""
        seeds = 1 if seeds is None else seeds
        if KINDS[self.splits.kind].one_class and regime in (None, "auto"):
            regime = ONE_CLASS_REGIME
        one = self.options.recipe == "paper" or seeds != 1 or soup != 0
        chosen = regime or (DEFAULT_REGIME if one else "auto")
        if chosen == "auto" and (seeds != 1 or soup):
            what = flag("soup" if soup else "seeds")
            raise EngramError(
                f"{what} needs one regime; give one, such as {flag('regime', DEFAULT_REGIME)}."
            )
        if self.own_pass and chosen != "auto":
            raise EngramError(
                f"{flag('own_pass')} says what auto tries, and the regime is {chosen}; leave one "
                "of them out."
            )
        return chosen, seeds

    def specs(self, task: str, regime: str) -> list[TaskSpec]:
        """The tasks that will train: `auto` tries several regimes."""
        several, extends = regime == "auto", self.settings.extends
        regimes = trained_regimes(self.model, self.splits, extends) if several else [regime]
        methods = [self.settings.method(one, lenient=several) for one in regimes]
        return [self.splits.task_spec(task, method, extends) for method in methods]

    def opening(self, task: str, regime: str) -> list[tuple[str, str]]:
        """Rows for people that say what will be done."""
        why = self.why_backbone if self.options.backbone == "auto" else ""
        rows = opening(self.model, self.specs(task, regime), self.splits, self.recipe, why)
        return [*rows, *(("warning", sentence) for sentence in warnings(self.splits))]

    def train(
        self, task: str, out: Path, regime: str, seeds: int, progress: Progress, soup: int = 0
    ) -> Result:
        """Train as `engram fit` does, with what `choose` chose."""
        settings, recipe, run = self.settings, self.recipe, self.arguments(out, progress)
        if regime == "auto":
            return auto(
                self.model, task, self.splits, recipe,
                extends=settings.extends, class_init=settings.class_init,
                **settings.method_settings, own_pass=self.own_pass, **run,
            )  # fmt: skip
        if seeds == 1 and not soup:
            (spec,) = self.specs(task, regime)
            self.model.add(spec, class_init=settings.class_init, seed=recipe.seed)
            return fit(self.model, task, self.splits, recipe, **run)
        job = replace(self, settings=replace(settings, regime=regime))
        rates = spread(learning_rate(recipe, method_class(regime)), soup) if soup > 1 else []
        cells = [job.settings.method().settings().get("cells", 0)]
        return job.sweep(task, out, progress, lrs=rates, cells=cells, seeds=seeds, soup=soup)

    def usual_rates(self) -> list[float]:
        """Learning rates around the method's own, for a sweep that was given no list."""
        rate = learning_rate(self.recipe, method_class(self.settings.regime))
        return [float(f"{rate * times:.3g}") for times in (1 / 3, 1, 3)]

    def sweep(self, task: str, out: Path, progress: Progress, **grid: Any) -> SweepResult:
        """Train the variants of a grid: `lrs`, `cells` and other arguments of `sweep`."""
        settings = self.settings
        others = {k: v for k, v in settings.method_settings.items() if k != "cells"}
        return sweep(
            self.model, task, self.splits, self.recipe,
            regime=settings.regime, extends=settings.extends, class_init=settings.class_init,
            **others, **grid, **self.arguments(out, progress),
        )  # fmt: skip

    def arguments(self, out: Path, progress: Progress) -> dict[str, Any]:
        """Arguments that every run takes."""
        given = {name: getattr(self.options, name) for name in ("resume", "overwrite", "test")}
        shared = {"processes": self.processes, "progress": progress, "callbacks": self.callbacks}
        return {"out": out, **given, **shared}

    @property
    def too_few_to_hold_out(self) -> bool:
        """Whether no image can be held out: every class has one, and there is no val split."""
        splits = self.splits
        if splits.val is not None or splits.kind != "classification" or self.settings.extends:
            return False
        return bool(np.bincount(splits["train"].labels).max() <= 1)

    def teach(self, task: str, out: Path, progress: Progress) -> Result:
        """Solve the task without a choice, where no image can be held out."""
        result = teach(
            self.model, task, self.splits, statistics=self.recipe.statistics, progress=progress
        )
        run = Run(None, self.processes, test=self.options.test, progress=progress)
        result = with_test(result, self.model, self.splits, run, self.recipe.workers)
        if self.processes.main:
            recipe = self.model.engram(task).recipe
            self.model.save(task, out, metrics=result.metrics, recipe=recipe)
        return replace(result, path=out)


def _portable(text: str) -> str:
    """An engram of --extends as it can be given from any folder."""
    given, path = named(text)
    path = str(Path(path).resolve()) if Path(path).exists() else path
    return f"{given}={path}" if given else path


def _attach(model: MemoryViT, text: str) -> str:
    """Attach an engram of --extends (T=FILE, or FILE alone), and return its name."""
    given, path = named(text)
    task = model.attach(path)
    if given and given != task.spec.name:
        raise EngramError(
            f"--extends {text}: the engram in {path} is called {task.spec.name!r}, not "
            f"{given!r}; write --extends {task.spec.name}={path}."
        )
    return task.spec.name
