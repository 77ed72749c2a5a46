"""Train one task and write its engram: `fit` calls `train`, which runs a `Training`."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from engram.data.datasets import Splits, check_fits, load
from engram.data.loader import Transform
from engram.inference.evaluate import evaluate
from engram.model import MemoryViT
from engram.train.learner import Learner
from engram.train.recipe import Recipe
from engram.train.result import Result
from engram.train.run import Run
from engram.train.training import train
from engram.util.processes import Team
from engram.util.progress import Progress, silent


def fit(
    model: MemoryViT,
    name: str,
    data: str | os.PathLike[str] | Splits,
    recipe: Recipe | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    test: bool = False,
    transform: Transform | None = None,
    team: Team | None = None,
    progress: Progress = silent,
) -> Result:
    """Train one task of the model and, with `out`, write it as an engram.

    A file that is there already is only replaced with `overwrite`. The run keeps its checkpoint,
    logs and plots in a folder beside `out`, `NAME.run`; with `resume` an interrupted run goes on
    from there and ends with the same weights. `test` evaluates the test split once, at the end.
    """
    recipe, team = recipe or Recipe(), team or Team()
    task = model.task(name)
    splits = data if isinstance(data, Splits) else load(data, like=task.spec)
    splits = splits.with_validation(recipe.val_share, recipe.data_seed)
    check_fits(task.spec, splits, same_ignore=True)
    if test:
        splits["test"]  # whether there is one should show now, not after an hour
    run = Run(Path(out), team, overwrite) if out is not None else None
    learner = Learner(model, name, recipe)
    began = time.perf_counter()
    with run or contextlib.nullcontext():
        history, unreadable = train(
            model, [learner], splits, recipe,
            run=run, resume=resume, transform=transform, team=team, progress=progress,
        )  # fmt: skip
        metrics = {"val": learner.metrics}
        if test:
            metrics["test"] = evaluate(
                model, splits, name, workers=recipe.workers, transform=transform, team=team,
                progress=lambda done, total: progress("testing", done, total),
            )  # fmt: skip
        seconds = time.perf_counter() - began
        if run is not None and team.main:
            model.save(name, run.out, metrics=metrics, recipe=training_record(recipe, splits))
            run.finish(history)
    model.eval()
    return Result(
        task=name,
        regime=task.spec.regime,
        parameters=sum(p.numel() for p in task.parameters()),
        seconds=seconds,
        metrics=metrics,
        path=None if run is None else run.out,
        unreadable=unreadable,
        history=history,
    )


def training_record(recipe: Recipe, splits: Splits) -> dict[str, Any]:
    """What an engram records of its training: the recipe, the data's name and its size."""
    return {**recipe.to_dict(), "data": splits.name, "train_images": len(splits["train"])}
