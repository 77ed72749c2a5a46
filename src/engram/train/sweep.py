"""A sweep: train many variants of a task, keep the best on validation."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engram.data.datasets import Splits, load
from engram.data.python_data import PythonData
from engram.errors import EngramError, Interrupted, flag
from engram.methods import Masked
from engram.model import MemoryViT
from engram.store.engram import Engram
from engram.tasks.kinds import KINDS
from engram.tasks.task_settings import TaskSettings
from engram.train.calibrate import metrics_on_test
from engram.train.callbacks import Callback
from engram.train.fit import training_record
from engram.train.plots import draw_sweep
from engram.train.recipe import Recipe
from engram.train.recipe_file import settings_of
from engram.train.result import RunResult
from engram.train.run import Run
from engram.train.soup import Soup, best_soup, check_soup
from engram.train.trackers import csv_text, run_callbacks
from engram.train.validation import with_held_out
from engram.train.variants import Setting, SweepRunner, Trained, Variant, grid_of
from engram.util.processes import ProcessGroup
from engram.util.progress import Progress, silent


@dataclass(frozen=True, kw_only=True, repr=False)
class SweepResult(RunResult):
    """The result of `sweep`: all settings, and the best on validation, whose engram was kept."""

    settings: tuple[Setting, ...]
    best: Setting
    seed: int  # of the engram that was kept
    soup: Soup | None = None  # the averages that were tried

    @classmethod
    def recorded(cls, engram: Engram, path: Path | None, record: Mapping[str, Any]) -> SweepResult:
        settings = tuple(Setting.recorded(one) for one in record["settings"])
        best, soup = settings[record["best"]], record["soup"] and Soup(**record["soup"])
        found = {**record, "settings": settings, "best": best, "soup": soup}
        return super().recorded(engram, path, found)

    def to_dict(self) -> dict[str, Any]:
        return {
            **super().to_dict(),
            "best": self.best.to_dict(),
            "seed": self.seed,
            "settings": [setting.to_dict() for setting in self.settings],
            "soup": None if self.soup is None else self.soup.to_dict(),
        }


def sweep(
    model: MemoryViT,
    name: str,
    data: str | os.PathLike[str] | Splits | PythonData,
    recipe: Recipe | None = None,
    *,
    lrs: Sequence[float] = (),
    cells: Sequence[int] = (Masked().cells,),
    weight_decays: Sequence[float] = (),
    seeds: int = 1,
    kind: str = "classification",
    regime: str = "masked",
    extends: Sequence[str] = (),
    class_init: str = "backbone",
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    refit: bool = False,
    soup: int = 0,
    test: bool = False,
    team: ProcessGroup | None = None,
    progress: Progress = silent,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> SweepResult:
    """Train every combination and add the best as a task `name` to the model.

    The best setting has the highest mean validation score over its seeds; of its seeds the one
    with the highest score is kept. Masked variants are trained together in one pass.

    Args:
        model: The model; the best task is attached to it.
        name: The name of the new task.
        data: A path, a name or a dataset as `engram.data.load` takes it, or what that returned.
        recipe: The training settings that all variants share.
        lrs: Learning rates to try; the recipe's if empty.
        cells: Numbers of memory cells to try.
        weight_decays: Weight decays to try; the recipe's if empty.
        seeds: Seeds for every combination.
        kind: The kind of task, unless `data` is what `engram.data.load` returned.
        regime: The method: what trains, and how the task reads the backbone.
        extends: Names of attached tasks that the new task reads.
        class_init: Where the class token starts: `backbone` or `random`.
        out: The engram to write.
        resume: Continue an interrupted sweep.
        overwrite: Replace an existing engram, or give up an interrupted sweep.
        refit: Train the best setting once more, validation images included.
        soup: Average up to this many of the best variants that began with the same weights, and
            keep the average if it is better on validation; 0: no average is tried.
        test: Evaluate the test split once, with the best.
        team: The processes that share the work. By default those of torchrun.
        progress: Called as progress(what, done, total, note) while work goes on.
        callbacks: Told how the run goes; see `engram.Callback`.
        **settings: Other settings of the method, such as `rank` of `side`.

    Returns:
        All settings with their scores, the best of them, its metrics and the path of its engram.

    Raises:
        EngramError: A setting makes no sense, the data does not fit, or the file exists.
        Interrupted: The sweep was stopped by Ctrl-C or SIGTERM, after a checkpoint. After Ctrl-C
            and a first validation, `out` has the best engram so far, and the exception's `result`
            is that.

    Examples:
        >>> short = engram.Recipe(epochs=3)
        >>> result = engram.sweep(model, "plants", "photos", short, lrs=[0.001, 0.003])
        >>> result.best.cells
        5
    """
    began = time.perf_counter()
    recipe, team = recipe or Recipe(), team or ProcessGroup()
    variants = grid_of(
        recipe, regime, lrs=lrs, cells=cells, weight_decays=weight_decays, seeds=seeds
    )
    check_soup(soup, variants, refit)
    whole = data if isinstance(data, Splits) else load(data, kind=kind)
    recipe.check_for(KINDS[whole.kind])
    if refit and whole.val is not None:
        raise EngramError(
            f"{flag('refit')} uses the validation images that were taken from the training data, "
            f"but {whole.name} has a validation split of its own; leave it out."
        )
    splits = with_held_out(whole, recipe, cross=False)
    if test:
        splits["test"]  # whether there is one should show now, not after an hour
    task = TaskSettings(regime, tuple(extends), class_init, settings)
    workshop = SweepRunner(model, name, splits, recipe, task, team)
    workshop.check_names(variants)
    run = Run(out, team, overwrite, resume, model.backbone.source, progress)
    identity = sweep_identity(workshop, variants, refit=refit, test=test, soup=soup)
    rates = list(dict.fromkeys(variant.setting.lr for variant in variants))
    grid = {"lr": rates, "cells": cells, "weight_decay": weight_decays}
    about = settings_of(
        model, splits, task, recipe, **_lists(grid), seeds=seeds, refit=refit, soup=soup
    )
    run.callbacks = run_callbacks(callbacks, name, splits, about, run)
    with run:
        before = run.finished(identity)
        if run.out is not None and before is not None:
            model.attach(run.out)
            return SweepResult.recorded(model.engram(name), run.out, before)
        finished = workshop.train(variants, run)
        interrupted = bool(finished.stopped_at)
        refit, test = refit and not interrupted, test and not interrupted
        groups: dict[Setting, list[Trained]] = {}
        for one in finished.trained:
            groups.setdefault(one.variant.setting, []).append(one)
        scored = [
            replace(setting, values=tuple(one.score for one in own), metric=own[0].measured_by)
            for setting, own in groups.items()
        ]
        best = max(scored, key=lambda setting: setting.mean)
        seeds_of_best = list(groups.values())[scored.index(best)]
        chosen = max(seeds_of_best, key=lambda one: one.score)
        tried = None
        if soup:
            tried, chosen = best_soup(finished.trained, chosen, soup, finished.measure)
        metrics = {"val": {**chosen.metrics, "mean": best.mean, "deviation": best.deviation}}
        learned = replace(splits, train=whole.train) if refit else splits
        if refit:
            chosen = workshop.train_again(chosen, learned, Run(None, team), progress)
        engram, ending = chosen.engram, chosen.ending
        model.attach(engram)
        answers = None
        if test:
            tested = metrics_on_test(model, name, splits, metrics["val"], run, recipe.workers)
            metrics["test"], answers = tested
        result = {
            "seconds": time.perf_counter() - began,
            "metrics": metrics,
            "unreadable": finished.unreadable,
            "settings": [asdict(setting) for setting in scored],
            "best": scored.index(best),
            "seed": chosen.variant.seed,
            "ending": ending and asdict(ending),
            "soup": tried and asdict(tried),
        }
        final = workshop.recipe_of(chosen.variant)
        record = training_record(final, learned, final.lr, ending)
        if tried is not None and tried.kept > 1:
            record["merged"] = tried.lineage
        _write_tables(run, scored)
        done = SweepResult.recorded(engram, run.out, result)
        done = replace(done, answers=answers, interrupted=interrupted)
        try:
            run.end(model, done, result, record, finished.stopped_at)
        except Interrupted:
            model.detach(name)  # a resumed sweep adds it again
            raise
        workshop.clear(run)
    return done


def sweep_identity(
    workshop: SweepRunner,
    variants: Sequence[Variant],
    *,
    refit: bool = False,
    test: bool = False,
    soup: int = 0,
) -> str:
    """Identity of a sweep. It begins with that of its training, which its checkpoint has."""
    averaged = f" soup={soup}" if soup else ""
    return f"{workshop.identity(variants)} refit={refit} test={test}{averaged}"


def _lists(grid: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Lists as settings: none if it is empty, and a number if it is the only one."""
    return {k: v[0] if len(v) == 1 else list(v) for k, v in grid.items() if v}


def _write_tables(run: Run, settings: Sequence[Setting]) -> None:
    if not run.writes:
        return
    found = [setting.to_dict() for setting in settings]
    with contextlib.suppress(EngramError, OSError):  # a full disk: the engram was asked for
        run.write("sweep.csv", csv_text(found))
        draw_sweep(found, run.file("sweep.png"))
