"""Training, readable from top to bottom: `fit` -> `train` -> `Training.go`, and a `Run` beside."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engram.data.datasets import Dataset, Integers, Splits, load
from engram.data.loader import Transform
from engram.data.sources import Arrays, Files, Rows
from engram.errors import EngramError, Interrupted
from engram.images.masks import Legend
from engram.inference.evaluate import evaluate
from engram.model import MemoryViT
from engram.tasks.spec import TaskSpec
from engram.train.feeds import Item, choose
from engram.train.learner import Learner
from engram.train.recipe import Recipe
from engram.train.run import Run
from engram.train.trainable import train_only
from engram.util.processes import Stop, Team, dtype_for, stoppable
from engram.util.progress import Progress, silent


@dataclass(frozen=True)
class Result:
    """What a run gave: its metrics by split, its history, and the engram it wrote."""

    task: str
    regime: str
    parameters: int
    seconds: float
    metrics: Mapping[str, Mapping[str, Any]]
    history: Sequence[Mapping[str, float]]
    path: Path | None = None
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As `engram fit --json` prints it."""
        return {
            "task": self.task,
            "path": None if self.path is None else str(self.path),
            "regime": self.regime,
            "parameters": self.parameters,
            "seconds": round(self.seconds, 2),
            "metrics": {split: dict(values) for split, values in self.metrics.items()},
        }


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
    _check_fits(task.spec, splits)
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
            model.save(name, run.out, metrics=metrics, recipe=told(recipe, splits))
            run.finish(history)
    model.eval()
    parameters = sum(p.numel() for p in task.parameters())
    path = None if run is None else run.out
    return Result(name, task.spec.regime, parameters, seconds, metrics, history, path, unreadable)


def told(recipe: Recipe, splits: Splits) -> dict[str, Any]:
    """What an engram tells of its training: the recipe, what the data is called and its size."""
    return {**recipe.to_dict(), "data": splits.name, "train_images": len(splits["train"])}


def _check_fits(spec: TaskSpec, splits: Splits) -> None:
    noun, count = spec.does.nouns[1], len(spec.classes)
    if spec.kind != splits.kind:
        raise EngramError(
            f"The task {spec.name!r} is of the kind {spec.kind}, and {splits.name} was loaded for "
            f"{splits.kind}; load it with kind={spec.kind!r}."
        )
    if splits.classes != spec.classes:
        raise EngramError(
            f"The task {spec.name!r} has {count} {noun} and {splits.name} has "
            f"{len(splits.classes)}, or in another order; add the task with classes=splits.classes."
        )
    if splits.legend is not None and splits.legend != Legend(spec.values, spec.ignore):
        raise EngramError(
            f"The classes of the task {spec.name!r} are the values {spec.values} in masks and "
            f"{spec.ignore} is ignored, but those of {splits.name} are {splits.legend.values} and "
            f"{splits.legend.ignore}; add the task with **splits.task."
        )


# The loop


def train(
    model: MemoryViT,
    learners: Sequence[Learner],
    splits: Splits,
    recipe: Recipe,
    *,
    run: Run | None = None,
    resume: bool = False,
    transform: Transform | None = None,
    team: Team,
    progress: Progress,
) -> tuple[list[dict[str, float]], dict[str, str]]:
    """Train tasks that cannot interact together, each with its own optimiser: one is enough.

    Gives the history of the run and the pictures that could not be read.
    """
    training = Training(model, learners, splits, recipe, run, transform, team, progress)
    training.begin(resume)
    training.go()
    training.end()
    return training.history, training.unreadable


class Training:
    """Learners on their way through one feed: where they are, and what a checkpoint keeps of it."""

    def __init__(
        self,
        model: MemoryViT,
        learners: Sequence[Learner],
        splits: Splits,
        recipe: Recipe,
        run: Run | None,
        transform: Transform | None,
        team: Team,
        progress: Progress,
    ) -> None:
        self.model, self.learners, self.splits, self.recipe = model, learners, splits, recipe
        self.run, self.team, self.progress = run, team, progress
        self.names = [learner.name for learner in learners]
        self.parameters = [p for learner in learners for p in learner.parameters]
        self.dtype = dtype_for(recipe.precision, team.device)
        model.to(team.device).train()
        train_only(model, *self.names)
        for learner in learners:
            learner.task.kind.prepare(learner.task.head, splits["train"].labels)
        self.feed = choose(model, self.names, splits, recipe, team, transform, progress)
        self.steps = recipe.steps or recipe.epochs * self.feed.per_epoch
        self.every = max(1, self.steps // recipe.evaluations)
        self.identity = identity_of(model, learners, splits, recipe)
        self.fed = [self.feed.cache, self.feed.contents]
        # Where it is
        self.step, self.spent, self.began = 0, 0.0, 0.0
        self.history: list[dict[str, float]] = []
        self.unreadable: dict[str, str] = {}
        self.losses, self.seen = torch.zeros(len(learners), dtype=torch.float64), 0

    @property
    def finished(self) -> bool:
        return self.step >= self.steps or all(learner.done for learner in self.learners)

    # The story

    def begin(self, resume: bool) -> None:
        """Take up an interrupted run, and try a validation: what is wrong should show now."""
        state = None if self.run is None else self.run.begin(self.identity, self.fed, resume)
        if state is not None:
            self._restore(state)
        self._refuse_bad()
        self._validate(batches=2)

    def go(self) -> None:
        """Every step that is left, with validations and checkpoints; Ctrl-C ends it after one."""
        self.began = saved = time.perf_counter()
        with stoppable() as stop:
            for item in self._items():
                asked = self._learn(item, stop)
                if self.step % self.every == 0 or self.step == self.steps:
                    self._evaluate()
                if asked or time.perf_counter() - saved > self.recipe.checkpoint_seconds:
                    self._checkpoint()
                    saved = time.perf_counter()
                if asked and not self.finished:
                    how = " Run the same command with --resume to go on." if self.run else ""
                    raise Interrupted(f"Stopped at step {self.step} of {self.steps}.{how}")

    def end(self) -> None:
        """Leave every learner with the weights that count, averaged or the best, and judged."""
        self._refuse_bad()
        chosen = [learner.choose_weights() for learner in self.learners]
        if any(chosen):
            self._validate(averaged=False)

    # One step

    def _items(self) -> Iterator[Item]:
        """Batches from where it is until it is finished, epoch after epoch."""
        while not self.finished:
            epoch, position = divmod(self.step, self.feed.per_epoch)
            for item in self.feed.epoch(epoch, position):
                yield item
                if self.finished:
                    return

    def _learn(self, item: Item, stop: Stop) -> bool:
        """One update of every learner; gives whether some process was asked to stop."""
        learners, device = self.learners, self.team.device
        lost = torch.zeros(len(learners), device=device)
        scales = torch.tensor([one.scale for one in learners], device=device)
        for inputs, labels in item.split(self.recipe.micro_batch):
            answers = self._logits(inputs)
            labels = labels.to(device)
            each = torch.stack([one.loss(answers[one.name], labels) for one in learners])
            (each * scales).sum().backward()  # type: ignore[no-untyped-call]
            lost += each.detach()
        sums = [float(len(item.labels)), float(item.failed), float(stop.asked), *lost.tolist()]
        count, failed, asked, *sums = _share(self.team, self.parameters, sums)
        self.losses += torch.tensor(sums)
        self.seen += int(count)
        for learner in learners:
            if count:
                learner.step(self.step, self.steps)
            learner.optimizer.zero_grad()
        self.step += 1
        if failed:
            self._refuse_bad()
        note = f"loss {float(self.losses.sum()) / max(1, self.seen):.3f}"
        self.progress("training", self.step, self.steps, note)
        return bool(asked)

    def _logits(self, inputs: Tensor) -> dict[str, Tensor]:
        with torch.autocast(self.team.device.type, self.dtype, self.dtype != torch.float32):
            return self.feed.logits(inputs, self.names)

    # Judging

    def _evaluate(self) -> None:
        """Validate and log; the losses of the history are those since the last time."""
        if not bool(self.losses.isfinite().all()):
            lost = int(self.losses.isfinite().int().argmin())
            raise EngramError(
                f"The loss is not finite at step {self.step} with a learning rate of "
                f"{self.learners[lost].lr:g}; use a lower one."
            )
        self._validate()
        self.history.append(self._line())
        self.losses.zero_()
        self.seen = 0
        if self.run is not None and self.team.main:
            self.run.log(self.history)

    def _validate(self, batches: int | None = None, averaged: bool = True) -> None:
        """Judge all learners on the validation images; on a few batches only as a trial."""
        self.model.eval()
        if averaged:
            for learner in self.learners:
                learner.swap_average()
        answers: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in self.names}
        failed = 0
        with torch.no_grad():
            for item in self.feed.validation(batches):
                failed += item.failed
                for inputs, labels in item.split(self.recipe.micro_batch):
                    for name, values in self._logits(inputs).items():
                        answers[name].append(self.model.task(name).kind.keep(values, labels))
        failed = sum(self.team.gather([failed]))
        if failed:
            self._refuse_bad()
        for learner in self.learners:
            kept = self.team.gather(answers[learner.name])
            if batches is None:
                learner.task.kind.settle(learner.task.head, kept)
            metrics = learner.judge(kept, failed)
            if batches is None:
                learner.judged(metrics)
            if averaged:
                learner.swap_average()
        self.model.train()

    def _line(self) -> dict[str, float]:
        """One row of the history; of several learners, the best."""
        best = max(range(len(self.learners)), key=lambda i: self.learners[i].score)
        learner = self.learners[best]
        metrics, score = learner.metrics, learner.task.kind.score
        return {
            "step": self.step,
            "epoch": round(self.step / self.feed.per_epoch, 3),
            "loss": round(float(self.losses[best] / max(1, self.seen)), 6),
            "lr": self.recipe.rate_at(self.step - 1, self.steps, learner.lr),
            "val_loss": round(metrics.get("loss", math.nan), 6),
            f"val_{score}": metrics[score],
        }

    def _refuse_bad(self) -> None:
        """List what no process could read so far; more than `max_bad` of it is an EngramError."""
        known = len(self.unreadable)
        for shared in self.team.gather([self.feed.bad]):
            self.unreadable.update(shared)
        images = len(self.splits["train"]) + len(self.splits["val"])
        reasons = sorted(self.unreadable.values())
        if self.run is not None and self.team.main and len(reasons) > known:
            self.run.list_unreadable(self.unreadable)
        if len(reasons) > self.recipe.max_bad * images:
            raise EngramError(
                f"{len(reasons)} of {images} images cannot be read, more than max_bad "
                f"({self.recipe.max_bad:.1%}) allows. The first: {reasons[0].rstrip('.')}. Mend or "
                "remove them, or raise max_bad."
            )

    # What a checkpoint needs

    def _checkpoint(self) -> None:
        if self.run is None or not self.team.main:
            return
        tensors = {
            f"{i}.{k}": v for i, one in enumerate(self.learners) for k, v in one.tensors().items()
        }
        self.run.save(
            {**tensors, "losses": self.losses},
            {
                "identity": self.identity,
                "feed": self.fed,
                "step": self.step,
                "seconds": self.spent + time.perf_counter() - self.began,
                "history": self.history,
                "seen": self.seen,
                "unreadable": self.unreadable,
                "learners": [one.about() for one in self.learners],
            },
        )

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.step, self.history, self.spent = state["step"], state["history"], state["seconds"]
        self.losses, self.seen = state["tensors"]["losses"], state["seen"]
        self.unreadable.update(state["unreadable"])
        for i, learner in enumerate(self.learners):
            own, tensors = f"{i}.", state["tensors"]
            kept = {k.removeprefix(own): v for k, v in tensors.items() if k.startswith(own)}
            learner.restore(kept, state["learners"][i])


def _share(team: Team, parameters: Sequence[Tensor], told: list[float]) -> list[float]:
    """Turn sums of gradients into means over the whole batch, of all processes together.

    `told`, the number of images first, is summed over the processes as well.
    """
    if team.world > 1:
        gradients = [
            (p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in parameters
        ]
        head = torch.tensor(told, device=gradients[0].device, dtype=gradients[0].dtype)
        total = team.sum(torch.cat([head, *gradients]))
        told = total[: len(told)].tolist()
        pieces = torch.split(total[len(told) :], [p.numel() for p in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter).clone()
    for parameter in parameters:
        if parameter.grad is not None and told[0]:
            parameter.grad /= told[0]
    return told


# What a run is a run of


def identity_of(
    model: MemoryViT, learners: Sequence[Learner], splits: Splits, recipe: Recipe
) -> str:
    """What a run is a run of: a checkpoint of another one is refused."""
    free = {"evaluations", "checkpoint_seconds", "max_bad", "cache", "cache_gb", "workers"}
    if recipe.patience:  # then the evaluations decide when to stop
        free.remove("evaluations")
    config, preprocessing = model.trunk.config, model.preprocessing
    parents = {parent for one in learners for parent in one.task.spec.extends}
    decides: dict[str, Any] = {
        "trunk": [model.trunk.fingerprint, config.heads, config.activation, config.antialias],
        "preprocessing": preprocessing.to_dict(),
        "parents": {name: model.engram(name).content for name in sorted(parents)},
        "tasks": [
            (repr(o.task.spec), o.lr, o.optimizer.defaults["weight_decay"]) for o in learners
        ],
        "recipe": {k: v for k, v in recipe.to_dict().items() if k not in free},
        "data": [_samples(splits["train"]), _samples(splits["val"])],
    }
    if splits.legend is not None:
        decides["masks"] = [*splits.legend.values, splits.legend.ignore]
    return hashlib.sha256(json.dumps(decides, default=str).encode()).hexdigest()


def _samples(dataset: Dataset) -> list[Any]:
    """What a split holds, as far as that is known without reading every file."""
    masks = [] if dataset.masks is None else _names(dataset.masks, dataset.order)
    return [dataset.labels.tolist(), _names(dataset.rows, dataset.order), masks]


def _names(rows: Rows, order: Integers) -> list[Any]:
    """Names and sizes of files, without the folder they share: a dataset may have been moved.

    Of arrays the content is told, of all else the numbers of the rows.
    """
    if isinstance(rows, Arrays):
        pixels = rows.pixels.contiguous().flatten().view(torch.uint8)
        return [hashlib.sha256(pixels.numpy().data).hexdigest(), *order.tolist()]
    if not isinstance(rows, Files):
        return list(order.tolist())
    paths = [os.path.abspath(path) for path in rows.paths]
    shared = os.path.commonpath(paths)
    return [(paths[row].removeprefix(shared), _size(paths[row])) for row in order]


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:  # it will be listed as unreadable
        return -1
