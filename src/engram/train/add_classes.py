"""Teach an existing task new classes from images of these alone: `engram fit --add-classes`.

Features of old images are drawn from the statistics that the old engram kept of them, and the head
is solved for those and for the features of the new images together (`solve.py`). What gives the
features, cells and everything else but the head, stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engram.data.datasets import Splits, check_fits, load
from engram.data.python_data import PythonData
from engram.errors import EngramError, flag
from engram.model import MemoryViT
from engram.store.engram import Engram
from engram.store.format import read_engram
from engram.store.remote import single_engram_path
from engram.tasks.class_statistics import ClassStatistics
from engram.tasks.task import Task
from engram.train.fit import training_record, with_test
from engram.train.heads.columns import Columns
from engram.train.heads.solve import Images, Rows, Solver
from engram.train.loop.image_statistics import keep_statistics
from engram.train.loop.task_trainer import TaskTrainer
from engram.train.loop.training import Training
from engram.train.loop.validation import HeldOut, with_held_out
from engram.train.recipe import Recipe
from engram.train.runs.result import Result
from engram.train.runs.run import Run
from engram.util.processes import ProcessGroup
from engram.util.progress import Progress, silent
from engram.util.text import summarise_names

_TRAIN, _VAL = 1, 2  # seeds of what is drawn
_EACH, _ALL = 200, 50_000  # features that are drawn of an old class, and of all of them
_ROWS = 8_192  # that are in full precision at once
_RESIZED = ("head.weight", "head.bias")  # tensors that depend on the number of classes


def add_classes(
    model: MemoryViT,
    old: str | os.PathLike[str] | Engram,
    data: str | os.PathLike[str] | Splits | PythonData,
    recipe: Recipe | None = None,
    *,
    task: str | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    test: bool = False,
    processes: ProcessGroup | None = None,
    progress: Progress = silent,
) -> Result:
    """Teach a task more classes from images of these alone, and attach it to the model.

    The images of the old classes are not needed: their features are drawn from the statistics that
    the old engram kept of them. Only the head is learned anew; what gives its features stays.

    Args:
        model: The model, with the tasks attached that the old one extends.
        old: The engram of the task, which is not changed. If it is attached to the model, the new
            one takes its place.
        data: Images of new classes, as `fit` takes data.
        recipe: The settings of data, cache and calibration; others do not matter here.
        task: The name of the new task. By default that of the old one.
        out: The engram to write.
        overwrite: Replace an existing engram.
        test: Evaluate the test split, which has new classes only, at the end.
        processes: Those that share the work. By default those of torchrun.
        progress: Called as progress(what, done, total, note) while work goes on.

    Returns:
        The result, as of `fit`. `metrics["val"]` and `metrics["test"]` are about images of the new
        classes among all classes, and `metrics["replay"]` about drawn features of the old ones.

    Raises:
        EngramError: The old task has no statistics or is no classification, a class is there
            already, the name is another task's or the task has children, or the file exists.

    Examples:
        >>> recipe = engram.Recipe(epochs=1, workers=0)
        >>> before = engram.fit(model, "flowers", "photos", recipe, out="two.safetensors")
        >>> daisies = [(torch.rand(3, 32, 32), "daisy") for _ in range(10)]
        >>> after = engram.add_classes(model, "two.safetensors", daisies, recipe)
        >>> model.task("flowers").spec.classes
        ('rose', 'tulip', 'daisy')
    """
    recipe = recipe or Recipe()
    engram = old if isinstance(old, Engram) else read_engram(single_engram_path(old))
    name, known = task or engram.spec.name, len(engram.spec.classes)
    splits = data if isinstance(data, Splits) else load(data, one_class=True)
    splits = with_held_out(with_known_classes(splits, engram), recipe, cross=False, test=test)
    replaces = name in model.tasks and model.engram(name).content == engram.renamed(name).content
    if replaces:
        model.registry.check_removable(name)
    else:
        model.check(replace(engram.spec, name=name))
    run = Run(out, processes or ProcessGroup(), overwrite, test=test, progress=progress)
    scratch = MemoryViT(model.backbone)
    for parent in model.registry.closure(engram.spec.extends):
        scratch.attach(model.engram(parent))
    grown, statistics = _grown(scratch, engram, name, splits)
    check_fits(grown.spec, splits, same_ignore=True)
    with run:
        trainer = TaskTrainer(scratch, name, recipe)
        training = Training(scratch, [trainer], splits, recipe, run)
        training.prepare()
        training.begin("")
        answers = _solve(training, trainer, statistics)
        metrics = _measure(training, trainer, answers, known)
        keep_statistics(training, [trainer], statistics)
        made = scratch.engram(name)
        if replaces:
            model.detach(name)
        model.attach(made)
        result = Result.create(made, metrics=metrics, unreadable=training.unreadable)
        result = with_test(result, model, splits, run, recipe.workers)
        record = training_record(recipe, splits, None, None) | {"grown_from": _lineage(engram)}
        return run.end(model, result, record)


def with_known_classes(splits: Splits, old: Engram) -> Splits:
    """Data of new classes as data of a task that has the old ones too, which come first.

    A task that cannot get more classes, and classes that it has, are an EngramError.
    """
    known, task = old.spec.classes, repr(old.spec.name)
    if old.spec.kind != "classification":
        raise EngramError(
            f"{task} is a task of {old.spec.kind}, and only classification can get more classes; "
            "train it anew with all of them."
        )
    if not old.has_statistics:
        raise EngramError(
            f"The engram of {task} has no statistics of its training images (it was trained "
            f"with {flag('statistics', 'off')}, or held out fewer than ten images), so its classes "
            "would be forgotten; train it once more with its own images, or train a task with the "
            "images of all classes."
        )
    there = [name for name in splits.classes if name in known]
    if there:
        raise EngramError(
            f"{splits.name} has {summarise_names(there)} that {task} knows already; "
            "leave their images out and give those of new classes alone, or train the task anew "
            "with the images of all classes."
        )
    if splits.kind != "classification":
        raise EngramError(
            f"{splits.name} was read for {splits.kind}, and only classification can get more "
            "classes."
        )
    classes = known + tuple(splits.classes)
    renumbered: dict[str, Any] = {
        split: replace(dataset, classes=classes, labels=dataset.labels + len(known))
        for split, dataset in splits.datasets.items()
    }
    return replace(splits, classes=classes, **renumbered)


def _grown(
    model: MemoryViT, old: Engram, name: str, splits: Splits
) -> tuple[Task, ClassStatistics]:
    """A task of the model with all classes and an empty head, and the old one's statistics."""
    before = model.attach(old.renamed(name))
    assert before.statistics is not None
    task = model.swap(replace(before.spec, classes=splits.classes))
    kept = {key: tensor for key, tensor in before.tensors().items() if key not in _RESIZED}
    with torch.no_grad():
        for key, tensor in task.tensors().items():
            tensor.copy_(kept.get(key, tensor))
    return task, before.statistics


def _solve(training: Training, trainer: TaskTrainer, old: ClassStatistics) -> HeldOut:
    """Solve the head; returns its answers for the validation images, and for drawn old ones."""
    training.progress("reading features", 0, 0)
    recipe, processes, task = training.recipe, training.processes, trainer.task
    found = Images.read(training, trainer.name)
    assert found.val is not None  # without folds
    new, val = (_gathered(batches, processes) for batches in (found.train, found.val))
    known = int((old.counts > 0).sum())
    train = _with_drawn(new, old, _TRAIN, min(_EACH, max(20, _ALL // max(1, known))))
    each = max(1, round(len(val[1]) / len(set(val[1].tolist()))))
    held_out = _with_drawn(val, old, _VAL, each)
    own, val_own = (_share(task, images, processes) for images in (train, held_out))
    training.progress("solving", 0, 0)
    images = Images(Columns(task.head.in_features), [own], [val_own])
    solver = Solver(task, images, training.splits, recipe, processes)
    rows = torch.bincount(train[1], minlength=len(task.spec.classes)).float()
    counts = rows / max(
        1, recipe.views
    )  # that a class counts for: drawn ones, as many as the class had
    counts[: len(old.counts)] = old.counts.cpu()
    if recipe.balance != "none":
        counts = torch.ones_like(rows)
    solver.weights = (counts / rows.clamp(min=1)).to(processes.device)
    solution = solver.best((None,))
    solution.put_into(task)
    return solution.answers


def _gathered(batches: Iterable[Rows], processes: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Features and labels of the images of all processes."""
    found = processes.gather([(batch.x, batch.labels) for batch in batches])
    features, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
    return features, labels


def _with_drawn(
    new: tuple[Tensor, Tensor], old: ClassStatistics, seed: int, each: int
) -> tuple[Tensor, Tensor]:
    """Features and labels of new images, and of so many that are drawn of each old class."""
    labels = torch.nonzero(old.counts > 0).flatten().cpu().repeat_interleave(each)
    drawn = old.draw(labels, torch.Generator().manual_seed(seed)).half().cpu()
    return torch.cat([new[0], drawn]), torch.cat([new[1], labels])


def _share(task: Task, images: tuple[Tensor, Tensor], processes: ProcessGroup) -> Rows:
    """This process's share of images: what the last layer of the head is given."""
    own = slice(processes.rank, None, processes.world)
    features, labels, samples = (x[own] for x in (*images, torch.arange(len(images[1]))))
    with torch.no_grad():
        parts = (part.to(task.head.weight) for part in torch.split(features, _ROWS))
        seen = [task.head.hide(part).half().cpu() for part in parts]
    return Rows(torch.cat(seen), labels, samples)


def _measure(
    training: Training, trainer: TaskTrainer, answers: HeldOut, known: int
) -> dict[str, dict[str, Any]]:
    """Calibrate on all of these, and measure the new classes and the old ones by themselves."""
    task, at = trainer.task, 1.0
    logits, labels = answers.outputs, answers.labels
    if training.recipe.calibrate == "on":
        at = task.kind.temperature(logits, labels)
        task.head.divide(at)
    training.measure([trainer])
    metrics = {"val": trainer.metrics}
    if at != 1.0:
        new = labels >= known
        before = task.kind.metrics((logits[new], labels[new]), {})["ece"]
        metrics["val"] |= {"uncalibrated_ece": before, "temperature": at}
    old = labels < known
    return {**metrics, "replay": task.kind.metrics((logits[old] / at, labels[old]), {})}


def _lineage(old: Engram) -> list[dict[str, Any]]:
    """The engrams that this one grew from, the first one first."""
    before = old.recipe.get("grown_from")
    known = {"task": old.spec.name, "content": old.content, "classes": len(old.spec.classes)}
    return [*(before if isinstance(before, list) else []), known]
