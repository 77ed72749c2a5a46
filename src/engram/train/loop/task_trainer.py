"""One task in training: its optimiser, its validation scores, the weights it keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from engram.model import MemoryViT
from engram.train.loop.mixup import Targets
from engram.train.loop.validation import HeldOut, noise
from engram.train.recipe import Recipe, learning_rate
from engram.train.runs.result import Ending

#: By how much the score has to rise, or the loss to fall, for patience to begin anew. A validation
#: loss that creeps down while all answers stay the same is no reason to go on.
_RISE, _FALL = 0.001, 0.02
#: What a checkpoint holds of a trainer, beside tensors.
_STATE = (
    *("best_score", "best_loss", "best_step", "top_score", "enough", "level", "since_best"),
    *("last_step", "metrics", "scale", "since_scaled"),
)


class TaskTrainer:
    """One task in training: its optimiser, its learning rate, the averages and bests it keeps.

    In cross-validation several train for one `trial`: each that has a `fold` never sees its images
    and is measured on them, and the last, which is called like the trial, sees all.
    """

    def __init__(
        self,
        model: MemoryViT,
        name: str,
        recipe: Recipe,
        trial: str = "",
        fold: int | None = None,
    ) -> None:
        self.name, self.recipe = name, recipe
        self.trial = trial or name
        self.fold = fold if name != self.trial else None
        self.task = model.task(name)
        self.lr = learning_rate(recipe, type(self.task.method))
        self.measured_by = self.task.kind.score_with(recipe.balance)
        self.weights: Tensor | None = None  # of the classes, where the recipe balances them so
        self.parameters = list(self.task.parameters())
        common: dict[str, Any] = {"lr": self.lr, "weight_decay": recipe.weight_decay}
        if recipe.optimizer == "adamw":
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.parameters, **common)
        else:
            self.optimizer = torch.optim.SGD(self.parameters, momentum=recipe.momentum, **common)
        self.average = [p.detach().clone() for p in self.parameters] if recipe.ema else None
        self.best: list[Tensor] | None = None
        self.best_score, self.best_loss, self.best_step = -math.inf, math.inf, 0
        self.top_score = self.enough = -math.inf  # the highest score, and what differs by noise
        self.since_best, self.last_step = 0, 0  # validations since it got better; when last asked
        self.level = [-math.inf, math.inf]  # score and loss when each last got clearly better
        self.ending: Ending | None = None
        self.metrics: dict[str, Any] = {}
        self.held_out = HeldOut.joined([])  # its trial's answers for validation images
        self.familiarity: Tensor | None = None  # of these images, once there are statistics
        half = recipe.precision == "fp16"
        self.scale, self.since_scaled = (65536.0 if half else 1.0), 0

    @property
    def done(self) -> bool:
        """Whether patience has run out."""
        return 0 < self.recipe.patience <= self.since_best

    def prepare(self, labels: npt.NDArray[Any]) -> None:
        """Take from the training labels what has to be known of them."""
        kind = self.task.kind
        kind.prepare(self.task.head, labels)
        if self.recipe.balance == "weights":
            device = self.task.head.weight.device
            self.weights = kind.class_weights(labels, len(self.task.spec.classes)).to(device)

    def loss(self, outputs: Tensor, targets: Targets, weights: Tensor | None = None) -> Tensor:
        """The sum over images, times their weights: what parts of a batch add up to."""
        head, smoothing = self.task.head, self.recipe.label_smoothing
        total = outputs.new_zeros((), dtype=torch.float32)
        for labels, share in targets:
            lost = self.task.kind.losses(outputs, labels, head, smoothing, self.weights)
            lost = lost if share is None else lost * share
            total = total + (lost if weights is None else lost * weights).sum()
        return total

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
            new = max(1 - self.recipe.ema, 9 / (10 + step))  # the first steps are forgotten soon
            with torch.no_grad():
                torch._foreach_lerp_(self.average, list[Tensor](self.parameters), new)

    def _unscale(self) -> bool:
        """In fp16 small gradients would vanish, so the loss is scaled; False: by too much."""
        if self.recipe.precision != "fp16":
            return True
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_div_(gradients, self.scale)
        finite = [gradient.isfinite().all() for gradient in gradients]
        if finite and not bool(torch.stack(finite).all()):  # asked of a GPU once a step
            self.scale, self.since_scaled = self.scale / 2, 0
            return False
        self.since_scaled += 1
        if self.since_scaled == 2000:
            self.scale, self.since_scaled = self.scale * 2, 0
        return True

    def measure(self, held_out: HeldOut) -> None:
        """Set the answers of a validation, and their metrics."""
        self.held_out, fitted = held_out, self.task.head.fitted
        self.metrics = self.task.kind.metrics(held_out.pairs, fitted, held_out.failed)

    def calibrate(self) -> None:
        """Divide the logits by the temperature that fits the answers for held-out images.

        Answers and metrics are then the calibrated ones, with the `temperature` and what the
        calibration error was before, `uncalibrated_ece`. Nothing happens where the recipe turned it
        off, where the kind of task has no probabilities, or where it would not help.
        """
        kind, head, held_out, before = self.task.kind, self.task.head, self.held_out, self.metrics
        if self.recipe.calibrate == "off" or not kind.calibrates:
            return
        temperature = kind.temperature(held_out.outputs, held_out.labels)
        if temperature == 1.0:
            return
        head.divide(temperature)
        calibrated = held_out._replace(outputs=held_out.outputs / temperature)
        kind.fit_buffers(head, calibrated.pairs)
        self.measure(calibrated)
        estimated = ("interval", "folds", "held_out", "learned_all", self.measured_by)
        self.metrics |= {name: before[name] for name in estimated}
        self.metrics |= {"uncalibrated_ece": before["ece"], "temperature": temperature}

    @property
    def score(self) -> float:
        """The metric that chooses, as last measured."""
        return float(self.metrics[self.measured_by])

    def record(self, metrics: dict[str, Any], step: int) -> None:
        """Record a validation; a trainer whose patience has run out keeps its best weights.

        The best has the lowest loss among those whose score is the highest, but for noise: one
        image more that is answered right is no reason to prefer weights of an early epoch.
        """
        self.metrics = metrics
        if self.done:
            return
        self.since_best, self.last_step = self.since_best + 1, step
        score, loss = self.score, float(metrics.get("loss", math.inf))
        rises, falls = score > self.level[0] + _RISE, loss < self.level[1] - _FALL
        self.level = [score if rises else self.level[0], loss if falls else self.level[1]]
        if rises or falls:
            self.since_best = 0
        if score > self.top_score:
            images = max(1, int(metrics["images"]))
            margin = max(noise(self.measured_by, metrics), 1.01 / images)
            self.top_score, self.enough = score, score - margin
        if score >= self.enough and (self.best_score < self.enough or loss < self.best_loss):
            self.best_score, self.best_loss, self.best_step = score, loss, step
            if self.recipe.patience:
                self.best = [p.detach().clone() for p in self.parameters]

    def finish(self, steps: int, planned: int, per_epoch: int, interrupted: bool = False) -> None:
        """Leave the task with its final weights, the best or the average, after so many steps."""
        self.swap_average()
        if self.best is not None:
            self._set_weights(self.best)
        steps = self.last_step if self.done else steps
        kept = self.best_step if self.best is not None else steps
        interrupted = interrupted and not self.done
        self.ending = Ending(steps, planned, per_epoch, kept, self.recipe.patience, interrupted)

    def swap_average(self) -> None:
        """Put the averaged weights in the place of the current ones, or back again."""
        if self.average is not None:
            now = [p.detach().clone() for p in self.parameters]
            self._set_weights(self.average)
            self.average = now

    def _set_weights(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, values, strict=True):
                parameter.copy_(value)

    # What a checkpoint needs

    def tensors(self) -> dict[str, Tensor]:
        kept = {f"now.{i}": p.detach() for i, p in enumerate(self.parameters)}
        kept.update({f"fitted.{name}": t for name, t in self.task.head.fitted.items()})
        for what, values in (("average", self.average), ("best", self.best)):
            kept.update({f"{what}.{i}": value for i, value in enumerate(values or ())})
        for i, state in self.optimizer.state_dict()["state"].items():
            kept.update({f"optimizer.{i}.{key}": value for key, value in state.items()})
        return kept

    def restore(self, kept: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        def rows(what: str) -> list[Tensor]:
            return [kept[f"{what}.{i}"].clone() for i in range(len(self.parameters))]

        self._set_weights(rows("now"))
        for name, value in self.task.head.fitted.items():
            value.copy_(kept[f"fitted.{name}"])
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
        return {name: getattr(self, name) for name in _STATE}


def fold_trainers(model: MemoryViT, names: Sequence[str], recipe: Recipe) -> list[TaskTrainer]:
    """Trainers of one trial: a task for every fold, and last the one for all images."""
    return [TaskTrainer(model, name, recipe, names[-1], i) for i, name in enumerate(names)]
