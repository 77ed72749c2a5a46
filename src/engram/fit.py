"""Training, readable from top to bottom: `fit` -> `train` -> `Learner.step`, and a `Run` beside."""

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

from engram.batches import Transform
from engram.data import Splits, load
from engram.errors import EngramError, Interrupted
from engram.evaluate import evaluate
from engram.feeds import Feed, Item, Progress, choose, silent
from engram.images import Legend
from engram.model import MemoryViT
from engram.recipe import Recipe, learning_rate
from engram.regimes import TaskSpec, train_only
from engram.runs import Run
from engram.team import Team, dtype_for, stoppable


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


class Learner:
    """One task in training: its optimiser, its learning rate, the averages and bests it keeps."""

    def __init__(
        self,
        model: MemoryViT,
        name: str,
        recipe: Recipe,
        lr: float = 0.0,
        decay: float | None = None,
    ) -> None:
        self.name, self.recipe = name, recipe
        self.task = model.task(name)
        self.lr = lr or learning_rate(recipe, self.task.spec.regime)
        self.parameters = list(self.task.parameters())
        decay = recipe.weight_decay if decay is None else decay
        if recipe.optimizer == "adamw":
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                self.parameters, self.lr, weight_decay=decay
            )
        else:
            self.optimizer = torch.optim.SGD(
                self.parameters, self.lr, momentum=recipe.momentum, weight_decay=decay
            )
        self.average = [p.detach().clone() for p in self.parameters] if recipe.ema else None
        self.best: list[Tensor] | None = None
        self.best_score, self.since_best = -math.inf, 0
        self.metrics: dict[str, Any] = {}
        half = recipe.precision == "fp16"
        self.scale, self.since_scaled = (65536.0 if half else 1.0), 0

    @property
    def done(self) -> bool:
        """Whether patience has run out."""
        return 0 < self.recipe.patience <= self.since_best

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum over images: what several processes and parts of a batch add up to."""
        return self.task.kind.loss(logits, labels, self.task.head, self.recipe.label_smoothing)

    def step(self, step: int, steps: int) -> None:
        """Clip, update, average. The gradients are means over the batch by now."""
        if not self._unscale():
            return
        if self.recipe.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate_at(step, steps, self.lr)
        self.optimizer.step()
        if self.average is not None:
            with torch.no_grad():
                torch._foreach_lerp_(
                    self.average, list[Tensor](self.parameters), 1 - self.recipe.ema
                )

    def _unscale(self) -> bool:
        """In fp16 small gradients would vanish, so the loss is scaled; False: by too much."""
        if self.recipe.precision != "fp16":
            return True
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_div_(gradients, self.scale)
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            self.scale, self.since_scaled = self.scale / 2, 0
            return False
        self.since_scaled += 1
        if self.since_scaled == 2000:
            self.scale, self.since_scaled = self.scale * 2, 0
        return True

    def judge(self, kept: Sequence[tuple[Tensor, Tensor]], failed: int) -> dict[str, Any]:
        """The metrics of what `Kind.keep` kept of a validation."""
        return self.task.kind.metrics(kept, self.task.head.settled, failed)

    @property
    def score(self) -> float:
        """The metric that chooses, as last measured."""
        return float(self.metrics[self.task.kind.score])

    def judged(self, metrics: dict[str, Any]) -> None:
        """Take note of a validation; one whose patience has run out keeps its best."""
        self.metrics = metrics
        if self.done:
            return
        self.since_best += 1
        if self.score > self.best_score:
            self.best_score, self.since_best = self.score, 0
            if self.recipe.patience:
                self.best = [p.detach().clone() for p in self.parameters]

    def swap_average(self) -> None:
        """Put the averaged weights in the place of the current ones, or back again."""
        if self.average is not None:
            with torch.no_grad():
                for parameter, average in zip(self.parameters, self.average, strict=True):
                    kept = parameter.clone()
                    parameter.copy_(average)
                    average.copy_(kept)

    # What a checkpoint needs

    def tensors(self) -> dict[str, Tensor]:
        kept = {f"now.{i}": p.detach() for i, p in enumerate(self.parameters)}
        kept.update({f"settled.{name}": t for name, t in self.task.head.settled.items()})
        for what, values in (("average", self.average), ("best", self.best)):
            kept.update({f"{what}.{i}": value for i, value in enumerate(values or ())})
        for i, state in self.optimizer.state_dict()["state"].items():
            kept.update({f"optimizer.{i}.{key}": value for key, value in state.items()})
        return kept

    def restore(self, kept: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        def rows(what: str) -> list[Tensor]:
            return [kept[f"{what}.{i}"].clone() for i in range(len(self.parameters))]

        with torch.no_grad():
            for parameter, value in zip(self.parameters, rows("now"), strict=True):
                parameter.copy_(value)
        for name, value in self.task.head.settled.items():
            value.copy_(kept[f"settled.{name}"])
        if self.average is not None:
            self.average = rows("average")
        self.best = rows("best") if "best.0" in kept else None
        states: dict[int, dict[str, Tensor]] = {}
        for key, value in kept.items():
            what, _, rest = key.partition(".")
            if what == "optimizer":
                i, _, field_name = rest.partition(".")
                states.setdefault(int(i), {})[field_name] = value.clone()
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})
        for name, value in about.items():
            setattr(self, name, value)

    def about(self) -> dict[str, Any]:
        names = ("best_score", "since_best", "metrics", "scale", "since_scaled")
        return {name: getattr(self, name) for name in names}


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
    # Setting up
    dtype = dtype_for(recipe.precision, team.device)
    model.to(team.device).train()
    names = [learner.name for learner in learners]
    train_only(model, *names)
    for learner in learners:
        learner.task.kind.prepare(learner.task.head, splits["train"].labels)
    feed = choose(model, names, splits, recipe, team, transform, progress)
    parameters = [p for learner in learners for p in learner.parameters]
    steps = recipe.steps or recipe.epochs * feed.per_epoch
    every = max(1, steps // recipe.evaluations)
    unreadable: dict[str, str] = {}

    def logits(inputs: Tensor) -> dict[str, Tensor]:
        with torch.autocast(team.device.type, dtype, enabled=dtype != torch.float32):
            return feed.logits(inputs, names)

    def validate(batches: int | None = None) -> None:
        model.eval()
        for learner in learners:
            learner.swap_average()
        answers: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in names}
        failed = 0
        with torch.no_grad():
            for item in feed.validation(batches):
                failed += item.failed
                for inputs, labels in item.split(recipe.micro_batch):
                    for name, values in logits(inputs).items():
                        answers[name].append(model.task(name).kind.keep(values, labels))
        failed = sum(team.gather([failed]))
        if failed:
            refuse_bad()
        for learner in learners:
            kept = team.gather(answers[learner.name])
            if batches is None:
                learner.task.kind.settle(learner.task.head, kept)
            metrics = learner.judge(kept, failed)
            if batches is None:
                learner.judged(metrics)
            learner.swap_average()
        model.train()

    def refuse_bad() -> None:
        known = len(unreadable)
        for shared in team.gather([feed.bad]):
            unreadable.update(shared)
        images, reasons = len(splits["train"]) + len(splits["val"]), sorted(unreadable.values())
        if run is not None and team.main and len(unreadable) > known:
            run.write("unreadable.txt", "".join(f"{reason}\n" for reason in reasons))
        if len(unreadable) > recipe.max_bad * images:
            raise EngramError(
                f"{len(unreadable)} of {images} images cannot be read, more than max_bad "
                f"({recipe.max_bad:.1%}) allows. The first: {reasons[0].rstrip('.')}. Mend or "
                "remove them, or raise max_bad."
            )

    # Where we are
    step, history, spent = 0, [], 0.0
    losses, seen = torch.zeros(len(learners), dtype=torch.float64), 0
    identity = _identity(model, learners, splits, recipe, feed)
    if run is not None:
        state = run.begin(identity, resume)
        if state is not None:
            step, history, spent = state["step"], state["history"], state["seconds"]
            losses, seen = state["tensors"].pop("losses"), state["seen"]
            unreadable.update(state["unreadable"])
            for i, learner in enumerate(learners):
                prefix = f"{i}."
                kept = {
                    k[len(prefix) :]: v for k, v in state["tensors"].items() if k.startswith(prefix)
                }
                learner.restore(kept, state["learners"][i])
    refuse_bad()
    validate(batches=2)  # what is wrong with it should show now, not after an hour

    def checkpoint() -> None:
        if run is not None and team.main:
            tensors = {
                f"{i}.{k}": v for i, one in enumerate(learners) for k, v in one.tensors().items()
            }
            run.save(
                {**tensors, "losses": losses},
                {
                    "identity": identity,
                    "step": step,
                    "seconds": spent + time.perf_counter() - began,
                    "history": history,
                    "seen": seen,
                    "unreadable": unreadable,
                    "learners": [one.about() for one in learners],
                },
            )

    # Training
    began = saved = time.perf_counter()
    epoch = -1
    batches: Iterator[Item] = iter(())
    with stoppable() as stop:
        while step < steps:
            if step // feed.per_epoch != epoch:
                epoch, position = divmod(step, feed.per_epoch)
                batches = feed.epoch(epoch, position)
            item = next(batches)
            lost = torch.zeros(len(learners), device=team.device)
            for inputs, labels in item.split(recipe.micro_batch):
                answers = logits(inputs)
                labels = labels.to(team.device)
                each = torch.stack([one.loss(answers[one.name], labels) for one in learners])
                scales = torch.tensor([one.scale for one in learners], device=team.device)
                (each * scales).sum().backward()  # type: ignore[no-untyped-call]
                lost += each.detach()
            told = [float(len(item.labels)), float(item.failed), float(stop.asked), *lost.tolist()]
            count, failed, asked, *told = _share(team, parameters, told)
            losses += torch.tensor(told)
            seen += int(count)
            for learner in learners:
                if count:
                    learner.step(step, steps)
                learner.optimizer.zero_grad()
            step += 1
            if failed:
                refuse_bad()
            progress("training", step, steps, f"loss {float(losses.sum()) / max(1, seen):.3f}")
            if step % every == 0 or step == steps:
                if not bool(losses.isfinite().all()):
                    raise EngramError(
                        f"The loss is not finite at step {step} with a learning rate of "
                        f"{learners[0].lr:g}; use a lower one."
                    )
                validate()
                history.append(_line(step, feed, learners, losses / max(1, seen), recipe, steps))
                losses.zero_()
                seen = 0
                if run is not None and team.main:
                    run.log(history)
                if all(learner.done for learner in learners):
                    break
            if asked or time.perf_counter() - saved > recipe.checkpoint_seconds:
                checkpoint()
                saved = time.perf_counter()
            if asked and step < steps:
                raise Interrupted(
                    f"Stopped at step {step} of {steps}."
                    + (" Run the same command with --resume to go on." if run is not None else "")
                )
    refuse_bad()
    for learner in learners:
        learner.swap_average()
        if learner.best is not None:
            with torch.no_grad():
                for parameter, value in zip(learner.parameters, learner.best, strict=True):
                    parameter.copy_(value)
    if any(learner.best is not None or learner.average is not None for learner in learners):
        keep = [learner.average for learner in learners]
        for learner in learners:
            learner.average = None
        validate()
        for learner, average in zip(learners, keep, strict=True):
            learner.average = average
    return history, unreadable


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


def _line(
    step: int, feed: Feed, learners: Sequence[Learner], losses: Tensor, recipe: Recipe, steps: int
) -> dict[str, float]:
    """One row of the history; of several learners, the best."""
    best = max(range(len(learners)), key=lambda i: learners[i].score)
    metrics, score = learners[best].metrics, learners[best].task.kind.score
    return {
        "step": step,
        "epoch": round(step / feed.per_epoch, 3),
        "loss": round(float(losses[best]), 6),
        "lr": recipe.rate_at(step - 1, steps, learners[best].lr),
        "val_loss": round(metrics.get("loss", math.nan), 6),
        f"val_{score}": metrics[score],
    }


def _identity(
    model: MemoryViT, learners: Sequence[Learner], splits: Splits, recipe: Recipe, feed: Feed
) -> str:
    """What a run is a run of: a checkpoint of another one is refused."""
    train = splits["train"]
    free = {"evaluations", "checkpoint_seconds", "max_bad", "cache", "cache_gb", "workers"}
    if recipe.patience:  # then the evaluations decide when to stop
        free.remove("evaluations")
    decides: dict[str, Any] = {
        "trunk": model.trunk.fingerprint,
        "tasks": [
            (repr(o.task.spec), o.lr, o.optimizer.defaults["weight_decay"]) for o in learners
        ],
        "recipe": {k: v for k, v in recipe.to_dict().items() if k not in free},
        "feed": feed.about,
        "data": [splits.name, len(train), train.labels.tolist(), len(splits["val"])],
    }
    if splits.legend is not None:
        decides["masks"] = [*splits.legend.values, splits.legend.ignore]
    return hashlib.sha256(json.dumps(decides, default=str).encode()).hexdigest()
