"""A sweep: train many variants of a task, keep the best on validation.

Or a *soup* of the best: their average, where validation says that it helps. Only variants that
began with the same weights are averaged: they have the same seed and number of cells, and differ in
learning rate and weight decay.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from engram.data.datasets import Splits, load
from engram.data.python_data import PythonData
from engram.errors import EngramError, flag
from engram.methods import Masked
from engram.methods.method_flags import DEFAULT_REGIME
from engram.model import MemoryViT
from engram.store.engram import Engram
from engram.store.merging import average, normalise_weights
from engram.tasks.kind import Kind
from engram.tasks.kinds import KINDS
from engram.tasks.task_settings import TaskSettings
from engram.train.fit import training_record
from engram.train.loop.validation import best_of, with_held_out
from engram.train.recipe import Recipe
from engram.train.runs.callbacks import Callback
from engram.train.runs.plots import draw_sweep, validation_metric
from engram.train.runs.result import Result
from engram.train.runs.run import Run
from engram.train.runs.trackers import csv_text, run_callbacks, settings_of
from engram.train.search.variants import Setting, SweepRunner, Trained, Variant, grid_of
from engram.util.processes import ProcessGroup
from engram.util.progress import Progress, silent


@dataclass(frozen=True)
class Soup:
    """The averages that were tried, and the one that was kept."""

    kept: int  # how many variants the engram is the average of; 1: the best alone
    tried: list[dict[str, Any]]  # the best alone, the best two and so on, with their metrics
    members: list[dict[str, Any]]  # all that were averaged, the best first

    @property
    def lineage(self) -> list[dict[str, Any]]:
        """Record in the engram of the variants that it is the average of."""
        return [{**one, "weight": round(1 / self.kept, 6)} for one in self.members[: self.kept]]

    def summary(self, kind: Kind) -> str:
        """For people: what was tried, and what was kept."""

        def told(one: Mapping[str, Any]) -> str:
            count, score = one["variants"], kind.shown(one[f"val_{validation_metric(one)}"])
            what = f"average of {count}" if count > 1 else "the best alone"
            return f"{what} {score} (loss {one['val_loss']:.3f})"

        kept = f"the average of {self.kept}" if self.kept > 1 else "the best alone"
        return f"{', '.join(map(told, self.tried))}; kept {kept}"


@dataclass(frozen=True, kw_only=True, repr=False)
class SweepResult(Result):
    """The result of `sweep`: all settings, and the best on validation, whose engram was kept."""

    settings: tuple[Setting, ...]
    best: Setting
    seed: int  # of the engram that was kept
    soup: Soup | None = None  # the averages that were tried

    @classmethod
    def recorded(cls, engram: Engram, path: Path, record: Mapping[str, Any]) -> SweepResult:
        settings = tuple(Setting.recorded(one) for one in record["settings"])
        best = Setting.recorded(record["best"])
        soup = record["soup"] and Soup(**record["soup"])
        found = {**record, "settings": settings, "best": best, "soup": soup}
        return super().recorded(engram, path, found)

    def to_dict(self) -> dict[str, Any]:
        return {
            **super().to_dict(),
            "best": self.best.to_dict(),
            "seed": self.seed,
            "settings": [setting.to_dict() for setting in self.settings],
            "soup": self.soup and asdict(self.soup),
        }

    def table(self, kind: Kind) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
        """Columns and rows of a table of the settings."""
        score = f"validation {kind.metric_title(self.best.metric)}"
        return ("lr", "cells", "weight decay", score, ""), tuple(
            (
                f"{one.lr:g}",
                str(one.cells),
                f"{one.weight_decay:g}",
                f"{kind.shown(one.mean)} ± {kind.shown(one.deviation)}",
                "best" if one == self.best else "",
            )
            for one in self.settings
        )


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
    regime: str = DEFAULT_REGIME,
    extends: Sequence[str] = (),
    class_init: str = "backbone",
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    refit: bool = False,
    soup: int = 0,
    test: bool = False,
    processes: ProcessGroup | None = None,
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
        processes: Those that share the work. By default those of torchrun.
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
    recipe, task = recipe or Recipe(), TaskSettings(regime, tuple(extends), class_init, settings)
    variants = grid_of(recipe, task, lrs=lrs, cells=cells, weight_decays=weight_decays, seeds=seeds)
    check_soup(soup, variants, refit)
    run = Run(out, processes or ProcessGroup(), overwrite, resume, test, progress)
    whole = data if isinstance(data, Splits) else load(data, kind=kind)
    recipe.check_for(KINDS[whole.kind])
    if refit and whole.val is not None:
        raise EngramError(
            f"{flag('refit')} uses the validation images that were taken from the training data, "
            f"but {whole.name} has a validation split of its own; leave it out."
        )
    splits = with_held_out(whole, recipe, cross=False, test=test)
    runner = SweepRunner(model, name, splits, recipe, task, run)
    runner.check_names(variants)
    identity = f"{runner.identity(variants)} refit={refit} test={test}"
    identity += f" soup={soup}" if soup else ""
    rates = list(dict.fromkeys(variant.recipe.lr for variant in variants))
    grid = {"lr": rates, "cells": cells, "weight_decay": weight_decays}
    listed = {k: v[0] if len(v) == 1 else list(v) for k, v in grid.items() if v}
    about = settings_of(model, splits, task, recipe, **listed, seeds=seeds, refit=refit, soup=soup)
    run.callbacks = run_callbacks(callbacks, name, splits, about, run)
    with run:
        if found := run.finished(identity, SweepResult):
            model.attach(found[1])
            return found[0]
        trained, training = runner.train(variants)
        groups: dict[Setting, list[Trained]] = {}
        for one in trained:
            groups.setdefault(one.variant.setting, []).append(one)
        scored = {
            replace(setting, values=tuple(one.score for one in own), metric=own[0].measured_by): own
            for setting, own in groups.items()
        }
        best = max(scored, key=lambda setting: setting.mean)
        chosen, tried = max(scored[best], key=lambda one: one.score), None
        if soup:
            measure = partial(runner.measure, training=training)
            tried, chosen = best_soup(trained, chosen, soup, measure)
        metrics = {"val": {**chosen.metrics, "mean": best.mean, "deviation": best.deviation}}
        if refit and not run.stopped_at:
            splits = replace(splits, train=whole.train)
            again = Run(None, run.processes)
            chosen = replace(runner, splits=splits, run=again).train_again(chosen, progress)
        final = chosen.variant.recipe
        result = SweepResult.create(
            chosen.engram, metrics=metrics, ending=chosen.ending,
            unreadable={path: why for one in trained for path, why in one.unreadable.items()},
            settings=tuple(scored), best=best, seed=final.seed, soup=tried,
        )  # fmt: skip
        record = training_record(final, splits, final.lr, chosen.ending)
        if tried is not None and tried.kept > 1:
            record["merged"] = tried.lineage
        if run.writes:
            rows = [setting.to_dict() for setting in scored]
            with contextlib.suppress(EngramError, OSError):  # a full disk: the engram is made
                run.write("sweep.csv", csv_text(rows))
                draw_sweep(rows, run.file("sweep.png"))
        return runner.end(chosen.engram, result, record)


def spread(lr: float, count: int) -> list[float]:
    """Learning rates around one, from half of it to twice as much."""
    return [float(f"{lr * 2 ** (2 * i / (count - 1) - 1):.3g}") for i in range(count)]


def check_soup(count: int, variants: Sequence[Variant], refit: bool) -> None:
    """Refuse a soup of so many variants where a sweep has none; 0: no soup was asked for."""
    if not count:
        return
    if count < 2:
        raise EngramError(f"{flag('soup')} is {count}; an average needs at least 2 variants.")
    if refit:
        raise EngramError(
            f"{flag('refit')} trains one variant again, and {flag('soup')} averages several; "
            "leave one of them out."
        )
    alike = [one for one in variants if one.start == variants[0].start]
    if len(alike) < count:
        raise EngramError(
            f"{flag('soup')} is {count}, but only {len(alike)} of the {len(variants)} variants "
            "begin with the same weights (the same seed and number of cells); give more learning "
            f"rates or weight decays ({flag('lr')} 0.0005,0.001,0.002)."
        )


def best_soup(
    trained: Sequence[Trained],
    best: Trained,
    count: int,
    measure: Callable[[Sequence[Trained]], list[Trained]],
) -> tuple[Soup, Trained]:
    """Try averages, and keep the best by `choice.best_of`: one variant, or an average.

    The averages are of the best two, three, … up to `count` variants, all with the same weight.
    """
    alike = [one for one in trained if one.variant.start == best.variant.start]
    alike.sort(key=lambda one: (one is not best, -one.score, one.metrics.get("loss", 0.0)))
    different: dict[str, Trained] = {}
    for one in alike:
        different.setdefault(one.engram.content, one)
    members = list(different.values())[:count]
    found = [(f"variant {i + 1}", one.engram) for i, one in enumerate(members)]
    groups = [found[: i + 1] for i in range(1, len(found))]
    averages = [average(group, normalise_weights((), len(group))) for group in groups]
    tried = [best, *measure([replace(best, engram=one) for one in averages])]
    at = best_of(best.measured_by, [one.metrics for one in tried])
    values = [
        {
            "variants": i + 1,
            f"val_{best.measured_by}": one.score,
            "val_loss": float(one.metrics.get("loss", 0.0)),
        }
        for i, one in enumerate(tried)
    ]
    recorded = [
        {"task": one.engram.spec.name, "content": one.engram.content}
        | {name: getattr(one.variant.recipe, name) for name in ("lr", "weight_decay", "seed")}
        for one in members
    ]
    return Soup(at + 1, values, recorded), tried[at]
