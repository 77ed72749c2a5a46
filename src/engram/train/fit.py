"""Train one task and write its engram: `fit` runs a `Training`, or solves a readout."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from engram.data.datasets import Splits, check_fits, load
from engram.data.loader import Transform
from engram.data.overview import find_leaks
from engram.data.python_data import PythonData
from engram.errors import EngramError, flag
from engram.inference.evaluate import answers
from engram.methods import Readout
from engram.methods.method import Needs
from engram.model import MemoryViT
from engram.tasks.task import Task
from engram.tasks.task_settings import TaskSettings
from engram.train.heads.columns import whole_readout
from engram.train.heads.solve import Solver
from engram.train.loop.bank import fill_banks
from engram.train.loop.task_trainer import fold_trainers
from engram.train.loop.training import Training
from engram.train.loop.validation import HeldOut, with_held_out
from engram.train.recipe import Recipe, learning_rate
from engram.train.runs.callbacks import Callback
from engram.train.runs.identity import identity_of
from engram.train.runs.result import Ending, Result
from engram.train.runs.run import ResultT, Run
from engram.train.runs.trackers import run_callbacks, settings_of
from engram.util.processes import ProcessGroup
from engram.util.progress import Progress, silent


def fit(
    model: MemoryViT,
    name: str,
    data: str | os.PathLike[str] | Splits | PythonData,
    recipe: Recipe | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    test: bool = False,
    transform: Transform | None = None,
    processes: ProcessGroup | None = None,
    progress: Progress = silent,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train one task of the model and, with `out`, write it as an engram.

    The run keeps its checkpoint, logs and plots in the folder `NAME.run` next to `out`.

    Args:
        model: The model; only this task's parameters change.
        name: The task to train, added with `add_task`.
        data: A path, a name or a dataset as `engram.data.load` takes it, or what that returned.
        recipe: The training settings; the default recipe if not given.
        out: The engram to write. Without it, the task is trained in memory only.
        resume: Continue an interrupted run; it ends with the same weights.
        overwrite: Replace an existing engram, or give up an interrupted run.
        test: Evaluate the test split once, at the end.
        transform: Prepares an image in place of the model's preprocessing.
        processes: Those that share the work. By default those of torchrun.
        progress: Called as progress(what, done, total, note) while work goes on.
        callbacks: Told how the run goes; see `engram.Callback`.

    Returns:
        The metrics by split, the learning curve and the path of the engram.

    Raises:
        EngramError: The data does not fit the task, the file exists, or the loss diverges.
        Interrupted: The run was stopped by Ctrl-C or SIGTERM, after a checkpoint. After Ctrl-C and
            a first validation, `out` has the weights that were best so far, and the exception's
            `result` is theirs.

    Examples:
        >>> result = engram.fit(model, "flowers", "photos", engram.Recipe(epochs=3))
        >>> accuracy = result.metrics["val"]["accuracy"]
    """
    recipe, task = recipe or Recipe(), model.task(name)
    if task.method.composed:
        raise EngramError(
            f"{name!r} has the regime {task.spec.regime}, which is an average of two tasks that "
            "auto makes; train one of them, or use engram.auto."
        )
    splits = data if isinstance(data, Splits) else load(data, like=task.spec)
    cross = task.method.shares_pass and not task.kind.per_pixel
    splits = with_held_out(splits, recipe, cross, test)
    check_fits(task.spec, splits, same_ignore=True)
    recipe.check_for(task.kind)
    solved = task.method.solved and not task.kind.per_pixel
    if recipe.mixup and solved:
        raise EngramError(
            f"{flag('mixup')} is {recipe.mixup:g}, but {task.spec.regime} is solved from all "
            "images at once, without batches whose images could be mixed; leave it out, or train "
            "another regime."
        )
    run = Run(out, processes or ProcessGroup(), overwrite, resume, test, progress)
    lr = learning_rate(recipe, type(task.method))
    trained = [(task.spec, lr, recipe.weight_decay)]
    identity = f"{identity_of(model, trained, splits, recipe)} test={test}"
    settings = settings_of(model, splits, TaskSettings.from_spec(task.spec), recipe, lr=lr)
    run.callbacks = run_callbacks(callbacks, name, splits, settings, run)
    with run:
        if finished := run.finished(identity, Result):
            result, written = finished
            if written.spec != task.spec:  # validation chose what a readout reads
                task = model.swap(written.spec)
            written.fill(task)
            model.eval()
            return result
        with _with_folds(model, name, splits) as names:
            trainers = fold_trainers(model, names, recipe)
            training = Training(model, trainers, splits, recipe, run)
            training.prepare(transform)
            training.begin(identity)
            rivals: list[HeldOut] = []
            if solved:
                if task.kind.one_class:
                    fill_banks(training, names)
                else:
                    rivals = _solve(training, names)
                trainers = fold_trainers(model, names, recipe)
                training.measure(trainers)
            else:
                training.go()
                training.end()
            training.complete(trainers, rivals)
        trainer = trainers[-1]
        result = Result.create(
            model.eval().engram(name), metrics={"val": trainer.metrics}, ending=trainer.ending,
            unreadable=training.unreadable, history=training.history,
            answers=training.held_out(trainer, name),
        )  # fmt: skip
        result = with_test(result, model, splits, run, recipe.workers, transform)
        record = training_record(recipe, splits, None if solved else trainer.lr, trainer.ending)
        return run.end(model, result, record)


@contextlib.contextmanager
def _with_folds(model: MemoryViT, name: str, splits: Splits) -> Iterator[list[str]]:
    """The task, last, behind copies of it for the folds, which are gone afterwards."""
    count, engram = 0 if splits.folds is None else splits.folds.count, model.engram(name)
    copies = [f"{name[:50]}.fold-{fold}" for fold in range(count)]
    try:
        for copy in copies:
            model.attach(engram.renamed(copy))
        yield [*copies, name]
    finally:
        for copy in copies:
            if copy in model.tasks:
                model.detach(copy)


def _solve(training: Training, names: Sequence[str]) -> list[HeldOut]:
    """Solve tasks of the model, of every fold and the last for all images.

    They then read what the held-out images chose. Returns the answers of all that was tried.
    """
    model, last = training.model, names[-1]
    if Needs.STATISTICS in model.task(last).method.needs:
        _read(model, last, whole_readout(model.backbone))
    solver = Solver.of(training, last)
    solution = solver.best(solver.columns.choices)
    for fold, name in enumerate(names):
        solution.put_into(_read(model, name, solution.reads), fold)
    return [one.answers for one in solution.tried]


def _read(model: MemoryViT, name: str, method: Readout | None) -> Task:
    """Let a readout of the model read these statistics."""
    task = model.task(name)
    if method is None or method == task.method:
        return task
    return model.swap(replace(task.spec, method=method))


def with_test(
    result: ResultT,
    model: MemoryViT,
    splits: Splits,
    run: Run,
    workers: int,
    transform: Transform | None = None,
) -> ResultT:
    """The result with metrics of the test split and the answers for it, if the run measures it.

    Where validation found a temperature, they have the calibration error that the test split would
    have without it.
    """
    if not run.test or run.stopped_at:
        return result
    answered = answers(
        model, splits["test"], result.task,
        workers=workers, transform=transform, processes=run.processes,
        progress=lambda done, total: run.progress("testing", done, total),
    )  # fmt: skip
    metrics = answered.metrics() | answered.without_leaks(find_leaks(splits, "test"))
    temperature = result.metrics.get("val", {}).get("temperature")
    if temperature is not None and len(answered.labels):
        raw = answered.logits * temperature, answered.labels
        metrics["uncalibrated_ece"] = answered.kind.metrics(raw, answered.fitted)["ece"]
    return replace(result, metrics={**result.metrics, "test": metrics}, answers=answered)


def training_record(
    recipe: Recipe, splits: Splits, lr: float | None, ending: Ending | None
) -> dict[str, Any]:
    """Record of a training in an engram: recipe, the data's name and size, how it ended.

    `lr` is the learning rate that was used; a task that was solved has none.
    """
    settings = {**recipe.to_dict(), "lr": lr}
    if not lr:
        del settings["lr"]
    record = {**settings, "data": splits.name, "train_images": len(splits["train"])}
    return record if ending is None else {**record, "training": ending.to_dict()}
