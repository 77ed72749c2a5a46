"""The most promising of many trials: short trainings of all, a whole one of the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engram.data.datasets import Splits
from engram.data.loader import Transform
from engram.model import MemoryViT
from engram.train.heads.solve import Solution
from engram.train.loop.task_trainer import TaskTrainer
from engram.train.loop.trainable import train_only
from engram.train.loop.training import Training
from engram.train.loop.validation import best_of, noise
from engram.train.recipe import Recipe
from engram.train.runs.run import Run

#: Scouts train for a share of the recipe's epochs, but at most for one of the steps: up to the
#: validation that is nearest to it.
_SCOUT_EPOCHS, _SCOUT_STEPS = 1 / 6, 1 / 3
_HOPELESS = 4.0  # times the margin of a tie, below what was solved


@dataclass(eq=False)
class Trial:
    """Tasks that are tried as one: for every fold, and last for all images."""

    trainers: Sequence[TaskTrainer]
    scout: TaskTrainer | None = None  # of what is trained
    waits: bool = False  # until the trial next to it, at another rate, is the best so far
    solution: Solution | None = None  # of what was solved
    lr: float = 0.0  # 0: it was solved
    #: Of held-out images, as last measured.
    metrics: dict[str, Any] = field(default_factory=dict)
    epochs: float = 0.0  # of training, until it was dropped or done
    dropped: bool = False  # before the end of its training

    @property
    def final(self) -> TaskTrainer:
        return self.trainers[-1]

    @property
    def how(self) -> str:
        return "trained" if self.scout else "solved" if self.solution else "averaged"


class Screening(Training):
    """Training of the trial whose scout is the best.

    Every trial first sends a *scout*, which trains for a share of the steps and is measured on one
    fold, or on the validation split. Where the best of them has a neighbour that waits (the next
    learning rate of its regime), that sends its scout, too. Then the trial of the best scout is
    trained from the beginning, on all folds, unless its scout is far behind `to_beat`, a score that
    is there already.
    """

    state = (*Training.state, "scouted", "followed")

    def __init__(
        self, model: MemoryViT, trials: Sequence[Trial], splits: Splits, recipe: Recipe, run: Run
    ) -> None:
        self.trials = {one.scout.name: one for one in trials if one.scout is not None}
        scouts = [one.scout for one in trials if one.scout is not None and not one.waits]
        super().__init__(model, scouts, splits, recipe, run)
        self.scouted: dict[str, dict[str, Any]] = {}  # by scout: its metrics, and the epochs
        self.followed = ""  # the scout whose trial is trained
        self.to_beat = -math.inf

    def prepare(self, transform: Transform | None = None) -> None:
        super().prepare(transform)
        for trainer in self._everyone().values():
            if trainer not in self.trainers:
                trainer.prepare(self.splits["train"].labels)

    def _everyone(self) -> dict[str, TaskTrainer]:
        """Scouts and trainers of all trials, by name."""
        found = {one.name: one for trial in self.trials.values() for one in trial.trainers}
        return found | {name: one.scout for name, one in self.trials.items() if one.scout}

    @property
    def has_answer(self) -> bool:
        solved = self.to_beat > -math.inf
        return solved or (super().has_answer and bool(self.followed))

    def end(self) -> None:
        super().end()
        if not self.followed:  # the round was interrupted, or none of them is worth training
            self._record_scouts()
        for name, one in self.trials.items():
            one.dropped = name != self.followed
            measured = {**one.final.metrics, "epochs": self._epochs}
            one.metrics = self.scouted.get(name, {}) if one.dropped else measured
            one.lr, one.epochs = one.final.lr, one.metrics.get("epochs", 0.0)

    @property
    def _epochs(self) -> float:
        return round((self.step - self.first) / self.per_epoch, 2)

    def _evaluate(self) -> None:
        if self.followed:
            return super()._evaluate()
        if not self._without_diverged():
            return self._end_round()
        super()._evaluate()
        enough = _SCOUT_EPOCHS * self.recipe.epochs * self.per_epoch
        enough = min(enough, _SCOUT_STEPS * (self.steps - self.first)) - self.every / 2
        if self.step - self.first >= enough or all(one.done for one in self.trainers):
            self._record_scouts()
            self._end_round()

    def _without_diverged(self) -> bool:
        """Go on without scouts whose rate is too high; whether there are others."""
        diverged = self._diverged()
        others = [one for one in self.trainers if one not in diverged]
        if not others and not any(self.scouted.values()):
            self._refuse_divergence()
        if diverged and others:
            losses = [self.losses[self.trainers.index(one)] for one in others]
            self._train_only(others)
            self.losses = torch.stack(losses)
        self.scouted.update({one.name: {} for one in diverged})
        return bool(others)

    def _record_scouts(self) -> None:
        for one in self.trainers:
            self.scouted.setdefault(one.name, {**one.metrics, "epochs": self._epochs})

    def _end_round(self) -> None:
        """Send one more scout, or train the trial of the best, or end here."""
        names = [name for name, metrics in self.scouted.items() if metrics]
        metrics = [self.scouted[name] for name in names]
        score = self.trainers[0].measured_by
        best = best_of(score, metrics)
        neighbour = self._waiting_beside(names[best])
        if metrics[best][score] < self.to_beat - _HOPELESS * noise(score, metrics[best]):
            self.steps = self.step
        elif neighbour is not None:
            self._start([neighbour])
        else:
            self.followed = names[best]
            self._start(self.trials[self.followed].trainers)

    def _waiting_beside(self, name: str) -> TaskTrainer | None:
        """The scout of the next lower or higher rate of a scout's regime, if it was not sent."""
        trials = list(self.trials.values())
        own = trials.index(self.trials[name])
        for one in trials[max(0, own - 1) : own + 2]:
            same = one.final.task.spec.regime == trials[own].final.task.spec.regime
            if one.scout is not None and same and one.scout.name not in self.scouted:
                return one.scout
        return None

    def _start(self, trainers: Sequence[TaskTrainer]) -> None:
        """Train these and no others, from the beginning."""
        planned = self.steps - self.first
        self._train_only(trainers)
        self.first, self.steps = self.step, self.step + planned

    def _train_only(self, trainers: Sequence[TaskTrainer]) -> None:
        self._take(trainers)
        train_only(self.model, *self.names)

    def _restore(self, state: Mapping[str, Any]) -> None:
        everyone = self._everyone()
        self._train_only([everyone[name] for name in state["names"]])
        super()._restore(state)
